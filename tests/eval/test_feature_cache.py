import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.encoders.base import FrozenEncoder
from dpvision.eval import suite
from dpvision.eval.feature_cache import FeatureCache, features_key, fingerprint, score_key
from dpvision.eval.protocols import ProtocolSettings
from dpvision.eval.suite import evaluate

from .conftest import MakeRun
from .labelled import conv_encoder, vit_encoder, write_digits


def _stores(tmp_path: Path) -> tuple[Store, Store]:
    return write_scenes(tmp_path / "a", 120, 16), write_scenes(tmp_path / "b", 40, 16, first=500)


def test_tensors_come_back_bit_by_bit_and_damage_is_a_miss(tmp_path: Path) -> None:
    cache, x = FeatureCache(tmp_path), {"a": torch.randn(5, 3), "row": torch.arange(5)}
    assert cache.load("k") is None
    cache.save("k", x)
    found = cache.load("k")
    assert found is not None and all(torch.equal(x[name], found[name]) for name in x)
    assert (cache.folder.stat().st_mode & 0o777) == (cache.folder.parent.stat().st_mode & 0o777) == 0o700
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
    assert cache.load("used") is None and cache.load("old") is not None and cache.load("newest") is not None
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

    others: list[FrozenEncoder] = [
        vit_encoder(seed=1), conv_encoder(), replace(encoder, name="b"), replace(encoder, mean=(0.4, 0.5, 0.5)),
        replace(encoder, backbone=lambda: nudged), replace(encoder, poolings=twice),
    ]  # fmt: skip
    marks = [fingerprint(e) for e in (encoder, *others)]
    assert len(set(marks)) == len(marks) and marks[0] == fingerprint(vit_encoder())


def test_a_features_name_changes_with_store_and_rows(tmp_path: Path) -> None:
    a, b = write_digits(tmp_path / "a", 0, 20), write_digits(tmp_path / "b", 0, 20)  # the same pictures, other stores
    rows = a.labels.argsort()
    names = [features_key("e", a, rows), features_key("f", a, rows), features_key("e", a, rows[1:]), features_key("e", a, rows[::-1])]
    assert len({*names, features_key("e", b, rows)}) == 5 and features_key("e", a, rows) == names[0]
    assert score_key("a", 1) != score_key("a", 2)


def test_a_second_evaluation_is_the_first_and_reads_no_picture(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, stores = make_run(), _stores(tmp_path)
    plain = evaluate(run, *stores, workers=1)
    assert not (stores[0].path / "confidential" / "features").exists()
    first = evaluate(run, *stores, workers=1, cache=True)
    monkeypatch.setattr(suite, "score_features", None)
    monkeypatch.setattr(suite, "collect_features", None)
    assert evaluate(run, *stores, workers=1, cache=True) == first == plain


def test_another_protocol_or_setting_takes_the_features_and_not_the_scores(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stores = make_run(), _stores(tmp_path)
    evaluate(run, *stores, protocols=("knn",), workers=1, cache=True)
    monkeypatch.setattr(suite, "collect_features", None)
    ridge = evaluate(run, *stores, protocols=("ridge",), workers=1, cache=True)
    assert ridge == evaluate(run, *stores, protocols=("ridge",), against=(), workers=1, cache=True) + ridge[2:]
    near = evaluate(run, *stores, protocols=("knn",), settings=ProtocolSettings(k=1), workers=1, cache=True)
    assert all("k=1," in score.protocol for score in near)


def test_changed_weights_are_scored_anew(make_run: MakeRun, tmp_path: Path) -> None:
    run, stores = make_run(), _stores(tmp_path)
    kept = stores[0].path / "confidential" / "features"
    evaluate(run, *stores, protocols=("ridge",), against=(), workers=1, cache=True)
    before = set(kept.glob("*.safetensors"))
    averaged = evaluate(run, *stores, protocols=("ridge",), against=(), ema=True, workers=1, cache=True)
    assert averaged == evaluate(run, *stores, protocols=("ridge",), against=(), ema=True, workers=1, cache=False)
    (old,), (new,) = before, set(kept.glob("*.safetensors")) - before
    assert not torch.equal(load_file(old)["mean"], load_file(new)["mean"])


def test_what_a_confidential_encoder_makes_of_public_pictures_is_not_kept(make_run: MakeRun, tmp_path: Path) -> None:
    run, stores = make_run(wholly_confidential=True), _stores(tmp_path)
    evaluate(run, *stores, protocols=("knn",), against=(), workers=1, cache=True)
    assert not [file for store in stores for file in (store.path / "confidential").rglob("features/*")]


def test_scores_of_a_private_store_are_kept_beside_that_store(make_run: MakeRun, tmp_path: Path) -> None:
    public = write_scenes(tmp_path / "a", 120, 16)
    private = write_scenes(tmp_path / "b", 40, 16, first=500, public=False)
    evaluate(make_run(), public, private, protocols=("knn",), workers=1, cache=True)
    assert not [*(public.path / "confidential" / "features").glob("*.json")]
    assert len([*(private.path / "confidential" / "features").glob("*.json")]) == 3
    outside = {path for path in private.path.rglob("*.safetensors") if "confidential" not in path.parts}
    assert not outside and [*private.path.rglob("*.safetensors")]
