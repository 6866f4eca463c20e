"""Privacy is spent where somebody asked for it, and who asks is told what was spent before and what
will have been in total.
"""

import json
import re
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.data.store import Store
from dpvision.privacy.account import charge_of, store_account
from dpvision.privacy.plan import make_plan
from dpvision.privacy.printed import up
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.recipes import RECIPES

from ..adapt.runs_of_heads import write_digits
from ..cli.test_tune import SPACE, tune_argv

pytestmark = pytest.mark.usefixtures("gates_once")


@pytest.fixture
def mine(tmp_path: Path) -> Store:
    return write_digits(tmp_path / "stores" / "mine", 0, 200)


def _argv(store: Store, *more: str, name: str = "first") -> list[str]:
    words = [
        "adapt",
        "--data",
        str(store.path),
        "--encoder",
        "pixels",
        "--num-classes",
        "10",
        "--dataset-size",
        "200",
    ]
    return [
        *words,
        "--head",
        "prototypes",
        "--runs",
        str(store.path.parent.parent / "runs"),
        "--name",
        name,
        *more,
    ]


def _runs(store: Store) -> int:
    return sum(contents.steps > 0 for contents in StoreLedgers.of(store.path).read_all().values())


@pytest.mark.parametrize("head", ["prototypes", "auto"])
def test_adapt_spends_nothing_that_nobody_asked_for(
    head: str, mine: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: epsilon 1, for a forgotten option."""
    assert main([*_argv(mine), "--head", head]) == 2
    said = capsys.readouterr()
    assert (
        "Private: epsilon 1 at delta" in said.out
        and "no --epsilon" in said.err
        and "Give --epsilon 1" in said.err
    )
    assert (
        said.err.count("\n") == 1
        and _runs(mine) == 0
        and not (tmp_path / "runs" / "first").exists()
    )
    assert main([*_argv(mine), "--json"]) == 2 and _runs(mine) == 0
    assert (
        main([*_argv(mine), "--select", "one_step,prototypes", "--head", "auto"]) == 2
        and _runs(mine) == 0
    )
    assert (
        main(
            [
                *_argv(mine),
                "--privacy.target-epsilon",
                "None",
                "--privacy.noise-multiplier",
                "9",
                "--head",
                "prototypes",
            ]
        )
        == 0
    )
    assert _runs(mine) == 1, "an option fixes the noise"


def test_tune_spends_nothing_that_nobody_asked_for(
    mine: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    test = write_digits(mine.path.parent / "test", 900, 960, public=True)
    for how in ("charged", "private-selection"):
        space = ["--space", "optim.learning_rate=3,10"]
        argv = tune_argv(mine, how, "--test", str(test.path), *space)
        at = argv.index("--epsilon")
        assert main([*argv[:at], *argv[at + 2 :]]) == 2
        assert "tune: no --epsilon" in capsys.readouterr().err and _runs(mine) == 0


def test_a_dry_run_and_a_start_print_what_the_ledgers_then_say(
    mine: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_argv(mine, "--epsilon", "1"), "--dry-run"]) == 0
    assert (
        "Charged to this store before: nothing. In total with this run: epsilon 1 at delta"
        in capsys.readouterr().out
    )
    assert main(_argv(mine, "--epsilon", "1")) == 0
    assert "Charged to this store before: nothing." in capsys.readouterr().out
    first = store_account(mine.path)
    assert main([*_argv(mine, "--epsilon", "2", name="second"), "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["store_total"]
    assert (
        planned["runs"] == 1
        and planned["before"] == pytest.approx(first.epsilon)
        and not planned["of_person"]
    )
    assert main(_argv(mine, "--epsilon", "2", name="second")) == 0
    said, both = capsys.readouterr().out, store_account(mine.path)
    assert planned["after"] == both.epsilon and planned["delta"] == both.delta
    total = f"epsilon {up(both.epsilon)} at delta {both.delta:.3g}"
    assert f"before: epsilon {up(first.epsilon)} by 1 run. In total with this run: {total}" in said
    assert main(["ledger", str(mine.path)]) == 0
    assert re.search(f"total: {total}", capsys.readouterr().out), "the same figure"
    assert (
        main(
            [
                "adapt",
                "--resume",
                "--runs",
                str(mine.path.parent.parent / "runs"),
                "--name",
                "second",
            ]
        )
        == 0
    )
    assert (
        f"before: epsilon {up(first.epsilon)} by 1 run. In total with this run: {total}"
        in capsys.readouterr().out
    ), "itself only once"


def test_without_a_guarantee_no_total_holds(
    mine: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_argv(mine), "--non-private"]) == 0
    assert "In total with this run: no total holds." in capsys.readouterr().out
    assert main([*_argv(mine, "--epsilon", "1", name="second"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert (
        "before: no total holds, because a run was without a guarantee. In total with this run: "
        "no total holds." in said
    )


def test_train_prints_it_too(
    mine: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "train",
        "vip.micro",
        "--data",
        str(mine.path),
        "--init-from",
        "None",
        "--runs",
        str(tmp_path / "runs"),
        "--name",
        "net",
    ]
    argv += [
        "--privacy.dataset-size",
        "200",
        "--privacy.expected-batch-size",
        "20",
        "--privacy.steps",
        "2",
        "--optim.warmup-steps",
        "0",
    ]
    for name, value in (("image-size", 8), ("depth", 1), ("width", 8), ("num-heads", 2)):
        argv += [f"--model.encoder.{name}", str(value)]
    argv += [
        "--model.decoder-width",
        "8",
        "--model.decoder-num-heads",
        "2",
        "--model.decoder-depth",
        "1",
        "--hardware.workers",
        "1",
    ]
    assert main([*argv, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["store_total"]
    assert planned["runs"] == 0 and planned["before"] == 0
    assert main(argv) == 0
    said, account = capsys.readouterr().out, store_account(mine.path)
    assert planned["after"] == account.epsilon
    assert f"before: nothing. In total with this run: epsilon {up(account.epsilon)}" in said


@pytest.mark.slow
def test_charged_trials_cost_what_their_price_says(
    mine: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    test = write_digits(mine.path.parent / "test", 900, 960, public=True)
    assert main(_argv(mine, "--epsilon", "1")) == 0
    capsys.readouterr()
    argv = tune_argv(mine, "charged", "--test", str(test.path), *SPACE)
    assert main([*argv, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["store_total"]
    assert main([*argv, "--json"]) == 0
    assert planned["runs"] == 1 and planned["after"] == store_account(mine.path).epsilon_filter
    assert charge_of(mine.path, make_plan(RECIPES["vip.micro"]().privacy)).runs == 4


def test_the_ledger_has_the_names_of_runs_and_nothing_that_leaves_has_them(
    mine: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a-first-name", "another-name"):
        assert main([*_argv(mine, "--epsilon", "1", name=name), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["ledger", str(mine.path)]) == 0
    said = capsys.readouterr().out
    assert "a-first-name" in said and "another-name" in said
    assert main(["ledger", str(mine.path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert sorted(Path(run["name"]).name for run in runs) == ["a-first-name", "another-name"]
    run = tmp_path / "runs" / "another-name"
    assert main(["report", str(run), "--store", str(mine.path)]) == 0
    for path in run.rglob("*"):
        if path.is_file() and "confidential" not in path.parts:
            assert b"a-first-name" not in path.read_bytes(), path
    next(iter(StoreLedgers.of(mine.path).folder.glob("*.name"))).unlink()
    assert main(["ledger", str(mine.path)]) == 0, "as of a run of an earlier version"
