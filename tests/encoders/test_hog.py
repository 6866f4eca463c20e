import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dpvision.encoders.hog import cell_histograms, hog


def _images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def _slow_cells(x_CHW: np.ndarray, cell: int, bins: int) -> np.ndarray:
    """The definition, pixel by pixel."""
    _, height, width = x_CHW.shape
    cells = np.zeros((bins, height // cell, width // cell))
    for r in range(height):
        for c in range(width):
            right = (
                x_CHW[:, r, c + 1] - x_CHW[:, r, c - 1]
                if 0 < c < width - 1
                else np.zeros(len(x_CHW))
            )
            down = (
                x_CHW[:, r + 1, c] - x_CHW[:, r - 1, c]
                if 0 < r < height - 1
                else np.zeros(len(x_CHW))
            )
            k = int(np.argmax(right**2 + down**2))
            length, degrees = (
                math.hypot(right[k], down[k]),
                math.degrees(math.atan2(down[k], right[k])) % 180,
            )
            for b in range(bins):
                apart = abs(degrees - (b + 0.5) * 180 / bins)
                near = max(0.0, 1 - min(apart, 180 - apart) * bins / 180)
                for g in range(cells.shape[1]):
                    for f in range(cells.shape[2]):
                        in_rows = max(0.0, 1 - abs(r + 0.5 - (g + 0.5) * cell) / cell)
                        in_columns = max(0.0, 1 - abs(c + 0.5 - (f + 0.5) * cell) / cell)
                        cells[b, g, f] += length * near * in_rows * in_columns
    return cells


@pytest.mark.parametrize(("size", "cell"), [((12, 16), 4), ((12, 9), 3), ((10, 8), 2)])
def test_cells_are_those_of_the_definition_pixel_by_pixel(size: tuple[int, int], cell: int) -> None:
    x = _images(2, 3, *size)
    expected = np.stack([_slow_cells(image.numpy().astype(float), cell, 9) for image in x])
    np.testing.assert_allclose(cell_histograms(x, cell).numpy(), expected, atol=1e-5)


def test_a_block_is_its_four_cells_cut_at_a_fifth_and_of_unit_length() -> None:
    x = _images(1, 1, 16, 16)
    cells, blocks = cell_histograms(x, 4).double().numpy()[0], hog(x, 4).reshape(3, 3, 36)
    for g in range(3):
        for f in range(3):
            block = cells[:, g : g + 2, f : f + 2].transpose(1, 2, 0).flatten()
            block = np.minimum(block / np.linalg.norm(block), 0.2)
            np.testing.assert_allclose(blocks[g, f], block / np.linalg.norm(block), atol=1e-3)


def test_brightness_and_contrast_do_not_matter() -> None:
    x = _images(4, 3, 32, 32)
    assert (hog(x, 4) - hog(0.5 * x + 0.3, 4)).abs().max() < 2e-3


def test_noise_far_below_a_grey_level_is_not_blown_up() -> None:
    assert (
        hog(0.5 + 1e-5 * _images(1, 3, 32, 32), 4).norm(dim=1)
        < 0.1
        < hog(_images(1, 3, 32, 32), 4).norm(dim=1)
    )


def test_a_mirrored_image_has_mirrored_cells_and_orientations() -> None:
    x = _images(2, 3, 24, 24)
    torch.testing.assert_close(
        cell_histograms(x.flip(3), 4), cell_histograms(x, 4).flip(3).flip(1), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("orientation", range(9))
def test_a_ramp_votes_for_its_own_orientation_only(orientation: int) -> None:
    angle = math.radians((orientation + 0.5) * 20)
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    ramp = (math.cos(angle) * column + math.sin(angle) * row) / 40
    middle = cell_histograms(ramp.expand(1, 1, 16, 16), 2)[0, :, 3, 3]
    assert middle.argmax() == orientation
    assert middle[orientation] > 0.999 * middle.sum()


def test_left_over_pixels_are_the_outermost() -> None:
    x = _images(1, 3, 18, 19)
    torch.testing.assert_close(hog(x, 4), hog(x[:, :, 1:17, 1:17], 4))


def test_an_image_does_not_depend_on_its_neighbours() -> None:
    x = _images(5, 3, 32, 32)
    torch.testing.assert_close(hog(x, 4)[3:4], hog(x[3:4], 4))
