import json
import os
import resource
import shutil

import numpy as np
import pytest

from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.rows import ROW, AllRows, keyed_hash, of_rows
from dpvision.data.store import Store, _Shard
from dpvision.data.store_writer import read_key
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError
from dpvision.files import files_to_hold

from .image_files import encode, noise, png, write_tar


def edit_index(store: Store, change) -> None:
    index = np.array(store.index)
    np.save(store.path / "index.npy", change(index))


def edit_meta(store: Store, **fields) -> None:
    file = store.path / "store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_records_come_back_byte_for_byte(store):
    assert store.num_records == 40
    assert store.index.dtype == ROW
    assert isinstance(store.index, np.memmap)
    for i in range(40):
        expected = (
            png(i, 20 + i % 7, 24 + i % 5) if i % 2 else encode(noise(i, 33, 20 + i % 9), "JPEG")
        )
        record = store.record(i)
        assert record.image == expected == store.read(i)
        assert record.key == f"k{i}"
        assert record.captions == (f"one {i}", f"two {i}") == store.captions(i)
        assert record.labels == (i % 4,)
        assert record.id == keyed_hash(read_key(store.path), expected)
    assert store.label_names == [f"class {k}" for k in range(4)]


def test_read_many_keeps_the_order_it_was_asked_for(store):
    rows = np.array([7, 3, 3, 39, 0])
    assert store.read_many(rows) == [store.read(int(row)) for row in rows]
    assert store.read_many(np.zeros(0, dtype=np.int64)) == []


def test_ids_are_63_bits_and_mean_nothing_under_another_key():
    a, b = keyed_hash(bytes(32), b"x"), keyed_hash(bytes([*range(32)]), b"x")
    assert a != b
    assert all(0 <= keyed_hash(b"k" * 32, bytes([i])) < 2**63 for i in range(256))


def test_units_are_kept_without_their_names(store):
    units = [store.record(i).unit for i in range(40)]
    assert units[:5] == [None] * 5
    assert units[39] == f"{keyed_hash(read_key(store.path), b'p11'):016x}"
    everything = b"".join(p.read_bytes() for p in store.path.rglob("*") if p.is_file())
    assert b"p11" not in everything


def test_eligible_rows_bound_each_unit_and_keep_records_without_one(store):
    unit = np.array(store.index["unit"])
    for k in (1, 2, 3, 100):
        rows = store.eligible_rows(k, seed=5)
        assert np.array_equal(rows, np.unique(rows))
        assert set(range(5)) <= set(rows.tolist())
        for u in np.unique(unit[unit >= 0]):
            assert (unit[rows] == u).sum() == min(k, (unit == u).sum())
    with pytest.raises(DataError, match="max_records_per_unit=0"):
        store.eligible_rows(0, seed=0)


def test_eligible_rows_depend_on_the_units_own_records_only(store):
    """Take one person away, shuffle the rest: everybody else keeps the same records. A larger k
    only adds.
    """
    ids = np.array(store.index["id"])
    gone = store.index["unit"][20]
    before = {k: set(ids[store.eligible_rows(k, seed=1)]) for k in (1, 2)}
    assert before[1] < before[2]
    of_gone = set(ids[np.array(store.index["unit"]) == gone])
    edit_index(
        store, lambda index: np.random.default_rng(0).permutation(index[index["unit"] != gone])
    )
    edit_meta(store, num_records=40 - len(of_gone))
    smaller = open_store(store.path)
    assert (
        set(np.array(smaller.index["id"])[smaller.eligible_rows(1, seed=1)]) == before[1] - of_gone
    )


def test_which_records_of_a_unit_stay_is_uniform_over_seeds(store):
    unit = np.array(store.index["unit"])
    mine = np.flatnonzero(unit == unit[39])
    counts = sum(np.isin(mine, store.eligible_rows(1, seed)).astype(int) for seed in range(600))
    assert counts.sum() == 600
    expected = 600 / len(mine)
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 30  # chi-squared with 3 to 5 degrees of freedom: 1e-5


def test_a_moved_store_still_opens(store, tmp_path):
    image = store.read(3)
    shutil.move(store.path, tmp_path / "elsewhere")
    assert open_store(tmp_path / "elsewhere").read(3) == image


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: edit_index(s, lambda x: x[:-1]),
        lambda s: edit_index(s, lambda x: x["id"]),
        lambda s: edit_index(s, lambda x: set_field(x, "shard", 5, 1)),
        lambda s: edit_index(s, lambda x: set_field(x, "offset", 39, 2**63)),
        lambda s: edit_index(s, lambda x: set_field(x, "offset", 39, 2**64 - 1)),
        lambda s: edit_index(s, lambda x: set_field(x, "size", 39, 2**31)),
        lambda s: edit_index(s, lambda x: set_field(x, "offset", 0, 0)),
        lambda s: edit_index(s, lambda x: set_field(x, "caption_size", 39, 10**6)),
        lambda s: edit_index(s, lambda x: x[::-1]) or swap_shard(s),
        lambda s: os.truncate(s.shard_paths[0], 5000),
        lambda s: s.shard_paths[0].unlink(),
        lambda s: (s.path / "records.jsonl").unlink(),
        lambda s: (s.path / "index.npy").unlink(),
        lambda s: (s.path / "index.npy").write_bytes(b""),
        lambda s: (s.path / "store.json").unlink(),
        lambda s: (s.path / "store.json").write_text("{"),
        lambda s: (s.path / "store.json").write_text("[]"),
        lambda s: edit_meta(s, format="dpvision-store-0"),
        lambda s: edit_meta(s, visibility="secret"),
    ],
)
def test_a_store_that_does_not_fit_together_is_refused(store, damage):
    damage(store)
    with pytest.raises(DataError, match=r"expected .*\. (Import|Make)"):
        open_store(store.path)


def set_field(index: np.ndarray, name: str, row: int, value: int) -> np.ndarray:
    index[name][row] = value
    return index


def swap_shard(store: Store) -> None:
    """Another tar of the same size in the shard's place."""
    path = store.shard_paths[0]
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


def test_a_shard_that_shrinks_while_the_store_is_open_raises_a_data_error(store):
    os.truncate(store.shard_paths[0], 3000)
    with pytest.raises(DataError, match="ends early"):
        store.read(39)


def test_what_is_no_store_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match="dpvision data import"):
        open_store(tmp_path)


def test_no_more_shards_are_held_open_than_the_system_allows(store, monkeypatch):
    closed, expected = [], store.read_many(np.arange(40))
    monkeypatch.setattr("dpvision.data.store.files_to_hold", lambda wanted: 2)
    shards = [store.path / f"copy-{i}.tar" for i in range(5)]
    for shard in shards:
        shutil.copy(store.shard_paths[0], shard)
    edit_index(store, lambda x: set_shards(x))
    edit_meta(store, shards=[{"path": s.name, "bytes": s.stat().st_size} for s in shards])
    many = open_store(store.path)
    monkeypatch.setattr("os.close", lambda fd, close=os.close: (closed.append(fd), close(fd)))
    assert many.read_many(np.arange(40)) == expected
    assert len(closed) >= 38  # rows go round the five shards, two at a time


def test_eight_stores_together_hold_as_many_files_as_the_limit_allows():
    """In a process of its own, whose limits can only be lowered."""
    pid = os.fork()
    if not pid:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 3000))
            assert files_to_hold(10) == 10
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1104, "raised as needed"
            assert files_to_hold(5000) == 375
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (3000, 3000)
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
            assert files_to_hold(5000) == 12
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_several_stores_share_the_limit_on_files(tmp_path):
    """Training, test and public store, say, each of more shards than the system allows files."""
    for t in range(120):
        write_tar(tmp_path / f"{t:03}.tar", {"a.png": png(t, 8, 8)})
    store = import_source(tmp_path / "*.tar", tmp_path / "s", workers=1)
    expected = store.read_many(np.arange(120))
    pid = os.fork()
    if not pid:
        try:
            limit = len(os.listdir("/proc/self/fd")) + 150
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            several = [open_store(store.path) for _ in range(3)]
            for one in several:
                assert one.read_many(np.arange(120)) == expected
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_all_rows_are_those_of_an_array():
    every, array = AllRows(9), np.arange(9)
    for place in (np.array([3, 0, -1, 8]), np.array([], dtype=np.int64), slice(2, 7), slice(4)):
        assert every[place].tolist() == array[place].tolist()
    assert every[::-1].tolist() == array[::-1].tolist()
    assert np.asarray(every).tolist() == array.tolist() and len(every) == 9
    column = np.arange(9) * 10
    assert of_rows(column, every).tolist() == of_rows(column, array).tolist()
    for place in ([9], [-10]):
        with pytest.raises(IndexError):
            every[np.array(place)]
    assert [int(row) for row in every] == list(array) and every[-2] == array[-2] and 8 in every
    for wrong in (np.array([0.5]), np.array([True])):
        with pytest.raises(TypeError, match="expected int64"):
            every[wrong]


def test_rows_of_a_store_without_persons_are_no_array(tmp_path):
    """At 233 million records the array took 1.9 GB on each rank."""
    store = write_scenes(tmp_path / "s", 5, 16)
    assert isinstance(store.eligible_rows(1, 0), AllRows)
    assert np.asarray(store.eligible_rows(1, 0)).tolist() == list(range(5))


def set_shards(index: np.ndarray) -> np.ndarray:
    index["shard"] = np.arange(len(index)) % 5
    return index


def test_captions_are_read_from_a_file_that_nobody_else_holds(tmp_path):
    """Two threads may open the captions at once, and the cache keeps one file; the other must stay
    open until it is read.
    """
    store = write_scenes(tmp_path / "s", 5, 16)
    expected = [store.captions(row) for row in range(5)]
    store._text = lambda: _Shard(tmp_path / "s" / "records.jsonl")
    assert (
        store.captions_many(np.arange(5))
        == expected
        == [store.record(row).captions for row in range(5)]
    )
