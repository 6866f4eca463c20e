"""The audit of a run's plan in its statement."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpvision.errors import CheckpointError, DPVisionError, PrivacyError
from dpvision.files import write_json
from dpvision.privacy.coin_guesses import guesses_tried
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.printed import down, up
from dpvision.statement.audits import FORMAT
from dpvision.statement.history_phrases import NO_AUDITS
from dpvision.statement.statement import make_statement, write_statement
from dpvision.statement.verify import verify_statement


def audit_of(run: Path, **more: Any) -> dict[str, Any]:
    """What `dpvision audit RUN` writes, as far as statements read it."""
    least = 0.9 if more.get("passed", True) else 0.99
    return {
        "format": FORMAT,
        "kind": "white-box",
        "passed": True,
        "plan": read_ledger(run / "ledger.jsonl").plan.to_dict(),
        "mechanism": {
            "noise": {
                "value": 0.985,
                "low": least,
                "high": 1.1,
            },
            "shift": {"value": 1.02, "low": 0.5, "high": 1.5},
            "parameter": {"value": 1.01, "low": 0.9, "high": 1.1},
            "scores": 1000,
        },
        "bound": {
            "epsilon_low": 1.2399,
            "floor": 1.0,
            "epsilon": read_ledger(run / "ledger.jsonl").plan.epsilon,
            "checks": {"all_noise": {"value": 1.0, "low": 0.9, "high": 1.1}},
            "confidence": 0.999,
            "scores": 3300,
        },
        "ranks": 1,
        "code_sha256": "0" * 64,
    } | more


def black_box_of(run: Path, **more: Any) -> dict[str, Any]:
    """The same of the black box: 500 canaries; of the 250 most certain guesses 178 are right."""
    plan = read_ledger(run / "ledger.jsonl").plan
    inside_M = np.arange(500) % 2 == 1
    for half, wrong in ((np.arange(125), 36), (np.arange(375, 500), 36)):
        inside_M[half] = half >= 250
        inside_M[half[:: 125 // wrong][:wrong]] ^= True
    tried = guesses_tried(np.arange(500.0), inside_M, plan.delta)
    best = max(tried, key=lambda one: one["epsilon_low"])
    bound = {
        "canaries": 500,
        **best,
        "epsilon_low_of_plan": 0.5294,
        "epsilon": plan.epsilon,
        "confidence": 0.999,
    }
    shares = {"auc": 0.5, "tpr_at_fpr_0.01": 0.0, "tpr_at_fpr_0.001": 0.0}
    attacked = {
        "kind": "black-box",
        "executed": plan.to_dict(),
        "bound": bound,
        "attack": shares,
        "limits": shares,
        "score_of_canary": np.arange(500.0).tolist(),
        "canary_inside": inside_M.tolist(),
    }
    return audit_of(run, **(attacked | more))


def test_a_white_box_that_does_not_follow_from_its_checks_is_refused(
    copy_of: Callable[[], Path],
) -> None:
    run = copy_of()
    made, failed = audit_of(run), audit_of(run, passed=False)
    bound = made["bound"]
    forged: list[dict[str, Any]] = [
        made | {"passed": False},
        failed | {"passed": True},
        made | {"bound": bound | {"epsilon_low": 50.0}},
        made | {"bound": bound | {"epsilon_low": 50.0, "epsilon": 60.0}},
        made | {"bound": bound | {"epsilon_low": 0.5}},
        made | {"bound": bound | {"checks": {"draws": {"value": 2.0, "low": 0.9, "high": 1.1}}}},
        made | {"bound": bound | {"checks": {"draws": {"value": 1.0}}}},
    ]
    for one in (made, failed):
        write_json(run / "audit.json", one)
        make_statement(run)
    for one in forged:
        write_json(run / "audit.json", one)
        with pytest.raises(CheckpointError, match=r"audit\.json cannot be read"):
            make_statement(run)
    (run / "audit.json").unlink()
    os.mkfifo(run / "audit.json")
    with pytest.raises(CheckpointError, match="not a file"):
        make_statement(run)


def test_a_black_box_whose_figures_do_not_follow_is_refused(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    made = black_box_of(run)
    bound, shares = made["bound"], made["attack"]
    forged: list[dict[str, Any]] = [
        {"passed": "false"},
        {"earlier": [{"passed": "alice.png"}]},
        {"earlier": [{}]},
        {"earlier": 3},
        {"passed": False},
        {"bound": bound | {"epsilon_low": 900.0}},
        {"bound": bound | {"epsilon_low": 0.0}},
        {"bound": bound | {"right": 250}},
        {"bound": bound | {"epsilon_low_of_plan": bound["epsilon"] + 1}},
        {"bound": bound | {"epsilon": 100.0}},
        {"canary_inside": [True] * 500},
        {"canary_inside": [1] * 500},
        {"executed": made["executed"] | {"noise_multiplier": 13.0}},
        {"executed": made["executed"] | {"steps": 1}},
        {"executed": {}},
        {"attack": {}},
        {"attack": [1]},
        {"attack": shares | {"auc": 3}},
        {"attack": shares | {"auc": 10**400}},
    ]
    for change in forged:
        write_json(run / "audit_black_box.json", made | change)
        with pytest.raises(CheckpointError, match=r"cannot be read.*--black-box"):
            make_statement(run)
    write_json(run / "audit_black_box.json", made | {"attack": shares | {"alice.png": 1}})
    assert "alice" not in json.dumps(make_statement(run))


def statuses(path: Path, run: Path) -> dict[str, str]:
    return {check.name: check.status for check in verify_statement(path, run)}


def test_a_statement_names_the_audit_of_its_plan_and_is_verified(
    copy_of: Callable[[], Path],
) -> None:
    run = copy_of()
    before = write_statement(run)
    assert json.loads(before.read_text())["history"]["audits"] == {"runs": [], "text": NO_AUDITS}
    write_json(run / "audit.json", audit_of(run))
    assert statuses(before, run)["written again"] == "ok", "audited after the statement"
    assert "audits" not in statuses(before, run)
    path = write_statement(run)
    text = json.loads(path.read_text())["history"]["audits"]["text"]
    assert "4,300 scores: it passed" in text and "at least 1.239, at confidence 0.999" in text
    found = statuses(path, run)
    assert found["audits"] == found["written again"] == found["figures"] == "ok"
    assert "failed" not in found.values() and "unverified" not in found.values()


def test_a_statement_names_both_kinds_of_audit(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    write_json(run / "audit.json", audit_of(run))
    before = write_statement(run)
    one = before.read_bytes()
    attacked = {
        "attack": {"auc": 0.6816, "tpr_at_fpr_0.01": 0.05, "tpr_at_fpr_0.001": 0.0},
        "limits": {"auc": 0.8806, "tpr_at_fpr_0.01": 0.3, "tpr_at_fpr_0.001": 0.1},
    }
    write_json(run / "audit_black_box.json", black_box_of(run, **attacked))
    assert statuses(before, run)["audits"] == "ok", "attacked after the statement"
    path = write_statement(run)
    assert path.read_bytes() != one
    text = json.loads(path.read_text())["history"]["audits"]["text"]
    assert "4,300 scores: it passed" in text and "Of 250 guesses 178 were right" in text
    (stated,) = json.loads(path.read_text())["history"]["audits"]["runs"][1:]
    low, most = down(stated["epsilon_low"]), up(stated["epsilon_low_at_most"])
    assert f"{low}, whatever the mechanism, and at least 0.5294 with" in text
    assert f"cannot show more than {most} whatever the mechanism" in text
    assert 0 < stated["epsilon_low"] < stated["epsilon_low_at_most"] < 5
    assert "was 0.682, where the plan allows 0.881" in text and "shadow" not in text
    write_json(run / "audit_black_box.json", black_box_of(run, **attacked, shadows=16))
    assert statuses(path, run)["audits"] == "failed", "another attack"
    text = make_statement(run)["history"]["audits"]["text"]
    assert "attacked through its weights, with 16 shadow models: it passed" in text
    write_json(run / "audit_black_box.json", black_box_of(run, **attacked))
    found = statuses(path, run)
    assert found["audits"] == found["written again"] == "ok" and "failed" not in found.values()
    (run / "audit_black_box.json").unlink()
    assert statuses(path, run)["audits"] == "failed"


def test_a_failed_audit_is_stated(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    write_json(run / "audit.json", audit_of(run, passed=False))
    assert "it FAILED" in make_statement(run)["history"]["audits"]["text"]


def test_an_altered_audit_fails_verification(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    write_json(run / "audit.json", audit_of(run))
    path = write_statement(run)
    stated = json.loads(path.read_text())
    stated["history"]["audits"]["runs"][0]["epsilon_low"] = 0.1
    write_json(path, stated)
    found = statuses(path, run)
    assert found["audits"] == found["sentences"] == "failed"
    for junk in ([{}], [5], [{"kind": ["white-box"]}]):
        stated["history"]["audits"]["runs"] = junk
        write_json(path, stated)
        assert statuses(path, run)["audits"] == "failed"
    path = write_statement(run)
    (run / "audit.json").unlink()
    assert statuses(path, run)["audits"] == "failed"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"plan": {"noise_multiplier": 1.0}}, CheckpointError),
        ({"format": "other"}, CheckpointError),
        ({"kind": "black-box"}, CheckpointError),
        ({"bound": {}}, CheckpointError),
        ({"plan": None}, CheckpointError),
    ],
)
def test_other_files_are_refused(
    copy_of: Callable[[], Path], change: dict[str, Any], error: type[DPVisionError]
) -> None:
    run = copy_of()
    write_json(run / "audit.json", audit_of(run, **change))
    with pytest.raises(error, match=r"cannot be read.*dpvision audit .* --white-box"):
        make_statement(run)


def test_the_audit_of_another_plan_is_refused(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    plan = audit_of(run)["plan"]
    write_json(run / "audit.json", audit_of(run, plan=plan | {"noise_multiplier": 13.0}))
    with pytest.raises(PrivacyError, match="of another plan"):
        make_statement(run)
