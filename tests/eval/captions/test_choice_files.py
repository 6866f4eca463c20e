"""Readers of ARO, SugarCrepe and NegCLIP: files in the benchmarks' form, what is refused, and the
real SugarCrepe where it is.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpvision.errors import DataError
from dpvision.eval.captions.choice import answer_choices, choice_scores
from dpvision.eval.captions.choice_files import (
    ATTRIBUTION_FILE,
    RELATION_FILE,
    SUBSETS,
    aro_tests,
    negclip_test,
    sugarcrepe_test,
)
from dpvision.eval.captions.settings import Asking

from .captioners import open_made

COCO = Path(__file__).parents[4] / "shared" / "data" / "coco_mini"


def _image(file: Path, seed: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(
        np.random.Generator(np.random.PCG64(seed)).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    ).save(file)


def _relation(number: int, relation: str = "left of", image: str = "1.jpg") -> dict[str, Any]:
    return {
        "image_id": str(number),
        "image_path": image,
        "bbox_x": number % 20,
        "bbox_y": 2,
        "bbox_w": 30,
        "bbox_h": 30,
        "relation_name": relation,
        "true_caption": f"the dog is {relation} the cat",
        "false_caption": f"the cat is {relation} the dog",
        "obj1_name": "dog",
        "obj2_name": "cat",
    }


def _attribution(number: int, attributes: list[str]) -> dict[str, Any]:
    a, b = attributes
    entry = _relation(number) | {"attributes": attributes}
    del entry["relation_name"]
    return entry | {
        "true_caption": f"the {a} dog and the {b} cat",
        "false_caption": f"the {b} dog and the {a} cat",
    }


@pytest.fixture
def aro(tmp_path: Path) -> Path:
    """Forty relation items of three relations, forty attribution items of two pairs."""
    _image(tmp_path / "images" / "1.jpg")
    relations = [_relation(i, ("left of", "on", "holding")[i % 3]) for i in range(40)]
    attributes = [
        _attribution(i, ["red", "wet"] if i < 30 else ["old", "young"]) for i in range(40)
    ]
    (tmp_path / RELATION_FILE).write_text(json.dumps(relations))
    (tmp_path / ATTRIBUTION_FILE).write_text(json.dumps(attributes))
    return tmp_path


def test_aro_has_one_item_for_each_entry_its_box_and_its_group(aro: Path) -> None:
    relation, attribution = aro_tests(aro)
    assert len(relation.choices) == len(attribution.choices) == 40
    for i, choice in enumerate(relation.choices):
        assert choice.captions[0].startswith("the dog is") and choice.captions[1].startswith(
            "the cat is"
        )
        assert relation.images.boxes[choice.image] == (i % 20, 2, i % 20 + 30, 32)  # type: ignore[attr-defined]
    assert {c.group for c in relation.choices} == {"left of", "on", "holding"}
    assert {c.group for c in attribution.choices} == {
        "red_wet",
        "old_young",
    } and attribution.min_group == 25
    assert (
        relation.images.visibility == "private"
        and aro_tests(aro, visibility="public")[0].images.visibility == "public"
    )
    right_N = answer_choices(open_made(), relation, how=Asking(workers=1))
    assert (right_N >= 0).all()
    assert {s.protocol.split(",")[1] for s in choice_scores(relation, right_N, "c", "private")} == {
        " micro",
        " macro over 3 relations",
    }
    # of attribution one pair is large enough, and a mean over one pair is none
    assert [
        s.protocol.split(",")[1] for s in choice_scores(attribution, right_N, "c", "private")
    ] == [" micro"]


def test_relations_can_be_left_out(aro: Path) -> None:
    relation, attribution = aro_tests(aro, leave_out=frozenset({"on", "red_wet"}))
    assert {c.group for c in relation.choices} == {"left of", "holding"} and len(
        attribution.choices
    ) == 10


def test_aro_with_one_file_is_one_test(aro: Path) -> None:
    (aro / RELATION_FILE).unlink()
    assert [test.name for test in aro_tests(aro)] == ["ARO attribution"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("{}", "dict; expected a list of items"),
        ("[]", "no items; expected the benchmark's"),
        ('["a"]', "item 0: true_caption=None; expected a caption"),
        (
            [{"true_caption": "a", "false_caption": " "}],
            "item 0: false_caption=' '; expected a caption",
        ),
        (
            [_relation(0) | {"image_path": "../1.jpg"}],
            "image_path='../1.jpg'; expected the name of an image",
        ),
        ([_relation(0) | {"bbox_w": 0}], "expected bbox_x, bbox_y, bbox_w and bbox_h"),
        ([_relation(0) | {"bbox_x": "3"}], "expected bbox_x"),
        ([_relation(0) | {"bbox_x": float("nan")}], "expected bbox_x"),
        ([_relation(0) | {"relation_name": None}], "relation_name=None"),
        (
            [_relation(0, image="2.jpg"), _relation(1)],
            "1 images are missing, the first is .*2.jpg.*--allow-missing",
        ),
        ([_relation(0, image="2.jpg")], "Check the folder of images"),
    ],
)
def test_what_is_not_aros_file_is_refused(aro: Path, content: object, said: str) -> None:
    (aro / RELATION_FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=said):
        aro_tests(aro)


def test_aro_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has neither"):
        aro_tests(tmp_path)


def test_missing_images_are_left_out_only_when_asked_and_the_name_says_how_many(aro: Path) -> None:
    (aro / RELATION_FILE).write_text(
        json.dumps([_relation(0, image="2.jpg"), _relation(1), _relation(2)])
    )
    test = aro_tests(aro, allow_missing=True)[0]
    assert (
        len(test.choices) == 2 and test.name == "ARO relation, 1 items without their image left out"
    )


def _publishers(folder: Path) -> None:
    for number, subset in enumerate(SUBSETS):
        entries = {
            str(i): {
                "filename": f"{i:012d}.jpg",
                "caption": f"a cat {number} {i}. ",
                "negative_caption": f"a dog {number} {i}.",
            }
            for i in range(3)
        }
        (folder / f"{subset}.json").write_text(json.dumps(entries))


def test_sugarcrepe_reads_the_publishers_folder_a_file_of_it_and_one_list(tmp_path: Path) -> None:
    for i in range(3):
        _image(tmp_path / "pictures" / "val2017" / f"{i:012d}.jpg", i)
    (tmp_path / "data").mkdir()
    _publishers(tmp_path / "data")
    whole = sugarcrepe_test(tmp_path / "data", tmp_path / "pictures")
    assert (
        len(whole.choices) == 21
        and len(whole.images) == 3
        and {c.group for c in whole.choices} == set(SUBSETS)
    )
    part = sugarcrepe_test(tmp_path / "data" / "swap_obj.json", tmp_path / "pictures" / "val2017")
    assert [c.captions for c in part.choices] == [
        c.captions for c in whole.choices if c.group == "swap_obj"
    ]
    _image(tmp_path / "pictures" / "train2017" / f"{0:012d}.jpg", 1)
    with pytest.raises(
        DataError, match=r"SugarCrepe: '0{12}.jpg' may be .*train2017.* and .*val2017"
    ):
        sugarcrepe_test(tmp_path / "data", tmp_path / "pictures")
    (tmp_path / "pictures" / "train2017" / f"{0:012d}.jpg").unlink()
    entries = [
        {
            "subset": c.group,
            "filename": f"{i % 3:012d}.jpg",
            "caption": c.captions[0],
            "negative_caption": c.captions[1],
        }
        for i, c in enumerate(whole.choices)
    ]
    (tmp_path / "all.json").write_text(json.dumps(entries))
    assert [
        c.captions for c in sugarcrepe_test(tmp_path / "all.json", tmp_path / "pictures").choices
    ] == [c.captions for c in whole.choices]
    scores = choice_scores(
        whole, answer_choices(open_made(), whole, how=Asking(workers=1)), "c", "private"
    )
    assert [s.protocol.split(", lowest")[0] for s in scores] == [
        "SugarCrepe, micro",
        "SugarCrepe, macro over 7 subsets",
        *(f"SugarCrepe, {subset}" for subset in SUBSETS),
    ]


def test_what_is_not_sugarcrepe_is_refused(tmp_path: Path) -> None:
    _image(tmp_path / "pictures" / f"{1:012d}.jpg")
    good = {
        "subset": "swap_obj",
        "filename": f"{1:012d}.jpg",
        "caption": "a",
        "negative_caption": "b",
    }
    for name, content, said in [
        ("a.json", {"0": good}, "not a list, and its name is not a subset"),
        ("a.json", [good | {"subset": "swap"}], "item 0: subset='swap'; expected one of add_att"),
        ("a.json", [good | {"negative_caption": ""}], "negative_caption=''"),
        ("a.json", ["text"], "subset=None"),
        ("swap_obj.json", {}, "no items"),
        ("swap_obj.json", {"0": {}}, "item 0: caption=None"),
    ]:
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(DataError, match=said):
            sugarcrepe_test(tmp_path / name, tmp_path / "pictures")
    with pytest.raises(DataError, match=r"has none of add_att"):
        sugarcrepe_test(tmp_path / "pictures", tmp_path / "pictures")
    with pytest.raises(DataError, match="is not a folder; expected the folder"):
        sugarcrepe_test(tmp_path / "a.json", tmp_path / "nowhere")
    with pytest.raises(DataError, match="expected the benchmark's file"):
        sugarcrepe_test(tmp_path / "none.json", tmp_path / "pictures")


def test_negclip_items_have_as_many_candidates_as_the_file_gives(tmp_path: Path) -> None:
    _image(tmp_path / "pictures" / f"{474:012d}.jpg")
    good = {
        "image_id": 474,
        "caption": "a boy on grass",
        "negatives": ["grass on a boy", "a grass on boy"],
    }
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps([good, good | {"negatives": ["grass on a boy"]}]))
    test = negclip_test(file, tmp_path / "pictures")
    assert [len(c.captions) for c in test.choices] == [3, 2]
    [score] = choice_scores(
        test, answer_choices(open_made(), test, how=Asking(workers=1)), "c", "private"
    )
    assert score.chance == pytest.approx((1 / 3 + 1 / 2) / 2)
    for entry, said in [
        (good | {"negatives": []}, "negatives="),
        (good | {"image_id": "474"}, "image_id='474'"),
        ({}, "caption=None"),
    ]:
        file.write_text(json.dumps([entry]))
        with pytest.raises(DataError, match=said):
            negclip_test(file, tmp_path / "pictures")


def test_the_real_files_on_coco_mini() -> None:
    if not COCO.exists():
        pytest.skip("no ../shared/data/coco_mini")
    test = sugarcrepe_test(
        COCO / "annotations" / "sugarcrepe.json", COCO / "images", visibility="public"
    )
    assert (
        len(test.choices) == 339
        and len(test.images) == 64
        and len({c.group for c in test.choices}) == 7
    )
    pairs = negclip_test(
        COCO / "annotations" / "negclip_pairs.json", COCO / "images", visibility="public"
    )
    assert len(pairs.choices) == 26
    right_N = answer_choices(open_made(), test)
    assert (right_N >= 0).all() and 0.2 < right_N.mean() < 0.8
