"""Targets of the masked autoencoder against slow, obvious versions."""

import math
from dataclasses import replace

import pytest
import torch

from dpvision.config import MAEConfig, ViTConfig
from dpvision.errors import ConfigError
from dpvision.models import mae, make_model
from dpvision.models.layers import patchify
from dpvision.models.mae import CELLS, ORIENTATIONS, make_targets, target_size, to_pixels

TINY = MAEConfig(
    encoder=ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2),
    decoder_depth=1,
    decoder_width=16,
    decoder_num_heads=2,
)


def test_gradient_histograms_are_those_of_a_loop_over_pixels() -> None:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = make_targets(x, 4, "gradients")
    assert made.shape == (2, 16, target_size("gradients", 4)) == (2, 16, 108)
    for b, row, column, c in [(0, 0, 0, 0), (1, 3, 2, 1), (0, 1, 3, 2)]:
        for cell_row in range(CELLS):
            for cell_column in range(CELLS):
                histogram = torch.zeros(ORIENTATIONS, dtype=torch.float64)
                for i in range(2):
                    for j in range(2):
                        y, z = 4 * row + 2 * cell_row + i, 4 * column + 2 * cell_column + j
                        right = x[b, c, y, min(z + 1, 15)] - x[b, c, y, max(z - 1, 0)]
                        down = x[b, c, min(y + 1, 15), z] - x[b, c, max(y - 1, 0), z]
                        turn = math.atan2(down, right) % math.pi
                        histogram[int(turn / math.pi * ORIENTATIONS) % ORIENTATIONS] += math.hypot(
                            right, down
                        )
                histogram /= 4
                histogram /= histogram.norm() + 1e-6
                # patchify's layout: channel (colour, orientation), then the cells of the patch
                found = made[b, 4 * row + column].unflatten(0, (3, ORIENTATIONS, CELLS, CELLS))[
                    c, :, cell_row, cell_column
                ]
                torch.testing.assert_close(found, histogram, rtol=1e-9, atol=1e-12)


def test_normalised_pixels_have_mean_zero_and_variance_one_and_come_back() -> None:
    x = 3 * torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) + 5
    target = make_targets(x, 4, "normalised_pixels")
    assert target.mean(-1).abs().max() < 1e-4 and (target.var(-1) - 1).abs().max() < 1e-4
    torch.testing.assert_close(
        to_pixels(target, patchify(x, 4), "normalised_pixels"), patchify(x, 4), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["pixels", "normalised_pixels", "gradients"])
def test_the_loss_is_the_mean_over_masked_targets(kind: str) -> None:
    model = make_model(replace(TINY, target=kind), 0)
    assert isinstance(model, mae.MAE)
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    keys = torch.rand(3, 16, generator=torch.Generator().manual_seed(3)).mul(1 << 30).long()
    loss = mae.losses(model, x, keys)
    order = keys.argsort(dim=1)
    with torch.no_grad():
        prediction = model(patchify(x, 4), order)
    for b in range(3):
        masked = order[b, model.num_visible :]
        error = prediction[b] - make_targets(x, 4, kind)[b, masked]
        torch.testing.assert_close(loss[b], error.square().mean(), rtol=1e-5, atol=1e-6)


def test_flat_images_give_finite_targets() -> None:
    for kind in ("normalised_pixels", "gradients"):
        assert torch.isfinite(make_targets(torch.full((1, 3, 16, 16), 0.3), 4, kind)).all()


def test_gradients_are_no_image_and_need_even_patches() -> None:
    model = make_model(replace(TINY, target="gradients"), 0)
    with pytest.raises(ConfigError, match="pixels"):
        mae.reconstruct(model, torch.zeros(1, 3, 16, 16), torch.arange(16)[None])
    with pytest.raises(ConfigError, match="even"):
        replace(
            TINY, target="gradients", encoder=replace(TINY.encoder, image_size=15, patch_size=5)
        )
