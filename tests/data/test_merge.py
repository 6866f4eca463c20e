"""Merged stores have the bytes of one import of all sources; what must not be merged is refused."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.data import import_work, merge, store_part
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_source
from dpvision.data.merge import merge_stores
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.data.rows import keyed_hash
from dpvision.data.split import split_store
from dpvision.data.store_writer import read_key
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.privacy.account import set_cap
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import make_plan

from .image_files import encode, js, png, spoil, write_folder, write_tar

KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks, runs, parts and shards so small that all their edges are met."""
    for name, value in (
        ("shard_writer.SHARD_BYTES", 9000),
        ("shard_writer._COPIED_AT_ONCE", 4000),
        ("import_part._ROWS_IN_RUN", 7),
        ("import_merge._BLOCK_ROWS", 16),
        ("import_merge._COPIED_AT_ONCE", 100),
        ("sorted_runs._IN_MEMORY", 13),
        ("store_part.ROWS", 11),
        ("store_part._ROWS_IN_RUN", 4),
        ("store_part._ROWS_AT_ONCE", 3),
    ):
        monkeypatch.setattr(f"dpvision.data.{name}", value)


def content(store: Path) -> dict[str, bytes | dict]:
    """The files of a store, without its id. Its marks have its place."""
    found: dict[str, bytes | dict] = {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "ledger_marks.json"
    }
    about = json.loads(found["store.json"])
    assert about.pop("store_id")
    return found | {"store.json": json.dumps(about).encode()}


LABELS = {
    "none": ([None], LabelRule()),
    "numbers": ([0, 1, 2, None], LabelRule()),
    "declared": (["a", "b", "2", "x", None], LabelRule(classes=("b", "a", "2"))),
    "found": (["a", "b", "c", None], LabelRule()),
    "sets": ([["a"], ["b", "a"], [], ["a", "b"], ["c"], None], LabelRule(classes=("c", "b", "a"))),
    "found sets": ([["a"], ["b", "a"], ["c", "d"]], LabelRule()),
}


def random_files(rng: random.Random, folder: Path, kind: str, labels: list, name: str) -> None:
    """Write one to three files of images, of which many repeat those of any other file."""
    folder.mkdir()
    repeated, damaged = rng.choice([0.0, 0.3, 0.9]), rng.choice([0.0, 0.2])
    texts = rng.choice([0, 1, 4])
    for t in range(rng.randint(1, 3)):
        made = []
        for i in range(rng.randint(1, 16)):
            seed = rng.randrange(6) if rng.random() < repeated else rng.randrange(6, 10**6)
            data = png(seed, 6, 6)
            fields = {"captions": [f"é{rng.randrange(5)}" for _ in range(rng.randint(0, texts))]}
            fields["label"] = rng.choice(labels)
            made.append((data[:40] if i and rng.random() < damaged else data, fields))
        if kind == "tar":
            members = {}
            for i, (data, fields) in enumerate(made):
                members |= {f"{i:02}.png": data, f"{i:02}.json": js(**fields)}
            write_tar(folder / f"{name}{t}.tar", members)
            continue
        table = {"image": [data for data, _ in made]}
        table |= {name: [one[name] for _, one in made] for name in ("captions", "label")}
        many, word = isinstance(labels[0], list), isinstance(labels[0], list | str)
        one = pa.string() if word else pa.int64()
        types = {"image": pa.binary(), "captions": pa.list_(pa.string())}
        types["label"] = pa.list_(one) if many else one
        pq.write_table(pa.table(table, schema=pa.schema(types)), folder / f"{name}{t}.parquet")


def together(folder: Path, *sources: Path) -> Path:
    """One source of links to the files of several."""
    folder.mkdir()
    for source in sources:
        for file in source.iterdir():
            (folder / file.name).symlink_to(file)
    return folder


def compare(tmp_path, monkeypatch, seed: int) -> None:
    """Merge random stores, and compare with one import of all their sources."""
    rng = random.Random(seed)
    kind, (labels, rule) = rng.choice(["tar", "parquet"]), LABELS[rng.choice(list(LABELS))]
    public = rule.classes is None and isinstance(labels[0], str | list)
    options = {"public": public or rng.random() < 0.3, "licence": rng.choice([None, "CC0"])}
    if "x" in labels:
        rule = LabelRule(classes=rule.classes, unknown_classes="unlabelled")
    options |= {"labels": rule}
    if rng.random() < 0.2:
        options["window"] = (0.0, 200.0)  # images of tars are copied
    sources = [tmp_path / f"src{name}" for name in "abc"[: rng.randint(2, 3)]]
    for source in sources:
        random_files(rng, source, kind, labels, source.name)
    stores = [
        import_source(source, tmp_path / source.name[3:], workers=1, **options).path
        for source in sources
    ]
    assert len({read_key(store) for store in stores}) == len(stores)
    with monkeypatch.context() as patch:
        patch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
        whole = together(tmp_path / "whole", *sources)
        oracle = content(import_source(whole, tmp_path / "one", workers=1, **options).path)
        before = [content(store) for store in stores]
        merged = merge_stores(stores, tmp_path / "merged", workers=rng.choice([1, 2]))
        made = content(merged.path)
        assert made.keys() == oracle.keys()
        assert [name for name in made if made[name] != oracle[name]] == [], (seed, kind, options)
        assert before == [content(store) for store in stores], "a source was changed"
        if len(stores) == 3:
            first = merge_stores(stores[:2], tmp_path / "first", workers=1)
            again = merge_stores([first.path, stores[2]], tmp_path / "again", workers=1)
            assert content(again.path) == oracle, "a merged store merges as an imported one"
    for row in range(merged.num_records):
        assert keyed_hash(KEY, merged.read(row)) == merged.index["id"][row]


@pytest.mark.parametrize("seed", range(12))
def test_a_merged_store_has_the_bytes_of_one_import(tmp_path, monkeypatch, seed):
    compare(tmp_path, monkeypatch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 72))
def test_many_merged_stores_have_the_bytes_of_one_import(tmp_path, monkeypatch, seed):
    compare(tmp_path, monkeypatch, seed)


# --- which stores go together
# --------------------------------------------------------------------------------------------------


def store_of(tmp_path: Path, name: str, seeds, **options) -> Path:
    """A store of a tar of images; a dictionary has their fields."""
    fields = seeds if isinstance(seeds, dict) else {seed: {} for seed in seeds}
    members = {}
    for seed, given in fields.items():
        members |= {f"{seed:03}.png": png(seed, 6, 6), f"{seed:03}.json": js(**given)}
    write_tar(tmp_path / f"{name}.tar", members)
    return import_source(tmp_path / f"{name}.tar", tmp_path / name, **options).path


def test_tars_in_place_and_copied_images_are_merged(tmp_path):
    folder = write_folder(tmp_path / "f", {f"{seed}.png": png(seed, 6, 6) for seed in range(30)})
    copied = import_source(folder, tmp_path / "copied").path
    stores = [copied, store_of(tmp_path, "a", range(20, 60)), store_of(tmp_path, "b", range(9))]
    expected = list(
        dict.fromkeys(
            open_store(s).read(i) for s in stores for i in range(len(open_store(s).index))
        )
    )
    merged = merge_stores(stores, tmp_path / "m")
    assert [merged.read(row) for row in range(merged.num_records)] == expected
    again = merge_stores([merged.path, store_of(tmp_path, "c", [99])], tmp_path / "again")
    assert [again.read(row) for row in range(60 + 1)] == [*expected, png(99, 6, 6)]
    shutil.rmtree(copied)
    shutil.rmtree(merged.path)
    assert open_store(again.path).read(0) == png(0, 6, 6), "copied images are the store's own"


WORDS = {"labels": LabelRule(label_from="word", classes=("x", "y"))}
LISTED = {"labels": LabelRule(label_from="list")}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"public": True}, {}, "visibility: (public and private|private and public); expected"),
        ({"window": (0, 9)}, {}, r"--window\): (\(0.0, 9.0\) and none|none and \(0.0, 9.0\))"),
        (
            WORDS,
            {"labels": LabelRule(label_from="word", classes=("y", "x"))},
            r"different class names, 2 \(., .\) and 2 \(., .\).*same --classes",
        ),
        ({}, WORDS, "numbers without names"),
        ({}, LISTED, "one label per image in .*/a and several in .*/b"),
        ({"people": PersonRule("who")}, {}, "/a: persons, known by.*Import the sources together"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_stores_that_do_not_go_together_are_refused(tmp_path, one, other, said, swapped):
    fields = {"label": 3, "list": [1], "who": "ann", "word": "x"}
    stores = [
        store_of(tmp_path, "a", {1: fields}, **one),
        store_of(tmp_path, "b", {2: fields}, **other),
    ]
    with pytest.raises(DataError, match=said):
        merge_stores(stores[::-1] if swapped else stores, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_class_names_found_in_public_stores_are_joined(tmp_path):
    stores = [
        store_of(tmp_path, "a", {1: {"label": "dog"}, 2: {"label": "ant"}}, public=True),
        store_of(tmp_path, "b", {3: {"label": "cat"}, 1: {"label": "cat"}}, public=True),
        store_of(tmp_path, "c", [4], public=True, licence="CC0"),
    ]
    merged = merge_stores(stores, tmp_path / "m")
    assert merged.label_names == ["ant", "cat", "dog"]
    assert [merged.record(row).labels for row in range(4)] == [(2,), (0,), (1,), ()]
    assert merged.import_summary()["label_conflicts"] == 1
    assert merged.licence == "not stated; CC0"


@pytest.mark.parametrize(
    ("places", "out", "said"),
    [
        ("a", "m", "1 stores; expected two or more"),
        ("a", "b", "1 stores, and .*b exists; .* last: dpvision data merge STORE STORE OUT"),
        ("aa", "m", "are one store"),
        ("ab", "m*", r"2 stores, and the pattern .*m\*; expected .* a new folder"),
        ("ab", "LEDGERS/x", "expected it outside of LEDGERS"),
        ("ab", "a", "exists; expected .* a new folder"),
        ("ab", "a/m", "lies in the store"),
        ("bh", "m", "part of a divided store"),
        ("ah", "m", "part of a divided store|are one store"),
        ("ap", "m", "persons"),
    ],
)
def test_wrong_places_are_refused_in_one_sentence(tmp_path, places, out, said):
    for name in "ab":
        store_of(tmp_path, name, range(40))
    store_of(tmp_path, "p", {1: {"who": "ann"}}, people=PersonRule("who"))
    split_store(tmp_path / "a", tmp_path / "h", tmp_path / "i", 0.5)
    with pytest.raises(DataError, match=said):
        merge_stores([tmp_path / name for name in places], tmp_path / out)
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "m").exists()


@pytest.mark.parametrize("damage", [b"\xff", b"}", b"[", b"X"])
def test_a_damaged_line_names_its_store(tmp_path, damage):
    stores = [
        store_of(tmp_path, name, {i: {"text": f"{name}{i}"} for i in range(6)}) for name in "ab"
    ]
    path = stores[1] / "records.jsonl"
    lines = path.read_bytes()
    place = lines.index(b"\n") + 1
    at = lines.index(b"captions", place) if damage == b"X" else place
    path.write_bytes(lines[:at] + damage + lines[at + 1 :])
    with pytest.raises(DataError, match=rf"b/records\.jsonl: damaged line at byte {place};"):
        merge_stores(stores, tmp_path / "m", workers=1)
    path.write_bytes(lines)
    assert merge_stores(stores, tmp_path / "m", workers=1).num_records == 6


@pytest.mark.parametrize("workers", [0, -3])
def test_fewer_than_one_worker_are_refused(tmp_path, workers):
    stores = [store_of(tmp_path, name, range(5)) for name in "ab"]
    with pytest.raises(ConfigError, match=f"workers={workers}; expected at least 1"):
        merge_stores(stores, tmp_path / "m", workers=workers)
    with pytest.raises(ConfigError, match=f"workers={workers}; expected at least 1"):
        import_source(tmp_path / "a.tar", tmp_path / "m", workers=workers)


# --- what was spent
# --------------------------------------------------------------------------------------------------


def charge(store: Path) -> None:
    plan = make_plan(
        PrivacyConfig(
            dataset_size=10,
            expected_batch_size=5,
            steps=3,
            delta=0.001,
            noise_multiplier=9.0,
            max_grad_norm=1.0,
        )
    )
    with Ledger.open(store, "r", plan, resume=False) as ledger:
        ledger.append()


def test_a_store_with_a_charged_step_or_a_cap_is_refused(tmp_path):
    stores = [store_of(tmp_path, "a", range(10)), store_of(tmp_path, "b", range(5, 15))]
    charge(stores[1])
    with pytest.raises(DataError, match=r"b: 1 runs were charged on it \(r\); .* before the first"):
        merge_stores(stores, tmp_path / "m")
    stores[1] = store_of(tmp_path, "c", range(5, 15))
    set_cap(stores[1], 3, 1e-5)
    with pytest.raises(DataError, match="c: its owner set a cap"):
        merge_stores(stores, tmp_path / "m")
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "m").exists()


def test_a_step_that_is_charged_during_the_merge_stops_it(tmp_path, monkeypatch):
    stores = [store_of(tmp_path, "a", range(10)), store_of(tmp_path, "b", range(5, 15))]
    real = merge.write_store
    monkeypatch.setattr(
        merge, "write_store", lambda *args, **more: (real(*args, **more), charge(stores[0]))
    )
    with pytest.raises(DataError, match="1 runs were charged"):
        merge_stores(stores, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_copied_store_is_refused_and_a_public_one_may_be_charged(tmp_path):
    stores = [store_of(tmp_path, "a", range(10)), store_of(tmp_path, "b", range(5, 15))]
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copytree(stores[0], tmp_path / "elsewhere" / "a")
    with pytest.raises(PrivacyError, match="not where this store was imported"):
        merge_stores([copy, stores[1]], tmp_path / "m")
    stores = [store_of(tmp_path, name, range(10), public=True) for name in ("c", "d")]
    charge(stores[0])
    assert merge_stores(stores, tmp_path / "m").num_records == 10


# --- stopped merges, changed stores
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_merge_goes_on_and_changes_no_byte(tmp_path, monkeypatch, kills):
    stores = [store_of(tmp_path, "a", range(90)), store_of(tmp_path, "b", range(50, 150))]
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
    oracle = content(merge_stores(stores, tmp_path / "one", workers=1).path)
    written = list[str]()
    real = store_part.StorePart.write

    def write(part, folder, key):
        if len(written) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(part.name)
        return real(part, folder, key)

    for _ in range(kills):
        if not (pid := os.fork()):
            try:
                monkeypatch.setattr(store_part.StorePart, "write", write)
                merge_stores(stores, tmp_path / "m", workers=1)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    work = tmp_path / ".m.importing"
    assert import_work.complete(work) == 4 * kills and not (tmp_path / "m").exists()
    monkeypatch.setattr(
        store_part.StorePart,
        "write",
        lambda part, *args: written.append(part.name) or real(part, *args),
    )
    assert content(merge_stores(stores, tmp_path / "m", workers=1).path) == oracle
    assert len(written) == -(-90 // 11) + -(-100 // 11) - 4 * kills
    assert not list(tmp_path.glob(".*"))


def test_other_bytes_than_were_imported_are_named(tmp_path):
    stores = [store_of(tmp_path, "a", range(10)), store_of(tmp_path, "b", range(20, 30))]
    spoil(open_store(stores[1]), 7)
    with pytest.raises(DataError, match=r"b\.tar: other bytes at \d+ than when it was imported"):
        merge_stores(stores, tmp_path / "m", workers=1)


def test_lines_in_another_order_are_refused(tmp_path):
    stores = [store_of(tmp_path, "a", range(10)), store_of(tmp_path, "b", range(20, 30))]
    index = np.load(stores[0] / "index.npy")
    index["caption_offset"][[3, 4]] = index["caption_offset"][[4, 3]]
    np.save(stores[0] / "index.npy", index)
    with pytest.raises(DataError, match=r"records\.jsonl: lines in another order"):
        merge_stores(stores, tmp_path / "m", workers=1)


@pytest.mark.parametrize("file", ["a/confidential/import.json", "b.tar", "b/index.npy"])
def test_a_store_that_changes_meanwhile_stops_the_merge(tmp_path, file):
    stores = [store_of(tmp_path, "a", range(10)), store_of(tmp_path, "b", range(20, 30))]
    with pytest.raises(DataError, match="changed while it was read"):
        merge_stores(
            stores, tmp_path / "m", workers=1, progress=lambda n: os.utime(tmp_path / file)
        )
    assert not (tmp_path / "m").exists()


def test_repeats_that_were_not_noted_are_refused(tmp_path):
    made = write_folder(tmp_path / "f", {"1.png": png(1), "2.png": png(1)})
    stores = [import_source(made, tmp_path / "a").path, store_of(tmp_path, "b", range(3))]
    (stores[0] / "confidential" / "repeats.npy").unlink()
    with pytest.raises(DataError, match=r"an earlier version.*Import its source again"):
        merge_stores(stores, tmp_path / "m")
    np.save(stores[0] / "confidential" / "repeats.npy", np.zeros(3))
    with pytest.raises(DataError, match="expected 1 rows of repeated images"):
        merge_stores(stores, tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "value"), [("place", 9), ("place", -1), ("shard", 7), ("caption_offset", 1 << 40)]
)
def test_damaged_rows_of_repeats_are_named(tmp_path, name, value):
    made = write_folder(tmp_path / "f", {"1.png": png(1), "2.png": png(1), "3.png": png(1)})
    stores = [import_source(made, tmp_path / "a").path, store_of(tmp_path, "b", range(3))]
    file = stores[0] / "confidential" / "repeats.npy"
    repeats = np.load(file)
    (repeats if name == "place" else repeats["row"])[name][1] = value
    np.save(file, repeats)
    with pytest.raises(DataError, match=r"repeats\.npy: rows that lie outside their files"):
        merge_stores(stores, tmp_path / "m")


@pytest.mark.slow  # two processes import torch
def test_processes_change_no_byte_of_a_merged_store(tmp_path, monkeypatch):
    monkeypatch.setattr(import_work, "_WORTH_PROCESSES_BYTES", 0)
    stores = [store_of(tmp_path, "a", range(40)), store_of(tmp_path, "b", range(30, 60))]
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
    one, two = (merge_stores(stores, tmp_path / f"m{n}", workers=n).path for n in (1, 2))
    assert content(one) == content(two)


def test_the_command_merges_and_prints_the_next_step(tmp_path, capsys):
    stores = [store_of(tmp_path, "a", range(40)), store_of(tmp_path, "b", range(30, 60))]
    main(["data", "merge", *map(str, stores), str(tmp_path / "m")])
    said = capsys.readouterr().out
    assert "60 records in" in said and "duplicates_merged" in said and "--data" in said
    assert main(["data", "merge", str(stores[0]), str(tmp_path / "n")]) == 2
    assert "1 stores; expected two or more" in capsys.readouterr().err


def test_counts_and_lists_of_folders_are_added(tmp_path):
    summaries, lists = [], ""
    for k, name in enumerate("ab"):
        deep = np.full((6, 6), 4000 + k, np.uint16)
        files = {f"{k}{i}.png": png(10 * k + i) for i in range(3)}
        files |= {f"{k}.png": encode(deep), "bad.png": png(1)[:50], "no.txt": b"x"}
        files["metadata.csv"] = f"file_name,text\n{k}0.png,x\ngone{k}.png,y\n".encode()
        made = import_source(write_folder(tmp_path / f"of {name}", files), tmp_path / name)
        summaries.append(made.import_summary())
        lists += (made.path / "confidential" / "unmatched.jsonl").read_text()
    merged = merge_stores([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    found = merged.import_summary()
    assert found["left_out"]["damaged"] == 2 and merged.undeclared_range
    for name, value in found.items():
        one, other = (summary[name] for summary in summaries)
        added = (
            {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
            if isinstance(value, dict)
            else one + other
        )
        assert value == added, name
    assert found.keys() == summaries[0].keys()
    assert (merged.path / "confidential" / "unmatched.jsonl").read_text() == lists
    assert merged.captions(1) == ("x",)
