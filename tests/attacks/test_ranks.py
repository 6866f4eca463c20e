"""Ranks that read other records, run another configuration or hold other weights: refused on every
rank, and nothing is charged.

The two processes are started as a cluster manager does it, without torchrun's agent: if one waited
for the other for ever, the test would.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
from dpvision.train.same import facts_of_tensors

NUM = 24
SCRIPT = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
from dpvision.config import RunConfig, from_dict
from dpvision.errors import CheckpointError
from dpvision.privacy.ledger import Ledger
from dpvision.dp.clipped import seal
from dpvision.runs import run
from dpvision.train import loop, start, step

rank, folder, ports = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
config = from_dict(RunConfig, json.loads((folder / "config.json").read_text()))
stores = Path(config.data.store).parent
seen, read = [], step.physical_batches
step.physical_batches = lambda store, rows, *a, **k: (seen.extend(store.index["id"][rows].tolist()),
                                                      read(store, rows, *a, **k))[1]
start.check_gates = lambda *a: None  # for time: other tests are about them
save = run.save_checkpoint
append, privatize, make_model = Ledger.append, loop.privatize, start.make_model

def full_disk(ledger):
    if ledger.steps == 1:
        raise CheckpointError("ledger: No space left on device; expected room to write. \
Free space, then resume.")
    return append(ledger)

def full_for_checkpoints(folder, *args, **named):
    raise CheckpointError(f"checkpoint: {folder} (No space left on device); expected a writable \
disk with space. Earlier checkpoints are safe: free some, then --resume.")

def drifting(*args, **kwargs):  # two weights of rank 1 change places: their sum stays
    gradient = privatize(*args, **kwargs)
    if rank == 1:
        name = "mask_token"
        gradient.grads[name].copy_(gradient.grads[name].flip(-1))
    return seal(gradient)  # as if a fault of the machine had done it

def another_weight(*args):
    model = make_model(*args)
    with torch.no_grad():
        model.mask_token.fill_(1.0 + rank * 2.0**-23)
    return model

def of_store(name):
    return replace(config, data=replace(config.data, store=str(stores / name)))

for case, port in ports.items():
    os.environ["MASTER_PORT"] = str(port)
    mine = config
    if rank == 1:
        mine = of_store(case) if case in ("other", "reversed", "missing") else \
            replace(config, seed=1) if case == "seed" else config
    Ledger.append = full_disk if case == "disk" else append
    run.save_checkpoint = full_for_checkpoints if case == "checkpoint" else save
    if case == "checkpoint":
        mine = replace(config, hardware=replace(config.hardware, checkpoint_every_s=0.0))
    loop.privatize = drifting if case == "drift" else privatize
    if case == "device":  # rank 1 finds a GPU
        torch.cuda.is_available = lambda: rank == 1
        mine = replace(config, hardware=replace(config.hardware, device="auto"))
    start.make_model = another_weight if case == "weights" else make_model
    seen.clear()
    error = None
    try:
        with start.new_session(mine, folder / case) as session:
            loop.fit(session, quiet=True)
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"
    (folder / f"{case}-{rank}.json").write_text(json.dumps({"error": error, "seen": seen}))
"""
CASES = (
    "same",
    "other",
    "reversed",
    "missing",
    "seed",
    "weights",
    "disk",
    "checkpoint",
    "drift",
    "device",
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private store, another of as many records, and a copy of the first in another order."""
    folder = tmp_path_factory.mktemp("stores")
    store = write_scenes(folder / "a", NUM, 16, workers=1, public=False)
    write_scenes(folder / "other", NUM, 16, first=1000, workers=1, public=False)
    shutil.copytree(folder / "a", folder / "reversed")
    np.save(folder / "reversed" / "index.npy", np.asarray(store.index)[::-1])
    return folder


def config_of(store: Path) -> RunConfig:
    base = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=NUM,
            expected_batch_size=NUM,
            sampling="full_batch",
            steps=2,
            max_grad_norm=0.5,
            noise_multiplier=2.0,
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
        optim=OptimConfig(learning_rate=1e-2),
        hardware=HardwareConfig(device="cpu", physical_batch_size=12, workers=1),
    )
    return replace(base, data=replace(base.data, store=str(store)))


@pytest.fixture(scope="module")
def ended(
    stores: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What each of two ranks ended with in each case: its error, and the ids of the records that it
    read. ``python -O``.
    """
    folder = tmp_path_factory.mktemp("runs")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "config.json").write_text(json.dumps(to_dict(config_of(stores / "a"))))
    free = [socket.socket() for _ in CASES]
    for one in free:
        one.bind(("127.0.0.1", 0))
    ports = json.dumps({case: one.getsockname()[1] for case, one in zip(CASES, free, strict=True)})
    for one in free:
        one.close()
    started = []
    for rank in range(2):
        where = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        command = [sys.executable, "-O", str(folder / "script.py"), str(rank), str(folder), ports]
        started.append(
            subprocess.Popen(
                command, env={**os.environ, **where}, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        for process in started:
            _, said = process.communicate(timeout=900)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in started:
            process.kill()
    found = {
        case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(2)]
        for case in CASES
    }
    for case, ranks in found.items():
        ranks[0]["steps"] = sum(
            read_ledger(path).steps for path in (folder / case).glob("ledger.jsonl")
        )
        ranks[0]["folder"] = (folder / case / "run.json").exists()
    return found


def test_two_ranks_that_agree_finish_and_share_the_records(ended: dict[str, Any]) -> None:
    first, second = ended["same"]
    assert first["error"] is None and second["error"] is None
    assert (
        sorted({*first["seen"], *second["seen"]}) == sorted(first["seen"] + second["seen"])[::2]
    ), "two steps, each record once in each"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other", "store on rank 1"),
        ("reversed", "records on rank 1"),
        ("seed", "config.seed on rank 1 (1; rank 0 has 0)"),
        ("weights", "tensor mask_token on rank 1"),
        ("device", "devices cpu, cuda of ranks 0 to 1; expected one kind"),
        ("missing", "rank 1 stopped, and all others with it: store: "),
    ],
)
def test_ranks_that_differ_are_refused_before_anything_is_charged(
    ended: dict[str, Any], case: str, words: str
) -> None:
    """On the old code all but the last finished with a guarantee, one store was charged, and a
    record of a reversed copy counted twice.
    """
    for rank, one in enumerate(ended[case]):
        assert one["error"] is not None and (
            words in one["error"] or (case, rank) == ("missing", 1)
        ), one["error"]
        assert one["error"].startswith(
            "DataError" if (case, rank) == ("missing", 1) else "PrivacyError: ranks: "
        )
        assert not re.search("[0-9a-f]{64}", one["error"]), "the digest of private records is shown"
        assert one["seen"] == [], "a record was read"
    assert not ended[case][0]["folder"], "a run was begun"


def test_a_ledger_that_cannot_be_written_stops_every_rank(ended: dict[str, Any]) -> None:
    first, second = ended["disk"]
    assert (
        "No space left" in first["error"]
        and "rank 0 could not charge the next step" in second["error"]
    )
    assert len(first["seen"]) + len(second["seen"]) == NUM, (
        "the records of the one step that was charged"
    )


def test_a_checkpoint_that_cannot_be_written_in_its_thread_stops_every_rank(
    ended: dict[str, Any],
) -> None:
    first, second = ended["checkpoint"]
    assert first["error"].startswith("CheckpointError: checkpoint: "), first["error"]
    assert "No space left on device" in first["error"]
    assert "rank 0 stopped, and all others with it: checkpoint: " in second["error"]


def test_weights_that_drift_apart_are_found_without_asserts_and_where_their_sum_is_the_same(
    ended: dict[str, Any],
) -> None:
    for one in ended["drift"]:
        assert (
            one["error"].startswith("PrivacyError: ranks: ")
            and "tensor mask_token on rank 1" in one["error"]
        )


def test_equal_nan_are_equal_and_a_bit_is_a_difference() -> None:
    value = torch.tensor([1.0, float("nan"), -0.0])
    digest = facts_of_tensors({"a": value})
    assert digest == facts_of_tensors({"a": value.clone()})
    others = (
        torch.tensor([1.0, 2.0, -0.0]),
        torch.tensor([1.0, float("nan"), 0.0]),
        value.flip(0),
        value[None],
        value.double(),
    )
    assert all(facts_of_tensors({"a": other}) != digest for other in others)
