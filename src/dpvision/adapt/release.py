"""Releases, the only path from private features to a head: charge, draw, clip, sum, add noise,
divide.

Every head consists of releases under one plan. A release is ``privatize(sum over records of
contributions, plan, step, key)``, each contribution clipped to norm C = ``plan.max_grad_norm``; the
plan draws the records, scales the noise and sets the normalisation constant. A contribution of
several parts (a covariance and cross moments) is clipped as a whole. To give a part more of the
budget, average several releases of it (``Releases.average``): the mean of m Gaussian releases of
the same sum is one release with noise smaller by sqrt(m).

Legend: B records of a block.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpvision.config import PrivacyConfig
from dpvision.dp.clipped import ClippedSum, no_records, once, seal
from dpvision.dp.noise import DPGradient, privatize
from dpvision.dp.rounding import MARGIN, clip_factors, require_exact_products
from dpvision.errors import PrivacyError
from dpvision.privacy import gaussian
from dpvision.privacy.plan import DPPlan, default_delta, make_plan
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.stream import Key
from dpvision.train.distributed import Group, all_reduce_sum

_ALONE = Group(0, 1, torch.device("cpu"))
"""Fraction of C reserved for rounding. Row lengths are within 6 eps of float32
(``feature_stream``), 14 eps for a row that was shortened and squared; the residuals, the factor and
their products each round by half an ulp. Sums over records are float64 throughout.
"""


class Contributions:
    """Accumulate a clipped sum over records in float64, so that a million records add up without
    loss.

    Args:
        plan: gives the clip norm and the clipping rule. Without a clip norm (no guarantee) nothing
            is clipped.
        shapes: shape of each part of a contribution.

    Raises:
        PrivacyError: float32 matrix products are set to run in reduced precision.
    """

    def __init__(self, plan: DPPlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if plan.max_grad_norm is not None:
            require_exact_products("adapt")
        self._plan = plan
        self._totals = {
            name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()
        }
        self._norms: list[Tensor] = []
        self._rows = [no_records()]

    def factors(self, norm_B: Tensor, row_B: np.ndarray) -> Tensor:
        """Return min(1, C (1 - margin) / norm), or C (1 - margin) / (norm + gamma): float32 (B,),
        for float64 norms ``norm_B``.

        Call it once for every record, with its position in the stream: ``sum`` refuses one that
        comes twice. A non-finite norm gives the factor 0; the caller must drop that record's values
        too.
        """
        self._norms.append(norm_B.float())
        self._rows.append(row_B)
        clip_norm, finite_B = self._plan.max_grad_norm, torch.isfinite(norm_B)
        if clip_norm is None:
            return finite_B.float()
        return clip_factors(
            norm_B, finite_B, max_grad_norm=clip_norm, rule=self._plan.clipping, kept=MARGIN
        ).float()

    def add(self, name: str, value: Tensor) -> None:
        """Add a block's clipped sum of one part, in float64 because a block has thousands of
        records.
        """
        assert value.dtype == torch.float64
        self._totals[name] += value

    def sum(self) -> ClippedSum:
        """Return the accumulated sum, which is secret.

        Raises:
            PrivacyError: a record was added twice.
        """
        norms_B = torch.cat(self._norms) if self._norms else torch.zeros(0)
        rows_B = once(np.concatenate(self._rows))
        return seal(
            ClippedSum(
                self._totals,
                len(norms_B),
                norms_B,
                torch.zeros(0),
                self._plan.max_grad_norm,
                rows_B,
            )
        )


BlockT = TypeVar("BlockT", covariant=True)


class Records(Protocol[BlockT]):
    """Records that a release reads: ``FeatureStream`` or ``IntegerStream``."""

    @property
    def num_records(self) -> int: ...

    def blocks(self, rows: np.ndarray | None = None) -> Iterator[BlockT]:
        """Yield the valid records, or those among ``rows`` (sorted int64)."""


T = TypeVar("T")
SumOf = Callable[[Iterator[T]], ClippedSum]
"""From blocks of the drawn records to their clipped sum."""


@dataclass
class Releases:
    """The releases of one head. Each spends one step of the plan, charged before anything of it is
    computed.

    ``charge`` is ``ledger.append``: it returns the number of the step once the charge is durable.
    Keys are new at every start (``new_key()``). Several processes share keys and step numbers; each
    sums its slice of the draw, and the same noise is added once to the total on every process.
    """

    plan: DPPlan
    charge: Callable[[], int]
    draw_key: Key = field(repr=False)
    noise_key: Key = field(repr=False)
    group: Group = _ALONE
    stop: Callable[[], bool] = lambda: False
    """Returns whether the operator asked to stop; heads of many steps then end with the step in
    progress.
    """
    _next: int = 0

    @property
    def left(self) -> int:
        """Number of the plan's steps not yet charged, as far as this object has seen."""
        return self.plan.steps - self._next

    def release(self, stream: Records[T], sum_of: SumOf[T]) -> tuple[int, DPGradient]:
        """Make one release.

        Returns:
            Its step number, and the noisy sum divided by ``plan.expected_batch_size``: float64, on
            the CPU.

        Raises:
            PrivacyError: the plan has no step left.
        """
        step = self._charge()
        return step, self._privatize(self._sum(stream, sum_of, step), step)

    def average(self, stream: Records[T], sum_of: SumOf[T], count: int) -> DPGradient:
        """Return the mean of ``count`` releases of the same sum. With full batches the sum is
        computed once.
        """
        totals: dict[str, Tensor] = {}
        total: ClippedSum | None = None
        for _ in range(count):
            step = self._charge()
            if total is None or self.plan.sampler.random:
                total = self._sum(stream, sum_of, step)
            for name, value in self._privatize(total, step).grads.items():
                totals[name] = totals.get(name, 0) + value / count
        return seal(DPGradient(totals))

    def entry_std(self, count: int = 1) -> float:
        """Return the standard deviation of the noise in each entry of ``average(..., count)``;
        public.
        """
        return self.plan.noise_std / self.plan.expected_batch_size / math.sqrt(count)

    def _privatize(self, total: ClippedSum, step: int) -> DPGradient:
        return privatize(
            total, self.plan, step, self.noise_key, owners=self.group, dtype=torch.float64
        )

    def _charge(self) -> int:
        step = self.charge()
        if not 0 <= step < self.plan.steps:
            raise PrivacyError(
                f"adapt: step={step}; expected 0 to {self.plan.steps - 1}. The plan is used up: "
                "start a new run."
            )
        self._next = step + 1
        return step

    def _sum(self, stream: Records[T], sum_of: SumOf[T], step: int) -> ClippedSum:
        drawn: np.ndarray | None = None
        if self.plan.sampler.random or self.group.world_size > 1:
            drawn = self.plan.draw(step, stream.num_records, derive_rng(self.draw_key, step))
            drawn = np.array_split(drawn, self.group.world_size)[self.group.rank]
        return all_reduce_sum(sum_of(stream.blocks(drawn)), self.group)


def full_batch_plan(
    dataset_size: int,
    target_epsilon: float,
    *,
    steps: int = 1,
    delta: float | None = None,
    max_grad_norm: float = 1.0,
) -> DPPlan:
    """Return a plan of ``steps`` full-batch releases with the exact noise of the analytic Gaussian
    mechanism (Balle & Wang 2018).

    T releases compose to one Gaussian at noise_multiplier / sqrt(T), so T releases need sqrt(T)
    times the noise multiplier of one. ``make_plan`` with a target rounds up to five digits; this
    noise multiplier is within 2e-9 of the smallest that reaches the target.

    Args:
        target_epsilon: positive; the plan's epsilon is at most this.
        delta: if None, ``privacy.plan.default_delta``.

    Raises:
        PrivacyError, ConfigError: as ``make_plan``.
    """
    asked = PrivacyConfig(
        dataset_size=dataset_size,
        expected_batch_size=dataset_size,
        steps=steps,
        max_grad_norm=max_grad_norm,
        delta=delta,
        target_epsilon=target_epsilon,
        sampling="full_batch",
    )
    delta = default_delta(dataset_size) if delta is None else delta
    noise = gaussian.full_batch_noise(target_epsilon, delta, steps)
    return make_plan(replace(asked, target_epsilon=None, noise_multiplier=noise, delta=delta))
