"""The cache beside a store: other things have other names, damage is a miss, and a disk that
refuses costs time only.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch

from dpvision.encoders import feature_cache
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_cache import (
    FeatureCache,
    GrowingArray,
    claim,
    features_key,
    growing_path,
    score_key,
)
from dpvision.encoders.identity import fingerprint, weights_digest

from ..eval.labelled import conv_encoder, vit_encoder, write_digits


def test_tensors_come_back_bit_by_bit_and_damage_is_a_miss(tmp_path: Path) -> None:
    cache, x = FeatureCache(tmp_path), {"a": torch.randn(5, 3), "row": torch.arange(5)}
    assert cache.load("k") is None
    cache.save("k", x)
    found = cache.load("k")
    assert found is not None and all(torch.equal(x[name], found[name]) for name in x)
    assert (
        (cache.folder.stat().st_mode & 0o777)
        == (cache.folder.parent.stat().st_mode & 0o777)
        == 0o700
    )
    path = cache.folder / "k.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    assert cache.load("k") is None
    cache.save_json("j", [1.5])
    assert cache.load_json("j") == [1.5] and cache.load_json("none") is None


def test_the_cache_keeps_below_its_bound_and_lets_the_unused_go_first(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, max_bytes=10_000)
    for i, key in enumerate(("old", "used", "new")):
        cache.save(key, {"x": torch.zeros(800)})  # 3200 bytes each: three fit, four do not
        os.utime(cache.folder / f"{key}.safetensors", (i, i))
    assert cache.load("old") is not None  # used just now
    cache.save("newest", {"x": torch.zeros(800)})
    assert (
        cache.load("used") is None
        and cache.load("old") is not None
        and cache.load("newest") is not None
    )
    cache.save("huge", {"x": torch.zeros(8000)})
    assert cache.load("huge") is None and cache.load("newest") is not None
    assert sum(file.stat().st_size for file in cache.folder.iterdir()) <= 10_000


def test_a_disk_that_refuses_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "confidential").write_text("a file where the folder should be")
    cache = FeatureCache(tmp_path)
    cache.save("k", {"x": torch.zeros(2)})
    assert cache.load("k") is None


def test_a_fingerprint_changes_with_each_thing_that_decides_features() -> None:
    encoder = vit_encoder()
    assert encoder.backbone is not None
    nudged = encoder.backbone()
    with torch.no_grad():
        next(nudged.parameters())[0] += 1e-6

    def twice(x_BCHW: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: 2 * x_BD for name, x_BD in encoder.poolings(x_BCHW).items()}

    others: list[Encoder] = [
        vit_encoder(seed=1),
        conv_encoder(),
        replace(encoder, name="b"),
        replace(encoder, mean=(0.4, 0.5, 0.5)),
        replace(encoder, backbone=lambda: nudged),
        replace(encoder, poolings=twice),
    ]
    marks = [fingerprint(e) for e in (encoder, *others)]
    assert len(set(marks)) == len(marks) and marks[0] == fingerprint(vit_encoder())


def test_a_features_name_changes_with_store_and_rows(tmp_path: Path) -> None:
    a, b = (
        write_digits(tmp_path / "a", 0, 20),
        write_digits(tmp_path / "b", 0, 20),
    )  # the same images, other stores
    rows = a.labels.argsort()
    names = [
        features_key("e", a, rows),
        features_key("f", a, rows),
        features_key("e", a, rows[1:]),
        features_key("e", a, rows[::-1]),
    ]
    assert len({*names, features_key("e", b, rows)}) == 5 and features_key("e", a, rows) == names[0]
    assert score_key("a", 1) != score_key("a", 2)


def test_an_array_comes_back_memory_mapped_and_one_of_another_shape_is_a_miss(
    tmp_path: Path,
) -> None:
    cache, x = FeatureCache(tmp_path, max_bytes=100), np.arange(24, dtype=np.float16).reshape(6, 4)
    assert cache.make_folder() and cache.load_array("k", (6, 4), x.dtype) is None
    written = cache.save_array("k", (6, 4), x.dtype, lambda _: iter([x[:1], x[1:5], x[5:]]))
    assert (
        np.array_equal(written, x)
        and isinstance(written, np.memmap)
        and not written.flags.writeable
    ), "larger than the cache, yet kept"
    assert (
        cache.load_array("k", (6, 5), x.dtype) is None
        and cache.load_array("k", (6, 4), np.dtype(np.float32)) is None
    )
    path = cache.folder / "k.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.load_array("k", (6, 4), x.dtype) is None
    assert [file.name for file in cache.folder.iterdir()] == ["k.npy"], (
        "nothing half written is left"
    )


FLOAT, ONES = np.dtype(np.float32), np.ones((50, 4), dtype=np.float32)


def _save_ones(cache: FeatureCache, key: str) -> np.ndarray:
    """928 bytes on the disk."""
    assert cache.make_folder()
    return cache.save_array(key, (50, 4), FLOAT, lambda _: iter([ONES]))


def test_a_finished_array_stays_while_another_process_writes_one(tmp_path: Path) -> None:
    """Though the other's file is newer and there is room for one only."""
    cache = FeatureCache(tmp_path, max_bytes=1000)
    assert cache.make_folder()
    with claim(cache.folder / "other.npy", (50, 4), FLOAT) as other:
        growing_path(other.path).write_bytes(bytes(900))
        os.utime(growing_path(other.path), (2**32, 2**32))
        assert np.array_equal(_save_ones(cache, "mine"), ONES)
        assert {f.name for f in cache.folder.iterdir()} == {".other.npy.partial", "mine.npy"}


def test_another_process_deletes_no_array_before_its_writer_has_opened_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real = FeatureCache(tmp_path, max_bytes=1000), GrowingArray.write

    def write(self: GrowingArray, first: int, blocks: Iterable[np.ndarray]) -> None:
        real(self, first, blocks)
        if self.path.name == "mine.npy":  # renamed, and not opened yet
            os.utime(self.path, (1, 1))
            _save_ones(FeatureCache(tmp_path, max_bytes=1000), "other")

    monkeypatch.setattr(GrowingArray, "write", write)
    assert np.array_equal(_save_ones(cache, "mine"), ONES)


def test_small_files_never_evict_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array above the bound stays until another large file is written; small files go when they
    alone exceed the bound.
    """
    monkeypatch.setattr(feature_cache, "_SMALL_BYTES", 500)
    cache = FeatureCache(tmp_path, max_bytes=800)
    _save_ones(cache, "large")
    os.utime(cache.folder / "large.npy", (1, 1))
    for i in range(5):
        cache.save_json(f"{i}", "x" * 298)  # 300 bytes
        os.utime(cache.folder / f"{i}.json", (2 + i, 2 + i))
    assert {f.name for f in cache.folder.iterdir()} == {"large.npy", "3.json", "4.json"}
    _save_ones(cache, "larger")
    assert {f.name for f in cache.folder.iterdir()} == {"larger.npy"}


def test_files_that_other_processes_delete_meanwhile_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real = FeatureCache(tmp_path, max_bytes=1000), os.scandir
    _save_ones(cache, "old")
    left = cache.folder / ".k.json.partial-9"
    for path in (left, cache.folder / "gone.npy"):
        path.touch()
        os.utime(path, (1, 1))

    def scandir(folder: Path) -> Iterator[os.DirEntry[str]]:
        for entry in list(real(folder)):
            if entry.name in (left.name, "gone.npy"):
                os.unlink(entry)
            yield entry

    monkeypatch.setattr(os, "scandir", scandir)
    assert np.array_equal(_save_ones(cache, "new"), ONES)
    assert {f.name for f in cache.folder.iterdir()} == {"new.npy"}


def test_a_features_name_changes_with_the_decoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEIC images that were unreadable without pillow-heif are read again once it is there."""
    store, names = write_digits(tmp_path / "s", 0, 5), []
    for version in (None, "1.0", "1.1"):
        heif = None if version is None else type(sys)("pillow_heif")
        if heif is not None:
            heif.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pillow_heif", heif)
        names.append(features_key("e", store, np.arange(5)))
    monkeypatch.setattr(simplejpeg, "__version__", "0")
    assert len({*names, features_key("e", store, np.arange(5))}) == 4


def test_weights_have_a_digest_of_their_own() -> None:
    one, named = vit_encoder(), replace(vit_encoder(), name="other", mean=(0.4, 0.5, 0.5))
    assert weights_digest(one) == weights_digest(named) != weights_digest(vit_encoder(seed=1))
    assert weights_digest(replace(one, backbone=None)) is None
