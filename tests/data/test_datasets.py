"""The papers' data sets in miniature, each as its archives unpack: labels, splits, and what is said
where something is missing.
"""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torchvision
from PIL import Image

from dpvision.cli import main
from dpvision.data.datasets import DATASETS, dataset_source
from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
from dpvision.data.sources import Sample, Source
from dpvision.data.split import split_store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError

from .image_files import SHARED, noise, png, write_folder

IMAGE = png(0, 4, 4)


def _write(root: Path, names) -> Path:
    return write_folder(root, dict.fromkeys(names, IMAGE))


def _imagenet(root: Path) -> None:
    _write(
        root,
        [
            f"{s}/n{i:08d}/{s}_{j}.JPEG"
            for i in range(1000)
            for s in ("train", "val")
            for j in range(1 if s == "val" else 2)
        ],
    )


def _places365(root: Path) -> None:
    classes = [
        f"/{'abc'[i % 3]}/place{364 - i}" for i in range(365)
    ]  # not in alphabetical order: the list decides
    (root / "categories_places365.txt").write_text(
        "".join(f"{c} {i}\n" for i, c in enumerate(classes))
    )
    (root / "places365_train_standard.txt").write_text(
        "".join(f"{c}/1.jpg {i}\n" for i, c in enumerate(classes))
    )
    (root / "places365_val.txt").write_text(
        "".join(f"Places365_val_{i}.jpg {i}\n" for i in range(365))
    )
    _write(
        root,
        [f"data_256_standard{c}/1.jpg" for c in classes]
        + [f"val_256/Places365_val_{i}.jpg" for i in range(365)],
    )


def _places205(root: Path) -> None:
    (root / "trainvalsplit_places205").mkdir()
    for split in ("train", "val"):
        lines = [f"p/place{204 - i}/{split}.jpg {i}\n" for i in range(205)]
        (root / f"trainvalsplit_places205/{split}_places205.csv").write_text("".join(lines))
        _write(root / "images256", [line.split()[0] for line in lines])


def _inaturalist2018(root: Path) -> None:
    for split in ("train", "val"):
        files = [f"train_val2018/Aves/{i}/{split}{i}.jpg" for i in range(0, 8142, 100)]
        lists = {
            "categories": [{"id": i, "name": str(i), "supercategory": "Aves"} for i in range(8142)],
            "images": [{"id": 7 * i, "file_name": file} for i, file in enumerate(files)],
            "annotations": [
                {"image_id": 7 * i, "category_id": int(file.split("/")[2])}
                for i, file in enumerate(files)
            ],
        }
        (root / f"{split}2018.json").write_text(json.dumps(lists))
        _write(root, files)


def _cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / f"{name}.bin").write_bytes(
            b"".join(bytes([i]) + noise(i, 32, 32).transpose(2, 0, 1).tobytes() for i in range(10))
        )
    (folder / "batches.meta.txt").write_text("".join(f"class{i}\n" for i in range(10)) + "\n")


def _cifar100(root: Path) -> None:
    for split in ("train", "test"):
        records = [
            bytes([i // 5, i]) + noise(i, 32, 32).transpose(2, 0, 1).tobytes() for i in range(100)
        ]
        (root / f"{split}.bin").write_bytes(b"".join(records))
    (root / "fine_label_names.txt").write_text("".join(f"fine{i}\n" for i in range(100)))
    (root / "coarse_label_names.txt").write_text("".join(f"coarse{i}\n" for i in range(20)))


def _caltech101(root: Path) -> None:
    names = ["BACKGROUND_Google", *(f"class{i:03d}" for i in range(101))]
    _write(
        root / "101_ObjectCategories", [f"{n}/image_{j:04d}.jpg" for n in names for j in range(32)]
    )


def _aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    _write(data / "images", [f"{i:07d}.jpg" for i in range(300)])
    (data / "variants.txt").write_text("".join(f"DC-{i} mk {i}\n" for i in range(100)))
    for part, split in enumerate(("train", "val", "test")):
        (data / f"images_variant_{split}.txt").write_text(
            "".join(f"{100 * part + i:07d} DC-{i} mk {i}\n" for i in range(100))
        )
    both = [(data / f"images_variant_{s}.txt").read_text() for s in ("train", "val")]
    (data / "images_variant_trainval.txt").write_text("".join(both))


MINIATURES = {
    "imagenet": _imagenet,
    "places365": _places365,
    "places205": _places205,
    "inaturalist2018": _inaturalist2018,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "caltech101": _caltech101,
    "aircraft": _aircraft,
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name, write in MINIATURES.items():
        made[name] = tmp_path_factory.mktemp(name)
        write(made[name])
    return made


@pytest.mark.parametrize("name", sorted(MINIATURES))
def test_all_splits_have_the_same_classes_in_the_same_order_and_share_no_image(roots, name):
    seen: dict[str, set] = {}
    names = None
    for split in DATASETS[name].splits:
        source = dataset_source(name, split, roots[name])
        samples = list(source.samples)
        assert not [s for s in samples if s.problem is not None]
        assert {type(s.fields["label"]) for s in samples} == {int}
        # a class has in each split the label that its name has in the list
        assert (
            names in (None, source.label_names)
            and len(source.label_names) == DATASETS[name].num_classes
        )
        names = source.label_names
        if name != "inaturalist2018":  # every hundredth class has images there
            assert {s.fields["label"] for s in samples} == set(range(len(names)))
        seen[split] = {s.key for s in samples}
    if name not in ("cifar10", "cifar100", "aircraft"):
        assert not set.intersection(*seen.values())
    if name == "aircraft":
        assert (
            seen["trainval"] == seen["train"] | seen["val"] and not seen["trainval"] & seen["test"]
        )


@pytest.mark.parametrize("name", ["imagenet", "places365", "places205"])
def test_the_label_of_an_image_is_its_folders_place_in_the_list_of_classes(roots, name):
    source = dataset_source(name, "train", roots[name])
    for sample in source.samples:
        assert (
            Path(sample.key).parent.name
            == source.label_names[sample.fields["label"]].split("/")[-1]
        )


def test_caltech_trains_on_thirty_of_each_class_and_tests_on_the_rest_without_the_background(roots):
    train, test = (
        list(dataset_source("caltech101", split, roots["caltech101"]).samples)
        for split in ("train", "test")
    )
    assert np.bincount([s.fields["label"] for s in train]).tolist() == [30] * 101
    assert np.bincount([s.fields["label"] for s in test]).tolist() == [2] * 101
    assert not any("BACKGROUND" in s.key for s in train + test)
    # not the first thirty: those were often taken in a row
    assert {s.key.split("/")[1] for s in test} > {"image_0030.jpg", "image_0031.jpg"}


def test_inaturalist_2021_is_found_under_both_names_of_its_folders(tmp_path, monkeypatch):
    monkeypatch.setitem(
        DATASETS, "inaturalist2021", replace(DATASETS["inaturalist2021"], num_classes=3)
    )
    _write(
        tmp_path,
        [
            f"{s}/0000{i}_Animalia_{'zyx'[i]}/{s}.jpg"
            for s in ("2021_train", "2021_valid", "train_mini")
            for i in range(3)
        ],
    )
    found = {
        split: dataset_source("inaturalist2021", split, tmp_path)
        for split in ("train", "val", "train_mini")
    }
    for source in found.values():
        assert [s.fields["label"] for s in source.samples] == [0, 1, 2] and source.label_names[
            0
        ] == "00000_Animalia_z"


def test_the_page_has_the_table_that_the_code_has():
    page = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows.keys() == DATASETS.keys()
    for name, dataset in DATASETS.items():
        assert all(f"{split} {num:,}" in rows[name] for split, num in dataset.splits.items())
        assert f"| {dataset.metric.replace('_', ' ')} |" in rows[name]
        assert f"| {dataset.num_classes}" in rows[name].replace(",", "")


def test_aircraft_agrees_with_torchvision(roots):
    theirs = torchvision.datasets.FGVCAircraft(str(roots["aircraft"]), split="trainval")
    ours = dataset_source("aircraft", "trainval", roots["aircraft"])
    ours_labels = {s.key: ours.label_names[s.fields["label"]] for s in ours.samples}
    their_labels = {
        Path(f).name: theirs.classes[i]
        for f, i in zip(theirs._image_files, theirs._labels, strict=True)
    }
    assert ours_labels == their_labels


def test_cifar_images_come_out_pixel_by_pixel_with_the_fine_label(roots):
    for sample in dataset_source("cifar100", "test", roots["cifar100"]).samples:
        pixels = np.asarray(Image.open(io.BytesIO(sample.image)))
        assert np.array_equal(pixels, noise(sample.fields["label"], 32, 32))


def test_cifar_parquet_takes_the_fine_label(tmp_path):
    table = {
        "img": [{"bytes": png(i), "path": None} for i in range(3)],
        "fine_label": [99, 0, 5],
        "coarse_label": [1, 2, 3],
    }
    features = {
        "fine_label": {"names": [f"fine{i}" for i in range(100)]},
        "coarse_label": {"names": [str(i) for i in range(20)]},
    }
    made = pa.table(table).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    (tmp_path / "cifar100").mkdir()
    pq.write_table(made, tmp_path / "cifar100" / "train-00000-of-00001.parquet")
    source = dataset_source("cifar100", "train", tmp_path)
    assert [s.fields["label"] for s in source.samples] == [99, 0, 5] and source.label_names[
        99
    ] == "fine99"


def test_the_real_cifar10_has_its_published_counts():
    if not (SHARED / "cifar10").is_dir():
        pytest.skip("no CIFAR-10 in shared/data")
    source = dataset_source("cifar10", "test", SHARED / "cifar10")
    assert np.bincount([s.fields["label"] for s in source.samples]).tolist() == [1000] * 10
    assert source.label_names == (SHARED / "cifar10" / "classes.txt").read_text().split()


WRONG = [
    ("imagenet", "train", lambda r: None, "has no train"),
    ("imagenet", "val", lambda r: _write(r, ["val/ILSVRC2012_val_1.JPEG"]), "has no class folders"),
    (
        "imagenet",
        "train",
        lambda r: _write(r, ["train/n1/a.JPEG", "train/n2/a.JPEG"]),
        "2 classes; expected 1000",
    ),
    (
        "imagenet",
        "train",
        lambda r: _write(r, ["train/n1/a.JPEG", "val/n2/a.JPEG"]),
        "class 'n1' is in only one of",
    ),
    ("places365", "val", lambda r: _write(r, ["val_256/a.jpg"]), "categories_places365.txt"),
    (
        "places205",
        "val",
        lambda r: (r / "val_places205.csv").write_text("nonsense"),
        "train_places205.csv",
    ),
    ("inaturalist2018", "val", lambda r: (r / "val2018.json").write_text("[]"), "train_val2018"),
    (
        "inaturalist2021",
        "train_mini",
        lambda r: _write(r, ["train/00000_A/1.jpg"]),
        "2021_train_mini",
    ),
    (
        "cifar100",
        "train",
        lambda r: _write(r, ["train", "test", "meta"]),
        "Python version is a pickle",
    ),
    (
        "cifar10",
        "test",
        lambda r: (r / "test_batch.bin").write_bytes(bytes(3000)),
        "no list of class names",
    ),
    (
        "caltech101",
        "test",
        lambda r: _write(r, [f"101_ObjectCategories/ant/{i}.jpg" for i in range(30)]),
        "30 images; expected more",
    ),
    ("aircraft", "test", lambda r: _write(r, ["images/1.jpg"]), "has no data"),
    ("aircraft", "dev", lambda r: None, "expected one of train, val, trainval, test"),
    ("imagnet", "train", lambda r: None, "Did you mean imagenet"),
]


@pytest.mark.parametrize(("name", "split", "write", "words"), WRONG)
def test_what_is_missing_or_wrong_is_named_with_what_is_expected(
    tmp_path, name, split, write, words
):
    write(tmp_path)
    with pytest.raises(DataError, match=words):
        list(dataset_source(name, split, tmp_path).samples)


def test_a_damaged_binary_file_and_a_list_that_leads_elsewhere_are_refused(tmp_path):
    _cifar10(tmp_path)
    file = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="expected a multiple of 3073"):
        list(dataset_source("cifar10", "test", tmp_path).samples)
    _places365(tmp_path)
    (tmp_path / "places365_val.txt").write_text("../../secret.jpg 0\n")
    with pytest.raises(DataError, match="leads out of"):
        list(dataset_source("places365", "val", tmp_path).samples)


def test_the_command_makes_stores_with_the_classes_in_order(roots, tmp_path, capsys):
    common = ["--dataset", "aircraft", "--public", "--json"]
    for split in ("trainval", "test"):
        root, store = str(roots["aircraft"]), str(tmp_path / split)
        assert main(["data", "import", root, store, "--split", split, *common]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (
            said["metric"] == "mean_per_class"
            and said["pictures_published"] == DATASETS["aircraft"].splits[split]
        )
    train, test = open_store(tmp_path / "trainval"), open_store(tmp_path / "test")
    assert train.label_names == test.label_names and test.label_names[3] == "DC-3 mk 3"
    assert test.meta["licence"] == "non-commercial research" and test.visibility == "public"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--split", "train"], "without a data set"),
        (["--dataset", "aircraft"], "without --split"),
        (["--dataset", "aircraft", "--split", "test", "--label-from", "x"], "fixes both"),
    ],
)
def test_options_that_do_not_go_together_are_refused(roots, tmp_path, capsys, options, words):
    assert main(["data", "import", str(roots["aircraft"]), str(tmp_path / "s"), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_stores_metric_is_its_data_sets(tmp_path: Path) -> None:
    """Aircraft is scored per class: evaluation reads it from the store, also from a half of it."""
    scenes = write_scenes(tmp_path / "scenes", 40, 16)
    samples = [Sample(f"p{i}", scenes.read(i), {"label": i % 2}) for i in range(40)]
    store = import_samples(
        Source(iter(samples), ["a", "b"], metric="mean_per_class"),
        tmp_path / "aircraft",
        public=True,
    )
    half, _ = split_store(store.path, tmp_path / "one", tmp_path / "two", 0.5)
    assert (
        store.meta["metric"]
        == half.meta["metric"]
        == DATASETS["aircraft"].metric
        == "mean_per_class"
    )
