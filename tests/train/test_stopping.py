"""Stops: a step in progress is finished in time or abandoned, on all ranks; checkpoints that are
written while training goes on are of one step; one command starts a run and goes on with it.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from made import secrets

from dpvision.checkpoint import list_checkpoints, load_checkpoint, state_tensors
from dpvision.cli import main
from dpvision.config import RunConfig, to_dict
from dpvision.errors import CheckpointError
from dpvision.privacy.ledger_format import read_ledger
from dpvision.runs import run as runs
from dpvision.runs.folder import STOPPED
from dpvision.runs.run import Stopped, StopRequest
from dpvision.train import distributed, loop, step
from dpvision.train.distributed import Group
from dpvision.train.loop import fit
from dpvision.train.start import new_session, resumed_session
from dpvision.train.stopping import Stopping

pytestmark = pytest.mark.usefixtures("gates_once")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    """Under nohup or in the background some are ignored, and then they do not stop a run either."""
    default = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, default[number]) for number in default}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def with_hardware(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, hardware=replace(config.hardware, **changes))


def signal_in_a_pass(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, at_step: int
) -> list[int]:
    """Send a real signal to this process before the second pass of a step; the list gets the step
    of each pass that is read.
    """
    read, passes = step.physical_batches, list[int]()

    def watched(store: Any, rows: Any, key: Any, *args: Any, **named: Any) -> Iterator[Any]:
        for batch in read(store, rows, key, *args, **named):
            passes.append(key.step)
            if passes.count(key.step) == 2 and key.step == at_step:
                os.kill(os.getpid(), number)
            yield batch

    monkeypatch.setattr(step, "physical_batches", watched)
    return passes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_step_that_does_not_end_in_time_is_charged_and_not_applied(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    config = with_hardware(config, finish_step_s=0.0, physical_batch_size=4)
    passes = signal_in_a_pass(monkeypatch, number, at_step=1)
    root = tmp_path / "run"
    with new_session(config, root) as session:
        before: dict[str, torch.Tensor] = {}
        real = loop.privatize

        def noted(*args: Any, **named: Any) -> Any:
            assert not before, "noise was drawn for the abandoned step"
            gradient = real(*args, **named)
            before.update(dict.fromkeys(gradient.grads))
            return gradient

        monkeypatch.setattr(loop, "privatize", noted)
        assert not fit(session, secrets=secrets())
        assert session.run is not None and session.run.ledger.steps == 2 and session.updates == 1
        weights = {name: value.clone() for name, value in state_tensors(session.model).items()}
    assert passes.count(1) == 2 < passes.count(0), "the abandoned step read on"
    said = capsys.readouterr().err
    assert "Step 2 did not end within 0 s: it is abandoned, and counts in epsilon." in said
    (saved,) = list_checkpoints(root)
    assert saved.parent.parent.name == "confidential", "the time of a secret batch shows"
    found = load_checkpoint(saved)
    assert (found.manifest["ledger_steps"], found.manifest["updates"]) == (2, 1)
    assert all(torch.equal(found.model[name], value) for name, value in weights.items())
    assert json.loads((root / "stopped.json").read_text()) == {"exit_status": STOPPED}


def test_a_resumed_run_leaves_out_an_abandoned_step_and_nothing_else(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle charges the same step and does not compute it, in a run without a stop."""
    stopped = with_hardware(config, finish_step_s=0.0, physical_batch_size=4)
    with monkeypatch.context() as patched:
        signal_in_a_pass(patched, signal.SIGTERM, at_step=1)
        with new_session(stopped, tmp_path / "run") as session:
            assert not fit(session, secrets=secrets(), quiet=True)
    with resumed_session(tmp_path / "run") as session:
        assert fit(session, secrets=secrets(), quiet=True) and session.updates == 3
    assert not (tmp_path / "run" / "stopped.json").exists()
    charge = loop._charge

    def skipping(session: Any) -> int | None:
        if session.run.ledger.steps == 1:
            session.run.ledger.append()
        return charge(session)

    monkeypatch.setattr(loop, "_charge", skipping)
    with new_session(stopped, tmp_path / "oracle") as session:
        assert fit(session, secrets=secrets(), quiet=True)
    one, two = load_checkpoint(tmp_path / "run"), load_checkpoint(tmp_path / "oracle")
    for found, expected in ((one.model, two.model), (one.ema or {}, two.ema or {})):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert one.path.parent.parent == tmp_path / "run", "the plan's end may leave"
    lines = [
        (tmp_path / name / "progress.jsonl").read_text().splitlines() for name in ("run", "oracle")
    ]
    assert [json.loads(line)["step"] for line in lines[0]] == list(range(1, 5))
    assert set(lines[1]) < set(lines[0]), "the public line of an abandoned step is another"


def test_a_resume_refuses_where_another_process_saved_after_it_had_read_the_run(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: it went on from the older checkpoint, and removed the newer one."""
    root = tmp_path / "run"
    with new_session(config, root) as session:
        monkeypatch.setattr(
            loop, "_any", lambda flags, group: [session.updates == 1, *[False] * (len(flags) - 1)]
        )
        assert not fit(session, quiet=True)
    first = Stopped.read(root)
    monkeypatch.undo()
    with resumed_session(root) as session:
        store, lineage = session.store, session.lineage
        assert fit(session, quiet=True)
    kept = list_checkpoints(root)
    with (
        pytest.raises(CheckpointError, match=r"another process went on with .* Give the same"),
        first.resumed(store, lineage, num_bytes=0),
    ):
        raise AssertionError("it was opened")
    assert list_checkpoints(root) == kept


def test_a_last_step_that_is_abandoned_ends_the_plan(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = config.privacy.steps - 1
    signal_in_a_pass(monkeypatch, signal.SIGTERM, at_step=last)
    config = with_hardware(config, finish_step_s=0.0, physical_batch_size=4)
    with new_session(config, tmp_path / "run") as session:
        assert fit(session, quiet=True)
    manifest = load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{last + 1:08d}").manifest
    assert (manifest["ledger_steps"], manifest["updates"]) == (last + 1, last)
    assert f"Step {last + 1} did not end within 0 s" in capsys.readouterr().err, "--quiet hid it"
    assert not (tmp_path / "run" / "stopped.json").exists()


def test_ranks_wait_for_a_slow_block_before_they_call_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: a checkpoint longer than the group's timeout ended the job as a lost rank. Orphaned
    ranks, whose store ended with the agent, still save.
    """
    store, written = dist.HashStore(), threading.Event()
    called: list[int] = []

    def gathered(text: str, group: Group) -> list[str]:
        assert written.is_set() or group.store is not store, "the group's timeout began"
        called.append(group.rank)
        return [text]

    monkeypatch.setattr(distributed, "gather_texts", gathered)

    def waits() -> None:
        with distributed.together(Group(1, 2, CPU, store), slow="saved"):
            pass

    other = threading.Thread(target=waits)
    other.start()
    with distributed.together(Group(0, 2, CPU, store), slow="saved"):
        time.sleep(0.2)
        assert not called
        written.set()
    other.join(30)
    assert sorted(called) == [0, 1]

    class Ended(dist.HashStore):
        def set(self, *_: Any) -> None:
            raise RuntimeError("Broken pipe")

    with distributed.together(Group(0, 2, CPU, Ended()), slow="saved"):
        pass
    assert called[2:] == [0]


def test_ctrl_c_that_torchrun_passes_on_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: what all processes of a job received, and torchrun sent again, ended them unsaved."""

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(KeyboardInterrupt), StopRequest("", lambda: 0):
        twice()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with StopRequest("", lambda: 0) as request:
        twice()
    assert request.asked


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest("", lambda: 0) as request:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not request.asked and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_agent_that_ended_during_the_imports_is_missed(tmp_path: Path) -> None:
    """Before: its process, adopted by another, took that one for the agent and never stopped."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time\nimport dpvision.environment\nopen('started', 'w')\n"
        "while os.getppid() == dpvision.environment.PARENT: time.sleep(0.01)\n"
        "from dpvision.train import distributed\n"
        "open('found', 'w').write(str(distributed.join('cpu').orphaned))\n"
    )
    agent = (
        "import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, 'rank.py'])\n"
        "while not os.path.exists('started'): time.sleep(0.01)\n"
    )
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "1"}
    subprocess.run([sys.executable, "-c", agent], cwd=tmp_path, env=environment, check=True)
    found = tmp_path / "found"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (found.exists() and found.read_text()):
        time.sleep(0.05)
    assert found.read_text() == "True"


def test_a_rank_that_was_asked_tells_the_others_and_an_orphan_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, clock = dist.HashStore(), [100.0]
    monkeypatch.setattr("dpvision.train.stopping.time.monotonic", lambda: clock[0])
    asked = StopRequest("", lambda: 0)
    one = Stopping(asked, Group(0, 2, CPU, store), 30.0)
    two = Stopping(StopRequest("", lambda: 0), Group(1, 2, CPU, store), 30.0)
    assert not one.asked() and not two.asked()
    asked.since = clock[0]
    assert one.asked() and not one.overdue()
    clock[0] += 1.5
    assert two.asked()
    clock[0] += 29
    assert one.overdue() and not two.overdue(), "each counts from when it knew"
    alone = Stopping(StopRequest("", lambda: 0), Group(0, 1, CPU, parent=os.getppid()), 0.0)
    assert not alone.asked()
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert alone.asked()


def test_a_checkpoint_written_while_training_goes_on_is_of_one_step(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is written when two more steps are done."""
    write, trained = runs.save_checkpoint, threading.Event()
    at_step: dict[int, dict[str, torch.Tensor]] = {}
    written: dict[int, Any] = {}
    take = loop._take

    def watched(step: int, session: Any, *args: Any) -> Any:
        metrics = take(step, session, *args)
        at_step[step] = {k: v.clone() for k, v in state_tensors(session.model).items()}
        if step == 2:
            assert session.saved_steps is None, "not written yet"
            trained.set()
        return metrics

    def late(folder: Path, *args: Any, **named: Any) -> Path:
        assert trained.wait(60)
        path = write(folder, *args, **named)
        written[len(written)] = load_checkpoint(path)
        return path

    monkeypatch.setattr(loop, "_take", watched)
    monkeypatch.setattr(runs, "save_checkpoint", late)
    # due once, after the first step
    ticks = iter([0.0, 1.0, *[1.0] * 100])
    monkeypatch.setattr(loop, "time", type("Clock", (), {"monotonic": lambda: next(ticks)}))
    with new_session(with_hardware(config, checkpoint_every_s=0.5), tmp_path / "run") as session:
        assert fit(session, quiet=True) and session.saved_steps == config.privacy.steps
    first, last = written[0], written[1]
    assert (first.manifest["ledger_steps"], first.manifest["updates"]) == (1, 1)
    assert all(torch.equal(first.model[k], v) for k, v in at_step[0].items())
    assert any(not torch.equal(first.model[k], v) for k, v in at_step[2].items())
    assert last.manifest["ledger_steps"] == config.privacy.steps
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert ledger.at(first.manifest["ledger_digest"]).steps == 1


def test_a_disk_that_is_full_while_training_goes_on_ends_it_and_keeps_what_was_saved(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = runs.save_checkpoint

    def full(folder: Path, *args: Any, **named: Any) -> Path:
        if folder.name != "step-00000001":
            raise CheckpointError(f"checkpoint: {folder} ({os.strerror(errno.ENOSPC)})")
        return write(folder, *args, **named)

    monkeypatch.setattr(runs, "save_checkpoint", full)
    often = with_hardware(config, checkpoint_every_s=0.0)
    with new_session(often, tmp_path / "run") as session:
        with pytest.raises(CheckpointError, match="No space left"):
            fit(session, quiet=True)
        assert session.run is not None and session.unsaved() == session.run.ledger.steps - 1
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "run").manifest["ledger_steps"] == 1
    with resumed_session(tmp_path / "run") as session:
        assert fit(session, quiet=True)


KILLED = """
import json, os, signal, sys, threading
from pathlib import Path
from dpvision.config import RunConfig, from_dict
from dpvision.train import loop, start

start.check_gates = start.check_reference_bits = lambda *a, **k: None
rename, renamed, two_more = Path.rename, [], threading.Event()

def at_the_second(path, target):
    if "step-" in str(target) and "partial" in path.name:
        renamed.append(target)
        if len(renamed) == 2:
            two_more.wait(60)  # training goes on meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target)

Path.rename = at_the_second
charge = loop._charge
def charged(session):
    if len(renamed) == 2:
        two_more.set()
    return charge(session)
loop._charge = charged
config = from_dict(RunConfig, json.loads(Path(sys.argv[1]).read_text()))
with start.new_session(config, Path(sys.argv[2])) as session:
    loop.fit(session, quiet=True)
"""


@pytest.mark.slow
def test_a_kill_between_copy_and_rename_leaves_the_checkpoint_before(
    config: RunConfig, tmp_path: Path
) -> None:
    often = with_hardware(config, checkpoint_every_s=0.0)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(often)))
    command = [sys.executable, "-c", KILLED, tmp_path / "config.json", tmp_path / "run"]
    done = subprocess.run(command, timeout=900)
    assert done.returncode == -signal.SIGKILL
    manifest = load_checkpoint(tmp_path / "run").manifest
    assert manifest["ledger_steps"] == manifest["updates"] == 1
    with resumed_session(tmp_path / "run") as session:
        assert session.run is not None and session.run.ledger.steps >= 2, "charged before the deed"
        lost = session.run.ledger.steps - 1
        assert fit(session, quiet=True) and session.updates == config.privacy.steps - lost


def test_one_command_starts_a_run_and_goes_on_with_it(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = config.model
    command = [
        *("train", "vip.micro_random_start", "--data", str(config.data.store), "--quiet"),
        *("--runs", str(tmp_path), "--name", "run", "--resume-or-start"),
        *("--privacy.dataset-size", "60", "--privacy.expected-batch-size", "20"),
        *("--privacy.steps", "3", "--privacy.noise-multiplier", "2"),
        *("--hardware.physical-batch-size", "7", "--hardware.device", "cpu"),
        *("--model.encoder.image-size", "16", "--model.encoder.depth", "1"),
        *("--model.encoder.width", str(model.encoder.width), "--model.encoder.num-heads", "2"),
        *("--model.decoder-width", "16", "--model.decoder-num-heads", "2"),
    ]

    def foretold() -> dict[str, Any]:
        assert main([*command, "--dry-run", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["store_total"]

    charge = foretold()
    with monkeypatch.context() as patched:
        signal_in_a_pass(patched, signal.SIGUSR1, at_step=0)
        with pytest.raises(SystemExit) as stopped:
            main(command)
    assert stopped.value.code == STOPPED == 75
    mark = tmp_path / "run" / "stopped.json"
    assert mark.exists() and "Resuming" not in capsys.readouterr().err
    assert main([*command, "--privacy.noise-multiplier", "3"]) == 2
    said = capsys.readouterr().err
    assert "privacy.noise_multiplier differ from those of" in said and mark.exists()
    assert main(command) == 0
    said = capsys.readouterr()
    assert "Resuming: 1 of 3 steps charged" in said.err and "Finished after 3 of 3" in said.out
    assert not mark.exists()
    assert main(command) == 0, "a run that has ended goes on with nothing"
    assert "Finished after 3 of 3" in capsys.readouterr().out
    assert foretold() == charge, "the run counts twice"
    assert load_checkpoint(tmp_path / "run").manifest["ledger_steps"] == 3
