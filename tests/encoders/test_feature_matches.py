"""Copies that an encoder sees: against all pairs at once, and what the measured threshold
promises.
"""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.config import DataConfig
from dpvision.data.importer import import_samples
from dpvision.data.overlap import HOWS
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.encoders import feature_matches
from dpvision.encoders.feature_file import collect_features
from dpvision.encoders.feature_matches import (
    Threshold,
    find_feature_matches,
    make_copies,
    measure_threshold,
)
from dpvision.encoders.fixed import fixed_encoder
from dpvision.errors import ConfigError, DataError

pytest.importorskip("faiss", reason='faiss is not installed: pip install ".[overlap]"')
pytest.importorskip("imagehash", reason='imagehash is not installed: pip install ".[overlap]"')


def image(i: int, size: int = 48) -> np.ndarray:
    """Clouds of colour, as different from each other as photographs are."""
    coarse = np.random.default_rng(i).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC))


def write_store(
    path: Path, numbers: range, kinds: tuple[str, ...] = ("PNG",), *, public: bool = True
) -> Store:
    samples = []
    for i in numbers:
        for kind in kinds:
            file = io.BytesIO()
            Image.fromarray(image(i)).save(file, kind)
            samples.append(Sample(f"{i}.{kind}", file.getvalue(), {}))
    return import_samples(samples, path, public=public)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """Images 0 to 59, public, and 40 to 99, private: twenty in common."""
    root = tmp_path_factory.mktemp("overlap")
    return write_store(root / "public", range(60)), write_store(
        root / "mine", range(40, 100), public=False
    )


ENCODER = fixed_encoder("hog", 32)


def test_the_search_in_blocks_finds_what_all_pairs_at_once_show(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    public, private = stores
    monkeypatch.setattr(feature_matches, "_BLOCK", 17)
    threshold = replace(measure_threshold(ENCODER, public, sample=20), cosine=0.25)
    found = find_feature_matches(ENCODER, public, private, threshold, batch_size=7, workers=1)

    def unit(store: Store) -> np.ndarray:
        data = DataConfig(mean=ENCODER.mean, std=ENCODER.std)
        found, _, _ = collect_features(
            {"": lambda x: {"": torch.cat([ENCODER(v) for v in (x, x.flip(-1))], 1)}},
            store,
            data,
            32,
        )
        x_ND = found["", ""]
        halves = x_ND.double().numpy().reshape(len(x_ND), 2, -1) - threshold.centre_D
        return halves / np.linalg.norm(halves, axis=2, keepdims=True)

    ours, theirs = unit(public), unit(private)[:, 0]
    cosine = np.maximum(ours[:, 0] @ theirs.T, ours[:, 1] @ theirs.T)
    assert (
        found.public_M.tolist() == np.flatnonzero(cosine.max(axis=1) > 0.25).tolist()
        and 20 <= len(found.public_M) < 60
    )
    np.testing.assert_allclose(1 - found.distance_M, cosine.max(axis=1)[found.public_M], atol=2e-3)
    best = cosine[found.public_M, found.private_M]
    np.testing.assert_allclose(best, cosine.max(axis=1)[found.public_M], atol=2e-3)
    assert {HOWS[how] for how in found.how_M.tolist()} == {"features"}
    assert not list((private.path / "confidential").glob("tmp*")), (
        "the private features are gone when it is done"
    )


def test_the_measured_threshold_keeps_its_promise_on_other_images(
    stores: tuple[Store, Store],
) -> None:
    """Measured on some public images, tried on others: common images found, no more strangers than
    it allows by chance.
    """
    public, private = stores
    threshold = measure_threshold(ENCODER, public, false_alarms=0.01)
    assert 0 < threshold.cosine < 1 and threshold.num_images == 60
    assert threshold.recall["jpeg, quality 30"] > 0.9 and threshold.recall["mirror image"] == 1.0
    assert threshold.recall["corner, 70%"] < threshold.recall["half the size"]
    found = find_feature_matches(ENCODER, public, private, threshold, workers=1)
    common = dict(zip(found.public_M.tolist(), found.private_M.tolist(), strict=True))
    assert all(common.get(row) == row - 40 for row in range(40, 60))
    assert len(common) <= 20 + 4


def test_a_stricter_threshold_finds_fewer(stores: tuple[Store, Store]) -> None:
    public, private = stores
    threshold = measure_threshold(ENCODER, public, sample=20)
    counts = [
        len(
            find_feature_matches(
                ENCODER, public, private, replace(threshold, cosine=c), workers=1
            ).public_M
        )
        for c in (-0.5, 0.9, 0.9999)
    ]
    assert counts[0] == 60 and counts == sorted(counts, reverse=True)


def test_an_image_that_is_there_twice_is_no_false_alarm(tmp_path: Path) -> None:
    """Two of each: without care the nearest other image of every copy would be a copy itself, and
    the threshold 1.
    """
    store = write_store(tmp_path / "store", range(40), ("PNG", "BMP"))
    assert measure_threshold(ENCODER, store).recall["half the size"] > 0.9


def test_copies_are_what_they_are_called() -> None:
    original = image(0, 64)
    copies = make_copies(original)
    assert np.array_equal(copies["mirror image"], original[:, ::-1]) and copies[
        "half the size"
    ].shape == (32, 32, 3)
    assert np.array_equal(copies["corner, 70%"], original[:45, :45]) and np.array_equal(
        copies["shifted by 1/16"], original[4:, 4:]
    )
    assert all(copy.dtype == np.uint8 and copy.shape[2] == 3 for copy in copies.values())
    tiny = make_copies(np.zeros((1, 1, 3), dtype=np.uint8))
    assert all(copy.size for copy in tiny.values()), "an image of one pixel has copies too"


def test_bad_input_is_refused(stores: tuple[Store, Store], tmp_path: Path) -> None:
    public, private = stores
    for cosine in (1.0, -1.1, np.nan):
        with pytest.raises(ConfigError, match="threshold"):
            find_feature_matches(
                ENCODER,
                public,
                private,
                Threshold(cosine, np.zeros(1, dtype=np.float32), {}, 0),
                workers=1,
            )
    few = write_store(tmp_path / "few", range(3))
    with pytest.raises(DataError, match="ten or more"):
        measure_threshold(ENCODER, few)
