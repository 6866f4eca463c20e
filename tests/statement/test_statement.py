"""The statement says what the ledger executed, holds every line of the checklist, and is refused
where it would mislead.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld
from scipy import stats

from dpvision.checkpoint import find_checkpoint, load_checkpoint, read_manifest, save_checkpoint
from dpvision.config import PrivacyConfig
from dpvision.errors import CheckpointError, PrivacyError
from dpvision.files import write_json
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.printed import up, up_delta
from dpvision.report.page import make_report
from dpvision.statement import preprocessing_phrases
from dpvision.statement.schema import problems, statement_schema
from dpvision.statement.statement import make_statement, write_statement
from dpvision.statement.verify import verify_statement

from .runs import POISSON, PRIVACY, PUBLIC_SCORES, STEPS, make_run, make_store, score_entry

SCHEMA = Path(__file__).parents[2] / "docs" / "statement.schema.json"
SENTINEL = "31.4159265"


@pytest.fixture(scope="module")
def statement(finished_run: Path) -> dict[str, Any]:
    return make_statement(finished_run)


def no_guarantee(privacy: PrivacyConfig) -> PrivacyConfig:
    return replace(privacy, guarantee="none", noise_multiplier=None, max_grad_norm=None)


def test_epsilon_is_that_of_the_plan_in_the_ledger(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=POISSON, charged=12, saved=10)
    made = make_statement(run)
    plan = DPPlan.from_dict(json.loads((run / "plan.json").read_text()))
    step = dp_accounting.PoissonSampledDpEvent(
        plan.sample_rate, dp_accounting.GaussianDpEvent(plan.noise.multiplier)
    )
    accountant = pld.PLDAccountant(value_discretization_interval=plan.value_discretization_interval)
    expected = accountant.compose(step, STEPS).get_epsilon(plan.delta)
    assert made["guarantee"]["epsilon"] == pytest.approx(expected, rel=1e-4)
    assert (
        made["history"]["lineage"][-1]["guarantee"]["epsilon"] == made["guarantee"]["epsilon"]
    )  # not the manifest's
    assert (made["mechanism"]["steps_executed"], made["history"]["steps_wasted"]) == (12, 2)


def test_the_statement_fits_its_schema(
    statement: dict[str, Any], tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    schema = json.loads(SCHEMA.read_text())
    assert statement_schema() == schema, "the package ships the schema of the docs"
    make_store(tmp_path / "store", "public")
    public = make_run(
        tmp_path / "run", tmp_path / "store", privacy=no_guarantee(small_privacy), charged=2
    )
    for made in (statement, make_statement(public)):
        assert problems(json.loads(json.dumps(made, allow_nan=False)), schema, "statement") == []
    assert problems({**statement, "guaranteed": 1, "loss": 0.3}, schema, "statement") == [
        "statement.loss: unknown",
        "statement.guaranteed: not boolean",
    ]


def test_it_says_where_the_default_noise_comes_from(statement: dict[str, Any]) -> None:
    assert (
        "ChaCha20, a cryptographic stream cipher, with a 256-bit key"
        in statement["mechanism"]["noise_generator"]
    )


def test_delta_times_n_is_a_half_by_default(statement: dict[str, Any]) -> None:
    assert statement["guarantee"]["n_times_delta"] == pytest.approx(0.5)
    assert statement["guarantee"]["delta_rule"].startswith("1 / (2 N)")


def test_the_bound_on_attacks_is_the_gaussian_curve_for_full_batches(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    make_store(tmp_path / "store")
    attack = make_statement(
        make_run(tmp_path / "run", tmp_path / "store", privacy=small_privacy, charged=4)
    )["guarantee"]["attack"]
    shift = 4**0.5 / 3.0  # steps ** 0.5 / noise_multiplier
    for fpr in (0.001, 0.01):
        exact = stats.norm.cdf(stats.norm.ppf(fpr) + shift)
        assert exact <= attack[f"tpr_at_fpr_{fpr:g}"] <= exact + 1e-3
    assert attack["coin_accuracy"] == pytest.approx(stats.norm.cdf(shift / 2), abs=1e-6)
    area = stats.norm.cdf(shift / 2**0.5)
    assert area <= attack["auc"] <= area + 1e-3


def test_nothing_confidential_and_no_path_reaches_the_statement(
    copy_of: Callable[[], Path],
) -> None:
    run = copy_of()
    for name in ("metrics.jsonl", "scores.json"):
        (run / "confidential" / name).write_text(
            json.dumps([score_entry("encoder", float(SENTINEL), "linear probe, mean", "private")])
        )
    text = write_statement(run).read_text()
    assert SENTINEL not in text and str(run.parent.parent) not in text
    assert "1790000" not in text  # the clock of metrics.jsonl


def test_two_statements_of_one_run_are_the_same_bytes(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    assert write_statement(run).read_bytes() == write_statement(run).read_bytes()


def test_a_private_score_in_the_public_file_is_refused(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    write_json(
        run / "scores.json",
        [*PUBLIC_SCORES, score_entry("encoder", 0.4, "linear probe, mean", "private")],
    )
    with pytest.raises(PrivacyError, match="private store"):
        write_statement(run)
    assert not (run / "statement.json").exists()


@pytest.mark.parametrize("guarantee", ["none", "simulated"])
def test_a_run_without_a_guarantee_on_a_private_store_is_refused(
    tmp_path: Path, small_privacy: PrivacyConfig, guarantee: str
) -> None:
    make_store(tmp_path / "store")
    privacy = (
        no_guarantee(small_privacy)
        if guarantee == "none"
        else replace(small_privacy, guarantee="simulated")
    )
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=2)
    with pytest.raises(PrivacyError, match="Do not release it"):
        write_statement(run)
    # Also after somebody has moved its files out of confidential/.
    for path in (run / "confidential").iterdir():
        shutil.move(path, run / path.name)
    with pytest.raises(PrivacyError, match="Do not release it"):
        write_statement(run)
    assert not (run / "statement.json").exists()


def test_a_run_without_a_guarantee_on_a_public_store_says_so_first(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    make_store(tmp_path / "store", "public")
    made = make_statement(
        make_run(
            tmp_path / "run", tmp_path / "store", privacy=no_guarantee(small_privacy), charged=2
        )
    )
    assert made["headline"] == "This run guarantees nothing."
    assert (made["guaranteed"], made["guarantee"]) == (False, None)


def parent(store_id: str, visibility: str, plan: DPPlan | None) -> dict[str, Any]:
    guarantee = None
    if plan is not None:
        guarantee = {
            "epsilon": 0.125,
            "epsilon_rdp": None,
            "delta": plan.delta,
            "steps": plan.steps,
            "plan": plan.to_dict(),
        }
    return {
        "store_id": store_id,
        "visibility": visibility,
        "run_id": "before",
        "guarantee": guarantee,
    }


@pytest.mark.parametrize(("same_store", "visibility"), [(False, "private"), (True, "public")])
def test_a_tainted_parent_is_refused(
    tmp_path: Path, small_privacy: PrivacyConfig, same_store: bool, visibility: str
) -> None:
    store_id = make_store(tmp_path / "store")
    tainted = parent(store_id if same_store else "another", visibility, None)
    run = make_run(
        tmp_path / "run", tmp_path / "store", privacy=small_privacy, charged=2, parents=(tainted,)
    )
    with pytest.raises(PrivacyError, match="without a guarantee"):
        make_statement(run)


def test_a_parent_on_the_same_store_is_added_and_one_on_another_is_not(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    store_id = make_store(tmp_path / "store")
    before = replace(small_privacy, steps=7)
    plan = make_plan(before)
    make_run(tmp_path / "before", tmp_path / "store", privacy=before, charged=7, run_id="before")
    parents = (
        parent("another", "private", plan),
        parent("textures", "public", None),
        parent(store_id, "private", plan),
    )
    made = make_statement(
        make_run(
            tmp_path / "run", tmp_path / "store", privacy=small_privacy, charged=4, parents=parents
        ),
        tuning="none",
    )
    guarantee = made["guarantee"]
    # 7 full batches and 4 of the same noise are 11.
    assert guarantee["epsilon"] == pytest.approx(
        dp_accounting.get_epsilon_gaussian(plan.noise.multiplier / 11**0.5, plan.delta)
    )
    assert guarantee["delta"] == guarantee["this_run"]["delta"] == plan.delta
    assert [entry["store_id"] for entry in made["other_stores"]] == ["another"]
    # Whoever reads the headline alone learns of both stores.
    own, other = (
        f"epsilon {up(of['epsilon'], 2)} and delta {up_delta(plan.delta)} for each single image of"
        for of in (guarantee, made["other_stores"][0])
    )
    assert made["headline"] == (
        f"Differential privacy with {own} this run's private store; and, from earlier training "
        f"behind its weights, with {other} private store another."
    )
    assert made["in_words"][-1].startswith("Remove any one image from private store another.")
    # An image in both stores is in the composition of both.
    both = guarantee["epsilon"] + made["other_stores"][0]["epsilon"]
    (said,) = (text for text in made["scope"]["not_covered"] if "private store another," in text)
    assert f"the sum over the stores, {up(both, 2)} at delta {up_delta(2 * plan.delta)}." in said
    assert (
        problems(
            json.loads(json.dumps(made, allow_nan=False)),
            json.loads(SCHEMA.read_text()),
            "statement",
        )
        == []
    )
    assert [entry["store_id"] for entry in made["history"]["lineage"]] == [
        "another",
        "textures",
        store_id,
        store_id,
    ]
    # The sum's attack terms cannot be better than those of this run alone.
    alone = stats.norm.cdf(stats.norm.ppf(0.01) + 4**0.5 / 3.0)
    assert alone < guarantee["attack"]["tpr_at_fpr_0.01"] <= 1


def test_an_altered_ledger_is_refused(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"step":30', b'"step":31', 1))
    with pytest.raises(PrivacyError, match="hash chain"):
        make_statement(run)


def test_a_shortened_ledger_beside_the_store_is_refused(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    (truth,) = (run.parent / "LEDGERS").rglob("*.jsonl")
    truth.write_bytes(b"".join(truth.read_bytes().splitlines(keepends=True)[:-3]))
    with pytest.raises(PrivacyError, match="shortened"):
        make_statement(run, store_dir=run.parent / "store")


def test_a_ledger_that_does_not_lead_to_the_checkpoint_is_refused(
    copy_of: Callable[[], Path],
) -> None:
    run = copy_of()
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    edit(run / "config.json", lambda config: config["data"].update(store=None))
    with pytest.raises(PrivacyError, match="does not lead to"):
        make_statement(run)


def test_another_plan_in_the_checkpoint_is_refused(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    (manifest,) = run.rglob("manifest.json")
    edit(
        manifest,
        lambda values: values["plan"].update(
            noise_multiplier=values["plan"]["noise_multiplier"] * 2
        ),
    )
    with pytest.raises(PrivacyError, match="expected one plan"):
        make_statement(run)


def test_altered_weights_are_refused(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    (weights,) = run.rglob("model.safetensors")
    blob = bytearray(weights.read_bytes())
    blob[-1] ^= 1
    weights.write_bytes(blob)
    with pytest.raises(CheckpointError, match="altered"):
        make_statement(run)


def test_another_store_is_refused(copy_of: Callable[[], Path], tmp_path: Path) -> None:
    make_store(tmp_path / "other")
    with pytest.raises(PrivacyError, match="another store"):
        make_statement(copy_of(), store_dir=tmp_path / "other")


def test_steps_charged_after_the_copy_was_made_are_stated(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=small_privacy, charged=2)
    before = make_statement(run)
    plan = DPPlan.from_dict(json.loads((run / "plan.json").read_text()))
    with Ledger.open(tmp_path / "store", before["run_id"], plan, resume=True) as ledger:
        ledger.append()
    after = make_statement(run)
    assert before["mechanism"]["steps_executed"] == 2 and after["mechanism"]["steps_executed"] == 3
    assert (
        after["guarantee"]["epsilon"]
        == before["guarantee"]["epsilon"]
        == pytest.approx(plan.spent(plan.steps).epsilon)
    )
    assert (after["history"]["restarts"], after["history"]["steps_wasted"]) == (1, 1)


def test_without_the_store_the_copy_is_read_and_other_runs_are_unknown(
    copy_of: Callable[[], Path], statement: dict[str, Any]
) -> None:
    run = copy_of()
    edit(run / "config.json", lambda config: config["data"].update(store="nowhere"))
    made = make_statement(run)
    assert made["guarantee"] == statement["guarantee"]
    assert (
        made["history"]["other_runs"]["known"] is False
        and "not available" in made["history"]["ledger"]
    )
    assert made["mechanism"]["steps_executed"] == STEPS
    page = make_report(run).read_text()
    assert made["history"]["other_runs"]["text"][:40] in page and "owner's cap" not in page
    for make in (make_statement, make_report):
        with pytest.raises(
            PrivacyError,
            match=r"tuning='charged', and the store is not there; expected the total .*--store",
        ):
            make(run, tuning="charged")


def test_other_runs_on_the_store_are_added_up(tmp_path: Path, small_privacy: PrivacyConfig) -> None:
    make_store(tmp_path / "store")
    first = make_run(
        tmp_path / "first", tmp_path / "store", privacy=small_privacy, charged=4, run_id="first"
    )
    make_run(
        tmp_path / "second", tmp_path / "store", privacy=small_privacy, charged=4, run_id="second"
    )
    others = make_statement(first)["history"]["other_runs"]
    # Two runs of four full batches are eight full batches.
    plan = DPPlan.from_dict(json.loads((first / "plan.json").read_text()))
    doubled = dp_accounting.get_epsilon_gaussian(plan.noise.multiplier / 8**0.5, plan.delta)
    assert others["epsilon_total"] == pytest.approx(doubled) and others["text"].startswith(
        "1 other run "
    )
    make_run(
        tmp_path / "bad",
        tmp_path / "store",
        privacy=no_guarantee(small_privacy),
        charged=1,
        run_id="bad",
    )
    others = make_statement(first)["history"]["other_runs"]
    assert others["epsilon_total"] is None and "without a guarantee" in others["text"]


def test_the_settings_hold_no_path(statement: dict[str, Any]) -> None:
    assert "store" not in statement["settings"]["data"] and "init_from" not in statement["settings"]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    write_json(path, values)


def test_a_captioners_statement_tells_of_its_words(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=small_privacy, charged=2)
    assert not any("Tokenizer" in line for line in make_statement(run)["history"]["preprocessing"])
    folder = find_checkpoint(run)
    manifest, checkpoint = read_manifest(folder), load_checkpoint(folder)
    manifest["config"]["model"]["kind"] = "captioner"
    save_checkpoint(folder, manifest, checkpoint.model, files={"tokenizer.json": b"{}"})
    made = make_statement(run)
    assert preprocessing_phrases.TOKENIZER in made["history"]["preprocessing"]
    assert made["hashes"]["weights"]["tokenizer.json"] == hashlib.sha256(b"{}").hexdigest()
    assert (
        problems(
            json.loads(json.dumps(made, allow_nan=False)),
            json.loads(SCHEMA.read_text()),
            "statement",
        )
        == []
    )


@pytest.mark.parametrize("clipping", ["hard", "automatic"])
@pytest.mark.parametrize("drawn", ["record", "person"])
def test_verify_knows_how_a_run_without_a_guarantee_clips(
    tmp_path: Path, drawn: str, clipping: str
) -> None:
    people = {"num_units": 50_000, "sampling_unit": "person"} if drawn == "person" else {}
    privacy = replace(PRIVACY, guarantee="simulated", clipping=clipping, steps=4, **people)
    make_store(tmp_path / "store", "public")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=4)
    checks = verify_statement(write_statement(run))
    assert [check for check in checks if check.status in ("failed", "unverified")] == []
    assert "sentences" in {check.name for check in checks if check.status == "ok"}
