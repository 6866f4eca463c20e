"""Folders of transformers as encoders. The oracle is transformers' own image processor and model on
the same photographs.
"""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_images

from dpvision.encoders.identity import check_alone, check_same, describe
from dpvision.encoders.open import open_encoder
from dpvision.errors import CheckpointError, ConfigError

from ..hub_folders import FAMILIES, edit_json, write_folder

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

TOWERS = {"clip": "CLIPVisionModel", "siglip": "SiglipVisionModel", "vit_mae": "ViTModel"}
"""Models whose image encoder is another class. ViTMAE's encoder without masking is a ViT."""
NO_POOLER = {"vit", "vit_mae", "swin", "swinv2"}
PREFIX = {"dinov2_with_registers": 4, "dinov3_vit": 4, "siglip": 0, "swin": 0, "swinv2": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_folder(root / kind, kind)
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> list[Path]:
    """Two photographs, upright and lying, and one that is smaller than the encoders' images."""
    root = tmp_path_factory.mktemp("photographs")
    china, flower = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    for name, image in (
        ("china", china),
        ("flower", flower.crop((100, 20, 401, 400))),
        ("small", china.resize((61, 29))),
    ):
        image.save(root / f"{name}.png")
    return sorted(root.iterdir())


def _pixels(folder: Path, files: list[Path]) -> torch.Tensor:
    how = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = [Image.open(file).convert("RGB") for file in files]
    return how(images=images, return_tensors="pt")["pixel_values"]


def _theirs(folder: Path, kind: str):
    known = getattr(transformers, TOWERS.get(kind, "AutoModel"))
    more = {"add_pooling_layer": False} if kind in NO_POOLER else {}
    return known.from_pretrained(folder, **more).eval()


@pytest.mark.parametrize("kind", FAMILIES)
def test_features_are_those_of_transformers_own_processor_and_model(folders, photographs, kind):
    folder = folders(kind)
    encoder, model = open_encoder(f"hf:{folder}"), _theirs(folder, kind)
    x_BCHW = torch.stack([torch.from_numpy(encoder.preprocess(file)) for file in photographs])
    theirs_BCHW = _pixels(folder, photographs)
    if kind.startswith("dinov3"):
        # It resizes numbers that are not rounded; Pillow rounds after each of two passes, whose
        # weights add up to 1: less than a grey level.
        assert (x_BCHW - theirs_BCHW).abs().max() <= 1.001 / 255 / min(encoder.std)
        x_BCHW = theirs_BCHW
    with torch.no_grad():
        found = encoder.poolings(x_BCHW)
        last = model(theirs_BCHW).last_hidden_state
        if kind == "clip":
            last = model.post_layernorm(last)
            assert torch.allclose(found["cls"], model(theirs_BCHW).pooler_output, atol=1e-5)
    if last.ndim == 4:
        expected = {"mean": last.mean((2, 3))}
    else:
        prefix = PREFIX.get(kind, 1)
        expected = {"mean": last[:, prefix:].mean(1)}
        if prefix:
            expected["cls"] = last[:, 0]
        side = round((last.shape[1] - prefix) ** 0.5)
        if side > 1 and side % 2 == 0:
            map_BHWD = last[:, prefix:].unflatten(1, (side, side))
            corner = map_BHWD[:, : side // 2, side // 2 :].mean((1, 2))
            width = corner.shape[1]
            assert (found["2x2"][:, width : 2 * width] - corner).abs().max() <= 1e-5
    for pooling, value in expected.items():
        assert (found[pooling] - value).abs().max() <= 1e-5, pooling
    assert set(found) - {"2x2"} == set(expected)
    assert encoder.family == ("convnet" if "convnext" in kind else "transformer")
    assert check_alone(encoder)[0] == "mean"


@pytest.mark.parametrize("kind", ["vit", "vit_mae", "dinov2_with_registers", "dinov3_vit", "clip"])
def test_blocks_are_the_outputs_of_the_layers_without_registers(folders, kind):
    encoder = open_encoder(f"hf:{folders(kind)}")
    network, taken = encoder.backbone().eval().network, []
    for module in network.modules():
        if type(module).__name__.endswith("Layer") and hasattr(module, "mlp"):
            module.register_forward_hook(lambda *a: taken.append(a[2]))
    x_BCHW = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found = encoder.blocks(x_BCHW)
        more = {"noise": torch.arange(16.0).expand(2, -1)} if kind == "vit_mae" else {}
        network(x_BCHW, **more)
    assert len(found) == len(taken) == 3
    for ours, layer in zip(found, taken, strict=True):
        layer = layer[0] if isinstance(layer, tuple) else layer
        assert ours.shape == (2, 17, 32)
        assert torch.allclose(ours[:, 0], layer[:, 0], atol=1e-5)
        assert torch.allclose(ours[:, 1:], layer[:, -16:], atol=1e-5)


def test_the_image_tower_saved_alone_is_that_of_the_whole_model(folders, tmp_path):
    whole = folders("clip")
    model = transformers.CLIPModel.from_pretrained(whole)
    model.vision_model.save_pretrained(tmp_path / "tower")
    (tmp_path / "tower" / "preprocessor_config.json").write_bytes(
        (whole / "preprocessor_config.json").read_bytes()
    )
    x_BCHW = torch.randn(2, 3, 32, 32)
    one, other = (open_encoder(f"hf:{path}") for path in (whole, tmp_path / "tower"))
    assert torch.equal(one(x_BCHW), other(x_BCHW))


def test_a_copy_trains_and_the_frozen_encoder_stays(folders):
    encoder = open_encoder(f"hf:{folders('vit')}")
    x_BCHW = torch.randn(2, 3, 32, 32)
    before, copy = encoder(x_BCHW), encoder.backbone()
    copy(x_BCHW).square().mean().backward()
    torch.optim.SGD(copy.parameters(), lr=1.0).step()
    assert not torch.allclose(copy.eval()(x_BCHW), before, atol=1e-3)
    assert torch.equal(encoder(x_BCHW), before)


def test_the_licence_of_the_folder_and_the_need_of_a_declaration_are_kept(folders, tmp_path):
    folder = write_folder(tmp_path / "dinov2-small", "dinov2")
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: dinov3-license\n---\n# x")
    encoder = open_encoder(f"hf:{folder}/")
    assert encoder.name == "hf:dinov2-small" and encoder.licence == "dinov3-license"
    stated = [(entry["visibility"], entry["licence"]) for entry in encoder.lineage]
    assert stated == [("undeclared", "dinov3-license")]
    about = describe(encoder, "mean", 32)
    assert about["licence"] == "dinov3-license"
    check_same(encoder, about, "run")
    edit_json(folder / "preprocessor_config.json", size={"shortest_edge": 41})
    with pytest.raises(CheckpointError, match="library="):
        check_same(open_encoder(f"hf:{folder}"), about, "run")


def test_shards_and_half_precision_give_the_same_model(folders, tmp_path):
    whole = folders("vit")
    tensors = load_file(whole / "model.safetensors")
    folder = write_folder(tmp_path / "shards", "vit")
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"part-{number}.safetensors")
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    edit = folder / "model.safetensors.index.json"
    edit.write_text("{}")
    edit_json(edit, weight_map=index)
    x_BCHW = torch.randn(2, 3, 32, 32)
    assert torch.equal(open_encoder(f"hf:{folder}")(x_BCHW), open_encoder(f"hf:{whole}")(x_BCHW))
    edit_json(edit, weight_map=index | {names[0]: "../../part-0.safetensors"})
    with pytest.raises(CheckpointError, match="files of its own folder"):
        open_encoder(f"hf:{folder}")
    edit_json(edit, weight_map=index | {names[0]: "part-9.safetensors"})
    with pytest.raises(CheckpointError, match=r"part-9\.safetensors"):
        open_encoder(f"hf:{folder}")
    half = write_folder(tmp_path / "half", "vit")
    save_file({n: t.half() for n, t in tensors.items()}, half / "model.safetensors")
    found = open_encoder(f"hf:{half}")(x_BCHW)
    assert found.dtype == torch.float32
    assert torch.allclose(found, open_encoder(f"hf:{whole}")(x_BCHW), atol=1e-2)


class _Opens:
    def __reduce__(self):
        return open, ("/tmp/dpvision-was-here", "w")


def test_a_pickle_is_opened_in_the_limited_process_or_refused(folders, tmp_path):
    x_BCHW, whole = torch.randn(2, 3, 32, 32), folders("vit")
    folder = write_folder(tmp_path / "pickle", "vit")
    (folder / "model.safetensors").unlink()
    torch.save(load_file(whole / "model.safetensors"), folder / "pytorch_model.bin")
    assert torch.equal(open_encoder(f"hf:{folder}")(x_BCHW), open_encoder(f"hf:{whole}")(x_BCHW))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": _Opens()}, protocol=2))
    (folder / "pytorch_model.bin.safetensors").unlink()
    with pytest.raises(CheckpointError, match="refused"):
        open_encoder(f"hf:{folder}")
    assert not Path("/tmp/dpvision-was-here").exists()


def test_what_is_no_image_encoder_or_damaged_is_refused_with_the_remedy(tmp_path):
    folder = write_folder(tmp_path / "m", "vit")
    cases: list[tuple[str, type[Exception], str]] = []

    def refused(error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words) as caught:
            open_encoder(f"hf:{folder}")
        assert caught.value.__cause__ is None or caught.value.__suppress_context__
        cases.append((str(caught.value), error, words))

    config = (folder / "config.json").read_bytes()
    edit_json(folder / "config.json", model_type="bert")
    refused(ConfigError, "model_type='bert'; expected one of vit, vit_mae")
    edit_json(folder / "config.json", model_type="vit", hidden_size=48)
    refused(CheckpointError, r"weights \(\S+=\(.*, by config\.json \(.*48")
    (folder / "config.json").write_bytes(config)
    edit_json(folder / "config.json", hidden_size="wide")
    refused(CheckpointError, r"config\.json")
    (folder / "config.json").write_text("[1")
    refused(CheckpointError, "JSON object")
    (folder / "config.json").write_bytes(config)

    images = (folder / "preprocessor_config.json").read_bytes()
    edit_json(folder / "preprocessor_config.json", size={"height": 32, "width": 48})
    refused(ConfigError, "size=.*expected a square")
    (folder / "preprocessor_config.json").unlink()
    refused(CheckpointError, r"has no preprocessor_config\.json; expected it beside the weights")
    (folder / "preprocessor_config.json").write_bytes(images)
    edit_json(folder / "preprocessor_config.json", size={"height": 40, "width": 40})
    refused(CheckpointError, "image_size=40")
    (folder / "preprocessor_config.json").write_bytes(images)

    weights = (folder / "model.safetensors").read_bytes()
    tensors = load_file(folder / "model.safetensors")
    lacking = next(name for name in tensors if name.endswith("cls_token"))
    save_file({n: t for n, t in tensors.items() if n != lacking}, folder / "model.safetensors")
    refused(CheckpointError, "no tensor 'embeddings.cls_token'")
    (folder / "model.safetensors").write_bytes(weights[:-100])
    refused(CheckpointError, "safetensors")
    (folder / "model.safetensors").unlink()
    refused(CheckpointError, "none of model.safetensors")
    (folder / "config.json").unlink()
    refused(CheckpointError, r"no config\.json")
    assert len(cases) == 11


def test_a_missing_library_is_named_with_its_extra(folders, monkeypatch):
    folder = folders("vit")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'dpvision\[hf\]'"):
        open_encoder(f"hf:{folder}")


def test_code_in_a_folder_does_not_run(tmp_path):
    folder = write_folder(tmp_path / "m", "vit")
    mark = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    edit_json(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModel": "own.Own"})
    edit_json(folder / "preprocessor_config.json", auto_map={"AutoImageProcessor": "own.Own"})
    assert open_encoder(f"hf:{folder}").image_size == 32
    assert not mark.exists()


def test_opening_says_nothing_and_leaves_the_librarys_settings(folders, capfd):
    folder = folders("vit")
    capfd.readouterr()
    logs = transformers.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    encoder = open_encoder(f"hf:{folder}")
    assert capfd.readouterr() == ("", "")
    assert (logs.get_verbosity(), logs.is_progress_bar_enabled()) == (level, bars)
    assert np.isfinite(encoder(torch.zeros(1, 3, 32, 32)).numpy()).all()
