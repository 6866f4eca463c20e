"""One image, one set of pixels: in a store, in segmentation and from ``preprocess``, whatever way
its samples are written.
"""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from dpvision.data.decode import BadImage, decode
from dpvision.data.importer import import_source
from dpvision.data.transform import preprocess
from dpvision.errors import DataError
from dpvision.eval.dense.semantic_data import ClassMap, read_mask, read_pixels

from .image_files import encode, noise

RAMP = np.linspace(0, 65535, 8).astype(np.uint16)[None].repeat(8, 0)
PLAIN = preprocess(8, (0, 0, 0), (1, 1, 1))


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def tiff(
    values: np.ndarray,
    bits: int,
    photometric: int = 1,
    more: tuple[tuple[int, int, int], ...] = (),
    raw: bytes | None = None,
) -> bytes:
    """A little-endian TIFF of one channel; ``more``: (tag, type, value)."""
    h, w = values.shape
    raw = values.tobytes() if raw is None else raw
    tags = [
        (256, 4, w),
        (257, 4, h),
        (258, 3, bits),
        (259, 3, 1),
        (262, 3, photometric),
        (277, 3, 1),
        (278, 4, h),
        (279, 4, len(raw)),
        *more,
    ]
    at = 8 + 2 + 12 * (len(tags) + 1) + 4
    entries = b"".join(
        struct.pack("<HHI", t, kind, 1)
        + (struct.pack("<f", v) if kind == 11 else struct.pack("<I", v))
        for t, kind, v in sorted([*tags, (273, 4, at)])
    )
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags) + 1) + entries + bytes(4) + raw


def raw_png(
    values: np.ndarray, bits: int, colour: int = 0, chunks: tuple[tuple[bytes, bytes], ...] = ()
) -> bytes:
    """A PNG of samples of 1 to 16 bits; colour 0 grey, 2 RGB."""
    height, width = values.shape[:2]
    rows = values.reshape(height, -1).astype(">u2")
    if bits == 16:
        lines = [row.tobytes() for row in rows]
    else:
        lines = [
            np.packbits(
                (row[:, None] >> np.arange(bits - 1, -1, -1) & 1).astype(np.uint8).ravel()
            ).tobytes()
            for row in rows
        ]

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + line for line in lines))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*c) for c in ((b"IHDR", header), *chunks, (b"IDAT", body), (b"IEND", b""))
    )


def oriented(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(noise(5, 8, 8)), kind, exif=exif)


def grey(data: bytes) -> list[int]:
    return decode(data)[0, :, 0].tolist()


# --- one reader
# --------------------------------------------------------------------------------------------------

MANY = {
    "jpeg turned": oriented("JPEG", 6),
    "png turned": oriented("PNG", 5),
    "tiff turned": oriented("TIFF", 3),
    "tiff on its side": oriented("TIFF", 8),
    "16 bits": raw_png(RAMP, 16),
    "white is zero": tiff(RAMP, 16, 0),
    "12 bits stated": tiff(RAMP >> 4, 16, 1, ((281, 3, 4095),)),
    "clear": saved(
        Image.fromarray(np.dstack([noise(1, 8, 8), np.full((8, 8), 60, np.uint8)])), "PNG"
    ),
    "clear colour of 4 bits": raw_png(RAMP >> 12, 4, 0, ((b"tRNS", b"\0\x0f"),)),
    "palette": saved(Image.fromarray(noise(2, 8, 8)).quantize(16), "PNG", transparency=3),
    "cmyk": saved(Image.fromarray(noise(3, 8, 8)).convert("CMYK"), "JPEG"),
}


@pytest.mark.parametrize("kind", MANY)
def test_a_path_bytes_and_an_image_of_pillow_give_what_the_store_gives(tmp_path, kind):
    """B25: the same object twice too."""
    path = tmp_path / "x.bin"
    path.write_bytes(MANY[kind])
    expected = PLAIN(decode(MANY[kind]))
    lazy = Image.open(path)
    for image in (str(path), path, MANY[kind], lazy, lazy):
        assert np.array_equal(PLAIN(image), expected)
    lazy.load()
    if kind == "clear colour of 4 bits":  # a loaded image of Pillow's no longer knows its bits
        with pytest.raises(BadImage, match="bits per sample"):
            PLAIN(lazy)
    else:
        assert np.array_equal(PLAIN(lazy), expected)


@pytest.mark.parametrize(
    "kind", sorted(set(MANY) - {"jpeg turned", "tiff turned", "tiff on its side", "png turned"})
)
def test_segmentation_reads_what_the_store_reads(tmp_path, kind):
    (tmp_path / "x.png").write_bytes(MANY[kind])
    assert np.array_equal(read_pixels(tmp_path / "x.png"), decode(MANY[kind]))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["TIFF", "PNG"])
def test_pixels_under_a_mask_are_those_stored(tmp_path, kind, orientation):
    """B07: Pillow turns TIFF while it loads it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "x").write_bytes(saved(Image.fromarray(noise(5, 8, 6)), kind, exif=exif))
    assert np.array_equal(read_pixels(tmp_path / "x"), noise(5, 8, 6))


def test_orientation_in_xmp_counts_where_exif_has_none():
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for kind in ("JPEG", "WEBP"):
        data = saved(Image.fromarray(noise(4, 8, 6)), kind, xmp=xmp)
        assert np.array_equal(
            decode(data),
            np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")),
        ), kind
        assert decode(data).shape == (6, 8, 3)


def test_what_preprocess_cannot_take_says_what_is_missing(tmp_path):
    for image, rule in (
        (np.zeros((8, 8), np.uint8), "without three channels"),
        (np.zeros((8, 8, 4), np.uint8), "without three channels"),
        (RAMP, "without the range of its values"),
        (np.zeros((8, 8, 3), np.float32), "without the range of its values"),
        (tmp_path / "none.png", "none.png.*Check the path"),
        (3, "expected a path"),
        (Image.fromarray(np.zeros((8, 8), np.float32)), "float pixels"),
    ):
        with pytest.raises(DataError, match=rule):
            PLAIN(image)


# --- samples
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_white_is_zero_falls_at_every_depth(bits):
    """B10."""
    top = 2**bits - 1
    values = np.linspace(0, top, 8).astype(np.uint16)[None].repeat(8, 0)
    lines = (
        [row.tobytes() for row in values.astype("<u2")]
        if bits == 16
        else [
            np.packbits(
                (row[:, None] >> np.arange(bits - 1, -1, -1) & 1).astype(np.uint8).ravel()
            ).tobytes()
            for row in values
        ]
    )
    rising, falling = (grey(tiff(values, bits, p, raw=b"".join(lines))) for p in (1, 0))
    assert rising == sorted(rising) and rising[0] == 0 and rising[-1] == 255
    assert falling == [255 - v for v in rising]


def test_a_stated_range_is_the_range():
    high = (RAMP >> 8).astype(np.uint8)[0].tolist()
    twelve = (RAMP >> 4).astype(np.uint16)
    packed = b"".join(
        struct.pack(">Q", 0)[:0] + bytes([(a >> 4) & 255, (a & 15) << 4 | b >> 8, b & 255])
        for a, b in twelve.reshape(-1, 2).tolist()
    )
    assert grey(tiff(twelve, 12, raw=packed)) == high  # by bits per sample
    assert grey(tiff(twelve, 16, 1, ((281, 3, 4095),))) == high  # by MaxSampleValue
    assert grey(tiff(twelve, 16, 0, ((281, 3, 4095),))) == high[::-1]
    assert (
        grey(tiff(twelve, 16, 1, ((281, 3, int(twelve.max()) - 100),))) == (twelve >> 8)[0].tolist()
    )  # a statistic of this image, no range
    assert grey(b"P5 8 8 4095\n" + twelve.astype(">u2").tobytes()) == pytest.approx(high, abs=1)


def test_signed_samples_map_their_whole_range():
    wide = np.array([[-32768, -1, 0, 32767]], np.int16)
    assert grey(tiff(wide, 16, 1, ((339, 3, 2),))) == [0, 127, 128, 255]
    assert grey(tiff(np.array([[-128, -1, 0, 127]], np.int8), 8, 1, ((339, 3, 2),))) == [
        0,
        127,
        128,
        255,
    ]


def test_floats_need_a_stated_or_declared_range():
    values = np.array([[0.0, 0.5, 1.0, np.nan, 3.0, -np.inf]], np.float32)
    with pytest.raises(BadImage, match="--window"):
        decode(tiff(values, 32, 1, ((339, 3, 3),)))
    assert grey(tiff(values, 32, 1, ((339, 3, 3), (340, 11, 0.0), (341, 11, 1.0)))) == [
        0,
        128,
        255,
        0,
        255,
        0,
    ]
    assert decode(tiff(values, 32, 1, ((339, 3, 3),)), window=(0.0, 0.5))[0, :, 0].tolist() == [
        0,
        255,
        255,
        0,
        255,
        0,
    ]


def test_a_declared_window_replaces_the_range_of_deep_samples_only():
    values = np.array([[-1000, -160, 40, 240, 3000]], np.int16)
    assert decode(tiff(values, 16, 1, ((339, 3, 2),)), window=(-160, 240))[0, :, 0].tolist() == [
        0,
        0,
        127,
        255,
        255,
    ]
    assert (
        decode(raw_png(RAMP >> 4, 16), window=(0, 4095))[0, :, 0].tolist()
        == (RAMP >> 8)[0].tolist()
    )
    colour = np.stack([RAMP >> 4, RAMP >> 5, RAMP >> 6], -1)
    assert np.array_equal(
        decode(raw_png(colour, 16, 2), window=(0, 4095)), (colour >> 4).astype(np.uint8)
    )
    eight = encode(noise(1))
    assert np.array_equal(decode(eight, window=(0, 4095)), decode(eight))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_the_transparent_colour_of_a_png_is_white_at_every_depth(bits):
    top = 2**bits - 1
    values = np.array([[0, 1, top, top // 2, 0, 1, 0, 0]], np.uint16)
    shown = grey(raw_png(values, bits, 0, ((b"tRNS", struct.pack(">H", 0)),)))
    plain = grey(raw_png(values, bits))
    assert shown == [255 if v == 0 else p for v, p in zip(values[0].tolist(), plain, strict=True)]


def test_a_transparent_colour_of_16_bits_is_compared_in_16_bits():
    pixels = np.array([[[5, 6, 7], [5, 6, 8], [0x1234, 0x5678, 0x9ABC]]], np.uint16)
    shown = decode(raw_png(pixels, 16, 2, ((b"tRNS", struct.pack(">HHH", 5, 6, 7)),)))
    assert shown[0].tolist() == [[255, 255, 255], [0, 0, 0], [0x12, 0x56, 0x9A]]


def test_a_bmp_whose_alphas_are_all_zero_is_opaque():
    """B20. A PNG that is transparent everywhere is white, as viewers show it."""
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[..., 2] = 200
    header = struct.pack("<IiiHHIIiiII", 108, 4, 4, 1, 32, 3, 64, 0, 0, 0, 0) + struct.pack(
        "<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000
    )

    def bmp(pixels: np.ndarray) -> bytes:
        return (
            b"BM"
            + struct.pack("<IHHI", 186, 0, 0, 122)
            + header
            + b"BGRs"
            + bytes(48)
            + pixels.tobytes()
        )

    assert decode(bmp(pixels))[0, 0].tolist() == [200, 0, 0]
    pixels[0, 0, 3] = 255
    assert decode(bmp(pixels))[0, 0].tolist() == [255, 255, 255] and decode(bmp(pixels))[
        3, 0
    ].tolist() == [200, 0, 0]
    assert decode(saved(Image.new("RGBA", (4, 4), (200, 0, 0, 0)), "PNG")).min() == 255


def test_premultiplied_grey_is_composed_over_white():
    grey = np.array(
        [[[100, 200], [0, 0]]], np.uint8
    )  # 100 of 200: half of a channel that covers 200 / 255
    raw = tiff(grey[..., 0], 8, 1, ((338, 3, 1),), raw=grey.tobytes()).replace(
        struct.pack("<HHII", 277, 3, 1, 1), struct.pack("<HHII", 277, 3, 1, 2)
    )
    raw = raw.replace(struct.pack("<HHII", 258, 3, 1, 8), struct.pack("<HHIHH", 258, 3, 2, 8, 8))
    assert decode(raw)[0, :, 0].tolist() == pytest.approx([100 + 55, 255], abs=1)


def test_a_stated_range_of_colour_is_the_range():
    colour = np.stack([RAMP >> 4, RAMP >> 5, RAMP >> 6], -1).astype("<u2")
    data = tiff(colour[..., 0], 16, 2, ((281, 3, 4095),), raw=colour.tobytes())
    data = data.replace(struct.pack("<HHII", 277, 3, 1, 1), struct.pack("<HHII", 277, 3, 1, 3))
    at = data.index(struct.pack("<HHII", 258, 3, 1, 16))
    data = (
        data[:at]
        + struct.pack("<HHII", 258, 3, 3, len(data))
        + data[at + 12 :]
        + struct.pack("<HHH", 16, 16, 16)
    )
    assert np.array_equal(decode(data), (colour >> 4).astype(np.uint8))


@pytest.mark.parametrize("kind", ["AVIF", "WEBP", "JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_format_is_turned_once(kind, orientation):
    corner = np.zeros((16, 32, 3), np.uint8)
    corner[:8, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = {
        1: (0, 0),
        2: (0, -1),
        3: (-1, -1),
        4: (-1, 0),
        5: (0, 0),
        6: (0, -1),
        7: (-1, -1),
        8: (-1, 0),
    }[orientation]
    data = saved(Image.fromarray(corner), kind, exif=exif, quality=95)
    pixels = decode(data)
    assert pixels.shape == ((16, 32, 3) if orientation < 5 else (32, 16, 3))
    assert [at for at in ((0, 0), (0, -1), (-1, 0), (-1, -1)) if pixels[at].min() > 128] == [
        expected
    ]
    assert np.array_equal(PLAIN(Image.open(io.BytesIO(data))), PLAIN(pixels))


# --- JPEG
# --------------------------------------------------------------------------------------------------


def test_damage_is_damage_in_every_colour_of_jpeg():
    """B18: the second reader, which fills gaps with grey, is not asked."""
    for mode in ("RGB", "L", "CMYK"):
        data = saved(Image.fromarray(noise(7, 64, 64)).convert(mode), "JPEG", quality=90)
        half = len(data) // 2
        for bad in (data[:half] + bytes(len(data) - half - 2) + data[-2:], data[:-200], data[:-2]):
            with pytest.raises(BadImage) as error:
                decode(bad)
            assert error.value.reason == "damaged"


def test_an_odd_header_is_no_damage_but_hides_none():
    data = saved(Image.fromarray(noise(7, 64, 64)), "JPEG", quality=90, icc_profile=b"x" * 300)
    scan = data.index(b"\xff\xda")
    last = scan + 2 + int.from_bytes(data[scan + 2 : scan + 4], "big") - 1
    odd = []
    for place, value in (
        (data.index(b"JFIF") + 5, 2),
        (data.index(b"ICC_PROFILE") + 12, 9),
        (last - 1, 0),
    ):
        changed = bytearray(data)
        changed[place] = value
        odd.append(bytes(changed))
    for one in odd:
        assert np.array_equal(decode(one), decode(data))
        with pytest.raises(BadImage, match="damaged"):
            decode(one[:-300])


def test_jpeg_of_12_bits_says_that_it_is_not_supported():
    data = bytearray(saved(Image.fromarray(noise(7, 16, 16)), "JPEG"))
    data[data.index(b"\xff\xc0") + 4] = 12
    with pytest.raises(BadImage, match="12 bits") as error:
        decode(bytes(data))
    assert error.value.reason == "unsupported"


# --- masks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_ids_of_a_mask_are_the_stored_samples(tmp_path, bits):
    classes = ClassMap(("a", "b"), {0: 0, 1: 1}, frozenset([255]))
    ids = np.array([[0, 1, 1, 0, 1, 0, 0, 1]], np.uint16).repeat(8, 0)
    (tmp_path / "m.png").write_bytes(raw_png(ids, bits))
    assert np.array_equal(read_mask(tmp_path / "m.png", Path("i.png"), classes), ids)


# --- import
# --------------------------------------------------------------------------------------------------


def test_an_unstated_range_that_images_do_not_fill_is_told_and_can_be_declared(tmp_path, capsys):
    from dpvision.cli import main

    folder = tmp_path / "scans"
    folder.mkdir()
    (folder / "1.png").write_bytes(raw_png(RAMP >> 4, 16))
    (folder / "2.png").write_bytes(raw_png(RAMP[:, ::-1] >> 4, 16))
    (folder / "3.png").write_bytes(encode(noise(1, 8, 8)))
    found = import_source(folder, tmp_path / "dark", public=True)
    assert found.import_summary()["largest_values_of_16_bits"] == {"up to 4095": 2}
    assert main(["data", "import", str(folder), str(tmp_path / "said"), "--public"]) in (0, None)
    said = capsys.readouterr().out
    assert "--max-value 4095" in said and "up to 4095" in said
    assert main(
        ["data", "import", str(folder), str(tmp_path / "bright"), "--public", "--max-value", "4095"]
    ) in (0, None)
    said = capsys.readouterr().out
    assert "--max-value 4095" not in said and "window=(0, 4095)" in said
    from dpvision.data.open import open_store

    store = open_store(tmp_path / "bright")
    assert decode(store.read(0))[0, :, 0].tolist() == (RAMP >> 8)[0].tolist()
    assert np.array_equal(decode(store.read(2)), noise(1, 8, 8))
    assert np.array_equal(PLAIN(folder / "1.png", window=(0, 4095)), PLAIN(store.read(0)))


def test_dark_colour_with_alpha_is_told_too(tmp_path):
    rgba = np.stack([RAMP >> 4, RAMP >> 4, RAMP >> 4, np.full_like(RAMP, 65535)], -1)
    source = tmp_path / "src"
    source.mkdir()
    (source / "1.png").write_bytes(raw_png(rgba, 16, 6))
    assert import_source(source, tmp_path / "s", public=True).import_summary()[
        "largest_values_of_16_bits"
    ] == {"up to 4095": 1}
    with pytest.raises(
        DataError, match="unsupported"
    ):  # what a window cannot be applied to is left out
        import_source(source, tmp_path / "t", public=True, window=(0, 4095))


def test_a_window_copies_the_images_of_a_tar(tmp_path):
    from .image_files import write_tar

    write_tar(
        tmp_path / "x.tar", {"1.png": raw_png(RAMP >> 4, 16), "2.png": encode(noise(1, 8, 8))}
    )
    store = import_source(tmp_path / "x.tar", tmp_path / "s", public=True, window=(0, 4095))
    (tmp_path / "x.tar").unlink()
    assert decode(store.read(0))[0, :, 0].tolist() == (RAMP >> 8)[0].tolist()
    assert np.array_equal(decode(store.read(1)), noise(1, 8, 8))


@pytest.mark.parametrize("window", [(5, 5), (9, 1), (float("nan"), 1), (0, float("inf"))])
def test_a_window_without_a_width_is_refused(tmp_path, window):
    with pytest.raises(DataError, match="window"):
        import_source(tmp_path, tmp_path / "s", window=window)
