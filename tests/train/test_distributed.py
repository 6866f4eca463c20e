"""Two real processes under torchrun (gloo) give what one gives, with injected keys; empty slices
included.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made import secrets

from dpvision.checkpoint import load_checkpoint
from dpvision.config import RunConfig, to_dict
from dpvision.privacy.ledger_format import read_ledger
from dpvision.train.loop import fit
from dpvision.train.start import new_session

SCRIPT = """
import json, sys
from pathlib import Path
from dpvision.config import RunConfig, from_dict
from dpvision.privacy.stream import Key
from dpvision.runs.run import Secrets
from dpvision.train.loop import fit
from dpvision.train.start import new_session

config = from_dict(RunConfig, json.loads(Path(sys.argv[1]).read_text()))
with new_session(config, Path(sys.argv[2])) as session:
    # Only rank 0 has the keys; the others must get them from it.
    secrets = Secrets(*(Key.for_tests(letter * 32) for letter in
                        ((b"d", b"n") if session.group.is_main else (b"?", b"!"))))
    assert session.group.world_size == 2
    assert fit(session, secrets=secrets, quiet=True)
"""


def _two_processes(config: RunConfig, folder: Path) -> dict[str, torch.Tensor]:
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(folder / "script.py"),
    ]
    done = subprocess.run(
        [*command, str(folder / "config.json"), str(folder / "two")],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_checkpoint(folder / "two").model


@pytest.mark.slow
def test_two_processes_give_what_one_gives(config: RunConfig, tmp_path: Path) -> None:
    with new_session(config, tmp_path / "one") as session:
        fit(session, secrets=secrets(), quiet=True)
    one, two = load_checkpoint(tmp_path / "one").model, _two_processes(config, tmp_path)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
def test_all_ranks_take_the_same_number_of_steps_when_batches_are_nearly_always_empty(
    config: RunConfig, tmp_path: Path
) -> None:
    _two_processes(
        replace(config, privacy=replace(config.privacy, expected_batch_size=0.3)), tmp_path
    )
    assert read_ledger(tmp_path / "two" / "ledger.jsonl").steps == config.privacy.steps


LEAVES = """
import os, sys, time
import torch
from dpvision.train.distributed import RankLost, all_reduce_vector, join, leave

group = join("cpu")
import torch._dynamo  # as a first compiled function does
ones = torch.ones(300, dtype=torch.float64)
assert all_reduce_vector(ones, group)[0] == 2
threads = lambda: [open(f"/proc/self/task/{task}/comm").read().strip()
                   for task in os.listdir("/proc/self/task")]
assert any("gloo" in name for name in threads()), threads()
def after():
    leave()
    end = time.monotonic() + 1  # a thread that has ended is listed for a moment
    while any("gloo" in name for name in threads()) and time.monotonic() < end:
        time.sleep(0.02)
    print([name for name in threads() if "gloo" in name])
if sys.argv[1] == "lost":
    if group.rank == 1:
        os._exit(0)
    time.sleep(1)
    try:
        all_reduce_vector(ones, group)
    except RankLost:
        after()
        sys.exit(2)
else:
    after()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")
@pytest.mark.parametrize(("how", "codes"), [("whole", [0, 0]), ("lost", [2, 0])])
def test_no_thread_of_the_group_outlives_it(how: str, codes: list[int], tmp_path: Path) -> None:
    """One that does may abort a process that has done its work, as the interpreter ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "WORLD_SIZE": "2",
                "RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300) for process in ranks]
    assert [process.returncode for process in ranks] == codes, said
    assert said[0][0] == "[]\n"
    assert how == "lost" or said[1][0] == "[]\n"
