"""What lies beside the data is not data: it is left out with a count, read right, or refused with a
command that reads it.
"""

import io
import json
import re
import shlex
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dpvision.cli import main
from dpvision.data.image_files import find_images
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_source
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import open_source
from dpvision.encoders.embeddings import write_embeddings
from dpvision.errors import DataError

from .image_files import js, png, write_folder, write_tar


def refused(source, **options) -> list[str]:
    """Return the sources of the commands in the refusal; each imports as printed."""
    store = source.parent / "refused"
    with pytest.raises(DataError) as error:
        import_source(source, store, public=True, **options)
    assert not store.exists()
    places = []
    for n, command in enumerate(
        re.findall(r"dpvision data import [^;]*? STORE\d*", str(error.value))
    ):
        words = shlex.split(command)
        if words[3] != "DIR":
            assert main(
                [*words[1:-1], str(source.parent / f"by_command_{len(places)}_{n}"), "--public"]
            ) in (0, None), command
            places.append(words[3])
    return places


# --- hidden files and thumbnails
# --------------------------------------------------------------------------------------------------

HIDDEN = [
    "alice/@eaDir/1.png/THUMB.png",
    "alice/.thumbnails/1.png",
    "__MACOSX/alice/._1.png",
    ".ipynb_checkpoints/1-checkpoint.png",
    "alice/.2.png",
]


def test_hidden_folders_make_neither_persons_nor_classes_nor_records(tmp_path):
    """B04, B12."""
    source = write_folder(
        tmp_path / "src",
        {"alice/1.png": png(1), "bob/1.png": png(2)}
        | {n: png(3 + i) for i, n in enumerate(HIDDEN)},
    )
    store = import_source(source, tmp_path / "s", public=True)
    assert store.label_names == ["alice", "bob"] and store.num_records == 2
    assert store.import_summary()["left_out"] == {"hidden or thumbnail": len(HIDDEN)}
    listed = [
        json.loads(line)["key"]
        for line in (store.path / "confidential" / "left_out.jsonl").read_text().splitlines()
    ]
    assert sorted(listed) == sorted(HIDDEN)
    people = import_source(
        source,
        tmp_path / "p",
        people=PersonRule("parent"),
        labels=LabelRule(unknown_classes="unlabelled"),
    )
    assert len(set(people.index["unit"].tolist())) == 2


def test_hidden_members_of_a_tar_are_left_out(tmp_path):
    tar = write_tar(
        tmp_path / "x.tar",
        {
            "1.png": png(1),
            "1.cls": b"0",
            "._1.png": b"\0\5\x16\7",
            "__MACOSX/._1.png": b"x",
            ".c/2.png": png(2),
        },
    )
    store = import_source(tar, tmp_path / "s", public=True)
    assert store.num_records == 1 and store.import_summary()["left_out"] == {
        "hidden or thumbnail": 3
    }


def test_packed_files_in_hidden_folders_are_passed_over(tmp_path):
    table = pa.table({"image": [png(1), png(2)], "label": [0, 1]})
    (tmp_path / "src" / ".cache").mkdir(parents=True)
    pq.write_table(table, tmp_path / "src" / "a.parquet")
    pq.write_table(
        pa.table({"image": [png(3)], "label": [1]}), tmp_path / "src" / ".cache" / "b.parquet"
    )
    assert import_source(tmp_path / "src", tmp_path / "s", public=True).num_records == 2


def test_a_source_below_a_hidden_folder_is_read(tmp_path):
    source = write_folder(tmp_path / ".data" / "src", {"cat/1.png": png(1), "dog/1.png": png(2)})
    assert import_source(source, tmp_path / "s", public=True).label_names == ["cat", "dog"]


# --- splits
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "commands"),
    [
        (["train/cat/1.png", "train/dog/1.png", "test/cat/2.png"], ["test", "train"]),  # B14
        (["Train/cat/1.png", "Validation/cat/2.png", "readme.png"], ["Train", "Validation"]),
        (["data/train/cat/1.png", "data/val/cat/2.png"], ["data/train", "data/val"]),
        (["train/cat/1.png", "train/dog/1.png"], ["train"]),
        (["train/1.png", "test/2.png", "extra/3.png"], ["test", "train"]),
    ],
)
def test_folders_that_are_splits_are_refused(tmp_path, files, commands):
    source = write_folder(tmp_path / "a source", {name: png(i) for i, name in enumerate(files)})
    assert refused(source) == [str(source / name) for name in commands]


def test_one_class_may_have_the_name_of_a_split(tmp_path):
    source = write_folder(
        tmp_path / "src",
        {f"{name}/1.png": png(i) for i, name in enumerate(("bus", "car", "train"))},
    )
    assert import_source(source, tmp_path / "s", public=True).label_names == ["bus", "car", "train"]


def test_a_table_at_the_source_may_name_files_of_splits(tmp_path):
    files = {
        "train/1.png": png(1),
        "test/2.png": png(2),
        "metadata.csv": b"file_name,text\ntrain/1.png,a cat\ntest/2.png,a dog\n",
    }
    store = import_source(write_folder(tmp_path / "src", files), tmp_path / "s", public=True)
    assert [store.captions(i) for i in range(2)] == [
        ("a dog",),
        ("a cat",),
    ] and store.label_names is None


@pytest.mark.parametrize(
    ("names", "commands"),
    [
        (
            ["train-00000-of-00001", "test-00000-of-00001"],
            ["test-00000-of-00001.parquet", "train-00000-of-00001.parquet"],
        ),
        (["train-0", "train-1", "validation-0"], ["train-*.parquet", "validation-0.parquet"]),
        (["a_train", "b_train", "a_test"], ["*train*.parquet", "a_test.parquet"]),
        (["train/0", "train/1", "test/0", "test/1"], ["test", "train"]),
    ],
)
def test_parquet_files_of_several_splits_are_refused(tmp_path, names, commands):
    source = tmp_path / "a source"
    for i, name in enumerate(names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"image": [png(i)], "label": [0]}), source / f"{name}.parquet")
    assert sorted(refused(source)) == sorted(str(source / name) for name in commands)
    if "/" not in names[0]:
        assert refused(source / "*.parquet")


def test_tars_of_several_splits_are_refused(tmp_path):
    for i, name in enumerate(("train-0", "train-1", "val-0")):
        (tmp_path / "src").mkdir(exist_ok=True)
        write_tar(tmp_path / "src" / f"{name}.tar", {f"{i}.png": png(i), f"{i}.cls": b"0"})
    assert refused(tmp_path / "src") == [
        str(tmp_path / "src" / "train-*.tar"),
        str(tmp_path / "src" / "val-0.tar"),
    ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train/cat/1.png": png(1), "test/cat/2.png": png(2)}, ["test", "train"]),
        ({"train-0.tar": b"", "train-1.tar": b"", "val-0.tar": b""}, ["train-*.tar", "val-0.tar"]),
        ({"images/1.png": png(1), "masks/1.png": png(2)}, ["images"]),
    ],
    ids=["folders", "tars", "masks"],
)
def test_embed_and_caption_refuse_splits_and_masks_as_the_import_does(tmp_path, files, expected):
    """They name the part to give; the features or captions of all parts would lie in one file."""
    source = write_folder(tmp_path / "src", files)
    with pytest.raises(DataError) as refusal:
        open_source(source, for_import=False)
    said = str(refusal.value)
    parts = (
        re.split(r"Give one of them: |Give the images: ", said)[1]
        .removesuffix(".")
        .partition("; for")[0]
        .split(", ")
    )
    assert (
        parts == [shlex.quote(str(source / part)) for part in expected]
        and "data import" not in said
    )
    for run in (
        lambda: write_embeddings("hog", source, tmp_path / "confidential" / "x.npz"),
        lambda: find_images([source]),
    ):
        with pytest.raises(DataError, match="Give "):
            run()


# --- tables
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl"])
@pytest.mark.parametrize("folder", ["train", "cats"])
def test_a_table_below_the_source_is_refused_by_name(tmp_path, folder, table):
    """B16. The command in the refusal reads it."""
    row = (
        b"file_name,text\n1.png,a cat\n"
        if table.endswith("csv")
        else js(file_name="1.png", text="a cat")
    )
    source = write_folder(tmp_path / "src", {f"{folder}/1.png": png(1), f"{folder}/{table}": row})
    with pytest.raises(DataError, match=f"{folder}/{table}: a table below the source"):
        import_source(source, tmp_path / "s", public=True)
    assert refused(source) == [str(source / folder)]
    store = import_source(source / folder, tmp_path / "s", public=True)
    assert store.captions(0) == ("a cat",)


# --- masks
# --------------------------------------------------------------------------------------------------


def test_masks_beside_images_are_left_out_by_name(tmp_path):
    files = {
        "benign/b (1).png": png(1),
        "benign/b (1)_mask.png": png(2),
        "benign/b (1)_mask_1.png": png(3),
        "normal/n.jpg": png(4),
        "normal/n-seg.png": png(5),
        "normal/face_mask.png": png(6),
    }
    store = import_source(write_folder(tmp_path / "src", files), tmp_path / "s", public=True)
    assert store.num_records == 3 and store.import_summary()["left_out"] == {
        "mask of another image": 3
    }
    tar = write_tar(
        tmp_path / "x.tar", {"a.png": png(1), "a_mask.png": png(2), "b_mask.png": png(3)}
    )
    store = import_source(tar, tmp_path / "t", public=True)
    assert store.num_records == 2 and store.import_summary()["left_out"] == {
        "mask of another image": 1
    }


@pytest.mark.parametrize(
    "names", [("images", "masks"), ("JPEGImages", "SegmentationClass"), ("part/img", "part/labels")]
)
def test_a_folder_of_masks_beside_images_is_no_class(tmp_path, names):
    source = write_folder(
        tmp_path / "src", {f"{name}/1.png": png(i) for i, name in enumerate(names)}
    )
    assert refused(source) == [str(source / names[0])]
    with pytest.raises(
        DataError, match=r"dpvision evaluate segmentation ENCODER --train .* --train-masks"
    ):
        import_source(source, tmp_path / "s", public=True)


# --- tars
# --------------------------------------------------------------------------------------------------


def test_links_in_a_tar_are_read_or_listed(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in (
            ("a.png", png(1)),
            ("a.json", js(captions=["one"])),
            ("b.json", js(captions=["two"])),
            ("c.json", js(captions=["three"])),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, kind, target in (
            ("b.png", tarfile.SYMTYPE, "./a.png"),
            ("c.png", tarfile.LNKTYPE, "a.png"),
            ("d.png", tarfile.SYMTYPE, "none.png"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    store = import_source(path, tmp_path / "s", public=True)
    assert store.num_records == 1 and set(store.captions(0)) == {
        "one",
        "two",
        "three",
    }  # one image under three names
    assert store.import_summary()["left_out"] == {"link without its file": 1}


def test_a_label_that_is_a_broken_link_is_not_lost_quietly(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"a.png": png(1), "a.cls": b"0", "b.png": png(2)})
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("b.cls")
        info.type, info.linkname = tarfile.SYMTYPE, "none.cls"
        tar.addfile(info)
    store = import_source(path, tmp_path / "s", public=True)
    assert store.num_records == 1 and store.import_summary()["left_out"] == {
        "link without its file": 1
    }


CLASSES = {"cat/1.png": png(1), "cat/2.png": png(2), "dog/1.png": png(3)}


def test_a_plain_tar_of_class_folders_is_refused_or_read_by_its_parent(tmp_path):
    tar = write_tar(
        tmp_path / "x.tar", {f"./photos/{name}": data for name, data in CLASSES.items()}
    )
    with pytest.raises(DataError, match=r"--label-from parent.*tar -xf"):
        import_source(tar, tmp_path / "s", public=True)
    store = import_source(tar, tmp_path / "s", public=True, labels=LabelRule("parent"))
    assert [store.label_names[i] for i in store.labels] == ["cat", "cat", "dog"]
    people = import_source(tar, tmp_path / "p", people=PersonRule("parent"))
    assert len(set(people.index["unit"].tolist())) == 2
    (tmp_path / "d").mkdir()
    for name in ("cat", "dog"):  # a tar for each class
        write_tar(
            tmp_path / "d" / f"{name}.tar",
            {n: data for n, data in CLASSES.items() if n.startswith(name)},
        )
    with pytest.raises(DataError, match="--label-from parent"):
        import_source(tmp_path / "d", tmp_path / "e", public=True)


def test_a_tar_with_labels_may_have_folders_but_not_splits(tmp_path):
    labelled = {
        name: data
        for i, (n, d) in enumerate(CLASSES.items())
        for name, data in ((n, d), (n.replace("png", "cls"), b"%d" % i))
    }
    assert import_source(
        write_tar(tmp_path / "x.tar", labelled), tmp_path / "s", public=True
    ).labels.tolist() == [0, 1, 2]
    splits = {
        name.replace("cat", "train").replace("dog", "test"): data for name, data in labelled.items()
    }
    with pytest.raises(DataError, match="folders of several splits, test, train"):
        import_source(write_tar(tmp_path / "y.tar", splits), tmp_path / "t", public=True)


def test_tars_in_subfolders_are_read(tmp_path):
    for i in range(2):
        (tmp_path / "src" / f"part{i}").mkdir(parents=True)
        write_tar(tmp_path / "src" / f"part{i}" / "x.tar", {f"{i}.png": png(i), f"{i}.cls": b"0"})
    assert import_source(tmp_path / "src", tmp_path / "s", public=True).num_records == 2


# --- columns
# --------------------------------------------------------------------------------------------------


def parquet(path, metadata=None, **columns):
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata or {}), path)
    return path


def features(**kinds) -> dict[str, str]:
    return {
        "huggingface": json.dumps(
            {"info": {"features": {name: {"_type": kind} for name, kind in kinds.items()}}}
        )
    }


def pixels(store, row: int) -> list[int]:
    return np.asarray(Image.open(io.BytesIO(store.read(row))).convert("RGB"))[0, 0].tolist()


@pytest.mark.parametrize(
    ("columns", "metadata", "right"),
    [
        ({"hash": [b"0123", b"4567"], "photo": [png(1), png(2)]}, None, "photo"),
        ({"mask": [png(3), png(4)], "image": [png(1), png(2)]}, None, "image"),
        (
            {"thumb": [png(3), png(4)], "photo": [png(1), png(2)]},
            features(photo="Image", thumb="Value"),
            "photo",
        ),
    ],
)
def test_the_column_of_images_is_the_one_that_holds_them(tmp_path, columns, metadata, right):
    store = import_source(
        parquet(tmp_path / "x.parquet", metadata, **columns), tmp_path / "s", public=True
    )
    assert [store.read(i) for i in range(2)] == columns[right]
    others = [name for name in columns if name not in (right, "hash")]
    assert store.import_summary().get("image_columns_not_read", 0) == len(others)


def test_two_columns_of_images_without_a_rule_are_refused(tmp_path):
    source = parquet(tmp_path / "x.parquet", front=[png(1)], side=[png(2)])
    with pytest.raises(
        DataError,
        match=r"columns front, side hold bytes, 2 of them images.*Rename the right one to image",
    ):
        import_source(source, tmp_path / "s", public=True)
