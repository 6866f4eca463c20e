"""The simple feature pyramid: sizes, strides, and what each scale sees."""

import pytest
import torch

from dpvision.config import ViTConfig
from dpvision.eval.dense.dense_vit import DenseViT
from dpvision.eval.dense.detector import FeaturePyramid
from dpvision.models.layers import init_weights
from dpvision.models.vit import ViT


def make_pyramid(patch: int = 4) -> FeaturePyramid:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vit = ViT(ViTConfig(image_size=8 * patch, patch_size=patch, depth=2, width=24, num_heads=3))
        init_weights(vit, torch.Generator().manual_seed(0))
        return FeaturePyramid(DenseViT(vit, window=2, class_token=False), channels=16).eval()


@pytest.mark.parametrize("patch", [4, 16])
def test_a_scale_has_a_place_for_every_stride_pixels(patch: int) -> None:
    pyramid = make_pyramid(patch)
    with torch.no_grad():
        maps = pyramid(torch.randn(2, 3, 8 * patch, 12 * patch))
    assert list(maps) == ["0", "1", "2", "3", "pool"]
    assert pyramid.strides == (patch / 4, patch / 2, patch, 2 * patch, 4 * patch)
    for map_BCHW, stride in zip(maps.values(), pyramid.strides, strict=True):
        assert (
            map_BCHW.shape == (2, 16, 8 * patch / stride, 12 * patch / stride)
            and map_BCHW.dtype == torch.float32
        )
    if patch == 16:
        assert pyramid.strides == (4, 8, 16, 32, 64), "ViTDet's"


def test_the_fifth_scale_is_every_second_place_of_the_fourth_and_channels_are_normed() -> None:
    with torch.no_grad():
        maps = make_pyramid()(torch.randn(2, 3, 32, 32))
    assert torch.equal(maps["pool"], maps["3"][:, :, ::2, ::2])
    for map_BCHW in maps.values():
        torch.testing.assert_close(
            map_BCHW.mean(dim=1), torch.zeros_like(map_BCHW[:, 0]), rtol=0, atol=1e-5
        )
        torch.testing.assert_close(
            map_BCHW.var(dim=1, correction=0), torch.ones_like(map_BCHW[:, 0]), rtol=0, atol=1e-2
        )


def test_what_changes_in_a_window_changes_the_pyramid_there() -> None:
    """Windows of two tokens and 3 x 3 convolutions: the far corner of the finest scale cannot
    know.
    """
    pyramid, x = make_pyramid(), torch.randn(1, 3, 32, 32)
    other = x.clone()
    other[:, :, :8, :8] += 1
    with torch.no_grad():
        apart = (pyramid(x)["0"] - pyramid(other)["0"]).abs().amax(dim=(0, 1))
    assert (apart[:8, :8] > 0).all() and (apart[9:] == 0).all() and (apart[:, 9:] == 0).all()


def test_maps_stay_float32_under_autocast() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert {m.dtype for m in make_pyramid()(torch.randn(1, 3, 32, 32)).values()} == {
            torch.float32
        }
