"""Which way to take with given images, people, labels, machines and epsilon: public rules, held to
our own experiments (docs/plan.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dpvision.config import PrivacyConfig, RunConfig
from dpvision.config.checks import require
from dpvision.config.unit import Drawn, Unit
from dpvision.plan.cost import FEATURE_S, head_hours, pretraining_hours
from dpvision.plan.device_table import find_device
from dpvision.plan.evidence import (
    CLASSES,
    DELTAS,
    HEADS,
    NAMES,
    PRETRAINING,
    HeadResult,
    Pretraining,
)
from dpvision.plan.parameters import count_parameters
from dpvision.privacy import gaussian
from dpvision.privacy.plan import default_delta, draft_plan
from dpvision.privacy.planner import compare_draws, signal
from dpvision.privacy.printed import up

RecipeOf = Callable[[str], RunConfig]
"""From a recipe's name to its config: recipes belong to the command line, which hands them over."""
Way = Literal[
    "private pre-training",
    "continual training",
    "head on a public encoder",
    "head on baseline features",
    "too little data",
]

FEWEST_OF_A_CLASS = 8
"""Images of a class below which a head stayed near chance: pets, 6 of each, 3 points above it at
epsilon 8 (docs/heads.md).
"""
LEAST_ABOVE_CHANCE = 0.2
"""Share of the way from chance to 100% that the easiest of our sets must promise."""
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


@dataclass(frozen=True)
class Question:
    """What is given. All numbers are public declarations."""

    images: int
    epsilon: float
    people: int | None = None
    labels: int | None = None
    """Number of classes; None: no labels."""
    captions: bool = False
    public_encoder: str | None = None
    """An encoder trained on public images, as `dpvision adapt --encoder` takes it."""
    gpus: int = 0
    device: str | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        for name, holds, rule, remedy in (
            ("images", self.images >= 1, "at least 1", "Declare the number of images."),
            ("epsilon", 0 < self.epsilon < math.inf, "a positive number", "Typical: 1 to 8."),
            (
                "people",
                self.people is None or 1 <= self.people <= self.images,
                f"between 1 and --images {self.images}",
                "Every person has at least one image: correct one of them.",
            ),
            (
                "labels",
                self.labels is None or self.labels >= 2,
                "at least 2 classes",
                "Leave it out if there are no labels.",
            ),
            ("gpus", self.gpus >= 0, "0 or more", "0 means processor only."),
            (
                "hours",
                self.hours is None or 0 < self.hours < math.inf,
                "a positive number",
                "Leave it out for no limit.",
            ),
        ):
            require(holds, "plan", name, getattr(self, name), rule, remedy)
        if self.device is not None:
            find_device(self.device)

    @property
    def images_of_a_person(self) -> int:
        """Images of one person that take part, at most, if all do and people have equally many."""
        return 1 if self.people is None else math.ceil(self.images / self.people)

    @property
    def delta(self) -> float:
        """The default for those whom the guarantee is for."""
        return default_delta(self.unit.population)

    @property
    def unit(self) -> Unit:
        """Unit: people are drawn, one image of each; without people, images."""
        drawn: Drawn = "record" if self.people is None else "person"
        return Unit(self.images, self.people, 1, drawn)

    def with_images(self, factor: int) -> "Question":
        """Return the question for ``factor`` times the images, and the people."""
        people = None if self.people is None else self.people * factor
        return replace(self, images=self.images * factor, people=people)


@dataclass(frozen=True)
class Advice:
    """The way to take, with its reasons."""

    way: Way
    why: str
    commands: tuple[str, ...]
    score: str
    """What to expect, in words; with figures only where an experiment has them."""
    expected: tuple[float, float] | None
    """Accuracy in percent on our hardest and easiest set at this signal; None without a comparable
    experiment.
    """
    evidence: tuple[str, ...]
    hours: float | None
    hours_how: str
    signal: dict[str, float]
    more: dict[str, str] = field(default_factory=dict)
    """What ten times the data, ten times the compute and twice the epsilon would change."""
    warnings: tuple[str, ...] = ()
    draws: list[dict[str, Any]] | None = None
    """Drawing images against drawing people (``planner.compare_draws``), for pre-training on images
    of declared people.
    """


def advise(q: Question, recipe_of: RecipeOf) -> Advice:
    """The recommendation for a question."""
    if q.labels is not None and not (q.captions and q.images >= LABELS_GIVE_WAY_FROM):
        return _head(q)
    return _pretraining(q, recipe_of)


def head_signal(q: Question) -> float:
    """Noise-free size of a mean gradient over its noise, for a head: rows (images, or people) /
    sigma, scaled to ten classes.
    """
    sigma = gaussian.noise_for(q.epsilon, q.delta)
    return q.unit.population / sigma * 10 / (q.labels or 10)


def expected_accuracy(
    data: str, strength: float, classes: int, without: HeadResult | None = None
) -> float:
    """Accuracy of a default head on a set like ``data``: interpolated in the logarithm of the
    signal.

    Beyond the strongest signal that was measured it is constant; below the weakest one, what is
    above chance falls with the signal.

    Args:
        strength: ``head_signal``.
        classes: what is interpolated is the share of the way from chance to 100%.
        without: a result to leave out, for the check of the rule.
    """
    points = sorted(
        (
            head_signal(_question_of(row)),
            (row.accuracy / 100 - 1 / CLASSES[data]) / (1 - 1 / CLASSES[data]),
        )
        for row in HEADS
        if row.data == data and row != without
    )
    above = float(
        np.interp(math.log(strength), [math.log(x) for x, _ in points], [y for _, y in points])
    )
    above *= min(1.0, strength / points[0][0])
    return 100 * (1 / classes + (1 - 1 / classes) * max(above, 0.0))


def _question_of(row: HeadResult) -> Question:
    # Where delta was not the default, the number of images that makes it so stands in: only sigma
    # depends on it.
    delta = DELTAS.get((row.data, row.records), default_delta(row.records))
    same = Question(row.records, row.epsilon, labels=CLASSES[row.data])
    if delta == same.delta:
        return same
    sigma = [gaussian.noise_for(row.epsilon, d) for d in (delta, same.delta)]
    return replace(same, images=round(row.records * sigma[1] / sigma[0]))


def _head(q: Question) -> Advice:
    assert q.labels is not None
    strength = head_signal(q)
    low, high = sorted(
        (
            expected_accuracy("cifar10", strength, q.labels),
            expected_accuracy("mednist", strength, q.labels),
        )
    )
    chance = 100 / q.labels
    per_class, several = q.unit.population / q.labels, q.unit.protected
    few = per_class < FEWEST_OF_A_CLASS
    weak = high - chance < LEAST_ABOVE_CHANCE * (100 - chance)
    people = ""
    if q.unit.is_person:
        people = (
            f" --privacy.num-units {q.people} --privacy.sampling-unit person "
            f"--privacy.max-records-per-unit {q.images_of_a_person}"
        )
    encoder = f" --encoder {q.public_encoder}" if q.public_encoder else ""
    declared = f"--num-classes {q.labels} --dataset-size {q.images} --epsilon {q.epsilon}"
    command = f"dpvision adapt --data STORE {declared}{people}{encoder} --name head"
    commands = (f"{command} --dry-run", command, "dpvision evaluate runs/head --test TEST_STORE")
    nearest = sorted(
        (row for row in HEADS if row.data != "pets_sample"),
        key=lambda row: abs(math.log(head_signal(_question_of(row)) / strength)),
    )[:3]
    evidence = tuple(
        f"{NAMES[row.data]}, {row.records:,} images, epsilon {up(row.epsilon)}: "
        f"{row.accuracy:.1f}% (benchmarks/results/{row.source}.json)"
        for row in nearest
    )
    hours, how = head_hours(q.images, q.labels, q.public_encoder is not None, q.gpus, q.device)
    shown = (
        f"{low:.0f}% (images as hard as CIFAR-10) to {high:.0f}% (as easy as MedNIST); chance is "
        f"{chance:.1f}%"
    )
    figures = {"head_signal": strength, f"{several}_of_a_class": per_class}
    if few or weak:
        reason = (
            f"{per_class:.3g} {several} of each class; below "
            f"{FEWEST_OF_A_CLASS} a private head stayed near chance"
            if few
            else f"at epsilon {up(q.epsilon)} the noise hides the classes even of images as easy "
            "as MedNIST"
        )
        return Advice(
            "too little data",
            f"{reason}. Gather images, merge classes, or use a public classifier as it is.",
            commands[:1],
            f"near chance, {chance:.1f}%",
            None,
            evidence,
            hours,
            how,
            figures,
            _more_of_head(q, high),
            _warnings(q, hours),
        )
    if q.public_encoder:
        why = (
            "labels and a public encoder: a private head spends all of epsilon where the labels "
            "are. Which features are better, the encoder's or the default ones, depends on what "
            "it saw: compare both on public images like yours (`dpvision evaluate`)."
        )
        way: Way = "head on a public encoder"
        evidence += (
            "DP transfer paper, table 3: last layer of ViT-H/14, 1.28 million images, epsilon "
            "10: 80.0% (docs/transfer.md)",
        )
        shown = f"not measured for this encoder; baseline features would give {shown}"
    else:
        why = (
            "labels: a private head on features that no private image shaped. On 50,000 "
            "photographs at epsilon 8 it reached 77.0%; the features of a privately trained "
            "encoder reached 55.1% with a head that had no noise (2026-11-22-vip_table)."
        )
        way = "head on baseline features"
    expected = None if q.public_encoder else (low, high)
    return Advice(
        way,
        why,
        commands,
        shown,
        expected,
        evidence,
        hours,
        how,
        figures,
        _more_of_head(q, high),
        _warnings(q, hours),
    )


def _more_of_head(q: Question, high: float) -> dict[str, str]:
    assert q.labels is not None

    def spread(other: Question) -> str:
        at = head_signal(other)
        return " to ".join(
            f"{v:.0f}%"
            for v in sorted(
                expected_accuracy(d, at, q.labels or 10) for d in ("cifar10", "mednist")
            )
        )

    return {
        "ten times the images": spread(q.with_images(10)),
        "twice the epsilon": spread(replace(q, epsilon=q.epsilon * 2)),
        "ten times the compute": "nothing: the head is limited by noise, and computed in full",
    }


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


def _pretraining(q: Question, recipe_of: RecipeOf) -> Advice:
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
            f"dpvision embed {q.public_encoder or 'patches+scattering'} STORE "
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
            _warnings(q, None),
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
    from_public = f" --init-from {q.public_encoder}" if q.public_encoder else ""
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
        _warnings(q, hours),
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


def _warnings(q: Question, hours: float | None) -> tuple[str, ...]:
    """Notes on time and guarantee."""
    found = []
    if q.hours is not None and hours is not None and hours > q.hours:
        found.append(
            f"about {hours:.3g} hours are needed and {q.hours:g} are there: use a smaller model, "
            "fewer images or more devices"
        )
    if q.epsilon > 10:
        found.append(f"epsilon {up(q.epsilon)} is a weak guarantee; above 20 training is refused")
    return tuple(found)
