"""Help and errors that need no data come before torch is imported: in seconds on a busy machine, below one on an idle one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch", "timm", "scipy", "dp_accounting", "matplotlib")
RUN = f"""
import json, sys
from dpvision.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print(json.dumps([code, [name for name in {SLOW!r} if name in sys.modules]]))
"""


def _started(argv: list[str], folder: Path) -> tuple[int, list[str], str]:
    """Exit status, which slow libraries were imported, and what was printed."""
    done = subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    code, slow = json.loads(done.stdout.splitlines()[-1])
    return code, slow, done.stdout + done.stderr


@pytest.mark.parametrize("argv", [["plan"], ["train", "vip.micro"], ["adapt"]], ids=" ".join)
def test_help_imports_nothing_slow(argv: list[str], tmp_path: Path) -> None:
    code, slow, said = _started([*argv, "--help"], tmp_path)
    assert code == 0 and not slow and "--help" in said, said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "vip.micor"], "Did you mean"),
        (["train", "vip.micro", "--optim.learning-rat", "1"], "learning-rat"),
        (["train", "demo", "--data", "none"], "dpvision data import SOURCE STORE"),
        (["train", "demo", "--data", "none", "--optim.learning-rate", "-1"], "learning_rate=-1.0; expected a positive number"),
        (["train", "demo", "--data", "none", "--name", "taken"], "holds a run already"),
        (["adapt", "--data", "none", "--num-classes", "3", "--dataset-size", "100"], "dpvision data import SOURCE STORE"),
        (["adapt", "--data", "none", "--num-classes", "3", "--dataset-size", "100", "--name", "taken"], "holds a run already"),
        (["adapt", "--head", "two_steps"], "two_steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_that_needs_no_data_comes_first(argv: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "config.json").write_text("{}")
    (tmp_path / "runs" / "taken" / "run.json").write_text("{}")
    code, slow, said = _started(argv, tmp_path)
    assert code == 2 and words in said, said
    assert not slow
