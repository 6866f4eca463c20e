"""Several labels a record: what an import makes of lists, what a store gives back, what its halves
keep, what is refused.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dpvision.config import DataConfig
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples, import_source
from dpvision.data.inspect import contact_sheet, inspect_store
from dpvision.data.keys import StepKey
from dpvision.data.loader import image_batches, physical_batches
from dpvision.data.multi_label import NOT_KNOWN
from dpvision.data.open import open_store
from dpvision.data.overlap import write_without
from dpvision.data.rows import ROW
from dpvision.data.sources import Sample, Source
from dpvision.data.split import split_store
from dpvision.data.store import FORMAT, Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError
from dpvision.synthetic.scenes import LABELS, make_scene

from .image_files import js, png, write_folder, write_tar

NUM, CLASSES = 40, 7


def drawn_sets() -> list[list[int] | None]:
    """Random lists of classes in any order; every fifth is empty, every seventh is missing."""
    rng = np.random.default_rng(0)
    sets: list[list[int] | None] = [
        rng.permutation(CLASSES)[: rng.integers(1, 4)].tolist() for _ in range(NUM)
    ]
    sets[::5] = [[] for _ in sets[::5]]
    sets[::7] = [None for _ in sets[::7]]
    return sets


def several_store(
    path: Path,
    sets: list[list[int] | None] | None = None,
    names: list[str] | None = None,
    **options: Any,
) -> Store:
    sets = drawn_sets() if sets is None else sets
    samples = (
        Sample(f"k{i}", png(i, 8, 8), {} if classes is None else {"label": classes})
        for i, classes in enumerate(sets)
    )
    return import_samples(Source(samples, names), path, **options)


@pytest.fixture
def several(tmp_path: Path) -> Store:
    return several_store(tmp_path / "store")


def named(store: Store) -> dict[str, set[str] | None]:
    """Names of the classes of each record by its name; None for a record without an answer."""
    found: dict[str, set[str] | None] = {}
    for row in range(store.num_records):
        record = store.record(row)
        names = {
            store.label_names[label] if store.label_names else str(label) for label in record.labels
        }
        assert len(names) == len(record.labels)
        found[record.key] = names if store.labelled[row] else None
    return found


def test_lists_of_every_kind_of_source_become_the_same_store(tmp_path: Path) -> None:
    truth = {"1": {"a", "c"}, "2": {"b"}, "3": set(), "4": None, "5": {"a", "b", "c"}}
    lists = {
        key: None if names is None else sorted(names, reverse=True) for key, names in truth.items()
    }
    images = {key: png(int(key)) for key in truth}
    members = {f"{k}.png": images[k] for k in truth} | {
        f"{k}.json": js(who="x", **({"label": v} if v is not None else {}))
        for k, v in lists.items()
    }
    numbers = [None if v is None else ["abc".index(name) for name in v] for v in lists.values()]
    structs = [{"bytes": images[k], "path": k} for k in truth]
    table = pa.table({"image": structs, "finding": list(lists.values())})
    (tmp_path / "q").mkdir()
    pq.write_table(table, tmp_path / "q" / "names.parquet")
    features = [
        {"feature": {"names": list("abc")}},
        [{"names": list("abc")}],
    ]  # as Hugging Face's Sequence, and as its older lists
    for i, feature in enumerate(features):
        described = {"huggingface": json.dumps({"info": {"features": {"label": feature}}})}
        pq.write_table(
            pa.table({"image": structs, "label": numbers}).replace_schema_metadata(described),
            tmp_path / "q" / f"numbers{i}.parquet",
        )
    files = {f"{k}.png": image for k, image in images.items()}
    cells = "".join(
        f"{k}.png,{'' if v is None else ' | '.join(v)}\n" for k, v in lists.items() if v is not None
    )
    csv_files = files | {"metadata.csv": f"file_name,finding\n{cells}".encode()}
    lines = [{"file_name": f"{k}.png", "finding": v, "text": f"no {k}"} for k, v in lists.items()]
    jsonl_files = files | {
        "metadata.jsonl": "".join(json.dumps(line) + "\n" for line in lines).encode()
    }
    declared = LabelRule(classes=("a", "b", "c"))
    field = replace(declared, label_from="finding")
    stores = [
        import_source(write_tar(tmp_path / "t.tar", members), tmp_path / "s0", labels=declared),
        import_source(tmp_path / "q" / "names.parquet", tmp_path / "s1", labels=field),
        import_source(tmp_path / "q" / "numbers0.parquet", tmp_path / "s2"),
        import_source(tmp_path / "q" / "numbers1.parquet", tmp_path / "s3"),
        import_source(
            write_folder(tmp_path / "csv", csv_files),
            tmp_path / "s4",
            labels=replace(field, label_separator="|"),
        ),
        import_source(write_folder(tmp_path / "jsonl", jsonl_files), tmp_path / "s5", labels=field),
    ]
    for store in stores:
        assert store.multi_label and store.label_names == ["a", "b", "c"]
        assert {Path(key).stem: names for key, names in named(store).items()} == truth
        assert store.import_summary()["without_label"] == 1
    assert stores[5].captions(0) == ("no 1",), "other fields of the table are read as before"


def test_shards_that_were_written_give_the_same_labels_again(tmp_path: Path) -> None:
    source = write_folder(
        tmp_path / "src",
        {
            "1.png": png(1),
            "2.png": png(2),
            "metadata.csv": b"file_name,label\n1.png,\n2.png,ill|old\n",
        },
    )
    store = import_source(
        source, tmp_path / "s", labels=LabelRule(label_separator="|"), public=True
    )
    again = import_source(tmp_path / "s" / "shards", tmp_path / "again", public=True)
    assert (
        sorted(named(again).values(), key=len)
        == sorted(named(store).values(), key=len)
        == [set(), {"ill", "old"}]
    )
    alone = import_source(source, tmp_path / "alone", public=True)
    assert not alone.multi_label and named(alone) == {"1.png": None, "2.png": {"ill|old"}}, (
        "without a separator a text is one class"
    )


def test_a_store_gives_back_every_set(several: Store) -> None:
    sets = drawn_sets()
    again = open_store(several.path)
    assert again.multi_label and isinstance(again.label_sets.flat, np.memmap)
    assert again.labelled.tolist() == [classes is not None for classes in sets]
    assert [again.record(row).labels for row in range(NUM)] == [
        tuple(sorted(classes or [])) for classes in sets
    ]
    rows = np.random.default_rng(1).integers(0, NUM, 90)
    place, cls = again.classes(rows)
    assert [*zip(place.tolist(), cls.tolist(), strict=True)] == [
        (i, c) for i, row in enumerate(rows) for c in sorted(sets[row] or [])
    ]
    slow = np.array(
        [
            [NOT_KNOWN if sets[row] is None else int(k in sets[row]) for k in range(CLASSES)]
            for row in rows
        ]
    )
    assert (
        again.targets(rows, CLASSES).dtype == np.uint8
        and (again.targets(rows, CLASSES) == slow).all()
    )
    fewer = again.targets(rows, 3)
    out = np.array([sets[row] is None or any(c >= 3 for c in sets[row]) for row in rows])
    assert out.any() and (fewer[out] == NOT_KNOWN).all() and (fewer[~out] == slow[~out, :3]).all()
    assert again.targets(rows[:0], CLASSES).shape == (0, CLASSES)


def test_one_label_a_record_is_stored_as_ever(store: Store) -> None:
    assert not store.multi_label and not (store.path / "labels.npy").exists()
    meta = json.loads((store.path / "store.json").read_text())
    assert meta["format"] == FORMAT == "dpvision-store-1" and "labels" not in meta
    place, cls = store.classes(np.array([3, 0]))
    assert place.tolist() == [0, 1] and cls.tolist() == [3, 0]
    assert store.targets(np.array([3, 0]), 4).tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]


def test_what_takes_one_label_a_record_is_told_so(several: Store) -> None:
    with pytest.raises(
        DataError,
        match=r"has several labels a record; expected one each for this.*--model\.multi-label",
    ):
        _ = several.labels


def test_equal_sets_are_stored_once_in_whatever_order_they_came(tmp_path: Path) -> None:
    store = several_store(tmp_path / "s", [[2, 1], [], [1, 2], [2, 1], [], [3]])
    assert store.index["label"].tolist()[:2] * 2 == store.index["label"][[0, 1, 2, 4]].tolist()
    assert np.load(store.path / "labels.npy").tolist() == [2, 1, 2, 0, 1, 3]


def test_a_store_of_empty_lists_is_one_of_several_labels(tmp_path: Path) -> None:
    store = several_store(tmp_path / "s", [[], [], None])
    assert store.multi_label and store.labelled.tolist() == [True, True, False]
    assert store.targets(np.arange(3), 2).tolist() == [[0, 0], [0, 0], [NOT_KNOWN] * 2]


def test_halves_and_cleared_copies_keep_the_sets(several: Store, tmp_path: Path) -> None:
    of_key = named(several)
    for half in split_store(several.path, tmp_path / "a", tmp_path / "b", 0.5):
        assert half.multi_label and half.num_records
        assert named(half) == {key: of_key[key] for key in named(half)}
        assert sorted(p.name for p in half.path.iterdir()) == [
            "confidential",
            "index.npy",
            "ledger_marks.json",
            "store.json",
        ]
    public = several_store(tmp_path / "public", public=True)
    cleared = write_without(public, tmp_path / "cleared", np.array([0, 3]), several, ["bytes"])
    assert cleared.num_records == NUM - 2 and named(cleared) == {
        k: v for k, v in of_key.items() if k not in ("k0", "k3")
    }


def test_a_merged_image_keeps_the_first_list_and_counts_the_conflict(tmp_path: Path) -> None:
    samples = [
        Sample(str(i), png(p, 8, 8), {"label": c})
        for i, (p, c) in enumerate([(1, [0, 1]), (1, [1, 0]), (1, [2]), (2, [])])
    ]
    store = import_samples(samples, tmp_path / "s")
    assert [store.record(row).labels for row in range(2)] == [(0, 1), ()]
    assert (
        store.import_summary()["duplicates_merged"],
        store.import_summary()["label_conflicts"],
    ) == (2, 1)


def test_inspection_counts_records_by_class(several: Store) -> None:
    sets = [s for s in drawn_sets() if s is not None]
    found = inspect_store(several)
    assert json.loads(json.dumps(found)) == found
    assert found["labels"] == {
        str(k): n for k in range(CLASSES) if (n := sum(k in s for s in sets))
    }
    assert found["without_label"] == NUM - len(sets)
    assert (found["labels_per_record"]["p0"], found["labels_per_record"]["p100"]) == (0, 3)
    assert contact_sheet(several, NUM, tile_px=32).size == (8 * 32, 5 * (32 + 14))


def test_batches_carry_zeros_and_ones_that_follow_the_record(several: Store) -> None:
    rows = np.array([9, 2, 31, 7, 2])
    kwargs: dict[str, Any] = {"physical_batch_size": 2, "workers": 2}
    batches = [
        *physical_batches(
            several, rows, StepKey(0, 0), DataConfig(), 8, num_classes=CLASSES, **kwargs
        )
    ]
    label_BK = torch.cat([batch.label_B for batch in batches])
    assert (
        label_BK.dtype == torch.uint8 and (label_BK.numpy() == several.targets(rows, CLASSES)).all()
    )
    assert all(
        batch.label_B is None
        for batch in physical_batches(several, rows, StepKey(0, 0), DataConfig(), 8, **kwargs)
    )
    assert all(
        (label == -1).all()
        for _, _, label in image_batches(several, rows, 8, DataConfig(), batch_size=2, workers=1)
    )


def test_scenes_are_labelled_with_all_their_shapes(tmp_path: Path) -> None:
    store = write_scenes(tmp_path / "s", 12, 16, multi_label=True)
    for i in range(12):
        assert {LABELS[label] for label in store.record(i).labels} == {
            thing.shape for thing in make_scene(i).objects
        }


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([[0], 1], r"label=1; expected a list of classes, as the images before it have"),
        ([1, [0]], r"label=\[0\]; expected one class, as the images before it have"),
        ([["a"], [0]], "both names and numbers"),
        ([["a", 0]], "both names and numbers"),
        ([[0, 2, 0]], r"label=\[0, 2, 0\]; expected each class once"),
        ([[0, 1, 0, 0, 1]], "no row of zeros and ones"),
        ([["a", "a"]], "expected each class once"),
        ([[-1]], r"label=\[-1\]; expected a list of classes, each a name or a number from 0 on"),
        ([[0.5]], r"label=\[0\.5\]; expected a list of classes"),
        ([[None]], "expected a list of classes, each a name"),
        ([[True]], "expected a list of classes, each a name"),
        ([[""]], "expected a list of classes, each a name"),
        ([[[1]]], "expected a list of classes, each a name"),
        ([[float("nan")]], "expected a list of classes, each a name"),
        ([[1 << 31]], "from 0 on"),
        ([{"a": 1}], "expected one class"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit_are_refused_and_leave_nothing(
    tmp_path: Path, labels: list[Any], words: str
) -> None:
    samples = [Sample(f"k{i}", png(i, 8, 8), {"label": label}) for i, label in enumerate(labels)]
    with pytest.raises(DataError, match=words):
        import_samples(samples, tmp_path / "s", public=True)
    assert list(tmp_path.iterdir()) == []


def test_numbers_beyond_the_named_classes_and_bad_separators_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"label=\[2\]; expected a list of classes, each a name or a number from 0 to 1",
    ):
        several_store(tmp_path / "s", [[2]], ["a", "b"])
    with pytest.raises(DataError, match="label_separator=' '; expected a character"):
        several_store(tmp_path / "s", [[2]], labels=LabelRule(label_separator=" "))
    with pytest.raises(DataError, match=r"label=\['a', '', 'b'\]; expected a list of classes"):
        import_samples(
            [Sample("k", png(0), {"label": "a||b"})],
            tmp_path / "s",
            labels=LabelRule(label_separator="|"),
            public=True,
        )
    both = write_folder(
        tmp_path / "src",
        {"1.png": png(1), "metadata.csv": b"file_name\n", "metadata.jsonl": b"{}\n"},
    )
    with pytest.raises(DataError, match="expected one of them"):
        import_source(both, tmp_path / "s")


@pytest.mark.parametrize(
    "lines",
    [
        b"{",
        b"[1]\n",
        b"3\n",
        b'{"label": [1]}\n',
        b'{"file_name": "1.png"}\n{"label": [1]}\n',
        b"\xff\n",
    ],
)
def test_a_damaged_table_of_lines_is_refused(tmp_path: Path, lines: bytes) -> None:
    source = write_folder(tmp_path / "src", {"1.png": png(1), "metadata.jsonl": lines})
    with pytest.raises(DataError, match=r"metadata\.jsonl.*expected"):
        import_source(source, tmp_path / "s")


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def _beyond(file: Path) -> None:
    index = np.load(file.parent / "index.npy")
    index["label"][3] = len(np.load(file)) + 5
    np.save(file.parent / "index.npy", index)


def _another_kind(file: Path) -> None:
    np.save(file, np.load(file).view("<f4"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "No such file"),
        (_cut, "expected the labels|as when it was imported"),
        (_another_kind, "float32"),
        (_beyond, "names labels that labels.npy does not have"),
    ],
)
def test_damaged_labels_are_found_when_the_store_is_opened(
    several: Store, damage: Any, words: str
) -> None:
    assert several.index.dtype == ROW
    damage(several.path / "labels.npy")
    with pytest.raises(DataError, match=words):
        open_store(several.path)
