"""Features that are begun and not finished: a real SIGKILL, two writers at once, and partial files
of anything else.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpvision.cli import main
from dpvision.encoders import feature_cache, feature_file
from dpvision.encoders.feature_cache import FeatureCache, GrowingArray, claim, growing_path
from dpvision.encoders.feature_file import feature_array
from dpvision.errors import DataError

from ..adapt.runs_of_heads import write_digits
from ..eval.labelled import vit_encoder
from .test_feature_file import _break

WANTED = np.arange(60, dtype=np.float32).reshape(20, 3)
FLOAT = np.dtype(np.float32)


def _blocks(first: int, stop: int = 20, size: int = 4) -> Iterator[np.ndarray]:
    for start in range(first, stop, size):
        yield WANTED[start : start + size]
    if stop < len(WANTED):
        raise KeyboardInterrupt


def _begun(
    path: Path, rows: int, shape: tuple[int, ...] = (20, 3), dtype: np.dtype = FLOAT
) -> None:
    """A partial file with some rows, as a process that was interrupted leaves it."""
    with pytest.raises(KeyboardInterrupt), claim(path, shape, dtype) as partial:
        partial.write(0, _blocks(0, rows))


def _cache(folder: Path) -> FeatureCache:
    cache = FeatureCache(folder)
    assert cache.make_folder()
    return cache


@pytest.fixture
def counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "_SYNC_S", 0.0)


def test_an_interrupted_array_goes_on_at_a_border_and_is_the_same(tmp_path: Path) -> None:
    cache, asked = _cache(tmp_path), []
    _begun(cache.folder / "k.npy", 12)

    def blocks_from(first: int) -> Iterator[np.ndarray]:
        asked.append(first)
        return _blocks(first)

    found = cache.save_array("k", (20, 3), FLOAT, blocks_from, step=8)
    assert asked == [8] and np.array_equal(found, WANTED), (
        "12 rows are there; the last multiple of 8 is where batches begin"
    )
    assert [f.name for f in cache.folder.iterdir()] == ["k.npy"]
    assert np.array_equal(np.load(cache.folder / "k.npy"), WANTED), "an ordinary file of numpy's"


def test_a_row_that_was_not_counted_is_written_anew(tmp_path: Path, counted_at_once: None) -> None:
    """Killed in the midst of a block, or before its count: the file is longer than what it says."""
    path = tmp_path / "k.npy"
    _begun(path, 12)
    with open(growing_path(path), "ab") as file:
        file.write(b"\xff" * 30)
    with claim(path, (20, 3), FLOAT) as partial:
        assert partial.rows_done() == 12
        partial.write(12, _blocks(12))
    assert (
        np.array_equal(np.load(path), WANTED)
        and path.stat().st_size == len(feature_cache._header((20, 3), FLOAT)) + 20 * 12
    )


def test_killed_before_the_new_name_nothing_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k.npy"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), claim(path, (20, 3), FLOAT) as partial:
            partial.write(0, _blocks(0))
    with claim(path, (20, 3), FLOAT) as partial:
        assert partial.rows_done() == 20
        partial.write(20, _blocks(20))
    assert np.array_equal(np.load(path), WANTED)


@pytest.mark.parametrize("what", ["shape", "type", "torn", "short", "npy", "noise", "empty"])
def test_a_partial_file_of_anything_else_counts_nothing(tmp_path: Path, what: str) -> None:
    path, partial = tmp_path / "k.npy", growing_path(tmp_path / "k.npy")
    _begun(path, 12)
    shape, dtype = (
        ((19, 3) if what == "shape" else (20, 3)),
        np.dtype(np.int32) if what == "type" else FLOAT,
    )
    kept = partial.read_bytes()
    damage = {
        "torn": kept[:20] + b"\0" + kept[21:],
        "short": kept[:-1],
        "noise": b"\x01" * 1000,
        "empty": b"",
    }
    if what == "npy":  # a whole header, but not all rows behind it
        partial.write_bytes(feature_cache._header(shape, dtype) + kept[-12 * 12 :])
    elif what in damage:
        partial.write_bytes(damage[what])
    with claim(path, shape, dtype) as found:
        assert found.rows_done() == 0
        found.write(0, (np.zeros((shape[0], 3), dtype=dtype) for _ in range(1)))
    assert np.array_equal(np.load(path), np.zeros(shape, dtype=dtype))


def test_rows_are_on_the_disk_before_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted_at_once: None
) -> None:
    """At every count the system is asked to write the data first, and all that is counted was
    written.
    """
    path, synced = tmp_path / "k.npy", [0]
    real_sync, real_write, counts = os.fdatasync, os.pwrite, []
    header = len(feature_cache._header((20, 3), FLOAT))

    def sync(fd: int) -> None:
        real_sync(fd)
        synced[0] = os.fstat(fd).st_size

    def write(fd: int, data: bytes, place: int) -> int:
        if data[:8] != b"\x93NUMPY\x01\x00":
            rows = int.from_bytes(data[:8], "little")
            counts.append(rows)
            assert rows == 0 or header + 12 * rows <= synced[0]
        return real_write(fd, data, place)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "pwrite", write)
    with claim(path, (20, 3), FLOAT) as partial:
        partial.write(0, _blocks(0))
    assert counts == [0, 4, 8, 12, 16, 20, 20]


def test_two_writers_do_not_meet_and_the_work_is_done_once(
    tmp_path: Path, counted_at_once: None
) -> None:
    cache, started = _cache(tmp_path), threading.Event()
    seen: list[int] = []
    found: list[np.ndarray] = []

    def slowly(first: int) -> Iterator[np.ndarray]:
        for block in _blocks(first):
            yield block
            started.set()
            time.sleep(0.15)

    def never(first: int) -> Iterator[np.ndarray]:
        raise AssertionError("the other one has it")

    one = threading.Thread(
        target=lambda: found.append(cache.save_array("k", (20, 3), FLOAT, slowly))
    )
    one.start()
    assert started.wait(10)
    found.append(cache.save_array("k", (20, 3), FLOAT, never, progress=seen.append))
    one.join()
    assert len(found) == 2 and all(np.array_equal(x, WANTED) for x in found)
    assert seen and seen == sorted(seen) and 0 < seen[0] < 20, (
        "whoever waits sees the other's progress"
    )
    assert [f.name for f in cache.folder.iterdir()] == ["k.npy"]


def test_a_full_disk_is_one_error_and_what_is_done_stays(tmp_path: Path) -> None:
    cache = _cache(tmp_path)

    def full(first: int) -> Iterator[np.ndarray]:
        yield WANTED[first:8]
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"No space left on device.*Free space"):
        cache.save_array("k", (20, 3), FLOAT, full)
    with claim(cache.folder / "k.npy", (20, 3), FLOAT) as partial:
        assert partial.rows_done() == 8


@pytest.mark.parametrize("broken", [[], [5, 6, 7], list(range(8, 24)), [30, 31], list(range(32))])
def test_features_after_a_stop_are_those_of_one_go(
    tmp_path: Path, broken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after each batch, with images that do not decode at all borders."""
    store, encoder, rows = write_digits(tmp_path / "s", 0, 32), vit_encoder(), np.arange(32)
    _break(store, broken)
    whole = np.array(
        feature_array(encoder, "mean", 32, store, rows, keep=False, batch_size=8, workers=1)
    )
    real, left = GrowingArray.write, [0]

    def one_block(self: GrowingArray, first: int, blocks: Iterator[np.ndarray]) -> None:
        def stopped() -> Iterator[np.ndarray]:
            for n, block in enumerate(blocks):
                if n:
                    raise KeyboardInterrupt
                yield block

        left[0] += 1
        real(self, first, stopped())

    monkeypatch.setattr(GrowingArray, "write", one_block)
    begun: list[int] = []
    for _ in range(9):
        done: list[int] = []
        try:
            found = feature_array(
                encoder, "mean", 32, store, rows, batch_size=8, workers=1, progress=done.append
            )
            break
        except KeyboardInterrupt:
            begun.append(done[0])
    assert np.array_equal(found, whole, equal_nan=True)
    assert (
        begun == sorted(set(begun))
        and all(n % 8 == 0 for n in begun)
        and (len(begun) == 3 or len(broken) > 8)
    )


def _features(store: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (store / "confidential" / "features").iterdir()}


@pytest.mark.slow
def test_a_killed_adapt_resumes_in_the_midst_of_its_features(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A real process, a real SIGKILL; nothing is charged before the features are there."""
    stores = [write_digits(tmp_path / f"{n}" / "mine", 0, 600) for n in range(2)]
    for file in stores[
        1
    ].path.iterdir():  # one data set, twice: what decides the names of its features is the same
        if file.is_file():
            file.write_bytes((stores[0].path / file.name).read_bytes())
    assert main(["ledger", str(stores[1].path), "--moved"]) == 0, "a copy is refused until then"
    argv = [
        "adapt",
        "--encoder",
        "hog",
        "--num-classes",
        "10",
        "--dataset-size",
        "600",
        "--epsilon",
        "1",
        "--head",
        "prototypes",
        "--name",
        "first",
        "--hardware.physical-batch-size",
        "4",
        "--hardware.workers",
        "1",
        "--hardware.device",
        "cpu",
    ]
    where = [
        ["--data", str(s.path), "--runs", str(tmp_path / f"{n}")] for n, s in enumerate(stores)
    ]
    child = multiprocessing.get_context("fork").Process(
        target=_slowly, args=([*argv, *where[0]],)
    )  # imports take longer than all else
    child.start()
    folder = stores[0].path / "confidential" / "features"
    stop = time.monotonic() + 60
    try:
        while not any(_rows(f) >= 40 for f in folder.glob(".*.partial")):
            assert child.is_alive() and time.monotonic() < stop
            time.sleep(0.05)
    finally:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    capfd.readouterr()
    (partial,) = folder.iterdir()
    assert 40 <= _rows(partial) < 600 and not (tmp_path / "0" / "first" / "progress.jsonl").exists()
    resume = [
        "adapt",
        "transfer.prototypes",
        "--resume",
        "--name",
        "first",
        "--runs",
        str(tmp_path / "0"),
        "--json",
    ]
    assert main([*resume, "--show-confidential"]) == 0
    captured = capfd.readouterr()
    going_on = int(captured.err.split("going on at ")[1].split(" of 600")[0])
    assert 40 <= going_on < 600 and json.loads(captured.out)["steps"] == 1
    assert main([*argv, *where[1], "--quiet"]) == 0
    resumed, one_go = _features(stores[0].path), _features(stores[1].path)
    assert resumed == one_go, "the same names, the same bits"
    assert one_go
    assert "going on" not in capfd.readouterr().err


def _slowly(argv: list[str]) -> None:
    """The command, with a pause at each batch."""
    real = feature_file.image_batches

    def slower(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for batch in real(*args, **kwargs):
            time.sleep(0.03)
            yield batch

    feature_cache._SYNC_S, feature_file.image_batches = 0.1, slower
    main(argv)


def _rows(partial: Path) -> int:
    """What a growing array counts, without a claim to it."""
    return int.from_bytes(partial.read_bytes()[:8], "little")
