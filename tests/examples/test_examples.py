"""The examples run as they stand, in a folder of their own: they learn, and the epsilon that they print is the one of their ledger."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpvision.privacy.ledger import read_ledger

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGETS = {"adapt_digits.py": 3.0, "your_own_loop.py": 3.0, "your_own_loader.py": 8.0}
CHANCE = 0.10
"""Accuracy of a guess among ten digits, each about as frequent."""


@pytest.fixture(scope="module", params=sorted(TARGETS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """(name, folder it ran in, what it printed) of each example."""
    folder = tmp_path_factory.mktemp("examples")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / request.param)], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return request.param, folder, done.stdout


def test_every_example_is_tested_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == TARGETS.keys()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_an_example_is_under_40_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 40


@pytest.mark.slow
def test_it_learns(run: tuple[str, Path, str]) -> None:
    found = re.search(r"accuracy ([\d.]+)%", run[2])
    # Draws and noise are new in every run; five times chance is below all runs seen (75% and more) and far above a guess.
    assert found and float(found[1]) / 100 > 5 * CHANCE, run[2]


@pytest.mark.slow
def test_the_epsilon_printed_is_that_of_the_steps_in_its_ledger(run: tuple[str, Path, str]) -> None:
    name, folder, out = run
    store_id = json.loads((folder / "stores/digits/store.json").read_text())["store_id"]
    (path,) = (folder / "stores/LEDGERS" / store_id).glob("*.jsonl")
    ledger = read_ledger(path)
    spent = ledger.plan.spent(ledger.steps).epsilon
    assert ledger.steps == ledger.plan.steps and spent is not None and spent <= TARGETS[name]
    found = re.search(r"at epsilon ([\d.]+)", out)
    assert found and found[1] == f"{spent:.2f}"
