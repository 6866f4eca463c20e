"""An evaluation with a cache is the evaluation without one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.eval.probes import cache
from dpvision.eval.probes.knn import KNN
from dpvision.eval.probes.protocol import FeatureProtocol
from dpvision.eval.probes.ridge import Ridge
from dpvision.eval.probes.suite import evaluate

from ..conftest import MakeRun


def _stores(tmp_path: Path) -> tuple[Store, Store]:
    return write_scenes(tmp_path / "a", 120, 16), write_scenes(tmp_path / "b", 40, 16, first=500)


@pytest.mark.slow
def test_a_second_evaluation_is_the_first_and_reads_no_image(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stores = make_run(), _stores(tmp_path)
    plain = evaluate(run, *stores, workers=1)
    assert not (stores[0].path / "confidential" / "features").exists()
    first = evaluate(run, *stores, workers=1, cache=True)
    monkeypatch.setattr(FeatureProtocol, "run", None)
    monkeypatch.setattr(cache, "collect_features", None)
    assert evaluate(run, *stores, workers=1, cache=True) == first == plain


def test_another_protocol_or_setting_takes_the_features_and_not_the_scores(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stores = make_run(), _stores(tmp_path)
    evaluate(run, *stores, protocols=(KNN(),), workers=1, cache=True)
    monkeypatch.setattr(cache, "collect_features", None)
    ridge = evaluate(run, *stores, protocols=(Ridge(),), workers=1, cache=True)
    assert (
        ridge
        == evaluate(run, *stores, protocols=(Ridge(),), against=(), workers=1, cache=True)
        + ridge[2:]
    )
    near = evaluate(run, *stores, protocols=(KNN(1),), workers=1, cache=True)
    assert all("k=1," in score.protocol for score in near)


def test_changed_weights_are_scored_anew(make_run: MakeRun, tmp_path: Path) -> None:
    run, stores = make_run(), _stores(tmp_path)
    kept = stores[0].path / "confidential" / "features"
    evaluate(run, *stores, protocols=(Ridge(),), against=(), workers=1, cache=True)
    before = set(kept.glob("*.safetensors"))
    averaged = evaluate(
        run, *stores, protocols=(Ridge(),), against=(), ema=True, workers=1, cache=True
    )
    assert averaged == evaluate(
        run, *stores, protocols=(Ridge(),), against=(), ema=True, workers=1, cache=False
    )
    (old,), (new,) = before, set(kept.glob("*.safetensors")) - before
    assert not torch.equal(load_file(old)["mean"], load_file(new)["mean"])


def test_what_a_confidential_encoder_makes_of_public_images_is_not_kept(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run, stores = make_run(wholly_confidential=True), _stores(tmp_path)
    evaluate(run, *stores, protocols=(KNN(),), against=(), workers=1, cache=True)
    assert not [
        file for store in stores for file in (store.path / "confidential").rglob("features/*")
    ]


def test_scores_of_a_private_store_are_kept_beside_that_store(
    make_run: MakeRun, tmp_path: Path
) -> None:
    public = write_scenes(tmp_path / "a", 120, 16)
    private = write_scenes(tmp_path / "b", 40, 16, first=500, public=False)
    evaluate(make_run(), public, private, protocols=(KNN(),), workers=1, cache=True)
    assert not [*(public.path / "confidential" / "features").glob("*.json")]
    assert len([*(private.path / "confidential" / "features").glob("*.json")]) == 3
    outside = {
        path for path in private.path.rglob("*.safetensors") if "confidential" not in path.parts
    }
    assert not outside and [*private.path.rglob("*.safetensors")]
