"""Weights under a wrong name: statistics that the model itself measured on photographs, or on
procedural scenes, are the oracle for the right one.
"""

import functools
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules.batchnorm import _BatchNorm

from dpvision.encoders.batch_statistics import TEXTURES, check_statistics, make_images
from dpvision.encoders.open import open_encoder
from dpvision.errors import CheckpointError
from dpvision.synthetic.textures import textures

from ..hub_folders import edit_json

LITE, TF = "efficientnet_lite0", "tf_efficientnet_lite0"
HALF, IMAGENET = ((0.5,) * 3, (0.5,) * 3), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Colours = tuple[tuple[float, ...], tuple[float, ...]]


@functools.cache
def _measured(name: str, colours: Colours, worlds: range = range(1000, 1016)) -> dict:
    """Return random weights whose BatchNorm statistics are those of images that dpvision's check
    does not use.
    """
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3)
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.momentum = None
    mean, std = (torch.tensor(value)[:, None, None] for value in colours)
    with torch.no_grad():
        model.train()((textures(torch.tensor(worlds), 64) / 255 - mean) / std)
    return model.state_dict()


@pytest.mark.parametrize(
    ("name", "colours"),
    [(TF, HALF)]
    + [
        pytest.param(name, colours, marks=pytest.mark.slow)
        for name, colours in ((TF, IMAGENET), (LITE, HALF), (LITE, IMAGENET))
    ],
)
def test_only_the_name_and_normalisation_of_training_are_taken(name, colours):
    other_name, other = (LITE, TF)[name == LITE], (HALF, IMAGENET)[colours == HALF]
    given = _measured(name, colours)
    check_statistics(name, given, *colours, "w.safetensors")
    with pytest.raises(CheckpointError, match=r"normalisation=mean \(0\..*expected mean \(0\."):
        check_statistics(name, given, *other, "w.safetensors")
    with pytest.raises(CheckpointError, match=f"timm:{other_name}; expected timm:{name},"):
        check_statistics(other_name, given, *colours, "w.safetensors")


def test_a_file_opened_under_a_wrong_name_is_refused_unless_its_folder_says_what_it_is(
    tmp_path: Path,
):
    file = tmp_path / "model.safetensors"
    save_file(_measured(TF, HALF), file)
    assert open_encoder(f"timm:{TF}@{file}").std == HALF[1]
    with pytest.raises(CheckpointError, match=f"Use timm:{TF}@{file}, whose tensors"):
        open_encoder(f"timm:{LITE}@{file}")
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", architecture=LITE, pretrained_cfg={})
    assert open_encoder(f"timm:{LITE}@{file}").std == IMAGENET[1]


def test_the_shipped_textures_are_those_that_the_package_makes():
    shipped, made = load_file(TEXTURES)["images"], make_images()
    # Another processor may round a pixel otherwise.
    assert (shipped.int() - made.int()).abs().max() <= 1
    assert (shipped != made).float().mean() < 1e-3


def test_statistics_that_say_nothing_refuse_nothing():
    """New layers, garbage, images unlike photographs, weights without statistics."""
    new = timm.create_model(LITE).state_dict()
    garbage = {n: torch.rand_like(t.float()) for n, t in new.items()}
    check_statistics(LITE, new, *HALF, "w")
    check_statistics(LITE, garbage, *HALF, "w")
    check_statistics("resnet18", timm.create_model("resnet18").state_dict(), *HALF, "w")
    check_statistics("vit_tiny_patch16_224", {}, *HALF, "w")


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check_statistics(TF, _measured(TF, HALF), *HALF, "w")
    assert torch.equal(before, torch.get_rng_state())
