import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from dpvision import load
from dpvision.config import RunConfig
from dpvision.data.store import Store
from dpvision.encoders import embeddings
from dpvision.encoders.embeddings import write_embeddings
from dpvision.encoders.feature_file import collect_features
from dpvision.encoders.identity import check_same, describe, fingerprint
from dpvision.errors import CheckpointError, ConfigError, DataError
from dpvision.models import make_model

from ..conftest import MakeRun


def _image(store: Store, row: int) -> Image.Image:
    return Image.open(io.BytesIO(store.read(row)))


def test_mean_and_quadrants_are_those_of_the_patch_tokens(
    make_run: MakeRun, config: RunConfig
) -> None:
    x_BCHW = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    vit = make_model(config.model, seed=5).encoder.eval()
    with torch.no_grad():
        patch_BGGD = vit(x_BCHW)[:, 1:].unflatten(1, (4, 4))
    quadrants = [
        patch_BGGD[:, r : r + 2, c : c + 2].mean(dim=(1, 2)) for r in (0, 2) for c in (0, 2)
    ]
    run = make_run()
    torch.testing.assert_close(load(run)(x_BCHW), patch_BGGD.mean(dim=(1, 2)))
    torch.testing.assert_close(load(run)(x_BCHW, "2x2"), torch.cat(quadrants, dim=1))


def test_loaded_encoder_is_frozen_and_in_evaluation_mode(make_run: MakeRun) -> None:
    encoder = load(make_run())
    assert not encoder(torch.zeros(1, 3, 8, 8)).requires_grad
    assert encoder.backbone is not None and all(
        p.requires_grad for p in encoder.backbone().parameters()
    ), "a copy to train"


def test_averaged_weights_are_taken_when_asked_for(make_run: MakeRun) -> None:
    encoder = load(make_run(), ema=True)
    assert encoder.backbone is not None and all(
        not p.any() for p in encoder.backbone().parameters()
    )  # the fixture's average is zero


def test_missing_average_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    folder = run / "checkpoints" / "step-00000004"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["tensors"]["ema.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"no averaged weights.*Drop --ema"):
        load(run, ema=True)


def test_weights_that_do_not_fit_their_config_are_refused(make_run: MakeRun) -> None:
    run = make_run()
    file = run / "checkpoints" / "step-00000004" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["config"]["model"]["encoder"]["depth"] = 2
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not fit its config"):
        load(run)


def test_unknown_pooling_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="pooling='max'; expected one of"):
        load(make_run())(torch.zeros(1, 3, 8, 8), "max")


def test_a_store_and_a_single_image_get_the_same_features(
    make_run: MakeRun, test_store: Store
) -> None:
    encoder = load(make_run())
    found, label_N, _ = collect_features(
        {"": encoder.poolings}, test_store, encoder.data, 8, batch_size=32, workers=1
    )
    x_ND = found["", "mean"]
    for row in (0, 33, 79):
        alone = encoder(torch.from_numpy(encoder.preprocess(_image(test_store, row)))[None])[0]
        torch.testing.assert_close(x_ND[row], alone)
    assert (label_N.numpy() == test_store.labels).all()


def test_an_encoder_sees_images_as_its_run_resized_them(
    make_run: MakeRun, test_store: Store
) -> None:
    """``evaluate`` and ``adapt`` once took the centred square where ``load`` and ``embed`` took
    what the run had been shown.
    """
    run = make_run()
    plain = load(run).preprocess
    file = run / "checkpoints" / "step-00000004" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["config"]["data"] |= {"resize": 12, "crop": "centre"}
    file.write_text(json.dumps(manifest))
    encoder, image = load(run), _image(test_store, 3).resize((40, 20))
    expected = Image.fromarray(
        np.asarray(
            image.resize((8, 8), Image.Resampling.BICUBIC, box=(40 / 6, 20 / 6, 200 / 6, 100 / 6))
        )
    )
    assert (
        np.abs(encoder.preprocess(image) - plain(expected)).max() < 0.05
        and np.abs(plain(image) - plain(expected)).max() > 0.2
    )
    assert encoder.data.resize == 12 and fingerprint(encoder) != fingerprint(
        replace(encoder, resize=None)
    )
    with pytest.raises(CheckpointError, match="resize=12 of encoder; expected None"):
        check_same(encoder, describe(replace(encoder, resize=None), "mean", 16), "a head")


def test_features_do_not_depend_on_batch_size_or_workers(
    make_run: MakeRun, config: RunConfig, test_store: Store
) -> None:
    functions = {"": load(make_run()).poolings}
    one, _, _ = collect_features(functions, test_store, config.data, 8, batch_size=80, workers=1)
    other, _, _ = collect_features(functions, test_store, config.data, 8, batch_size=7, workers=2)
    torch.testing.assert_close(one["", "mean"], other["", "mean"])


def test_rows_and_progress(config: RunConfig, test_store: Store) -> None:
    rows, seen = np.array([70, 3, 41]), []
    named, label_N, row_N = collect_features(
        {"f": lambda x: {"sum": x.sum(dim=(1, 2, 3))[:, None]}},
        test_store,
        config.data,
        8,
        rows=rows,
        batch_size=2,
        workers=1,
        progress=seen.append,
    )
    assert row_N.tolist() == [70, 3, 41] and named["f", "sum"].shape == (3, 1) and seen == [2, 3]
    assert (label_N.numpy() == test_store.labels[rows]).all()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_embeddings_of_a_store_carry_ids_and_labels(
    make_run: MakeRun, test_store: Store, tmp_path: Path, suffix: str
) -> None:
    run, out = make_run(), tmp_path / f"features{suffix}"
    made = write_embeddings(run, test_store.path, out, pooling="2x2", workers=1)
    assert (made.num, made.width, made.visibility, made.left_out) == (80, 64, "public", 0)
    if suffix == ".npz":
        arrays = dict(np.load(out))
    else:
        with safe_open(out, "numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is not iterable)
    encoder = load(run)
    expected = encoder(torch.from_numpy(encoder.preprocess(_image(test_store, 9)))[None], "2x2")[0]
    np.testing.assert_allclose(arrays["features"][9], expected, atol=1e-5)
    assert (arrays["id"] == test_store.index["id"]).all() and (
        arrays["label"] == test_store.labels
    ).all()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_embeddings_of_a_folder_carry_names_and_count_as_private(
    make_run: MakeRun, test_store: Store, tmp_path: Path, suffix: str
) -> None:
    folder, out = tmp_path / "photos", tmp_path / f"features{suffix}"
    folder.mkdir()
    for row, name in enumerate("cab"):
        (folder / f"{name}.png").write_bytes(test_store.read(row))
    (folder / "broken.png").write_bytes(test_store.read(5)[:60])
    run = make_run()
    with pytest.raises(
        ConfigError, match="features of private images; expected a folder called confidential"
    ):
        write_embeddings(run, folder, out)
    assert not out.exists()
    made = write_embeddings(run, folder, out, batch_size=2, workers=1, release_private_outputs=True)
    assert (made.num, made.width, made.visibility, made.left_out) == (3, 16, "private", 1)
    if suffix == ".npz":
        keys, features = np.load(out)["key"].tolist(), np.load(out)["features"]
    else:
        with safe_open(out, "numpy") as file:
            keys, features = json.loads(file.metadata()["key"]), file.get_tensor("features")
    assert [Path(key).stem for key in keys] == ["a", "b", "c"]
    encoder = load(run)
    np.testing.assert_allclose(
        features[2],
        encoder(torch.from_numpy(encoder.preprocess(_image(test_store, 0)))[None])[0],
        atol=1e-5,
    )


def test_embeddings_by_an_encoder_without_guarantee_are_private(
    make_run: MakeRun, test_store: Store, tmp_path: Path
) -> None:
    (tmp_path / "confidential").mkdir()
    made = write_embeddings(
        make_run(wholly_confidential=True),
        test_store.path,
        tmp_path / "confidential" / "features.npz",
        workers=1,
    )
    assert made.visibility == "private"


def test_bad_places_for_embeddings_are_refused(
    make_run: MakeRun, test_store: Store, tmp_path: Path
) -> None:
    run = make_run()
    with pytest.raises(ConfigError, match=r"ends in \.npz or \.safetensors"):
        write_embeddings(run, test_store.path, tmp_path / "features.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        write_embeddings(
            run,
            tmp_path / "empty",
            tmp_path / "features.npz",
            workers=1,
            release_private_outputs=True,
        )


def test_the_folder_of_the_output_is_made_or_refused_before_anything_is_computed(
    test_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features of minutes were lost at the end."""
    out = tmp_path / "confidential" / "new" / "x.npz"
    assert write_embeddings("hog", test_store.path, out, workers=1).path == out and out.exists()
    monkeypatch.setattr(
        embeddings, "collect_features", lambda *args, **settings: pytest.fail("computed")
    )
    (tmp_path / "confidential" / "file").write_text("")
    with pytest.raises(DataError, match="expected a writable path"):
        write_embeddings(
            "hog", test_store.path, tmp_path / "confidential" / "file" / "x.npz", workers=1
        )
