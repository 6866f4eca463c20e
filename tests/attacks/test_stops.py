"""What an interrupt costs: charged steps must not vanish without a word, and weights must not be
random without a word.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpvision.adapt import release
from dpvision.adapt.session import adapt, new_head_session, resumed_head_session
from dpvision.checkpoint import list_checkpoints, load_checkpoint
from dpvision.cli import main
from dpvision.config import (
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
    to_dict,
)
from dpvision.data.synthetic_store import write_scenes
from dpvision.privacy.ledger_format import read_ledger
from dpvision.privacy.printed import up
from dpvision.runs.folder import STOPPED
from dpvision.train import loop
from dpvision.train.loop import fit
from dpvision.train.start import new_session

from ..adapt.runs_of_heads import head_config, write_digits

pytestmark = pytest.mark.usefixtures("gates_once")

STEPS = 6


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, 60, 16, workers=1, public=False)
    return folder


@pytest.fixture
def config(scenes: Path) -> RunConfig:
    base = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=60,
            expected_batch_size=20,
            steps=STEPS,
            max_grad_norm=0.5,
            noise_multiplier=4.0,
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=4,
        ),
        optim=OptimConfig(learning_rate=1e-3),
        hardware=HardwareConfig(device="cpu", physical_batch_size=30, workers=1),
    )
    return replace(base, data=replace(base.data, store=str(scenes)))


INTERRUPTED = """
import json, os, signal, sys
from pathlib import Path
from dpvision.config import RunConfig, from_dict
from dpvision.train import loop
from dpvision.train.start import new_session

real, calls, rank = loop.privatize, [], int(os.environ.get("RANK", "0"))

def interrupted(*args, **kwargs):
    calls.append(1)
    if len(calls) == 3 and rank == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGINT)
    return real(*args, **kwargs)

loop.privatize = interrupted
config = from_dict(RunConfig, json.loads(Path(sys.argv[1]).read_text()))
with new_session(config, Path(sys.argv[2])) as session:
    complete = loop.fit(session)
print("complete" if complete else "stopped", len(calls))
"""


def _process(
    config: RunConfig, folder: Path, rank: int, launcher: list[str]
) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "script.py").write_text(INTERRUPTED)
    return subprocess.run(
        [
            sys.executable,
            *launcher,
            str(folder / "script.py"),
            str(folder / "config.json"),
            str(folder / "run"),
            str(rank),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_an_interrupt_in_a_real_process_loses_no_charged_step(
    config: RunConfig, tmp_path: Path
) -> None:
    """Before: no checkpoint, 3 of 3 charged steps without weights."""
    done = _process(config, tmp_path, 0, [])
    assert done.returncode == 0 and done.stdout == "stopped 3\n", done.stderr[-2000:]
    assert "Ctrl-C again" in done.stderr
    manifest = load_checkpoint(tmp_path / "run").manifest
    assert (
        manifest["ledger_steps"]
        == manifest["updates"]
        == 3
        == read_ledger(tmp_path / "run" / "ledger.jsonl").steps
    )


@pytest.mark.slow
def test_an_interrupt_of_one_rank_stops_all_after_the_same_step(
    config: RunConfig, tmp_path: Path
) -> None:
    done = _process(
        config,
        tmp_path,
        1,
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    )
    assert done.returncode == 0 and sorted(done.stdout.split("\n")) == [
        "",
        "stopped 3",
        "stopped 3",
    ], done.stderr[-2000:]
    assert load_checkpoint(tmp_path / "run").manifest["updates"] == 3


def test_a_second_interrupt_stops_at_once_and_says_what_is_lost(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _interrupt(monkeypatch, loop, at=2, times=2)
    before = signal.getsignal(signal.SIGINT)
    with new_session(config, tmp_path / "run") as session:
        with pytest.raises(KeyboardInterrupt):
            fit(session, quiet=True)
        assert session.run is not None and session.run.ledger.steps == 2
    assert not list_checkpoints(tmp_path / "run") and signal.getsignal(signal.SIGINT) is before
    assert "2 charged steps were not saved and are lost" in capsys.readouterr().err


def test_resume_says_what_was_charged_and_lost_and_that_it_starts_from_initial_weights(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before: not a word; the run went on from random weights."""
    _interrupt(monkeypatch, loop, at=2, times=2)
    with new_session(config, tmp_path / "run") as session, pytest.raises(KeyboardInterrupt):
        fit(session, quiet=True)
    monkeypatch.undo()
    capsys.readouterr()
    resume = ["train", "vip.micro", "--runs", str(tmp_path), "--name", "run", "--resume", "--quiet"]
    _interrupt(monkeypatch, loop, at=1, times=1)
    with pytest.raises(SystemExit) as stopped:
        main(resume)
    assert stopped.value.code == STOPPED == 75
    said = capsys.readouterr()
    assert f"2 of {STEPS} steps charged (epsilon " in said.err and f"{STEPS - 2} left" in said.err
    assert (
        f" for all {STEPS} planned), " in said.err
        and "2 steps were charged and lost; they count in epsilon" in said.err
    )
    assert (
        "no checkpoint: the run restarts from the initial weights, with 2 charged steps lost"
        in said.err
    )
    assert f"Stopped after 3 of {STEPS} steps" in said.out and "--resume" in said.out
    monkeypatch.undo()
    assert main([*resume, "--json"]) == 0
    said = capsys.readouterr()
    assert f"3 of {STEPS} steps charged" in said.err and "2 steps were charged and lost" in said.err
    assert "no checkpoint" not in said.err and json.loads(said.out)["updates"] == STEPS - 2


def test_a_head_that_is_interrupted_ends_with_a_step_and_goes_on_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the first interrupt lost all releases that were charged."""
    root = tmp_path / "run"
    _interrupt(monkeypatch, release, at=2, times=1)
    with new_head_session(
        head_config(write_digits(tmp_path / "digits", 0, 300), "feature_covariance"), root
    ) as session:
        adapt(session)
        # Two releases measure the covariance; the first step after them is the least that makes a
        # head.
        assert (
            load_checkpoint(root).manifest["updates"]
            == session.run.ledger.steps
            == 3
            < session.plan.steps
        )
    monkeypatch.undo()
    with resumed_head_session(root) as session:
        assert session.lost == 0
        adapt(session)
        assert (
            load_checkpoint(root).manifest["updates"]
            == session.run.ledger.steps
            == session.plan.steps
        )


def test_a_head_that_is_interrupted_twice_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _interrupt(monkeypatch, release, at=2, times=2)
    with new_head_session(
        head_config(write_digits(tmp_path / "digits", 0, 300), "feature_covariance"),
        tmp_path / "run",
    ) as session:
        with pytest.raises(KeyboardInterrupt):
            adapt(session)
        charged = session.run.ledger.steps
    assert charged and not list_checkpoints(tmp_path / "run")
    assert f"{charged} charged steps were not saved and are lost" in capsys.readouterr().err


@pytest.mark.slow
def test_adapt_stops_after_the_step_it_is_in_says_what_was_charged_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before: it went on for all 60 steps."""
    store, test = (
        write_digits(tmp_path / "digits", 0, 300),
        write_digits(tmp_path / "test", 300, 400, public=True),
    )
    argv = [
        "adapt",
        "--data",
        str(store.path),
        "--encoder",
        "pixels",
        "--num-classes",
        "10",
        "--dataset-size",
        "300",
        "--epsilon",
        "8",
    ]
    argv += [
        "--head",
        "many_steps",
        "--runs",
        str(tmp_path),
        "--name",
        "run",
        "--quiet",
        "--test",
        str(test.path),
        "--resume-or-start",
    ]
    _interrupt(monkeypatch, release, at=20, times=1)
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    monkeypatch.undo()
    said = capfd.readouterr()
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert (
        stopped.value.code == STOPPED and "finishing this step" in said.err and ledger.steps == 20
    )
    assert (
        f"Stopped after 20 of 60 releases: epsilon {up(ledger.plan.spent(60).epsilon)} at delta "
        "0.001 for all 60 planned" in said.out
    )
    manifest = load_checkpoint(tmp_path / "run").manifest
    assert manifest["ledger_steps"] == manifest["updates"] == 20
    assert manifest["lineage"][-1]["guarantee"]["epsilon"] == pytest.approx(
        ledger.plan.spent(60).epsilon
    )
    assert (
        "100 test records" in said.out
        and f"dpvision adapt --resume --runs {tmp_path} --name run" in said.out
    )
    assert (tmp_path / "run" / "stopped.json").exists()
    assert main(argv) == 0, "the same command goes on"
    said = capfd.readouterr()
    assert not (tmp_path / "run" / "stopped.json").exists()
    assert (
        "Resuming: 20 of 60 releases charged" in said.err
        and "Finished after 60 of 60 releases" in said.out
        and "lost" not in said.err
    )
    manifest = load_checkpoint(tmp_path / "run").manifest
    assert manifest["ledger_steps"] == manifest["updates"] == 60


def _interrupt(monkeypatch: pytest.MonkeyPatch, module: Any, at: int, times: int) -> None:
    """Real SIGINTs to this process in the middle of the ``at``-th release."""
    real, calls = module.privatize, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "privatize", interrupted)
