import io
import json
import sys

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageOps

from dpvision.data.decode import MAX_PIXELS, BadImage, decode, extension

from .image_files import SHARED, encode, noise

MESSY = SHARED / "messy_photos"


def save(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def save_heif(image: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    pillow_heif.from_pillow(image).save(file, quality=-1, **options)  # -1: lossless
    return file.getvalue()


@pytest.mark.skipif(not MESSY.exists(), reason="the messy photographs are not beside this checkout")
def test_messy_photographs_decode_or_are_refused_as_their_manifest_says():
    for entry in json.loads((MESSY / "manifest.json").read_text()):
        data = (MESSY / entry["file"]).read_bytes()
        if entry["file"].endswith(
            ".heif"
        ):  # Pillow alone, which made the manifest, does not read it
            assert decode(data).shape[2] == 3
            continue
        grey_below = (
            entry["file"] == "exif__corrupted.jpg"
        )  # Pillow, which made the manifest, fills what is missing with grey
        if entry["decodes"] != "yes" or entry["width"] * entry["height"] > MAX_PIXELS or grey_below:
            with pytest.raises(BadImage):
                decode(data)
            continue
        pixels = decode(data)
        size = (entry["height"], entry["width"])
        turned = (entry["exif_orientation"] or 1) >= 5
        assert pixels.shape == (*(size[::-1] if turned else size), 3), entry["file"]
        assert pixels.dtype == np.uint8
        if entry["mode"] in ("RGB", "L"):
            oracle = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
            assert np.array_equal(pixels, np.asarray(oracle)), entry["file"]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_every_exif_orientation_is_turned_as_pillow_turns_it(orientation, kind):
    image = Image.fromarray(noise(1))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = save(image, kind, exif=exif)
    oracle = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(decode(data), np.asarray(oracle))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("data", [b"hello", b"\x89PNG\r\n\x1a\n garbage", b"II*\0junk"])
def test_the_error_names_no_address_of_memory(data):
    with pytest.raises(BadImage) as refused:
        decode(data)
    assert "0x" not in str(refused.value) and "_io" not in str(refused.value)


def test_broken_exif_leaves_the_image_upright():
    data = encode(noise(2), "JPEG")
    broken = data[:2] + b"\xff\xe1\x00\x12Exif\0\0MM\0*\xff\xff\xff\xff\0\0" + data[2:]
    assert np.array_equal(decode(broken), decode(data))


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "LAB"]
)
def test_every_mode_of_a_white_image_is_white(mode):
    """Whatever the mode, white is white: no inversion, no mapping that darkens."""
    if mode == "I;16":
        image = Image.fromarray(np.full((9, 7), 65535, np.uint16))
    elif mode == "LAB":
        image = Image.frombytes(
            "LAB", (7, 9), bytes([255, 0, 0]) * 63
        )  # a and b are signed in files
    elif mode == "PA":
        image = Image.new("LA", (7, 9), (255, 255)).convert("PA")
    else:
        image = Image.new("RGB", (7, 9), "white").convert(mode)
    kind = {
        "PA": "PNG",
        "P": "GIF",
        "1": "PNG",
        "L": "PNG",
        "LA": "PNG",
        "RGB": "WEBP",
        "RGBA": "WEBP",
        "I;16": "PNG",
    }.get(mode, "TIFF")
    options = {"lossless": True} if kind == "WEBP" else {}
    data = save(image.convert("LA") if mode == "PA" else image, kind, **options)
    assert decode(data).min() >= 254  # the sRGB white of LAB is off by one in littlecms


def test_16_bits_map_to_their_high_byte_and_give_back_8_bit_images():
    eight = np.arange(256, dtype=np.uint16).reshape(16, 16)
    for kind in ("PNG", "TIFF"):
        data = save(Image.fromarray(eight * 257), kind)
        assert np.array_equal(decode(data)[..., 0], eight)
    assert decode(save(Image.fromarray(np.array([[255, 256, 65535]], np.uint16)), "PNG"))[
        0, :, 0
    ].tolist() == [0, 1, 255]


def test_32_bit_integers_are_clipped_to_16():
    data = save(Image.fromarray(np.array([[-5, 256, 65535, 10**9]], np.int32)), "TIFF")
    assert decode(data)[0, :, 1].tolist() == [0, 1, 255, 255]


def test_transparency_is_composed_over_white():
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[..., 0] = 200
    pixels[0, 0, 3], pixels[0, 1, 3] = 255, 0
    shown = decode(save(Image.fromarray(pixels), "PNG"))
    assert shown[0, 0].tolist() == [200, 0, 0]
    assert shown[0, 1].tolist() == [255, 255, 255]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putpixel((1, 0), 1)
    assert decode(save(palette, "PNG", transparency=0))[0].tolist() == [
        [255, 255, 255],
        [10, 20, 30],
    ]


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue")]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("PNG", {})):
        data = save(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decode(data)[0, 0].tolist() == [255, 0, 0], kind


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image"),
        (b"hello, this is no image", "not an image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "damaged"),
        (save_heif(Image.new("RGB", (202, 2))), "oversized"),
        (save_heif(Image.fromarray(noise(3, 200, 200)))[:-3000], "damaged"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encode(noise(3, 200, 200), "JPEG")[:-3000], "damaged"),
        (encode(noise(3, 200, 200))[:-3000], "damaged"),
        (encode(np.zeros((2, 201, 3), np.uint8)), "oversized"),
        (save(Image.new("1", (7100, 7100)), "PNG"), "oversized"),
        (save(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "float pixels"),
    ],
)
def test_bad_images_are_refused_with_their_reason(data, reason):
    with pytest.raises(BadImage) as error:
        decode(data)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not an image (an empty file); expected an image file that can be decoded"),
        (b"hello", "expected an image file that can be decoded. Leave it out"),
        (encode(noise(3, 200, 200), "JPEG")[:-3000], "expected an image file that can be decoded"),
        (
            encode(np.zeros((20, 3000, 3), np.uint8)),
            "oversized (3000 x 20 pixels); expected sides of at most 100 to 1",
        ),
        (
            save(Image.new("1", (7100, 7100)), "PNG"),
            f"oversized (7100 x 7100 pixels); expected 1 to {MAX_PIXELS} pixels",
        ),
        (
            save(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"),
            "expected samples whose range",
        ),
    ],
)
def test_the_error_names_the_rule_that_is_broken(data, said):
    """All named the largest number of pixels."""
    with pytest.raises(BadImage) as error:
        decode(data)
    assert said in str(error.value)


@pytest.mark.parametrize("turn", [1, 6])
def test_a_heif_image_has_the_pixels_of_its_png_upright(turn):
    pixels = np.kron(np.array([[0, 80], [160, 240]], np.uint8), np.ones((16, 24), np.uint8))[
        ..., None
    ].repeat(3, 2)
    exif = Image.Exif()
    exif[0x0112] = turn
    made = decode(save_heif(Image.fromarray(pixels), exif=exif.tobytes()))
    expected = decode(save(Image.fromarray(pixels), "PNG", exif=exif.tobytes()))
    assert (
        made.shape == expected.shape and np.abs(made.astype(int) - expected.astype(int)).max() <= 2
    )  # YCbCr rounds


def test_heif_without_pillow_heif_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(BadImage, match="Install pillow-heif") as error:
        decode(save_heif(Image.new("RGB", (8, 8))))
    assert error.value.reason == "HEIF"


def test_an_image_at_the_limit_of_elongation_is_taken():
    assert decode(encode(np.zeros((2, 200, 3), np.uint8))).shape == (2, 200, 3)


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "AVIF", "JPEG2000"]
)
def test_extension_names_the_format(kind):
    expected = {"JPEG": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}.get(kind, kind.lower())
    assert extension(encode(noise(4), kind)) == expected
