"""The contact sheet shows what it is given: colours of classes, the same in truth and answers,
black where nothing counts.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpvision.errors import DataError
from dpvision.eval.dense.semantic_data import IGNORED
from dpvision.eval.dense.sheets import SheetRow, class_colours, painted, render_sheet, save_sheet


def test_neighbouring_classes_have_colours_apart() -> None:
    colours = class_colours(150).astype(int)
    assert len({tuple(c) for c in colours}) == 150
    assert min(np.abs(a - b).max() for a, b in itertools.pairwise(colours)) > 60


def test_pixels_are_painted_by_class_and_ignored_ones_are_black() -> None:
    pixels, classes = (
        np.full((2, 3, 3), 100, np.uint8),
        np.array([[0, 1, 1], [IGNORED, 0, 1]], np.uint8),
    )
    made, colours = painted(pixels, classes, class_colours(2)), class_colours(2)
    assert (
        (made[1, 0] == 0).all()
        and (made[0, 1] == made[1, 2]).all()
        and (made[0, 0] != made[0, 1]).any()
    )
    np.testing.assert_allclose(made[0, 0], 0.35 * 100 + 0.65 * colours[0], atol=1)


def test_the_sheet_has_a_cell_for_image_truth_and_every_answer(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    truth, wrong = np.zeros((40, 48), np.uint8), np.ones((40, 48), np.uint8)
    rows = [
        SheetRow(pixels, truth, (truth, wrong)),
        SheetRow(pixels[:20], truth[:20], (wrong[:20], wrong[:20])),
    ]
    made = np.asarray(
        render_sheet(
            rows, ["sky", "a class with a very long name indeed"], ["runs/a", "mae:" + 60 * "x"]
        )
    ).astype(int)
    cells = [made[30:200, 8 + i * 248 : 248 + i * 248] for i in range(4)]
    assert (
        (cells[1] == cells[2]).all()
        and np.abs(cells[1] - cells[3]).mean() > 30
        and np.abs(cells[0] - cells[1]).mean() > 30
    )
    save_sheet(Image.fromarray(made.astype(np.uint8)), tmp_path / "sheet.png")
    assert (
        Image.open(tmp_path / "sheet.png").size == made.shape[1::-1]
        and len(list(tmp_path.iterdir())) == 1
    )
    with pytest.raises(DataError, match="expected a writable path"):
        save_sheet(Image.fromarray(made.astype(np.uint8)), tmp_path / "none" / "sheet.png")
