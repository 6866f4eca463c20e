"""What is asked of ``dpvision plan`` about images, and the form of its answer."""

import math
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any, Literal

from dpvision.config.checks import require
from dpvision.config.unit import Drawn, Unit
from dpvision.plan.device_table import find_device
from dpvision.privacy.plan import default_delta
from dpvision.privacy.printed import up

Way = Literal[
    "private pre-training",
    "continual training",
    "head on a public encoder",
    "head on baseline features",
    "too little data",
]


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
class EncoderAtHand:
    """What this machine's copy of the public encoder is."""

    name: str
    """As in tables."""
    sizes: dict[int, float]
    """Seconds an image by image size in pixels, the default size first."""
    declaration: str | None = None
    """Text of --public-weights; None for weights that carry their lineage."""
    missing: bool = False
    """Whether the machine has no weights for it."""

    @property
    def measured(self) -> tuple[float, int] | None:
        """Seconds an image at the default size, and that size; None if nothing was measured."""
        return next(((seconds, size) for size, seconds in self.sizes.items()), None)


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


def encoder_words(q: Question, option: str, at_hand: EncoderAtHand | None) -> str:
    """Return the public encoder as an option of a command, with its declaration."""
    if q.public_encoder is None:
        return ""
    declared = None if at_hand is None else at_hand.declaration
    return f" {option} {quote(q.public_encoder)}" + (
        f" --public-weights {quote(declared)}" if declared else ""
    )


def warnings_of(q: Question, hours: float | None) -> tuple[str, ...]:
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
