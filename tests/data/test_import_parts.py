"""Import of a source of several files: by any number of processes, and after kills, the bytes of an
import by one process; records as a plain loop over the samples makes them.
"""

import errno
import json
import os
import random
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpvision import files
from dpvision.data import import_merge, import_part, import_work, importer
from dpvision.data.import_labels import LabelRule
from dpvision.data.import_part import ReadRule
from dpvision.data.importer import import_samples, import_source
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.data.rows import keyed_hash
from dpvision.data.sample import SourcePart
from dpvision.data.sorted_runs import ENTRY, Run, in_order, write_run
from dpvision.data.sources import open_source
from dpvision.data.store_writer import read_key
from dpvision.errors import DataError

from .image_files import js, png, write_folder, write_tar

KEY = bytes(range(32))
PEOPLE = PersonRule("who", "own-person", "first")
LABELS = LabelRule(classes=("a", "b", "c"), unknown_classes="unlabelled")
OPTIONS = {"people": PEOPLE, "labels": LABELS}


@pytest.fixture(autouse=True)
def one_key(monkeypatch):
    """The same key and id for all stores of a test, and a process wherever one may be started."""
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
    monkeypatch.setattr("dpvision.data.importer.secrets.token_hex", lambda n: "ab" * n)
    monkeypatch.setattr(import_work, "_WORTH_PROCESSES_BYTES", 0)


def records(seed: int, num: int) -> list[tuple[bytes, dict]]:
    """Images and fields, with repeats within and between calls, and damaged files."""
    rng = random.Random(seed)
    made = []
    for i in range(num):
        fields = {"captions": [f"c{rng.randrange(9)}" for _ in range(rng.randrange(3))]}
        fields |= {"who": rng.choice(["ann", "bob", "eve"])} if rng.random() < 0.8 else {}
        fields |= {"label": rng.choice("abcd")} if rng.random() < 0.8 else {}
        data = png(rng.choice([1000 * seed + i, rng.randrange(20)]), 8, 8)
        made.append((data[:50] if rng.random() < 0.1 else data, fields))
    return made


def write_tars(folder: Path, num: int = 5, each: int = 30) -> Path:
    folder.mkdir()
    for t in range(num):
        members = {}
        for i, (data, fields) in enumerate(records(t, each)):
            members |= {f"{i:03}.png": data, f"{i:03}.json": js(**fields)}
        write_tar(folder / f"s{t:02}.tar", members)
    return folder


def write_parquets(folder: Path) -> Path:
    folder.mkdir()
    for t in range(4):
        made = records(50 + t, 25)
        table = {"image": [data for data, _ in made]}
        for name in ("captions", "who", "label"):
            table[name] = [fields.get(name) for _, fields in made]
        pq.write_table(pa.table(table), folder / f"p{t}.parquet")
    return folder


SOURCES = {"tars": write_tars, "parquet": write_parquets}


def as_one_stream(source: Path, store: Path, **options) -> Path:
    """Import all samples as one stream, which knows nothing of files."""
    stream = open_source(source, unit_from="who")._replace(parts=())
    return import_samples(stream, store, **options).path


def content(store: Path) -> dict[str, bytes]:
    """The files of a store. Its marks have its place."""
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "ledger_marks.json"
    }


@pytest.fixture
def small(monkeypatch):
    """Blocks, runs and shards so small that all their edges are met."""
    for name, value in (
        ("shard_writer.SHARD_BYTES", 9000),
        ("shard_writer._COPIED_AT_ONCE", 4000),
        ("import_part._ROWS_IN_RUN", 7),
        ("import_merge._BLOCK_ROWS", 16),
        ("sorted_runs._IN_MEMORY", 13),
    ):
        monkeypatch.setattr(f"dpvision.data.{name}", value)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("workers", [1, 3])
def test_processes_change_no_byte_of_a_store(tmp_path, small, kind, workers):
    source = SOURCES[kind](tmp_path / "src")
    oracle = content(as_one_stream(source, tmp_path / "one", **OPTIONS))
    store = import_source(source, tmp_path / "many", workers=workers, **OPTIONS)
    made = content(store.path)
    assert made.keys() == oracle.keys()
    assert [name for name in made if made[name] != oracle[name]] == []
    assert [path.name for path in tmp_path.glob(".*")] == []
    for shard in store.shard_paths:
        with tarfile.open(shard) as tar:
            assert len(tar.getnames()) == len(set(tar.getnames()))


def test_processes_of_imports_and_merges_do_without_torch():
    """With it each took two seconds of a core and 300 MB."""
    code = (
        "import sys, dpvision.data.importer, dpvision.data.merge\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", SOURCES)
def test_records_are_those_of_a_plain_loop_over_the_samples(tmp_path, small, kind):
    source = SOURCES[kind](tmp_path / "src")
    expected: dict[bytes, list] = {}
    damaged = repeats = others = 0
    for sample in open_source(source, unit_from="who").samples:
        who, label = sample.fields.get("who"), sample.fields.get("label")
        if len(sample.image) == 50:
            damaged += 1
        elif sample.image not in expected:
            captions = dict.fromkeys(sample.fields["captions"])
            expected[sample.image] = [sample.key, who, captions, label]
        else:
            repeats += 1
            kept = expected[sample.image]
            others += kept[1] != who
            kept[2].update(dict.fromkeys(sample.fields["captions"]) if kept[1] == who else {})
    store = import_source(source, tmp_path / "s", **OPTIONS)
    assert store.num_records == len(expected)
    for row, (image, (key, who, captions, label)) in enumerate(expected.items()):
        found = store.record(row)
        assert (found.key, found.image, found.captions) == (key, image, tuple(captions))
        assert found.unit == (None if who is None else f"{keyed_hash(KEY, who.encode()):016x}")
        assert found.labels == (() if label in (None, "d") else ("abc".index(label),))
        assert found.id == keyed_hash(KEY, image)
    summary = store.import_summary()
    assert (summary["duplicates_merged"], summary["unit_conflicts"]) == (repeats, others)
    assert summary["left_out"] == {"damaged": damaged}
    lines = (store.path / "confidential" / "shared_images.jsonl").read_text().splitlines()
    assert len(lines) == others


def test_shared_images_are_refused_as_of_one_stream(tmp_path):
    source = write_tars(tmp_path / "src", 4, 8)
    rule = PersonRule("who", "own-person")
    with pytest.raises(DataError, match="of an image of another person") as one:
        as_one_stream(source, tmp_path / "one", people=rule, labels=LABELS)
    with pytest.raises(DataError, match="of an image of another person") as many:
        import_source(source, tmp_path / "many", people=rule, labels=LABELS, workers=2)
    assert str(many.value).partition(";")[0].split(" files ")[0] in str(one.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".many.importing", "src"]
    assert not parts(tmp_path / ".many.importing"), "no image was decoded yet"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_is_held_only_while_it_is_read(tmp_path, workers):
    """Memory does not grow with the number of files, but for what lists them."""
    files = open_source(write_tars(tmp_path / "src", 24, 2)).parts
    living, most = dict[int, object](), 0

    def made(at: int) -> SourcePart:
        nonlocal most
        held = replace(files[at])
        living[id(held)] = weakref.finalize(held, living.pop, id(held))
        most = max(most, len(living))
        return held

    rule = ReadRule(KEY, True, PersonRule(), LabelRule(), None, False, None)
    seen = []
    with import_work.work_folder(tmp_path / "store", {}) as work:
        parts = import_work.Each(len(files), made)
        found = import_work.read_parts("read", parts, work, rule, workers, None, seen.append)
        assert [part.about["seen"] for part in found] == [2] * 24
    assert seen == list(range(2, 50, 2))
    assert 1 <= most <= 4 * workers + 2


def test_after_a_refused_person_only_the_corrected_file_is_read_again(tmp_path):
    source, store = write_tars(tmp_path / "src", 3), tmp_path / "s"
    options = {"people": PersonRule("who", "refuse", "first"), "labels": LABELS, "workers": 1}
    for t in range(3):
        write_tar(
            source / f"s{t:02}.tar",
            {f"{i}.png": png(9 * t + i) for i in range(3)}
            | {f"{i}.json": js(who=f"p{i}") for i in range(3)},
        )
    good = (source / "s01.tar").read_bytes()
    write_tar(source / "s01.tar", {"0.png": png(9), "0.json": js(who="P-1"), "1.png": png(10)})
    for _ in range(2):
        with pytest.raises(DataError, match=r"1 images without one \(1\).*of 3 files is kept"):
            import_source(source, store, **options)
    (source / "s01.tar").write_bytes(good)
    done, real = [], import_work._do
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            import_work, "_do", lambda job: done.append((job.kind, job.part.path.name)) or real(job)
        )
        made = import_source(source, store, **options)
    assert done[0] == ("people", "s01.tar") and len(done) == 1 + 3
    oracle = as_one_stream(source, tmp_path / "one", **options)
    assert content(made.path) == content(oracle)


# --- stopped imports
# --------------------------------------------------------------------------------------------------


def start(source: Path, store: Path, **options) -> int:
    """Import in a process, and return its id."""
    pid = os.fork()
    if not pid:
        # Ignored where the tests were started in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            import_source(source, store, **options)
        finally:
            os._exit(1)
    return pid


def wait_for(condition, pid: int) -> None:
    end = time.monotonic() + 900
    while not condition():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the import ended before it was stopped"
        assert time.monotonic() < end
        time.sleep(0.01)


def parts(work: Path) -> dict[str, int]:
    """Complete parts, and when they were written."""
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in work.rglob(f"read-{16 * '?'}/part.json")
    }


@pytest.mark.parametrize(
    ("number", "kills"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGKILL, 3, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_import_goes_on_and_changes_no_byte(tmp_path, number, kills):
    source, store = write_tars(tmp_path / "src", 24, 150), tmp_path / "s"
    work, before = tmp_path / ".s.importing", dict[str, int]()
    for _ in range(kills):
        pid = start(source, store, workers=2, **OPTIONS)
        enough = len(before) + 3
        wait_for(lambda enough=enough: len(parts(work)) >= enough, pid)
        os.kill(pid, number)
        os.waitpid(pid, 0)
        killed = parts(work)
        assert before.items() <= killed.items(), "a complete part was read again"
        before = killed
    assert len(before) < 24, "killed too late to show anything"
    assert not store.exists()
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {"src", work.name}
    read = []
    real = import_work._do
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_work, "_do", lambda job: read.append(job.kind) or real(job))
        made = import_source(source, store, workers=1, **OPTIONS)
    assert read.count("read") <= 24 - len(before)
    assert content(made.path) == content(as_one_stream(source, tmp_path / "one", **OPTIONS))
    assert not work.exists()


def test_a_kill_while_the_store_is_written_costs_no_reading(tmp_path, monkeypatch):
    source, store = write_parquets(tmp_path / "src"), tmp_path / "s"
    with monkeypatch.context() as patch:
        patch.setattr(
            "dpvision.data.import_merge._write_index",
            lambda *args: os.kill(os.getpid(), signal.SIGKILL),
        )
        pid = start(source, store, **OPTIONS)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    monkeypatch.setattr(import_work, "_do", lambda job: pytest.fail("read again"))
    made = import_source(source, store, **OPTIONS)
    assert content(made.path) == content(as_one_stream(source, tmp_path / "one", **OPTIONS))
    assert list(tmp_path.glob(".*")) == [], "nor does the half store stay"


def test_a_missing_shard_stops_the_import_and_costs_no_other(tmp_path):
    source, store = write_tars(tmp_path / "src", 4), tmp_path / "s"
    last, away = source / "s03.tar", tmp_path / "away.tar"
    with pytest.raises(DataError, match=r"s03\.tar.*3 files is kept in .*\.s\.importing") as said:
        import_source(
            source,
            store,
            workers=1,
            progress=lambda n: last.exists() and last.rename(away),
            **OPTIONS,
        )
    assert "the same command goes on" in str(said.value)
    before = parts(tmp_path / ".s.importing")
    away.rename(last)
    kept = import_work._complete
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(
            import_work, "_complete", lambda job: seen.append(parts(job.folder.parent)) or kept(job)
        )
        import_source(source, store, workers=1, **OPTIONS)
    assert before.items() <= seen[-1].items()
    assert open_store(store).num_records


def test_a_full_disk_keeps_what_is_complete(tmp_path, monkeypatch):
    source, store = write_tars(tmp_path / "src", 4), tmp_path / "s"
    done = []

    def full(*args, real=import_part.write_run):
        done.append(1)
        if len(done) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(import_part, "write_run", full)
        with pytest.raises(DataError, match=r"No space left on device.*of 2 files is kept"):
            import_source(source, store, workers=1, **OPTIONS)
    assert len(parts(tmp_path / ".s.importing")) == 2
    made = import_source(source, store, workers=1, **OPTIONS)
    assert len(done) == 3, "counted before the disk was full"
    assert content(made.path) == content(as_one_stream(source, tmp_path / "one", **OPTIONS))


def test_a_changed_file_is_read_again_and_other_options_begin_anew(tmp_path):
    source, store = write_tars(tmp_path / "src", 3), tmp_path / "s"
    good = (source / "s02.tar").read_bytes()
    (source / "s02.tar").write_bytes(good[:5000])
    with pytest.raises(DataError, match=r"ends inside a member.*2 files is kept"):
        import_source(source, store, workers=1, **OPTIONS)
    work = tmp_path / ".s.importing"
    before = parts(work)
    with pytest.raises(DataError, match="2 files is kept"):
        import_source(source, store, workers=1, public=True)
    assert not before.items() & parts(work).items()
    os.utime(source / "s00.tar", ns=(1, 1))
    (source / "s02.tar").write_bytes(good)
    before = parts(work)
    read = []
    with pytest.MonkeyPatch.context() as patch:
        real = import_work._do
        patch.setattr(import_work, "_do", lambda job: read.append(job.part.path.name) or real(job))
        made = import_source(source, store, workers=1, public=True)
    assert read == ["s00.tar", "s02.tar"]
    assert content(made.path) == content(as_one_stream(source, tmp_path / "one", public=True))


def test_two_imports_of_one_store_do_not_meet(tmp_path):
    source, store = write_tars(tmp_path / "src", 3), tmp_path / "s"
    tried = []

    def second(n):
        with pytest.raises(DataError, match="another import is writing"):
            import_source(source, store, workers=1, **OPTIONS)
        tried.append(n)

    import_source(source, store, workers=1, progress=second, **OPTIONS)
    assert tried and open_store(store).num_records


def test_a_file_that_is_still_written_is_refused(tmp_path, monkeypatch):
    source = write_tars(tmp_path / "src", 3)
    real = import_work.write_part

    def slow(*args, **options):
        os.utime(source / "s01.tar")
        return real(*args, **options)

    monkeypatch.setattr(import_work, "write_part", slow)
    with pytest.raises(DataError, match=r"s01\.tar: changed while it was read"):
        import_source(source, tmp_path / "s", workers=1, **OPTIONS)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(source: Path, store: Path, patches, **options) -> None:
    """Import in a process with some functions replaced, one of which kills it."""
    with pytest.MonkeyPatch.context() as patch:
        for where, name, function in patches:
            patch.setattr(where, name, function)
        pid = start(source, store, workers=1, **options)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def stop(source: Path, store: Path, name: str, **options) -> None:
    """Stop an import by a damaged file, and put the file right."""
    good = (source / name).read_bytes()
    (source / name).write_bytes(good[:700])
    with pytest.raises(DataError, match="files is kept"):
        import_source(source, store, workers=1, **options)
    (source / name).write_bytes(good)


@pytest.mark.parametrize(
    "planted",
    ["link", "open", "another user's", "with a file", "with a link", "with a linked part"],
)
def test_a_folder_that_no_import_of_this_user_made_is_refused(tmp_path, monkeypatch, planted):
    source, work, other = write_tars(tmp_path / "src", 2), tmp_path / ".s.importing", tmp_path / "o"
    write_folder(other, {"thesis.tex": b"1", "data/x": b"2"})
    if planted == "link":
        work.symlink_to(other)
    else:
        work.mkdir(mode=0o700)
    if planted == "open":
        work.chmod(0o750)
    elif planted == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: work.stat().st_uid + 1)
    elif planted == "with a file":
        (work / "thesis.tex").write_text("1")
    elif planted == "with a link":
        (work / "confidential").symlink_to(other)
    elif planted == "with a linked part":
        (work / "confidential").mkdir()
        (work / "confidential" / f"read-{16 * '0'}").symlink_to(other)
    before = [(path, path.lstat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    with pytest.raises(DataError, match=r"\.s\.importing: .*Move it away, or choose another"):
        import_source(source, tmp_path / "s", workers=1, **OPTIONS)
    assert [(path, path.lstat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] == before


def test_another_column_of_images_in_the_first_file_is_that_of_all(tmp_path):
    source = tmp_path / "src"
    source.mkdir()

    def write(t: int, scans: bool, photos: bool) -> None:
        table = {
            name: pa.array([png(100 * t + at + i) if full else None for i in range(4)], pa.binary())
            for name, at, full in (("scan", 0, scans), ("photo", 50, photos))
        }
        pq.write_table(pa.table(table), source / f"p{t}.parquet")

    for t in range(3):
        write(t, scans=True, photos=t > 0)
    stop(source, tmp_path / "s", "p2.parquet", public=True)
    write(0, scans=False, photos=True)
    made = import_source(source, tmp_path / "s", public=True)
    photos = [png(100 * t + 50 + i) for t in range(3) for i in range(4)]
    assert [made.read(row) for row in range(made.num_records)] == photos


def swap(file: Path, seed: int, kind: str) -> None:
    """Write a file again: "touched", with bytes of the same number, or of another."""
    if kind == "touched":
        os.utime(file, ns=(5, 5))
        return
    num = 30 + (kind == "larger")
    members = {
        f"{i:03}.png": png(7000 + seed + i, 8, 8) + bytes(200 if kind == "larger" else 0)
        for i in range(num)
    }
    size = file.stat().st_size
    write_tar(file, members)
    if kind == "same size":
        with file.open("ab") as tar:
            tar.truncate(size)


@pytest.mark.parametrize("kind", ["same size", "larger"])
@pytest.mark.parametrize("moment", ["read", "merged"])
@pytest.mark.parametrize("num", [1, 3])
def test_a_tar_that_changes_before_the_store_is_named_stops_the_import(
    tmp_path, monkeypatch, kind, moment, num
):
    source, store = write_tars(tmp_path / "src", num), tmp_path / "s"
    first, real, done = source / "s00.tar", importer.write_store, []

    def change(at: str) -> None:
        if moment == at and not done:
            done.append(swap(first, 0, kind))

    def write(*args, **options):
        real(*args, **options)
        change("merged")

    with monkeypatch.context() as patch:
        patch.setattr(importer, "write_store", write)
        with pytest.raises(DataError, match=r"s00\.tar: changed while it was read"):
            import_source(source, store, workers=1, progress=lambda n: change("read"), **OPTIONS)
    assert done and not store.exists()
    assert not list(tmp_path.glob(".*partial*"))
    made = import_source(source, store, workers=1, **OPTIONS)
    assert content(made.path) == content(as_one_stream(source, tmp_path / "one", **OPTIONS))
    assert all(
        keyed_hash(KEY, made.read(row)) == made.index["id"][row] for row in range(made.num_records)
    )


def test_a_parquet_file_that_changes_after_it_was_read_stops_the_import(tmp_path):
    source, store = write_parquets(tmp_path / "src"), tmp_path / "s"
    with pytest.raises(DataError, match=r"p0\.parquet: changed while it was read"):
        import_source(
            source,
            store,
            workers=1,
            progress=lambda n: swap(source / "p0.parquet", 0, "touched"),
            **OPTIONS,
        )
    assert not store.exists()


def test_a_store_that_cannot_be_opened_gets_no_name(tmp_path, monkeypatch):
    source, real = write_tars(tmp_path / "src", 2), importer.write_store

    def write(parts, folder, **options):
        real(parts, folder, **options)
        os.truncate(folder / "records.jsonl", 9)

    monkeypatch.setattr(importer, "write_store", write)
    for num, several in enumerate((source, source / "s00.tar")):
        with pytest.raises(DataError, match="9 bytes"):
            import_source(several, tmp_path / f"s{num}", workers=1, **OPTIONS)
        assert not (tmp_path / f"s{num}").exists()


def test_a_file_of_the_same_size_and_date_is_read_again(tmp_path):
    source, store = write_tars(tmp_path / "src", 3), tmp_path / "s"
    first = source / "s00.tar"
    os.utime(first, ns=(1, 1))
    size = first.stat().st_size
    stop(source, store, "s02.tar", **OPTIONS)
    swap(first, 0, "same size")
    os.utime(first, ns=(1, 1))
    assert (first.stat().st_size, first.stat().st_mtime_ns) == (size, 1)
    made = import_source(source, store, workers=1, **OPTIONS)
    assert content(made.path) == content(as_one_stream(source, tmp_path / "one", **OPTIONS))


def test_no_second_store_has_the_key_of_a_killed_import(tmp_path, monkeypatch):
    monkeypatch.undo()
    source, store, real = write_tars(tmp_path / "src", 2), tmp_path / "s", files.sync
    at_name = (files, "sync", lambda path: kill_self() if store.exists() else real(path))
    killed(source, store, [at_name], **OPTIONS)
    key = read_key(open_store(store).path)
    assert not (tmp_path / ".s.importing").exists()
    import_source(source, tmp_path / "other", workers=1, **OPTIONS)
    assert not list(tmp_path.glob(".*")), "names and captions are removed by an import beside it"
    shutil.rmtree(store)
    assert read_key(import_source(source, store, workers=1, **OPTIONS).path) != key


def test_a_kill_directly_before_the_name_leaves_nothing_for_good(tmp_path):
    source, store, real = write_tars(tmp_path / "src", 2), tmp_path / "s", importer.retire
    killed(source, store, [(importer, "retire", lambda work: (real(work), kill_self()))], **OPTIONS)
    assert not store.exists()
    made = import_source(source, store, workers=1, **OPTIONS)
    assert content(made.path) == content(as_one_stream(source, tmp_path / "one", **OPTIONS))
    assert not list(tmp_path.glob(".*"))


def test_a_name_that_cannot_be_given_costs_no_reading(tmp_path, monkeypatch):
    source, store, real = write_tars(tmp_path / "src", 2), tmp_path / "s", importer.retire

    def full(work):
        real(work)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(importer, "retire", full)
        with pytest.raises(DataError, match="of 2 files is kept"):
            import_source(source, store, workers=1, **OPTIONS)
    monkeypatch.setattr(import_work, "_do", lambda job: pytest.fail("read again"))
    assert import_source(source, store, workers=1, **OPTIONS).num_records
    assert not list(tmp_path.glob(".*"))


def test_a_kill_while_parts_are_removed_leaves_no_half_of_one(tmp_path):
    source, store = write_tars(tmp_path / "src", 3), tmp_path / "s"
    stop(source, store, "s02.tar", **OPTIONS)

    def half(folder, **options):
        if folder.name.startswith("read"):
            for name in ("left_out", "text"):
                (folder / name).unlink(missing_ok=True)
            kill_self()

    def parts_first(folder):
        return (folder / name for name in sorted(os.listdir(folder), reverse=True, key=order))

    def order(name):
        return name.startswith("read")

    patches = [(import_work.shutil, "rmtree", half), (Path, "iterdir", parts_first)]
    killed(source, store, patches, public=True)
    made = import_source(source, store, workers=1, **OPTIONS)
    assert content(made.path) == content(as_one_stream(source, tmp_path / "one", **OPTIONS))


@pytest.mark.parametrize("name", ["version", "code_digest"])
def test_other_software_reads_all_parts_again(tmp_path, monkeypatch, name):
    """An installed reader of HEIF, say, finds images where there were none before."""
    source, store = write_tars(tmp_path / "src", 3), tmp_path / "s"
    stop(source, store, "s02.tar", **OPTIONS)
    before, read = parts(tmp_path / ".s.importing"), []
    monkeypatch.setattr(import_work, name, lambda of: f"another {of}", raising=False)
    real = import_work._do
    monkeypatch.setattr(import_work, "_do", lambda job: read.append(job.kind) or real(job))
    import_source(source, store, workers=1, **OPTIONS)
    assert len(before) == 2 and read.count("read") == 3


def test_repeats_of_one_image_are_merged_in_blocks(tmp_path, small, monkeypatch):
    """20 million placeholders for missing images would be in memory at once."""
    source, num = tmp_path / "src", []
    source.mkdir()
    for t in range(3):
        members = {}
        for i in range(40):
            captions = [f"c{40 * t + i}"] if i % 3 else []
            members |= {f"{i:03}.png": png(1), f"{i:03}.json": js(captions=captions)}
        write_tar(source / f"s{t}.tar", members)
    real = import_merge._Merged._read
    monkeypatch.setattr(
        import_merge._Merged, "_read", lambda self, rows: num.append(len(rows)) or real(self, rows)
    )
    store = import_source(source, tmp_path / "s", workers=1)
    assert max(num) <= 16 and sum(num) == 2 * 119
    assert store.num_records == 1
    assert store.record(0).captions == tuple(
        f"c{40 * t + i}" for t in range(3) for i in range(40) if i % 3
    )


def test_what_is_kept_is_confidential_and_hashed_under_the_key(tmp_path):
    source, work, secrets = tmp_path / "src", tmp_path / ".s.importing", set[bytes]()
    source.mkdir()
    for t in range(3):
        members = {}
        for i in range(3):
            members |= {f"{i}.png": png(3 * t + i), f"{i}.json": js(who=f"Smith{t}{'abc'[i]}")}
            secrets |= {png(3 * t + i), f"Smith{t}{'abc'[i]}".encode()}
        write_tar(source / f"s{t}.tar", members)

    def read_all(num: int) -> None:
        if num < 9:
            return
        assert [path.name for path in work.iterdir()] == ["confidential"]
        found = set[int]()
        for file in work.rglob("digests"):
            found |= set(np.fromfile(file, ENTRY).view(np.int64).tolist())
        assert {keyed_hash(KEY, secret) for secret in secrets} <= found
        assert not found & {keyed_hash(b"", secret) for secret in secrets}
        asked.append(num)

    asked: list[int] = []
    import_source(source, tmp_path / "s", people=PersonRule("who"), workers=1, progress=read_all)
    assert asked


def test_a_torn_key_begins_anew(tmp_path):
    source, store = write_tars(tmp_path / "src", 3), tmp_path / "s"
    stop(source, store, "s02.tar", **OPTIONS)
    os.truncate(tmp_path / ".s.importing" / "confidential" / "key", 0)
    assert import_source(source, store, workers=1, **OPTIONS).num_records


def test_a_program_without_a_guard_may_import(tmp_path):
    """A process that is started must not run the program again."""
    source, store, log = write_tars(tmp_path / "src", 3), tmp_path / "s", tmp_path / "log"
    program = tmp_path / "program.py"
    program.write_text(
        "from dpvision.data import import_work\n"
        "from dpvision.data.importer import import_source\n"
        f"open({str(log)!r}, 'a').write('run\\n')\n"
        "import_work._WORTH_PROCESSES_BYTES = 0\n"
        f"import_source({str(source)!r}, {str(store)!r}, public=True)\n"
    )
    pid = os.fork()
    if not pid:
        try:
            runpy.run_path(str(program), run_name="__main__")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert open_store(store).num_records
    assert log.read_text() == "run\n"


def test_the_key_of_the_parts_is_the_store_s(tmp_path, monkeypatch):
    monkeypatch.undo()
    source = write_tars(tmp_path / "src", 3)
    store = import_source(source, tmp_path / "s", public=True)
    key = read_key(store.path)
    assert key != KEY
    assert store.index["id"][0] == keyed_hash(key, store.read(0))


def test_a_dicom_image_under_another_name_is_left_out_of_a_tar(tmp_path):
    """It would be copied as PNG, beside records that stay in their tar."""
    dicom = bytes(128) + b"DICM" + bytes(100)
    tars = {"1.png": png(1), "2.png": dicom, "3.png": png(3)}
    write_tar(tmp_path / "a.tar", tars)
    store = import_source(tmp_path / "a.tar", tmp_path / "s")
    assert store.import_summary()["left_out"] == {"DICOM in a tar": 1}
    assert [store.read(row) for row in range(2)] == [png(1), png(3)]


# --- sorted runs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [1, 40, 10_000])
@pytest.mark.parametrize("largest", [3, 1 << 63])
def test_runs_are_read_in_order_with_equal_numbers_together(tmp_path, in_memory, largest):
    rng = np.random.default_rng(0)
    runs, all_of_them, at = [], [], 0
    with (tmp_path / "runs").open("wb") as file:
        for k in range(7):
            ids = rng.integers(0, largest, rng.integers(1, 60))
            write_run(file, ids, np.arange(len(ids)))
            runs.append(Run(tmp_path / "runs", at, len(ids), add=1000 * k))
            all_of_them += [(one, 1000 * k + place) for place, one in enumerate(ids.tolist())]
            at += len(ids)
    blocks = list(in_order(runs, in_memory=in_memory))
    found = [tuple(entry) for block in blocks for entry in block.tolist()]
    assert found == sorted(all_of_them), "ascending, and equal numbers in the order of the runs"
    ends = [(block["id"][0], block["id"][-1]) for block in blocks]
    assert all(a[1] < b[0] for a, b in pairwise(ends))
    assert blocks[0].dtype == ENTRY


def test_lists_of_left_out_files_name_all_of_them(tmp_path):
    source = write_folder(tmp_path / "src", {})
    source.mkdir()
    for t in range(3):
        write_tar(source / f"{t}.tar", {f"bad{t}.png": png(t)[:50], f"good{t}.png": png(t)})
    store = import_source(source, tmp_path / "s", workers=2)
    lines = (store.path / "confidential" / "left_out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"key": f"bad{t}", "reason": "damaged", "tar": f"{t}.tar"} for t in range(3)
    ]
