"""Which way to take with given images, people, labels, machines and epsilon: public rules, held to
our own experiments (docs/plan.md).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from shlex import quote

from dpvision.config import PrivacyConfig, RunConfig
from dpvision.config.unit import Unit
from dpvision.plan.cost import FEATURE_S, pretraining_hours
from dpvision.plan.evidence import PRETRAINING, Pretraining
from dpvision.plan.head_advice import advise_head
from dpvision.plan.parameters import count_parameters
from dpvision.plan.question import (
    Advice,
    EncoderAtHand,
    Question,
    Way,
    encoder_words,
    warnings_of,
)
from dpvision.privacy.plan import draft_plan
from dpvision.privacy.planner import compare_draws, signal
from dpvision.privacy.printed import up

RecipeOf = Callable[[str], RunConfig]
"""From a recipe's name to its config: recipes belong to the command line, which hands them over."""

IMAGES_PAY_FROM = 2_000_000
"""Images without captions from which a private encoder beat its warm start (ViP paper: 2.8 points).
On a million scenes our three experiments gave +1.8, -0.3 and -1.6 points (docs/log).
"""
CAPTIONS_PAY_FROM = 300_000
"""Captioned images from which a private captioner beat its warm start (docs/log: 1.2 points at
300,000, nothing at 6,000).
"""
LABELS_GIVE_WAY_FROM = 1_000_000
"""Captioned images from which a captioner is recommended although there are labels: its encoder
serves any head afterwards.
"""
STRONGEST_RHO = 0.1
"""A direction that must be stronger than this, in clipping norms, to be found was never found
(docs/log).
"""


def advise(q: Question, recipe_of: RecipeOf, at_hand: EncoderAtHand | None = None) -> Advice:
    """The recommendation for a question.

    Args:
        at_hand: the public encoder, if it was opened.
    """
    if q.labels is not None and not (q.captions and q.images >= LABELS_GIVE_WAY_FROM):
        found = advise_head(q, at_hand)
    else:
        found = _pretraining(q, recipe_of, at_hand)
    if at_hand is None:
        return found
    notes = []
    if at_hand.missing:
        notes.append(
            f"no weights of {at_hand.name} are on this machine, and nothing is downloaded: fetch "
            "them (docs/weights.md), or give a file, timm:NAME@FILE"
        )
    if at_hand.declaration is not None:
        notes.append(
            "the file does not state what it was trained on, so the statement repeats "
            "--public-weights 'NAME; LICENCE; SOURCE': correct licence and source there"
        )
    return replace(found, warnings=(*found.warnings, *notes))


def _pretraining_recipe(q: Question) -> str:
    family = "dpcap" if q.captions else "vip"
    if q.gpus == 0 or q.images < 2_000_000:
        return f"{family}.micro"
    for least, name in ((200_000_000, f"{family}.base"), (20_000_000, f"{family}.base_23m")):
        if q.images >= least:
            return name
    return f"{family}.base_2m"


def _rho(q: Question, name: str, recipe_of: RecipeOf) -> tuple[float, float, int]:
    """(rho_star at the recipe's settings, the least that any settings reach, sample-gradients)."""
    recipe = recipe_of(name)
    plan = draft_plan(_draws(q, recipe.privacy, q.unit))
    figures = signal(plan, count_parameters(recipe.model)) or {}
    return (
        figures.get("rho_star_planned", math.inf),
        figures.get("rho_star", math.inf),
        round(plan.steps * plan.expected_batch_size),
    )


def _draws(q: Question, recipe: PrivacyConfig, unit: Unit) -> PrivacyConfig:
    """The recipe's settings for this question, with draws of ``unit``."""
    return replace(
        recipe,
        dataset_size=unit.num_records,
        noise_multiplier=None,
        delta=None,
        num_units=unit.num_people,
        expected_batch_size=min(recipe.expected_batch_size, float(unit.sampled_from)),
        sampling_unit=unit.drawn,
        max_records_per_unit=unit.max_records,
        target_epsilon=None if unit.is_person else q.epsilon,
        target_unit_epsilon=q.epsilon if unit.is_person else None,
    )


def _pretraining(q: Question, recipe_of: RecipeOf, at_hand: EncoderAtHand | None) -> Advice:
    name = _pretraining_recipe(q)
    rho, limit, gradients = _rho(q, name, recipe_of)
    images = Unit(q.images, q.people, q.images_of_a_person)
    by_image = _draws(q, recipe_of(name).privacy, images)
    draws = compare_draws(by_image, draft_plan(by_image)) if images.is_person else None
    least = CAPTIONS_PAY_FROM if q.captions else IMAGES_PAY_FROM
    recipe = recipe_of(name)
    batch = min(recipe.privacy.expected_batch_size, float(q.images))
    sized = replace(
        recipe, privacy=replace(recipe.privacy, dataset_size=q.images, expected_batch_size=batch)
    )
    hours, how = pretraining_hours(sized, q.gpus, q.device)
    figures = {
        "rho_star_planned": rho,
        "rho_star_limit": limit,
        "sample_gradients": float(gradients),
    }
    ours = sorted(
        (row for row in PRETRAINING if row.captions == q.captions),
        key=lambda row: (
            abs(math.log(row.records / q.images)),
            abs(math.log(row.epsilon / q.epsilon)),
        ),
    )
    evidence = (*map(_told, ours[:3]), _PAPERS[q.captions])
    if q.images < least or rho > STRONGEST_RHO:
        reasons = []
        if q.images < least:
            reasons.append(
                f"{q.images:,} images are below the {least:,} from which private pre-training "
                "was seen to gain"
            )
        if rho > STRONGEST_RHO:
            reasons.append(
                f"a direction must be {rho:.2g} clipping norms strong to be found in the noise, "
                f"and {STRONGEST_RHO:g} never was"
            )
        embed = (
            f"dpvision embed {quote(q.public_encoder or 'patches+scattering')} STORE "
            "confidential/features.npz"
        )
        return Advice(
            "too little data",
            f"{'; '.join(reasons)}. Use a public encoder or baseline features as they are, which "
            "costs no epsilon, and spend it on a head once there are labels.",
            (embed,),
            "the public features' score: private training added nothing measurable",
            None,
            evidence,
            round(q.images * FEATURE_S / 3600, 2),
            "baseline features, two cores, measured",
            figures,
            _more_of_pretraining(q, name, rho, recipe_of),
            warnings_of(q, None),
            draws,
        )
    size = name.partition(".")[2].partition("_")[0]
    start = f"synthetic.{name.partition('.')[0]}_{size}"
    units = ""
    if q.people is not None:
        # At least as little noise as drawing images, and all of a person's images take turns
        # (docs/privacy.md).
        units = f" --privacy.num-units {q.people} --privacy.sampling-unit person"
        if q.people < recipe_of(name).privacy.expected_batch_size:
            units += f" --privacy.expected-batch-size {q.people}"
    target = f"--privacy.{q.unit.target.replace('_', '-')} {q.epsilon}"
    from_public = encoder_words(q, "--init-from", at_hand)
    declared = f"--privacy.dataset-size {q.images} {target}{units} --privacy.delta None"
    continual = q.public_encoder is not None and not q.captions
    chosen = (
        f"vip.continual_{size}" if continual else name
    )  # network and steps are those of ``name``
    train = f"dpvision train {chosen} --data STORE {declared}{from_public} --name private"
    first = () if q.public_encoder else (f"dpvision train {start}",)
    way: Way = "continual training" if q.public_encoder else "private pre-training"
    begin = "public weights" if q.public_encoder else "a warm start on procedural textures"
    begin += (
        f" (vip.continual_public_{size} makes such weights from public images)" if continual else ""
    )
    best = ours[0]
    gain = (
        f"about {best.trained - best.start:+.1f} points over the warm start in our nearest "
        f"experiment ({best.probe})"
        if q.captions
        else "+2.8 points over the warm start in the ViP paper at 2 million images, +5.9 at 233 "
        "million; -1.6 to +1.8 in ours at 1 million"
    )
    return Advice(
        way,
        f"{q.images:,} images{' with captions' if q.captions else ''} and a signal that suffices "
        f"(rho* {rho:.2g}; necessary, not sufficient): "
        f"{'a captioner' if q.captions else 'a masked autoencoder'} from {begin}. Compare with "
        "as much training on textures before you use it.",
        (
            *first,
            train,
            "dpvision evaluate runs/private patches+scattering --train PUBLIC_TRAIN --test "
            "PUBLIC_TEST",
        ),
        f"{gain}; no score on your images can be promised",
        None,
        evidence,
        hours,
        how,
        figures,
        _more_of_pretraining(q, name, rho, recipe_of),
        warnings_of(q, hours),
        draws,
    )


_PAPERS = {
    False: "ViP paper, table 10 (ImageNet, linear probe): warm start 49.8%, private on 2 million "
    "52.6%, on 233 million 55.7%, epsilon 8",
    True: "DP-Cap paper, table 4 (ImageNet, 10-shot): 2.3 / 23 / 233 million pairs 8.1 / 13.3 / "
    "31.8%, epsilon 8",
}


def _told(row: Pretraining) -> str:
    gain = row.trained - row.start
    return (
        f"{row.what}, {row.records:,} records, epsilon {up(row.epsilon)}, rho* "
        f"{row.rho_star:.2g}: {row.trained:.1f} after {row.start:.1f} ({gain:+.1f} points; "
        f"{row.probe}; benchmarks/results/{row.source}.json)"
    )


def _more_of_pretraining(q: Question, name: str, rho: float, recipe_of: RecipeOf) -> dict[str, str]:
    wider = q.with_images(10)
    return {
        "ten times the images": f"rho* {_rho(wider, name, recipe_of)[0]:.2g} in place of "
        f"{rho:.2g} at the same settings",
        "twice the epsilon": "rho* "
        f"{_rho(replace(q, epsilon=q.epsilon * 2), name, recipe_of)[0]:.2g} "
        f"in place of {rho:.2g}",
        "ten times the compute": f"at best rho* {_rho(q, name, recipe_of)[1]:.2g}, "
        "whatever the batch and the steps",
    }
