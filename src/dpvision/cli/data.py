"""``dpvision data``: import, inspect, merge and split stores, and make synthetic ones."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from dpvision.cli.curate import curate
from dpvision.cli.each_image import Release
from dpvision.cli.output import CONFIG, FLAT, StorePath, emit, pairs
from dpvision.cli.overlap import overlap
from dpvision.cli.paths import check_sheet, check_source, check_store
from dpvision.cli.store_lines import Labels, Range, label, said, unit_lines
from dpvision.cli.tokenizer import tokenizer
from dpvision.data.captions import CaptionRule
from dpvision.data.dicom_source import DicomRule
from dpvision.data.import_labels import LabelRule
from dpvision.data.person_names import PersonRule
from dpvision.environment import own_cores
from dpvision.errors import DataError

if TYPE_CHECKING:
    from dpvision.data.sample import Source
    from dpvision.data.store import Store

SceneLabel = Literal["shape", "colour", "texture", "count", "light", "background"]


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    commands: dict[str, Callable[..., Any]] = {
        "import": import_,
        "inspect": inspect,
        "split": split,
        "merge": merge,
        "curate": curate,
        "scenes": scenes,
        "tokenizer": tokenizer,
        "overlap": overlap,
    }
    tyro.extras.subcommand_cli_from_dict(
        commands,
        prog="dpvision data",
        description="Import, curate, inspect, split and merge stores; make procedural scenes; "
        "train a tokenizer; find images that two stores share.",
        args=list(argv),
        config=CONFIG,
    )


@dataclass(frozen=True)
class _Dicom(DicomRule):
    series: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Of DICOM files, import those of which a tag has one of these values: TAG=VALUE[,VALUE], e.g.
    Modality=CR,DX or ViewPosition=PA. Repeat it for further tags; all must hold.
    """


def import_(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    store: StorePath,
    public: bool = False,
    people: Annotated[PersonRule, FLAT] = PersonRule(),
    labels: Annotated[Labels, FLAT] = Labels(),
    captions: Annotated[CaptionRule, FLAT] = CaptionRule(),
    range: Annotated[Range, FLAT] = Range(),
    dicom: Annotated[_Dicom, FLAT] = _Dicom(),
    licence: str | None = None,
    dataset: str | None = None,
    split: str | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Import images into a store: tar shards and a memory-mapped index.

    SOURCE is a folder of images (class folders or flat), parquet files with image bytes, WebDataset
    tars (indexed in place), or DICOM files (docs/dicom.md), whose field PatientID names the person
    unless --unit-from names another. Parquet files and tars may be at a URL that fsspec opens, such
    as s3://bucket/train-*.tar: all images are then copied. Files that are unreadable, too large,
    hidden, masks of other images or no images are left out; they are counted here and named only in
    the store's confidential/ folder. A store is private unless you give --public. If a private
    store's labels are names (such as class folders), give --classes: numbers assigned from the
    names found would depend on private images. With --dataset, SOURCE is the folder of that data
    set's unpacked archives; docs/datasets.md has the layouts.

    Args:
        source: Folder, parquet file or tar file to import; also a URL.
        store: New folder for the store.
        public: These images need no protection; figures and images from this store may be shown.
        people: The persons of images.
        labels: The labels of images.
        captions: The captions of images.
        range: The values of images of more than 8 bits.
        dicom: Which DICOM files and frames.
        licence: Licence of public images, for the statement.
        dataset: One of the papers' data sets, e.g. imagenet, cifar100, caltech101, aircraft. Labels
            and their order are then the same for each split.
        split: With --dataset: train, val or test, as defined by that data set.
        workers: Processes that read the files of a source of several, else threads that check
            images; if None, the cores of this machine.
        json: Print JSON.
    """
    window = range.declared("data import")
    from_dataset = dataset is not None or split is not None
    if from_dataset:
        _check_fixed(people, labels, captions, window, dicom)
    if not from_dataset:
        check_source(source)
    from dpvision.data.importer import import_samples, import_source

    making, more, whole = partial(import_source, source, dicom=dicom), dict[str, Any](), ""
    if from_dataset:
        found, size = _published(Path(source), dataset, split, people, labels)
        making, whole = partial(import_samples, found), f" of {size:,}"
        more = {
            "dataset": dataset,
            "split": split,
            "pictures_published": size,
            "metric": found.metric,
        }
    with Console(stderr=True).status("importing") as status:
        made = making(
            store,
            public=public,
            people=people,
            labels=labels,
            captions=captions,
            licence=licence,
            window=window,
            workers=workers,
            progress=lambda n: status.update(f"importing: {n:,} images{whole}"),
        )
    said(made, json, more)


def _check_fixed(
    people: PersonRule, labels: LabelRule, captions: CaptionRule, window: object, dicom: _Dicom
) -> None:
    """Raise DataError for an option that --dataset decides."""
    for given, problem in (
        (
            dicom != _Dicom(),
            "--series or --frames with --dataset, which has no DICOM files; expected neither. "
            "Drop them.",
        ),
        (
            captions != CaptionRule(),
            "captions with --dataset, whose images have labels only; expected none. Drop "
            "--dataset.",
        ),
        (
            window is not None,
            "--max-value or --window with --dataset, whose images have 8 bits; expected neither. "
            "Drop it.",
        ),
        (
            replace(people, unit_from=None) != PersonRule(),
            "--unmatched, --shared-images or --apart-from with --dataset, whose images have no "
            "persons; expected none. Drop them.",
        ),
        (
            (labels.classes, labels.unknown_classes) != (None, "refuse"),
            "--classes with --dataset, which fixes its classes; expected only one of them. Drop "
            "one.",
        ),
    ):
        if given:
            raise DataError(f"data import: {problem}")


def _published(
    root: Path, name: str | None, split: str | None, people: PersonRule, labels: LabelRule
) -> "tuple[Source, int]":
    """Return a split of a data set, and the number of its images as published."""
    from dpvision.data.datasets import DATASETS, dataset_source, find_dataset

    if name is None:
        raise DataError(
            f"data import: split={split!r} without a data set; expected --dataset, one of "
            f"{', '.join(DATASETS)}. Add it."
        )
    splits = find_dataset(name).splits
    if split is None:
        raise DataError(
            f"data import: --dataset {name} without --split; expected one of "
            f"{', '.join(splits)}. Add it."
        )
    if (people.unit_from, labels.label_from, labels.label_separator) != (None, None, None):
        raise DataError(
            f"data import: --unit-from or a label option with --dataset {name}, which fixes "
            "both; expected neither. Drop them."
        )
    return dataset_source(name, split, root), splits[split]


def scenes(
    store: StorePath,
    num: int = 10_000,
    size_px: int = 48,
    first: int = 0,
    label: SceneLabel = "shape",
    multi_label: bool = False,
    public: bool = False,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Make a store of procedural captioned scenes: coloured shapes, each with a true caption,
    unlimited and reproducible.

    Args:
        store: New folder for the store.
        num: Number of scenes.
        size_px: Width and height.
        first: Number of the first scene; different numbers give different scenes.
        label: The attribute used as the label. Shape, colour and texture are those of the largest
            object; colour is the easiest to learn.
        multi_label: Label a scene with the attribute of all its objects, not just the largest.
        public: Mark the store public. By default it is private, as a substitute for private images.
        workers: Processes that render; if None, the cores of this machine.
        json: Print JSON.
    """
    from dpvision.data.synthetic_store import write_scenes

    start = time.monotonic()
    with Console(stderr=True).status("drawing") as status:
        made = write_scenes(
            store,
            num,
            size_px,
            first=first,
            label=label,
            multi_label=multi_label,
            workers=workers or own_cores(),
            public=public,
            progress=lambda n: status.update(
                f"drawing: {n:,} of {num:,} scenes, {n / (time.monotonic() - start):,.0f}/s"
            ),
        )
    said(made, json)


def inspect(
    store: StorePath,
    sheet: Path | None = None,
    num_images: int = 64,
    release: Annotated[Release, FLAT] = Release(),
    json: bool = False,
) -> None:
    """Print a store's counts, labels, image sizes and people, and write a contact sheet.

    Args:
        store: Folder of the store.
        sheet: Write the contact sheet (PNG) here. For a private store the default is its
            confidential/ folder, and any other path needs a folder of that name.
        num_images: Images on the sheet.
        release: Where a sheet of private images may be written.
        json: Print JSON.
    """
    check_store(store)
    check_sheet(sheet, "data inspect")
    from dpvision.data.declared import has_units, numbers_to_declare
    from dpvision.data.inspect import contact_sheet, inspect_store
    from dpvision.data.open import open_store

    opened = open_store(store)
    result = inspect_store(opened)
    if sheet is None:
        folder = store / "confidential" if opened.results_visibility == "private" else store
        sheet = folder / "contact_sheet.png"
    else:
        private = opened.results_visibility == "private"
        release.check(sheet, "data inspect", "private images", private, name="sheet")
    sheet.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(opened, num_images).save(sheet)
    result["contact_sheet"] = str(sheet)
    lines = [
        f"{label(opened)}what {store} holds",
        pairs(result),
        *(unit_lines(opened) if has_units(opened) else []),
    ]
    emit(
        result
        | {
            "operator_only": opened.results_visibility == "private",
            "declare": numbers_to_declare(opened),
        },
        json,
        "\n".join(lines),
    )


def split(
    store: StorePath,
    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FIRST")],
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SECOND")],
    fraction: float = 0.8,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Split a store into two that share its shards, id and ledgers. All images of a person stay in
    one part.

    Args:
        store: Folder of the store.
        first: New folder next to the store, for a part of the size --fraction.
        second: New folder next to the store, for the rest.
        fraction: Fraction of the people (or of the records, if no people are recorded) in the first
            part.
        seed: Seed of the split.
        json: Print JSON.
    """
    check_store(store)
    from dpvision.cli.next_steps import to_train
    from dpvision.data.declared import has_units
    from dpvision.data.split import split_store

    made = split_store(store, first, second, fraction, seed)
    held = {str(half.path): _counts(half) for half in made}
    lines = [
        f"{label(made[0])}what each part holds",
        pairs({path: _held(counts) for path, counts in held.items()}),
    ]
    lines += unit_lines(made[0]) if has_units(made[0]) else []
    lines += [
        *to_train(made[0]),
        f"Keep {made[1].path} for the test: a finished run names the command that scores it there.",
    ]
    private = made[0].results_visibility == "private"
    emit({"operator_only": private, "parts": held}, json, "\n".join(lines))


def merge(
    stores: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="STORE STORE [STORE ...] OUT")
    ],
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Merge stores into a new one, as one import of all their sources makes it: identical images
    become one record, and records get new ids. The stores stay as they are.

    Refused, because the merged store could not keep count of what was spent or of whose images it
    has: stores with persons, private stores with charged runs or a cap, private stores beside
    public ones.

    Args:
        stores: The stores, in the order of their records, and last the new folder.
        workers: Processes that read the stores; if None, the cores of this machine.
        json: Print JSON.
    """
    *sources, out = stores or (Path(),)
    check_store(*sources)
    from dpvision.data.merge import merge_stores

    with Console(stderr=True).status("merging") as status:
        made = merge_stores(
            sources,
            out,
            workers=workers,
            progress=lambda n: status.update(f"merging: {n:,} images"),
        )
    said(made, json)


def _counts(store: "Store") -> dict[str, int | None]:
    """Return the numbers of records, and of people if the import recorded them."""
    from dpvision.data.declared import count_units, has_units
    from dpvision.data.rows import AllRows

    people = count_units(store, AllRows(store.num_records)) if has_units(store) else None
    return {"records": store.num_records, "people": people}


def _held(counts: dict[str, int | None]) -> str:
    people = counts["people"]
    return f"{counts['records']:,} records" + ("" if people is None else f" of {people:,} people")
