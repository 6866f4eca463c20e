"""Pixels of DICOM files: against pydicom's own functions, and against numpy by hand."""

import io
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from dpvision.data.decode import BadImage, decode
from dpvision.data.dicom import (
    BURNED_IN,
    CUT,
    NO_RANGE,
    OVERLAY,
    frame_file,
    is_dicom,
    num_frames,
    read_file,
    render,
)

from .dicom_files import (
    SAMPLES,
    Dataset,
    changed,
    dicom,
    encaps,
    pixels,
    pydicom,
    relabelled,
    sample,
    saved,
    uid,
)
from .test_pixels import raw_png


def stored(bits: int = 12, signed: bool = False, seed: int = 0, size: int = 40) -> np.ndarray:
    """All values of ``bits`` bits, as far as there is room, in any order."""
    low = -(2 ** (bits - 1)) if signed else 0
    kind = "i" if signed else "u"
    values = np.random.default_rng(seed).integers(low, low + 2**bits, (size, size + 3))
    values.flat[:2] = low, low + 2**bits - 1
    return values.astype(f"<{kind}{2 if bits > 8 else 1}")


def grey(file: bytes, **options) -> np.ndarray:
    made = decode(file, **options)
    assert made.ndim == 3 and (made == made[..., :1]).all()
    return made[..., 0]


def by_pydicom(file: bytes) -> np.ndarray:
    """Modality LUT and VOI by pydicom, then its whole output range to 0 ... 255."""
    data = pydicom.dcmread(io.BytesIO(file))
    values = pixels.apply_voi_lut(pixels.apply_modality_lut(data.pixel_array, data), data, 0)
    low, high = (-(2 ** (data.BitsStored - 1)), 2 ** (data.BitsStored - 1) - 1)
    if not data.PixelRepresentation:
        low, high = 0, 2**data.BitsStored - 1
    slope, shift = float(data.get("RescaleSlope", 1)), float(data.get("RescaleIntercept", 0))
    low, high = low * slope + shift, high * slope + shift
    return (values - low) / (high - low) * 255


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID", None])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rescale", [None, (1, -1024), (0.37, 4.5)])
def test_a_files_own_window_is_pydicoms(function, signed, rescale) -> None:
    more = (
        {}
        if rescale is None
        else {
            "RescaleSlope": rescale[0],
            "RescaleIntercept": rescale[1],
        }
    )
    more |= {} if function is None else {"VOILUTFunction": function}
    file = dicom(stored(signed=signed), WindowCenter=40, WindowWidth=400, **more)
    expected = by_pydicom(file)
    sure = np.abs(expected % 1 - 0.5) > 1e-6  # elsewhere the last bit rounds
    assert np.array_equal(grey(file)[sure], expected.round()[sure]) and sure.mean() > 0.99


def test_a_linear_window_by_hand() -> None:
    """PS3.3 C.11.2.1.2.1: centre 5, width 5 makes 2.5 black and 6.5 white."""
    file = dicom(np.arange(10, dtype="<u2")[None], WindowCenter=5, WindowWidth=5)
    expected = np.clip((np.arange(10) - 2.5) / 4, 0, 1) * 255
    assert np.array_equal(grey(file)[0], expected.round())


@pytest.mark.parametrize("bits", range(8, 17))
@pytest.mark.parametrize("signed", [False, True])
def test_without_a_window_the_whole_range_of_the_bits_counts_not_the_images_own(
    bits, signed
) -> None:
    values = stored(bits, signed)
    low = -(2 ** (bits - 1)) if signed else 0
    expected = (values.astype(int) - low) >> (bits - 8)
    assert np.array_equal(grey(dicom(values, bits)), expected)
    dark = values // 4
    assert np.array_equal(grey(dicom(dark, bits)), (dark.astype(int) - low) >> (bits - 8))
    negative = dicom(values, bits, RescaleSlope=-2, RescaleIntercept=7)
    assert np.array_equal(grey(negative), 255 - expected)


@pytest.mark.parametrize("window", [(0, 4095), (100, 900), (-160.5, 240)])
def test_a_declared_window_reads_dicom_as_it_reads_png(window) -> None:
    """In place of the file's own window."""
    values = stored()
    own = dicom(values, WindowCenter=40, WindowWidth=400)
    assert np.array_equal(decode(own, window=window), decode(raw_png(values, 16), window=window))


def test_a_declared_window_is_of_modality_values() -> None:
    values = stored()
    file = dicom(values, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=1, WindowWidth=9)
    expected = (np.clip(values.astype(int) - 1024, -160, 240) + 160) * 256 // 401
    assert np.array_equal(grey(file, window=(-160, 240)), expected)


def test_a_declared_window_leaves_8_bits_alone() -> None:
    values = stored(8)
    assert np.array_equal(grey(dicom(values, 8), window=(-160, 240)), values)


def test_monochrome1_is_inverted_after_the_window() -> None:
    file = dicom(stored(), WindowCenter=2000, WindowWidth=1000)
    other = changed(file, PhotometricInterpretation="MONOCHROME1")
    for window in (None, (10, 3000)):
        assert np.array_equal(grey(other, window=window), 255 - grey(file, window=window))


@pytest.mark.parametrize("own", [("", ""), (40, 0), (40, 1), (None, None)])
def test_a_window_that_is_empty_or_not_valid_counts_as_none(own) -> None:
    file = dicom(stored(), WindowCenter=40, WindowWidth=400)
    assert np.array_equal(
        grey(changed(file, WindowCenter=own[0], WindowWidth=own[1])), stored() >> 4
    )


def lut(entries: np.ndarray, first: int, depth: int) -> list:
    item = Dataset()
    item.LUTDescriptor = [len(entries), first, depth]
    item.add_new(0x00283006, "US", entries.tolist())
    return [item]


def test_look_up_tables_are_pydicoms() -> None:
    table = (np.linspace(0, 1, 4096) ** 2 * 1023).astype(int)
    file = dicom(stored(), VOILUTSequence=lut(table, 0, 10), WindowCenter=9, WindowWidth=5)
    assert np.array_equal(grey(file), (table[stored()] / 1023 * 255).round())
    file = dicom(stored(), ModalityLUTSequence=lut(table * 64, 0, 16))
    data = pydicom.dcmread(io.BytesIO(file))
    assert np.array_equal(grey(file), pixels.apply_modality_lut(data.pixel_array, data) >> 8)


def test_bits_beside_those_stored_are_no_part_of_a_sample() -> None:
    values = stored()
    assert np.array_equal(grey(dicom(values | np.uint16(0xA000))), values >> 4)
    signed = stored(signed=True)
    assert np.array_equal(grey(dicom(signed & np.int16(0x0FFF))), grey(dicom(signed)))


def test_one_bit_and_32_bits() -> None:
    bit_HW = stored(8) & 1
    packed = np.packbits(bit_HW.ravel(), bitorder="little").tobytes()
    file = dicom(bit_HW, 1, BitsAllocated=1, PixelData=packed + bytes(len(packed) % 2))
    assert np.array_equal(grey(file), bit_HW * 255)
    wide = stored(16).astype("<u4") << 16
    assert np.array_equal(grey(dicom(wide, 32)), stored(16) >> 8)


@pytest.mark.parametrize(
    "kind", [("FloatPixelData", "<f4", 32), ("DoubleFloatPixelData", "<f8", 64)]
)
def test_floating_point_pixels_need_a_window(kind) -> None:
    name, dtype, bits = kind
    values = np.linspace(-3, 3, 12).reshape(3, 4).astype(dtype)
    file = changed(dicom(np.zeros((3, 4), "<u2")), PixelData=None)
    file = changed(file, BitsAllocated=bits, **{name: values.tobytes()})
    with pytest.raises(BadImage, match="--window LOW HIGH") as refused:
        decode(file)
    assert refused.value.reason == "DICOM: float pixels"
    expected = np.clip(values / 2, 0, 1) * 255
    assert np.array_equal(grey(file, window=(0, 2)), expected.round())


COLOUR = {
    "examples_rgb_color.dcm": "RGB",
    "examples_ybr_color.dcm": "YBR",
    "SC_ybr_full_422_uncompressed.dcm": "native YBR 4:2:2",
    "SC_rgb_rle.dcm": "RLE",
    "SC_rgb_dcmtk_+eb+cy+np.dcm": "JPEG",
    "examples_jpeg2k.dcm": "JPEG 2000",
    "SC_rgb_jls_lossy_line.dcm": "JPEG-LS",
    "SC_rgb_small_odd_big_endian.dcm": "bytes of big-endian words",
}


@pytest.mark.parametrize("name", COLOUR)
def test_colour_is_pydicoms(name: str) -> None:
    data = pydicom.dcmread(io.BytesIO(sample(name)))
    assert np.array_equal(decode(sample(name)), pixels.pixel_array(data, index=0))


def test_a_palette_is_pydicoms() -> None:
    data = pydicom.dcmread(io.BytesIO(sample("examples_palette.dcm")))
    expected = pixels.apply_color_lut(pixels.pixel_array(data, index=0), data)
    assert np.array_equal(decode(sample("examples_palette.dcm")), expected >> 8)


def test_colour_of_16_bits_is_its_high_byte() -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (9, 7, 3)).astype("<u2")
    assert np.array_equal(decode(dicom(values, 16)), values >> 8)


@pytest.mark.parametrize(
    "how", ["RLE", "bigendian", "implicit", "expb", "jp2klossless", "jpeg_ls_lossless"]
)
def test_one_image_in_several_transfer_syntaxes(how: str) -> None:
    if "jpeg_ls" in how:
        pytest.importorskip("gdcm", reason="JPEG-LS needs python-gdcm")
    expected = decode(sample("MR_small.dcm"))
    assert np.array_equal(decode(sample(f"MR_small_{how}.dcm")), expected)


def test_a_compressed_or_deflated_file_of_our_own_is_the_uncompressed_one() -> None:
    file = dicom(stored())
    data = pydicom.dcmread(io.BytesIO(file))
    data.compress(uid.RLELossless)
    deflated = pydicom.dcmread(io.BytesIO(file))
    deflated.file_meta.TransferSyntaxUID = uid.DeflatedExplicitVRLittleEndian
    for other in (data, deflated):
        assert np.array_equal(decode(saved(other)), decode(file))


@pytest.mark.parametrize("bits", [1, 8, 12])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_frame_of_several_is_the_file_of_that_frame(bits: int, compressed: bool) -> None:
    if bits == 1 and compressed:
        pytest.skip("RLE has no 1-bit samples")
    frames = [stored(max(bits, 8), seed=k, size=9) for k in range(3)]
    each = [dicom(frame, bits, WindowCenter=40, WindowWidth=300) for frame in frames]
    together = np.stack(frames)
    more = {}
    if bits == 1:
        together, each = together & 1, [dicom(frame & 1, 1) for frame in frames]
        packed = np.packbits(together.ravel(), bitorder="little").tobytes()
        more = {"BitsAllocated": 1, "PixelData": packed + bytes(len(packed) % 2)}
    else:
        more = {"WindowCenter": 40, "WindowWidth": 300}
    file = dicom(together, bits, num_frames=3, PatientID="A^B", **more)
    data = pydicom.dcmread(io.BytesIO(file))
    if compressed:
        data.compress(uid.RLELossless)
        file = saved(data)
    header = read_file(file)
    assert num_frames(header) == 3
    for k, one in enumerate(each):
        made = frame_file(header, k)
        assert np.array_equal(decode(made), decode(one))
        assert b"A^B" not in made
    assert np.array_equal(decode(file), decode(each[0]))


def test_a_frame_has_the_window_and_slope_of_its_functional_groups() -> None:
    frames = np.stack([stored(), stored(seed=1)])
    data = pydicom.dcmread(io.BytesIO(dicom(frames, num_frames=2)))
    shared, value = Dataset(), Dataset()
    value.RescaleSlope, value.RescaleIntercept = 2, -100
    shared.PixelValueTransformationSequence = [value]
    data.SharedFunctionalGroupsSequence = [shared]
    data.PerFrameFunctionalGroupsSequence = []
    for k in range(2):
        group, voi = Dataset(), Dataset()
        voi.WindowCenter, voi.WindowWidth = 50 + k, 700
        group.FrameVOILUTSequence = [voi]
        data.PerFrameFunctionalGroupsSequence.append(group)
    header = read_file(saved(data))
    for k in range(2):
        one = dicom(
            frames[k], RescaleSlope=2, RescaleIntercept=-100, WindowCenter=50 + k, WindowWidth=700
        )
        assert np.array_equal(decode(frame_file(header, k)), decode(one))


def test_what_the_operator_is_told() -> None:
    assert render(dicom(stored())).remarks == (NO_RANGE,)
    assert render(dicom(stored(8), 8)).remarks == ()
    assert render(dicom(stored(), WindowCenter=2000, WindowWidth=3000)).remarks == ()
    assert render(dicom(stored(), WindowCenter=2000, WindowWidth=1000)).remarks == (CUT,)
    assert render(dicom(stored()), (0, 1000)).remarks == (CUT,)
    assert render(dicom(stored(), BurnedInAnnotation="YES")).remarks == (BURNED_IN, NO_RANGE)
    assert OVERLAY in render(sample("examples_overlay.dcm")).remarks


WHOLE = dicom(stored())
REFUSED = {
    "no pixels": (changed(WHOLE, PixelData=None, Rows=None), "no pixels"),
    "a report": (SAMPLES / "test-SR.dcm", "no pixels"),
    "the header alone": (changed(WHOLE, PixelData=None), "damaged"),
    "half a file": (WHOLE[: len(WHOLE) // 2], "damaged"),
    "a truncated sample": (SAMPLES / "MR_truncated.dcm", "damaged"),
    "65535 rows and columns": (changed(WHOLE, Rows=65535, Columns=65535), "oversized"),
    "a line of 65535": (changed(WHOLE, Rows=1, Columns=65535), "oversized"),
    "no rows": (changed(WHOLE, Rows=0), "oversized"),
    "more frames than bytes": (changed(WHOLE, NumberOfFrames=2**31 - 1), "damaged"),
    "13 of 12 bits": (changed(WHOLE, BitsAllocated=8), "unsupported"),
    "samples above their place": (changed(WHOLE, HighBit=15), "unsupported"),
    "an unknown colour": (changed(WHOLE, PhotometricInterpretation="HSV"), "unsupported"),
    "12-bit JPEG": (SAMPLES / "JPGExtended.dcm", "transfer syntax"),
    "a video's syntax": (relabelled(WHOLE, "1.2.840.10008.1.2.4.100"), "transfer syntax"),
    "no transfer syntax": (relabelled(WHOLE, "1.2.3.4"), "damaged"),
    "big endian that is little": (relabelled(WHOLE, "1.2.840.10008.1.2.2"), "no pixels"),
    "uncompressed, as RLE": (relabelled(WHOLE, uid.RLELossless), "damaged"),
    "uncompressed, as deflated": (relabelled(WHOLE, "1.2.840.10008.1.2.1.99"), "damaged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named_as_dicom_with_the_reason(case: str) -> None:
    file, reason = REFUSED[case]
    data = file if isinstance(file, bytes) else sample(file.name)
    with pytest.raises(BadImage) as refused:
        decode(data)
    assert refused.value.reason == f"DICOM: {reason}"


RLE, LITTLE = uid.RLELossless, uid.ExplicitVRLittleEndian
JPEG, LOSSLESS, JPEG_LS, JPEG_2000 = (f"1.2.840.10008.1.2.4.{k}" for k in (50, 70, 80, 90))


@pytest.mark.parametrize(
    ("name", "syntax"),
    [
        ("SC_rgb_rle.dcm", LITTLE),
        ("SC_rgb_rle.dcm", JPEG_2000),
        ("SC_rgb_jpeg_dcmtk.dcm", LITTLE),
        ("SC_rgb_jpeg_dcmtk.dcm", RLE),
        ("SC_rgb_jpeg_dcmtk.dcm", LOSSLESS),  # decoders read these two, in other colours
        ("SC_rgb_jpeg_dcmtk.dcm", JPEG_2000),
        ("MR_small_jp2klossless.dcm", JPEG),
        ("MR_small_jp2klossless.dcm", JPEG_LS),
    ],
)
def test_compressed_pixels_under_another_transfer_syntax_are_refused(name, syntax) -> None:
    decode(sample(name))
    with pytest.raises(BadImage) as refused:
        decode(relabelled(sample(name), syntax))
    assert refused.value.reason == "DICOM: damaged"


def test_compressed_noise_is_not_read_as_plain_samples() -> None:
    data = pydicom.dcmread(io.BytesIO(WHOLE))
    data.compress(uid.RLELossless)
    assert len(data.PixelData) > data.Rows * data.Columns * 2  # enough bytes for the image
    with pytest.raises(BadImage, match="compressed pixels, and transfer syntax Explicit"):
        decode(relabelled(saved(data), LITTLE))


PALETTE = [f"{colour}PaletteColorLookupTable" for colour in ("Red", "Green", "Blue")]


@pytest.mark.parametrize(
    "elements",
    [
        {f"{PALETTE[0]}Data": None},
        {f"{PALETTE[2]}Data": None},
        {f"{name}{end}": None for name in PALETTE for end in ("Data", "Descriptor")},
        {f"{PALETTE[1]}Data": bytes(4)},
        {f"{PALETTE[0]}Descriptor": [256, 0, 99]},
    ],
)
def test_a_palette_that_lacks_a_table_or_part_of_it_is_refused(elements) -> None:
    with pytest.raises(BadImage) as refused:
        decode(changed(sample("examples_palette.dcm"), **elements))
    assert refused.value.reason == "DICOM: damaged"


def test_a_cut_or_damaged_codestream_is_refused_where_decoders_fill_it() -> None:
    data = pydicom.dcmread(io.BytesIO(sample("SC_rgb_jpeg_dcmtk.dcm")))
    code = encaps.get_frame(data.PixelData, 0, number_of_frames=1)
    for damaged in (code[:-400], code[:-400] + b"\xff\xd9", code[:900] + bytes(90) + code[990:]):
        file = changed(sample("SC_rgb_jpeg_dcmtk.dcm"), PixelData=encaps.encapsulate([damaged]))
        with pytest.raises(BadImage) as refused:
            decode(file)
        assert refused.value.reason == "DICOM: damaged"


def test_a_codestream_that_is_larger_than_its_header_is_refused() -> None:
    for name in ("MR_small_jp2klossless.dcm", "MR_small_jpeg_ls_lossless.dcm"):
        file = changed(sample(name), Rows=63)
        with pytest.raises(BadImage, match=r"a codestream of \(64, 64\) pixels"):
            decode(file)


def test_a_deflate_bomb_is_refused_before_it_is_inflated(monkeypatch) -> None:
    monkeypatch.setattr("dpvision.data.dicom.MAX_FILE_BYTES", 1 << 20)
    deflated = pydicom.dcmread(io.BytesIO(dicom(stored(size=2))))
    deflated.file_meta.TransferSyntaxUID = uid.DeflatedExplicitVRLittleEndian
    file = saved(deflated)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = file.index(b"1.2.840.10008.1.2.1.99") + 22
    bomb = packer.compress(bytes(2 << 20)) + packer.flush()
    with pytest.raises(BadImage) as refused:
        decode(file[: start + start % 2] + bomb)
    assert refused.value.reason == "DICOM: oversized"


def test_without_pydicom_the_extra_is_named(monkeypatch) -> None:
    from dpvision.data import dicom as module

    module._quiet_pydicom.cache_clear()
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(BadImage, match=r"pip install 'dpvision\[dicom\]'") as refused:
        decode(WHOLE)
    assert refused.value.reason == "DICOM"


SMALL = [
    path.read_bytes() for path in sorted(SAMPLES.glob("*.dcm")) if path.stat().st_size < 200_000
]
SMALL = [data for data in SMALL if is_dicom(data)]


def mutated(seed: int) -> bytes:
    """A sample or a file of our own with flipped bits, a cut, moved bytes or a huge number."""
    rng = np.random.default_rng(seed)
    data = bytearray(SMALL[int(rng.integers(len(SMALL)))] if seed % 4 else WHOLE)
    head = min(len(data), 2000)
    match seed % 5:
        case 0:
            for at in rng.integers(132, len(data), 20):
                data[at] ^= 1 << int(rng.integers(8))
        case 1:
            for at in rng.integers(132, head, 8):
                data[at] = int(rng.integers(256))
        case 2:
            del data[int(rng.integers(132, len(data))) :]
        case 3:
            at = int(rng.integers(132, head))
            data[at : at + 4] = b"\xff\xff\xff\x7f"
        case 4:
            a, b = sorted(rng.integers(132, len(data), 2).tolist())
            data[a:b] = data[a:b][::-1] if seed % 2 else b"\xfe\xff\x00\xe0" * ((b - a) // 4)
    return bytes(data)


def read_or_refused(data: bytes) -> None:
    try:
        header = read_file(data)
        for k in range(min(2, num_frames(header))):
            decode(frame_file(header, k))
    except BadImage as error:
        assert error.reason.startswith("DICOM: ")
    try:
        made = decode(data)
    except BadImage as error:
        assert error.reason.startswith("DICOM: ")
    else:
        assert made.dtype == np.uint8 and made.shape[2] == 3


def test_damaged_files_are_read_or_refused() -> None:
    for seed in range(100):
        read_or_refused(mutated(seed))


def test_items_nested_too_deep_are_refused() -> None:
    nested = b"\x08\x00\x15\x11SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff" * 5000
    start = WHOLE.index(b"\x08\x00\x16\x00")
    read_or_refused(WHOLE[:start] + nested + WHOLE[start:])


@pytest.mark.slow
def test_500_damaged_files_in_little_memory() -> None:
    """In a process of its own, with 2 GiB of data: no crash, no hang, no bomb."""
    code = (
        "import resource\n"
        "from tests.data.test_dicom import mutated, read_or_refused\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, ({1 << 31}, {1 << 31}))\n"
        "for seed in range(100, 600): read_or_refused(mutated(seed))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
