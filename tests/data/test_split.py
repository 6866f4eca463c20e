import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
from dpvision.data.sources import Sample
from dpvision.data.split import split_store
from dpvision.errors import DataError
from dpvision.privacy.store_marks import StoreLedgers

from .image_files import png


def test_a_split_never_cuts_a_person_and_loses_nobody(store):
    home = store.path.parent
    for seed in range(5):
        a, b = split_store(store.path, home / f"a{seed}", home / f"b{seed}", 0.5, seed)
        units = [set(np.array(half.index["unit"][half.index["unit"] >= 0])) for half in (a, b)]
        assert units[0] and units[1] and not units[0] & units[1]
        ids = np.concatenate([a.index["id"], b.index["id"]])
        assert sorted(ids) == sorted(store.index["id"])


def test_halves_read_the_parents_shards_and_draw_on_its_account(store):
    home = store.path.parent
    where = {int(record): row for row, record in enumerate(store.index["id"])}
    for half in split_store(store.path, home / "a", home / "b", 0.5):
        assert half.store_id == store.store_id
        assert half.visibility == store.visibility
        assert sorted(p.name for p in half.path.iterdir()) == [
            "confidential",
            "index.npy",
            "ledger_marks.json",
            "store.json",
        ]
        for row in range(half.num_records):
            record = half.record(row)
            assert record == store.record(where[record.id])


def test_halves_are_read_where_they_were_moved_together_with_their_parent(store):
    """Their paths were absolute: after a move no half could be opened."""
    home = store.path.parent
    a, _ = split_store(store.path, home / "a", home / "b", 0.5)
    split_store(a.path, home / "c", home / "d", 0.5, seed=1)
    moved = home.rename(home.parent / "elsewhere")
    parent = open_store(moved / store.path.name)
    records = {record.id: record for record in map(parent.record, range(parent.num_records))}
    for name in "abcd":
        half = open_store(moved / name)
        assert half.num_records
        for row in range(half.num_records):
            record = half.record(row)
            assert record == records[record.id]


def test_a_persons_half_does_not_depend_on_who_else_is_there(store):
    home = store.path.parent
    a, _ = split_store(store.path, home / "a", home / "b", 0.5, seed=3)
    index = np.array(store.index)[::2]
    np.save(store.path / "index.npy", index)
    meta = store.path / "store.json"
    meta.write_text(meta.read_text().replace('"num_records": 40', '"num_records": 20'))
    smaller, _ = split_store(store.path, home / "a2", home / "b2", 0.5, seed=3)
    assert set(smaller.index["id"]) == set(a.index["id"]) & set(index["id"])


def test_the_fraction_is_met_in_expectation(tmp_path):
    big = import_samples([Sample(str(i), png(i, 4, 4), {}) for i in range(1000)], tmp_path / "s")
    a, _ = split_store(big.path, tmp_path / "a", tmp_path / "b", 0.8)
    assert abs(a.num_records - 800) < 4 * np.sqrt(1000 * 0.8 * 0.2)


def test_bad_splits_are_refused_and_leave_nothing(store):
    home = store.path.parent
    before = sorted(home.iterdir())
    for fraction in (0, 1, float("nan"), -0.1):
        with pytest.raises(DataError, match="strictly between 0 and 1"):
            split_store(store.path, home / "a", home / "b", fraction)
    with pytest.raises(DataError, match="expected records in both halves"):
        split_store(store.path, home / "a", home / "b", 1e-6)
    with pytest.raises(DataError, match="ledgers"):
        split_store(store.path, home / "a", home / "sub" / "b", 0.5)
    with pytest.raises(DataError, match="exists"):
        split_store(store.path, home / "a", home / "a", 0.5)
    assert sorted(home.iterdir()) == before
    assert open_store(store.path).num_records == 40


HOLDS = """
import sys
from pathlib import Path
from dpvision.config import PrivacyConfig
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import make_plan
from dpvision.privacy.store_marks import StoreLedgers
plan = make_plan(PrivacyConfig(dataset_size=40, expected_batch_size=8, steps=4, noise_multiplier=2))
store = Path(sys.argv[1])
with Ledger.open(store, "run", plan, resume=False) as ledger:
    ledger.append()
    with StoreLedgers.of(store).locked():  # as while a charge is written
        print("held", flush=True)
        sys.stdin.readline()
    ledger.append()
"""


def test_a_split_waits_for_a_charge_in_another_process(store):
    """Else a half may keep marks of before the charge, which no later one reaches."""
    home = store.path.parent
    halves = home / "a", home / "b"
    command = [sys.executable, "-c", HOLDS, str(store.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        split = threading.Thread(target=split_store, args=(store.path, *halves, 0.5))
        split.start()
        time.sleep(1.0)  # an unlocked split takes a few milliseconds
        assert split.is_alive() and not any(half.exists() for half in halves)
        other.stdin.write("\n")
        other.stdin.flush()
        split.join(timeout=900)
        assert other.wait(timeout=900) == 0
    assert not split.is_alive()
    for folder in (store.path, *halves):
        ledgers = StoreLedgers.of(folder)
        assert ledgers.read_all()["run"].steps == 2
        assert all(mark.steps == 2 for mark in ledgers.marks()["run"]), "of every file"
