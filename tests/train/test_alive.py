"""Ranks that wait while another checks the model: told how long it has taken, and never left
waiting for one that refused, hangs or was killed. Real processes under torchrun (gloo).
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dpvision.config import RunConfig, to_dict
from dpvision.train import alive, distributed
from dpvision.train.alive import signs_of_life, wait_for_others
from dpvision.train.distributed import Group, RankLost

CPU = torch.device("cpu")


def test_a_rank_that_works_is_waited_for_and_one_that_is_silent_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It works three times as long as a silent one is waited for."""
    monkeypatch.setattr(alive, "_EVERY_S", 0.05)
    monkeypatch.setattr(alive, "SILENT_S", 0.8)
    monkeypatch.setattr(alive, "_SAY_AFTER_S", 0.2)
    store = dist.HashStore()

    def works() -> None:
        with signs_of_life(store, "checked", 0):
            time.sleep(2.0)
        store.set("checked: 0 is done", "")

    thread = threading.Thread(target=works)
    thread.start()
    with caplog.at_level(logging.WARNING, "dpvision"):
        assert wait_for_others(store, "checked", 1, 2, "checks the model") is None
    thread.join()
    said = [record.getMessage() for record in caplog.records]
    assert said and all("rank 0 checks the model: " in line for line in said)
    assert wait_for_others(store, "saved", 1, 2, "works") == (
        "rank 0 ended or hangs: no word from it for 0.8 s"
    )


class Clock:
    """Time that passes in ``sleep`` only; ``later`` maps a time to what happens then."""

    def __init__(self, later: dict[float, Callable[[], object]]) -> None:
        self.now, self.later = 0.0, later

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.later if at <= self.now]:
            self.later.pop(at)()


def test_a_job_that_was_suspended_goes_on_and_one_that_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler stops all processes for an hour; the one that waits is continued first."""
    store = dist.HashStore()

    def suspended() -> None:
        clock.now += 3600.0

    clock = Clock(
        {
            5.0: suspended,
            3610.0: lambda: store.set(alive._word("saved", 0), "6"),
            3660.0: lambda: store.set(alive._done("saved", 0), ""),
        }
    )
    monkeypatch.setattr(alive, "time", clock)
    store.set(alive._word("saved", 0), "5")
    assert wait_for_others(store, "saved", 1, 2, "writes") is None and clock.now > 3660

    def beats() -> None:
        store.set(alive._word("hangs", 0), f"{clock.now}")
        clock.later[clock.now + 10] = beats

    clock.later[clock.now] = beats
    start = clock.now
    assert wait_for_others(store, "hangs", 1, 2, "writes") == "rank 0 is not done after 7200 s"
    assert clock.now - start == pytest.approx(7200, abs=5)


def test_a_block_that_raises_what_nobody_expects_ends_the_others_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alive, "_EVERY_S", 0.1)
    store = dist.HashStore()
    first, second = (
        distributed.together(Group(rank, 2, CPU, store), slow="checked") for rank in (0, 1)
    )
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError
    words = r"rank 0 ended; expected all .* See the error of that rank"
    with pytest.raises(RankLost, match=words), second:
        pass


SCRIPT = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
from dpvision.config import RunConfig, from_dict
from dpvision.errors import PrivacyError
from dpvision.train import alive, start

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
alive.SILENT_S, alive._SAY_AFTER_S = 12.0, 1.0
config = from_dict(RunConfig, json.loads((folder / "config.json").read_text()))
config = replace(config, hardware=replace(config.hardware, rank_timeout_s=2.0))

def refuses(*_):
    time.sleep(6)  # three times as long as a collective call waits
    raise PrivacyError("separability: layer 'a' mixes records; expected none.")

def hangs(*_):
    (folder / "pid.partial").write_text(str(os.getpid()))
    (folder / "pid.partial").rename(folder / "pid")
    time.sleep(900)

for case in sys.argv[2].split(","):
    start.check_gates = refuses if case == "refuses" else hangs
    try:
        with start.new_session(config, folder / f"run-{case}"):
            raise SystemExit("a run was begun")
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    (folder / f"{case}-{rank}.partial").write_text(words)
    (folder / f"{case}-{rank}.partial").rename(folder / f"{case}-{rank}")
if rank == 1:
    time.sleep(900)  # the test ends it
"""


def start_ranks(config: RunConfig, folder: Path, cases: str) -> "subprocess.Popen[str]":
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "script.py").write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [sys.executable, *torchrun, folder / "script.py", folder, cases],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def text_of(path: Path, within_s: float = 300.0) -> str:
    until = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} is missing"
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.slow
def test_a_refusal_reaches_the_other_rank_and_a_rank_that_hangs_or_is_killed_ends_it(
    config: RunConfig, tmp_path: Path
) -> None:
    """Before: it waited two hours for a rank 0 that hangs."""
    torchrun = start_ranks(config, tmp_path, "refuses,hangs")
    try:
        assert text_of(tmp_path / "refuses-0") == (
            "PrivacyError: separability: layer 'a' mixes records; expected none."
        )
        assert text_of(tmp_path / "refuses-1") == (
            "PrivacyError: ranks: rank 0 stopped, and all others with it: separability: layer 'a' "
            "mixes records; expected none."
        )
        rank_0 = int(text_of(tmp_path / "pid"))
        os.kill(rank_0, signal.SIGSTOP)
        stopped = time.monotonic()
        assert text_of(tmp_path / "hangs-1").startswith(
            "RankLost: ranks: rank 0 ended or hangs: no word from it for 12 s; expected all until "
            "the end of the run."
        )
        assert time.monotonic() - stopped < 60
        os.kill(rank_0, signal.SIGKILL)
        _, said = torchrun.communicate(timeout=120)
    finally:
        torchrun.kill()
    assert torchrun.returncode != 0
    assert "ranks: rank 0 checks the model: " in said and "s so far" in said
    assert not list(tmp_path.glob("run-*/ledger.jsonl")), "nothing was charged"


@pytest.mark.slow
def test_a_kill_of_rank_0_in_its_checks_ends_the_job(config: RunConfig, tmp_path: Path) -> None:
    torchrun = start_ranks(config, tmp_path, "hangs")
    try:
        os.kill(int(text_of(tmp_path / "pid")), signal.SIGKILL)
        torchrun.communicate(timeout=120)
    finally:
        torchrun.kill()
    assert torchrun.returncode != 0
    assert not list(tmp_path.glob("run-*/ledger.jsonl"))


def test_a_store_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host was stopped, or lost its network: no call of it returns."""
    monkeypatch.setattr("dpvision.train.alive.SILENT_S", 1.5)
    monkeypatch.setattr("dpvision.train.alive._EVERY_S", 0.1)
    answered = threading.Event()

    class Silent(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            answered.wait()
            return True

    told = wait_for_others(Silent(), "checked", 1, 2, "checks the model")
    answered.set()
    assert told == "the ranks' store ended or hangs: no answer from its host for 1.5 s"
