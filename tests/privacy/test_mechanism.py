"""The interfaces of a plan admit more than independent noise that each process draws a share of."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from made import changed, made_sum

from dpvision.config import PrivacyConfig
from dpvision.config.unit import Unit
from dpvision.dp.noise import grid_of, privatize
from dpvision.dp.normals import normals
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy.events import Event, Gaussian
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.sampling import FullBatch, Poisson, Sampler, TruncatedPoisson
from dpvision.privacy.stream import Key, subkey

FULL = PrivacyConfig(
    dataset_size=100, expected_batch_size=100, steps=3, noise_multiplier=4.0, sampling="full_batch"
)
SIZE = 1001


@dataclass(frozen=True)
class Cancelling(IndependentGaussian):
    """A double, for tests only: a step takes back ``share`` of the noise of the step before, as
    banded matrix factorisations do; and the coordinates of a parameter have fixed owners.

    The noise of all steps is A z with A = I - share (one below the diagonal), so that what is
    released is as private as A^-1 (sums) + z: a record that is in every batch moves that by the
    norm of A^-1 applied to ones.
    """

    share: float = 0.5
    cut: int = 300

    def terms(self, step: int) -> tuple[tuple[int, float], ...]:
        std = self.multiplier * (self.max_grad_norm or 0.0)
        return ((step, std), (step - 1, -self.share * std))[: 1 + (step > 0)]

    def std(self, step: int) -> float:
        return math.hypot(*(std for _, std in self.terms(step)))

    def owned(self, size: int, rank: int, world_size: int) -> tuple[int, int]:
        return ((0, self.cut), (self.cut, size))[rank] if world_size == 2 else (0, size)

    def event(self, sampler: Sampler, steps: int, records: int = 1) -> Event:
        assert not sampler.random
        strategy = np.eye(steps) - self.share * np.eye(steps, k=-1)
        moved = float(np.linalg.norm(np.linalg.solve(strategy, np.ones(steps))))
        return Gaussian(self.multiplier / (records * moved))


def correlated() -> DPPlan:
    plan = replace(make_plan(FULL), noise=Cancelling(4.0, 1.0))
    return replace(plan, **dict(plan.epsilons(plan.steps)))


def noise_of(plan: DPPlan, key: Key, owners: Any = None) -> list[torch.Tensor]:
    """What ``privatize`` adds to a sum of zeros in each step."""
    found = []
    for step in range(plan.steps):
        total = changed(made_sum({"a": torch.zeros(SIZE)}), rows=1)
        released = privatize(total, plan, step, key, owners=owners, dtype=torch.float64)
        found.append(released.grads["a"] * plan.expected_batch_size)
    return found


def test_privatize_adds_noise_that_depends_on_the_step_before() -> None:
    plan, secret = correlated(), bytes(range(32))
    z = [
        4.0 * normals(subkey(Key.for_tests(secret), "noise", step=step, parameter="a"), 0, SIZE)
        for step in range(3)
    ]
    expected = [z[0], z[1] - 0.5 * z[0], z[2] - 0.5 * z[1]]
    for step, noise in enumerate(noise_of(plan, Key.for_tests(secret))):
        grid = grid_of(plan.noise.std(step))
        assert np.abs(noise.numpy() - expected[step]).max() <= 0.51 * grid


def test_a_plan_states_the_epsilon_of_its_strategy_and_refuses_that_of_another() -> None:
    plan = correlated()
    plan.require_true()
    # 1, 1.5 and 1.75 are the sums of A^-1's rows.
    moved = math.sqrt(1 + 1.5**2 + 1.75**2)
    assert plan.event(3) == Gaussian(pytest.approx(4.0 / moved))  # type: ignore[arg-type]
    assert plan.epsilon > make_plan(FULL).epsilon  # type: ignore[operator]
    with pytest.raises(PrivacyError, match="but its numbers give"):
        replace(plan, noise=Cancelling(4.0, 1.0, share=0.9)).require_true()


def test_each_process_draws_the_noise_of_the_coordinates_that_it_owns() -> None:
    whole = noise_of(correlated(), Key.for_tests(bytes(32)))
    for rank, (first, stop) in enumerate(((0, 300), (300, SIZE))):
        alone = SimpleNamespace(rank=rank, world_size=2, add_up=lambda values: None)
        for noise, of_all in zip(
            noise_of(correlated(), Key.for_tests(bytes(32)), alone), whole, strict=True
        ):
            assert torch.equal(noise[first:stop], of_all[first:stop])
            assert not noise[:first].any() and not noise[stop:].any()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shares_of_independent_noise_are_disjoint_and_cover_every_parameter(
    world_size: int,
) -> None:
    for size in (0, 1, 5, 1000):
        shares = [
            range(*IndependentGaussian(1.0, 1.0).owned(size, rank, world_size))
            for rank in range(world_size)
        ]
        assert [at for share in shares for at in share] == list(range(size))


def test_a_cap_is_for_truncated_draws_only() -> None:
    for wrong in (
        lambda: Poisson(Unit(100), 10.0, max_batch_size=5),
        lambda: FullBatch(Unit(100), 100.0, max_batch_size=5),
        lambda: TruncatedPoisson(Unit(100), 10.0),
        lambda: DPPlan.from_dict({**make_plan(FULL).to_dict(), "max_batch_size": 5}),
    ):
        with pytest.raises((PrivacyError, ConfigError), match="max_batch_size"):
            wrong()


def test_truncated_draws_have_no_event_of_a_unit() -> None:
    sampler = TruncatedPoisson(Unit(100), 10.0, max_batch_size=30)
    with pytest.raises(PrivacyError, match="no accounting"):
        sampler.event(1.0, 5, records=2)
    assert not sampler.accounts_for_units
