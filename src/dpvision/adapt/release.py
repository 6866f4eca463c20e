"""The one door between private features and a head: charge, draw, clip, sum, add noise, divide.

Every head consists of releases under one plan. A release is ``privatize(sum over records of contributions, plan, step, key)``, each
contribution clipped to norm C = ``plan.max_grad_norm``; the plan draws the records, scales the noise and sets the normalisation
constant. What has several parts (a covariance and cross moments) is one contribution, clipped as a whole. A part that deserves more of the
budget than another gets more releases of the plan, whose average is taken (``Releases.average``): under one Gaussian mechanism, m averaged
releases of the same sum are one with noise smaller by sqrt(m).

Legend: B records of a block.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from dp_accounting import gaussian_mechanism
from torch import Tensor

from dpvision.config import PrivacyConfig
from dpvision.dp.clip import ClippedSum
from dpvision.dp.noise import DPGradient, privatize
from dpvision.dp.rounding import clip_factors, margin, require_exact_products
from dpvision.errors import PrivacyError
from dpvision.privacy.plan import DPPlan, default_delta, make_plan
from dpvision.privacy.sampling import derive_rng
from dpvision.train.distributed import Group, all_reduce_sum

_ALONE = Group(0, 1, torch.device("cpu"))
_ROUNDED_UP = 1 + 1e-9
_MARGIN = margin(torch.float32)
"""Part of C left free for rounding: the lengths of rows are within 6 eps of float32 (``stream``), 14 where a row was shortened and squared;
the residuals, the factor and the products with them round by half a unit each. Sums over records are float64 throughout."""


class Contributions:
    """Clipped sum in the making: sums over records in float64, so that a million of them add up without loss.

    Args:
        plan: names the clip norm and the rule. Without a clip norm (no guarantee) nothing is clipped.
        shapes: shape of each part of a contribution.

    Raises:
        PrivacyError: float32 matrix products are set to run in reduced precision.
    """

    def __init__(self, plan: DPPlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if plan.max_grad_norm is not None:
            require_exact_products("adapt")
        self._plan = plan
        self._totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._norms: list[Tensor] = []

    def factors(self, norm_B: Tensor) -> Tensor:
        """min(1, C (1 - margin) / norm), or C (1 - margin) / (norm + gamma): float32 (B,), for contributions of float64 norms ``norm_B``.

        Call once for every record; a norm that is not finite gives the factor 0, and the caller drops such a record's numbers too.
        """
        self._norms.append(norm_B.float())
        clip_norm, finite_B = self._plan.max_grad_norm, torch.isfinite(norm_B)
        if clip_norm is None:
            return finite_B.float()
        return clip_factors(norm_B, finite_B, max_grad_norm=clip_norm, rule=self._plan.clipping, kept=_MARGIN).float()

    def add(self, name: str, value: Tensor) -> None:
        """Add a block's sum of one part, already clipped: float64, since a block holds thousands of records."""
        assert value.dtype == torch.float64
        self._totals[name] += value

    def sum(self) -> ClippedSum:
        """The sum, secret."""
        norms_B = torch.cat(self._norms) if self._norms else torch.zeros(0)
        return ClippedSum(self._totals, len(norms_B), norms_B, torch.zeros(0), self._plan.max_grad_norm)


BlockT = TypeVar("BlockT", covariant=True)


class Records(Protocol[BlockT]):
    """What releases are made of: ``stream.FeatureStream``, or ``integer_rows.IntegerStream``."""

    @property
    def num_records(self) -> int: ...

    def blocks(self, rows: np.ndarray | None = None) -> Iterator[BlockT]:
        """The valid records, or those among ``rows`` (sorted int64)."""


T = TypeVar("T")
SumOf = Callable[[Iterator[T]], ClippedSum]
"""Blocks of the drawn records -> their clipped sum."""


@dataclass
class Releases:
    """The releases of one head: spends the steps of a plan, each charged before anything of it is computed.

    ``charge`` is ``ledger.append``: it returns the number of the step when the charge is durable. Keys are ``stream.new_key()``, new at
    every start. With several processes all share keys and charged numbers, each sums its slice of the draw, and noise is added to the
    total once, the same on all.
    """

    plan: DPPlan
    charge: Callable[[], int]
    draw_key: bytes = field(repr=False)
    noise_key: bytes = field(repr=False)
    group: Group = _ALONE
    stop: Callable[[], bool] = lambda: False
    """Whether a person has asked to stop: heads of many steps then end with the step that they are in."""
    _next: int = 0

    @property
    def left(self) -> int:
        """Steps of the plan that are not charged yet, as far as this object has seen."""
        return self.plan.steps - self._next

    def release(self, stream: Records[T], sum_of: SumOf[T]) -> tuple[int, DPGradient]:
        """One release.

        Returns:
            Its number in the ledger, and the noisy sum over ``plan.expected_batch_size``: float64, on the CPU.

        Raises:
            PrivacyError: the plan has no further step.
        """
        step = self._charge()
        return step, self._privatize(self._sum(stream, sum_of, step), step)

    def average(self, stream: Records[T], sum_of: SumOf[T], count: int) -> DPGradient:
        """Mean of ``count`` releases of the same function of the records; in full batches the sum is computed once."""
        totals: dict[str, Tensor] = {}
        total: ClippedSum | None = None
        for _ in range(count):
            step = self._charge()
            if total is None or self.plan.sampling != "full_batch":
                total = self._sum(stream, sum_of, step)
            for name, value in self._privatize(total, step).grads.items():
                totals[name] = totals.get(name, 0) + value / count
        return DPGradient(totals)

    def entry_std(self, count: int = 1) -> float:
        """Standard deviation of the noise in each number of ``average(..., count)``; public."""
        return self.plan.noise_std / self.plan.expected_batch_size / math.sqrt(count)

    def _privatize(self, total: ClippedSum, step: int) -> DPGradient:
        return privatize(total, self.plan, step, self.noise_key, owners=self.group, dtype=torch.float64)

    def _charge(self) -> int:
        step = self.charge()
        if not 0 <= step < self.plan.steps:
            raise PrivacyError(f"adapt: step={step}; expected 0 to {self.plan.steps - 1}. The plan is used up: stop.")
        self._next = step + 1
        return step

    def _sum(self, stream: Records[T], sum_of: SumOf[T], step: int) -> ClippedSum:
        drawn: np.ndarray | None = None
        if self.plan.sampling != "full_batch" or self.group.world_size > 1:
            drawn = self.plan.draw(step, stream.num_records, derive_rng(self.draw_key, step))
            drawn = np.array_split(drawn, self.group.world_size)[self.group.rank]
        return all_reduce_sum(sum_of(stream.blocks(drawn)), self.group)


def full_batch_noise(target_epsilon: float, delta: float, steps: int) -> float:
    """Noise multiplier of ``steps`` full-batch releases: sqrt(steps) times that of one analytic Gaussian, within 2e-9 of the smallest."""
    return math.sqrt(steps) * gaussian_mechanism.get_sigma_gaussian(target_epsilon, delta) * _ROUNDED_UP


def full_batch_plan(
    dataset_size: int, target_epsilon: float, *, steps: int = 1, delta: float | None = None, max_grad_norm: float = 1.0
) -> DPPlan:
    """Plan of ``steps`` full-batch releases with the exact noise of the analytic Gaussian mechanism (Balle & Wang 2018).

    T releases are together one Gaussian at noise_multiplier / sqrt(T), so the noise multiplier is sqrt(T) times that of one. Unlike
    ``make_plan`` with a target, which rounds up to four digits, it is within 2e-9 of the smallest that reaches the target.

    Args:
        target_epsilon: more than 0; the plan's epsilon is at most this.
        delta: None for the default, ``privacy.plan.default_delta``.

    Raises:
        PrivacyError, ConfigError: as ``make_plan``.
    """
    asked = PrivacyConfig(
        dataset_size=dataset_size, expected_batch_size=dataset_size, steps=steps, max_grad_norm=max_grad_norm, delta=delta,
        target_epsilon=target_epsilon, sampling="full_batch",
    )  # fmt: skip
    delta = default_delta(dataset_size) if delta is None else delta
    noise = full_batch_noise(target_epsilon, delta, steps)
    return make_plan(replace(asked, target_epsilon=None, noise_multiplier=noise, delta=delta))
