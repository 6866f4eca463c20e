"""Joins that miss are loud: rows and files by name, images and their persons, images of two
persons.
"""

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpvision.cli import main
from dpvision.data.captions import CaptionRule
from dpvision.data.importer import import_samples, import_source
from dpvision.data.open import open_store
from dpvision.data.people import People
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.data.table_files import join_names
from dpvision.errors import DataError
from dpvision.statement.history_phrases import SHARED_IMAGES, curated

from .image_files import encode, js, noise, png, write_folder, write_tar


def decomposed(name: str) -> str:
    return unicodedata.normalize("NFD", name)


def listed(store: Store, name: str) -> list[dict[str, Any]]:
    file = store.path / "confidential" / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def units(store: Store) -> dict[str, str | None]:
    return {record.key: record.unit for record in map(store.record, range(store.num_records))}


def table_folder(
    path: Path, files: list[str], rows: str, heading: str = "file_name,person"
) -> Path:
    write_folder(path, {name: png(i) for i, name in enumerate(files)})
    (path / "metadata.csv").write_text(f"{heading}\n{rows}", encoding="utf-8")
    return path


# --- names
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "files", "found"),
    [
        (["ü.png"], [decomposed("ü.png")], {"ü.png": decomposed("ü.png")}),
        (["Ü/Ä.PNG"], [decomposed("ü/ä.png")], {"Ü/Ä.PNG": decomposed("ü/ä.png")}),
        (["ü.png"], ["ü.png", decomposed("ü.png")], {"ü.png": "ü.png"}),
        (["A.png"], ["a.png", "A.png"], {"A.png": "A.png"}),
        (["A.PNG"], ["a.png", "A.png"], {}),
        (["A.png", "a.PNG"], ["a.png"], {}),
        (["a.png", "A.PNG"], ["a.png"], {"a.png": "a.png"}),
        (["a.png"], ["b.png"], {}),
    ],
)
def test_a_name_joins_in_one_form_and_without_case_only_if_unique(
    rows: list[str], files: list[str], found: dict[str, str]
) -> None:
    assert join_names(rows, files) == found
    for _ in range(5):
        random.shuffle(rows)
        random.shuffle(files)
        assert join_names(rows, files) == found, "the order does not matter"


@pytest.mark.parametrize("table_form", ["NFC", "NFD"])
@pytest.mark.parametrize("file_form", ["NFC", "NFD"])
def test_two_images_of_a_person_stay_one_person_in_either_unicode_form(
    tmp_path: Path, table_form: str, file_form: str
) -> None:
    names = ["ü1.png", "ü2.png", "c.png"]
    rows = "".join(
        f"{unicodedata.normalize(table_form, name)},{7 + (name == 'c.png')}\n" for name in names
    )  # type: ignore[arg-type]
    source = table_folder(
        tmp_path / "src", [unicodedata.normalize(file_form, name) for name in names], rows
    )  # type: ignore[arg-type]
    store = import_source(source, tmp_path / "s", people=PersonRule("person"))
    assert len(People.of(store)) == 2 and None not in units(store).values()


def test_rows_without_a_file_and_files_without_a_row_are_listed_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = table_folder(
        tmp_path / "src",
        ["0.png", "1.png", "Sub/2.PNG", "3.png"],
        "0.png,x\nsub/2.png,y\n8.png,z\n9.png,z\n",
    )
    assert main(["data", "import", str(source), str(tmp_path / "s"), "--public"]) == 0
    store = open_store(tmp_path / "s")
    said = capsys.readouterr().out
    assert str(store.path / "confidential" / "unmatched.jsonl") in said
    found = listed(store, "unmatched.jsonl")
    assert [line["row_without_file"] for line in found if "row_without_file" in line] == [
        "8.png",
        "9.png",
    ]
    assert [line["file_without_row"] for line in found if "file_without_row" in line] == [
        "1.png",
        "3.png",
    ]
    summary = store.import_summary()
    assert (summary["table_rows_without_file"], summary["files_without_table_row"]) == (2, 2)
    whole = import_source(table_folder(tmp_path / "whole", ["0.png"], "0.png,x\n"), tmp_path / "t")
    assert not (whole.path / "confidential" / "unmatched.jsonl").exists()


def test_names_of_a_caption_file_join_the_same_way(tmp_path: Path) -> None:
    source = write_folder(
        tmp_path / "src", {decomposed("ü.png"): png(0), "a.png": png(1), "none.png": png(2)}
    )
    table = tmp_path / "captions.csv"
    table.write_text("image,caption\nü.png,one\nA.PNG,two\nother.png,three\n", encoding="utf-8")
    store = import_source(source, tmp_path / "s", captions=CaptionRule(table))
    assert {record.key: record.captions for record in map(store.record, range(3))} == {
        decomposed("ü.png"): ("one",),
        "a.png": ("two",),
        "none.png": (),
    }
    assert [
        line.get("row_without_file") or line["file_without_row"]
        for line in listed(store, "unmatched.jsonl")
    ] == [
        "other.png",
        "none.png",
    ]


def test_images_of_a_tar_whose_names_have_dots_keep_what_lies_beside_them(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for i, name in enumerate(["IMG_2020.01.02", "IMG_2020.01.03", "x/scan.v1.final", "plain"]):
        members |= {
            f"{name}.png": png(i),
            f"{name}.json": js(person=f"p{i // 2}", caption=f"image {i}"),
        }
    store = import_source(
        write_tar(tmp_path / "a.tar", members), tmp_path / "s", people=PersonRule("person")
    )
    found = units(store)
    assert sorted(found) == ["IMG_2020.01.02", "IMG_2020.01.03", "plain", "x/scan.v1.final"]
    assert (
        found["IMG_2020.01.02"]
        == found["IMG_2020.01.03"]
        != found["plain"]
        == found["x/scan.v1.final"]
    )
    assert store.import_summary()["left_out"] == {} and store.captions(0) == ("image 0",)


# --- persons
# --------------------------------------------------------------------------------------------------


def write_people(
    path: Path, kind: str, people: list[str | None], images: list[bytes] | None = None
) -> tuple[Path, str]:
    """A source of one image for each person, None for an image without one; and the field of the
    persons.
    """
    images = images or [png(i) for i in range(len(people))]
    if kind == "table":
        source = write_folder(path, {f"{i}.png": image for i, image in enumerate(images)})
        rows = "".join(
            f"{i}.png,{person}\n" for i, person in enumerate(people) if person is not None
        )
        (path / "metadata.csv").write_text(f"file_name,person\n{rows}")
        return source, "person"
    if kind == "empty cell":
        source = write_folder(path, {f"{i}.png": image for i, image in enumerate(images)})
        (path / "metadata.csv").write_text(
            "file_name,person\n"
            + "".join(f"{i}.png,{person or ''}\n" for i, person in enumerate(people))
        )
        return source, "person"
    if kind == "parent":
        return write_folder(
            path, {f"{f'{p}/' if p else ''}{i}.png": images[i] for i, p in enumerate(people)}
        ), "parent"
    if kind == "parquet":
        path.mkdir()
        pq.write_table(pa.table({"image": images, "person": people}), path / "a.parquet")
        return path, "person"
    members = {}
    for i, person in enumerate(people):
        members |= {
            f"{i}.png": images[i],
            f"{i}.json": js(**({} if person is None else {"person": person})),
        }
    return write_tar(path.with_suffix(".tar"), members), "person"


PEOPLE = ["table", "empty cell", "parent", "parquet", "tar"]


@pytest.mark.parametrize("kind", PEOPLE)
def test_an_image_without_its_person_is_refused_unless_the_operator_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source, field = write_people(tmp_path / "src", kind, ["p1", "p1", "p2", None, None])
    argv = ["data", "import", str(source), str(tmp_path / "s"), "--unit-from", field]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert (
        "2 images without one" in said
        and "--unmatched drop" in said
        and "own-person" in said
        and not (tmp_path / "s").exists()
    )
    assert main([*argv[:3], str(tmp_path / "own"), *argv[4:], "--unmatched", "own-person"]) == 0
    own = open_store(tmp_path / "own")
    assert (
        own.num_records == 5
        and list(units(own).values()).count(None) == 2 == own.import_summary()["without_unit"]
    )
    assert main([*argv[:3], str(tmp_path / "less"), *argv[4:], "--unmatched", "drop"]) == 0
    less = open_store(tmp_path / "less")
    assert (
        less.num_records == 3
        and None not in units(less).values()
        and less.import_summary()["left_out"] == {"no person": 2}
    )
    assert (
        len([line for line in listed(less, "left_out.jsonl") if line["reason"] == "no person"]) == 2
    )


def test_damaged_files_and_other_files_need_no_person(tmp_path: Path) -> None:
    source, field = write_people(tmp_path / "src", "table", ["p1", "p2"])
    (source / "damaged.png").write_bytes(png(5)[:100])
    (source / "notes.txt").write_text("notes")
    assert import_source(source, tmp_path / "s", people=PersonRule(field)).num_records == 2


@pytest.mark.parametrize("kind", PEOPLE)
def test_images_of_two_persons_are_refused_with_both_before_others_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from dpvision.data import import_part, import_people

    images = [png(0), png(1), png(0), png(2), png(1)]
    source, field = write_people(tmp_path / "src", kind, ["p1", "p1", "p2", "p2", "p1"], images)
    decoded: list[bytes] = []
    real = import_people.decode
    monkeypatch.setattr(import_people, "decode", lambda data: decoded.append(data) or real(data))
    monkeypatch.setattr(
        import_part, "decode", lambda data: pytest.fail("decoded before the persons were checked")
    )
    with pytest.raises(
        DataError,
        match=r"1 files have the bytes of an image of another person \(.*0.* of p1 = .*2.* of p2\)",
    ):
        import_source(source, tmp_path / "s", people=PersonRule(field))
    assert decoded == [png(0)], "only the image in question"
    monkeypatch.undo()
    store = import_source(
        source, tmp_path / "first", people=PersonRule(field, shared_images="first")
    )
    assert store.num_records == 3 and store.meta["shared_images"] == 1
    (line,) = listed(store, "shared_images.jsonl")
    assert (
        (line["person"], line["other"]) == ("p1", "p2")
        and "0" in line["first"]
        and "2" in line["second"]
    )


def test_a_damaged_image_of_two_persons_is_left_out_as_damaged(tmp_path: Path) -> None:
    broken = encode(noise(7, 64, 64), "PNG")[:200]
    source, field = write_people(
        tmp_path / "src", "parent", ["p1", "p2", "p1", "p2"], [broken, broken, png(1), png(2)]
    )
    store = import_source(source, tmp_path / "s", people=PersonRule(field))
    assert store.num_records == 2 and sum(store.import_summary()["left_out"].values()) == 2


def test_the_choice_to_keep_one_travels_and_is_listed_as_not_covered(tmp_path: Path) -> None:
    images = [png(i) for i in range(40)]
    people = [f"p{i // 2}" for i in range(40)]
    samples = [
        Sample(str(i), image, {"person": person})
        for i, (image, person) in enumerate(zip(images, people, strict=True))
    ]
    twice = Sample("twice", png(0), {"person": "p7"})
    with pytest.raises(DataError, match=r"1 files have the bytes of .*0 of p0 = twice of p7"):
        import_samples([*samples, twice], tmp_path / "refused", people=PersonRule("person"))
    store = import_samples(
        [*samples, twice], tmp_path / "s", people=PersonRule("person", shared_images="first")
    )
    for one in (store, *split_store(store.path, tmp_path / "a", tmp_path / "b", 0.5)):
        assert one.meta["shared_images_kept"] == "first"
    entry = {"declared": None, "deduplicated": None}
    assert curated([{**entry, "shared_images_kept": "first"}]) == [SHARED_IMAGES]
    assert curated([entry]) == []
    clean = import_samples(
        samples, tmp_path / "clean", people=PersonRule("person", shared_images="first")
    )
    assert clean.meta["shared_images_kept"] == "first", (
        "the statement follows from the choice, not from the images"
    )


@pytest.mark.parametrize("option", [["--unmatched", "drop"], ["--shared-images", "first"]])
def test_choices_about_persons_need_persons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    source, _ = write_people(tmp_path / "src", "parent", ["p1"])
    assert main(["data", "import", str(source), str(tmp_path / "s"), *option]) == 2
    assert "without unit_from" in capsys.readouterr().err
    assert (
        main(
            [
                "data",
                "import",
                str(source),
                str(tmp_path / "s"),
                "--dataset",
                "cifar10",
                "--split",
                "test",
                *option,
            ]
        )
        == 2
    )
    assert "with --dataset, whose images have no persons" in capsys.readouterr().err
