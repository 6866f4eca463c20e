"""A sheet of classified images.

Legend: B images, C channels, H height, W width.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpvision.files import replacing

_COLUMNS = 6


def save_examples(path: Path, image_BHWC: np.ndarray, predicted_B: Sequence[str], true_B: Sequence[str]) -> Path:
    """Write a PNG of images with the predicted class, and the true one where it differs.

    Args:
        image_BHWC: uint8 RGB images that may be released: public ones, classified with released weights.
    """
    rows = -(-len(image_BHWC) // _COLUMNS)
    figure = Figure(figsize=(1.5 * _COLUMNS, 2.1 * rows), dpi=100)
    FigureCanvasAgg(figure)
    for b, (image, predicted, true) in enumerate(zip(image_BHWC, predicted_B, true_B, strict=True)):
        axes = figure.add_subplot(rows, _COLUMNS, b + 1)
        axes.imshow(image, interpolation="nearest")
        axes.set_axis_off()
        right = predicted == true
        axes.set_title(predicted if right else f"{predicted}\n({true})", fontsize=9, color="#2a6b2a" if right else "#a03020")
    figure.tight_layout()
    with replacing(path) as partial:
        figure.savefig(partial, format="png")
    return path
