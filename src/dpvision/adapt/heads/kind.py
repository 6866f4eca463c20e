"""The interface of heads: what each kind needs, its defaults that follow from the plan, and how it
is trained. Its settings are in ``config.heads``.

Legend: E row width (``FeatureStream.width``), K classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.release import Releases
from dpvision.config import HeadConfig, OptimConfig, RunConfig
from dpvision.errors import ConfigError
from dpvision.privacy.plan import DPPlan

WIDEST = 8192
"""Feature dimensions beyond which a covariance (D x D in float64, its eigenvectors) is too large
for an ordinary machine.
"""


@dataclass(frozen=True)
class Coordinates:
    """The coordinates that ``feature_covariance`` takes its steps in, from the covariance that it
    released first.
    """

    map_EE: Tensor
    """float32; a row becomes map x."""
    rate: float
    """Learning rate of a step."""
    releases: int
    """Number of releases that measured the covariance."""


@dataclass(frozen=True)
class Progress:
    """Where a sequence of steps stands. All of it is post-processing of releases, so it may be
    saved and published.
    """

    done: int
    """Number of steps in the weights."""
    last_KE: Tensor
    """float32."""
    mean_KE: Tensor
    """Mean of the weights after each step, float64."""
    ema_KE: Tensor | None
    optimizer: dict[str, Tensor]
    coordinates: Coordinates | None = None
    """None if steps are taken on the stream's own rows."""

    @property
    def releases(self) -> int:
        """Number of releases in the weights: the steps, and those that measured the coordinates."""
        return self.done + (0 if self.coordinates is None else self.coordinates.releases)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything but ``done`` by name."""
        found = {
            "last": self.last_KE,
            "mean": self.mean_KE,
            **{f"optimizer/{name}": x for name, x in self.optimizer.items()},
        }
        if self.ema_KE is not None:
            found["ema"] = self.ema_KE
        if (own := self.coordinates) is not None:
            rate, releases = torch.tensor(own.rate, dtype=torch.float64), torch.tensor(own.releases)
            found |= {
                "coordinates/map": own.map_EE,
                "coordinates/rate": rate,
                "coordinates/releases": releases,
            }
        return found

    @classmethod
    def of(cls, releases: int, tensors: dict[str, Tensor]) -> Self:
        """Return the progress with these ``releases`` and ``tensors()``."""
        optimizer = {
            name.removeprefix("optimizer/"): x
            for name, x in tensors.items()
            if name.startswith("optimizer/")
        }
        own, done = None, releases
        if "coordinates/map" in tensors:
            own = Coordinates(
                tensors["coordinates/map"],
                float(tensors["coordinates/rate"]),
                int(tensors["coordinates/releases"]),
            )
            done -= own.releases
        return cls(done, tensors["last"], tensors["mean"], tensors.get("ema"), optimizer, own)


@dataclass(frozen=True)
class Fitted:
    """A trained head and, if the config asks for one, its exponential moving average."""

    head: Head
    ema: Head | None = None
    progress: Progress | None = None
    """What more steps start from; None for heads that cannot go on."""


@dataclass(frozen=True)
class Trained:
    """The heads that one sequence of steps yields. All are released, so choosing among them by a
    public rule costs no privacy.
    """

    last: Head
    average: Head
    """Mean of the weights after each step (algorithm 1)."""
    ema: Head | None
    """Exponential moving average of the weights, or None if ``optim.ema_decay`` is None."""
    progress: Progress
    """What more steps start from."""

    def fitted(self, iterate: str) -> Fitted:
        """Return the head that the setting ``iterate`` names: last, average or ema."""
        head = {"last": self.last, "average": self.average, "ema": self.ema}[iterate]
        assert head is not None, "checked before"
        return Fitted(head, self.ema, self.progress)


AfterStep = Callable[[Callable[[], Trained]], None]
"""Called after each step with a function that returns the heads so far."""


@dataclass(frozen=True)
class Task:
    """All that a head is trained from."""

    stream: FeatureStream
    """With the head's constant."""
    releases: Releases
    """All that are left are made."""
    config: RunConfig
    """Settled: the head has a value for every setting."""
    start: Progress | None = None
    """Steps of an earlier start that this one goes on from; for heads of several steps only."""
    after_step: Callable[[Callable[[], Fitted]], None] = lambda fitted: None
    """Called after each step with a function that returns the head so far; as ``start``."""

    @property
    def settings(self) -> Any:
        """The head's own settings."""
        assert isinstance(self.config.model, HeadConfig)
        return self.config.model.settings


class HeadKind(ABC):
    """One kind of head. Its settings and their defaults are in ``config.heads.HEADS``, under the
    same name.
    """

    name: ClassVar[str]
    fewest_releases: ClassVar[int] = 1
    """From which it can be trained."""
    most_releases: ClassVar[int | None] = None
    squares: ClassVar[bool] = False
    """Whether it needs matrices of D x D numbers in memory."""
    saves_map: ClassVar[bool] = False
    """Whether what more steps start from has such a matrix."""

    @abstractmethod
    def fit(self, task: Task) -> Fitted:
        """Train a head.

        Raises:
            ConfigError: too few releases are left.
            PrivacyError: a release is refused.
        """

    def check(self, config: RunConfig) -> None:
        """Refuse a number of releases, a feature dimension or an average that it cannot have.

        Raises:
            ConfigError: with what to give instead.
        """
        model, steps = config.model, config.privacy.steps
        assert isinstance(model, HeadConfig) and steps is not None, "with_steps"
        if self.most_releases is not None and steps > self.most_releases:
            raise ConfigError(
                f"adapt: steps={steps}; expected {self.most_releases} with head={self.name!r}. "
                "Use transfer.many_steps for more."
            )
        if steps < self.fewest_releases:
            raise ConfigError(
                f"adapt: steps={steps}; expected {self.fewest_releases} or more with "
                f"head={self.name!r}. Give more --privacy.steps."
            )
        if getattr(model.settings, "iterate", "last") == "ema" and config.optim.ema_decay is None:
            raise ConfigError(
                "adapt: optim.ema_decay=None with iterate='ema'; expected a decay in (0, 1). Give "
                "--optim.ema-decay 0.9."
            )
        if self.squares and model.encoder.width > 2 * WIDEST:
            raise ConfigError(
                f"adapt: feature dimension={model.encoder.width} with head={self.name!r}; "
                f"expected at most {2 * WIDEST}, so that a covariance fits into memory. Use "
                "one_step, many_steps or prototypes, or a smaller encoder, such as hog."
            )

    def enough_steps(self, plan: DPPlan, optim: OptimConfig) -> int:
        """Return the number of full-batch steps, from the plan's on, that the head's rules want."""
        return plan.steps

    def frequency_decay(self, plan: DPPlan) -> float:
        """Return the default of ``features.frequency_decay``, for features with frequencies."""
        return 1.0

    def plan_lines(self, config: RunConfig, plan: DPPlan) -> list[str]:
        """Return what to print of the head beside its plan."""
        return []
