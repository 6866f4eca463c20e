"""The unit of privacy: what is added or removed, what a draw decides, and whom an epsilon is for.

Every text, figure and check asks this value, so that no two of them differ.
"""

from dataclasses import dataclass
from typing import Literal

Drawn = Literal["record", "person"]


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

    @classmethod
    def of(cls, drawn: str, epsilon: float, unit_epsilon: float | None) -> "Stated":
        """Return whom the figures ``epsilon`` and ``unit_epsilon`` of a plan or a total are for.

        Where people are drawn, both are for a person: without one of their images, a person still
        takes part. Where records are drawn and people are declared, ``unit_epsilon`` is for a
        person, and ``epsilon`` for a single image.

        Args:
            drawn: "record" or "person".
            unit_epsilon: None if no people are declared, or if there is no accounting for them.
        """
        if drawn == "person":
            return cls(True, epsilon if unit_epsilon is None else unit_epsilon, None)
        if unit_epsilon is None:
            return cls(False, epsilon, None)
        return cls(True, unit_epsilon, None if epsilon == unit_epsilon else epsilon)

    @property
    def whom(self) -> str:
        """str: whom the epsilon protects, after "for each"."""
        return "person, with all their images" if self.of_person else "single image"


@dataclass(frozen=True)
class Unit:
    """The unit of privacy of a plan: a record, or a person with all their records."""

    num_records: int
    """Declared number of records."""
    num_people: int | None = None
    """Declared number of people; if None, the unit is the record."""
    max_records: int = 1
    """Bound k on a person's records: of those used in the run, or of those used in a step where
    people are drawn.
    """
    drawn: Drawn = "record"
    """What one coin of a draw decides, and whose gradient is clipped."""

    @property
    def is_person(self) -> bool:
        """bool: whether the guarantee is stated for a person with all their records."""
        return self.num_people is not None

    @property
    def draws_people(self) -> bool:
        """bool: whether people are drawn, so that every epsilon is a person's."""
        return self.drawn == "person"

    @property
    def population(self) -> int:
        """int: declared number of units; N of N x delta."""
        return self.num_records if self.num_people is None else self.num_people

    @property
    def sampled_from(self) -> int:
        """int: declared number of those that are drawn: people, or records."""
        return self.population if self.draws_people else self.num_records

    @property
    def clipped(self) -> int:
        """int: clipped gradients that one unit adds to the sum of a step, at most: k records, or
        one person.
        """
        return 1 if self.draws_people else self.max_records

    @property
    def images_per_draw(self) -> int:
        """int: images in a step of one that is drawn, at most: a record's one, or k of a person."""
        return self.max_records if self.draws_people else 1

    def stated(self, epsilon: float, unit_epsilon: float | None) -> Stated:
        """Return which of a plan's epsilons is stated, and whom it is for."""
        return Stated.of(self.drawn, epsilon, unit_epsilon)

    @property
    def setting(self) -> str:
        """str: name of the setting that declares ``population``."""
        return "num_units" if self.is_person else "dataset_size"

    @property
    def target(self) -> str:
        """str: name of the setting that gives the epsilon of a unit."""
        return "target_unit_epsilon" if self.is_person else "target_epsilon"

    @property
    def images(self) -> str:
        """str: how many images of a person take part, as text."""
        return "one image" if self.max_records == 1 else f"at most {self.max_records} images"

    @property
    def taking_part(self) -> str:
        """str: the same, of each person or in each step."""
        if self.draws_people:
            return f"{self.images} in a step"
        return f"{self.images} of each" if self.max_records == 1 else self.images

    @property
    def several(self) -> str:
        """str: the plural of ``drawn``: records, or people."""
        return "people" if self.draws_people else "records"

    @property
    def protected(self) -> str:
        """str: whom the guarantee is for, in the plural: images, or people."""
        return "people" if self.is_person else "images"
