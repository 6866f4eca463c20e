"""Mistakes with draws and steps: planted, and caught. The ids are those of docs/pitfalls.md,
section "Sampling and steps".
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from made import key, made_sum, released, secrets
from zoo import KEY as STEP_KEY
from zoo import GradientIsImage, image_losses, make_batch

from dpvision.config import RunConfig
from dpvision.config.unit import Unit
from dpvision.dp import clip, clipped
from dpvision.dp.buckets import passes
from dpvision.dp.noise import privatize
from dpvision.privacy import batches, sampling
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.privacy.sampling import derive_rng, draw_poisson
from dpvision.runs.run import Secrets
from dpvision.train import loop, step
from dpvision.train.distributed import Group
from dpvision.train.loop import fit

from .conftest import NewRun
from .planting import assert_refused, planted

pytestmark = pytest.mark.usefixtures("gates_once")

KEY = key()
N, RATE, DRAWS = 400, 0.1, 4000


@pytest.fixture(scope="module")
def poisson(config: RunConfig) -> DPPlan:
    """A Poisson plan of which only the draws and the event are looked at."""
    return draft_plan(
        replace(
            config.privacy,
            sampling="poisson",
            dataset_size=N,
            expected_batch_size=N * RATE,
            steps=DRAWS,
        )
    )


def counts(plan: DPPlan, num_records: int) -> np.ndarray:
    """Which records are in which batch: bool, shape (DRAWS, num_records)."""
    plan, secret, drawn = plan.another_run(), key(), np.zeros((DRAWS, num_records), dtype=bool)
    for number in range(DRAWS):
        drawn[number, plan.draw(number, num_records, derive_rng(secret, number))] = True
    return drawn


def assert_share(successes: float, trials: int, rate: float, message: str) -> None:
    """At five standard errors."""
    assert abs(successes / trials - rate) < 5 * (rate * (1 - rate) / trials) ** 0.5, message


def test_loader_sample_rate(poisson: DPPlan) -> None:
    def check() -> None:
        rate = poisson.event(1).event.sample_rate
        for num_records in (N, N + 4):  # within the 1% by which a store may differ
            drawn = counts(poisson, num_records)
            assert_share(
                drawn.sum(),
                drawn.size,
                rate,
                "records are drawn at another rate than the accounted one",
            )
            # A binomial's variance, whose own standard error is sqrt(2 / draws) of it.
            spread = drawn.sum(1).var() / (num_records * rate * (1 - rate))
            assert abs(spread - 1) < 5 * (2 / DRAWS) ** 0.5, (
                "batch sizes do not vary as Poisson draws do"
            )

    def shuffled(num_records, rate, rng):
        return rng.subset(num_records, round(num_records * rate))

    check()
    with planted(
        sampling,
        "draw_poisson",
        lambda n, rate, rng: draw_poisson(n, 1.05 * rate, rng),
        "another rate than the accounted",
    ):
        check()
    with planted(sampling, "draw_poisson", shuffled, "do not vary as Poisson draws do"):
        check()


def test_shared_coins(poisson: DPPlan, new_run: NewRun, poisson_config: RunConfig) -> None:
    def check_records() -> None:
        drawn = counts(poisson, N)
        correlation = np.corrcoef(drawn.T)[~np.eye(N, dtype=bool)]
        assert np.abs(correlation).max() < 6 / DRAWS**0.5, (
            "two records are decided by the same coin"
        )

    def same_positions_on_every_rank(num_records, rate, rng):
        part = draw_poisson(num_records // 2, rate, rng)
        return np.concatenate([part, part + num_records // 2])

    check_records()
    with planted(
        sampling, "draw_poisson", same_positions_on_every_rank, "decided by the same coin"
    ):
        check_records()

    def check_slices() -> None:
        seen: list[list[int]] = []

        def watch(store, rows, *args, **kwargs):
            seen.append(rows.tolist())
            return iter(())

        with new_run(poisson_config) as session, pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "physical_batches", watch)
            patch.setattr(step, "all_reduce_sum", lambda total, group: total)
            patch.setattr(step, "all_reduce_vector", lambda values, group: values)
            for rank, size in ((0, 1), (0, 2), (1, 2)):
                group = Group(rank, size, torch.device("cpu"))
                step.step_sum(0, replace(session, group=group), KEY)
        whole, first, second = seen
        assert sorted(first + second) == sorted(whole) and len(whole) > 2, (
            "the slices of the ranks do not add up to the draw"
        )

    check_slices()
    with planted(
        step,
        "passes",
        lambda key, ids, count, most, rank, size: passes(key, ids, count, most),
        "slices of the ranks do not add up",
    ):
        check_slices()


def test_one_step_too_many(new_run: NewRun) -> None:
    def check() -> None:
        with new_run() as session:
            fit(session, quiet=True)
            assert session.run.ledger.steps == session.updates == session.plan.steps

    def off_by_one(session):
        return steps_left(session) + 1

    def check_draw() -> None:
        """Even if the ledger let a step too many pass, it could not be drawn."""
        with new_run() as session:
            session.run.ledger.plan = replace(session.plan, steps=session.plan.steps + 1)
            fit(session, quiet=True)
            assert session.updates == session.plan.steps

    steps_left = loop._steps_left
    check()
    with planted(loop, "_steps_left", off_by_one, r"ledger: steps=2; .*The plan is used up"):
        check()
    check_draw()
    with planted(loop, "_steps_left", off_by_one, r"plan.draw: step=2; .*The plan is used up"):
        check_draw()


def test_skipped_empty_batch(new_run: NewRun, poisson_config: RunConfig) -> None:
    rare = replace(
        poisson_config, privacy=replace(poisson_config.privacy, expected_batch_size=1e-6)
    )

    def check() -> None:
        sizes, weights = [], []

        def watch(total, *args, **owners):
            sizes.append(total.num_records)
            return release(total, *args, **owners)

        release = loop.privatize
        with new_run(rare) as session, pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "privatize", watch)
            apply = session.optimizer.step

            def record(gradient, learning_rate):
                weights.append(session.model.mask_token.detach().clone())
                apply(gradient, learning_rate)

            session.optimizer.step = record
            fit(session, quiet=True)
            assert (
                session.run.ledger.steps == session.updates == len(sizes) == rare.privacy.steps
            ), "a step was skipped"
            weights.append(session.model.mask_token.detach().clone())
        assert sizes == [0, 0], "an empty draw was drawn again"
        assert all((after != before).all() for before, after in itertools.pairwise(weights)), (
            "an empty batch was not noised"
        )

    def silent(total, *args, **owners):
        return privatize(total, *args, **owners) if total.num_records else released(total.grads)

    def redrawn(plan, number, num_records, rng):
        index = draw(plan, number, num_records, rng)
        return index if len(index) else np.array([rng.integer(num_records)])

    privatize, draw = loop.privatize, DPPlan.draw
    check()
    with planted(loop, "privatize", silent, "an empty batch was not noised"):
        check()
    with planted(DPPlan, "draw", redrawn, "an empty draw was drawn again"):
        check()


def test_replayed_draws(new_run: NewRun, poisson_config: RunConfig) -> None:
    """Four draws of 40 records at rate 1/2, from two starts: two are the same with probability 6 in
    2^40.
    """

    def check() -> None:
        draws = set()

        def watch(plan, *args):
            index = draw(plan, *args)
            draws.add(tuple(index))
            return index

        draw = DPPlan.draw
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DPPlan, "draw", watch)
            for _ in range(2):
                with new_run(poisson_config) as session:
                    fit(session, quiet=True)
        assert len(draws) == 4, "a batch comes again"

    check()
    with planted(
        loop, "Secrets", lambda *keys: Secrets(*keys) if keys else secrets(), "a batch comes again"
    ):
        check()
    with planted(step, "derive_rng", lambda key, number: derive_rng(key, 0), "a batch comes again"):
        check()


def test_truncation_of_tail(poisson: DPPlan) -> None:
    truncated = replace(
        poisson,
        sampler=sampling.TruncatedPoisson(Unit(N), N * RATE, max_batch_size=round(N * RATE)),
        guarantee="simulated",
        epsilon=None,
        epsilon_rdp=None,
    )

    def check() -> None:
        drawn = counts(truncated, N)
        assert drawn.sum(1).max() <= truncated.sampler.max_batch_size, (
            "a batch is larger than the cap"
        )
        first, last = drawn[:, : N // 4].sum(), drawn[:, -N // 4 :].sum()
        assert abs(first - last) < 5 * (first + last) ** 0.5, (
            "the last records of the store are drawn less often"
        )

    check()
    with planted(
        sampling,
        "truncate",
        lambda index, cap, rng: index[:cap],
        "the last records of the store are drawn less often",
    ):
        check()


def test_record_twice() -> None:
    """One record in two valid rows, or in two physical batches of a step, moves the sum by 2 C."""

    def check() -> None:
        model, batch = GradientIsImage(3, 8, 8), make_batch(2)
        twice = batch._replace(record_id_B=batch.record_id_B[[0, 0]])
        assert_refused(
            lambda: clip.clipped_sum(image_losses, model, twice, STEP_KEY, max_grad_norm=0.1),
            "a record in two rows",
        )
        one = clip.clipped_sum(image_losses, model, batch, STEP_KEY, max_grad_norm=0.1)
        assert_refused(lambda: one + one, "a record in two batches")

    check()
    with planted(clip, "once", np.sort, "a record in two rows was accepted"):
        check()
    with planted(clipped, "once", np.sort, "a record in two batches was accepted"):
        check()


def test_drawn_by_another_plan(config: RunConfig) -> None:
    """Batches of one rate, noise and epsilon of another."""
    asked = replace(config.privacy, sampling="poisson", dataset_size=1000, expected_batch_size=10)
    plan, large = draft_plan(asked), draft_plan(replace(asked, expected_batch_size=500))

    def check() -> None:
        large.another_run().draw(0, 1000, derive_rng(key(), 0))
        total = made_sum({"a": torch.zeros(3)}, 500, 0.5)
        assert_refused(lambda: privatize(total, plan, 0, key()), "a batch of another plan")

    check()
    with planted(DPPlan, "release", lambda *args: None, "a batch of another plan was accepted"):
        check()


def test_epsilon_of_another_plan(config: RunConfig) -> None:
    """``dataclasses.replace`` keeps the epsilon when it lowers the noise."""
    plan = draft_plan(config.privacy)

    def check() -> None:
        low = replace(plan, noise=IndependentGaussian(plan.noise.multiplier / 1000, 0.5))
        total = made_sum({"a": torch.zeros(3)}, 40, 0.5)
        assert_refused(
            lambda: privatize(total, low, 0, key()), "a plan with the epsilon of another"
        )

    check()
    with planted(
        DPPlan, "require_true", lambda plan: None, "a plan with the epsilon of another was accepted"
    ):
        check()


def test_batches_in_turn(config: RunConfig) -> None:
    """Batches of 70 in turn where about 100 are drawn: each record once."""
    asked = replace(config.privacy, sampling="poisson", dataset_size=1000, expected_batch_size=100)

    def check() -> None:
        plan = draft_plan(replace(asked, steps=14)).another_run()

        draws = key()

        def run() -> None:
            for at in range(plan.steps):
                num = min(70, len(plan.draw(at, 1000, derive_rng(draws, at))))
                plan.release(at, num, 70 * at + np.arange(num))

        assert_refused(run, "an epoch in small batches")

    check()
    with planted(batches, "_DEVIATIONS", np.inf, "an epoch in small batches was accepted"):
        check()
