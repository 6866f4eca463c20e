"""Images that are shown beside each other are the ones that the numbers name, and "before" is what
the run started from.
"""

import base64
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

from dpvision.checkpoint import find_checkpoint, load_checkpoint, read_manifest, save_checkpoint
from dpvision.config import PrivacyConfig, RunConfig, from_dict
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.encoders.encoder import Encoder
from dpvision.errors import CheckpointError
from dpvision.files import write_json
from dpvision.models import make_model
from dpvision.report.html import render
from dpvision.report.neighbours import find_neighbours, nearest_others, neighbours_of_run
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import make_report
from dpvision.report.reconstructions import (
    INITIAL,
    LOST_START,
    WARM_START,
    reconstruct,
    reconstruct_some,
)

from ..statement.runs import MODEL, make_run, make_store

NUM = 60
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("scenes") / "public"
    write_scenes(folder, NUM, 32, workers=1)
    return open_store(folder)


def flat(name: str = "pixels") -> Encoder:
    return Encoder(
        name, 32, MEAN, STD, lambda x: {"flat": x.flatten(1), "other": -x.flatten(1)}, "fixed"
    )


def tiles(strip: str) -> list[np.ndarray]:
    """Images of a strip, without the gaps."""
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(strip.split(",")[1]))))
    return [image[:, left : left + 32, :3] for left in range(0, image.shape[1], 34)]


def test_neighbours_are_those_of_another_library() -> None:
    digits = load_digits().data[:400].astype(np.float32) + 1e-3
    found = nearest_others(torch.from_numpy(digits), 7)
    _, expected = (
        NearestNeighbors(n_neighbors=8, metric="cosine", algorithm="brute")
        .fit(digits)
        .kneighbors(digits)
    )
    cosine = (digits @ digits.T) / np.outer(*[np.linalg.norm(digits, axis=1)] * 2)
    for i in range(400):
        assert i not in found[i]
        others = [j for j in expected[i] if j != i][:7]
        assert np.allclose(
            cosine[i, found[i].numpy()], cosine[i, others], atol=1e-5
        )  # ties may come in another order


def test_length_of_a_feature_does_not_matter_and_its_direction_does() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(50, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    assert torch.equal(nearest_others(x, 5), nearest_others(x * scale, 5))
    assert not torch.equal(nearest_others(x, 5), nearest_others(x + 3, 5))


def test_the_grid_shows_the_images_that_are_nearest(scenes: Store) -> None:
    made = find_neighbours({"One": flat(), "Two": flat()}, scenes, num_queries=4, k=5)
    assert (
        made is not None
        and made.pooling == "flat"
        and (made.k, made.num_candidates, len(made.rows)) == (5, NUM, 4)
    )
    images = np.stack(
        [
            np.asarray(Image.open(io.BytesIO(blob)).convert("RGB"))
            for blob in scenes.read_many(np.arange(NUM))
        ]
    )
    x = ((images / 255 - MEAN) / STD).transpose(0, 3, 1, 2).reshape(NUM, -1)
    _, expected = NearestNeighbors(n_neighbors=6, metric="cosine").fit(x).kneighbors(x)
    for query, (one, two) in made.rows:
        assert one == two
        (shown,) = tiles(query)
        row = int(np.abs(images.astype(int) - shown).sum(axis=(1, 2, 3)).argmin())
        assert [
            np.array_equal(a, images[i]) for a, i in zip(tiles(one), expected[row, 1:], strict=True)
        ] == [True] * 5
    labels = scenes.labels[np.arange(NUM)]
    share = (labels[expected[:, 1:]] == labels[:, None]).mean()
    assert made.same_class == pytest.approx((share, share))
    pairs = [labels[i] == labels[j] for i in range(NUM) for j in range(NUM) if i != j]
    assert made.chance == pytest.approx(np.mean(pairs))


def test_a_store_of_one_image_has_no_neighbours_and_one_of_three_has_two(tmp_path: Path) -> None:
    write_scenes(tmp_path / "one", 1, 32, workers=1)
    write_scenes(tmp_path / "three", 3, 32, workers=1)
    assert find_neighbours({"a": flat()}, open_store(tmp_path / "one")) is None
    made = find_neighbours({"a": flat()}, open_store(tmp_path / "three"))
    assert made is not None and made.k == 2 and len(made.rows) <= 3


@pytest.mark.slow
def test_random_weights_stand_beside_a_trained_encoder(
    copy_of: Callable[[], Path], scenes: Store
) -> None:
    run = copy_of()
    made = neighbours_of_run(run, scenes, num_queries=3)
    assert made is not None and all(
        trained == untrained for _, (trained, untrained) in made.rows
    )  # the run's weights are the initial ones
    _retrain(run, seed=3)
    made = neighbours_of_run(run, scenes, num_queries=3)
    assert made is not None and any(trained != untrained for _, (trained, untrained) in made.rows)


def test_the_report_shows_neighbours_of_a_public_store_and_of_none_else(
    copy_of: Callable[[], Path], scenes: Store, tmp_path: Path
) -> None:
    run = copy_of()
    assert "Nearest neighbours" not in make_report(run).read_text()
    page = make_report(run, scenes.path).read_text()
    assert (
        "Nearest neighbours among public images" in page
        and "By random weights" in page
        and f"Before: {INITIAL}" in page
    )
    write_scenes(tmp_path / "private", 8, 32, workers=1, public=False)
    operator = make_operator_page(run, tmp_path / "private")
    assert operator.parent.name == "confidential" and "Nearest neighbours" in operator.read_text()


# Reconstructions before and after a run.


@pytest.fixture
def child_and_parent(tmp_path: Path, small_privacy: PrivacyConfig) -> tuple[Path, Path]:
    """A private run and the public one whose weights (another seed's) it started from."""
    make_store(tmp_path / "public", "public")
    make_store(tmp_path / "store")
    privacy = replace(small_privacy, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    parent = make_run(
        tmp_path / "parent", tmp_path / "public", privacy=privacy, run_id="a1", charged=2
    )
    _retrain(parent, seed=5)
    child = make_run(tmp_path / "child", tmp_path / "store", privacy=small_privacy, charged=2)
    _retrain(
        child,
        seed=6,
        init_from=str(parent),
        lineage=read_manifest(find_checkpoint(parent))["lineage"],
    )
    return child, parent


def _retrain(
    run: Path, seed: int, init_from: str | None = None, lineage: tuple | list = ()
) -> None:
    """Give a run other weights, as if it had been trained, and ancestors."""
    folder = find_checkpoint(run)
    manifest = read_manifest(folder)
    manifest["config"]["init_from"] = init_from
    manifest["lineage"] = [*lineage, manifest["lineage"][-1]]
    save_checkpoint(folder, manifest, make_model(MODEL, seed).state_dict())
    base = folder.parent.parent
    write_json(
        base / "config.json",
        json.loads((base / "config.json").read_text()) | {"init_from": init_from},
    )


def _config(run: Path) -> RunConfig:
    return from_dict(RunConfig, load_checkpoint(run).manifest["config"])


def test_before_is_the_warm_start_and_after_is_the_run(
    child_and_parent: tuple[Path, Path], scenes: Store
) -> None:
    child, parent = child_and_parent
    made = reconstruct_some(child, scenes, 4)
    assert made is not None and list(made.fills) == [f"Before: {WARM_START}", "After the run"]
    before, after = made.fills.values()
    alone = reconstruct({"": load_checkpoint(parent)}, _config(child), scenes, 4)
    assert before == alone.filled != after == made.filled
    assert made.seen == alone.seen and made.original == alone.original


def test_a_warm_start_that_is_gone_is_not_made_up(
    child_and_parent: tuple[Path, Path], scenes: Store
) -> None:
    child, parent = child_and_parent
    shutil.rmtree(parent)
    made = reconstruct_some(child, scenes, 4)
    assert made is not None and next(iter(made.fills)) == f"Before: {LOST_START}"
    assert (
        next(iter(made.fills.values())) == reconstruct({"": None}, _config(child), scenes, 4).filled
    )


def test_weights_that_took_the_place_of_the_warm_start_are_not_shown(
    child_and_parent: tuple[Path, Path], scenes: Store
) -> None:
    child, parent = child_and_parent
    folder = find_checkpoint(parent)
    manifest = read_manifest(folder)
    manifest["lineage"][-1] |= {"visibility": "private", "store_id": "f00d"}
    save_checkpoint(folder, manifest, make_model(MODEL, 5).state_dict())
    made = reconstruct_some(child, scenes, 4)
    assert made is not None and next(iter(made.fills)) == f"Before: {LOST_START}"


def test_checkpoints_of_two_architectures_are_refused_in_one_figure(
    child_and_parent: tuple[Path, Path], scenes: Store
) -> None:
    child, parent = child_and_parent
    other = save_checkpoint(
        parent / "other",
        read_manifest(find_checkpoint(parent)),
        make_model(replace(MODEL, decoder_depth=2), 0).state_dict(),
    )
    with pytest.raises(CheckpointError, match="another architecture"):
        reconstruct({"other": load_checkpoint(other)}, _config(child), scenes, 2)


@pytest.mark.parametrize("target", ["pixels", "normalised_pixels", "gradients"])
def test_other_targets_are_shown_for_what_they_are(
    tmp_path: Path, scenes: Store, target: str
) -> None:
    """Gradients fill in no image, so the report has none; lent brightness and contrast are named as
    lent.
    """
    run = make_run(tmp_path / "run", _store_of(tmp_path))
    folder = find_checkpoint(run)
    manifest = read_manifest(folder)
    manifest["config"]["model"]["target"] = target
    save_checkpoint(folder, manifest, make_model(replace(MODEL, target=target), 3).state_dict())
    made = reconstruct_some(run, scenes, 2)
    assert (made is None) == (target == "gradients")
    if made is not None:
        assert made.borrowed == (target == "normalised_pixels")
        assert (
            "taken from the originals" in render("strips_part.html", images=made)
        ) == made.borrowed


def _store_of(folder: Path) -> Path:
    make_store(folder / "store", "public")
    return folder / "store"
