"""A dishonest operator hands over a statement made by other code: which of its values may be
altered without a failed check.

Before, 59 kinds of values were free with run and store, and more without: whatever only the code
that wrote the statement could compute.
"""

import copy
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpvision.cli import main
from dpvision.errors import PrivacyError
from dpvision.files import write_json
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import ask_selection, draft_plan, make_plan
from dpvision.statement import again, history_phrases
from dpvision.statement import recompute as recompute_module
from dpvision.statement import verify as verify_module
from dpvision.statement.guarantee import guarantee_of
from dpvision.statement.statement import make_statement, write_statement
from dpvision.statement.verify import verify_statement
from dpvision.weights import pack, unpack

sys.path.insert(0, str(Path(__file__).parents[1] / "statement"))
from runs import POISSON, PRIVACY, PUBLIC_SCORES, make_run, make_store

DECLARED = re.compile(
    r"run_id|recipe|settings.*|scores.*|hashes\.(code|config|ledger|weights|manifest|calibration).*|versions.*|phrases|guarantee\.accountant\.software"
    r"|history\.restarts|history\.lineage\.\*\.(store_id|visibility|licence)|history\.other_runs\.(?!text|known).*"
)
"""What a statement alone does not determine; everything but the software's name is compared with
the run or the store.
"""


def bad(path: Path, *where: Path) -> list[str]:
    return [
        check.name
        for check in verify_statement(path, *where)
        if check.status in ("failed", "unverified")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and a run that ended early, by code that is not installed here."""
    root = tmp_path_factory.mktemp("fuzz")
    make_store(root / "store")
    run = make_run(root / "run", root / "store", privacy=PRIVACY, charged=12)
    write_json(run / "scores.json", PUBLIC_SCORES)
    manifest = next(run.glob("checkpoints/*/manifest.json"))
    values = json.loads(manifest.read_text())
    values["versions"]["code_sha256"] = "0" * 64
    manifest.write_text(json.dumps(values))
    write_statement(run)
    return root


def leaves(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if not isinstance(value, dict | list):
        yield where, value
    for key, inner in items:
        yield from leaves(inner, (*where, key))


def altered(statement: dict[str, Any], where: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(statement)
    inner = made
    for key in where[:-1]:
        inner = inner[key]
    if isinstance(value, bool):
        inner[where[-1]] = not value
    elif isinstance(value, int | float):
        inner[where[-1]] = value * 0.5 if value else 1
    else:
        inner[where[-1]] = 1 if value is None else f"{value} x"
    return made


def test_a_true_statement_of_other_code_passes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "run"
    assert bad(run / "statement.json") == bad(run / "statement.json", run, folder / "store") == []
    assert main(["verify", str(run / "statement.json")]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"^declared +other values +tuning not_covered, stop not_declared", printed, re.MULTILINE
    )


def test_only_what_is_declared_can_be_altered_unnoticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = folder / "run", tmp_path / "s.json"
    statement = json.loads((run / "statement.json").read_text())
    # Speed: figures follow from plan and steps, which the alterations of figures and sentences
    # leave alone.
    known: dict[str, Any] = {}

    def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            key = f"{function.__name__}{args!r}{kwargs!r}"
            if key not in known:
                known[key] = function(*args, **kwargs)
            return copy.deepcopy(known[key])

        return call

    monkeypatch.setattr("dpvision.statement.statement.guarantee_of", remembered(guarantee_of))
    seen: set[str] = set()
    alone, with_run = [], []
    for where, value in leaves(statement):
        tag = ".".join(str(key) if isinstance(key, str) else "*" for key in where)
        if tag in seen or (tag.startswith("settings") and len(where) > 2):
            continue
        seen.add(tag)
        path.write_text(json.dumps(altered(statement, where, value)))
        if not bad(path):
            alone.append(tag)
        if not bad(path, run, folder / "store"):
            with_run.append(tag)
    assert len(seen) > 100
    assert [tag for tag in alone if not DECLARED.fullmatch(tag)] == []
    assert with_run in (
        [],
        ["phrases"],
        ["guarantee.accountant.software"],
        ["phrases", "guarantee.accountant.software"],
    )


def test_emptied_lists_and_softened_words_are_found(folder: Path, tmp_path: Path) -> None:
    statement, path = (
        json.loads((folder / "run" / "statement.json").read_text()),
        tmp_path / "s.json",
    )

    def softened(made: dict[str, Any]) -> None:
        made["in_words"] = ["No attack can succeed: epsilon 0.01."]
        made["guarantee"]["attack"] = dict.fromkeys(made["guarantee"]["attack"], 0.0011)
        made["guarantee"]["epsilon_rdp"] = 0.01
        made["scope"]["trust_model"] = "None needed."

    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda made: made["scope"].update(not_covered=[]),
        lambda made: made.update(side_channels=[]),
        lambda made: made["history"].update(stop=None),
        lambda made: made["history"]["stop"].update(declared="independent"),
        softened,
    ]
    for change in changes:
        made = copy.deepcopy(statement)
        change(made)
        path.write_text(json.dumps(made))
        assert bad(path), change


def test_sentences_of_another_version_are_said_not_to_be_compared_and_its_figures_are_checked(
    folder: Path, tmp_path: Path
) -> None:
    statement, path = (
        json.loads((folder / "run" / "statement.json").read_text()),
        tmp_path / "s.json",
    )
    statement["phrases"] = "of another version"
    statement["scope"]["trust_model"] = "Written otherwise."
    path.write_text(json.dumps(statement))
    checks = {check.name: check for check in verify_statement(path)}
    assert (
        checks["sentences"].status == "not checked"
        and "NOT compared" in checks["sentences"].detail
        and not bad(path)
    )
    for change in ({"epsilon_rdp": 0.01}, {"n_times_delta": 0.1}):
        path.write_text(json.dumps({**statement, "guarantee": statement["guarantee"] | change}))
        assert bad(path) == ["figures"]
    path.write_text(
        json.dumps(
            {**statement, "headline": statement["headline"].replace("epsilon ", "epsilon 0.")}
        )
    )
    assert bad(path) == ["figures"]


def test_a_truncated_plan_with_plain_poissons_epsilon_is_found(tmp_path: Path) -> None:
    """0.447 was stated where truncated draws cost 4.03, and passed."""
    plain = replace(
        POISSON, dataset_size=10_000, expected_batch_size=100.0, steps=50, noise_multiplier=1.0
    )
    cut = replace(plain, sampling="truncated_poisson", max_batch_size=100)
    assert draft_plan(cut).epsilon > 5 * make_plan(plain).epsilon  # type: ignore[operator]
    with pytest.raises(PrivacyError):
        make_plan(cut)
    make_store(tmp_path / "store")
    statement = make_statement(
        make_run(tmp_path / "run", tmp_path / "store", privacy=plain, charged=50)
    )
    plan = statement["history"]["lineage"][-1]["guarantee"]["plan"]
    plan |= {"sampling": "truncated_poisson", "max_batch_size": 100}
    statement["mechanism"]["max_batch_size"] = 100
    (tmp_path / "s.json").write_text(json.dumps(statement))
    assert {"figures", "epsilon", "epsilon of this run"} <= set(bad(tmp_path / "s.json"))
    wide = replace(plain, sampling="truncated_poisson", max_batch_size=180)
    make_store(tmp_path / "wide" / "store")
    true = make_run(
        tmp_path / "wide" / "run", tmp_path / "wide" / "store", privacy=wide, charged=50
    )
    assert bad(write_statement(true), true, tmp_path / "wide" / "store") == []


def test_no_figure_of_a_private_selection_passes_unless_its_bound_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = replace(PRIVACY, steps=4, noise_multiplier=12.0)
    plan = make_plan(privacy, ask_selection(privacy, mean_runs=5.0, shape=1.0))
    made = make_statement_of_plan(tmp_path, plan)
    assert bad(made) == []
    statement = json.loads(made.read_text())
    smaller = copy.deepcopy(statement)
    figures = smaller["guarantee"]
    figures["epsilon"] *= 0.9
    figures["this_run"]["epsilon"] *= 0.9
    smaller["headline"] = smaller["headline"].replace("epsilon ", "epsilon 0.")
    made.write_text(json.dumps(smaller))
    assert {"epsilon", "epsilon of this run", "figures"} <= set(bad(made))
    made.write_text(json.dumps(statement))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PrivacyError("no accountant")

    monkeypatch.setattr(again, "compose", refuse)
    monkeypatch.setattr(recompute_module, "by_first_accountant", refuse)
    assert {"epsilon", "figures"} <= {
        check.name for check in verify_statement(made) if check.status == "unverified"
    }
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(made)])
    assert stop.value.code == 1


def make_statement_of_plan(root: Path, plan: Any) -> Path:
    """A statement whose plan is ``plan``, by the facts of another run's."""
    make_store(root / "store")
    statement = make_statement(
        make_run(
            root / "run",
            root / "store",
            privacy=replace(PRIVACY, steps=1, noise_multiplier=12.0),
            charged=1,
        )
    )
    statement = json.loads(json.dumps(statement))
    facts = replace(again._facts(statement), plan=plan, steps=1)
    others = copy.deepcopy(facts.other_runs)
    made = again.compose(replace(facts, other_runs=others))
    path = root / "statement.json"
    path.write_text(json.dumps(made))
    return path


# A later review: figures lowered while run and store are at hand


def with_steps(
    statement: dict[str, Any], steps: int, restarts: int, line: str, in_weights: int | None = None
) -> dict[str, Any]:
    """The statement that these facts make, by the product's own words and figures; other runs are
    said to be unknown.
    """
    facts = again._facts(statement)
    updates = facts.updates if in_weights is None else in_weights
    hidden = {"known": False, "text": history_phrases.OTHER_RUNS_UNKNOWN}
    made = again.compose(
        replace(
            facts,
            steps=steps,
            restarts=restarts,
            updates=updates,
            other_runs=hidden,
            from_store=False,
            hashes={**facts.hashes, "ledger": line},
        )
    )
    return json.loads(json.dumps(made))


def lines_of(ledger: Path) -> list[str]:
    return [hashlib.sha256(line).hexdigest() for line in ledger.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 planned steps, saved after 4; then 2 restarts and 2 steps, as another run on its
    store.
    """
    root = tmp_path_factory.mktemp("resumed")
    make_store(root / "store")
    privacy = replace(PRIVACY, steps=8)
    run = make_run(root / "run", root / "store", privacy=privacy, charged=4)
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    for _ in range(2):
        with Ledger.open(root / "store", run_id, make_plan(privacy), resume=True) as ledger:
            ledger.append()
    with Ledger.open(root / "store", "another", make_plan(privacy), resume=False) as ledger:
        ledger.append()
    write_statement(run)
    return root


def test_no_step_is_stated_of_a_run_that_was_charged(resumed: Path, tmp_path: Path) -> None:
    """Epsilon 0.00 passed with run and store: an early line of the ledger, and other runs
    unknown.
    """
    run, store, path = resumed / "run", resumed / "store", tmp_path / "s.json"
    true = json.loads((run / "statement.json").read_text())
    first = lines_of(run / "ledger.jsonl")[1]
    for in_weights in (0, 4):
        made = with_steps(true, 0, 0, first, in_weights)
        assert made["headline"].startswith("Differential privacy with epsilon 0.00 ")
        path.write_text(json.dumps(made))
        for where in ((run,), (None, store), (run, store)):
            assert bad(path, *where), where
    # Nor with weights that say so themselves: the store's ledger decides.
    forged = tmp_path / "run"
    shutil.copytree(run, forged)
    folder = next(forged.glob("checkpoints/*"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["lineage"][-1]["guarantee"]["steps"] = 0
    blob = pack(unpack(folder / "model.safetensors")[0], manifest["lineage"])
    (folder / "model.safetensors").write_bytes(blob)
    manifest |= {"ledger_steps": 0, "updates": 0, "ledger_digest": first}
    manifest["tensors"] = {"model.safetensors": hashlib.sha256(blob).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (forged / "ledger.jsonl").write_bytes(
        b"".join((run / "ledger.jsonl").read_bytes().splitlines(keepends=True)[:2])
    )
    made = with_steps(true, 0, 0, first, 0)
    made["hashes"]["weights"] = manifest["tensors"]
    forged_manifest = (folder / "manifest.json").read_bytes()
    made["hashes"]["manifest"] = hashlib.sha256(forged_manifest).hexdigest()
    path.write_text(json.dumps(made))
    assert bad(path, forged) == [], "nothing in these files contradicts it"
    assert "store, last line" in bad(path, forged, store)


@pytest.mark.parametrize(
    ("steps", "restarts", "line"), [(3, 0, -2), (4, 0, -1), (5, 0, 7), (6, 1, -1), (5, 1, -1)]
)
def test_steps_and_restarts_are_those_of_the_named_line_and_it_is_not_before_the_weights(
    resumed: Path, tmp_path: Path, steps: int, restarts: int, line: int
) -> None:
    run, store, path = resumed / "run", resumed / "store", tmp_path / "s.json"
    true = json.loads((run / "statement.json").read_text())
    assert (true["mechanism"]["steps_executed"], true["history"]["restarts"]) == (6, 2)
    lines = lines_of(next(resumed.glob(f"LEDGERS/*/{true['run_id']}.jsonl")))
    made = with_steps(
        true,
        steps,
        restarts,
        lines[line] if steps > 4 else lines_of(run / "ledger.jsonl")[line],
        min(steps, 4),
    )
    path.write_text(json.dumps(made))
    passes = (steps, restarts) == (4, 0)
    assert ("store, last line" in bad(path, run, store)) is not passes
    if steps <= 4:  # the copy ends at the weights' line
        assert (bad(path, run) == []) is passes


def test_other_runs_are_not_unknown_to_a_store_that_was_charged_by_them(
    resumed: Path, tmp_path: Path
) -> None:
    """The exit status was 0, also for a run that the statement left out."""
    run, store, path = resumed / "run", resumed / "store", tmp_path / "s.json"
    true = json.loads((run / "statement.json").read_text())
    assert bad(run / "statement.json", run, store) == []
    path.write_text(json.dumps(with_steps(true, 6, 2, true["hashes"]["ledger"])))
    assert bad(path, run) == [] and bad(path, run, store) == ["other runs"]
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(path), "--run", str(run), "--store", str(store)])
    assert stop.value.code == 1


def test_a_stop_declared_of_a_run_that_went_on_is_not_confirmed(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    privacy = replace(PRIVACY, steps=8)
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=4)
    path = write_statement(run, stop="independent")
    assert bad(path, run, tmp_path / "store") == []
    with Ledger.open(
        tmp_path / "store", "5eedc0ffee123456", make_plan(privacy), resume=True
    ) as ledger:
        ledger.append()
    assert bad(path, run) == [] and bad(path, run, tmp_path / "store") == ["store, last line"]


def test_a_parent_does_not_lose_its_steps(tmp_path: Path) -> None:
    """A lineage in which the private parent had executed no step was accepted with the store at
    hand: it cost nothing.
    """
    store_id = make_store(tmp_path / "store")
    plan = make_plan(replace(PRIVACY, steps=4))
    with Ledger.open(tmp_path / "store", "parent", plan, resume=False) as ledger:
        for _ in range(4):
            ledger.append()
    guarantee = {
        "epsilon": 0.0,
        "epsilon_rdp": 0.0,
        "delta": plan.delta,
        "steps": 0,
        "plan": plan.to_dict(),
    }
    parent = {
        "store_id": store_id,
        "visibility": "private",
        "licence": None,
        "run_id": "parent",
        "guarantee": guarantee,
    }
    run = make_run(
        tmp_path / "run",
        tmp_path / "store",
        privacy=replace(PRIVACY, steps=2),
        charged=2,
        parents=(parent,),
    )
    with pytest.raises(PrivacyError, match="contradicts the store's ledger"):
        make_statement(run)


@pytest.mark.slow
def test_a_true_statement_at_tiny_rates_passes(tmp_path: Path) -> None:
    """0.02126 was stated and is right; the second accountant said 0.0333, and the statement
    failed.
    """
    privacy = replace(
        POISSON,
        dataset_size=10**9,
        expected_batch_size=1000.0,
        steps=3000,
        noise_multiplier=0.7,
        delta=1e-13,
        max_grad_norm=1.0,
    )
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=1)
    checks = verify_module.verify_statement(write_statement(run))
    assert not [check for check in checks if check.status in ("failed", "unverified")]
    epsilon = next(check for check in checks if check.name == "epsilon")
    assert "0.0213 stated, 0.0212 by the second accountant" in epsilon.detail


def test_a_true_statement_of_an_older_version_passes_without_a_comparison_of_its_sentences(
    tmp_path: Path,
) -> None:
    make_store(tmp_path / "store")
    run = make_run(
        tmp_path / "run", tmp_path / "store", privacy=replace(PRIVACY, steps=4), charged=4
    )
    statement = json.loads(write_statement(run).read_text())
    this = statement["guarantee"]["this_run"]
    this["epsilon_of_all_planned_steps"] = this["epsilon"]
    del this["executed"], statement["history"]["stop"], statement["phrases"]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(statement))
    assert bad(path) == []
    this["epsilon_of_all_planned_steps"] *= 0.5
    path.write_text(json.dumps(statement))
    assert bad(path) == ["figures"]


def test_an_earlier_state_of_another_run_is_no_failure(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    privacy = replace(PRIVACY, steps=4)
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=4)
    with Ledger.open(tmp_path / "store", "another", make_plan(privacy), resume=False) as ledger:
        ledger.append()
        path = write_statement(run)
        ledger.append()
    assert bad(path, run, tmp_path / "store") == []
