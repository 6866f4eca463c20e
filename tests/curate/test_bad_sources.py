"""What is wrong with a source, a disk or a caption stops a curation in one sentence, or is counted;
nothing that was read is lost.
"""

import errno
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpvision.curate import kept, look
from dpvision.curate.passes import curate
from dpvision.curate.pipeline import Pipeline
from dpvision.data import import_part, import_work
from dpvision.data.decode import decode
from dpvision.errors import DataError

from ..data.dicom_files import dicom
from ..data.image_files import js, noise, png, write_folder, write_tar
from .doubles import DOUBLES, KEY, SETTINGS, content, write_tars

CAPTION = Pipeline((SETTINGS.caption,))
SIZE = Pipeline((SETTINGS.size,))


@pytest.fixture(autouse=True)
def one_key(monkeypatch):
    """The same key and id for all stores of a test."""
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
    monkeypatch.setattr("dpvision.data.importer.secrets.token_hex", lambda n: "ab" * n)


def test_an_unreadable_shard_in_the_middle_costs_no_other(tmp_path, monkeypatch):
    source = write_tars(tmp_path / "src", 4)
    oracle = content(curate(source, tmp_path / "one", DOUBLES, workers=1).path)
    whole = (source / "s2.tar").read_bytes()
    (source / "s2.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"s2\.tar.*2 files is kept.*the same command goes on"):
        curate(source, tmp_path / "store", DOUBLES, workers=1)
    (source / "s2.tar").write_bytes(whole)
    looked, real = [], import_work._do
    monkeypatch.setattr(
        import_work, "_do", lambda job: looked.append((job.kind, job.part.name[-6:])) or real(job)
    )
    made = curate(source, tmp_path / "store", DOUBLES, workers=1)
    assert [name for kind, name in looked if kind == "look"] == ["s2.tar", "s3.tar"]
    assert content(made.path) == oracle


@pytest.mark.parametrize("passes", ["look", "read"])
def test_a_shard_that_is_removed_in_a_pass_stops_it_and_costs_no_other(
    tmp_path, monkeypatch, passes
):
    source = write_tars(tmp_path / "src", 4)
    oracle = content(curate(source, tmp_path / "one", DOUBLES, workers=1).path)
    real, away = import_work._do, tmp_path / "away"

    def do(job):
        if job.kind == passes and job.part.name.endswith("s1.tar"):
            (source / "s2.tar").rename(away)
        return real(job)

    with monkeypatch.context() as patch:
        patch.setattr(import_work, "_do", do)
        with pytest.raises(DataError, match=r"s2\.tar.*No such file.*files is kept"):
            curate(source, tmp_path / "store", DOUBLES, workers=1)
    away.rename(source / "s2.tar")
    assert content(curate(source, tmp_path / "store", DOUBLES, workers=1).path) == oracle


@pytest.mark.parametrize("passes", ["look", "compared", "read"])
def test_a_full_disk_keeps_what_is_complete(tmp_path, monkeypatch, passes):
    source = write_tars(tmp_path / "src", 4)
    oracle = content(curate(source, tmp_path / "one", DOUBLES, workers=1).path)
    done = []

    def full(*args, real):
        done.append(1)
        if len(done) == (1 if passes == "compared" else 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    module, name = {
        "look": (look._Look, "finish"),
        "compared": (kept, "name_folder"),
        "read": (import_part, "write_run"),
    }[passes]
    with monkeypatch.context() as patch:
        real = getattr(module, name)
        patch.setattr(module, name, lambda *args: full(*args, real=real))
        num = 2 if passes == "look" else 4
        with pytest.raises(DataError, match=rf"No space left on device.*of {num} files is kept"):
            curate(source, tmp_path / "store", DOUBLES, workers=1)
    assert content(curate(source, tmp_path / "store", DOUBLES, workers=1).path) == oracle


def test_dicom_files_are_refused_and_none_passes_the_steps(tmp_path):
    folder = write_folder(tmp_path / "pacs", {"a.dcm": dicom(noise(1)[:, :, 0])})
    for source in (folder, folder / "a.dcm"):
        with pytest.raises(DataError, match=r"DICOM files; expected tars.*dpvision data import"):
            curate(source, tmp_path / "store", SIZE)
    rows = {"image": [dicom(noise(2)[:, :, 0]), png(3)]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    store = curate(tmp_path / "a.parquet", tmp_path / "store", SIZE, workers=1)
    assert [store.record(row).image for row in range(store.num_records)] == [png(3)]
    assert store.import_summary()["left_out"] == {"DICOM, which steps cannot read": 1}


def test_captions_of_other_encodings_are_read_or_counted(tmp_path):
    words = "zwei Wörter über München"
    texts = {
        "a": words.encode("utf-8-sig"),
        "b": words.encode("utf-16"),
        "c": words.encode("utf-32"),
        "d": words.encode("latin-1"),
    }
    members = {}
    for n, (name, data) in enumerate(texts.items()):
        members |= {f"{name}.png": png(n), f"{name}.txt": data}
    members |= {"e.png": png(9), "e.json": js(caption=words)[:-4] + b"\xff\xfe"}
    store = curate(write_tar(tmp_path / "a.tar", members), tmp_path / "store", CAPTION, workers=1)
    found = {store.record(row).key: store.record(row).captions for row in range(store.num_records)}
    assert found == {"a": (words,), "b": (words,), "c": (words,)}
    left = (store.path / "confidential/curation/left_out.jsonl").read_text()
    assert '"key": "d"' in left and "no caption" in left
    assert store.import_summary()["left_out"] == {"damaged text": 1}


def test_a_file_without_a_column_of_the_first_is_refused(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    captions = {"caption": ["two words"] * 2}
    pq.write_table(pa.table({"image": [png(1), png(2)], **captions}), folder / "a.parquet")
    pq.write_table(pa.table({"image": [png(3), png(4)]}), folder / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: columns \['image'\]; expected those of"):
        curate(folder, tmp_path / "store", CAPTION, workers=1)
    pq.write_table(pa.table(captions), folder / "a.parquet")
    with pytest.raises(DataError, match=r"expected one with image bytes"):
        curate(folder, tmp_path / "store", CAPTION, workers=1)


def test_images_that_no_step_could_read_are_left_out_by_the_import(tmp_path):
    source = write_tar(tmp_path / "a.tar", {"x.png": png(1), "y.png": png(2)[:60]})
    store = curate(source, tmp_path / "store", SIZE, workers=1)
    assert [store.record(row).key for row in range(store.num_records)] == ["x"]
    assert decode(store.record(0).image).shape == (20, 24, 3)
    assert sum(store.import_summary()["left_out"].values()) == 1
