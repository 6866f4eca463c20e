"""Jobs under torchrun with real signals: what a signal, a dead agent and a stopped rank leave, and
the templates of examples/preemptible_jobs. benchmarks/preemption.py stops jobs at random moments.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import preemption
from common import ROOT
from preemption import STEPS, TRAIN, Job

JOBS = ROOT / "examples" / "preemptible_jobs"
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a store of scenes; what a failed test leaves running is ended."""
    made = preemption.make_folder(tmp_path / "job")
    yield made
    for file in made.glob("pid-*"):
        if preemption._alive(pid := int(file.read_text())):
            os.kill(pid, signal.SIGKILL)


def goes_on(folder: Path, lost: int) -> None:
    """The same command, with one process, finishes the run and says what was lost."""
    before = preemption.state(folder)["charged"]
    statuses, text = Job.start(folder, ranks=1).wait()
    assert statuses == [0] and f"Resuming: {before} of {STEPS} steps charged" in text, text
    assert (f"{lost} steps were charged and lost" in text) == (lost > 0), text
    found = preemption.state(folder)
    assert found["charged"] == STEPS == found["updates"] + lost and not found["stopped"]
    preemption.releases(folder)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_signal_to_one_agent_saves_the_run_on_all_nodes(folder: Path, nodes: int) -> None:
    job = Job.start(folder, nodes=nodes, ranks=2 // nodes, pass_s=0.2)
    job.await_charge(2)
    job.agents[-1].send_signal(signal.SIGUSR1)
    statuses, text = job.wait()
    assert all(statuses) and "Saved and stopped as asked" in text, text
    assert "Stopped after" in text, "rank 0 was ended before it printed what was spent"
    found = preemption.state(folder)
    assert found["stopped"] and found["charged"] == found["updates"] < STEPS
    goes_on(folder, lost=0)


def test_torchrun_itself_starts_a_job_again_after_a_crash(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the second attempt read the words of the first, and stopped after a step or hung."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    job = Job.start(folder, pass_s=0.3)
    job.await_charge(3)
    os.kill(job.pid(1), signal.SIGKILL)
    statuses, text = job.wait()
    found = preemption.state(folder)
    assert statuses == [0] and found["charged"] == STEPS and not found["stopped"], text


def test_a_signal_to_one_rank_reaches_a_rank_in_a_long_step(folder: Path) -> None:
    """The other would take 20 s for its passes, and is not asked itself."""
    job = Job.start(folder, "--hardware.finish-step-s", "1", pass_s=5.0)
    job.await_charge()
    time.sleep(1)
    os.kill(job.pid(1), signal.SIGTERM)
    start = time.monotonic()
    statuses, text = job.wait()
    assert statuses == [1] and time.monotonic() - start < 60, text
    assert "Step 1 did not end within 1 s: it is abandoned, and counts in epsilon." in text, text
    found = preemption.state(folder)
    assert (found["charged"], found["updates"], found["stopped"]) == (1, 0, True)
    goes_on(folder, lost=1)


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGKILL])
def test_ranks_whose_agent_ended_charge_no_further_step(folder: Path, how: signal.Signals) -> None:
    """Before: SIGUSR1, which torchrun does not pass on by default, left ranks that charged 5 more
    steps, until the plan's end.
    """
    job = Job.start(folder, pass_s=0.2, handled="SIGTERM")
    job.await_charge(2)
    job.agents[0].send_signal(how)
    job.agents[0].wait()
    charged = job.charged()
    job.wait()
    found = preemption.state(folder)
    assert found["charged"] <= charged + 1 < STEPS
    assert found["stopped"] and found["updates"] == found["charged"]
    goes_on(folder, lost=0)


def test_a_rank_that_no_longer_answers_ends_the_job(folder: Path) -> None:
    """Before: the others waited for half an hour."""
    job = Job.start(folder, "--hardware.rank-timeout-s", "5", "--hardware.checkpoint-every-s", "0")
    job.await_charge(2)
    os.kill(job.pid(1), signal.SIGSTOP)
    start = time.monotonic()
    while job.agents[0].poll() is None and "did not answer" not in job.text():
        assert time.monotonic() - start < 60
        time.sleep(0.1)
    os.kill(job.pid(1), signal.SIGCONT)  # for time: torchrun would kill it after a minute
    statuses, text = job.wait()
    assert statuses == [1] and "error: ranks: another rank ended or did not answer" in text, text
    found = preemption.state(folder)
    lost = found["charged"] - found["updates"]
    assert 1 <= lost <= 2 and not found["stopped"]
    goes_on(folder, lost=lost)


STUBS = {
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}
"""Commands of a cluster, for one node."""


def test_one_sbatch_line_goes_on_after_a_signal_and_ends(folder: Path, tmp_path: Path) -> None:
    for name, body in STUBS.items():
        (stub := tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    port = str(preemption._free_port())
    script = (JOBS / "train.sbatch").read_text().replace("29500", port)
    script = re.sub("-m dpvision", str(ROOT / "benchmarks" / "job_child.py"), script)
    (tmp_path / "job.sh").write_text(script)
    options = TRAIN.replace("train ", "", 1).replace(" --name run --resume-or-start", "").split()
    command = ["bash", str(tmp_path / "job.sh"), "run", *options]
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "2", "JOB_FOLDER": str(folder), "JOB_PASS_S": "0.2",
    }  # fmt: skip
    for number, stops in enumerate((True, False)):
        with (folder / f"log-{number}").open("wb") as log:
            job = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log,
                env=environment | {"JOB_NUMBER": str(number)},
            )  # fmt: skip
        watched = Job(folder, [job], 2, number, [folder / f"log-{number}"])
        if stops:
            watched.await_charge(2)
            job.send_signal(signal.SIGUSR1)
        statuses, text = watched.wait()
        assert statuses == [int(stops)], text
        assert preemption.state(folder)["stopped"] == stops
    assert (folder / "requeued").read_text() == "requeue 7\n", "once"
    found = preemption.state(folder)
    assert found["charged"] == found["updates"] == STEPS


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_submitit_job_goes_on_after_a_preemption(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = pytest.importorskip("submitit", reason="needs pip install submitit")
    source = shutil.copy(JOBS / "with_submitit.py", folder)
    text = (
        Path(source).read_text().replace('"-m", "dpvision"]', f'"{ROOT}/benchmarks/job_child.py"]')
    )
    made: dict[str, object] = {"__name__": "job"}
    exec(compile(text, source, "exec"), made)
    monkeypatch.chdir(folder)
    for name, value in {"JOB_FOLDER": folder, "JOB_PASS_S": 0.2, "JOB_NUMBER": 0}.items():
        monkeypatch.setenv(name, str(value))
    executor = submitit.AutoExecutor(folder=folder / "logs", cluster="local")
    executor.update_parameters(timeout_min=20)
    options = TRAIN.replace("train ", "", 1).replace(" --resume-or-start", "").split()
    job = executor.submit(made["Training"](options, 2))  # type: ignore[operator]
    watched = Job(folder, [], 2, 0)
    watched.await_charge(2)
    rank = watched.pid(0)
    agent = parent(rank)
    for pid in (rank, agent, parent(agent)):  # SLURM sends it to all processes of a step
        os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + 300
    while not job.done():
        assert time.monotonic() < deadline, job.stderr()
        time.sleep(0.5)
    assert job.exception() is None, job.stderr()
    found = preemption.state(folder)
    assert found["charged"] == found["updates"] == STEPS
    assert job.stdout().count("Stopped after") == 1 and "Finished after" in job.stdout()
