"""Sources as people have them: what would lose, mislabel or divide images silently is read right,
counted or refused.
"""

import json
import os
import re

import numpy as np
import pytest
from PIL import Image

from dpvision.cli import main
from dpvision.data.decode import FORMATS, HEAD_BYTES, BadImage, decode, may_be_image
from dpvision.data.importer import import_samples, import_source
from dpvision.data.overlap import write_without
from dpvision.data.person_names import PersonRule, person_name
from dpvision.data.sources import IMAGE_EXTENSIONS, Sample
from dpvision.data.split import split_store
from dpvision.data.tarindex import TarWriter
from dpvision.data.tokenizer import store_captions
from dpvision.errors import ConfigError, DataError, PrivacyError

from .image_files import js, png, write_folder, write_tar
from .test_importer import by_key, parquet, structs

# --- persons
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "same",
    [
        (7, 7.0, "7", " 7 "),
        ("Zoë", "Zoe\u0308"),
        (None, "", "  ", float("nan"), "nan", "NaN", "null", "None", "<NA>", -1, -1.0, "-1"),
    ],
)
def test_one_person_has_one_name(same):
    assert len({person_name(value, "patient", "1.png") for value in same}) == 1


def test_different_persons_have_different_names():
    values = [7, 70, 0.0, -7, "07", "a", "A", "True", "NA", "-"]
    assert len({person_name(value, "patient", "1.png") for value in values}) == len(values)


@pytest.mark.parametrize("value", [["a", "b"], {"id": 1}, 7.5, True, b"a", float("inf")])
def test_what_names_no_single_person_is_refused(value):
    with pytest.raises(DataError, match=r"--unit-from patient: .* in 1\.png"):
        person_name(value, "patient", "1.png")


def test_a_person_is_one_unit_over_parquet_files_of_two_types(tmp_path):
    parquet(tmp_path / "src" / "0.parquet", {"image": structs(png(0), png(1)), "patient": [7, 8]})
    parquet(
        tmp_path / "src" / "1.parquet",
        {"image": structs(png(2), png(3), png(4)), "patient": [7.0, 8.0, None]},
    )
    store = import_source(
        tmp_path / "src", tmp_path / "s", people=PersonRule("patient", unmatched="own-person")
    )
    assert (
        len(set(store.index["unit"].tolist()) - {-1}) == 2 and len(store.eligible_rows(1, 0)) == 3
    )


# --- parquet
# --------------------------------------------------------------------------------------------------


def test_parquet_files_with_unlike_columns_or_classes_are_refused(tmp_path):
    def classes(*names):
        return {"label": {"names": list(names), "_type": "ClassLabel"}}

    first = {"image": structs(png(0), png(1)), "label": [0, 1]}
    for name, second, features, words in (
        ("missing", {"image": structs(png(2))}, None, "expected those of"),
        ("more", {**first, "caption": ["a", "b"]}, classes("cat", "dog"), "expected those of"),
        (
            "order",
            {"image": structs(png(2)), "label": [0]},
            classes("dog", "cat"),
            "class names unlike",
        ),
        ("unnamed", {"image": structs(png(2)), "label": [0]}, None, "class names unlike"),
    ):
        parquet(tmp_path / name / "0.parquet", first, classes("cat", "dog"))
        parquet(tmp_path / name / "1.parquet", second, features)
        with pytest.raises(DataError, match=words):
            import_source(tmp_path / name, tmp_path / "s", public=True)
    parquet(tmp_path / "same" / "0.parquet", first, classes("cat", "dog"))
    parquet(
        tmp_path / "same" / "1.parquet",
        {"image": structs(png(2)), "label": [1], "else": [3]},
        classes("cat", "dog"),
    )
    assert import_source(tmp_path / "same", tmp_path / "s", public=True).labels.tolist() == [
        0,
        1,
        1,
    ]


# --- tables
# --------------------------------------------------------------------------------------------------


def test_several_rows_of_an_image_join_their_captions(tmp_path):
    table = (
        "file_name,caption,label,patient,rater\n"
        "0.png,a red car,x,p1,5\n"
        "./0.png,a fast car,x,p1,6\n"
        "1.png,a tree,y,p2,5\n"
    )
    source = write_folder(
        tmp_path / "src", {"0.png": png(0), "1.png": png(1), "metadata.csv": table.encode()}
    )
    store = import_source(source, tmp_path / "s", public=True, people=PersonRule("patient"))
    assert (
        by_key(store)["0.png"].captions == ("a red car", "a fast car")
        and store.import_summary()["table_rows_without_file"] == 0
    )


@pytest.mark.parametrize(
    ("column", "options"), [("label", {}), ("patient", {"people": PersonRule("patient")})]
)
def test_rows_of_an_image_that_disagree_are_refused(tmp_path, column, options):
    rows = {"label": ("x,p1", "y,p1"), "patient": ("x,p1", "x,p2")}[column]
    table = "file_name,label,patient\n" + "".join(f"0.png,{row}\n" for row in rows)
    source = write_folder(tmp_path / "src", {"0.png": png(0), "metadata.csv": table.encode()})
    with pytest.raises(DataError, match=f"0.png: rows that differ in '{column}'"):
        import_source(source, tmp_path / "s", public=True, **options)


def test_rows_that_match_no_file_are_counted_and_a_table_that_matches_none_is_refused(tmp_path):
    table = "file_name,label\n0.png,x\n2.png,x\n"
    source = write_folder(
        tmp_path / "src", {"0.png": png(0), "1.png": png(1), "metadata.csv": table.encode()}
    )
    assert (
        import_source(source, tmp_path / "s", public=True).import_summary()[
            "table_rows_without_file"
        ]
        == 1
    )
    (source / "metadata.csv").write_text("file_name,label\nsrc/0.png,x\n")
    with pytest.raises(
        DataError, match=r"no file_name of its table is a file there, for example 'src/0\.png'"
    ):
        import_source(source, tmp_path / "t", public=True)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            "0.png,Knee, left,p1\n1.png,Knee,p1\n",
            "line 2: cells=4; expected 3",
        ),  # an unquoted comma: the person would be " left"
        ("0.png,Knee,p1\n\n1.png,Knee\n", "line 4: cells=2; expected 3"),
        (
            '0.png,"Knee,p1\n1.png,Knee,p1\n',
            "line 2: unexpected end of data",
        ),  # the open quote would swallow the second row
        ('0.png,Knee,p1\n1.png,"Knee" left,p1\n', "line 3: ',' expected after '\"'"),
    ],
)
def test_rows_that_would_shift_or_swallow_the_persons_are_refused(tmp_path, rows, words):
    table = "file_name,caption,patient\n" + rows
    source = write_folder(
        tmp_path / "src", {"0.png": png(0), "1.png": png(1), "metadata.csv": table.encode()}
    )
    with pytest.raises(DataError, match=f"metadata.csv, {re.escape(words)}"):
        import_source(source, tmp_path / "s", people=PersonRule("patient"))


def test_two_columns_of_persons_are_refused_and_unnamed_columns_are_not(tmp_path):
    files = {"0.png": png(0), "1.png": png(1)}
    table = b"file_name,patient, patient\n0.png,p1,q1\n1.png,p1,q2\n"
    with pytest.raises(DataError, match="two columns 'patient'; expected one"):
        import_source(
            write_folder(tmp_path / "two", files | {"metadata.csv": table}),
            tmp_path / "s",
            people=PersonRule("patient"),
        )
    table = b',,file_name, patient\r\n0,x,0.png,p1\r\n1,"two\r\nlines, a ""quote""",1.png,p1\r\n'
    store = import_source(
        write_folder(tmp_path / "unnamed", files | {"metadata.csv": table}),
        tmp_path / "t",
        people=PersonRule("patient"),
    )
    assert store.record(0).unit == store.record(1).unit is not None


# --- tars
# --------------------------------------------------------------------------------------------------


def pairs_of(numbers):
    return {
        name: data
        for i in numbers
        for name, data in ((f"{i}.png", png(i)), (f"{i}.json", js(caption=f"image {i}")))
    }


def test_tars_that_go_on_after_their_end_are_refused(tmp_path):
    whole = write_tar(tmp_path / "whole.tar", pairs_of(range(8)))
    data, other = (
        whole.read_bytes(),
        write_tar(tmp_path / "other.tar", pairs_of(range(8, 12))).read_bytes(),
    )
    for name, damaged in (
        ("appended", data + other),
        ("broken off", data[: len(data) // 2] + bytes(len(data) - len(data) // 2 + (2 << 20))),
        ("zeros", data + bytes(2 << 20)),
    ):
        path = tmp_path / f"{name}.tar"
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"bytes after its end|damaged|ends inside"):
            import_source(path, tmp_path / "s")
    whole.write_bytes(data + bytes(100 << 10))  # tar --blocking-factor 200
    assert import_source(whole, tmp_path / "s").num_records == 8


def test_two_images_of_a_name_in_a_tar(tmp_path):
    tar = write_tar(
        tmp_path / "t.tar",
        {"1.jpg": png(1), "1.png": png(2), "1.cls": b"0", "2.png": png(3), "2.cls": b"1"},
    )
    store = import_source(tar, tmp_path / "s", public=True)
    assert store.labels.tolist() == [0, 1] and store.import_summary()["left_out"] == {
        "second image of a name": 1
    }
    double = tmp_path / "double.tar"
    with double.open("wb") as file:
        writer = TarWriter(file)
        writer.add("1.png", png(1))
        writer.add("1.png", png(2))
        writer.finish()
    with pytest.raises(DataError, match=r"two members 1\.png"):
        import_source(double, tmp_path / "u", public=True)


# --- folders
# --------------------------------------------------------------------------------------------------


def test_links_to_folders_are_followed_and_cycles_refused(tmp_path):
    write_folder(tmp_path / "elsewhere", {"1.png": png(1), "2.png": png(2)})
    source = write_folder(tmp_path / "src", {"cat/0.png": png(0)})
    (source / "dog").symlink_to(tmp_path / "elsewhere")
    store = import_source(source, tmp_path / "s", public=True)
    assert {k: r.labels for k, r in by_key(store).items()} == {
        "cat/0.png": (0,),
        "dog/1.png": (1,),
        "dog/2.png": (1,),
    }
    (source / "cat" / "again").symlink_to(source)
    with pytest.raises(DataError, match="leads back"):
        import_source(source, tmp_path / "t", public=True)


@pytest.mark.parametrize("packed", ["sample.tar", "deep/sample.parquet"])
def test_a_tar_or_parquet_file_among_images_does_not_replace_them(tmp_path, packed):
    source = write_folder(tmp_path / "src", {"cat/0.png": png(0), "dog/1.png": png(1)})
    (source / packed).parent.mkdir(exist_ok=True)
    if packed.endswith("tar"):
        write_tar(source / packed, pairs_of([5]))
    else:
        parquet(source / packed, {"image": structs(png(5))})
    with pytest.raises(DataError, match="beside the image"):
        import_source(source, tmp_path / "s", public=True)
    assert (
        import_source(
            f"{(source / packed).parent}/*{(source / packed).suffix}", tmp_path / "s", public=True
        ).num_records
        == 1
    )


def test_a_pattern_passes_over_folders(tmp_path):
    (tmp_path / "src" / "b.tar").mkdir(parents=True)
    write_tar(tmp_path / "src" / "a.tar", pairs_of([0]))
    assert import_source(tmp_path / "src" / "*.tar", tmp_path / "s").num_records == 1


def test_what_cannot_be_an_image_is_known_from_its_head(tmp_path):
    rng = np.random.default_rng(0)
    for name in FORMATS:
        if name in Image.SAVE:
            path = tmp_path / f"x.{name}"
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path, name)
            assert may_be_image(path.read_bytes()[:HEAD_BYTES]) and decode(
                path.read_bytes()
            ).shape == (16, 16, 3)
    others = [
        b"",
        b"P",
        b"\0" * 40,
        b"\0\0\0\x18ftypmp42" + bytes(30),
        b"\0\0\0\x14ftypqt  " + bytes(30),
        b"%PDF-1.7" + bytes(30),
    ]
    others += [b"plain text, long enough", *(rng.bytes(40) for _ in range(200))]
    for data in others:
        if not may_be_image(data[:HEAD_BYTES]):
            with pytest.raises(BadImage, match="not an image"):
                decode(data)
    assert not any(may_be_image(data[:HEAD_BYTES]) for data in others[:7])


def test_a_video_is_not_read_whole(tmp_path, monkeypatch):
    source = write_folder(tmp_path / "src", {"1.png": png(1)})
    with (source / "film.mov").open("wb") as film:
        film.write(b"\0\0\0\x14ftypqt  ")
        os.truncate(film.fileno(), 400 << 20)
    monkeypatch.setattr(
        "dpvision.data.import_part.decode",
        lambda data: decode(data) if len(data) < 1 << 20 else pytest.fail("read"),
    )
    assert import_source(source, tmp_path / "s", public=True).import_summary()["left_out"] == {
        "not an image": 1
    }


def test_chunks_are_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("dpvision.data.import_part._CHUNK_BYTES", 5000)
    held = []

    def samples():
        for i in range(40):
            held.append(len(png(i, 32)))
            yield Sample(f"{i}", png(i, 32), {})

    done = []
    import_samples(samples(), tmp_path / "s", workers=1, progress=done.append)
    per_chunk = np.diff([0, *done])
    assert per_chunk.max() <= -(-5000 // min(held)) and per_chunk.sum() == 40


@pytest.mark.parametrize("extension", ["heic", "heif", "jfif"])
def test_captions_beside_images_of_phones_and_browsers_are_found(tmp_path, extension):
    assert extension in IMAGE_EXTENSIONS
    source = write_folder(tmp_path / "src", {f"1.{extension}": png(1), "1.txt": b"a red car"})
    store = import_source(source, tmp_path / "s", public=True)
    assert store.num_records == 1 and store.record(0).captions == ("a red car",)


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_is_an_error(tmp_path, workers):
    with pytest.raises(ConfigError, match=f"workers={workers}"):
        import_source(
            write_folder(tmp_path / "src", {"1.png": png(1)}), tmp_path / "s", workers=workers
        )


# --- cleared stores
# --------------------------------------------------------------------------------------------------


def test_what_remains_of_a_cleared_store_is_as_private_as_its_twins(tmp_path, capsys):
    captioned = {
        name: data
        for i in range(40)
        for name, data in ((f"{i}.png", png(i)), (f"{i}.txt", b"a word"))
    }
    public = import_source(
        write_folder(tmp_path / "a", captioned), tmp_path / "public", public=True
    )
    private = import_source(
        write_folder(tmp_path / "b", {f"{i}.png": png(i) for i in range(3)}), tmp_path / "mine"
    )
    cleared = write_without(public, tmp_path / "cleared", np.arange(13), private, ["bytes"])
    assert next(store_captions(public)) == "a word"
    with pytest.raises(PrivacyError, match="cleared store"):
        store_captions(cleared)
    for half in split_store(cleared.path, tmp_path / "one", tmp_path / "two", 0.5):
        assert half.path.stat().st_mode & 0o077 == 0
    assert main(["data", "inspect", str(cleared.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["operator_only"] and found["declare"] == [{"dataset_size": 40}]
