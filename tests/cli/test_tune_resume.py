"""`dpvision tune --resume`: after kills, refusals and removed folders every run is charged once,
counted, and shown.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.data.store import Store
from dpvision.errors import ConfigError
from dpvision.privacy.account import set_cap, store_account
from dpvision.tune import trials as tune_trials

from .test_tune import SPACE, STEPS, runs_of, tune_argv

pytestmark = pytest.mark.usefixtures("gates_once")

KILLED = """
import os, signal, sys
from dpvision.cli import main
from dpvision.tune import trials as tune_trials
from dpvision.privacy import ledger
from dpvision.train import start

start.check_gates = lambda *_: None  # for time: other tests are about them
what, argv = sys.argv[1], sys.argv[2:]
charges = 0

def charged(real):
    def append(self):
        global charges
        step, charges = real(self), charges + 1
        if what == "in a run" and charges == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return step
    return append

ledger.Ledger.append = charged(ledger.Ledger.append)
real = tune_trials.trial_config

def before_the_run(study, settings):
    if what == "before a run" and charges == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(study, settings)

tune_trials.trial_config = before_the_run
main(argv)
"""


def test_after_kills_the_same_command_goes_on_and_counts_every_trial(
    mine: Store, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed in the second trial's run, and again between the third trial's entry in the journal
    and its run.
    """
    argv = tune_argv(mine, "charged", "--test", str(public.path), "--json", *SPACE)
    for when, steps in (("in a run", 5), ("before a run", 6)):
        command = [sys.executable, "-c", KILLED, when, *argv, "--resume-or-start"]
        done = subprocess.run(command, capture_output=True, timeout=900)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
        assert sum(charged for _, charged in runs_of(mine)) == steps
    journal = tmp_path / "runs" / "study" / "confidential" / "study.journal"
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"torn')  # by the crash
    os.symlink("dead", f"{journal}.lock")
    assert main(argv) == 2 and "is taken" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    result = json.loads(capsys.readouterr().out)
    # The killed trials went on in their own ledgers: three runs, none charged for more than its
    # plan.
    assert runs_of(mine) == [("dp", STEPS)] * 3 and result["trials"] == 3
    assert result["epsilon"] == result["charged"] == store_account(mine.path).epsilon_filter
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:1]))
    assert main([*argv, "--resume"]) == 2 and "does not count trial-000" in re.sub(
        r"trial-00[12], ", "", capsys.readouterr().err
    )


def test_a_trial_that_fails_counts_and_the_owners_cap_ends_the_search_with_its_results(
    mine: Store,
    public: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: the refused trial was given up, so was another at each --resume, and what the paid
    ones had found was not printed.
    """
    real, seen = tune_trials._score, []

    def failing(study: tune_trials.Study, folder: Path) -> float:
        seen.append(folder.name)
        if len(seen) == 1:
            raise ConfigError("planted: the first one diverged.")
        return real(study, folder)

    monkeypatch.setattr(tune_trials, "_score", failing)
    argv = tune_argv(mine, "charged", "--test", str(public.path), "--json", *SPACE)
    set_cap(mine.path, 3.3, 1e-3)
    assert main(argv) == 2
    found = capsys.readouterr()
    assert (
        "Trial 0 of 3 ended. It failed, and counts: planted" in found.err
        and "cap: total epsilon" in found.err
    )
    assert runs_of(mine) == [("dp", STEPS)] * 2 and seen == ["trial-000", "trial-001"]
    for _ in range(2):
        result = json.loads(found.out)
        assert (
            result["trials"] == 2
            and result["best"]["trial"] == 1
            and result["charged"] == store_account(mine.path).epsilon_filter
        )
        assert main([*argv, "--resume"]) == 2
        found = capsys.readouterr()
        assert "cap: total epsilon" in found.err and runs_of(mine) == [("dp", STEPS)] * 2
    set_cap(mine.path, 10, 1e-3)
    assert main([*argv, "--resume"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["trials"] == 3
        and runs_of(mine) == [("dp", STEPS)] * 3
        and seen[2:] == ["trial-002"]
    )


class Killed(BaseException):
    """What a kill leaves: the trial is not ended in the journal."""


def test_a_removed_trial_is_not_repeated_and_its_ledger_counts(
    mine: Store,
    public: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: a second run of the same number, and four runs charged of which three were counted. A
    folder of the user is no trial.
    """
    real, seen = tune_trials._score, []

    def killed(study: tune_trials.Study, folder: Path) -> float:
        seen.append(folder.name)
        if len(seen) == 2:
            raise Killed
        return real(study, folder)

    monkeypatch.setattr(tune_trials, "_score", killed)
    argv = tune_argv(mine, "charged", "--test", str(public.path), "--json", *SPACE)
    with pytest.raises(Killed):
        main(argv)
    root = tmp_path / "runs" / "study"
    shutil.rmtree(root / "trial-001")
    shutil.copytree(root / "trial-000", root / "trial-000-best")
    capsys.readouterr()
    assert main([*argv, "--resume"]) == 0
    found = capsys.readouterr()
    assert (
        "Trial 1 of 3 ended. It failed, and counts: tune: " in found.err
        and not (root / "trial-001").exists()
    )
    assert runs_of(mine) == [("dp", STEPS)] * 3 and seen[2:] == ["trial-002"]
    result = json.loads(found.out)
    assert (
        result["trials"] == 3
        and result["charged"] == store_account(mine.path).epsilon_filter <= result["epsilon"]
    )
    shutil.rmtree(root / "trial-002")  # an ended one
    assert main([*argv, "--resume"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["charged"] == result["charged"]
        and runs_of(mine) == [("dp", STEPS)] * 3
    )
