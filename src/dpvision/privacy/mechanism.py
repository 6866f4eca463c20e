"""The noise of a run: what a strategy must say of it, and independent Gaussian noise.

    noise of step t = sum over terms (s, std) of std x normals of step s

in which the normals of a step are standard, one for each coordinate, and follow from the run's
noise key and the step (``dp.normals``). Independent noise has one term, its own step's. Noise that
depends on that of earlier steps has several (decision 0041).
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from dpvision.privacy.events import Event
from dpvision.privacy.sampling import Sampler


class Noise(Protocol):
    """A frozen value that says how much noise a step gets, and what the steps then cost."""

    @property
    def multiplier(self) -> float:
        """float: standard deviation of a step's noise / max_grad_norm; 0 without noise."""

    @property
    def max_grad_norm(self) -> float | None:
        """float: clipping norm, the most that a record adds to the sum of a step; None without
        clipping.
        """

    def clipped_to(self, max_grad_norm: float | None) -> "Noise":
        """The same strategy, multiplier and cost, for sums clipped to another norm."""

    def std(self, step: int) -> float:
        """Standard deviation of each coordinate's noise at ``step``."""

    def terms(self, step: int) -> tuple[tuple[int, float], ...]:
        """The noise of ``step``: pairs of a step, not after it, and the standard deviation that its
        normals are scaled to.
        """

    def owned(self, size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Coordinates [first, stop) of a parameter of ``size`` whose noise process ``rank`` draws.
        The ranges of all processes are disjoint and cover it.
        """

    def event(self, sampler: Sampler, steps: int, records: int = 1) -> Event:
        """Event of the first ``steps`` steps, as ``Sampler.event``."""

    def to_dict(self) -> dict[str, Any]:
        """Fields of a plan's flat form."""


@dataclass(frozen=True)
class IndependentGaussian:
    """New noise in every step, and equal shares of every parameter for all processes."""

    multiplier: float
    max_grad_norm: float | None

    def clipped_to(self, max_grad_norm: float | None) -> "IndependentGaussian":
        return replace(self, max_grad_norm=max_grad_norm)

    def std(self, step: int) -> float:
        return self.multiplier * (self.max_grad_norm or 0.0)

    def terms(self, step: int) -> tuple[tuple[int, float], ...]:
        return ((step, self.std(step)),)

    def owned(self, size: int, rank: int, world_size: int) -> tuple[int, int]:
        return size * rank // world_size, size * (rank + 1) // world_size

    def event(self, sampler: Sampler, steps: int, records: int = 1) -> Event:
        return sampler.event(self.multiplier, steps, records)

    def to_dict(self) -> dict[str, Any]:
        return {"noise_multiplier": self.multiplier, "max_grad_norm": self.max_grad_norm}
