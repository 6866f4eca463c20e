"""Whom a guarantee's epsilons are for. Every text, card and row asks here, so that no two of them
differ.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stated:
    """The epsilon that is stated, and whom it protects."""

    of_person: bool
    """Whether it is for a person with all their images; otherwise it is for a single image."""
    epsilon: float
    of_image: float | None
    """Beside a person's epsilon, that of a single image, if it is another number; None if there is
    none.
    """


def stated_for(sampling_unit: str, epsilon: float, unit_epsilon: float | None) -> Stated:
    """Return whom the figures ``epsilon`` and ``unit_epsilon`` of a plan, or of a total, are for.

    Where people are drawn, both are for a person: without one of their images, a person still takes
    part. Where records are drawn and people are declared, ``unit_epsilon`` is for a person, and
    ``epsilon`` for a single image.

    Args:
        sampling_unit: "record" or "person", of the plan.
        unit_epsilon: None if no people are declared, or if there is no accounting for them.
    """
    if sampling_unit == "person":
        return Stated(True, epsilon if unit_epsilon is None else unit_epsilon, None)
    if unit_epsilon is None:
        return Stated(False, epsilon, None)
    return Stated(True, unit_epsilon, None if epsilon == unit_epsilon else epsilon)
