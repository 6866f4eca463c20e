import torch

from dpvision.encoders.fixed import raw_pixels


def test_small_images_are_kept_pixel_by_pixel() -> None:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(raw_pixels(x)["pixels"], x.flatten(1))


def test_larger_images_are_averaged_over_areas() -> None:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = x.reshape(2, 3, 16, 2, 16, 2).mean(dim=(3, 5)).flatten(1)
    torch.testing.assert_close(raw_pixels(x)["pixels"], expected)
