import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from dpvision.data.decode import decode
from dpvision.data.transform import CROP_NUMBERS, centre_box, crop_box, cut, normalise, preprocess, to_uint8
from dpvision.errors import DataError

from .pictures import noise

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
UNIFORM = st.floats(0, 1, exclude_max=True)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.lists(UNIFORM, min_size=CROP_NUMBERS, max_size=CROP_NUMBERS))
def test_every_crop_lies_inside_the_picture(height, width, uniform):
    left, top, right, bottom = crop_box(height, width, uniform, (0.2, 1.0))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@pytest.mark.parametrize("size", [(32, 32), (60, 100), (200, 20)])
def test_crops_are_distributed_as_torchvisions(size):
    """Area, shape and place of 4,000 boxes against torchvision's, by two-sample Kolmogorov-Smirnov distance (5e-4 quantile)."""
    height, width = size
    rng = np.random.default_rng(0)
    ours = np.array([crop_box(height, width, rng.random(CROP_NUMBERS).tolist(), (0.2, 1.0)) for _ in range(4000)])
    ours = np.stack([ours[:, 1], ours[:, 0], ours[:, 3] - ours[:, 1], ours[:, 2] - ours[:, 0]], 1)
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    for column in range(4):
        grid = np.arange(max(size) + 1)
        distance = np.abs(
            np.searchsorted(np.sort(ours[:, column]), grid, "right") - np.searchsorted(np.sort(theirs[:, column]), grid, "right")
        ).max()
        assert distance / 4000 < 2.06 * np.sqrt(2 / 4000)


def test_the_whole_picture_at_its_size_is_left_alone_and_a_flip_mirrors_it():
    pixels = noise(1, 16, 16)
    image = Image.fromarray(pixels)
    assert np.array_equal(cut(image, (0, 0, 16, 16), 16), pixels)
    assert np.array_equal(cut(image, (0, 0, 16, 16), 16, flip=True), pixels[:, ::-1])


def test_a_crop_of_a_box_at_its_own_size_is_the_box():
    pixels = noise(2, 20, 30)
    assert np.array_equal(cut(Image.fromarray(pixels), (5, 3, 15, 13), 10), pixels[3:13, 5:15])


def test_normalise_is_the_formula_and_to_uint8_undoes_it():
    pixels = noise(3, 16, 16)
    out = np.empty((3, 16, 16), np.float32)
    normalise(pixels, MEAN, STD, out)
    exact = (pixels.astype(np.float64) / 255 - MEAN) / STD
    assert np.abs(out - np.moveaxis(exact, -1, 0)).max() < 1e-6
    assert np.array_equal(to_uint8(out, MEAN, STD), pixels)
    assert np.array_equal(to_uint8(torch.from_numpy(out)[None], MEAN, STD)[0], pixels)
    assert to_uint8(out * 100, MEAN, STD).dtype == np.uint8


def test_preprocess_takes_images_and_arrays_and_turns_them_upright():
    transform = preprocess(8, MEAN, STD)
    pixels = noise(4, 12, 20)
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    assert np.array_equal(transform(Image.open(file)), transform(decode(file.getvalue())))
    assert np.array_equal(transform(Image.fromarray(pixels)), transform(pixels))
    grey = Image.fromarray(pixels).convert("L")
    assert np.array_equal(transform(grey), transform(grey.convert("RGB")))
    assert transform(pixels).shape == (3, 8, 8)
    with pytest.raises(DataError, match="expected uint8 of shape"):
        transform(pixels.astype(np.float32))


def test_the_centre_crop_is_the_middle_of_the_picture():
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 255
    assert centre_box(30, 10) == (10, 0, 20, 10)
    assert cut(Image.fromarray(pixels), centre_box(30, 10), 10).min() == 255
