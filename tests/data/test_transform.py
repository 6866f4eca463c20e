import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from dpvision.config import DataConfig
from dpvision.data.decode import decode
from dpvision.data.transform import (
    CROP_NUMBERS,
    centre_box,
    crop_box,
    cut,
    evaluation_box,
    normalise,
    normalise_tensor,
    preprocess,
    preprocess_of,
    resized,
    training_box,
    training_view,
)
from dpvision.errors import DataError

from .image_files import SHARED, noise

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
UNIFORM = st.floats(0, 1, exclude_max=True)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.lists(UNIFORM, min_size=CROP_NUMBERS, max_size=CROP_NUMBERS),
)
def test_every_crop_lies_inside_the_image(height, width, uniform):
    left, top, right, bottom = crop_box(height, width, uniform, (0.2, 1.0))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@pytest.mark.parametrize("size", [(32, 32), (60, 100), (200, 20)])
def test_crops_are_distributed_as_torchvisions(size):
    """Area, shape and place of 4,000 boxes against torchvision's, by two-sample Kolmogorov-Smirnov
    distance (5e-4 quantile).
    """
    height, width = size
    rng = np.random.default_rng(0)
    ours = np.array(
        [
            crop_box(height, width, rng.random(CROP_NUMBERS).tolist(), (0.2, 1.0))
            for _ in range(4000)
        ]
    )
    ours = np.stack([ours[:, 1], ours[:, 0], ours[:, 3] - ours[:, 1], ours[:, 2] - ours[:, 0]], 1)
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    )
    for column in range(4):
        grid = np.arange(max(size) + 1)
        distance = np.abs(
            np.searchsorted(np.sort(ours[:, column]), grid, "right")
            - np.searchsorted(np.sort(theirs[:, column]), grid, "right")
        ).max()
        assert distance / 4000 < 2.06 * np.sqrt(2 / 4000)


def test_the_whole_image_at_its_size_is_left_alone_and_a_flip_mirrors_it():
    pixels = noise(1, 16, 16)
    image = Image.fromarray(pixels)
    assert np.array_equal(cut(image, (0, 0, 16, 16), 16), pixels)
    assert np.array_equal(cut(image, (0, 0, 16, 16), 16, flip=True), pixels[:, ::-1])


def test_a_crop_of_a_box_at_its_own_size_is_the_box():
    pixels = noise(2, 20, 30)
    assert np.array_equal(cut(Image.fromarray(pixels), (5, 3, 15, 13), 10), pixels[3:13, 5:15])


def whole(pixels: np.ndarray, size: int) -> np.ndarray:
    return resized(pixels, (0, 0, pixels.shape[1], pixels.shape[0]), size)


SIZES = [
    (224, 150, 200),
    (64, 97, 301),
    (64, 30, 500),
    (32, 5, 3),
    (16, 1, 1),
    (7, 40, 40),
    (96, 96, 50),
]


@pytest.mark.parametrize(("size", "height", "width"), SIZES)
def test_resized_is_pillows_resize_within_two_levels(size, height, width):
    """Noise of medium contrast: no overshoot of the filter reaches 0 or 255, where the two cut it
    off between their passes, in another order. A filter without antialiasing, or one half a pixel
    beside, is far off.
    """
    pixels = 64 + noise(6, height, width) // 2
    expected = np.asarray(
        Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)
    ).astype(int)
    assert np.abs(whole(pixels, size) - expected).max() <= 2
    if min(height, width) > 1:
        assert np.abs(np.roll(whole(pixels, size), 1, axis=0) - expected).max() > 10


@pytest.mark.skipif(
    not (SHARED / "coco_mini").exists(), reason="the COCO photographs are not beside this checkout"
)
@pytest.mark.parametrize("size", [32, 224])
def test_photographs_are_resized_as_exactly_as_by_pillow(size):
    """Mean distance to the filter in float64 without a rounding between its passes: measured 0.96
    to 1.002 times Pillow's.
    """
    for file in sorted((SHARED / "coco_mini" / "images" / "val2017").glob("*.jpg"))[:20]:
        pixels = decode(file.read_bytes())
        x_1CHW = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
        exact_1CHW = torch.nn.functional.interpolate(
            x_1CHW, (size, size), mode="bicubic", antialias=True
        ).clamp(0, 255)
        exact = exact_1CHW[0].permute(1, 2, 0).numpy()
        pillows = np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
        assert np.abs(whole(pixels, size) - exact).mean() < 1.01 * np.abs(pillows - exact).mean()


def test_resized_starts_no_threads():
    """In every thread of the loader torch would start one for each core, as it does for an image
    that it mirrors.
    """

    def threads_started(work: Callable[[np.ndarray], object]) -> int:
        pixels = noise(7, 300, 400)  # above what torch splits among threads
        before = len(os.listdir("/proc/self/task"))
        work(pixels)
        return len(os.listdir("/proc/self/task")) - before

    if not os.path.exists("/proc/self/task"):
        pytest.skip("no /proc")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(threads_started, lambda pixels: whole(pixels, 224)).result() == 0
            assert (
                pool.submit(
                    threads_started, lambda pixels: torch.from_numpy(pixels).flip(1)
                ).result()
                == 3
            )
    finally:
        torch.set_num_threads(num_threads)


def test_views_between_pixels_are_pillows():
    """With ``data.resize`` and in a centre crop a box need not lie on whole pixels."""
    pixels, uniform = noise(8, 50, 71), np.random.default_rng(0).random(CROP_NUMBERS).tolist()
    for data in (
        DataConfig(resize=64),
        DataConfig(crop="centre"),
        DataConfig(resize=64, crop="centre"),
    ):
        box = training_box(71, 50, 24, data, uniform)
        expected = np.asarray(
            Image.fromarray(pixels).resize((24, 24), Image.Resampling.BICUBIC, box=box)
        )
        assert any(side % 1 for side in box)
        assert np.array_equal(training_view(pixels, 24, data, uniform), expected)


def test_normalise_is_the_formula():
    pixels = noise(3, 16, 16)
    out = np.empty((3, 16, 16), np.float32)
    normalise(pixels, MEAN, STD, out)
    exact = (pixels.astype(np.float64) / 255 - MEAN) / STD
    assert np.abs(out - np.moveaxis(exact, -1, 0)).max() < 1e-6


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


def test_the_centre_crop_is_the_middle_of_the_image():
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 255
    assert centre_box(30, 10) == (10, 0, 20, 10)
    assert cut(Image.fromarray(pixels), centre_box(30, 10), 10).min() == 255


def smooth(height: int, width: int) -> np.ndarray:
    """Waves of some twenty pixels: resampling once or twice hardly differs."""
    y, x = np.mgrid[:height, :width]
    waves = [
        127 + 100 * np.sin(2 * np.pi * (x / 40 + phase)) * np.cos(2 * np.pi * (y / 30 + phase))
        for phase in (0, 0.2, 0.4)
    ]
    return np.stack(waves, axis=-1).astype(np.uint8)


@pytest.mark.parametrize("size", [(300, 200), (448, 448), (500, 700)])
@pytest.mark.parametrize("seed", range(4))
def test_an_inception_crop_from_448_is_that_of_the_resized_image(size, seed):
    """Against resizing to 448 x 448 first and cropping then, as the paper does, by torchvision's
    box.
    """
    uniform = np.random.default_rng(seed).random(CROP_NUMBERS).tolist()
    data = DataConfig(resize=448, crop_scale=(0.05, 1.0))
    image = Image.fromarray(smooth(*size))
    found = cut(image, training_box(image.width, image.height, 96, data, uniform), 96)
    whole = image.resize((448, 448), Image.Resampling.BICUBIC)
    slow = np.asarray(
        whole.crop(crop_box(448, 448, uniform, (0.05, 1.0))).resize(
            (96, 96), Image.Resampling.BICUBIC
        )
    )
    assert np.abs(found.astype(int) - slow)[2:-2, 2:-2].mean() < 1.5
    assert np.abs(found.astype(int) - np.roll(slow, 3, axis=1)).mean() > 4, (
        "three pixels beside it would be noticed"
    )


@pytest.mark.parametrize("size", [(300, 200), (384, 384), (500, 700)])
def test_the_centre_256_of_384_is_the_centre_of_the_resized_image(size):
    data, image = DataConfig(resize=384, crop="centre"), Image.fromarray(smooth(*size))
    box = training_box(image.width, image.height, 256, data, [])
    assert box == evaluation_box(image.width, image.height, 256, data)
    slow = np.asarray(image.resize((384, 384), Image.Resampling.BICUBIC))[64:320, 64:320]
    assert np.abs(cut(image, box, 256).astype(int) - slow).max() <= 1
    assert np.array_equal(preprocess_of(256, data)(image), preprocess_of(256, data)(smooth(*size)))


def test_evaluation_sees_the_whole_image_where_training_crops_a_resized_one():
    assert evaluation_box(300, 200, 384, DataConfig(resize=448)) == (0, 0, 300, 200)
    assert evaluation_box(300, 200, 384, DataConfig()) == centre_box(300, 200) == (50, 0, 250, 200)
    assert evaluation_box(300, 200, 400, DataConfig(resize=384, crop="centre")) == (
        0,
        0,
        300,
        200,
    ), "never beyond the image"
    pixels = noise(5, 20, 30)
    assert np.array_equal(
        preprocess_of(8, DataConfig())(pixels),
        preprocess(8, DataConfig().mean, DataConfig().std)(pixels),
    )


def test_normalising_on_a_device_gives_the_same_bits() -> None:
    """uint8 in any memory layout, every value of a byte: torch's two operations are numpy's."""
    pixels = (
        torch.arange(256, dtype=torch.uint8)
        .repeat(3 * 8)
        .view(2, 8, 16, 8, 3)
        .permute(0, 1, 4, 2, 3)
    )
    expected = np.empty(pixels.shape, dtype=np.float32)
    normalise(pixels.permute(0, 1, 3, 4, 2).numpy(), MEAN, STD, expected)
    made = normalise_tensor(pixels, MEAN, STD)
    assert made.is_contiguous() and np.array_equal(made.numpy(), expected)
