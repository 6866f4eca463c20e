"""The statement of a private selection, and of a cleared public store: charged, recomputable, no
number in it that is secret.
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from dpvision.config import PrivacyConfig
from dpvision.privacy.plan import DPPlan, ask_selection, make_plan
from dpvision.report.page import make_report, recompute_code
from dpvision.statement.statement import make_statement

from . import runs
from .test_statement import SCHEMA, problems

FULL = PrivacyConfig(
    dataset_size=5000, expected_batch_size=5000, sampling="full_batch", target_epsilon=3.0, steps=8
)
SAMPLED = PrivacyConfig(dataset_size=5000, expected_batch_size=500, noise_multiplier=2.0, steps=20)


def selecting(monkeypatch: pytest.MonkeyPatch, shape: float | None) -> None:
    """Runs made by hand get the plan of a selection among such runs."""
    monkeypatch.setattr(
        runs,
        "make_plan",
        lambda cfg: make_plan(cfg, ask_selection(cfg, mean_runs=20.0, shape=shape)),
    )


@pytest.mark.parametrize("privacy", [FULL, SAMPLED])
@pytest.mark.parametrize("shape", [None, 0.5])
def test_a_selection_is_stated_and_can_be_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, privacy: PrivacyConfig, shape: float | None
) -> None:
    selecting(monkeypatch, shape)
    runs.make_store(tmp_path / "store")
    run = runs.make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=1)
    made = make_statement(run)
    plan = DPPlan.from_dict(json.loads((run / "plan.json").read_text()))
    assert (
        problems(
            json.loads(json.dumps(made, allow_nan=False)),
            json.loads(SCHEMA.read_text()),
            "statement",
        )
        == []
    )
    assert (
        made["guarantee"]["epsilon"]
        == pytest.approx(plan.epsilon)
        == made["guarantee"]["epsilon_rdp"]
    )
    assert (
        made["mechanism"]["selection"]["mean_runs"] == 20.0
        and made["mechanism"]["selection"]["steps_per_run"] == privacy.steps
    )
    assert (
        made["history"]["tuning"]["charged"]
        and made["history"]["tuning"]["declared"] == "not_covered"
    )
    assert (
        made["history"]["tuning"]["text"].startswith("Charged:")
        and "Not covered" in made["history"]["tuning"]["text"]
    )
    assert (
        "number of runs" in made["side_channels"][0]
        and "Papernot" in made["guarantee"]["accountant"]["method"]
    )
    assert "after every single step" not in made["scope"][
        "trust_model"
    ] and "after every step" not in " ".join(made["in_words"])
    code = recompute_code(plan, made)
    assert code is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert float(printed.getvalue()) == pytest.approx(plan.epsilon, rel=1e-9)
    page = make_report(run).read_text()
    assert "Private selection" in page


def test_a_run_without_a_selection_says_nothing_of_one(finished_run: Path) -> None:
    made = make_statement(finished_run)
    assert made["mechanism"]["selection"] is None and not made["history"]["tuning"]["charged"]
    assert "number of runs" not in json.dumps(made["side_channels"])


def public_parent(**more: Any) -> dict[str, Any]:
    return {
        "store_id": "ab" * 16,
        "visibility": "public",
        "run_id": "p",
        "licence": "CC0",
        "guarantee": None,
        **more,
    }


def test_a_cleared_public_store_in_the_lineage_is_said_with_what_it_leaves_open(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    runs.make_store(tmp_path / "store")
    record = {"against": ["cd" * 16], "methods": ["identical bytes", "identical pixels"]}
    cleared = runs.make_run(
        tmp_path / "run",
        tmp_path / "store",
        privacy=small_privacy,
        charged=2,
        parents=(public_parent(deduplicated=record),),
    )
    made = make_statement(cleared)
    assert (
        problems(
            json.loads(json.dumps(made, allow_nan=False)),
            json.loads(SCHEMA.read_text()),
            "statement",
        )
        == []
    )
    first, own = made["history"]["lineage"]
    assert (
        first["deduplicated"]["against"] == record["against"]
        and "cdcdcdcd" in first["deduplicated"]["text"]
    )
    assert (
        "identical bytes; identical pixels" in first["deduplicated"]["text"]
        and own["deduplicated"] is None
    )
    assert any("public twin" in text for text in made["scope"]["not_covered"])
    assert "identical pixels" in make_report(cleared).read_text()


def test_other_lineages_say_nothing_of_twins(tmp_path: Path, small_privacy: PrivacyConfig) -> None:
    runs.make_store(tmp_path / "store")
    made = make_statement(
        runs.make_run(
            tmp_path / "run",
            tmp_path / "store",
            privacy=small_privacy,
            charged=2,
            parents=(public_parent(),),
        )
    )
    assert not any("public twin" in text for text in made["scope"]["not_covered"])
    assert [entry["deduplicated"] for entry in made["history"]["lineage"]] == [None, None]
