"""The acceptance script for GPUs, on a CPU: its table, its resuming, and, slow, every part at small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_acceptance  # noqa: E402
from common import row  # noqa: E402


def call(work: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(BENCHMARKS / "gpu_acceptance.py"), "--device", "cpu", "--work", str(work), *words]
    return subprocess.run(argv, capture_output=True, text=True)


def clipping_result(one_pass: float, batches: tuple[float, float]) -> dict[str, object]:
    rows = [
        row("mae_base", "non_private_eager", "time_ratio", [1.2]),
        row("mae_base", "non_private_compiled", "time_ratio", [1.0]),
        row("mae_base", "one_pass_eager", "time_ratio", [one_pass + 1]),
        row("mae_base", "one_pass_compiled", "time_ratio", [one_pass]),
        row("mae_base", "one_pass_compiled", "records_per_s", [1000.0]),
        row("mae_base", "non_private_compiled", "max_physical_batch", [batches[0]]),
        row("mae_base", "one_pass_compiled", "max_physical_batch", [batches[1]]),
    ]
    return {"rows": rows}


@pytest.mark.parametrize(("one_pass", "verdict"), [(1.09, "ok"), (1.11, "MISSED")])
def test_the_best_one_pass_variant_is_held_against_its_bar(one_pass: float, verdict: str) -> None:
    shown, good = gpu_acceptance.table({"clip_mae_base": clipping_result(one_pass, (1000, 950))}, "cuda")
    line = next(line for line in shown.splitlines() if "one_pass/time_ratio" in line)
    assert good and f"{one_pass:.4g}" in line and line.endswith(f"{verdict}, bar 1.1")
    assert next(line for line in shown.splitlines() if "max_physical_batch_ratio" in line).endswith("ok, bar 0.9")


def test_the_noises_share_is_of_the_whole_step() -> None:
    noise = {"rows": [row("privatize_99M", "cuda", "time_s", [2.0])]}
    found = {"clip_mae_base": clipping_result(1.05, (1, 1)), "noise_speed": noise}
    share = gpu_acceptance.figures("noise_speed", found)["noise's share of a step of 98,304 records"]
    assert share == pytest.approx(2 / (2 + 98.304))


def test_a_check_that_does_not_hold_is_named_and_fails_the_whole() -> None:
    rows = [
        row("a", "noise", "value", [2.0]),
        row("a", "noise", "bound", [1.0]),
        row("b", "noise", "value", [0.5]),
        row("b", "noise", "bound", [1.0]),
    ]
    shown, good = gpu_acceptance.table({"noise": {"rows": rows}}, "cpu")
    assert not good and "1 of 2 checks hold" in shown and "WRONG a: 2, at most 1" in shown


@pytest.mark.slow
def test_a_part_that_is_there_is_not_run_again_unless_the_code_changed(tmp_path: Path) -> None:
    first = call(tmp_path, "--parts", "totals")
    assert first.returncode == 0, first.stderr
    assert "totals           2 of 2 checks hold" in first.stdout
    again = call(tmp_path, "--parts", "totals")
    assert again.returncode == 0 and "totals:" not in again.stderr
    result = json.loads((tmp_path / "totals.json").read_text())
    (tmp_path / "totals.json").write_text(json.dumps(result | {"code": "other"}))
    assert "totals:" in call(tmp_path, "--parts", "totals").stderr


def test_wrong_input_gets_one_line(tmp_path: Path) -> None:
    done = call(tmp_path, "--parts", "nothing")
    assert done.returncode == 2 and "'nothing'; expected some of gradients" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    done = call(tmp_path, "--budget-s", "3000", "--json", str(tmp_path / "all.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {part["part"] for part in json.loads((tmp_path / "all.json").read_text())["parts"]}
    assert parts == {part.name for part in gpu_acceptance.PARTS}
