"""Folders of images and masks: what is read is what was written, and every fault is said in one
clear error.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpvision.errors import DataError
from dpvision.eval.dense.semantic_data import (
    IGNORED,
    ClassMap,
    load_classes,
    open_ade20k,
    open_folder,
)

from .semantic_shapes import CLASSES, IDS, NAMES, draw, write_shapes

COCO = Path(__file__).parents[4] / "shared" / "data" / "coco_mini"


def test_classes_are_numbered_by_their_ids_and_the_ignored_ones_are_none(tmp_path: Path) -> None:
    root = write_shapes(tmp_path / "a", 3)
    classes = load_classes(root / "classes.json", (0, 255))
    assert classes.names == NAMES and classes.note() is None
    folder = open_folder(root / "images", root / "masks", classes)
    assert folder.name == "a/masks" and len(folder) == 3
    for n in range(3):
        pixels, ids = draw(n)
        found = folder.read(n)
        np.testing.assert_array_equal(found.pixels_HWC, pixels)
        np.testing.assert_array_equal(np.array(IDS)[found.class_HW], ids)
    everything = load_classes(root / "classes.json")
    assert everything.names[0] == "unlabeled" and "--ignore-ids 0 255" in str(everything.note())


def test_an_id_that_the_file_names_is_a_class_unless_it_is_told_to_be_ignored(
    tmp_path: Path,
) -> None:
    file = tmp_path / "classes.json"
    file.write_text('{"0": "background", "128": "road", "255": "building"}')
    classes = load_classes(file)
    assert classes.names == ("background", "road", "building") and classes.ignored == frozenset()
    numbers, unknown = classes.numbers(np.array([[0, 128, 255]]))
    assert numbers.tolist() == [[0, 1, 2]] and unknown == []
    assert load_classes(file, (255,)).names == ("background", "road")
    file.write_text('{"0": "background", "128": "road"}')
    assert load_classes(file).numbers(np.array([[255]]))[0].tolist() == [[IGNORED]], (
        "255 is ignored where it has no name"
    )
    file.write_text('{"1": "a", "01": "b", "2": "c"}')
    with pytest.raises(DataError, match="has an id twice"):
        load_classes(file)


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_masks_of_every_single_channel_mode_give_their_ids(tmp_path: Path, mode: str) -> None:
    root = write_shapes(tmp_path / "a", 2)
    ids = draw(0)[1]
    if mode == "P":
        image = Image.fromarray(ids).convert("P")
        image.putdata(ids.ravel().tolist())
        image.putpalette(list(np.random.default_rng(0).integers(0, 256, 768)))
    else:
        image = Image.fromarray(ids.astype(np.uint16) if mode == "I;16" else ids)
    image.save(root / "masks" / "000.png")
    found = open_folder(root / "images", root / "masks", CLASSES).read(0)
    np.testing.assert_array_equal(np.array(IDS)[found.class_HW], ids)


def test_ids_above_255_are_classes_too(tmp_path: Path) -> None:
    classes = ClassMap(("a", "b"), {1000: 0, 30_000: 1}, frozenset([7]))
    numbers, unknown = classes.numbers(np.array([[1000, 30_000], [7, 9]]))
    assert numbers.tolist() == [[0, 1], [IGNORED, IGNORED]] and unknown == [9]


def test_images_without_a_mask_are_left_out(tmp_path: Path) -> None:
    root = write_shapes(tmp_path / "a", 3)
    (root / "masks" / "001.png").unlink()
    (root / "masks" / "notes.txt").write_text("not a mask")
    assert [
        image.stem for image, _ in open_folder(root / "images", root / "masks", CLASSES).files
    ] == ["000", "002"]


def test_ade20k_is_read_as_it_is_published(tmp_path: Path) -> None:
    root = tmp_path / "ADEChallengeData2016"
    for part, first in (("training", 0), ("validation", 50)):
        write_shapes(tmp_path / part, 2, first)
        for ours, theirs in (("images", "images"), ("masks", "annotations")):
            (root / theirs).mkdir(parents=True, exist_ok=True)
            (tmp_path / part / ours).rename(root / theirs / part)
    Image.fromarray(np.array([[0, 1], [150, 7]], dtype=np.uint8)).resize((48, 40), 0).save(
        root / "annotations" / "training" / "000.png"
    )
    lines = [
        "Idx\tRatio\tTrain\tVal\tName",
        "1\t0.15\t11664\t1172\twall",
        "150\t0.0\t1\t2\tflag, banner",
    ]
    (root / "objectInfo150.txt").write_text("\n".join(lines))
    train, test = open_ade20k(root)
    assert (train.name, test.name, len(train.classes.names)) == (
        f"{root.name} training",
        f"{root.name} validation",
        150,
    )
    assert (train.classes.names[0], train.classes.names[1], train.classes.names[149]) == (
        "wall",
        "class 2",
        "flag",
    )
    assert sorted(np.unique(train.read(0).class_HW)) == [0, 6, 149, IGNORED]
    Image.fromarray(np.full((40, 48), 151, np.uint8)).save(
        root / "annotations" / "validation" / "000.png"
    )
    with pytest.raises(DataError, match="ids 151; expected those of 150 classes"):
        open_ade20k(root)
    with pytest.raises(DataError, match="expected ADEChallengeData2016"):
        open_ade20k(tmp_path)


def test_every_fault_is_one_clear_error(tmp_path: Path) -> None:
    def opened(change) -> str:
        opened.count += 1
        root = write_shapes(tmp_path / str(opened.count), 3)
        change(root)
        with pytest.raises(DataError) as caught:
            open_folder(root / "images", root / "masks", CLASSES)
        text = str(caught.value)
        assert "; expected" in text and text.endswith(".")
        return text

    opened.count = 0
    ids = draw(1)[1]

    def mask(array: np.ndarray):
        return lambda root: Image.fromarray(array).save(root / "masks" / "001.png")

    assert "mode RGB, 3 channels" in opened(mask(np.stack([ids] * 3, -1)))
    assert "20 x 40 px for an image of 48 x 40" in opened(mask(ids[:, :20]))
    assert "ids 3, 4" in opened(
        mask(np.where(ids == 7, 3, np.where(ids == 21, 4, ids)).astype(np.uint8))
    )
    assert "1 of 3 masks have no image" in opened(
        lambda root: (root / "images" / "001.png").unlink()
    )
    assert "001.jpg and 001.jpeg" in opened(
        lambda root: (
            [
                Image.fromarray(draw(1)[0]).save(root / "images" / f"001.{e}")
                for e in ("jpg", "jpeg")
            ]
            and (root / "images" / "001.png").unlink()
        )
    ).replace("001.jpeg and 001.jpg", "001.jpg and 001.jpeg")
    assert "masks=" in opened(lambda root: [p.unlink() for p in (root / "masks").iterdir()])
    assert "images=" in opened(lambda root: [p.unlink() for p in (root / "images").iterdir()])
    assert "is not a folder" in opened(lambda root: (root / "masks").rename(root / "other"))
    assert "no pixel of 3 masks counts" in opened(
        lambda root: [
            Image.fromarray(np.zeros_like(ids)).save(p) for p in (root / "masks").iterdir()
        ]
    )
    assert "expected an image" in opened(
        lambda root: (root / "masks" / "001.png").write_text("text")
    )
    assert "expected a whole PNG" in opened(
        lambda root: (root / "masks" / "001.png").write_bytes(
            (root / "masks" / "001.png").read_bytes()[:150]
        )
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "expected JSON from ids to names"),
        ('["a", "b"]', "expected JSON"),
        ('{"a": "b", "c": "d"}', "expected JSON"),
        ('{"1": 2, "2": 3}', "expected JSON"),
        ('{"1": "one"}', "has 1 classes"),
        (json.dumps({str(i): f"c{i}" for i in range(300)}), "expected 2 to 255"),
    ],
)
def test_files_of_classes_that_are_none_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(DataError, match=words):
        load_classes(tmp_path / "classes.json")
    with pytest.raises(DataError, match="No such file"):
        load_classes(tmp_path / "none.json")


@pytest.mark.skipif(not COCO.exists(), reason="coco_mini is not on this machine")
def test_coco_mini_opens_whole() -> None:
    classes = load_classes(COCO / "semantic" / "classes.json", (0, 255))
    folders = [
        open_folder(COCO / "images" / part, COCO / "semantic" / part, classes)
        for part in ("train2017", "val2017")
    ]
    assert [len(folder) for folder in folders] == [100, 69] and folders[
        0
    ].name == "semantic/train2017"
    image, mask = folders[0].read(0)
    assert image.shape[:2] == mask.shape and (mask[mask != IGNORED] < len(classes.names)).all()
