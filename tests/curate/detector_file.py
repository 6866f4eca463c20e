"""An ONNX file with the interface of CenterFace that finds coloured squares at known places."""

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OFFSET = (0.25, -0.5)
"""Of each face's centre, row before column, in places of the heat map."""


def write_detector(path: Path, *, divide_by: float = 1.0) -> Path:
    """Write a file that gives a face for each 4 x 4 square of ``square``, and none for black.

    As in CenterFace's file, the shapes are those of a small image and the weights are inputs.

    Args:
        divide_by: 0 makes the log sizes infinite.
    """
    unit = {"heat": [[0.1, 0, 0]], "sizes": [[0, 1 / 64, 0], [0, 0, 1 / 64]]}
    arrays = {f"{name}.w": np.array(rows)[..., None, None] for name, rows in unit.items()}
    arrays |= {"heat.b": np.array([-15.0]), "sizes.b": np.zeros(2)}
    arrays |= {"offsets.w": np.zeros((2, 3, 1, 1)), "offsets.b": np.array(OFFSET)}
    arrays["divisor"] = np.array(divide_by)
    nodes = [
        helper.make_node("AveragePool", ["image"], ["mean"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Conv", ["mean", "heat.w", "heat.b"], ["logits"]),
        helper.make_node("Sigmoid", ["logits"], ["heat"]),
        helper.make_node("Conv", ["mean", "sizes.w", "sizes.b"], ["scaled"]),
        helper.make_node("Div", ["scaled", "divisor"], ["sizes"]),
        helper.make_node("Conv", ["mean", "offsets.w", "offsets.b"], ["offsets"]),
    ]
    shapes = {"heat": [10, 1, 8, 8], "sizes": [10, 2, 8, 8], "offsets": [10, 2, 8, 8]}
    weights = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    graph = helper.make_graph(
        nodes,
        "squares",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in [("image", [10, 3, 32, 32])]
            + [(name, list(a.shape)) for name, a in arrays.items()]
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    onnx.save(model, path)
    return path


def square(height: int, width: int, red: int = 255) -> tuple[int, int, int]:
    """Return the colour of a face of about this many pixels: the detector reads sides from it."""
    return red, round(64 * math.log(height / 4)), round(64 * math.log(width / 4))


def face_of(row: int, column: int, colour: tuple[int, int, int]) -> list[float]:
    """Return left, top, right, bottom and score of the square at a place of the heat map."""
    y, x = 4 * (row + 0.5 + OFFSET[0]), 4 * (column + 0.5 + OFFSET[1])
    height, width = (4 * math.exp(c / 64) for c in colour[1:])
    score = 1 / (1 + math.exp(15 - colour[0] / 10))
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2, score]


def image_of(
    height: int, width: int, squares: dict[tuple[int, int], tuple[int, int, int]]
) -> np.ndarray:
    """Return a black image with squares at places (row, column) of the heat map."""
    pixels_HWC = np.zeros((height, width, 3), np.uint8)
    for (row, column), colour in squares.items():
        pixels_HWC[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = colour
    return pixels_HWC
