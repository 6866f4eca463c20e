"""A child of a private parent: every figure of its statement is for both runs, not for the child
alone.

What each figure was before is in docs/attacks.md. Both runs take up to two records of a person; the
parent draws Poisson batches, the child takes full ones, so that unamplified and unit figures have a
part that a closed form knows.
"""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, pld, rdp
from scipy import stats

from dpvision.checkpoint import find_checkpoint, read_manifest
from dpvision.cli.ledger import _text, _with_runs_before
from dpvision.config import PrivacyConfig
from dpvision.errors import PrivacyError
from dpvision.privacy.account import filter_bound, store_account
from dpvision.privacy.composition import (
    _curve_of_renyi,
    check_total,
    curve,
    parts_of,
    total,
    total_epsilon,
    unit_epsilon,
)
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, ask_selection, make_plan
from dpvision.privacy.printed import up
from dpvision.privacy.refusal import MAX_EPSILON
from dpvision.runs.lineage import own_entry, runs_on
from dpvision.runs.run import EpsilonMeter
from dpvision.runs.spent import spent
from dpvision.statement.statement import make_statement

from ..statement.runs import make_run, make_store

RECORDS, DELTA = 50_000, 1e-5
PARENT = PrivacyConfig(
    dataset_size=RECORDS,
    expected_batch_size=5000,
    steps=10,
    max_grad_norm=0.1,
    noise_multiplier=1.0,
    max_records_per_unit=2,
    num_units=RECORDS // 2,
    delta=DELTA,
)
CHILD = replace(
    PARENT, sampling="full_batch", expected_batch_size=RECORDS, steps=4, noise_multiplier=8.0
)
FIGURES = ("epsilon", "epsilon_rdp", "epsilon_unamplified", "unit_epsilon")
FPRS = (0.001, 0.01)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Parent and child, finished, on one store."""
    folder = tmp_path_factory.mktemp("figures")
    make_store(folder / "store")
    parent = make_run(
        folder / "parent", folder / "store", privacy=PARENT, charged=PARENT.steps, run_id="parent"
    )
    lineage = read_manifest(find_checkpoint(parent))["lineage"]
    child = make_run(
        folder / "child",
        folder / "store",
        privacy=CHILD,
        charged=4,
        run_id="child",
        parents=tuple(lineage),
    )
    return parent, child


@pytest.fixture(scope="module")
def plans() -> tuple[DPPlan, DPPlan]:
    return make_plan(PARENT), make_plan(CHILD)


@pytest.fixture(scope="module", params=["none", "not_covered"])
def statements(
    request: pytest.FixtureRequest, runs: tuple[Path, Path]
) -> tuple[dict[str, Any], dict[str, Any]]:
    parent, child = (make_statement(run, tuning=request.param) for run in runs)
    return parent["guarantee"], child["guarantee"]


def test_every_figure_of_a_child_is_at_least_that_of_each_run_alone(
    statements: tuple[dict[str, Any], dict[str, Any]], plans: tuple[DPPlan, DPPlan]
) -> None:
    parent, child = statements
    alone = plans[1].spent(4)
    for name in FIGURES:
        assert child[name] > max(parent[name], getattr(alone, name)), name
    for name, value in parent["attack"].items():
        assert child["attack"][name] >= value, name
    own = curve(((plans[1], 4),), FPRS)
    assert child["attack"]["coin_accuracy"] > own.coin_accuracy
    assert child["delta"] == DELTA and child["n_times_delta"] == pytest.approx(RECORDS // 2 * DELTA)
    assert child["this_run"]["epsilon"] == pytest.approx(alone.epsilon)


def test_the_profile_and_the_attack_are_of_both_runs(
    statements: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """At every delta the child's profile needs a larger epsilon than the parent's."""
    parent, child = (np.array(guarantee["privacy_profile"]) for guarantee in statements)
    for epsilon, delta in parent[parent[:, 1] > 1e-9]:
        assert np.interp(epsilon, child[:, 0], child[:, 1]) >= delta
    assert np.interp(statements[1]["epsilon"], child[:, 0], child[:, 1]) <= 1.3 * DELTA


def test_settings_fixed_beforehand_are_composed_as_dp_accounting_does(
    runs: tuple[Path, Path], plans: tuple[DPPlan, DPPlan]
) -> None:
    made = make_statement(runs[1], tuning="none")["guarantee"]
    step = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    child = dp_accounting.GaussianDpEvent(8.0 / 4**0.5)
    accountant = (
        pld.PLDAccountant(value_discretization_interval=1e-4)
        .compose(step, PARENT.steps)
        .compose(child)
    )
    assert made["epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-4)
    assert made["composition"]["methods"] == {
        "epsilon": "pld",
        "epsilon_unamplified": "gaussian",
        "unit_epsilon": "pld",
    }
    renyi = rdp.RdpAccountant().compose(step, PARENT.steps).compose(child)
    theirs = renyi.get_epsilon(DELTA)  # its series bounds fractional orders from above
    assert theirs * 0.999 <= made["epsilon_rdp"] <= theirs * (1 + 1e-9)
    noise = (PARENT.steps / PARENT.noise_multiplier**2 + 4 / 8.0**2) ** -0.5
    assert made["epsilon_unamplified"] == pytest.approx(
        dp_accounting.get_epsilon_gaussian(noise, DELTA)
    )


def test_settings_that_followed_earlier_results_are_composed_by_the_filter(
    runs: tuple[Path, Path],
) -> None:
    made = make_statement(runs[1])["guarantee"]
    assert made["composition"]["methods"] == {
        "epsilon": "filter",
        "epsilon_unamplified": "gaussian",
        "unit_epsilon": "basic",
    }
    assert (
        made["epsilon"]
        >= made["epsilon_rdp"]
        > make_statement(runs[1], tuning="none")["guarantee"]["epsilon"]
    )


def test_the_statement_agrees_with_the_stores_account(runs: tuple[Path, Path]) -> None:
    account = store_account(runs[1].parent / "store")
    assert make_statement(runs[1], tuning="none")["guarantee"]["epsilon"] == pytest.approx(
        account.epsilon
    )
    assert make_statement(runs[1])["guarantee"]["epsilon"] == pytest.approx(account.epsilon_filter)


def test_the_order_of_the_runs_does_not_matter(plans: tuple[DPPlan, DPPlan]) -> None:
    third = make_plan(replace(CHILD, noise_multiplier=20.0, steps=1))
    parts = [(plans[0], 10), (plans[1], 4), (third, 1), (third, 0)]
    for fixed in (False, True):
        found = {
            total_epsilon(parts_of(order), fixed=fixed)[0]
            for order in itertools.permutations(parts)
        }
        assert len(found) == 1


def test_a_further_run_never_lowers_a_figure(plans: tuple[DPPlan, DPPlan]) -> None:
    """Also where its delta is larger: all figures are at the smallest."""
    further = make_plan(replace(CHILD, delta=2e-5, noise_multiplier=100.0))
    for fixed in (False, True):
        one, two = (
            total(parts_of(parts), fixed=fixed)
            for parts in ([(plans[0], 10)], [(plans[0], 10), (further, 4)])
        )
        assert one.delta == two.delta == DELTA
        for name in FIGURES:
            assert getattr(two, name) >= getattr(one, name), name


def test_a_figure_without_accounting_is_null_with_its_reason() -> None:
    poisson = replace(PARENT, max_records_per_unit=1, num_units=None, noise_multiplier=4.0, steps=2)
    truncated = make_plan(replace(poisson, sampling="truncated_poisson", max_batch_size=5600))
    parts = parts_of([(truncated, 2), (make_plan(poisson), 2)])
    found = total(parts)
    assert found.epsilon_rdp is None and "truncated Poisson" in found.reasons["epsilon_rdp"]
    assert found.methods["epsilon"] == "basic"
    assert found.epsilon == pytest.approx(
        sum(total(((plan, steps),)).epsilon for plan, steps in parts), rel=0.1
    )
    assert found.unit_epsilon is None and "belong to one person" in found.reasons["unit_epsilon"]
    pair = curve(parts, FPRS)
    best = {fpr: min(DELTA + np.exp(found.epsilon) * fpr, 1.0) for fpr in FPRS}
    assert pair.profile is None and pair.tpr_at_fpr == pytest.approx(best) and best[FPRS[0]] < 1
    fpr, grown = np.linspace(0.0, 1.0, 200_001), np.exp(found.epsilon)
    roc = np.minimum(DELTA + grown * fpr, 1 - (1 - DELTA - fpr) / grown)
    assert pair.coin_accuracy == pytest.approx((1 + (roc - fpr).max()) / 2, rel=1e-4)
    assert roc.mean() - 1e-5 < pair.auc < roc.mean() + 1e-3
    two = replace(truncated.unit, max_records=2, num_people=RECORDS // 2)
    sampler = replace(truncated.sampler, unit=two)
    units = replace(truncated, sampler=sampler, unit_epsilon=1.0)  # ``make_plan`` refuses it
    assert (
        total(parts_of([(units, 2), (make_plan(poisson), 2)]))
        .reasons["unit_epsilon"]
        .startswith("a run drew truncated")
    )
    assert total(parts, fixed=True).methods["epsilon"] == "pld"


def test_units_of_several_sizes_are_composed_each_with_its_own_number(
    plans: tuple[DPPlan, DPPlan],
) -> None:
    single = make_plan(replace(CHILD, max_records_per_unit=1, num_units=None))
    found = total(parts_of([(plans[1], 4), (single, 4)]), fixed=True)
    noise = (4 * 2**2 / 8.0**2 + 4 / 8.0**2) ** -0.5
    assert found.unit_epsilon == pytest.approx(dp_accounting.get_epsilon_gaussian(noise, DELTA))


def test_a_private_selection_behind_the_weights_counts() -> None:
    cfg = replace(CHILD, max_records_per_unit=1, num_units=None, noise_multiplier=40.0)
    chosen, plain = make_plan(cfg, ask_selection(cfg)), make_plan(cfg)
    parts = parts_of([(chosen, 1), (plain, 4)])
    for fixed, method in ((False, "filter"), (True, "renyi")):
        found = total(parts, fixed=fixed)
        assert found.methods["epsilon"] == method
        assert found.epsilon > max(chosen.epsilon, plain.epsilon)
    run = dp_event.ComposedDpEvent(
        [
            dp_event.GaussianDpEvent(20.0),
            dp_event.GaussianDpEvent(chosen.selection.score_noise_ratio * 40.0),
        ]
    )
    event = dp_event.RepeatAndSelectDpEvent(run, chosen.selection.mean_runs, np.inf)
    renyi = rdp.RdpAccountant().compose(event).compose(dp_event.GaussianDpEvent(20.0))
    assert total(parts).epsilon_rdp == pytest.approx(renyi.get_epsilon(DELTA))


def test_the_filters_order_and_budget_prove_its_cap(plans: tuple[DPPlan, DPPlan]) -> None:
    bound = filter_bound([plans[0].event(10), plans[1].event(4)], DELTA)
    assert bound is not None
    cap, order, divergence = bound
    assert divergence + np.log1p(-1 / order) - np.log(order * DELTA) / (order - 1) <= cap
    whole = curve(parts_of([(plans[0], 10), (plans[1], 4)]), FPRS)
    assert whole.profile is not None and whole.profile[0][1] <= 1


def test_stores_are_kept_apart(
    runs: tuple[Path, Path], tmp_path: Path, plans: tuple[DPPlan, DPPlan]
) -> None:
    """A child on another private store has figures for both, each of its own runs."""
    make_store(tmp_path / "other")
    lineage = read_manifest(find_checkpoint(runs[0]))["lineage"]
    child = make_run(
        tmp_path / "child",
        tmp_path / "other",
        privacy=CHILD,
        charged=4,
        run_id="child",
        parents=tuple(lineage),
    )
    made = make_statement(child)
    assert made["guarantee"]["epsilon"] == pytest.approx(plans[1].spent(4).epsilon)
    assert [entry["store_id"] for entry in made["other_stores"]] == [lineage[0]["store_id"]]
    assert made["other_stores"][0]["epsilon"] == pytest.approx(plans[0].spent(10).epsilon)
    assert made["other_stores"][0]["unit_epsilon"] == pytest.approx(plans[0].spent(10).unit_epsilon)


def test_a_run_without_a_guarantee_still_names_the_private_stores_behind_it(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    make_store(tmp_path / "public", "public")
    none = replace(CHILD, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    lineage = read_manifest(find_checkpoint(runs[0]))["lineage"]
    made = make_statement(
        make_run(
            tmp_path / "run", tmp_path / "public", privacy=none, charged=1, parents=tuple(lineage)
        )
    )
    assert made["guarantee"] is None
    assert made["other_stores"][0]["epsilon"] > 1


def test_all_that_prints_epsilon_prints_the_total(
    runs: tuple[Path, Path], plans: tuple[DPPlan, DPPlan]
) -> None:
    """Progress, the plan before compute, the manifest and ``ledger``: the child's alone stood
    there.
    """
    lineage, alone = read_manifest(find_checkpoint(runs[1]))["lineage"], plans[1].spent(4).epsilon
    behind = runs_on(lineage[:-1], lineage[-1]["store_id"])
    expected, _, _ = total_epsilon(parts_of([*behind, (plans[1], 4)]))
    meter = EpsilonMeter(plans[1], behind)
    entry = meter.entry(4)
    assert entry["epsilon_at_most"] == expected and entry["this_run_at_most"] == pytest.approx(
        alone
    )
    assert f"{expected:.2f}" in meter.text(4) and f"this run {alone:.2f}" in meter.text(4)
    cost, said = spent(plans[1], 4, behind)
    assert (cost["epsilon"], cost["delta"]) == (expected, DELTA) and cost[
        "this_run_epsilon"
    ] == pytest.approx(alone)
    assert (
        f"{up(expected)} for a single image" in said
        and "1 before it on this store" in said
        and "this run alone" in said
        and f"{up(alone)} for a single image" in said
    )
    store = runs[1].parent / "store"
    shown = _with_runs_before(store)
    assert shown == {"child": expected} and "weights come from" in _text(
        store_account(store), shown
    )
    person = unit_epsilon(parts_of([*behind, (plans[1], 4)]))
    assert person is not None and person > expected and cost["unit_epsilon"] == person


def test_the_manifests_own_entry_has_the_total(
    runs: tuple[Path, Path], plans: tuple[DPPlan, DPPlan]
) -> None:
    class _Store:
        store_id = json.loads((runs[0].parent / "store" / "store.json").read_text())["store_id"]
        visibility, licence, meta = "private", None, {}

    lineage = read_manifest(find_checkpoint(runs[0]))["lineage"]
    own = own_entry(plans[1], _Store(), "child", 4, lineage)["guarantee"]  # type: ignore[arg-type]
    assert own["epsilon"] == pytest.approx(plans[1].spent(4).epsilon)
    assert (
        own["total"]["epsilon"] == total_epsilon(parts_of([(plans[0], 10), (plans[1], 4)]))[0]
        and own["total"]["method"] == "filter"
    )
    assert runs_on([{**lineage[0], "guarantee": own}], lineage[0]["store_id"]) == ((plans[1], 4),)


def test_four_generations_have_one_delta(plans: tuple[DPPlan, DPPlan], tmp_path: Path) -> None:
    """Deltas were added: N x delta was 2 after four generations, which one run is refused for."""
    make_store(tmp_path / "store")
    lineage: list[dict[str, Any]] = []
    for generation in range(4):
        run = make_run(
            tmp_path / f"{generation}",
            tmp_path / "store",
            privacy=CHILD,
            charged=1,
            run_id=f"g{generation}",
            parents=(*lineage,),
        )
        lineage = read_manifest(find_checkpoint(run))["lineage"]
    made = make_statement(run)["guarantee"]
    assert (
        made["n_times_delta"] == pytest.approx(RECORDS // 2 * DELTA)
        and made["composition"]["runs"] == 4
    )


def test_n_times_delta_over_generations_is_refused_like_that_of_one_run(
    plans: tuple[DPPlan, DPPlan],
) -> None:
    """The larger number of records counts, with the smallest delta: a parent that had none by
    today's rule is refused.
    """
    loose = replace(plans[0], delta=4.0 / RECORDS)
    check_total(parts_of([(plans[0], 10), (plans[1], 4)]))
    with pytest.raises(PrivacyError, match="dataset_size x delta"):
        check_total(parts_of([(loose, 10), (replace(plans[1], delta=4.0 / RECORDS), 4)]))


def test_a_total_above_the_limit_of_one_run_is_refused(plans: tuple[DPPlan, DPPlan]) -> None:
    """Each run is within it, and the statement of the second one would say an epsilon that no
    single run may have.
    """
    weak = replace(plans[1], noise=IndependentGaussian(plans[1].noise.multiplier / 4, 1.0))
    alone = weak.spent(4).unit_epsilon
    assert alone is not None and 7 < alone < MAX_EPSILON
    parts = parts_of([(weak, 4)] * 3)
    with pytest.raises(
        PrivacyError,
        match=r"over the 3 runs behind these weights; expected at most 20.*allow-weak-guarantee",
    ):
        check_total(parts)
    check_total(parts, allow_weak=True)
    check_total(parts[:1])


def test_a_parent_that_its_own_ledger_contradicts_is_refused(tmp_path: Path) -> None:
    """Another noise multiplier in the parent's entry, before the child began: the store still has
    the parent's ledger.
    """
    make_store(tmp_path / "store")
    parent = make_run(
        tmp_path / "parent", tmp_path / "store", privacy=CHILD, charged=4, run_id="parent"
    )
    (entry,) = read_manifest(find_checkpoint(parent))["lineage"]
    quiet = make_plan(replace(CHILD, noise_multiplier=800.0)).to_dict()
    for name, change in (("plan", {"plan": quiet}), ("steps", {"steps": 5}), ("run", {})):
        forged = (
            entry
            | {"guarantee": entry["guarantee"] | change}
            | ({"run_id": "nobody"} if name == "run" else {})
        )
        child = make_run(
            tmp_path / name,
            tmp_path / "store",
            privacy=CHILD,
            charged=4,
            run_id=name,
            parents=(forged,),
        )
        with pytest.raises(PrivacyError, match="contradicts the store's ledger"):
            make_statement(child)


def test_an_entry_without_its_plan_is_refused(runs: tuple[Path, Path]) -> None:
    """It cannot be composed: to take its epsilon for all figures would understate them."""
    (entry,) = read_manifest(find_checkpoint(runs[0]))["lineage"]
    without = entry | {
        "guarantee": {name: value for name, value in entry["guarantee"].items() if name != "plan"}
    }
    with pytest.raises(PrivacyError, match="without its plan"):
        runs_on([without], entry["store_id"])


def test_the_curve_of_chosen_runs_is_at_the_smallest_delta_and_ends_at_1e_10(
    plans: tuple[DPPlan, DPPlan],
) -> None:
    """Both of what the statement prints: its order and divergence are those of the filter."""
    loose = make_plan(replace(CHILD, delta=1e-8))
    parts = parts_of([(plans[0], 10), (loose, 4)])
    found = curve(parts, FPRS)
    bound = filter_bound([plan.event(steps) for plan, steps in parts], 1e-8)
    assert bound is not None and found.profile is not None
    _, order, divergence = bound
    largest = divergence + np.log1p(-1 / order) - np.log(order * 1e-10) / (order - 1)
    assert found.profile[0][0] == 0 and found.profile[-1] == pytest.approx((largest, 1e-10))


def test_the_curve_of_one_full_batch_run_is_the_gaussian_mechanisms() -> None:
    """Its trade-off function in closed form (Dong, Roth, Su, arXiv 1905.02383)."""
    plan = make_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=1000,
            sampling="full_batch",
            noise_multiplier=4.0,
            steps=4,
        )
    )
    found, mu = curve(((plan, 4),), FPRS), 2 / 4.0
    assert found.profile is not None and found.profile[-1][1] < 1e-9
    assert found.coin_accuracy == pytest.approx(stats.norm.cdf(mu / 2), abs=1e-6)
    assert found.auc == pytest.approx(stats.norm.cdf(mu / math.sqrt(2)), abs=2e-3)
    for fpr in FPRS:
        best = stats.norm.cdf(stats.norm.ppf(fpr) + mu)
        assert best <= found.tpr_at_fpr[fpr] < 1.02 * best
    assert curve(((plan, 4),), FPRS, of_unit=plan.epsilon).profile is None


def test_the_curve_of_hardly_any_noise_is_computed_without_overflow() -> None:
    with np.errstate(over="raise"):
        found = _curve_of_renyi(2.0, 1000.0, FPRS, 5)
    assert found.tpr_at_fpr == dict.fromkeys(FPRS, 1.0) and found.auc == found.coin_accuracy == 1.0


def test_two_selections_have_a_total_that_is_less_than_twice_one() -> None:
    config = replace(CHILD, noise_multiplier=20.0, max_records_per_unit=1, num_units=None)
    plan = make_plan(config, ask_selection(config))
    parts = parts_of([(plan, 1), (plan, 1)])
    one, _, _ = total_epsilon(parts[:1])
    for fixed, method in ((False, "filter"), (True, "renyi")):
        both, delta, found = total_epsilon(parts, fixed=fixed)
        assert one < both < 2 * one and (delta, found) == (DELTA, method)


def test_runs_that_drew_people_have_no_total_with_runs_that_drew_records(
    plans: tuple[DPPlan, DPPlan],
) -> None:
    people = make_plan(replace(CHILD, sampling_unit="person", expected_batch_size=RECORDS // 2))
    check_total(((people, 1), (people, 1)))
    with pytest.raises(PrivacyError, match="some drew people and others records"):
        check_total(((people, 1), (plans[1], 1)))
