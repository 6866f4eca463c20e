"""SimCLR's and TAN's checkpoints: written here in their authors' naming with random numbers, and
compared with somebody else's model.
"""

from functools import partial

import pytest
import timm
import torch
import torchvision
from torch.nn import functional as F

from dpvision.encoders.open import open_encoder
from dpvision.errors import CheckpointError

_SLOW_PREFIXES = [
    pytest.param(prefix, marks=pytest.mark.slow) for prefix in ("", "module.", "backbone.")
]


@pytest.mark.parametrize("prefix", ["state_dict.module.encoder.", *_SLOW_PREFIXES])
def test_simclr_is_a_resnet50_whatever_wraps_it(tmp_path, prefix):
    from safetensors.torch import save_file

    torch.manual_seed(7)
    model = torchvision.models.resnet50(weights=None).eval()
    tensors = {
        prefix + n: t.clone() for n, t in model.state_dict().items() if not n.startswith("fc.")
    }
    save_file(
        tensors | {"projector.0.weight": torch.ones(2)} if prefix else tensors,
        tmp_path / "r50.safetensors",
    )
    encoder = open_encoder(f"simclr:{tmp_path / 'r50.safetensors'}")
    x_BCHW = torch.randn(1, 3, 224, 224)
    model.fc = torch.nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(
            encoder.poolings(x_BCHW)["mean"], model(x_BCHW), atol=1e-4, rtol=1e-4
        )
    assert encoder.family == "convnet" and encoder.image_size == 224


def _tan_convolution(conv: torch.nn.Conv2d, x_BCHW: torch.Tensor) -> torch.Tensor:
    """A convolution as TAN's code standardises it: variance with n - 1, epsilon beside n times the
    variance, no further scale.
    """
    w = conv.weight
    n = w[0].numel()
    standard = (w - w.mean((1, 2, 3), keepdim=True)) / (
        w.var((1, 2, 3), keepdim=True) * n + 1e-6
    ).sqrt()
    return F.conv2d(
        x_BCHW,
        standard * conv.gain,
        conv.bias,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
    )


@pytest.mark.slow
def test_tans_blocks_become_timms_with_the_same_function(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(8)
    model = timm.create_model("nf_resnet26", pretrained=False, skipinit=True).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    names = {n: n.replace("skipinit_gain", "expand.weight") for n in model.state_dict()}
    save_file(
        {f"_module.{names[n]}": t.clone() for n, t in model.state_dict().items()},
        tmp_path / "tan.safetensors",
    )
    encoder = open_encoder(f"tan:{tmp_path / 'tan.safetensors'}@nf_resnet26")
    x_BCHW = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        timms = model.forward_features(x_BCHW).mean((2, 3))
        for conv in [m for m in model.modules() if hasattr(m, "gain")]:
            conv.forward = partial(_tan_convolution, conv)
        tans = model.forward_features(x_BCHW).mean((2, 3))
        found = encoder.poolings(x_BCHW)["mean"]
    assert (found - tans).norm() < 1e-4 * tans.norm() < 0.1 * (timms - tans).norm()


@pytest.mark.slow
def test_tan_takes_other_resnets_by_name(tmp_path):
    from safetensors.torch import save_file

    model = torchvision.models.resnet18(weights=None)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    assert (
        open_encoder(f"tan:{tmp_path / 'a.safetensors'}@resnet18").name
        == "tan:a.safetensors@resnet18"
    )
    with pytest.raises(CheckpointError, match=r"stem.conv.weight"):
        open_encoder(f"tan:{tmp_path / 'a.safetensors'}")
