"""A run that is stopped when its released weights look right: the epsilon of the steps executed by
then does not hold, the plan's does.

Full batches: after t steps the privacy loss is normal with mean t / (2 noise^2) and variance t /
noise^2. The stopping rule is the attacker's: stop at the first step whose loss exceeds what a
statement of the run so far would print.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpvision.cli import main
from dpvision.cli.ledger import _text
from dpvision.config import PrivacyConfig
from dpvision.errors import PrivacyError
from dpvision.privacy.account import set_cap, store_account
from dpvision.privacy.composition import parts_of, total_epsilon
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.report.page import make_report
from dpvision.runs.run import EpsilonMeter
from dpvision.runs.spent import resume_words, spent
from dpvision.statement.guarantee import guarantee_of
from dpvision.statement.statement import make_statement, write_statement
from dpvision.statement.verify import verify_statement

sys.path.insert(0, str(Path(__file__).parents[1] / "statement"))
from runs import PRIVACY, make_run, make_store

STEPS, EXECUTED = 60, 12
AIMED = PrivacyConfig(
    dataset_size=500,
    expected_batch_size=500,
    sampling="full_batch",
    steps=STEPS,
    max_grad_norm=1.0,
    target_epsilon=3.0,
    delta=1e-3,
)
CONFIDENTIAL_STOP = "that the run ended at this step, if confidential figures decided it"


def delta_of_stopping(plan: DPPlan, printed_T: np.ndarray, samples: int = 60_000) -> float:
    """delta spent at the printed epsilons by a run that stops at the first step whose privacy loss
    exceeds what it would print.
    """
    rng, step, found = np.random.default_rng(7), 1 / plan.noise.multiplier, 0.0
    for _ in range(samples // 10_000):
        loss = np.cumsum(rng.normal(step**2 / 2, step, (10_000, plan.steps)), axis=1)
        over = loss > printed_T
        stop = np.where(over.any(axis=1), over.argmax(axis=1), plan.steps - 1)
        found += float(
            np.maximum(0, -np.expm1(printed_T[stop] - loss[np.arange(10_000), stop])).sum()
        )
    return found / samples


def test_a_stop_chosen_by_the_weights_spends_no_more_than_the_stated_delta() -> None:
    plan = make_plan(AIMED)
    printed = [
        guarantee_of(plan, t, [], "5701e", fixed=False)["epsilon"] for t in range(1, STEPS + 1)
    ]
    assert (
        delta_of_stopping(plan, np.array(printed)) <= 1.2 * plan.delta
    )  # 1.2: five standard errors of the sampling
    prefix = [plan.spent(t).epsilon for t in range(1, STEPS + 1)]
    assert delta_of_stopping(plan, np.array(prefix)) > 3 * plan.delta, (
        "the attack has the power to see it"
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a store and a run on it that ended after 12 of 60 steps."""
    folder = tmp_path_factory.mktemp("stopped")
    make_store(folder / "store")
    make_run(folder / "run", folder / "store", privacy=PRIVACY, charged=EXECUTED)
    return folder


def test_all_that_prints_epsilon_of_a_stopped_run_prints_its_plans(stopped: Path) -> None:
    run, plan = stopped / "run", make_plan(PRIVACY)
    whole = plan.spent(STEPS)
    made = make_statement(run)
    guarantee, own = made["guarantee"], made["history"]["lineage"][-1]["guarantee"]
    assert (
        f"epsilon {math.ceil(100 * whole.epsilon - 1e-9) / 100:.2f} and delta" in made["headline"]
    )  # type: ignore[operator]
    of_all = guarantee_of(plan, STEPS, [], "5701e", fixed=False)
    for figure in ("epsilon", "epsilon_rdp", "epsilon_unamplified", "attack", "privacy_profile"):
        assert guarantee[figure] == of_all[figure], figure
    assert (
        guarantee["this_run"]["epsilon"]
        == own["epsilon"]
        == own["total"]["epsilon"]
        == pytest.approx(whole.epsilon)
    )
    assert f"{EXECUTED} of {STEPS} planned steps" in made["history"]["lineage"][-1]["text"]
    assert (
        made["mechanism"]["steps_executed"] == EXECUTED
        and made["history"]["other_runs"]["runs"][0]["steps"] == EXECUTED
    )
    account = store_account(stopped / "store")
    assert (
        account.epsilon
        == made["history"]["other_runs"]["epsilon_total"]
        == pytest.approx(whole.epsilon)
    )
    assert account.runs[0].spent == whole and f"{EXECUTED} / {STEPS}" in _text(account, {})
    cost, said = spent(plan, EXECUTED)
    assert (
        cost["epsilon"] == pytest.approx(whole.epsilon)
        and f"for all {STEPS} planned" in said
        and said in resume_words(plan, 12, 12, True)
    )
    assert EpsilonMeter(plan).at_most(1) == pytest.approx(whole.epsilon)


def test_a_stop_by_confidential_figures_is_listed_unless_declared_otherwise(stopped: Path) -> None:
    run, plan = stopped / "run", make_plan(PRIVACY)
    silent, declared = make_statement(run), make_statement(run, stop="independent")
    assert any(
        text.lower().startswith(CONFIDENTIAL_STOP) for text in silent["scope"]["not_covered"]
    )
    assert not any(
        text.lower().startswith(CONFIDENTIAL_STOP) for text in declared["scope"]["not_covered"]
    )
    assert (
        silent["guarantee"]["this_run"]["executed"] is None
        and silent["history"]["stop"]["declared"] == "not_declared"
    )
    executed = declared["guarantee"]["this_run"]["executed"]
    assert executed == {
        "steps": EXECUTED,
        "epsilon": pytest.approx(plan.spent(EXECUTED).epsilon),
        "unit_epsilon": None,
    }
    assert declared["headline"] == silent["headline"] and declared["in_words"] == silent["in_words"]
    for made in (silent, declared):
        (run / "statement.json").write_text(json.dumps(made))
        assert "failed" not in {
            check.status
            for check in verify_statement(run / "statement.json", run, stopped / "store")
        }


def test_the_page_shows_the_prefix_only_where_it_was_declared(stopped: Path) -> None:
    prefix = f"{math.ceil(100 * make_plan(PRIVACY).spent(EXECUTED).epsilon - 1e-9) / 100:.2f}"  # type: ignore[operator]
    assert prefix not in make_report(stopped / "run").read_text()
    assert prefix in make_report(stopped / "run", stop="independent").read_text()


def test_a_run_that_executed_its_plan_has_no_stop_to_declare(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(tmp_path / "store")
    run = make_run(
        tmp_path / "run",
        tmp_path / "store",
        privacy=replace(PRIVACY, steps=4, noise_multiplier=3.0),
        charged=4,
    )
    made = make_statement(run)
    assert made["history"]["stop"] is None and not any(
        "ended at this step" in text for text in made["scope"]["not_covered"]
    )
    assert main(["report", str(run), "--stop", "independent"]) == 2
    error = capsys.readouterr().err
    assert (
        "--stop independent" in error
        and "Drop --stop" in error
        and not (run / "statement.json").exists()
    )


def test_a_statement_with_the_prefix_fails_verification(stopped: Path, tmp_path: Path) -> None:
    statement = json.loads(write_statement(stopped / "run").read_text())
    prefix = make_plan(PRIVACY).spent(EXECUTED)
    own = statement["history"]["lineage"][-1]["guarantee"]
    statement["guarantee"] |= {
        "epsilon": prefix.epsilon,
        "epsilon_unamplified": prefix.epsilon_unamplified,
        "epsilon_rdp": prefix.epsilon_rdp,
    }
    statement["guarantee"]["this_run"] |= {"epsilon": prefix.epsilon}
    own["epsilon"] = own["total"]["epsilon"] = prefix.epsilon
    (tmp_path / "s.json").write_text(json.dumps(statement))
    failed = {
        check.name for check in verify_statement(tmp_path / "s.json") if check.status == "failed"
    }
    assert {"epsilon", "epsilon of this run", "without amplification"} <= failed


def test_a_child_of_a_stopped_run_composes_the_parents_whole_plan(
    stopped: Path, tmp_path: Path
) -> None:
    """Also if the parent's entry is of an older version, with the epsilon of the executed steps."""
    plan, prefix = make_plan(PRIVACY), make_plan(PRIVACY).spent(EXECUTED)
    guarantee = {
        "epsilon": prefix.epsilon,
        "epsilon_rdp": None,
        "delta": plan.delta,
        "steps": EXECUTED,
        "plan": plan.to_dict(),
    }
    store_id = json.loads((stopped / "store" / "store.json").read_text())["store_id"]
    entry = {
        "store_id": store_id,
        "visibility": "private",
        "licence": None,
        "run_id": "before",
        "guarantee": guarantee,
    }
    made = guarantee_of(plan, 5, [entry], store_id, fixed=True)
    assert made["epsilon"] == total_epsilon(parts_of([(plan, STEPS), (plan, STEPS)]), fixed=True)[0]


def test_a_cap_counts_the_whole_plan_of_a_stopped_run(tmp_path: Path) -> None:
    """A run was stopped where it looked best, and the next was admitted as if the rest had not been
    available to it.
    """
    store, plan = tmp_path / "store", make_plan(PRIVACY)
    make_store(store)
    assert plan.epsilon is not None
    set_cap(store, 1.05 * plan.epsilon, plan.delta)
    with Ledger.open(store, "opened", plan, resume=False):
        pass
    assert store_account(store).left == pytest.approx(1.05 * plan.epsilon), (
        "a run without a charged step costs nothing"
    )
    with Ledger.open(store, "first", plan, resume=False) as ledger:
        ledger.append()
    assert store_account(store).left == pytest.approx(0.05 * plan.epsilon)
    with pytest.raises(PrivacyError, match="cap: total epsilon"):
        Ledger.open(store, "second", make_plan(replace(PRIVACY, steps=30)), resume=False)
    with Ledger.open(store, "first", plan, resume=True) as ledger:
        ledger.append()


@pytest.mark.parametrize("when", ["before", "after", "before, then exceeded"])
def test_chosen_runs_have_a_guarantee_only_by_a_cap_set_before_the_first(
    tmp_path: Path, when: str
) -> None:
    """The filter's total was printed as holding for chosen runs whether or not anything had been
    fixed beforehand.
    """
    store, plan = tmp_path / "store", make_plan(replace(PRIVACY, steps=4))
    make_store(store)
    cap = 20.0
    if when == "before, then exceeded":  # the PLD total stays within the cap, its filter does not
        cap = 1.001 * total_epsilon(parts_of([(plan, 4), (plan, 4)]), fixed=True)[0]
    if when.startswith("before"):
        set_cap(store, cap, plan.delta)
    run = make_run(tmp_path / "run", store, privacy=replace(PRIVACY, steps=4), charged=4)
    with Ledger.open(store, "second", plan, resume=False) as ledger:
        ledger.append()
    if when == "after":
        set_cap(store, cap, plan.delta)
    account, made = store_account(store), make_statement(run, tuning="charged")
    assert account.cap_covers_choice is (when == "before")
    lines = (
        _text(account, {}),
        made["history"]["other_runs"]["text"],
        " ".join(made["scope"]["not_covered"]),
    )
    for text in lines:
        assert ("set before the first" in text) and (
            "The cap was set" in text or "owner's cap, set" in text
        ) is (when == "before"), text
    path = write_statement(run, tuning="charged")
    checks = {check.name: check.status for check in verify_statement(path, run, store)}
    assert "failed" not in checks.values() and checks["other runs"] == "ok"
    statement = json.loads(path.read_text())
    statement["history"]["other_runs"]["cap"] = {
        "epsilon": 20.0,
        "delta": plan.delta,
        "before_first_run": True,
        "covers_choice": True,
    }
    path.write_text(json.dumps(statement))
    forged = {check.name: check.status for check in verify_statement(path, run, store)}
    assert ("failed" in forged.values() or forged["other runs"] == "unverified") is (
        when != "before"
    )
