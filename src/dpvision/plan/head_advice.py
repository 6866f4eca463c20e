"""Whether a private head is the way to take, and what to expect of it: public rules, held to our
own experiments (docs/plan.md).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpvision.plan.cost import head_hours
from dpvision.plan.evidence import (
    CLASSES,
    DELTAS,
    ENCODER_HEADS,
    HEADS,
    MEASURED_ENCODER,
    NAMES,
    PUBLIC_GAIN,
    RESOLUTION_GAIN,
    ZOOMS_GAIN,
    EncoderResult,
    HeadResult,
)
from dpvision.plan.question import (
    Advice,
    EncoderAtHand,
    Question,
    Way,
    encoder_words,
    warnings_of,
)
from dpvision.privacy import gaussian
from dpvision.privacy.plan import default_delta
from dpvision.privacy.printed import duration, up

FEWEST_OF_A_CLASS = 8
"""Images of a class below which a head on features without weights stayed near chance: pets, 6 of
each, 3 points above it at epsilon 8. With a public encoder they were at 53% (docs/heads.md).
"""
LEAST_ABOVE_CHANCE = 0.2
"""Share of the way from chance to 100% that the easiest of our sets must promise."""


def head_signal(q: Question) -> float:
    """Noise-free size of a mean gradient over its noise, for a head: rows (images, or people) /
    sigma, scaled to ten classes.
    """
    sigma = gaussian.noise_for(q.epsilon, q.delta)
    return q.unit.population / sigma * 10 / (q.labels or 10)


def expected_accuracy(
    data: str,
    strength: float,
    classes: int,
    without: HeadResult | None = None,
    rows: Sequence[HeadResult] = HEADS,
) -> float:
    """Accuracy of a default head on a set like ``data``: interpolated in the logarithm of the
    signal.

    Beyond the strongest signal that was measured it is constant; below the weakest one, what is
    above chance falls with the signal.

    Args:
        strength: ``head_signal``.
        classes: what is interpolated is the share of the way from chance to 100%.
        without: a result to leave out, for the check of the rule.
        rows: the results to interpolate.
    """
    points = sorted(
        (
            head_signal(_question_of(row)),
            (row.accuracy / 100 - 1 / CLASSES[data]) / (1 - 1 / CLASSES[data]),
        )
        for row in rows
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


def advise_head(q: Question, at_hand: EncoderAtHand | None) -> Advice:
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
    few = per_class < FEWEST_OF_A_CLASS and q.public_encoder is None
    weak = high - chance < LEAST_ABOVE_CHANCE * (100 - chance)
    people = ""
    if q.unit.is_person:
        people = (
            f" --privacy.num-units {q.people} --privacy.sampling-unit person "
            f"--privacy.max-records-per-unit {q.images_of_a_person}"
        )
    encoder = encoder_words(q, "--encoder", at_hand)
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
    measured = None if at_hand is None else at_hand.measured
    hours, how = head_hours(
        q.images, q.labels, q.public_encoder is not None, q.gpus, q.device, measured
    )
    shown = (
        f"{low:.0f}% (images as hard as CIFAR-10) to {high:.0f}% (as easy as MedNIST); chance is "
        f"{chance:.1f}%"
    )
    figures = {"head_signal": strength, f"{several}_of_a_class": per_class}
    if few or weak:
        reason = (
            f"{per_class:.3g} {several} of each class; below "
            f"{FEWEST_OF_A_CLASS} a private head on features without weights stayed near chance"
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
            warnings_of(q, hours),
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
        size = None if measured is None else measured[1]
        expected, shown = _with_encoder(q, strength, size, at_hand, shown)
        evidence += _encoder_evidence(strength, size)
    else:
        why = (
            "labels: a private head on features that no private image shaped. On 50,000 "
            "photographs at epsilon 8 it reached 77.0%; the features of a privately trained "
            "encoder reached 55.1% with a head that had no noise (2026-11-22-vip_table)."
        )
        way = "head on baseline features"
        expected = (low, high)
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
        _more_of_head(q, high) | _sizes(q, at_hand),
        warnings_of(q, hours),
    )


def _at_size(size: int | None) -> list[EncoderResult]:
    """Return the results at sizes up to ``size``, whose figures are then a lower bound; none
    without a size.
    """
    return [row for row in ENCODER_HEADS if size is not None and row.image_size <= size]


def _with_encoder(
    q: Question, strength: float, size: int | None, at_hand: EncoderAtHand | None, baseline: str
) -> tuple[tuple[float, float] | None, str]:
    """Return the expected accuracy on the hardest and the easiest set, if this encoder was
    measured, and in words.

    Args:
        size: the encoder's image size in pixels; None if it was not opened.
        baseline: what baseline features would give, in words.
    """
    rows, classes = _at_size(size), q.labels or 10
    if not rows:
        return None, f"not measured for this encoder; baseline features would give {baseline}"

    def expected(data: str) -> float:
        # The better of the sizes, since fewer records were measured at the larger ones.
        sizes = {row.image_size for row in rows if row.data == data}
        return max(
            expected_accuracy(
                data, strength, classes, rows=[row for row in rows if row.image_size == size]
            )
            for size in sizes
        )

    low, high = sorted((expected("cifar10"), expected("eurosat")))
    told = f"{low:.0f}% (images as hard as CIFAR-10) to {high:.0f}% (as easy as EuroSAT)"
    ours = at_hand is not None and "efficientnet_lite0" in at_hand.name
    whose = "" if ours else f"not measured for this encoder; with {MEASURED_ENCODER} "
    pixels = " and ".join(f"{n}" for n in sorted({row.image_size for row in rows}))
    return (
        (low, high) if ours else None,
        f"{whose}{told}, measured at {pixels} px; baseline features would give {baseline}",
    )


def _encoder_evidence(strength: float, size: int | None) -> tuple[str, ...]:
    """Return the three results with the encoder that are nearest in signal."""
    rows = sorted(
        _at_size(size), key=lambda row: abs(math.log(head_signal(_question_of(row)) / strength))
    )[:3]
    return tuple(
        f"{MEASURED_ENCODER} at {row.image_size} px, {NAMES[row.data]}, {row.records:,} images, "
        f"epsilon {up(row.epsilon)}: {row.accuracy:.1f}% (benchmarks/results/{row.source}.json)"
        for row in rows
    )


def _sizes(q: Question, at_hand: EncoderAtHand | None) -> dict[str, str]:
    """Return, for each image size but the default one, what it takes and changes; and what public
    images change.
    """
    if at_hand is None or len(at_hand.sizes) < 2 or q.gpus:
        return {}
    default, default_s = next(iter(at_hand.sizes.items()))
    return {
        f"images of {size} px": f"about {duration(q.images * seconds)} of features in place of "
        f"{duration(q.images * default_s)} at {default} px (--model.encoder.image-size {size}). "
        f"From 96 to 224 px {RESOLUTION_GAIN}"
        for size, seconds in at_hand.sizes.items()
        if size != default
    } | {
        "100 public photographs or more": "as --public-store STORE they standardise the features: "
        f"{PUBLIC_GAIN} (docs/heads.md)"
    }


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
        "ten times the compute": "nothing: the head is limited by noise, and computed in full"
        if q.public_encoder
        else f"{ZOOMS_GAIN}, by --encoder patches+scattering+zooms with three times the work",
    }
