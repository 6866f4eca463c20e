"""The acceptance script for GPUs, on a CPU: its table, its budgets and resuming, its refusals;
slow, every part at tiny sizes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_acceptance  # noqa: E402
from common import row  # noqa: E402
from gpu_acceptance import Part, Worker  # noqa: E402


def call(out: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        str(BENCHMARKS / "gpu_acceptance.py"),
        "--device",
        "cpu",
        "--out",
        str(out),
        *words,
    ]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **environment})


def complete(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": "complete", "seconds": 1.0, "rows": rows}


def clipping_result(one_pass: float) -> dict[str, Any]:
    return complete(
        [
            row("mae_base", "non_private_eager", "time_ratio", [1.2]),
            row("mae_base", "non_private_compiled", "time_ratio", [1.0]),
            row("mae_base", "one_pass_eager", "time_ratio", [one_pass + 1]),
            row("mae_base", "one_pass_compiled", "time_ratio", [one_pass]),
            row("mae_base", "one_pass_compiled", "records_per_s", [1000.0]),
        ]
    )


@pytest.mark.parametrize(("one_pass", "verdict"), [(1.09, "ok"), (1.11, "MISSED")])
def test_the_best_one_pass_variant_is_held_against_its_bar(one_pass: float, verdict: str) -> None:
    shown, good = gpu_acceptance.table({"clip_mae_base": clipping_result(one_pass)}, "cuda")
    line = next(line for line in shown.splitlines() if "one_pass/time_ratio" in line)
    assert good and f"{one_pass:.4g}" in line and line.endswith(f"{verdict}, bar 1.1")


@pytest.mark.parametrize(("ours", "verdict"), [(950.0, "ok"), (880.0, "MISSED")])
def test_the_largest_batch_is_compared_with_the_largest_without_privacy(
    ours: float, verdict: str
) -> None:
    rows = [
        row("mae_base", v, "max_physical_batch", [n])
        for v, n in (("non_private_eager", 1000.0), ("one_pass_eager", ours))
    ]
    shown, _ = gpu_acceptance.table({"batches": complete(rows)}, "cuda")
    assert next(
        line for line in shown.splitlines() if "mae_base/physical_batch_ratio" in line
    ).endswith(f"{verdict}, bar 0.9")
    assert next(
        line for line in shown.splitlines() if "cap_base/physical_batch_ratio" in line
    ).endswith("not measured")


def test_the_noises_share_is_of_the_whole_step() -> None:
    found = {
        "clip_mae_base": clipping_result(1.05),
        "noise_speed": complete([row("privatize_99M", "cuda", "time_s", [2.0])]),
    }
    assert gpu_acceptance.figures("noise_speed", found)[
        "share of a step of 98,304 records"
    ] == pytest.approx(2 / (2 + 98.304))


def test_a_check_that_does_not_hold_is_named_and_fails_the_whole() -> None:
    rows = [
        row("a", "noise", "value", [2.0]),
        row("a", "noise", "bound", [1.0]),
        row("b", "noise", "value", [0.5]),
    ]
    shown, good = gpu_acceptance.table(
        {"noise": complete([*rows, row("b", "noise", "bound", [1.0])])}, "cpu"
    )
    assert not good and "1 of 2 checks hold" in shown and "WRONG a: 2, at most 1" in shown
    unbounded, good = gpu_acceptance.table(
        {"noise": complete([row("a", "noise", "value", [0.0])])}, "cpu"
    )
    assert not good and "WRONG a" in unbounded, "a check without its bound proves nothing"


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Callable[[], Worker]:
    """Workers that run ``body`` for each request, with ``part`` and ``answer`` there."""
    lines = [
        "import json, os, sys, time",
        "def answer(**event): print(json.dumps(event), flush=True)",
        "answer(environment={})",
        "for line in sys.stdin:",
    ]
    lines += [f"    {line}" for line in ["part = json.loads(line)['part']", *body.splitlines()]]
    (tmp_path / "gpu_parts.py").write_text("\n".join(lines))
    monkeypatch.setattr(gpu_acceptance, "HERE", tmp_path)
    return lambda: Worker("cpu", tmp_path / "log.txt")


def test_a_part_that_outlasts_its_limit_or_dies_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = script(
        tmp_path,
        monkeypatch,
        "answer(row=1)\n"
        "if part == 'long': time.sleep(900)\n"
        "if part == 'dies': os._exit(9)\n"
        "answer(complete=1)",
    )
    for name, expected in (
        ("short", ("complete", True)),
        ("long", ("stopped after 1 s", False)),
        ("dies", None),
    ):
        worker, kept = start(), []  # type: Worker, list[Any]
        found = worker.run(Part(name, "", 1), 900 if name != "long" else 1, kept.append)
        worker.stop()
        assert kept == [1]
        assert (
            found == expected
            if expected
            else (found[0].startswith("failed: the process ended with status 9") and not found[1])
        )


def test_what_a_part_raises_is_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = script(tmp_path, monkeypatch, "answer(failed='OutOfMemoryError: no')")()
    assert worker.run(Part("a", "", 1), 900, print) == (
        "failed: OutOfMemoryError: no; see log.txt",
        True,
    )
    worker.stop()


def test_a_complete_part_is_not_run_again_unless_the_code_changed(tmp_path: Path) -> None:
    first = call(tmp_path, "--parts", "totals")
    assert first.returncode == 0, first.stderr
    assert "2 of 2 checks hold" in first.stdout and "totals: complete" in first.stderr
    path = tmp_path / gpu_acceptance.RESULTS
    result = json.loads(path.read_text())
    assert result["parts"][0]["versions"]["torch"] and result["parts"][0]["rows"]
    again = call(tmp_path, "--parts", "totals")
    assert (
        again.returncode == 0
        and "totals:" not in again.stderr
        and "2 of 2 checks hold" in again.stdout
    )
    path.write_text(json.dumps(result | {"code": "other"}))
    assert "totals:" in call(tmp_path, "--parts", "totals").stderr


def test_without_time_every_part_is_left(tmp_path: Path) -> None:
    done = call(tmp_path, "--minutes", "0.001")
    assert done.returncode == 75 and "left: noise, totals, gradients" in done.stdout


def test_wrong_input_gets_one_line(tmp_path: Path) -> None:
    for words, said in (
        (["--parts", "nothing"], "'nothing'; expected some of noise"),
        (["--minutes", "nan"], "--minutes: nan; expected"),
    ):
        done = call(tmp_path, *words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    done = call(tmp_path, "--device", "cuda", "--parts", "totals", CUDA_VISIBLE_DEVICES="")
    assert (
        done.returncode == 2
        and "torch finds no GPU; expected one" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_package_found_by_its_path_alone_is_refused(tmp_path: Path) -> None:
    """Sources on PYTHONPATH in an interpreter without an installed dpvision; the checkpoints could
    not name its version.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "dpvision").symlink_to(BENCHMARKS.parent / "src" / "dpvision")
    argv = [
        sys.executable,
        "-S",
        str(BENCHMARKS / "gpu_acceptance.py"),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert (
        done.returncode == 2
        and "found by its path alone; expected an installed package" in done.stderr
    ), done.stderr


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    done = call(tmp_path, "--minutes", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {
        part["part"]: part
        for part in json.loads((tmp_path / gpu_acceptance.RESULTS).read_text())["parts"]
    }
    assert parts.keys() == gpu_acceptance.BY_NAME.keys() and all(
        parts[name]["rows"] for name in parts if name != "batches"
    )
