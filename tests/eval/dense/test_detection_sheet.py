"""The contact sheet of detections: truth at the left, answers at the right, and only those that are
sure.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpvision.eval.dense.coco_data import CocoObject, load_coco
from dpvision.eval.dense.crops import fitted
from dpvision.eval.dense.detection import in_image
from dpvision.eval.dense.sheets import detection_sheet

from .coco_shapes import write_shapes

pytest.importorskip("faster_coco_eval", reason="needs the extra `dense`")


def test_the_sheet_shows_truth_at_the_left_and_answers_at_the_right(tmp_path: Path) -> None:
    test = load_coco(*write_shapes(tmp_path, 1))
    [image] = test.images
    thing: CocoObject = image.objects[0]
    answer = in_image(
        {
            "boxes": torch.tensor([thing.box]),
            "labels": torch.tensor([1]),
            "scores": torch.tensor([0.9]),
            "masks": torch.ones(1, 1, 28, 28),
        },
        image,
        fitted(48, 64, 64),
    )
    both, unsure = (
        np.asarray(detection_sheet(test, [replace(answer, score_N=np.array([s]))])).astype(int)
        for s in (0.9, 0.1)
    )
    assert both.shape == (366, 732, 3)
    left = slice(0, 360)
    np.testing.assert_array_equal(both[:, left], unsure[:, left])
    assert (both[:, 366:] != unsure[:, 366:]).any(), "an answer that is not sure is not drawn"
