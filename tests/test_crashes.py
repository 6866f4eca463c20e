"""What a crash leaves: half-made runs, torn logs, temporary folders. benchmarks/crashes.py stops
whole commands at random places; these are the faults found with it.
"""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from dpvision.checkpoint import keep_newest, list_checkpoints, load_checkpoint, save_checkpoint
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.data.open import open_store
from dpvision.data.synthetic_store import write_scenes
from dpvision.files import append_lines, new_folder
from dpvision.privacy.plan import make_plan
from dpvision.runs.run import Stopped, new_run
from dpvision.train.log import RunLog, StepMetrics

ROOT = Path(__file__).resolve().parents[1]
PRIVACY = PrivacyConfig(
    dataset_size=40, expected_batch_size=10, steps=3, max_grad_norm=1.0, noise_multiplier=3.0
)
COMMANDS = ("--commands", "save,import,resume", "--seed", "7")
MANIFEST = {
    "run_id": "r",
    "ledger_steps": 1,
    "updates": 1,
    "config": {},
    "plan": {},
    "ledger_digest": "d",
    "lineage": [],
}


class Killed(BaseException):
    """As SIGKILL: no handler of errors expects it."""


def _kill_at_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    rename, count = os.replace, itertools.count(1)

    def replaced(*args: object, **named: object) -> None:
        if next(count) >= number:
            raise Killed
        rename(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", replaced)


def test_a_start_killed_at_any_file_leaves_a_free_name_or_a_run_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scenes(tmp_path / "scenes", 40, 16, workers=1, public=False)
    store, plan = open_store(tmp_path / "scenes"), make_plan(PRIVACY)
    base = RunConfig(recipe="a test's", privacy=PRIVACY)
    config = replace(base, data=replace(base.data, store=str(store.path)))
    for number in range(1, 30):
        root = tmp_path / "runs" / str(number)

        def start(root: Path = root) -> None:
            with new_run(root, config, plan, store, [], num_bytes=1, secluded=False):
                pass

        with monkeypatch.context() as patched:
            _kill_at_rename(patched, number)
            try:
                start()
                break
            except Killed:
                pass
        if (root / "config.json").exists():
            with Stopped.read(root).resumed(store, [], num_bytes=1) as run:
                assert run.ledger.steps == 0
        else:
            start()
    assert number > 6, "the run has at least six files"


@pytest.mark.parametrize("name", ["progress.jsonl", "confidential/metrics.jsonl"])
def test_lines_after_a_torn_one_are_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / "confidential").mkdir()
    plan, metrics = make_plan(PRIVACY), StepMetrics(*[1.0] * len(StepMetrics.__annotations__))

    def log(step: int) -> None:
        with RunLog(tmp_path, tmp_path / "confidential", plan, 0, quiet=True, private=True) as made:
            made.step(step, metrics)

    log(0)
    first = (tmp_path / name).read_bytes()
    log(1)
    whole = (tmp_path / name).read_bytes()
    for end in {len(first), len(first) + 1, len(whole) - 2, len(whole) - 1, len(whole)}:
        (tmp_path / name).write_bytes(whole[:end])
        log(2)
        steps = [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()]
        assert steps == ([1, 2, 3] if end == len(whole) else [1, 3])


def test_a_full_disk_in_tensorboard_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "confidential").mkdir()
    plan, metrics = make_plan(PRIVACY), StepMetrics(*[1.0] * len(StepMetrics.__annotations__))
    monkeypatch.setattr(RecordWriter, "write", full)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # restored afterwards
    with (
        pytest.raises(OSError, match="No space"),
        RunLog(tmp_path, tmp_path / "confidential", plan, 0, quiet=True, private=True) as log,
    ):
        log.step(0, metrics)
    assert "Traceback" not in capsys.readouterr().err


def test_a_line_cut_at_every_byte_is_removed_by_the_next(tmp_path: Path) -> None:
    path, first, last = tmp_path / "lines", b'{"a": 1}\n' * 20_000, b'{"b": 2}\n'
    for end in range(len(last) + 1):
        path.write_bytes(first + last[:end])
        with append_lines(path) as file:
            file.write("new\n")
        assert path.read_bytes() == first + (last if end == len(last) else b"") + b"new\n"
    path.write_bytes(b"no line")
    append_lines(path).close()
    assert path.read_bytes() == b""


FILLING = """
import sys, time
from pathlib import Path
from dpvision.files import new_folder

with new_folder(Path(sys.argv[1])) as folder:
    (folder / "image").write_bytes(b"private")
    print("filling", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def filling(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", FILLING, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"filling\n"
        yield process


def test_what_a_killed_process_left_goes_with_the_next_folder(
    tmp_path: Path, filling: subprocess.Popen[bytes]
) -> None:
    with new_folder(tmp_path / "b"):
        pass
    assert len(list(tmp_path.glob(".a.partial-*"))) == 1, "a live process's folder is its own"
    filling.send_signal(signal.SIGKILL)
    filling.wait()
    assert [p.name for p in tmp_path.glob(".a.partial-*/*")] == ["image"]
    with new_folder(tmp_path / "c"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c"]


def test_a_kill_while_old_checkpoints_are_deleted_leaves_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        save_checkpoint(folder, MANIFEST, {"w": torch.ones(3, 2)})

    def killed(folder: Path, *_: object, **__: object) -> None:
        (folder / "model.safetensors").unlink()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            keep_newest(tmp_path, 1)
    (newest,) = list_checkpoints(tmp_path)
    assert load_checkpoint(newest).model["w"].sum() == 6
    save_checkpoint(tmp_path / "checkpoints" / "step-00000003", MANIFEST, {"w": torch.ones(1)})
    left = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    assert sorted(left) == ["step-00000002", "step-00000003"], "the half is gone"


def test_a_kill_while_a_folder_is_replaced_leaves_no_half_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints" / "step-00000001"
    save_checkpoint(folder, MANIFEST, {"w": torch.ones(3, 2)})
    rmtree = shutil.rmtree

    def killed(path: Path, *_: object, **__: object) -> None:
        if (weights := path / "model.safetensors").exists():
            weights.unlink()
            raise Killed
        rmtree(path, ignore_errors=True)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            save_checkpoint(folder, MANIFEST, {"w": torch.zeros(3, 2)})
    assert load_checkpoint(tmp_path).model["w"].sum() == 0


@pytest.mark.slow
def test_laws_hold_after_six_random_stops(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "crashes.py", "--work", tmp_path, "--points", "2", *COMMANDS],
        cwd=ROOT / "benchmarks",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    lines = (tmp_path / "points.jsonl").read_text().splitlines()
    assert done.returncode == 0 and len(lines) == 6
    assert not [line for line in lines if "error" in json.loads(line)]
