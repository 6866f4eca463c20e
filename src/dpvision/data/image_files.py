"""Find the images that a trained model is to see: single files, folders, tars, parquet files and
stores.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from dpvision.data.declared import check_declared
from dpvision.data.dicom_source import may_be_dicom
from dpvision.data.folders import is_image
from dpvision.data.import_people import refuse_alike
from dpvision.data.open import is_store, open_store
from dpvision.data.person_names import person_name
from dpvision.data.rgb import Window
from dpvision.data.store import Store
from dpvision.errors import DataError

PACKED = (".tar", ".parquet")
"""Endings of files that hold several images."""


class ImageFile(NamedTuple):
    """One image before it is read."""

    name: str
    image: bytes
    """Content of the image file; empty if ``problem`` is set."""
    problem: str | None = None
    stored: bool = False
    """Whether it is from a store, whose images are read as at the import."""
    person: str | None = None
    """The person that it shows, if known: from a store as a keyed hash of the name."""


@dataclass(frozen=True)
class ImageFiles:
    """Images in a fixed order. Made by ``find_images``."""

    samples: Iterator[ImageFile]
    visibility: Literal["private", "public"]
    """"public" if all come from public stores; files outside a store count as private, as for
    ``embed``.
    """
    total: int | None = None
    """Expected number of images, for progress; None where it is known only at the end."""
    names: Mapping[str, set[str]] = field(default_factory=dict)
    """Persons of the images outside a store that were read so far, by the field that names them."""

    def check_persons(self, where: str) -> None:
        """Raise DataError if persons that were read are spelled in several ways, as the import."""
        for unit_from, names in self.names.items():
            with _named(where):
                refuse_alike(unit_from, names)


def find_images(
    places: Sequence[str | Path],
    where: str = "caption",
    model: str = "captioner",
    *,
    workers: int = 2,
    window: Window | None = None,
    unit_from: str | None = None,
) -> ImageFiles:
    """Find images in stores, in sources that ``data import`` accepts, and in single files.

    Args:
        places: one or more. An image's name is its path; in stores, tars and parquet files its key;
            in a folder FOLDER/KEY.
        where, model: the command and what it uses, for errors.
        window: the model's declared range of samples of more than 8 bits.
        unit_from: field that names the person of an image outside a store, as at the import; for
            DICOM the patient's without it.

    Raises:
        DataError: no places, one without images or with several splits, ``unit_from`` for stores
            alone, or a store of 16-bit images without a declared range where there is a
            ``window``; raised before the first image is read. Or a person's field of an image that
            is no name (``person_names.person_name``), raised at that image.
    """
    if not places:
        raise DataError(
            f"{where}: no images; expected one or more. Give an image, a folder, a tar or a store."
        )
    stores = [open_store(place) if is_store(place) else None for place in places]
    if unit_from is not None and all(stores):
        raise DataError(
            f"{where}: --unit-from {unit_from} with stores; expected images outside a store: a "
            "store has the persons of its import. Drop --unit-from."
        )
    for store in filter(None, stores):
        check_declared(window, False, store, where, f"the images that the {model} was trained on")
    names: defaultdict[str, set[str]] = defaultdict(set)
    parts = [
        store_images(store, range(store.num_records))
        if store
        else _file_images(place, workers, where, unit_from, names)
        for store, place in zip(stores, places, strict=True)
    ]
    public = all(store is not None and store.results_visibility == "public" for store in stores)
    nums = [
        _num_files(Path(place)) if store is None else store.num_records
        for store, place in zip(stores, places, strict=True)
    ]
    known = [num for num in nums if num is not None]
    total = sum(known) if len(known) == len(nums) else None
    visibility: Literal["private", "public"] = "public" if public else "private"
    return ImageFiles(chain.from_iterable(parts), visibility, total, names)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Raise errors of the import under the name of another command."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("data import", where, 1)) from None


def _num_files(path: Path) -> int | None:
    """Return the number of image files at a place, by their names; None for tars and parquet
    files.
    """
    if path.is_file() and path.suffix not in PACKED and not may_be_dicom(path):
        return 1
    num = 0
    for _, _, names in os.walk(path, followlinks=True):
        num += sum(map(is_image, names))
        if any(Path(name).suffix in PACKED for name in names):
            return None
    return num or None


def store_images(store: Store, rows: Iterable[int]) -> Iterator[ImageFile]:
    """Yield the images of a store's rows, in order."""
    for row in rows:
        record = store.record(row)
        yield ImageFile(record.key, record.image, stored=True, person=record.unit)


def _file_images(
    place: str | Path,
    workers: int,
    where: str,
    unit_from: str | None,
    names: defaultdict[str, set[str]],
) -> Iterator[ImageFile]:
    from dpvision.data.sample import Sample, Source, file_sample
    from dpvision.data.sources import open_source  # pyarrow takes time to import

    path = Path(place)
    dicom = path.is_file() and may_be_dicom(path)
    folder = f"{path}/" if path.is_dir() else str(path)[: -len(path.name)] if dicom else ""
    if path.is_file() and path.suffix not in PACKED and not dicom:
        # read when its turn comes
        source = Source(map(file_sample, [path], [str(path)], [{}]))
    else:
        source = open_source(path, for_import=False, workers=workers)
    column = unit_from or source.unit_from

    def person(sample: Sample) -> str | None:
        if column is None or sample.problem is not None:
            return None
        with _named(where):
            name = person_name(sample.fields.get(column), column, sample.key)
        if name is not None:
            names[column].add(name)
        return name

    return (
        ImageFile(folder + sample.key, sample.image, sample.problem, person=person(sample))
        for sample in source.samples
    )
