"""Weights that timm has fetched are found where timm keeps them; nothing else is, and nothing is
downloaded.
"""

import socket
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from dpvision.encoders.open import open_encoder
from dpvision.models.timm_cache import find_timm_weights, timm_licence

NAME = "resnet18"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path / "torch"))

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refused)
    yield tmp_path
    torch.hub.set_dir(before)


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    return {
        name: value.contiguous().clone()
        for name, value in timm.create_model(NAME, pretrained=False).state_dict().items()
    }


def _fetch(caches: Path) -> Path:
    """The layout in which huggingface_hub keeps a repository."""
    repository = timm.get_pretrained_cfg(NAME).hf_hub_id
    folder = caches / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(_weights(), folder / "snapshots" / ("0" * 40) / "model.safetensors")
    return folder / "snapshots" / ("0" * 40) / "model.safetensors"


def test_an_empty_cache_has_none_and_says_where_it_looked(caches: Path) -> None:
    found, places = find_timm_weights(NAME)
    assert found is None and any(str(caches / "hub") in place for place in places)
    encoder = open_encoder(f"timm:{NAME}")
    assert (
        encoder.weights == "random" and "random weights" in encoder.name and encoder.licence is None
    )


@pytest.mark.slow
def test_fetched_weights_are_those_of_the_encoder_with_their_licence(caches: Path) -> None:
    file = _fetch(caches)
    assert find_timm_weights(NAME) == (file, [])
    encoder = open_encoder(f"timm:{NAME}")
    assert (
        encoder.weights == "trained"
        and encoder.name == f"timm:{NAME}"
        and encoder.licence == timm_licence(NAME) is not None
    )
    same = open_encoder(f"timm:{NAME}@{file}")
    x_BCHW = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    assert torch.equal(encoder.poolings(x_BCHW)["mean"], same.poolings(x_BCHW)["mean"])


def test_a_name_that_timm_publishes_nothing_for_has_no_weights(caches: Path) -> None:
    for name in ("resnetv2_50x4_unheard_of", "resnet18.no_such_tag"):
        assert (
            find_timm_weights(name) == (None, ["nowhere: timm publishes none for this name"])
            and timm_licence(name) is None
        )
