"""benchmarks/step.py: its private step is the loop's, and its parts are the whole step."""

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import step as benchmark
from made import secrets

from dpvision.train.distributed import Group
from dpvision.train.loop import fit
from dpvision.train.start import new_session

ARGS = Namespace(
    batch=16, physical=8, threads=1, rounds=2, device="cpu", precision="float32", compile=False
)


def test_the_private_step_is_a_step_of_the_training_loop(tmp_path: Path) -> None:
    config = benchmark.make_config("mae_micro", ARGS, tmp_path, Group(0, 1, torch.device("cpu")))
    config = replace(
        config,
        privacy=replace(config.privacy, steps=1),
        optim=replace(config.optim, warmup_steps=0),
    )
    with new_session(config, tmp_path / "by_loop") as s:
        first = {name: p.detach().clone() for name, p in s.model.named_parameters()}
        fit(s, secrets=secrets(benchmark.DRAW_KEY, benchmark.NOISE_KEY), quiet=True)
        by_loop = dict(s.model.named_parameters())
    with new_session(config, tmp_path / "by_benchmark") as s:
        benchmark.private_step(s)
        assert s.run is not None and s.run.ledger.steps == 1
        for name, p in s.model.named_parameters():
            assert torch.equal(p, by_loop[name])
    assert not all(torch.equal(p, first[name]) for name, p in by_loop.items())


@pytest.mark.slow
def test_the_parts_add_up_to_the_step() -> None:
    rows = list(benchmark.measure("mae_micro", ARGS))
    value = {(r["variant"], r["metric"]): r["value"] for r in rows}
    shared = {"draw_s", "load_s", "clip_s", "optimizer_s"}
    for variant, names in (
        ("private", shared | {"totals_s", "reduce_s", "noise_s", "ledger_s"}),
        ("non_private", shared),
    ):
        low = {r["metric"]: r["low"] for r in rows if r["variant"] == variant}
        high = {r["metric"]: r["high"] for r in rows if r["variant"] == variant}
        assert {name for name in low if name.endswith("_s")} == names | {"step_s", "cpu_s"}
        assert all(low[name] > 0 for name in names)
        assert sum(low[name] for name in names) <= high["step_s"]
        assert sum(high[name] for name in names) > 0.9 * low["step_s"]
    assert value["private", "records"] == value["non_private", "records"]


@pytest.mark.slow
def test_two_ranks_take_the_same_step_on_both_sides(tmp_path: Path) -> None:
    script, result = Path(benchmark.__file__), tmp_path / "step.json"
    argv = [
        "--small",
        "--models",
        "mae_micro",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--batch",
        "16",
        "--physical",
        "8",
        "--json",
        str(result),
    ]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        *argv,
    ]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    value = {
        (r["variant"], r["metric"]): r["value"] for r in json.loads(result.read_text())["rows"]
    }
    assert value["private", "records"] == value["non_private", "records"] > 0
    assert value["private", "reduce_s"] > 0 and value["non_private", "reduce_s"] > 0
