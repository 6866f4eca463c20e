"""Features of a store as one array: row by record, NaN where nothing decodes, and never another
encoder's.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpvision.data.store import Store
from dpvision.encoders import feature_file
from dpvision.encoders.feature_cache import FeatureCache
from dpvision.encoders.feature_file import (
    Extraction,
    collect_features,
    feature_array,
    feature_blocks,
    kept_centre,
    texture_centre,
)
from dpvision.errors import DataError

from ..eval.labelled import vit_encoder, write_digits


def _break(store: Store, rows: list[int]) -> None:
    """Make records undecodable where they lie."""
    with open(store.shard_paths[0], "r+b") as shard:
        for row in rows:
            shard.seek(int(store.index["offset"][row]))
            shard.write(b"\0" * int(store.index["size"][row]))


def test_rows_are_the_encoders_own_features_in_the_order_asked_for(tmp_path: Path) -> None:
    store, encoder = write_digits(tmp_path / "s", 0, 50), vit_encoder()
    rows = np.arange(1, 50, 3)
    found = feature_array(encoder, "mean", 32, store, rows, batch_size=7, workers=1)
    expected, _, _ = collect_features({"": encoder.poolings}, store, encoder.data, 8, rows=rows)
    assert found.dtype == np.float32 and np.allclose(found, expected["", "mean"].numpy(), atol=1e-6)


@pytest.mark.parametrize("broken", [[0, 1], [3, 4, 9], [28, 29], list(range(7, 21))])
def test_a_record_that_does_not_decode_keeps_its_row_and_moves_nobody(
    tmp_path: Path, broken: list[int]
) -> None:
    store, encoder, rows = write_digits(tmp_path / "s", 0, 30), vit_encoder(), np.arange(30)
    whole = np.array(
        feature_array(encoder, "mean", 32, store, rows, keep=False, batch_size=7, workers=2)
    )
    _break(store, broken)
    found = feature_array(encoder, "mean", 32, store, rows, batch_size=7, workers=2)
    readable = np.setdiff1d(rows, broken)
    assert np.isnan(found[broken]).all() and np.array_equal(found[readable], whole[readable]), (
        "the same bits, whoever is missing"
    )


def test_the_second_time_no_image_is_read_and_another_encoder_is_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, encoder, rows = write_digits(tmp_path / "s", 0, 20), vit_encoder(), np.arange(20)
    first = np.array(feature_array(encoder, "mean", 32, store, rows, workers=1))
    real, reads = feature_file.image_batches, []

    def counted(*args, **kwargs):
        reads.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(feature_file, "image_batches", counted)
    assert (
        np.array_equal(feature_array(encoder, "mean", 32, store, rows, workers=1), first)
        and not reads
    )
    others = [
        vit_encoder(seed=1),
        replace(encoder, mean=(0.4, 0.5, 0.5)),
        replace(encoder, image_size=10),
    ]
    twice = replace(
        encoder, poolings=lambda x: {name: 2 * f for name, f in encoder.poolings(x).items()}
    )
    for n, other in enumerate([*others[:2], twice], start=1):
        assert (
            not np.array_equal(feature_array(other, "mean", 32, store, rows, workers=1), first)
            and len(reads) == n
        )
    feature_array(encoder, "mean", 32, store, rows[1:], workers=1)
    assert len(reads) == 4
    kept = store.path / "confidential" / "features"
    assert len([*kept.glob("*.npy")]) == 5 and (kept.stat().st_mode & 0o777) == 0o700
    for path in kept.glob("*.npy"):
        path.write_bytes(b"damaged")
    assert np.array_equal(feature_array(encoder, "mean", 32, store, rows, workers=1), first), (
        "damage costs time only"
    )


def test_the_centre_is_computed_once_for_each_encoder_and_pooling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_file, "NUM_TEXTURES", 32)
    store, encoder = write_digits(tmp_path / "s", 0, 5), vit_encoder()
    two = replace(encoder, poolings=lambda x: (f := encoder.poolings(x)) | {"twice": 2 * f["mean"]})
    centre_D = texture_centre(encoder, "mean")
    others = {
        "weights": vit_encoder(seed=1),
        "normalisation": replace(encoder, mean=(0.4, 0.5, 0.5)),
    }
    assert torch.equal(kept_centre(encoder, "mean", store, keep=False), centre_D)
    assert not FeatureCache(store.path).folder.exists(), "confidential weights leave no trace"
    assert torch.equal(kept_centre(encoder, "mean", store), centre_D)
    for what, other in others.items():
        assert torch.equal(kept_centre(other, "mean", store), texture_centre(other, "mean")), what
    for pooling, factor in (("mean", 1), ("twice", 2)):
        assert torch.equal(kept_centre(two, pooling, store), factor * centre_D)
    monkeypatch.setattr(feature_file, "texture_centre", None)
    assert torch.equal(kept_centre(encoder, "mean", store), centre_D)


def test_large_features_are_kept_in_half_precision_and_what_does_not_fit_drops_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rows = write_digits(tmp_path / "s", 0, 12), np.arange(12)
    encoder = replace(
        vit_encoder(),
        backbone=None,
        poolings=lambda x: {"mean": x.flatten(1)[:, :2] * torch.tensor([1.0, 3e5])},
    )
    whole = np.array(feature_array(encoder, "mean", 2, store, rows, workers=1))
    monkeypatch.setattr(feature_file, "_WHOLE_BYTES", 10)
    half = feature_array(encoder, "mean", 2, store, rows, workers=1)
    assert half.dtype == np.float16
    fits = np.abs(whole) <= 65504
    assert (
        np.allclose(half[fits], whole[fits], rtol=2**-10)
        and np.isinf(half[~fits]).all()
        and (~fits).any()
    )


def test_blocks_are_the_rows_of_the_array_also_where_there_is_room_for_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, encoder, rows, how = (
        write_digits(tmp_path / "s", 0, 30),
        vit_encoder(),
        np.arange(30),
        Extraction(batch_size=7, workers=1),
    )
    _break(store, [3, 29])
    whole = np.array(
        feature_array(encoder, "mean", 32, store, rows, keep=False, batch_size=7, workers=1)
    )
    assert np.array_equal(
        np.concatenate([*feature_blocks(encoder, "mean", 32, store, rows, how)]),
        whole,
        equal_nan=True,
    )
    monkeypatch.setattr(FeatureCache, "has_room", lambda *args: False)
    monkeypatch.setattr(feature_file, "_WHOLE_BYTES", 2 * 30 * 32 - 1)  # of float16
    other = replace(encoder, name="other")  # of which nothing is kept
    with pytest.raises(DataError, match="no space under"):
        feature_array(other, "mean", 32, store, rows, batch_size=7, workers=1)
    half = np.concatenate([*feature_blocks(other, "mean", 32, store, rows, how)])
    assert half.dtype == np.float16 and np.array_equal(np.isnan(half), np.isnan(whole))
