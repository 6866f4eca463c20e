"""The noise of a head's releases: its multiplier, its scale, its independence; charged before
anything is computed.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import gaussian_mechanism
from feature_sets import KEYS, no_noise, private, releases_of, stream_of
from made import key
from scipy import optimize, stats

from dpvision.adapt import release as release_module
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import gradient_sum, sum_at_zero
from dpvision.adapt.heads.least_squares import least_squares
from dpvision.adapt.heads.prototypes import prototypes
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.moments import moment_of, moment_sum, noise_edge
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.config import PrivacyConfig
from dpvision.data.synthetic_store import write_scenes
from dpvision.dp.clip import ClippedSum
from dpvision.dp.noise import privatize
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy.ledger import Ledger, read_ledger
from dpvision.privacy.plan import make_plan
from dpvision.train.distributed import Group

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)


def bisected_noise(epsilon: float, delta: float) -> float:
    """Balle & Wang 2018, theorem 8: the smallest s with Phi(1/2s - e s) - exp(e) Phi(-1/2s - e s)
    <= delta.
    """

    def excess(s: float) -> float:
        a, b = 1 / (2 * s), epsilon * s
        return (
            math.exp(stats.norm.logcdf(a - b))
            - math.exp(epsilon + stats.norm.logcdf(-a - b))
            - delta
        )

    return float(optimize.bisect(excess, 1e-2, 1e2, xtol=1e-13, rtol=1e-13))


@pytest.mark.parametrize("delta", [1e-6, 8e-7])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_one_step_has_the_noise_of_the_analytic_gaussian_mechanism(
    epsilon: float, delta: float
) -> None:
    plan = full_batch_plan(1_000_000, epsilon, delta=delta)
    assert plan.noise.multiplier == pytest.approx(
        gaussian_mechanism.get_sigma_gaussian(epsilon, delta), rel=1e-6
    )
    assert plan.noise.multiplier == pytest.approx(bisected_noise(epsilon, delta), rel=1e-6)
    assert plan.epsilon is not None and epsilon * (1 - 1e-6) < plan.epsilon <= epsilon


def test_many_releases_share_the_budget_of_one() -> None:
    for steps in (2, 16, 100):
        plan = full_batch_plan(50_000, 2.0, steps=steps)
        assert plan.noise.multiplier == pytest.approx(
            math.sqrt(steps) * bisected_noise(2.0, 1e-5), rel=1e-6
        )
        assert plan.spent(steps).epsilon == plan.epsilon <= 2.0  # type: ignore[operator]


def test_targets_out_of_range_are_refused() -> None:
    for epsilon in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="target_epsilon"):
            full_batch_plan(100, epsilon)
    with pytest.raises(ConfigError, match="steps"):
        full_batch_plan(100, 1.0, steps=0)
    with pytest.raises(PrivacyError, match="delta"):
        full_batch_plan(100, 1.0, delta=0.5)


def nothing(width: int = 30, num_classes: int = 20) -> FeatureStream:
    """No records: what is released of them is noise alone."""
    return FeatureStream(
        np.zeros((0, width), dtype=np.float32), np.zeros(0, dtype=np.int64), num_classes, unit=True
    )


def noise_TKE(steps: int, keys: tuple[bytes, bytes] = KEYS) -> np.ndarray:
    """The noise of gradients, in units of its deviation."""
    stream, releases = nothing(), private(1000, 1.0, steps, keys=keys)
    bias_K = torch.zeros(20)
    drawn = [
        releases.release(
            stream, lambda blocks: sum_at_zero(blocks, 30, bias_K, "softmax", releases.plan)
        )[1].grads["weight"]
        for _ in range(steps)
    ]
    return torch.stack(drawn).numpy() / releases.entry_std()


def test_the_noise_of_classes_features_and_steps_is_uncorrelated() -> None:
    x = noise_TKE(400)
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-4
    for axis in range(3):  # steps, classes, features
        rows = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
        got = np.corrcoef(rows)
        off = got[~np.eye(len(got), dtype=bool)]
        # Correlations of independent rows of n numbers are normal of deviation 1 / sqrt(n).
        assert abs(off).max() * math.sqrt(rows.shape[1]) < 5.5
        assert abs(np.mean(off**2) * rows.shape[1] - 1) < 0.25
    total = x.sum(axis=(1, 2)).std() / math.sqrt(x[0].size)
    assert total == pytest.approx(1, abs=0.2), "a shared part in all numbers of a step"


def test_the_noise_of_two_starts_and_of_two_parts_is_uncorrelated() -> None:
    first, second = noise_TKE(50).ravel(), noise_TKE(50, (KEYS[1], KEYS[0])).ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(len(first)) < 5
    releases = private(1000, 1.0)
    stream = nothing(200, 100)
    released = releases.average(
        stream, lambda blocks: moment_sum(blocks, 200, 100, 1.0, 0.5, releases.plan), 1
    ).grads
    moment, cross = (released[name].numpy().ravel()[:20_000] for name in ("moment", "cross"))
    assert abs(np.corrcoef(moment, cross)[0, 1]) * math.sqrt(20_000) < 5


def test_the_noise_of_a_moment_is_a_symmetric_gaussian_matrix() -> None:
    """Variance s^2 off the diagonal and 2 s^2 on it; its largest eigenvalue is where Wigner's law
    and ``noise_edge`` say.
    """
    releases, width = private(1000, 1.0), 300
    plan = releases.plan
    released = releases.average(
        nothing(width), lambda blocks: moment_sum(blocks, width, 20, 1.0, 0.5, plan), 1
    ).grads["moment"]
    noise = moment_of(released, 1.0, 0.5, plan).numpy()
    assert np.array_equal(noise, noise.T)
    off = noise[np.triu_indices(width, 1)]
    assert np.diag(noise).var() / off.var() == pytest.approx(2, rel=0.4)
    edge = noise_edge(releases.entry_std(), width, 1.0, 0.5, plan)
    assert np.linalg.eigvalsh(noise)[-1] == pytest.approx(edge, rel=0.06)


def test_simulated_ranks_add_the_noise_once_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks sum their slices; of the total, each then releases its share with the noise that
    one process alone would add there.
    """
    stream, weight_KE, bias_K = IntegerStream(stream_of(61)), torch.randn(4, 12), torch.zeros(4)

    def gradient_of(releases: Releases) -> torch.Tensor:
        return releases.release(
            stream, lambda blocks: gradient_sum(blocks, weight_KE, bias_K, "softmax", releases.plan)
        )[1].grads["weight"]

    alone = gradient_of(private(61))
    groups = [Group(rank, 2, torch.device("cpu")) for rank in range(2)]
    slices: list[ClippedSum] = []
    monkeypatch.setattr(Group, "add_up", lambda group, values: None)
    monkeypatch.setattr(
        release_module, "all_reduce_sum", lambda total, group: slices.append(total) or total
    )
    for group in groups:
        releases = private(61)
        releases.group = group
        gradient_of(releases)
    assert [total.num_records for total in slices] == [31, 30]
    monkeypatch.setattr(
        release_module, "all_reduce_sum", lambda total, group: slices[0] + slices[1]
    )
    shares = []
    for group in groups:
        releases = private(61)
        releases.group = group
        shares.append(gradient_of(releases))
    assert not (shares[0] * shares[1]).any(), "a coordinate has one owner"
    torch.testing.assert_close(shares[0] + shares[1], alone, rtol=0, atol=1e-6)


def test_an_average_of_releases_is_one_release_with_less_noise() -> None:
    stream = nothing()
    for count in (1, 4, 16):
        releases = private(1000, 1.0, steps=16)
        plan = releases.plan
        noise = (
            releases.average(
                stream,
                lambda blocks: moment_sum(blocks, 30, 20, 1.0, 0.5, plan),  # noqa: B023
                count,
            )
            .grads["cross"]
            .numpy()
        )
        assert releases.left == 16 - count
        assert noise.std() / releases.entry_std() == pytest.approx(1 / math.sqrt(count), rel=0.15)
        assert noise.std() / releases.entry_std(count) == pytest.approx(1, rel=0.15)


def test_an_average_over_poisson_draws_draws_anew_each_time() -> None:
    asked = PrivacyConfig(
        dataset_size=400,
        expected_batch_size=100,
        steps=40,
        noise_multiplier=1e-6,
        max_grad_norm=1.0,
        guarantee="simulated",
    )
    seen: list[int] = []
    stream = stream_of(400, unit=True)
    plan = make_plan(asked)

    def sum_of(blocks: object) -> ClippedSum:
        total = moment_sum(blocks, 12, 4, 1.0, 0.5, plan)  # type: ignore[arg-type]
        seen.append(total.num_records)
        return total

    cross = releases_of(plan).average(stream, sum_of, 40).grads["moment"]
    assert len(set(seen)) > 10 and abs(np.mean(seen) - 100) < 5 * math.sqrt(75 / 40)
    whole = moment_sum(stream.blocks(), 12, 4, 1.0, 0.5, plan).grads["moment"] / 400
    assert float((cross - whole).norm() / whole.norm()) < 0.1, (
        "divided by what was expected, not by what was drawn"
    )


def test_every_release_is_charged_before_a_record_is_read() -> None:
    events: list[str] = []
    stream = stream_of(50, unit=True)

    class Watched(FeatureStream):
        def blocks(self, rows: np.ndarray | None = None):  # type: ignore[no-untyped-def]
            events.append("read")
            return super().blocks(rows)

    watched = Watched(stream.feature_ND, stream.label, 4, unit=True)
    counter = itertools.count()
    for head, expected in ((least_squares, ["charge", "read"]), (prototypes, ["charge", "read"])):
        events.clear()
        counter = itertools.count()
        head(
            watched,
            releases_of(
                full_batch_plan(50, 1.0),
                charge=lambda: events.append("charge") or next(counter),  # noqa: B023
            ),
        )
        assert events == expected

    def refused() -> int:
        raise PrivacyError("ledger: no")

    events.clear()
    with pytest.raises(PrivacyError, match="ledger"):
        least_squares(watched, releases_of(full_batch_plan(50, 1.0), charge=refused))
    assert events == []


def test_a_used_up_plan_releases_nothing_more() -> None:
    stream, releases = stream_of(50, unit=True), private(50)
    least_squares(stream, releases)
    assert releases.left == 0
    plan = releases.plan
    with pytest.raises(PrivacyError, match="used up"):
        releases.release(stream, lambda blocks: moment_sum(blocks, 12, 4, 1.0, 0.5, plan))


def test_the_ledger_is_a_charge(tmp_path: Path) -> None:
    """With a real ledger: as many lines as releases, and its epsilon is the plan's."""
    write_scenes(tmp_path / "store", 2)
    plan = full_batch_plan(50, 2.0, steps=3)
    with Ledger.open(tmp_path / "store", "head", plan, resume=False) as ledger:
        least_squares(stream_of(50, unit=True), Releases(plan, ledger.append, *map(key, KEYS)))
        path = ledger.path
    assert read_ledger(path).steps == 3
    assert plan.spent(3).epsilon == plan.epsilon


def test_without_a_guarantee_there_is_no_noise() -> None:
    releases = releases_of(no_noise(50))
    assert releases.entry_std() == 0
    total = moment_sum(stream_of(50, unit=True).blocks(), 12, 4, 1.0, 0.5, releases.plan)
    released = privatize(total, releases.plan, 0, key(KEYS[1]), dtype=torch.float64)
    torch.testing.assert_close(released.grads["cross"], total.grads["cross"] / 50)


def test_keys_are_not_shown() -> None:
    assert "key" not in repr(private(50))
