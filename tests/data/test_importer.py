import errno
import json
import os
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpvision.data.captions import CaptionRule
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples, import_source
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.errors import DataError

from .image_files import SHARED, encode, js, noise, png, write_folder, write_tar


def by_key(store: Store) -> dict:
    return {(r := store.record(i)).key: r for i in range(store.num_records)}


def parquet(path, table: dict, features: dict | None = None):
    made = pa.table(table)
    if features is not None:
        made = made.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    path.parent.mkdir(exist_ok=True)
    pq.write_table(made, path)
    return path


def structs(*images):
    return [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(images)]


# --- kinds of source
# --------------------------------------------------------------------------------------------------


def test_class_folders_become_labels(tmp_path):
    source = write_folder(
        tmp_path / "src", {"dog/1.png": png(1), "cat/x/2.png": png(2), "cat/3.PNG": png(3)}
    )
    store = import_source(source, tmp_path / "s", public=True)
    assert {k: r.labels for k, r in by_key(store).items()} == {
        "cat/3.PNG": (0,),
        "cat/x/2.png": (0,),
        "dog/1.png": (1,),
    }
    assert store.label_names == ["cat", "dog"]
    assert store.visibility == "public"


def test_numbered_class_folders_are_sorted_as_numbers(tmp_path):
    source = write_folder(tmp_path / "src", {f"{i}/a.png": png(i) for i in range(12)})
    store = import_source(source, tmp_path / "s")
    assert {k: r.labels for k, r in by_key(store).items()} == {
        f"{i}/a.png": (i,) for i in range(12)
    }


def test_a_flat_folder_has_no_labels(tmp_path):
    store = import_source(
        write_folder(tmp_path / "src", {"1.png": png(1), "2.png": png(2)}), tmp_path / "s"
    )
    assert store.label_names is None
    assert store.labels.tolist() == [-1, -1]
    assert store.visibility == "private"


def test_parent_folder_as_unit_is_not_taken_for_a_class(tmp_path):
    files = {"ann/1.png": png(1), "ann/2.png": png(2), "bob/3.png": png(3)}
    store = import_source(
        write_folder(tmp_path / "src", files), tmp_path / "s", people=PersonRule("parent")
    )
    records = by_key(store)
    assert records["ann/1.png"].unit == records["ann/2.png"].unit != records["bob/3.png"].unit
    assert store.label_names is None
    deep = write_folder(
        tmp_path / "deep",
        {"ill/ann/1.png": png(1), "well/ann/2.png": png(2), "well/bob/3.png": png(3)},
    )
    store = import_source(
        deep, tmp_path / "d", people=PersonRule("parent"), labels=LabelRule(classes=("ill", "well"))
    )
    assert store.label_names == ["ill", "well"]
    assert len(set(store.index["unit"])) == 2


def test_a_table_beside_the_images_gives_units_labels_and_captions(tmp_path):
    source = write_folder(tmp_path / "src", {"a/1.png": png(1), "a/2.png": png(2), "3.png": png(3)})
    (source / "metadata.csv").write_text(
        'file_name,patient,finding,text\na/1.png,p1,yes,"one, two"\na/2.png,p1,no,\n'
    )
    store = import_source(
        source,
        tmp_path / "s",
        people=PersonRule("patient", "own-person"),
        labels=LabelRule("finding", classes=("no", "yes")),
    )
    records = by_key(store)
    assert records["a/1.png"].unit == records["a/2.png"].unit is not None
    assert records["3.png"].unit is None
    assert records["3.png"].labels == ()
    assert records["a/1.png"].captions == ("one, two",)
    assert store.label_names == ["no", "yes"]
    assert store.meta["unit_field"] == "patient"
    assert store.import_summary()["without_unit"] == 1


def test_parquet_with_structs_and_class_names(tmp_path):
    features = {"label": {"names": ["ant", "bee", "cat"]}}
    table = {"image": structs(png(1), png(2), png(3)), "label": [2, 0, -1], "who": ["x", "x", "y"]}
    parquet(tmp_path / "src" / "part.parquet", table, features)
    store = import_source(tmp_path / "src", tmp_path / "s", people=PersonRule("who"))
    records = by_key(store)
    assert store.label_names == ["ant", "bee", "cat"]
    assert [records[f"{i}.png"].labels for i in range(3)] == [(2,), (0,), ()]
    assert records["0.png"].unit == records["1.png"].unit != records["2.png"].unit


def test_parquet_with_plain_bytes_captions_and_another_label_column(tmp_path):
    table = {
        "id": [7, 8, 9],
        "jpg": [png(1), None, png(3)],
        "kind": ["b", "a", "a"],
        "caption": [["x", "y"], ["z"], ["w"]],
    }
    path = parquet(tmp_path / "src" / "p.parquet", table)
    store = import_source(path, tmp_path / "s", labels=LabelRule("kind", classes=("a", "b")))
    records = by_key(store)
    assert records["p-0"].captions == ("x", "y")
    assert records["p-0"].labels == (1,)
    assert store.import_summary()["left_out"] == {"no image": 1}


def test_webdataset_tars_are_indexed_where_they_are(tmp_path):
    members = {
        "a/one.jpg": encode(noise(1), "JPEG"),
        "a/one.json": js(captions=["c1", "c2"], who="ann", kind="x"),
        "two.png": png(2),
        "two.txt": b"c3\n",
        "two.cls": b"4",
        "three.seg.png": png(9),
        "three.webp": encode(noise(3), "WEBP"),
        "three.json": js(caption="c4", who="ann", kind="y"),
        "four.txt": b"no image",
        "five.png": png(5),
        "five.json": b"{",
    }
    write_folder(tmp_path / "src", {"README.md": b"notes"})
    tar = write_tar(tmp_path / "src" / "t-0.tar", members)
    before = tar.read_bytes()
    store = import_source(
        tmp_path / "src", tmp_path / "s", people=PersonRule("who", unmatched="own-person")
    )
    assert tar.read_bytes() == before
    assert store.shard_paths == [tar]
    assert not (store.path / "shards").exists()
    records = by_key(store)
    assert set(records) == {"a/one", "two", "three"}
    assert records["a/one"].captions == ("c1", "c2")
    assert records["a/one"].unit == records["three"].unit is not None
    assert (records["two"].captions, records["two"].labels, records["two"].unit) == (
        ("c3",),
        (4,),
        None,
    )
    assert records["three"].image == members["three.webp"]
    assert store.import_summary()["left_out"] == {"damaged text": 1, "no image": 1}


def test_a_pattern_chooses_among_tars(tmp_path):
    for i in range(3):
        write_tar(tmp_path / f"{'val' if i == 2 else 'train'}-{i}.tar", {f"{i}.png": png(i)})
    store = import_source(tmp_path / "train-*.tar", tmp_path / "s")
    assert set(by_key(store)) == {"0", "1"}


def test_written_shards_are_webdataset_and_import_again_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr("dpvision.data.shard_writer.SHARD_BYTES", 8000)
    samples = [
        Sample(
            f"odd name.{i}",
            png(i),
            {"label": f"c{i % 3}", "captions": [f"é {i}"], "who": f"u{i // 2}"},
        )
        for i in range(20)
    ]
    first = import_samples(samples, tmp_path / "a", people=PersonRule("who"), public=True)
    assert len(first.shard_paths) > 2
    for path in first.shard_paths:
        with tarfile.open(path) as tar:
            names = tar.getnames()
        assert all(
            a.removesuffix("png") == b.removesuffix("json")
            for a, b in zip(names[::2], names[1::2], strict=True)
        )
    again = import_source(
        tmp_path / "a" / "shards", tmp_path / "b", people=PersonRule("unit"), public=True
    )
    assert again.num_records == 20
    for i in range(20):
        assert again.read(i) == first.read(i) == png(i)
        assert again.captions(i) == first.captions(i) == (f"é {i}",)
    assert again.labels.tolist() == first.labels.tolist()
    assert len(np.unique(again.index["unit"])) == 10


# --- duplicates
# --------------------------------------------------------------------------------------------------


def test_identical_images_become_one_record_with_all_captions(tmp_path):
    same, other = png(1), png(2)
    fields = [
        {"caption": "a"},
        {"caption": "b"},
        {"caption": "c"},
        {"caption": "b"},
        {"caption": "d"},
    ]
    images = [same, other, same, same, other]
    store = import_samples(
        [Sample(str(i), x, f) for i, (x, f) in enumerate(zip(images, fields, strict=True))],
        tmp_path / "s",
    )
    assert store.num_records == 2
    assert [store.record(i).key for i in range(2)] == ["0", "1"]
    assert store.captions(0) == ("a", "c", "b")
    assert store.captions(1) == ("b", "d")
    assert store.import_summary()["duplicates_merged"] == 3


def test_an_image_of_two_units_stays_with_the_first_and_takes_nothing_from_the_other(tmp_path):
    samples = [
        Sample("0", png(1), {"caption": "mine", "who": "ann", "label": 1}),
        Sample("1", png(1), {"caption": "theirs", "who": "bob", "label": 2}),
    ]
    store = import_samples(samples, tmp_path / "s", people=PersonRule("who", shared_images="first"))
    assert store.captions(0) == ("mine",)
    assert store.labels.tolist() == [1]
    summary = store.import_summary()
    assert (summary["unit_conflicts"], summary["label_conflicts"], summary["records"]) == (1, 1, 1)


# --- what is left out
# --------------------------------------------------------------------------------------------------


def test_bad_images_are_counted_by_reason_and_named_only_under_confidential(tmp_path):
    files = {
        "good.png": png(1),
        "secret-name.txt": b"hello",
        "cut-secret.png": png(2, 99, 99)[:-900],
        "long-secret.png": encode(np.zeros((1, 101, 3), np.uint8)),
    }
    source = write_folder(tmp_path / "src", files)
    os.mkfifo(source / "pipe-secret")
    store = import_source(source, tmp_path / "s")
    summary = store.import_summary()
    assert summary["left_out"] == {"damaged": 1, "not a file": 1, "not an image": 1, "oversized": 1}
    assert (summary["seen"], summary["records"]) == (5, 1)
    named = {
        json.loads(line)["key"]
        for line in (store.path / "confidential" / "left_out.jsonl").read_text().splitlines()
    }
    assert named == {"secret-name.txt", "cut-secret.png", "long-secret.png", "pipe-secret"}
    for path in store.path.rglob("*"):
        if path.is_file() and path.parent.name != "confidential":
            assert b"secret" not in path.read_bytes()


def test_files_too_large_for_any_image_are_not_read(tmp_path):
    source = write_folder(tmp_path / "src", {"good.png": png(1)})
    with (source / "film.bin").open("wb") as file:
        file.truncate(1 << 30)
    assert import_source(source, tmp_path / "s").import_summary()["left_out"] == {"oversized": 1}


def test_a_private_store_is_closed_to_others(tmp_path):
    source = write_folder(tmp_path / "src", {"1.png": png(1)})
    assert import_source(source, tmp_path / "s").path.stat().st_mode & 0o077 == 0


# --- all or nothing
# --------------------------------------------------------------------------------------------------


def refused(match, source, target, **options):
    """The import fails with this message and leaves no trace beside the target."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(DataError, match=match):
        import_source(source, target, **options)
    assert sorted(target.parent.iterdir()) == before


def test_bad_sources_are_refused_and_leave_nothing(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    empty = write_folder(tmp_path / "empty", {})
    empty.mkdir()
    good = write_folder(tmp_path / "good", {"1.png": png(1)})
    refused("empty source", empty, out / "s")
    refused("nothing there", tmp_path / "absent", out / "s")
    refused("nothing there", tmp_path / "no-*.tar", out / "s")
    refused(
        "a .zip file; expected a folder",
        write_folder(tmp_path / "z", {"a.zip": b"PK"}) / "a.zip",
        out / "s",
    )
    refused(
        "none an image that can be read", write_folder(tmp_path / "t", {"a.txt": b"x"}), out / "s"
    )
    refused(
        r"field='patient'; expected one of \['label', 'parent'\]",
        good,
        out / "s",
        people=PersonRule("patient"),
    )
    refused(
        "expected a parquet file",
        write_folder(tmp_path / "p", {"a.parquet": b"PAR1 no"}),
        out / "s",
    )
    refused(
        "no uncompressed tar", write_folder(tmp_path / "w", {"a.tar": b"no tar" * 999}), out / "s"
    )
    refused(
        "expected one named file_name",
        write_folder(tmp_path / "m", {"1.png": png(1), "metadata.csv": b"a,b\n1,2\n"}),
        out / "s",
    )
    both = write_folder(tmp_path / "b", {"a.tar": b"", "b.parquet": b""})
    refused("expected one kind", both, out / "s")
    refused("lies inside the source", good, good / "s")


def test_fields_and_labels_that_do_not_fit_are_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    tar = write_tar(tmp_path / "a.tar", {"1.png": png(1), "1.json": js(who="x", label={"a": 1})})
    refused(
        r"--unit-from patient: no sample has it; expected one of \['kind', 'who'\]",
        write_tar(tmp_path / "b.tar", {"1.png": png(1), "1.json": js(who="x", kind=1)}),
        out / "s",
        people=PersonRule("patient"),
    )
    refused(r"label=\{'a': 1\}; expected one class, a name or a number from 0 on", tar, out / "s")
    mixed = write_tar(
        tmp_path / "c.tar", {"1.png": png(1), "1.cls": b"3", "2.png": png(2), "2.cls": b"cat"}
    )
    refused("both names and numbers", mixed, out / "s", public=True)
    table = {"image": structs(png(1)), "label": [3]}
    named = parquet(tmp_path / "q" / "q.parquet", table, {"label": {"names": ["only"]}})
    refused("label=3", named, out / "s")
    refused(
        r"columns \['label'\]", parquet(tmp_path / "r" / "r.parquet", {"label": [1]}), out / "s"
    )


def test_an_existing_store_is_never_touched(tmp_path):
    source = write_folder(tmp_path / "src", {"1.png": png(1)})
    for target in (tmp_path / "file", tmp_path / "folder"):
        target.mkdir() if target.name == "folder" else target.write_text("mine")
        refused("exists; expected a new folder", source, target)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    source = write_folder(tmp_path / "src", {f"{i}.png": png(i) for i in range(9)})
    out = tmp_path / "out"
    out.mkdir()

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    refused("No space left on device", source, out / "s")


def test_an_interrupt_leaves_nothing(tmp_path):
    def samples():
        yield Sample("0", png(0), {})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_samples(samples(), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_two_imports_of_one_source_share_no_id(tmp_path):
    source = write_folder(tmp_path / "src", {"1.png": png(1)})
    a, b = (import_source(source, tmp_path / name) for name in "ab")
    assert a.store_id != b.store_id
    assert a.index["id"][0] != b.index["id"][0]


@pytest.mark.parametrize("workers", [1, 3])
def test_order_does_not_depend_on_workers(tmp_path, workers):
    source = write_folder(tmp_path / "src", {f"{i:03}.png": png(i, 8, 8) for i in range(200)})
    seen = []
    store = import_source(source, tmp_path / "s", workers=workers, progress=seen.append)
    assert [store.record(i).key for i in range(200)] == [f"{i:03}.png" for i in range(200)]
    assert seen[-1] == 200
    assert seen == sorted(seen)


# --- captions
# --------------------------------------------------------------------------------------------------


def test_texts_beside_the_images_of_a_folder_are_captions(tmp_path):
    files = {
        "a/1.png": png(1),
        "a/1.txt": b" a dog \n",
        "a/2.PNG": png(2),
        "a/2.json": js(captions=["x", "y"], label="not a class"),
        "3.png": png(3),
        "3.txt": "ein H\xfcndchen".encode("utf-16"),
        "3.json": js(caption="z"),
        "4.png": png(4),
        "4.json": b"{",
        "5.png": png(5),
        "5.json": b"[1]",
        "notes.txt": b"beside nothing",
        "6.png": png(6),
        "metadata.csv": b"file_name,text\n6.png,table\n",
    }
    store = import_source(write_folder(tmp_path / "src", files), tmp_path / "s", public=True)
    captions = {key: record.captions for key, record in by_key(store).items()}
    assert captions == {
        "3.png": ("z", "ein H\xfcndchen"),
        "4.png": (),
        "5.png": (),
        "6.png": ("table",),
        "a/1.png": ("a dog",),
        "a/2.PNG": ("x", "y"),
    }
    assert store.label_names == ["a"]
    summary = store.import_summary()
    assert summary["left_out"] == {"not an image": 1}
    assert (summary["without_caption"], summary["captions"]) == (2, 6)
    assert summary["captions_dropped"] == {"no text": 1}


def test_captions_of_tars_are_cleaned_while_the_tar_stays(tmp_path):
    members = {
        "1.png": png(1),
        "1.json": js(captions=["a\x00 dog", " a  dog", "", "cats &amp; dogs"]),
        "2.png": png(2),
        "2.txt": "\xfcber".encode("cp1252"),
        "3.png": png(3),
        "3.txt": ("word " * 10_000).encode(),
        "4.png": png(4),
        "4.json": '\ufeff{"caption": "\u00e9"}'.encode("utf-16-le"),
        "5.png": png(5),
        "5.txt": b"x" * (1 << 21),
        "6.png": png(6),
        "6.json": b"[" * 100_000,
        "7.png": png(7),
        "7.json": '{"caption": "\xfc"}'.encode("cp1252"),
    }
    tar = write_tar(tmp_path / "t.tar", members)
    before = tar.read_bytes()
    store = import_source(tar, tmp_path / "s")
    assert tar.read_bytes() == before and store.shard_paths == [tar]
    captions = {key: record.captions for key, record in by_key(store).items()}
    assert captions.pop("3")[0] == " ".join(["word"] * 200)
    assert captions == {"1": ("a dog", "cats & dogs"), "2": (), "4": ("\xe9",), "5": ()}
    summary = store.import_summary()
    assert summary["captions_dropped"] == {"another encoding": 1, "empty": 1, "oversized": 1}
    assert (summary["captions"], summary["captions_cut"], summary["without_caption"]) == (4, 1, 2)
    assert summary["left_out"] == {"damaged text": 2}


def test_captions_of_parquet_may_be_bytes(tmp_path):
    table = {"caption": [b"one", "zw\xf6lf".encode("cp1252")], "image": [png(1), png(2)]}
    store = import_source(parquet(tmp_path / "src" / "p.parquet", table), tmp_path / "s")
    assert [store.captions(i) for i in range(2)] == [("one",), ()]
    assert store.import_summary()["captions_dropped"] == {"another encoding": 1}


def test_duplicates_with_a_caption_once_are_captioned(tmp_path):
    samples = [
        Sample("0", png(1), {}),
        Sample("1", png(1), {"caption": "a "}),
        Sample("2", png(1), {"caption": "a"}),
        Sample("3", png(2), {}),
    ]
    store = import_samples(samples, tmp_path / "s")
    assert store.captions(0) == ("a",)
    assert store.import_summary()["without_caption"] == 1
    assert store.has_captions(np.arange(2)).tolist() == [True, False]


def test_images_without_a_caption_can_be_left_out(tmp_path):
    samples = [
        Sample("0", png(1), {}),
        Sample("1", png(2), {"caption": "a"}),
        Sample("2", png(3), {"caption": " \x00"}),
    ]
    store = import_samples(samples, tmp_path / "s", captions=CaptionRule(require_captions=True))
    assert [store.record(i).key for i in range(store.num_records)] == ["1"]
    assert store.import_summary()["left_out"] == {"no caption": 2}
    with pytest.raises(DataError, match="images with captions"):
        import_samples(samples[:1], tmp_path / "t", captions=CaptionRule(require_captions=True))
    assert not (tmp_path / "t").exists()


def test_a_file_of_captions_for_a_folder_and_for_tars(tmp_path):
    table = tmp_path / "captions.csv"
    table.write_text(
        "image,caption\n1.png,one\na/2.png,two\n1.png,uno\n9.png,nobody\n9.png,niemand\n"
    )
    folder = write_folder(
        tmp_path / "src", {"1.png": png(1), "1.txt": b"beside", "a/2.png": png(2), "3.png": png(3)}
    )
    tar = write_tar(
        tmp_path / "t.tar",
        {"1.png": png(1), "1.txt": b"beside", "a/2.png": png(2), "3.png": png(3)},
    )
    expected = [("one", "uno", "beside"), ("two",), ()]
    for source in (folder, tar):
        store = import_source(
            source, tmp_path / f"s-{source.name}", captions=CaptionRule(table), public=True
        )
        records = by_key(store)
        assert sorted((r.captions for r in records.values()), reverse=True) == sorted(
            expected, reverse=True
        )
        summary = store.import_summary()
        assert (
            summary["captioned_pictures_missing"],
            summary["captions_for_no_picture"],
            summary["without_caption"],
        ) == (1, 2, 1)
    other = tmp_path / "other.csv"
    other.write_text("image,caption\nx.png,x\n")
    before = sorted(tmp_path.iterdir())
    refused(
        "none of its 1 images", folder, tmp_path / "n", captions=CaptionRule(other), public=True
    )
    refused("No such file", folder, tmp_path / "n", captions=CaptionRule(tmp_path / "absent.csv"))
    assert sorted(tmp_path.iterdir()) == before


# --- real sources
# --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.exists(), reason="the shared images are not beside this checkout")
@pytest.mark.parametrize(
    ("source", "options", "records", "merged", "classes"),
    [
        ("flickr8k/val-*.tar", {}, 1000, 0, 0),
        ("flickr8k/train-*.tar", {}, 5999, 1, 0),  # its README names the one duplicate pair
        ("pets_sample/train.parquet", {"people": PersonRule("species")}, 222, 0, 37),
        ("mednist/test.parquet", {}, 1800, 0, 6),
    ],
)
def test_real_sources(tmp_path, source, options, records, merged, classes):
    store = import_source(SHARED / source, tmp_path / "s", public=True, **options)
    summary = store.import_summary()
    assert summary["records"] + summary["duplicates_merged"] == records + merged
    if source.startswith("flickr8k"):
        assert (summary["records"], summary["duplicates_merged"]) == (records, merged)
        assert all(len(store.captions(i)) == 5 for i in range(0, 1000, 100))
    assert len(store.label_names or []) == classes


@pytest.mark.skipif(not SHARED.exists(), reason="the shared images are not beside this checkout")
def test_real_captions_come_through_as_they_are(tmp_path):
    """Flickr8k's first shard, in place: five captions each, changed in blanks and entities only;
    all COCO captions find their images.
    """
    shard = (SHARED / "flickr8k" / "train-000000.tar").resolve()
    store = import_source(shard, tmp_path / "s")
    assert (store.num_records, store.shard_paths) == (1000, [shard])
    with tarfile.open(shard) as tar:
        raw = {
            m.name.removesuffix(".json"): json.load(tar.extractfile(m))["captions"]
            for m in tar
            if m.name.endswith(".json")
        }
    for row in range(1000):
        record = store.record(row)
        assert record.captions == tuple(dict.fromkeys(" ".join(c.split()) for c in raw[record.key]))
    summary = store.import_summary()
    assert (summary["without_caption"], summary["captions_cut"], summary["captions_dropped"]) == (
        0,
        0,
        {},
    )
    coco = SHARED / "coco_mini"
    val = import_source(
        coco / "images" / "val2017",
        tmp_path / "v",
        captions=CaptionRule(coco / "annotations" / "captions_val2017.json"),
    )
    summary = val.import_summary()
    assert (
        summary["captions_for_no_picture"],
        summary["captions"],
        summary["without_caption"],
    ) == (0, 1001, val.num_records - 200)
