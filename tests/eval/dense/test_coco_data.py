"""COCO's files: masks against pycocotools and against what was drawn, and one clear error for what
is wrong in them.
"""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpvision.errors import DataError
from dpvision.eval.dense.coco_data import check_apart, load_coco

from .coco_shapes import changed, mark, write_shapes

pytest.importorskip("faster_coco_eval", reason="needs the extra `dense`")


def test_boxes_masks_and_classes_are_those_that_were_drawn(tmp_path: Path) -> None:
    coco = load_coco(*write_shapes(tmp_path, 5))
    assert (
        coco.classes == ((3, "red"), (7, "green"), (9, "blue"))
        and coco.notes == ()
        and coco.num_objects == 10
    )
    for image in coco.images:
        pixels = image.read().astype(int)
        for thing in image.objects:
            mask = image.mask(thing)
            assert mask is not None and mask.shape == (48, 64)
            left, top, right, bottom = map(int, thing.box)
            expected = np.zeros((48, 64), dtype=np.uint8)
            expected[top:bottom, left:right] = 1
            np.testing.assert_array_equal(mask, expected)
            assert pixels[mask == 1].mean(axis=0).argmax() == thing.label, "the class is the colour"


def test_masks_are_pycocotools(tmp_path: Path) -> None:
    """Polygons of several parts, run lengths as numbers (COCO's crowds) and compressed ones."""
    theirs = pytest.importorskip("pycocotools.mask", reason="needs the extra `dev`")
    rng = np.random.Generator(np.random.PCG64(3))
    file, images = write_shapes(tmp_path, 1)
    blob = np.asfortranarray(rng.uniform(size=(48, 64)) < 0.3).astype(np.uint8, order="F")
    flat = blob.flatten(order="F")
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *edges, flat.size]).tolist()
    counts = [0, *counts] if flat[0] else counts
    packed = theirs.encode(blob)
    polygons = [
        [(rng.uniform(0, 60, 10)).round(2).tolist() for _ in range(2)],
        [[2.5, 3.5, 40.25, 7.0, 20.0, 44.0]],
    ]
    outlines = [
        *polygons,
        {"size": [48, 64], "counts": counts},
        {"size": [48, 64], "counts": packed["counts"].decode()},
    ]

    def change(given: dict) -> None:
        given["annotations"] = [
            mark(i + 1, 1, 3, (1, 1, 60, 40)) | {"segmentation": outline, "iscrowd": int(i == 2)}
            for i, outline in enumerate(outlines)
        ]

    (image,) = load_coco(changed(file, change), images).images
    for thing, polygon in zip(image.objects[:2], polygons, strict=True):
        expected = theirs.decode(theirs.merge(theirs.frPyObjects(polygon, 48, 64)))
        np.testing.assert_array_equal(image.mask(thing), expected)
    for thing in image.objects[2:]:
        np.testing.assert_array_equal(image.mask(thing), blob)
    assert [thing.crowd for thing in image.objects] == [False, False, True, False] and len(
        image.learned
    ) == 3


def test_what_is_left_out_is_counted_and_what_stands_out_is_cut(tmp_path: Path) -> None:
    file, images = write_shapes(tmp_path, 2)

    def change(given: dict) -> None:
        bare = mark(7, 2, 7, (5, 5, 10, 10))
        del bare["segmentation"]
        given["annotations"] = [
            mark(1, 1, 3, (5, 5, 0, 10)),
            mark(2, 1, 3, (70, 5, 9, 9)),
            mark(3, 1, 3, (-4, 5, 10, 10)),
            mark(4, 1, 3, (60, 5, 4.03, 9)),
            bare,
            mark(8, 2, 7, (5, 5, 9, 9)) | {"segmentation": [[1, 2, 3, 4]]},
        ]

    coco = load_coco(changed(file, change), images)
    assert coco.notes == (
        "1 boxes outside their image left out",
        "1 boxes that stood out of their image cut",
        "1 boxes without area left out",
        "1 objects with a mask of fewer than three points, which keep their box",
    )
    first, second = coco.images
    assert [thing.box for thing in first.objects] == [
        (0, 5, 6, 15),
        (60, 5, 64, 14),
    ] and first.has_masks
    assert [thing.outline for thing in second.objects] == [None, None] and not second.has_masks
    assert second.mask(second.objects[0]) is None


def _set(path: list, value):
    def change(given: dict) -> None:
        at = given
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


WRONG = {
    "categories": (_set(["categories"], []), "no categories"),
    "twice": (
        lambda given: given["categories"].append(given["categories"][0]),
        "categories with the same id",
    ),
    "no list": (lambda given: given.pop("annotations"), "no list 'annotations'"),
    "pictures": (_set(["images"], []), "no images"),
    "same image": (
        lambda given: given["images"].append(given["images"][0]),
        "images with the same id",
    ),
    "no size": (_set(["images", 0, "height"], 0), "without size"),
    "height": (_set(["images", 0, "height"], "48"), "height='48'"),
    "unknown image": (
        _set(["annotations", 0, "image_id"], 99),
        "annotation 1: image_id=99, category_id=",
    ),
    "unknown class": (
        _set(["annotations", 0, "category_id"], 4),
        "category_id=4; expected an image and a category of the file",
    ),
    "box": (
        _set(["annotations", 0, "bbox"], [1, 2, 3]),
        r"bbox=\[1, 2, 3\]; expected left, top, width, height",
    ),
    "nan": (_set(["annotations", 0, "bbox"], [1, 2, 3, float("nan")]), "annotation 1: bbox="),
    "polygon": (
        _set(["annotations", 0, "segmentation"], [[1, 2, 3]]),
        "expected polygons or a run-length mask",
    ),
    "runs": (
        _set(["annotations", 0, "segmentation"], {"size": [48, 64], "counts": [1, 2]}),
        "annotation 1: a run-length mask",
    ),
    "runs' size": (
        _set(["annotations", 0, "segmentation"], {"size": [64, 48], "counts": [3072]}),
        r"expected \[48, 64\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, case: str) -> None:
    file, images = write_shapes(tmp_path, 2)
    with pytest.raises(DataError, match=WRONG[case][1]) as caught:
        load_coco(changed(file, WRONG[case][0]), images)
    assert str(caught.value).startswith("detection: ") and "; expected" in str(caught.value)


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    file, images = write_shapes(tmp_path, 3)
    with pytest.raises(DataError, match="is not a folder"):
        load_coco(file, tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"nothing\.json"):
        load_coco(tmp_path / "nothing.json", images)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        load_coco(tmp_path / "broken.json", images)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="expected COCO's instances"):
        load_coco(tmp_path / "list.json", images)


def test_missing_images_stop_it_or_are_counted(tmp_path: Path) -> None:
    file, images = write_shapes(tmp_path, 3)
    (images / "001.png").unlink()
    with pytest.raises(
        DataError, match=r"1 of 3 images .* the first is 001.png; expected all. Restore them"
    ):
        load_coco(file, images)
    coco = load_coco(file, images, allow_missing=True)
    assert len(coco.images) == 2 and coco.notes == ("1 images whose file is missing left out",)
    for left in images.iterdir():
        left.unlink()
    with pytest.raises(DataError, match="Check the folder of images"):
        load_coco(file, images, allow_missing=True)


def _in_subfolders(tmp_path: Path) -> tuple[Path, Path]:
    """Images cam0/0001.png and cam1/0001.png, the first without red."""
    file, images = write_shapes(tmp_path, 2)
    for i in range(2):
        (images / f"cam{i}").mkdir()
        (images / f"{i:03d}.png").unlink()
        Image.new("RGB", (64, 48), (i * 200, 0, 0)).save(images / f"cam{i}" / "0001.png")
    return file, images


def test_names_that_repeat_in_subfolders_are_told_apart_by_the_subfolder(tmp_path: Path) -> None:
    file, images = _in_subfolders(tmp_path)

    def change(given: dict) -> None:
        for i, entry in enumerate(given["images"]):
            entry["file_name"] = f"cam{i}/0001.png"

    assert [
        int(image.read()[0, 0, 0]) for image in load_coco(changed(file, change), images).images
    ] == [0, 200]
    with pytest.raises(
        DataError,
        match=r"'cam0/0001.png' and 'cam1/0001.png' of .* are both .*cam1.0001.png; "
        r"expected a file for each",
    ):
        load_coco(changed(file, change), images / "cam1")
    (images / "deep").mkdir()
    (images / "cam0").rename(images / "deep" / "cam0")
    deep = changed(
        file,
        lambda given: (change(given), given["images"][0].update(file_name="deep/cam0/0001.png")),
    )
    assert [int(image.read()[0, 0, 0]) for image in load_coco(deep, images).images] == [0, 200]


@pytest.mark.parametrize("name", ["0001.png", "cam2/0001.png", "../pictures/cam0/0001.png"])
def test_a_name_that_fits_several_files_is_refused(tmp_path: Path, name: str) -> None:
    file, images = _in_subfolders(tmp_path)
    with pytest.raises(
        DataError,
        match=r"0001.png' may be .*cam0.0001.png and .*cam1.0001.png; "
        r"expected one file of this name",
    ):
        load_coco(changed(file, _set(["images", 0, "file_name"], name)), images, allow_missing=True)


def test_images_are_found_by_the_last_part_of_the_name_and_never_outside_the_folder(
    tmp_path: Path,
) -> None:
    file, images = write_shapes(tmp_path, 2)
    (images / "001.png").rename(tmp_path / "001.png")
    for name in ("../001.png", str(tmp_path / "001.png"), "a" * 300 + "/b/c", ""):
        given = changed(
            changed(file, _set(["images", 0, "file_name"], "val2017/000.png")),
            _set(["images", 1, "file_name"], name),
        )
        assert [image.path for image in load_coco(given, images, allow_missing=True).images] == [
            images / "000.png"
        ], name


def test_an_image_that_is_another_or_none_is_said(tmp_path: Path) -> None:
    file, images = write_shapes(tmp_path, 2)
    first, second = load_coco(file, images).images
    Image.new("RGB", (60, 48)).save(images / "000.png")
    with pytest.raises(
        DataError, match=r"000\.png: 60 x 48 px; expected 64 x 48, as in its annotations"
    ):
        first.read()
    (images / "001.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"001\.png: image: not an image"):
        second.read()


def test_another_list_of_classes_and_the_same_images_are_refused(tmp_path: Path) -> None:
    file, images = write_shapes(tmp_path / "a", 2)
    train, other = load_coco(file, images), load_coco(*write_shapes(tmp_path / "b", 2, seed=1))
    check_apart(train, other)
    with pytest.raises(DataError, match="2 images are in both training and test, the first is 000"):
        check_apart(train, train)
    test = load_coco(changed(file, _set(["categories", 1, "name"], "verde")), images)
    with pytest.raises(
        DataError, match="different in 7 'green', 7 'verde'; expected the same ids and names"
    ):
        check_apart(train, test)
