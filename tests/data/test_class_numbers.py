"""One rule for class numbers: the same label gets the same number from every kind of source, in
private and public stores.
"""

import copy
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpvision.cli import main
from dpvision.data.class_names import numbered_as
from dpvision.data.import_labels import LabelRule, read_classes
from dpvision.data.importer import import_samples, import_source
from dpvision.data.open import open_store
from dpvision.data.sources import Sample, Source
from dpvision.data.store import Store
from dpvision.errors import DataError

from .image_files import encode, js, png, write_folder, write_tar

KINDS = (
    "folders",
    "csv",
    "jsonl numbers",
    "jsonl text",
    "parquet numbers",
    "parquet floats",
    "parquet text",
    "cls",
    "json",
)


def write_source(path: Path, kind: str, labels: list[str]) -> Path:
    """Images 0, 1, ... with these labels, in the form of ``kind``; numbers where the form has them
    and all labels are numbers.
    """
    keys = [f"{i}.png" for i in range(len(labels))]
    images = {key: png(i) for i, key in enumerate(keys)}
    if kind == "folders":
        return write_folder(
            path, {f"{label}/{key}": images[key] for key, label in zip(keys, labels, strict=True)}
        )
    if kind == "csv":
        rows = "".join(f"{key},{label}\n" for key, label in zip(keys, labels, strict=True))
        return write_folder(path, images | {"metadata.csv": f"file_name,label\n{rows}".encode()})
    if kind.startswith("jsonl"):
        of = int if kind.endswith("numbers") else str
        lines = [
            json.dumps({"file_name": key, "label": of(label)})
            for key, label in zip(keys, labels, strict=True)
        ]
        return write_folder(path, images | {"metadata.jsonl": "\n".join(lines).encode()})
    if kind.startswith("parquet"):
        of = {"numbers": int, "floats": float, "text": str}[kind.split()[1]]
        path.mkdir()
        pq.write_table(
            pa.table({"image": list(images.values()), "label": [of(label) for label in labels]}),
            path / "a.parquet",
        )
        return path
    beside = {
        "cls": lambda label: ("cls", f"{label}\n".encode()),
        "json": lambda label: ("json", js(label=int(label))),
    }[kind]
    members = dict(images)
    for i, label in enumerate(labels):
        ending, data = beside(label)
        members[f"{i}.{ending}"] = data
    return write_tar(path.with_suffix(".tar"), members)


def labels_by_image(store: Store) -> list[tuple[int, ...]]:
    found = {
        Path(record.key).stem.removeprefix("a-"): record.labels
        for record in map(store.record, range(store.num_records))
    }
    return [found[key] for key in sorted(found, key=int)]


@pytest.mark.parametrize(
    "labels", [["0", "2"], ["1", "2", "3", "4", "5"], ["10", "2", "0"]], ids=" ".join
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_is_that_number_from_every_source_private_and_public(
    tmp_path: Path, kind: str, labels: list[str]
) -> None:
    source = write_source(tmp_path / "src", kind, labels)
    private, public = (
        import_source(source, tmp_path / "private"),
        import_source(source, tmp_path / "public", public=True),
    )
    assert (
        labels_by_image(private) == labels_by_image(public) == [(int(label),) for label in labels]
    )
    assert private.label_names is None and public.label_names is None


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "a\x85b", "ab\u202ecd", "a\u2066b"])
def test_a_class_name_that_does_not_print_is_refused_from_every_source(
    tmp_path: Path, name: str
) -> None:
    table = pa.table({"image": [png(0), png(1)], "label": [name, "cat"]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "classes.json").write_text(json.dumps([name, "cat"]))
    found = (
        LabelRule(),
        LabelRule(classes=(name, "cat")),
        LabelRule(classes={"cat": "b", "e": name}),
    )
    for rule in (*found, LabelRule(classes=tmp_path / "classes.json")):
        with pytest.raises(DataError, match=r"class=.*without line ends, control characters"):
            import_source(tmp_path / "a.parquet", tmp_path / "s", public=True, labels=rule)
    samples = [Sample("0", png(0), {"label": 0})]
    with pytest.raises(DataError, match=r"class=.*without line ends, control characters"):
        import_samples(Source(iter(samples), [name]), tmp_path / "s")
    assert not (tmp_path / "s").exists()
    rule = LabelRule(classes=("cat",), unknown_classes="unlabelled")
    assert import_source(tmp_path / "a.parquet", tmp_path / "s", labels=rule).num_records == 2


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_declared_numbers_are_names_in_every_source(
    tmp_path: Path, kind: str, public: bool
) -> None:
    source = write_source(tmp_path / "src", kind, ["1", "2", "3"])
    store = import_source(
        source, tmp_path / "s", public=public, labels=LabelRule(classes=("1", "2", "3"))
    )
    assert labels_by_image(store) == [(0,), (1,), (2,)] and store.label_names == ["1", "2", "3"]
    other = import_source(
        source, tmp_path / "t", public=public, labels=LabelRule(classes=("03", "1", "2"))
    )
    assert labels_by_image(other) == ([(1,), (2,), (0,)]), "03 is declared, and 3 is that number"


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_for_declared_names_are_refused_with_both_readings(
    tmp_path: Path, kind: str
) -> None:
    """1 may be the second of the declared names, or the first. A JSON object says which."""
    source, names = write_source(tmp_path / "src", kind, ["1", "2", "3"]), ("cat", "dog", "emu")
    for rule in (LabelRule(classes=names), LabelRule(classes=names, unknown_classes="unlabelled")):
        with pytest.raises(
            DataError,
            match=r"counted from 0, 1 is 'dog'; "
            r"counted from 1, 1 is 'cat'.*\"0\": \"cat\".*\"1\": \"cat\"",
        ):
            import_source(source, tmp_path / "refused", labels=rule)
    file = tmp_path / "classes.json"
    file.write_text('{"1": "cat", "2": "dog", "3": "emu"}')
    assert main(["data", "import", str(source), str(tmp_path / "s"), "--classes", str(file)]) == 0
    store = open_store(tmp_path / "s")
    assert labels_by_image(store) == [(0,), (1,), (2,)] and store.label_names == list(names)
    file.write_text('{"0": "none", "1": "cat", "2": "dog", "3": "emu"}')
    assert labels_by_image(
        import_source(source, tmp_path / "t", labels=LabelRule(classes=file))
    ) == [
        (1,),
        (2,),
        (3,),
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS])
def test_numbers_from_zero_for_declared_names_count_from_zero(tmp_path: Path, kind: str) -> None:
    store = import_source(
        write_source(tmp_path / "src", kind, ["0", "2"]),
        tmp_path / "s",
        labels=LabelRule(classes=("cat", "dog", "emu")),
    )
    assert labels_by_image(store) == [(0,), (2,)] and store.label_names == ["cat", "dog", "emu"]


def import_images(
    path: Path, values: list[Any], names: list[str] | None = None, **options: Any
) -> Store:
    samples = [
        Sample(str(i), png(i), {} if label is ... else {"label": label})
        for i, label in enumerate(values)
    ]
    return import_samples(Source(iter(samples), names), path, **options)


@pytest.mark.parametrize("public", [False, True])
def test_minus_one_empty_and_missing_are_no_label(tmp_path: Path, public: bool) -> None:
    missing = [-1, -1.0, "-1", " -1 ", "-1.0", "", "  ", None, float("nan"), ...]
    store = import_images(tmp_path / "s", [*missing, 1], public=public)
    assert store.labels.tolist() == [-1] * len(missing) + [1] and store.label_names is None
    named = import_images(
        tmp_path / "n", [*missing, "cat"], public=public, labels=LabelRule(classes=("cat", "dog"))
    )
    assert named.labels.tolist() == [-1] * len(missing) + [0]
    of_source = import_images(tmp_path / "o", [*missing, 1], public=public, names=["cat", "dog"])
    assert of_source.labels.tolist() == [-1] * len(missing) + [1]
    declared = import_images(
        tmp_path / "d", ["-1", 1, -1], public=public, labels=LabelRule(classes=("-1", "1"))
    )
    assert declared.labels.tolist() == [0, 1, 0], "who declares -1 as a name means a class"


def test_one_number_has_one_spelling_and_one_name_one_form(tmp_path: Path) -> None:
    assert import_images(tmp_path / "a", ["2", 2, 2.0, "2.0", " 2 "]).labels.tolist() == [2] * 5
    for labels in (["2", "02"], [2, "02"]):
        with pytest.raises(DataError, match="'2' and '02' may be one class or two"):
            import_images(tmp_path / "b", labels, public=True)
    cafe = unicodedata.normalize("NFD", "café")
    store = import_images(tmp_path / "c", [cafe, "café", " café "], public=True)
    assert store.labels.tolist() == [0] * 3 and store.label_names == ["café"]
    assert import_images(
        tmp_path / "d", [cafe], labels=LabelRule(classes=("bar", "café"))
    ).labels.tolist() == [1]
    (tmp_path / "classes.txt").write_text(f"bar\n {cafe} \n", encoding="utf-8")
    assert read_classes(tmp_path / "classes.txt") == ("bar", "café")


@pytest.mark.parametrize("public", [False, True])
def test_names_among_numbers_are_refused(tmp_path: Path, public: bool) -> None:
    labels = ["7", "cat"]
    with pytest.raises(
        DataError, match=r"both names and numbers, such as 'cat' and '7'|class names"
    ):
        import_images(tmp_path / "s", labels, public=public)
    store = import_images(
        tmp_path / "d", labels, public=public, labels=LabelRule(classes=("cat", "7"))
    )
    assert store.labels.tolist() == [1, 0]


@pytest.mark.parametrize("text", ["nan", "NULL", "N/A"])
def test_text_that_may_mean_no_label_is_no_class_unless_declared(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="may be a class, or no label"):
        import_images(tmp_path / "s", ["cat", text], public=True)
    assert import_images(
        tmp_path / "d", ["cat", text], public=True, labels=LabelRule(classes=("cat", text))
    ).labels.tolist() == [0, 1]


def test_numbers_of_a_source_with_names_are_those_names(tmp_path: Path) -> None:
    """As datasets defines ClassLabel, also where the names are numbers themselves."""
    assert import_images(tmp_path / "a", [0, 1], names=["1", "2"]).label_names == ["1", "2"]
    assert import_images(tmp_path / "b", [0, 1], names=["1", "2"]).labels.tolist() == [0, 1]
    assert import_images(tmp_path / "c", ["dog", "cat"], names=["cat", "dog"]).labels.tolist() == [
        1,
        0,
    ]
    declared = import_images(
        tmp_path / "d", [0, 1], names=["1", "2"], labels=LabelRule(classes=("2", "1"))
    )
    assert declared.labels.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"not declared .'emu'.; expected the 2 declared ones"):
        import_images(tmp_path / "e", ["emu"], names=["cat", "dog"], public=True)


def test_lists_follow_the_same_rule(tmp_path: Path) -> None:
    for public in (False, True):
        store = import_images(
            tmp_path / f"a{public}",
            [[1, 3], ["1", "3"], "1|3", -1],
            public=public,
            labels=LabelRule(label_separator="|"),
        )
        assert [store.record(i).labels for i in range(4)] == [(1, 3)] * 3 + [
            ()
        ] and store.labelled.tolist() == [True] * 3 + [False]
    with pytest.raises(DataError, match=r"counted from 1, 1 is 'cat'"):
        import_images(tmp_path / "b", [[1], [2]], labels=LabelRule(classes=("cat", "dog")))


@pytest.mark.parametrize(
    "text",
    [
        '{"1": "cat", "01": "cat"}',
        '{"1": "cat", "2": ""}',
        '{"1": 2}',
        "{}",
        '{"1": "cat", " 1": "dog"}',
        "a\na\n",
    ],
)
def test_class_files_with_two_readings_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes").write_text(text)
    with pytest.raises(DataError, match=r"classes: .*different names"):
        read_classes(tmp_path / "classes")


# --- stores and runs that are compared
# -------------------------------------------------------------------------------------------

COLOURS = {"amber": (220, 150, 30), "blue": (30, 60, 220), "cyan": (40, 210, 210)}


def colour_files(names: list[str], seed: int, per_class: int = 20) -> list[tuple[str, bytes]]:
    """(name, image of its colour with noise): classes that any classifier separates."""
    rng = np.random.default_rng(seed)
    found = []
    for name in names:
        for _ in range(per_class):
            pixels = np.array(COLOURS[name]) + rng.normal(0, 8, (8, 8, 3))
            found.append((name, encode(pixels.clip(0, 255).astype(np.uint8))))
    return found


def write_colours(
    path: Path, names: list[str], label_of: dict[str, Any], seed: int, form: str
) -> Path:
    images = colour_files(names, seed)
    if form == "folders":
        return write_folder(
            path, {f"{label_of[name]}/{i}.png": data for i, (name, data) in enumerate(images)}
        )
    path.mkdir()
    pq.write_table(
        pa.table(
            {"image": [data for _, data in images], "label": [label_of[name] for name, _ in images]}
        ),
        path / "a.parquet",
    )
    return path


NAMES = list(COLOURS)
AS_NAMES = dict(zip(NAMES, NAMES, strict=True))
FROM_ONE = {name: k + 1 for k, name in enumerate(NAMES)}


def scored(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    train: Path,
    test: Path,
    classes: str | None,
    num_classes: int,
) -> float:
    """Accuracy of ``adapt --test``, of ``evaluate`` on the run, and of a probe, which must all be
    the same number.
    """
    options = []
    if classes is not None:
        (tmp_path / "classes.txt").write_text(classes)
        options = ["--classes", str(tmp_path / "classes.txt")]
    assert main(["data", "import", str(train), str(tmp_path / "train"), *options]) == 0
    assert main(["data", "import", str(test), str(tmp_path / "test"), "--public"]) == 0
    argv = [
        "adapt",
        "--data",
        str(tmp_path / "train"),
        "--encoder",
        "pixels",
        "--num-classes",
        str(num_classes),
        "--dataset-size",
        "60",
    ]
    argv += [
        "--head",
        "least_squares",
        "--privacy.guarantee",
        "none",
        "--runs",
        str(tmp_path / "runs"),
        "--name",
        "a",
    ]
    capsys.readouterr()
    code = main([*argv, "--test", str(tmp_path / "test"), "--json", "--show-confidential"])
    said = capsys.readouterr()
    assert code == 0, said.err
    (score, *_) = json.loads(said.out)["scores"]
    run = str(tmp_path / "runs" / "a")
    assert main(["evaluate", run, "--test", str(tmp_path / "test"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["value"] == score["value"]
    probe = [
        "evaluate",
        "pixels",
        "--train",
        str(tmp_path / "train"),
        "--test",
        str(tmp_path / "test"),
        "--protocols",
        "knn",
        "--json",
    ]
    assert main([*probe, "--against", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["value"] == score["value"]
    return score["value"]


@pytest.mark.parametrize("missing", NAMES)
def test_a_class_missing_from_the_test_folder_shifts_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    train = write_colours(tmp_path / "a", NAMES, AS_NAMES, 0, "folders")
    test = write_colours(
        tmp_path / "b", [name for name in NAMES if name != missing], AS_NAMES, 1, "folders"
    )
    assert scored(tmp_path, capsys, train, test, "\n".join(NAMES), 3) == 1.0


@pytest.mark.parametrize(
    ("train_form", "test_form"),
    [("folders", "folders"), ("parquet", "folders"), ("folders", "parquet")],
)
@pytest.mark.parametrize("classes", [None, "1\n2\n3", "3\n1\n2"])
def test_numbers_from_one_are_scored_as_they_were_trained(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    train_form: str,
    test_form: str,
    classes: str | None,
) -> None:
    train = write_colours(tmp_path / "a", NAMES, FROM_ONE, 0, train_form)
    test = write_colours(tmp_path / "b", NAMES[1:], FROM_ONE, 1, test_form)
    assert scored(tmp_path, capsys, train, test, classes, 4 if classes is None else 3) == 1.0


def test_one_side_without_names_is_no_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {name: k for k, name in enumerate(NAMES)}
    train = write_colours(tmp_path / "a", NAMES, AS_NAMES, 0, "folders")
    test = write_colours(tmp_path / "b", NAMES, numbers, 1, "parquet")
    with pytest.raises(
        AssertionError,
        match=r"classes of the stores differ: '0', '1', '2' of .*expected the same names",
    ):
        scored(tmp_path, capsys, train, test, "\n".join(NAMES), 3)
    named, plain = open_store(tmp_path / "train"), open_store(tmp_path / "test")
    for store, names in ((named, None), (plain, NAMES), (named, NAMES[:2])):
        with pytest.raises(DataError, match="classes of the stores differ"):
            numbered_as(store, names, "evaluate", "the training store")
    public = copy.copy(named)
    public.visibility = "public"
    for store, where in ((public, "evaluate: "), (named, "evaluate: operator only: ")):
        with pytest.raises(DataError, match=f"^{where}classes of the stores differ"):
            numbered_as(store, None, "evaluate", "the training store")
    assert main(["evaluate", "pixels", "--train", str(plain.path), "--test", str(named.path)]) == 2
    assert "classes of the stores differ: 'amber', 'blue', 'cyan'" in capsys.readouterr().err


def test_the_names_are_in_the_classifier_when_the_store_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    import torch

    import dpvision
    from dpvision.eval.probes.own_head import score_own_head

    train = write_colours(tmp_path / "a", NAMES, AS_NAMES, 0, "folders")
    test = write_colours(tmp_path / "b", NAMES[1:], AS_NAMES, 1, "folders")
    assert scored(tmp_path, capsys, train, test, "cyan\namber\nblue", 3) == 1.0
    shutil.rmtree(tmp_path / "train")
    assert (
        score_own_head(tmp_path / "runs" / "a", open_store(tmp_path / "test"), workers=1)[0].value
        == 1.0
    )
    classifier = dpvision.load_classifier(tmp_path / "runs" / "a")
    assert classifier.class_names == ("cyan", "amber", "blue")
    from PIL import Image

    image = Image.open(io.BytesIO(colour_files(["amber"], 5, 1)[0][1]))
    scores_BK = classifier(torch.from_numpy(classifier.preprocess(image))[None])
    assert classifier.class_names[int(scores_BK[0].argmax())] == "amber"


def test_several_labels_are_matched_by_name_too(tmp_path: Path) -> None:
    store = import_images(tmp_path / "s", [["b", "c"], [], ["c"], None], public=True)
    assert store.label_names == ["b", "c"]
    made = numbered_as(store, ["c", "a", "b"], "evaluate", "the training store")
    assert [made.record(i).labels for i in range(4)] == [(0, 2), (), (0,), ()]
    assert made.targets(np.arange(3), 3).tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 0]]
    assert [store.record(i).labels for i in range(4)] == [(0, 1), (), (1,), ()], (
        "the store itself keeps its numbers"
    )
