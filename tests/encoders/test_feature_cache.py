"""The cache beside a store: other things have other names, damage is a miss, and a disk that
refuses costs time only.
"""

import os
import shutil
import sys
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
    features_key,
    score_key,
)
from dpvision.encoders.identity import fingerprint, weights_digest

from ..eval.labelled import conv_encoder, vit_encoder, write_digits

FLOAT, ONES = np.dtype(np.float32), np.ones((50, 4), dtype=np.float32)


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


def test_nothing_that_was_kept_is_deleted(tmp_path: Path) -> None:
    """Not by other features, nor by other processes' unfinished files."""
    cache = FeatureCache(tmp_path)
    for i in range(5):
        cache.save(f"{i}", {"x": torch.zeros(800)})
        cache.save_json(f"{i}", i)
    left = cache.folder / ".k.json.partial-9"
    left.touch()
    os.utime(left, (1, 1))
    before = {file.name: file.stat().st_mtime_ns for file in cache.folder.iterdir()}
    assert cache.make_folder()
    cache.save_array("large", (50, 4), FLOAT, lambda _: iter([ONES]))
    after = {file.name: file.stat().st_mtime_ns for file in cache.folder.iterdir()}
    assert len(before) == 11 and after.items() > before.items() and "large.npy" in after


def test_what_the_disk_has_no_space_for_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, usage = FeatureCache(tmp_path), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3000))
    cache.save("large", {"x": torch.zeros(800)})
    cache.save("small", {"x": torch.zeros(600)})
    assert cache.load("large") is None and cache.load("small") is not None


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


def test_a_features_name_changes_with_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, names = write_digits(tmp_path / "s", 0, 5), set()
    for version in (1, 2):
        monkeypatch.setattr(feature_cache, "FEATURES_VERSION", version)
        names.add(features_key("e", store, np.arange(5)))
    assert len(names) == 2


def test_an_array_comes_back_memory_mapped_and_one_of_another_shape_is_a_miss(
    tmp_path: Path,
) -> None:
    cache, x = FeatureCache(tmp_path), np.arange(24, dtype=np.float16).reshape(6, 4)
    assert cache.make_folder() and cache.load_array("k", (6, 4), x.dtype) is None
    written = cache.save_array("k", (6, 4), x.dtype, lambda _: iter([x[:1], x[1:5], x[5:]]))
    assert (
        np.array_equal(written, x)
        and isinstance(written, np.memmap)
        and not written.flags.writeable
    )
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
