"""The step that blurs faces. The oracle of places is a network that finds coloured squares."""

import hashlib
import io
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from dpvision.curate.faces import Faces, blurred, encoded
from dpvision.curate.passes import curate
from dpvision.curate.pipeline import Pipeline
from dpvision.curate.record import Record, about
from dpvision.data.decode import as_png, decode
from dpvision.data.sample import Sample
from dpvision.errors import ConfigError, DPVisionError

pytest.importorskip("onnx", reason="needs the extra curate")
pytest.importorskip("onnxruntime", reason="needs the extra curate")
from ..data.image_files import write_tar
from .detector_file import face_of, image_of, square, write_detector

FLICKR8K = Path(__file__).parents[2].parent / "shared" / "data" / "flickr8k" / "val-000000.tar"
ORIENTATION, GPS, THUMBNAIL = 0x0112, 0x8825, b"the face in small"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return write_detector(tmp_path_factory.mktemp("w") / "squares.onnx")


def _step(weights: Path, **settings) -> Faces:
    return Faces(weights, min_score=0.5, min_side_px=96, **settings)


def _record(data: bytes, key: str = "a") -> Record:
    return Record(Sample(key, data, {"caption": "x"}, place=(Path("a.tar"), 512)))


def _run(step: Faces, *images: bytes) -> list[Record]:
    records = [_record(data, str(k)) for k, data in enumerate(images)]
    step.opened()(records)
    return records


def _stripes(height: int, width: int, period: float) -> np.ndarray:
    """Vertical stripes of 0 to 255."""
    wave = 127.5 + 127.5 * np.sin(2 * np.pi * np.arange(width) / period)
    return np.broadcast_to(wave.astype(np.uint8)[:, None], (height, width, 3)).copy()


def _noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_an_image_without_a_face_keeps_its_bytes_and_place(weights):
    (record,) = _run(_step(weights), as_png(image_of(64, 96, {})))
    assert record.sample == _record(record.sample.image, "0").sample and record.reason is None


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_with_a_face_is_blurred_there_and_written_without_metadata(weights, kind):
    """A sideways file, as cameras write it, with a place and a thumbnail."""
    colour = square(24, 20)
    upright_HWC = image_of(64, 96, {(7, 11): colour})
    stored = Image.fromarray(upright_HWC).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # turned clockwise to be shown
    exif[GPS] = {1: "N", 2: (48.0, 51.0, 29.0)}
    file = io.BytesIO()
    stored.save(file, kind, exif=exif.tobytes() + THUMBNAIL, **_options(kind))
    assert decode(file.getvalue()).shape == (64, 96, 3)
    (record,) = _run(_step(weights), file.getvalue())
    made = record.sample.image
    assert record.sample.place is None and record.sample.fields == {"caption": "x"}
    assert made[:2] == (b"\xff\xd8" if kind == "JPEG" else b"\x89P")
    image = Image.open(io.BytesIO(made))
    assert not image.getexif() and b"Exif" not in made and THUMBNAIL not in made
    after_HWC = record.pixels()
    assert after_HWC.shape == (64, 96, 3) and np.array_equal(after_HWC, decode(made))
    expected_HWC = blurred(upright_HWC, np.array([face_of(7, 11, colour)[:4]]))
    error_HWC = np.abs(after_HWC.astype(int) - expected_HWC)
    assert error_HWC.max() <= (25 if kind == "JPEG" else 0)  # the source lost some already
    assert np.abs(expected_HWC.astype(int) - upright_HWC).max() > 60


def _options(kind: str) -> dict[str, object]:
    return {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}, "PNG": {}}[kind]


def test_each_record_becomes_what_it_becomes_alone(weights):
    colours = [square(20, 20), square(12, 30, 200), square(40, 18)]
    images = [as_png(_noise(60, 70) // 2)]  # too dark for a face
    for k, colour in enumerate(colours):
        images += [as_png(np.maximum(image_of(64 + k, 96, {(5, 4 + k): colour}), 9))]
    images.append(as_png(image_of(40, 40, {})))
    together = _run(_step(weights), *images)
    changed = [r.sample.image != data for r, data in zip(together, images, strict=True)]
    assert changed == [False, True, True, True, False]
    for k in reversed(range(len(images))):
        (alone,) = _run(_step(weights), images[k])
        assert alone.sample[1:] == together[k].sample[1:] and alone.reason == together[k].reason


def test_images_with_faces_can_be_left_out(weights):
    face, none = image_of(64, 96, {(5, 5): square(20, 20)}), image_of(64, 96, {})
    data = [as_png(face), as_png(none)]
    records = _run(_step(weights, action="leave_out"), *data)
    assert [record.reason for record in records] == ["face", None]
    assert [record.sample.image for record in records] == data


def test_pixels_beyond_the_reach_of_the_mask_are_untouched():
    pixels_HWC = _noise(300, 400)
    for left, top, side in ((150, 100, 40), (0, 0, 40), (330.5, 250.25, 61), (3, 120, 7)):
        after_HWC = blurred(pixels_HWC, np.array([[left, top, left + side, top + side]]))
        reach = 0.1 * side + 3 * (0.1 * side + 2) + 1
        y_H1, x_1W = np.arange(300)[:, None], np.arange(400)[None]
        across_1W = (x_1W > left - reach - 1) & (x_1W < left + side + reach)
        inside_HW = across_1W & (y_H1 > top - reach - 1) & (y_H1 < top + side + reach)
        assert np.array_equal(after_HWC[~inside_HW], pixels_HWC[~inside_HW])
        assert (after_HWC[inside_HW] != pixels_HWC[inside_HW]).mean() > 0.2
    assert np.array_equal(blurred(pixels_HWC, np.zeros((0, 4))), pixels_HWC)


@pytest.mark.parametrize("fraction", [0.1, 0.2])
@pytest.mark.parametrize("box", [(80, 60, 140, 140), (-0.0, 3.5, 30.25, 44), (200, 150, 240, 200)])
def test_a_face_is_blurred_as_if_the_whole_image_were(box, fraction):
    """The equation on the whole image, by Pillow's Gaussian, bit by bit, and by an exact one, which
    differs more where it repeats the image's border.
    """
    from scipy.ndimage import gaussian_filter

    pixels_HWC = _stripes(200, 240, 40)
    sigma = fraction * max(box[2] - box[0], box[3] - box[1])
    left, top = (math.floor(n - sigma) for n in box[:2])
    right, bottom = (math.ceil(n + sigma) for n in box[2:])
    mask_HW = np.zeros((200, 240), np.uint8)
    mask_HW[max(0, top) : bottom, max(0, left) : right] = 255
    found_HWC = blurred(pixels_HWC, np.array([box]), fraction)

    image, gaussian = Image.fromarray(pixels_HWC), ImageFilter.GaussianBlur(sigma)
    mask = Image.fromarray(mask_HW).filter(gaussian)
    assert np.array_equal(found_HWC, Image.composite(image.filter(gaussian), image, mask))

    g_HW1 = gaussian_filter(mask_HW / 255, sigma, mode="nearest")[..., None]
    smooth_HWC = gaussian_filter(pixels_HWC.astype(float), (sigma, sigma, 0), mode="nearest")
    expected_HWC = g_HW1 * smooth_HWC + (1 - g_HW1) * pixels_HWC
    assert np.abs(found_HWC - expected_HWC).max() < (8 if box[0] == 80 else 20)  # of 255
    assert np.abs(expected_HWC - pixels_HWC).max() > 25


@pytest.mark.parametrize("fraction", [0.1, 0.2])
def test_eight_cycles_a_face_are_gone_from_its_inner_part(fraction):
    """Within one standard deviation of its edge the original shows through, by construction.
    Between squares of the size of a face, in an image of faces 80, 40 and 15 pixels wide, the small
    ones beside the large, and a face at the border.
    """
    places = [(20, 20, 80), (160, 30, 40), (120, 20, 15), (230, 0, 40), (150, 130, 8)]
    for left, top, side in places:
        pixels_HWC = _stripes(180, 270, side / 8)
        faces = np.array([[x, y, x + s, y + s] for x, y, s in places], dtype=float)
        after_HWC = blurred(pixels_HWC, faces, fraction)
        margin = side // 4
        inner = after_HWC[top + margin : top + side - margin, left + margin : left + side - margin]
        assert np.ptp(inner) < (20 if side > 10 else 60), (left, top, side)


@pytest.mark.parametrize("quality", [5, 60, 100])
@pytest.mark.parametrize(
    "mode, settings",
    [("RGB", {"subsampling": k}) for k in (0, 1, 2)] + [("L", {}), ("CMYK", {})],
    ids=["4:4:4", "4:2:2", "4:2:0", "grey", "CMYK"],
)
def test_jpeg_written_anew_keeps_its_quality(mode, settings, quality):
    """Blocks that did not change are quantized as before, and so lose next to nothing."""
    smooth_HWC = _stripes(64, 80, 31) // 2
    smooth_HWC[..., 1:] += np.indices((64, 80)).transpose(1, 2, 0).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(smooth_HWC).convert(mode).save(file, "JPEG", quality=quality, **settings)
    before_HWC = decode(file.getvalue())
    made = encoded(before_HWC, file.getvalue())
    assert Image.open(io.BytesIO(made)).mode == ("L" if mode == "L" else "RGB")
    lost_HWC = np.abs(decode(made).astype(int) - before_HWC)
    assert lost_HWC.mean() < (1 if mode != "CMYK" or quality > 5 else 8)  # other components
    assert len(made) < 1.5 * len(file.getvalue())


def test_jpeg_whose_header_only_libjpeg_reads_is_written_too():
    file = io.BytesIO()
    Image.fromarray(_stripes(64, 80, 31)).save(file, "JPEG", quality=60)
    broken = file.getvalue().replace(b"JFIF\0\x01\x01", b"JFIF\0\x09\x01")
    for former in (broken, b"\xff\xd8 not a JPEG"):
        made = encoded(_stripes(64, 80, 31), former)
        assert np.abs(decode(made).astype(int) - _stripes(64, 80, 31)).mean() < 8


def test_the_order_of_faces_of_different_sizes_does_not_matter():
    pixels_HWC = _noise(120, 120)
    faces_F4 = np.array([[10, 10, 60, 70], [40, 50, 90, 80], [20, 20, 32, 30]])
    found_HWC = blurred(pixels_HWC, faces_F4)
    assert np.array_equal(found_HWC, blurred(pixels_HWC, faces_F4[::-1]))
    one_by_one_HWC = pixels_HWC
    for face_4 in faces_F4:  # the largest first
        one_by_one_HWC = blurred(one_by_one_HWC, face_4[None])
    assert np.array_equal(found_HWC, one_by_one_HWC)


def test_a_step_is_its_settings_and_the_detector_is_stated_without_its_path(weights):
    step = _step(weights)
    assert pickle.loads(pickle.dumps(step)) == step
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert about(step) == {
        "weights": f"another file, sha256 {digest}",
        **{"min_score": 0.5, "action": "blur", "blur": 0.1, "min_side_px": 96, "max_side_px": 1024},
    }
    assert pickle.loads(pickle.dumps(step)) == step


def test_a_store_holds_the_blurred_image_and_refers_to_the_tar_for_the_other(weights, tmp_path):
    face, none = (as_png(image_of(64, 96, s)) for s in ({(5, 5): square(20, 20)}, {}))
    write_tar(tmp_path / "a.tar", {"0.png": face, "1.png": none, "2.png": face[:60]})
    step = _step(weights)
    store = curate(tmp_path / "a.tar", tmp_path / "s", Pipeline((step,)), public=True, workers=1)
    (record,) = _run(step, face)
    kept = {store.record(row).key: store.record(row).image for row in range(store.num_records)}
    assert kept == {"0": record.sample.image, "1": none}
    shards = [store.shard_paths[store.index["shard"][row]] for row in range(2)]
    assert [path == tmp_path / "a.tar" for path in shards] == [False, True]
    counts = json.loads((store.path / "confidential/curation/counts.json").read_text())
    assert counts["faces"] | {"seconds": 0} == dict(came=2, left_out={}, changed=1, seconds=0)
    assert store.meta["curation"]["steps"] == [{"name": "faces", **about(step)}]


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"min_score": 0.0}, "min_score=0.0"),
        ({"min_score": float("nan")}, "min_score=nan"),
        ({"blur": 0.05}, "blur=0.05"),
        ({"blur": float("nan")}, "blur=nan"),
        ({"min_side_px": 16}, "min_side_px=16"),
        ({"min_side_px": 512, "max_side_px": 256}, "max_side_px=256"),
        ({"action": "remove"}, "action='remove'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        Faces(**settings)


def test_of_photographs_those_with_faces_change_and_lose_the_detail_there():
    """With CenterFace itself. It may find a blurred face again, by its outline: what is gone are
    eyes and mouth.
    """
    import tarfile

    from dpvision.curate.face_detector import find_weights, open_detector

    try:
        weights = find_weights(None)
    except DPVisionError as error:
        pytest.skip(f"no CenterFace here: {error}")
    if not FLICKR8K.is_file():
        pytest.skip("no Flickr8k in shared/data")
    find = open_detector(weights, min_score=0.2, min_side_px=448, max_side_px=1024)
    with tarfile.open(FLICKR8K) as tar:
        names = [name for name in tar.getnames() if name.endswith(".jpg")][:60]
        images = [tar.extractfile(name).read() for name in names]
    records = _run(Faces(), *images)
    faces = [find(decode(data)) for data in images]
    assert sum(map(len, faces)) > 30
    for record, data, found_F5 in zip(records, images, faces, strict=True):
        assert (record.sample.image == data) == (not len(found_F5))
    sure = [(d, f) for d, f in zip(images, faces, strict=True) if len(f) == 1 and f[0, 4] > 0.8]
    for data, found_F5 in sure:
        before_HWC = decode(data)
        left, top, right, bottom = found_F5[0, :4].round().astype(int)
        after_HWC = blurred(before_HWC, found_F5[:, :4])
        detail = [_detail(p[top:bottom, left:right]) for p in (before_HWC, after_HWC)]
        assert detail[1] < 0.4 * detail[0]
    assert sure


def _detail(pixels_HWC: np.ndarray) -> float:
    """Mean difference of neighbouring pixels."""
    grey_HW = pixels_HWC.astype(float).mean(2)
    return float(np.abs(np.diff(grey_HW, axis=1)).mean() + np.abs(np.diff(grey_HW, axis=0)).mean())
