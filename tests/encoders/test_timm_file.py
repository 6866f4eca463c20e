"""What files of timm weights say of their model: timm's own loader is the oracle."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from dpvision.encoders.open import open_encoder
from dpvision.encoders.starting_weights import open_parent
from dpvision.encoders.timm_file import from_efficientnet_pytorch
from dpvision.errors import CheckpointError, ConfigError

from ..hub_folders import edit_json

VIT, LITE = "vit_tiny_patch16_224", "tf_efficientnet_lite0"
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


@pytest.fixture
def hub(tmp_path) -> Path:
    """A folder as timm's ``save_for_hf`` writes it: a small ViT for 64 px."""
    torch.manual_seed(0)
    model = timm.create_model(VIT, num_classes=3, img_size=64, depth=2)
    folder = tmp_path / "hub"
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    cfg = config["pretrained_cfg"] | {"mean": MEAN, "std": STD, "license": "cc-by-nc-4.0"}
    edit_json(folder / "config.json", pretrained_cfg=cfg)
    return folder


def test_a_hub_folder_opens_as_timm_opens_it(hub):
    theirs = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    x_BCHW = torch.randn(2, 3, 64, 64)
    for given in (hub, hub / "model.safetensors"):
        encoder = open_encoder(f"timm:{VIT}@{given}")
        with torch.no_grad():
            token_BLD = theirs.forward_features(x_BCHW)
        assert torch.allclose(encoder(x_BCHW), token_BLD[:, 1:].mean(1), atol=1e-6)
        assert (encoder.mean, encoder.std, encoder.image_size) == (tuple(MEAN), tuple(STD), 64)
        assert encoder.licence == encoder.lineage[0]["licence"] == "cc-by-nc-4.0"
    parent = open_parent(f"timm:{VIT}@{hub}")
    config = parent.manifest["config"]
    assert config["data"] == {"mean": MEAN, "std": STD}
    assert config["model"]["encoder"]["image_size"] == 64
    assert "depth=2" in config["model"]["encoder"]["options"]


def test_a_file_without_a_word_has_the_normalisation_of_its_tag(hub, tmp_path):
    file = tmp_path / "w.safetensors"
    file.write_bytes((hub / "model.safetensors").read_bytes())
    model = timm.create_model(VIT, num_classes=3)
    save_file(model.state_dict(), file)
    for name in (VIT, f"{VIT}.augreg_in21k"):
        known = timm.get_pretrained_cfg(name)
        encoder = open_encoder(f"timm:{name}@{file}")
        assert (encoder.mean, encoder.image_size, encoder.licence) == (known.mean, 224, None)


def test_metadata_in_the_file_goes_before_the_config_beside_it(hub):
    tensors = timm.create_model(f"local-dir:{hub}", pretrained=True).state_dict()
    stated = {
        "dpvision.mean": "[0.7, 0.7, 0.7]",
        "dpvision.resize": "80",
        "dpvision.crop": '"centre"',
    }
    save_file(tensors, hub / "model.safetensors", stated)
    encoder = open_encoder(f"timm:{VIT}@{hub}")
    assert (encoder.mean, encoder.std) == ((0.7, 0.7, 0.7), tuple(STD))
    assert (encoder.resize, encoder.crop) == (80, "centre")


def test_a_folder_of_another_model_or_with_options_that_read_files_is_refused(hub):
    with pytest.raises(CheckpointError, match=f"of the model {VIT}; expected vit_small"):
        open_encoder(f"timm:vit_small_patch16_224@{hub}")
    config = json.loads((hub / "config.json").read_text())
    for changes, error, words in (
        ({"model_args": {"checkpoint_path": "/x"}}, CheckpointError, "checkpoint_path"),
        ({"model_args": {"no_such": 1}}, ConfigError, "no_such"),
        ({"model_args": [1]}, CheckpointError, "beside weights"),
        ({"pretrained_cfg": "x"}, CheckpointError, "beside weights"),
        ({"pretrained_cfg": {"input_size": [3, 64, 32]}}, CheckpointError, "input_size"),
        ({"pretrained_cfg": {"mean": [1, 2]}}, CheckpointError, "mean"),
    ):
        (hub / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(error, match=words):
            open_encoder(f"timm:{VIT}@{hub}")
    (hub / "config.json").write_text(json.dumps(config))
    (hub / "model.safetensors").write_bytes((hub / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="safetensors"):
        open_encoder(f"timm:{VIT}@{hub}")
    (hub / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_encoder(f"timm:{VIT}@{hub}")


def test_a_config_of_another_program_beside_a_file_does_not_count(hub):
    (hub / "config.json").write_text(json.dumps({"recipe": "vip.base", "model": {}}))
    model = timm.create_model(VIT, num_classes=3)
    save_file(model.state_dict(), hub / "model.safetensors")
    assert open_encoder(f"timm:{VIT}@{hub}").mean == (0.5, 0.5, 0.5)


def _published_names(model) -> dict[str, torch.Tensor]:
    """Return the weights under the names of EfficientNet-PyTorch: blocks in one row, ``_bn0`` the
    norm of the widening convolution. By the order of layers, not by rules on names.
    """
    made, number = {}, 0
    outer = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1"}
    for name, part in model.named_children():
        if name == "blocks":
            for block in (block for stage in part for block in stage):
                convs = [m for m in block.modules() if isinstance(m, torch.nn.Conv2d)]
                norms = [m for m in block.modules() if isinstance(m, torch.nn.BatchNorm2d)]
                first = 1 if len(convs) == 2 else 0
                called = ["_expand_conv", "_depthwise_conv", "_project_conv"][first:]
                for conv, norm, what, n in zip(convs, norms, called, range(first, 3), strict=True):
                    made |= _named(f"_blocks.{number}.{what}", conv)
                    made |= _named(f"_blocks.{number}._bn{n}", norm)
                number += 1
        elif name in outer:
            made |= _named(outer[name], part)
        elif name == "classifier":
            made |= _named("_fc", part)
    return made


def _named(prefix: str, module) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}


def test_efficientnet_pytorchs_names_open_as_timms_model(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(LITE).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    published = _published_names(model)
    assert len(published) == len(model.state_dict()) == 296
    save_file({f"module.{n}": t for n, t in published.items()}, tmp_path / "wrapped.safetensors")
    save_file(published, tmp_path / "lite0.safetensors")
    encoder = open_encoder(f"timm:{LITE}@{tmp_path / 'lite0.safetensors'}")
    x_BCHW = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = model.forward_features(x_BCHW).mean((2, 3))
    assert torch.allclose(encoder(x_BCHW), expected, atol=1e-5)
    parent = open_parent(f"timm:{LITE}@{tmp_path / 'wrapped.safetensors'}")
    for name, tensor in parent.model.items():
        assert torch.equal(tensor, model.state_dict()[name.removeprefix("encoder.model.")].float())
    assert encoder.mean == encoder.std == (0.5, 0.5, 0.5)
    wrapped = open_encoder(f"timm:{LITE}@{tmp_path / 'wrapped.safetensors'}")
    assert torch.equal(wrapped(x_BCHW), encoder(x_BCHW))
    save_file(
        {n: t for n, t in published.items() if n != "_blocks.3._bn1.bias"},
        tmp_path / "lite0.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"blocks\.2\.0\.bn2\.bias=nothing"):
        open_encoder(f"timm:{LITE}@{tmp_path / 'lite0.safetensors'}")


def test_squeeze_and_excitation_has_timms_names():
    with torch.device("meta"):
        names = timm.create_model("tf_efficientnet_b0").state_dict()
    given = {"_conv_stem.weight": torch.ones(1), "_blocks.1._se_reduce.bias": torch.ones(1)}
    assert set(from_efficientnet_pytorch("tf_efficientnet_b0", given)) <= set(names)


def test_training_does_not_start_from_encoders_that_stay_frozen():
    for spec in ("hf:folder", "onnx:z@m.onnx"):
        with pytest.raises(ConfigError, match=r"stay frozen\. Train a head on it"):
            open_parent(spec)
