"""Image processors' settings that are expressed, and those that are refused by name."""

import numpy as np
import pytest
from PIL import Image

from dpvision.data.transform import LibraryResize
from dpvision.encoders.hugging_face_images import image_fields
from dpvision.errors import ConfigError

VIT = {
    "image_processor_type": "ViTImageProcessorFast",
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "size": {"height": 224, "width": 224},
}
CROP = {"do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
CONVNEXT = VIT | {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875}


@pytest.mark.parametrize(
    ("settings", "size", "library"),
    [
        (VIT, 224, LibraryResize(224, False, "bilinear")),
        (VIT | CROP, 224, LibraryResize(224, False, "bilinear")),
        (
            VIT | CROP | {"size": {"shortest_edge": 256}, "resample": 3},
            224,
            LibraryResize(256, True, "bicubic"),
        ),
        (CONVNEXT | {"size": {"shortest_edge": 224}}, 224, LibraryResize(256, True, "bilinear")),
        (CONVNEXT | {"size": {"shortest_edge": 384}}, 384, LibraryResize(384, False, "bilinear")),
    ],
)
def test_settings_of_published_processors_are_expressed(settings, size, library):
    found = image_fields(settings, "hf:x")
    assert (found["image_size"], found["library"]) == (size, library)
    assert found["mean"] == (0.5, 0.5, 0.5)


def test_without_normalisation_pixels_run_from_0_to_1():
    found = image_fields(VIT | {"do_normalize": False}, "hf:x")
    assert (found["mean"], found["std"]) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"image_processor_type": "DPTImageProcessor"}, "image_processor_type"),
        ({"do_resize": False}, "do_resize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_pad": True}, "do_pad"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"image_std": [0.5, float("nan"), 0.5]}, "image_std"),
        ({"resample": 9}, "resample"),
        ({"size": {"height": 224, "width": 448}}, "size"),
        ({"size": {"shortest_edge": 224, "longest_edge": 448}}, "size"),
        ({"size": {"shortest_edge": 224}}, "do_center_crop"),
        (CROP | {"crop_size": {"height": 224, "width": 112}}, "crop_size"),
        (CROP | {"crop_size": {"height": 256, "width": 256}}, "crop_size"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(change, name):
    with pytest.raises(ConfigError, match=rf"hf:x: preprocessor_config\.json: {name}="):
        image_fields(VIT | change, "hf:x")


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(97, 60), (61, 200), (40, 40), (33, 1500)])
def test_a_view_is_the_centre_of_the_resized_image(filter, size):
    """Against torchvision's two steps on Pillow images."""
    from torchvision.transforms import functional as vision

    width, height = size
    rng = np.random.Generator(np.random.PCG64(width))
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    short = LibraryResize(40, True, filter)
    shape = [int(40 * n / min(size)) for n in (height, width)]
    way = vision.InterpolationMode[filter.upper()]
    resized = np.asarray(vision.resize(image, shape, way))
    top, left = ((n - 32) // 2 for n in shape)
    assert np.array_equal(short.view(image, 32), resized[top : top + 32, left : left + 32])
    square = np.asarray(vision.resize(image, [32, 32], way))
    assert np.array_equal(LibraryResize(32, False, filter).view(image, 32), square)


def test_a_strip_is_cut_without_the_whole_of_it_in_memory():
    """Resized whole it would have 224 x 2,240,000 pixels, 1.5 GB."""
    pixels = np.zeros((10, 100_000, 3), dtype=np.uint8)
    pixels[:, 49_990:50_010] = 200
    found = LibraryResize(224, True, "bilinear").view(Image.fromarray(pixels), 224)
    assert found.shape == (224, 224, 3) and (found[:, 10:-10] == 200).all()
