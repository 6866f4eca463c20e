"""The papers' data sets by name: layout on disk, splits, classes in a fixed order, and metric.

Nothing is downloaded. ``ROOT`` is the folder into which the official archives (or torchvision) were
unpacked.
"""

import difflib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from dpvision.data.beside import is_hidden
from dpvision.data.sample import Sample, Source, file_sample
from dpvision.data.sources import open_source
from dpvision.errors import DataError

Metric = Literal["accuracy", "mean_per_class"]
_TRAIN_PER_CLASS = 30  # Caltech-101's usual protocol
_CIFAR_PX = 32


@dataclass(frozen=True)
class Dataset:
    """The published facts of a data set, and its reader."""

    title: str
    num_classes: int
    splits: dict[str, int]
    """Number of images in each split as published; papers report scores on the last."""
    metric: Metric
    layout: str
    """Files expected below ROOT, for documentation and errors."""
    licence: str
    read: Callable[["Dataset", Path, str], Source]


def dataset_source(name: str, split: str, root: str | Path) -> Source:
    """Open one split, for ``import_samples``: samples with integer labels, and the class names.

    The names have the same order in every split.

    Args:
        name: a key of ``DATASETS``.
        split: one of its splits.
        root: the folder into which its archives were unpacked.

    Raises:
        DataError: unknown name or split; a folder, a list or a class is missing, or there are too
            many classes.
    """
    dataset = find_dataset(name)
    if split not in dataset.splits:
        raise DataError(
            f"dataset {name}: split={split!r}; expected one of {', '.join(dataset.splits)}. Name "
            "it with --split."
        )
    if not Path(root).is_dir():
        raise DataError(
            f"dataset {name}: {root} is no folder; expected {dataset.layout}. Pass the folder of "
            "the unpacked archives."
        )
    source = dataset.read(dataset, Path(root), split)
    got = len(source.label_names or [])
    if got != dataset.num_classes:
        raise DataError(
            f"dataset {name}: {root}: {got} classes; expected {dataset.num_classes}. Unpack the "
            "whole archive again."
        )
    return source._replace(licence=dataset.licence, metric=dataset.metric)


def find_dataset(name: str) -> Dataset:
    """Return the entry of ``DATASETS``, or raise DataError with the closest names."""
    if name in DATASETS:
        return DATASETS[name]
    close = difflib.get_close_matches(name, DATASETS, n=2)
    hint = (
        f" Did you mean {' or '.join(close)}?"
        if close
        else " Leave --dataset out for any other folder."
    )
    raise DataError(f"dataset: {name!r}; expected one of {', '.join(DATASETS)}.{hint}")


# --- finding things on the disk
# --------------------------------------------------------------------------------------------------


def _find(dataset: Dataset, root: Path, *candidates: str) -> Path:
    """Return the first of the candidate paths that exists below ``root``."""
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    there = sorted(entry.name for entry in root.iterdir())[:6]
    raise DataError(
        f"dataset: {root} has no {' or '.join(candidates)} (it has {there}); expected "
        f"{dataset.layout}. Pass the folder of the unpacked archives."
    )


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"dataset: {file}: {error}; expected a list in UTF-8. Unpack the archive again."
        ) from None


def _pairs(file: Path) -> Iterator[tuple[str, int]]:
    for line in _lines(file):
        name, _, label = line.rpartition(" ")
        if not name or not label.isdecimal():
            raise DataError(
                f"dataset: {file}: {line!r}; expected a path and a class number. Unpack the "
                "archive again."
            )
        yield name.lstrip("/"), int(label)


def _folders(folder: Path) -> list[str]:
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name)
    )


# --- layouts
# --------------------------------------------------------------------------------------------------


def _class_folders(dataset: Dataset, folder: Path, others: list[Path]) -> Source:
    """Open class folders below ``folder``; every other split on disk must have the same ones."""
    names = _folders(folder)
    for other in [o for o in others if o.is_dir()]:
        differ = sorted(set(names) ^ set(_folders(other)))
        if differ:
            where = f"dataset: class {differ[0]!r} is in only one of {folder} and {other}"
            raise DataError(
                f"{where} ({len(differ)} such); expected the same classes. Unpack the archive "
                "that lacks it again."
            )
    if not names:
        raise DataError(
            f"dataset: {folder} has no class folders; expected {dataset.layout}. Sort the images "
            "into them first."
        )
    return Source(_images_below(folder, names), names)


def _images_below(folder: Path, names: list[str]) -> Iterator[Sample]:
    for label, name in enumerate(names):
        for file in sorted(file for file in os.listdir(folder / name) if not is_hidden(file)):
            yield file_sample(folder / name / file, f"{name}/{file}", {"label": label})


def _listed(folder: Path, listed: list[tuple[str, int]], num_classes: int) -> Iterator[Sample]:
    for name, label in listed:
        if label >= num_classes:
            raise DataError(
                f"dataset: {name}: class {label}; expected below {num_classes}. Unpack the lists "
                "of this data set again."
            )
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(
                f"dataset: {name!r} leads out of {folder}; expected an image below it. Get the "
                "lists from their publisher."
            )
        yield file_sample(folder / name, name, {"label": label})


def _imagenet(dataset: Dataset, root: Path, split: str) -> Source:
    return _class_folders(
        dataset, _find(dataset, root, split), [root / other for other in dataset.splits]
    )


def _places365(dataset: Dataset, root: Path, split: str) -> Source:
    if (root / "train").is_dir() or (root / "val").is_dir():
        return _imagenet(dataset, root, split)
    categories = list(_pairs(_find(dataset, root, "categories_places365.txt")))
    names = [name for name, _ in sorted(categories, key=lambda pair: pair[1])]
    if [label for _, label in sorted(categories, key=lambda pair: pair[1])] != list(
        range(len(names))
    ):
        raise DataError(
            f"dataset: {root}/categories_places365.txt does not number its classes from 0 on. "
            "Unpack the lists again."
        )
    if split == "train":
        listed, folder = (
            "places365_train_standard.txt",
            _find(dataset, root, "data_256_standard", "data_large_standard", "data_256"),
        )
    else:
        listed, folder = "places365_val.txt", _find(dataset, root, "val_256", "val_large")
    return Source(_listed(folder, list(_pairs(_find(dataset, root, listed))), len(names)), names)


def _places205(dataset: Dataset, root: Path, split: str) -> Source:
    inside = "trainvalsplit_places205"
    # only the paths of the training list hold the class names: abbey in a/abbey/x.jpg
    names: dict[int, str] = {}
    listed = {
        s: list(_pairs(_find(dataset, root, f"{inside}/{s}_places205.csv", f"{s}_places205.csv")))
        for s in ("train", split)
    }
    for name, label in listed["train"]:
        names.setdefault(label, "/".join(name.split("/")[1:-1]))
    if sorted(names) != list(range(len(names))):
        raise DataError(
            f"dataset: {root}: {len(names)} classes that are not numbered from 0 on; expected "
            "205. Unpack the lists again."
        )
    folder = _find(dataset, root, "images256", "data/vision/torralba/deeplearning/images256")
    return Source(_listed(folder, listed[split], len(names)), [names[i] for i in range(len(names))])


def _inaturalist2018(dataset: Dataset, root: Path, split: str) -> Source:
    file = _find(dataset, root, f"{split}2018.json")
    folder = _find(dataset, root, "train_val2018").parent
    try:
        lists = json.loads(file.read_bytes())
        names = {int(c["id"]): str(c["name"]) for c in lists["categories"]}
        label_of = {int(a["image_id"]): int(a["category_id"]) for a in lists["annotations"]}
        listed = [(str(i["file_name"]), label_of[int(i["id"])]) for i in lists["images"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"dataset: {file} ({error!r}); expected images, annotations and categories. Unpack "
            "it again."
        ) from None
    if sorted(names) != list(range(len(names))):
        raise DataError(
            f"dataset: {file}: {len(names)} classes that are not numbered from 0 on. Unpack it "
            "again."
        )
    return Source(_listed(folder, listed, len(names)), [names[i] for i in range(len(names))])


def _inaturalist2021(dataset: Dataset, root: Path, split: str) -> Source:
    torchvisions = {"train": "2021_train", "train_mini": "2021_train_mini", "val": "2021_valid"}
    others = [root / name for pair in torchvisions.items() for name in pair]
    return _class_folders(dataset, _find(dataset, root, split, torchvisions[split]), others)


def _cifar(dataset: Dataset, root: Path, split: str) -> Source:
    """Open the binary version, or the parquet files of the Hugging Face hub.

    The Python version is a pickle and is not opened.
    """
    many = dataset.num_classes == 100
    label = "fine_label" if many else "label"
    tables = sorted(root.glob(f"{split}*.parquet")) or sorted(root.glob(f"*/{split}*.parquet"))
    if tables:
        parts = [open_source(table, label_from=label) for table in tables]
        names = parts[0].label_names or _cifar_names(dataset, root, tables[0].parent)
        return Source(
            (
                s._replace(fields={"label": s.fields.get(label)})
                for part in parts
                for s in part.samples
            ),
            names,
        )
    folder = next(
        (
            f
            for f in (root, root / "cifar-100-binary", root / "cifar-10-batches-bin")
            if list(f.glob("*.bin"))
        ),
        root,
    )
    if not list(folder.glob("*.bin")):
        python = (
            " (the Python version is a pickle, which dpvision does not open: take the binary "
            "version)"
        )
        found = any(
            (root / p).exists() for p in ("cifar-100-python", "cifar-10-batches-py", "data_batch_1")
        )
        found = found or (many and (root / "train").is_file())
        raise DataError(
            f"dataset: {root} has no .bin files; expected "
            f"{dataset.layout}{python if found else ''}. Pass the folder of the unpacked "
            "archives."
        )
    if many:
        files = [_find(dataset, folder, f"{split}.bin")]
    else:
        files = [
            _find(dataset, folder, n)
            for n in (
                [f"data_batch_{i}.bin" for i in range(1, 6)]
                if split == "train"
                else ["test_batch.bin"]
            )
        ]
    return Source(
        _cifar_records(files, labels=2 if many else 1), _cifar_names(dataset, folder, folder)
    )


def _cifar_names(dataset: Dataset, *folders: Path) -> list[str]:
    found = [
        f / n
        for f in folders
        for n in ("fine_label_names.txt", "batches.meta.txt", "classes.txt")
        if (f / n).is_file()
    ]
    if not found:
        raise DataError(
            f"dataset: {folders[0]} has no list of class names; expected {dataset.layout}. "
            "Unpack the whole archive."
        )
    return [line.strip() for line in _lines(found[0])]


def _cifar_records(files: list[Path], labels: int) -> Iterator[Sample]:
    """Yield the records of the binary version, as PNG.

    A record is one or two bytes of labels (the fine one last), then red, green and blue planes.
    """
    size = labels + 3 * _CIFAR_PX**2
    for file in files:
        data = np.fromfile(file, np.uint8)
        if not len(data) or len(data) % size:
            raise DataError(
                f"dataset: {file}: {len(data)} bytes; expected a multiple of {size}. Unpack the "
                "archive again."
            )
        for number, record in enumerate(data.reshape(-1, size)):
            png = io.BytesIO()
            Image.fromarray(
                record[labels:].reshape(3, _CIFAR_PX, _CIFAR_PX).transpose(1, 2, 0).copy()
            ).save(png, "PNG")
            yield Sample(
                f"{file.stem}-{number}", png.getvalue(), {"label": int(record[labels - 1])}
            )


def _caltech101(dataset: Dataset, root: Path, split: str) -> Source:
    folder = _find(
        dataset,
        root,
        "101_ObjectCategories",
        "caltech101/101_ObjectCategories",
        "caltech-101/101_ObjectCategories",
    )
    names = [name for name in _folders(folder) if name != "BACKGROUND_Google"]
    chosen: list[tuple[str, int]] = []
    for label, name in enumerate(names):
        files = sorted(
            (file for file in os.listdir(folder / name) if not is_hidden(file)),
            key=lambda file: blake2b(f"{name}/{file}".encode()).digest(),
        )
        if len(files) <= _TRAIN_PER_CLASS:
            rule = f"expected more than {_TRAIN_PER_CLASS}, which are for training"
            raise DataError(
                f"dataset: {folder / name}: {len(files)} images; {rule}. Unpack the archive again."
            )
        part = files[:_TRAIN_PER_CLASS] if split == "train" else files[_TRAIN_PER_CLASS:]
        chosen += [(f"{name}/{file}", label) for file in sorted(part)]
    return Source(_listed(folder, chosen, len(names)), names)


def _aircraft(dataset: Dataset, root: Path, split: str) -> Source:
    data = _find(dataset, root, "data", "fgvc-aircraft-2013b/data")
    names = [name.strip() for name in _lines(_find(dataset, data, "variants.txt"))]
    label_of = {name: label for label, name in enumerate(names)}
    chosen: list[tuple[str, int]] = []
    for line in _lines(_find(dataset, data, f"images_variant_{split}.txt")):
        number, _, name = line.partition(" ")
        if name.strip() not in label_of:
            raise DataError(
                f"dataset: {data}: variant {name!r} of {number} is not in variants.txt; expected "
                "it. Unpack the archive again."
            )
        chosen.append((f"{number}.jpg", label_of[name.strip()]))
    return Source(_listed(_find(dataset, data, "images"), chosen, len(names)), names)


# Counts are the publishers'; Caltech-101 is without its background class, and this file splits it.
DATASETS: dict[str, Dataset] = {
    "imagenet": Dataset(
        "ImageNet-1K",
        1000,
        {"train": 1_281_167, "val": 50_000},
        "accuracy",
        "train/WNID/ and val/WNID/ (as torchvision sorts them)",
        "non-commercial research, by the publisher's terms of access",
        _imagenet,
    ),
    "places365": Dataset(
        "Places-365",
        365,
        {"train": 1_803_460, "val": 36_500},
        "accuracy",
        "train/CLASS/ and val/CLASS/, or the lists categories_places365.txt, "
        "places365_train_standard.txt, places365_val.txt beside data_256_standard/ (or "
        "data_large_standard/) and val_256/ (or val_large/)",
        "by the publisher's terms; images belong to their makers",
        _places365,
    ),
    "places205": Dataset(
        "Places-205",
        205,
        {"train": 2_448_873, "val": 20_500},
        "accuracy",
        "trainvalsplit_places205/train_places205.csv and val_places205.csv beside images256/",
        "by the publisher's terms; images belong to their makers",
        _places205,
    ),
    "inaturalist2018": Dataset(
        "iNaturalist-2018",
        8142,
        {"train": 437_513, "val": 24_426},
        "accuracy",
        "train2018.json and val2018.json beside train_val2018/",
        "non-commercial research and education; each image has its own licence",
        _inaturalist2018,
    ),
    "inaturalist2021": Dataset(
        "iNaturalist-2021",
        10_000,
        {"train": 2_686_843, "train_mini": 500_000, "val": 100_000},
        "accuracy",
        "train/CLASS/, train_mini/CLASS/, val/CLASS/ (torchvision: 2021_train, 2021_train_mini, "
        "2021_valid)",
        "non-commercial research and education; each image has its own licence",
        _inaturalist2021,
    ),
    "cifar100": Dataset(
        "CIFAR-100",
        100,
        {"train": 50_000, "test": 10_000},
        "accuracy",
        "the binary version (train.bin, test.bin, fine_label_names.txt) or parquet files "
        "train*.parquet, test*.parquet",
        "none stated",
        _cifar,
    ),
    "cifar10": Dataset(
        "CIFAR-10",
        10,
        {"train": 50_000, "test": 10_000},
        "accuracy",
        "the binary version (data_batch_1.bin ... test_batch.bin, batches.meta.txt) or parquet "
        "files train*.parquet, test*.parquet",
        "none stated",
        _cifar,
    ),
    "caltech101": Dataset(
        "Caltech-101",
        101,
        {"train": 3_030, "test": 5_647},
        "mean_per_class",
        "101_ObjectCategories/CLASS/",
        "CC BY 4.0",
        _caltech101,
    ),
    "aircraft": Dataset(
        "FGVC-Aircraft",
        100,
        {"train": 3_334, "val": 3_333, "trainval": 6_667, "test": 3_333},
        "mean_per_class",
        "data/variants.txt, data/images_variant_SPLIT.txt and data/images/ (of "
        "fgvc-aircraft-2013b)",
        "non-commercial research",
        _aircraft,
    ),
}
