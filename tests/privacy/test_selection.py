"""Private selection: its price against the theorems by hand and against exact distributions, the
law of the number of runs, the ledger.
"""

import dataclasses
import decimal
import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as published
from made import key
from scipy import integrate, stats

from dpvision.config import PrivacyConfig
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy import accountant
from dpvision.privacy.events import Composed, Gaussian, Repeated, Selected, TruncatedPoissonGaussian
from dpvision.privacy.ledger import Ledger, read_ledger, set_cap, store_account
from dpvision.privacy.plan import DPPlan, ask_selection, make_plan, run_plans
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.selection import Selection, score_noise_ratio, success_probability

FULL = PrivacyConfig(
    dataset_size=1000, expected_batch_size=1000, sampling="full_batch", target_epsilon=2.0, steps=4
)
SHAPES = [None, 0.0, 0.5, 1.0, 3.0]


def plan_of(cfg: PrivacyConfig = FULL, **asked: float | None) -> DPPlan:
    return make_plan(cfg, ask_selection(cfg, **asked))  # type: ignore[arg-type]


def pmf(mean: float, shape: float | None, count: int = 4000) -> np.ndarray:
    """P(K = 0), ..., P(K = count - 1), by the products of the definition and not by scipy's
    negative binomial.
    """
    if shape is None:
        return stats.poisson.pmf(np.arange(count), mean)
    gamma = success_probability(mean, shape)
    weight = np.zeros(count)
    weight[1] = 1.0
    for k in range(1, count - 1):
        weight[k + 1] = weight[k] * (1 - gamma) * (k + shape) / (k + 1)
    return weight / weight.sum()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_runs_follows_its_law(shape: float | None) -> None:
    """Chi-square against the products of the definition, cells of at least 20 expected draws."""
    selection = Selection(6.0, shape, 1, 1.0)
    rng = derive_rng(key(bytes(32)), 0)
    drawn = np.array([selection.draw_runs(rng) for _ in range(8000)])
    expected = pmf(6.0, shape) * len(drawn)
    edges = [0]
    for k in range(len(expected)):
        if expected[edges[-1] : k + 1].sum() >= 20 and expected[k + 1 :].sum() >= 20:
            edges.append(k + 1)
    cells = np.add.reduceat(expected, edges)
    counts = np.add.reduceat(np.bincount(drawn, minlength=len(expected)).astype(float), edges)
    assert len(cells) > 8
    assert stats.chisquare(counts, cells * counts.sum() / cells.sum()).pvalue > 1e-4
    assert shape is None or drawn.min() >= 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.01, 6.0, 60.0])
def test_the_number_of_runs_is_the_inverse_of_its_law(mean: float, shape: float | None) -> None:
    """Just below and just above each value of the distribution function, by exact sums of the
    definition.
    """
    selection = Selection(mean, shape, 1, 1.0)
    distribution = np.cumsum(pmf(mean, shape, 40_000))
    with decimal.localcontext(prec=50):
        for k in (0, 1, 2, 3, 5, 11, 40, 60, 90):
            for uniform in (distribution[k] * (1 - 1e-9), distribution[k] * (1 + 1e-9)):
                if 0 < uniform < 1:
                    assert selection.runs_at(Decimal(uniform)) == np.searchsorted(
                        distribution, uniform, side="right"
                    )
        tail = selection.runs_at(1 - Decimal(2) ** -129)
    # 2^-129 of the law is beyond: more than any float64 distribution function could tell.
    law = stats.poisson(mean) if shape is None else None
    assert tail > 10 and (law is None or law.sf(tail) < 2.0**-129 < law.sf(tail - 2))


@pytest.mark.parametrize("shape", [0.0, 0.01, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("mean", [1.01, 10.0, 300.0])
def test_the_drawn_law_has_the_mean_that_is_paid_for_and_never_more(
    mean: float, shape: float
) -> None:
    got = float((np.arange(40_000) * pmf(mean, shape, 40_000)).sum())
    assert got <= mean * (1 + 1e-9) and got == pytest.approx(mean, rel=1e-6)
    # Its gamma may only be smaller, which is dearer.
    assert published._gamma_truncated_negative_binomial(shape, mean) <= success_probability(
        mean, shape
    )


def by_hand(noise: float, mean: float, shape: float, delta: float, orders: np.ndarray) -> float:
    """Papernot and Steinke, theorem 2, for a Gaussian run, then the conversion of Balle et al.,
    both at the given orders.
    """
    run = orders / (2 * noise**2)
    gamma = success_probability(mean, shape)
    second = ((1 + shape) * ((1 - 1 / orders) * run - np.log(gamma) / orders)).min()
    whole = run + second + np.log(mean) / (orders - 1)
    return float((whole + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)).min())


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
def test_epsilon_is_theorem_2_by_hand(noise: float, shape: float) -> None:
    event = Selected(Gaussian(noise), 10.0, shape)
    stated = accountant.epsilon(event, 1e-6)
    assert stated == pytest.approx(
        by_hand(noise, 10.0, shape, 1e-6, published.RdpAccountant().orders), rel=1e-6
    )
    finest = by_hand(noise, 10.0, shape, 1e-6, np.geomspace(1.01, 2000, 200_000))
    assert finest <= stated * (1 + 1e-9) and stated <= 1.03 * finest, "the orders are fine enough"


@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
def test_epsilon_is_theorem_6_by_hand(noise: float) -> None:
    """Between the theorem with the exact delta of the Gaussian run and with the one that its Renyi
    curve gives in closed form.
    """
    mean, delta = 10.0, 1e-6
    event = Selected(Gaussian(noise), mean, math.inf)
    curve = accountant.rdp_curve(event)
    assert curve is not None
    orders = (
        published.RdpAccountant().orders
    )  # a selection is computed at these, and bounded at the others
    run, hat = orders / (2 * noise**2), np.log1p(1 / (orders - 1))
    exact = accountant.deltas(Gaussian(noise), hat)
    bound = np.exp(
        np.minimum(
            (orders - 1) * (run - hat[:, None])
            + orders * np.log1p(-1 / orders)
            - np.log(orders - 1),
            0,
        )
    ).min(axis=1)

    def epsilon(delta_hat: np.ndarray) -> float:
        whole = run + mean * delta_hat + np.log(mean) / (orders - 1)
        return float((whole + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)).min())

    assert epsilon(exact) <= accountant.epsilon(event, delta) * (1 + 1e-9)
    assert accountant.epsilon(event, delta) <= epsilon(np.minimum(bound, 1.0)) * (1 + 1e-9)


def generating(mean: float, shape: float | None) -> Callable[[float], float]:
    """Derivative of the probability generating function of K."""
    if shape is None:
        return lambda s: mean * math.exp(mean * (s - 1))
    g = success_probability(mean, shape)
    if shape == 0:
        return lambda s: (1 - g) / (1 - (1 - g) * s) / -math.log(g)
    scale = 1 / (g**-shape - 1)
    return lambda s: scale * shape * (1 - g) * (1 - (1 - g) * s) ** (-shape - 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stated_epsilon_covers_the_exact_law_of_the_best_score(shape: float | None) -> None:
    """A run releases its score, 0 or 1 plus noise. The best of K has density g'(F(y)) f(y), so its
    true delta is an integral.
    """
    noise, mean, delta = 3.0, 10.0, 1e-3
    slope = generating(mean, shape)

    def density(y: float, centre: float) -> float:
        return slope(stats.norm.cdf(y, centre, noise)) * stats.norm.pdf(y, centre, noise)

    def true_delta(epsilon: float, p: float, q: float) -> float:
        return integrate.quad(
            lambda y: max(0.0, density(y, p) - math.exp(epsilon) * density(y, q)),
            -40,
            40,
            limit=400,
        )[0]

    event = Selected(Gaussian(noise), mean, math.inf if shape is None else shape)
    stated = accountant.epsilon(event, delta)
    one_run = accountant.epsilon(Gaussian(noise), delta)
    for p, q in ((1.0, 0.0), (0.0, 1.0)):
        assert true_delta(stated, p, q) <= delta
    assert (
        max(true_delta(0.8 * one_run, 1.0, 0.0), true_delta(0.8 * one_run, 0.0, 1.0)) > 0.8 * delta
    ), "the check can fail"
    assert stated > one_run


def test_a_selection_is_one_step_that_reaches_its_target() -> None:
    plan = plan_of()
    assert plan.selection is not None and plan.steps == 1 and plan.selection.steps == 4
    assert (
        plan.epsilon is not None
        and 1.98 < plan.epsilon <= 2.0
        and plan.spent(1).epsilon == plan.epsilon == plan.epsilon_rdp
    )
    assert plan.spent(0).epsilon == 0
    with pytest.raises(PrivacyError, match="steps=2"):
        plan.event(2)
    alone = make_plan(
        dataclasses.replace(FULL, target_epsilon=None, noise_multiplier=plan.noise.multiplier)
    )
    assert alone.epsilon is not None and alone.epsilon < 2.0
    ten = accountant.epsilon(Repeated(alone.event(4), 10), plan.delta)
    assert plan.epsilon < ten, "ten runs released one and all cost more"


def test_the_score_is_paid_for() -> None:
    plan = plan_of()
    cheap, dear = plan_of(score_share=0.01), plan_of(score_share=0.5)
    assert cheap.noise.multiplier < plan.noise.multiplier < dear.noise.multiplier
    run, score = run_plans(plan)
    assert (run.noise.multiplier, run.steps, run.sampler.law) == (
        plan.noise.multiplier,
        4,
        "full_batch",
    )
    assert (
        score.noise.multiplier == pytest.approx(plan.noise.multiplier * 1.5)
        and score.max_grad_norm == 1.0
        and score.steps == 1
    )
    together = Composed((run.event(4), score.event(1)))
    event = Selected(together, 10.0, math.inf)
    assert accountant.epsilon(event, plan.delta) == pytest.approx(plan.epsilon, rel=1e-12)


def test_a_runs_plans_have_the_settings_of_the_whole() -> None:
    cfg = PrivacyConfig(
        dataset_size=1000,
        expected_batch_size=100,
        noise_multiplier=2.0,
        max_grad_norm=0.5,
        steps=4,
        delta=1e-6,
        clipping="automatic",
        num_units=1000,
        max_records_per_unit=1,
    )
    plan = plan_of(cfg)
    run, score = run_plans(plan)
    for one in (run, score):
        assert (one.dataset_size, one.delta, one.unit) == (1000, 1e-6, plan.unit)
    assert (run.sampler, run.max_grad_norm, run.clipping) == (plan.sampler, 0.5, "automatic")
    assert (score.sampler.law, score.clipping) == ("full_batch", "hard")


def test_a_tenth_of_the_precision_is_the_scores() -> None:
    ratio = score_noise_ratio(16, 1.0, 0.1)
    assert ratio**-2 / (ratio**-2 + 16) == pytest.approx(0.1)


def test_poisson_runs_are_cheaper_than_full_ones() -> None:
    cfg = PrivacyConfig(
        dataset_size=10_000, expected_batch_size=100, noise_multiplier=1.0, steps=50
    )
    plan = plan_of(cfg)
    spent = plan.spent(1)
    assert (
        spent.epsilon is not None
        and spent.epsilon_unamplified is not None
        and spent.epsilon < 0.2 * spent.epsilon_unamplified
    )


def test_a_persons_epsilon_counts_all_her_records_in_weights_and_score() -> None:
    one = plan_of(dataclasses.replace(FULL, target_epsilon=None, noise_multiplier=10.0))
    three = plan_of(
        dataclasses.replace(
            FULL,
            target_epsilon=None,
            noise_multiplier=30.0,
            max_records_per_unit=3,
            num_units=FULL.dataset_size,
            delta=1 / (2 * FULL.dataset_size),
        )
    )
    assert three.spent(1).unit_epsilon == pytest.approx(one.epsilon, rel=1e-9)


def test_what_cannot_be_accounted_for_is_refused() -> None:
    truncated = PrivacyConfig(
        dataset_size=1000,
        expected_batch_size=100,
        noise_multiplier=2.0,
        steps=3,
        sampling="truncated_poisson",
        max_batch_size=200,
    )
    for cfg in (truncated, dataclasses.replace(FULL, guarantee="none", target_epsilon=None)):
        with pytest.raises(ConfigError, match="selection"):
            plan_of(cfg)
    poisson = PrivacyConfig(
        dataset_size=1000,
        expected_batch_size=100,
        noise_multiplier=2.0,
        steps=3,
        max_records_per_unit=2,
        num_units=600,
    )
    with pytest.raises(PrivacyError, match="max_records_per_unit"):
        plan_of(poisson)
    for asked in (
        {"mean_runs": 1.0},
        {"mean_runs": math.nan},
        {"shape": -0.5},
        {"shape": math.nan},
        {"score_share": 1.0},
    ):
        with pytest.raises(ConfigError, match="selection"):
            plan_of(FULL, **asked)
    with pytest.raises(PrivacyError, match="run_plans"):
        run_plans(make_plan(FULL))


def test_plans_without_a_selection_are_written_as_before() -> None:
    """The header of a ledger holds the plan, byte for byte: a new field would make old ledgers look
    altered.
    """
    assert "selection" not in make_plan(FULL).to_dict()
    plan = plan_of(shape=0.5)
    assert DPPlan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False))) == plan
    assert not plan.same_mechanism(dataclasses.replace(plan, selection=None)) and not make_plan(
        FULL
    ).same_mechanism(plan)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "store.json").write_text(
        json.dumps({"store_id": "5701e5701e", "visibility": "private"})
    )
    return folder


def test_the_ledger_charges_a_selection_whole_and_once(store: Path) -> None:
    plan = plan_of(mean_runs=50.0)
    with Ledger.open(store, "a", plan, resume=False) as ledger:
        assert ledger.append() == 0
        with pytest.raises(PrivacyError, match="used up"):
            ledger.append()
    contents = read_ledger(store.parent / "LEDGERS" / "5701e5701e" / "a.jsonl")
    assert contents.plan == plan and contents.steps == 1
    account = store_account(store)
    assert account.epsilon == pytest.approx(plan.epsilon) and account.epsilon_filter is not None
    text = (store.parent / "LEDGERS" / "5701e5701e" / "a.jsonl").read_text()
    altered = text.replace('"mean_runs":50.0', '"mean_runs":5.0')
    assert altered != text
    (store.parent / "LEDGERS" / "5701e5701e" / "a.jsonl").write_text(altered)
    with pytest.raises(PrivacyError, match="ledger"):
        store_account(store)


def test_a_selection_adds_up_with_other_runs_and_counts_under_the_cap(store: Path) -> None:
    plan = plan_of()
    sgd = make_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=100,
            noise_multiplier=1.0,
            steps=100,
            delta=plan.delta,
        )
    )
    for run_id, part in (("a", plan), ("b", sgd)):
        with Ledger.open(store, run_id, part, resume=False) as ledger:
            for _ in range(part.steps):
                ledger.append()
    account = store_account(store)
    assert account.epsilon is not None and plan.epsilon is not None and sgd.epsilon is not None
    assert max(plan.epsilon, sgd.epsilon) < account.epsilon
    both = Composed((plan.event(1), sgd.event(100)))
    assert account.epsilon <= (accountant.epsilon_rdp(both, plan.delta) or math.inf)
    halves = accountant.epsilon(plan.event(1), plan.delta / 2) + accountant.epsilon(
        sgd.event(100), plan.delta / 2
    )
    assert account.epsilon <= halves + 1e-9
    set_cap(store, account.epsilon + 0.5, plan.delta)
    with pytest.raises(PrivacyError, match="cap"):
        Ledger.open(store, "c", plan, resume=False)


def test_a_selection_beside_truncated_poisson_has_a_total_still() -> None:
    truncated = TruncatedPoissonGaussian(1000, 0.1, 200, 2.0)
    selected = plan_of().event(1)
    both = Composed((truncated, selected))
    assert accountant.epsilon_rdp(both, 1e-5) is None
    parts = accountant.epsilon(truncated, 5e-6) + accountant.epsilon(selected, 5e-6)
    assert accountant.epsilon(both, 1e-5) == pytest.approx(parts, rel=1e-6)


def test_the_profile_of_a_selection_falls_and_bounds_attacks() -> None:
    plan = plan_of()
    profile = accountant.privacy_profile(plan.event(1), 9)
    deltas = [delta for _, delta in profile]
    assert deltas == sorted(deltas, reverse=True) and 0 < deltas[0] <= 1
    assert accountant.deltas(plan.event(1), np.array([plan.epsilon]))[0] <= plan.delta * (1 + 1e-6)
    curve = accountant.rdp_curve(plan.event(1))
    assert curve is not None
    expected = [published.compute_delta(*curve, e)[0] for e in (0.0, 0.1, 1.0, 5.0)]
    np.testing.assert_allclose(
        accountant.deltas(plan.event(1), np.array([0.0, 0.1, 1.0, 5.0])), expected, rtol=1e-9
    )
    assert 0.01 < accountant.attack_tpr(plan.event(1), 0.01) < 0.2
