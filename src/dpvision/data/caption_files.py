"""Read one file of captions for many images (``data import --captions FILE``).

    captions_train2017.json    {"images": [{"id", "file_name"}], "annotations": [{"image_id",
                               "caption"}]}
    Flickr8k.token.txt         NAME#NUMBER<TAB>CAPTION, one a line; #NUMBER may be missing
    captions.csv               a heading line with `caption` and one of `IMAGE_COLUMNS`

An image is named by its file name, with or without the folders that lead to it.
"""

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from dpvision.data.captions import decode_text
from dpvision.data.folders import IMAGE_EXTENSIONS, Missed
from dpvision.data.sample import Sample
from dpvision.data.table_files import folded, one_form, read_csv
from dpvision.errors import DataError

IMAGE_COLUMNS = ("image", "file_name", "filename", "image_name", "path")


class CaptionFile:
    """Captions by image name, held in memory (about 200 bytes per caption)."""

    def __init__(self, path: str | Path) -> None:
        """Read the file.

        Raises:
            DataError: the file cannot be read, its encoding cannot be determined, it has none of
                the three formats, or a row does not fit the format.
        """
        self._path = Path(path)
        self._captions: dict[str, list[str]] = {}
        for name, caption in _entries(self._path):
            self._captions.setdefault(one_form(name.removeprefix("./")), []).append(caption)
        if not self._captions:
            raise DataError(
                f"captions: {path} has none; expected at least one caption. Pass the file that "
                "holds them with --captions."
            )
        self._without_extension: dict[str, str | None] = {}
        for name in self._captions:
            stem = _stem(name)
            self._without_extension[stem] = None if stem in self._without_extension else name
        self._folded, self._folded_stems = (
            _by_fold(self._captions),
            _by_fold(self._without_extension),
        )
        self._taken: dict[str, str] = {}
        self._without_captions: list[str] = []

    def attach(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples, each with the captions listed under its name added to its own.

        An image matches by its path in the source or by its file name, with or without the
        extension (tar members have none), in one Unicode form; without regard to case only if
        nothing else matches, and one name does.

        Raises:
            DataError: one name matches two images.
        """
        for sample in samples:
            name = None if sample.problem is not None else self._name_of(sample.key)
            if name is None:
                if sample.problem is None:
                    self._without_captions.append(sample.key)
                yield sample
                continue
            if name in self._taken:
                raise DataError(
                    f"captions: {self._path}: {name!r} is the name of two images, "
                    f"{self._taken[name]!r} and {sample.key!r}; expected one. Write paths "
                    "relative to the source in the file, or import the folders separately."
                )
            self._taken[name] = sample.key
            own = sample.fields.get("captions")
            given = own if isinstance(own, list) else [] if own is None else [own]
            yield sample._replace(
                fields=sample.fields | {"captions": [*given, *self._captions[name]]}
            )

    def missed(self) -> Missed:
        """Names without an image, and images without a name, once all samples were attached."""
        return Missed(
            self._path.name,
            [name for name in self._captions if name not in self._taken],
            self._without_captions,
        )

    def summary(self) -> dict[str, int]:
        """Counts for the operator, valid once all samples were attached.

        Raises:
            DataError: no image has a caption.
        """
        if not self._taken:
            example = next(iter(self._captions))
            raise DataError(
                f"captions: {self._path}: none of its {len(self._captions):,} images "
                f"({example!r}, ...) is in the source; expected names of its images. Pass the "
                "caption file that belongs to this source."
            )
        unused = [name for name in self._captions if name not in self._taken]
        return {
            "captioned_pictures_missing": len(unused),
            "captions_for_no_picture": sum(len(self._captions[name]) for name in unused),
        }

    def _name_of(self, key: str) -> str | None:
        key = one_form(key)
        places = (key, PurePosixPath(key).name)
        for place in places:
            if place in self._captions:
                return place
        for place in places:
            if (stem := _stem(place)) != place and stem in self._captions:
                return stem
        found = next(
            (name for place in places if (name := self._without_extension.get(place)) is not None),
            None,
        )
        if found is not None:
            return found
        forms = [*places, *(stem for place in places if (stem := _stem(place)) != place)]
        alike = next(
            (name for form in forms if (name := self._folded.get(folded(form))) is not None), None
        )
        listed = next(
            (
                name
                for place in places
                if (name := self._folded_stems.get(folded(place))) is not None
            ),
            None,
        )
        return alike if alike is not None or listed is None else self._without_extension[listed]


def _by_fold(names: Iterable[str]) -> dict[str, str | None]:
    """Names without regard to case; None where several are alike."""
    found: dict[str, str | None] = {}
    for name in names:
        found[folded(name)] = None if folded(name) in found else name
    return found


def _stem(name: str) -> str:
    """The name without the extension of an image, if it has one."""
    path = PurePosixPath(name)
    return (
        str(path.with_suffix(""))
        if path.suffix.lower().removeprefix(".") in IMAGE_EXTENSIONS
        else name
    )


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    try:
        text = decode_text(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"captions: {path}: {error.strerror}; expected a readable file. Check the path."
        ) from None
    if text is None:
        raise DataError(
            f"captions: {path} is in another encoding; expected UTF-8, or UTF-16 with a byte "
            "order mark. Convert it, e.g. `iconv -f WINDOWS-1252 -t UTF-8`, from the encoding "
            "that it was written in."
        )
    if path.suffix.lower() == ".json":
        return _coco(text, path)
    first = text.lstrip().partition("\n")[0]
    return _tabbed(text, path) if "\t" in first else _table(text, path)


def _coco(text: str, path: Path) -> Iterator[tuple[str, str]]:
    try:
        parsed = json.loads(text)
        name_of = {image["id"]: str(image["file_name"]) for image in parsed["images"]}
        entries = [
            (name_of.get(entry["image_id"], f"image {entry['image_id']}"), entry["caption"])
            for entry in parsed["annotations"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"captions: {path} ({error!r}); expected images with id and file_name, annotations "
            "with image_id and caption. Pass a caption file of COCO, or a table."
        ) from None
    return ((name, _text(caption)) for name, caption in entries)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""  # the import counts it as empty


def _tabbed(text: str, path: Path) -> Iterator[tuple[str, str]]:
    # not splitlines: it would also end a line at the separators that a caption may hold
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if not line.strip():
            continue
        name, tab, caption = line.rstrip("\n").partition("\t")
        base, _, count = name.rpartition("#")
        name = base if base and count.isdecimal() else name
        if not tab or not name:
            raise DataError(
                f"captions: {path}, line {number}: no name and TAB; expected "
                "NAME#NUMBER<TAB>CAPTION. Repair the line."
            )
        if "\t" in caption:
            raise DataError(
                f"captions: {path}, line {number}: {line.count(tab)} TABs; expected "
                "NAME#NUMBER<TAB>CAPTION. Remove the other columns, or pass a CSV table."
            )
        if number > 1 or (name not in IMAGE_COLUMNS or caption.strip() != "caption"):
            yield name.strip(), caption


def _table(text: str, path: Path) -> Iterator[tuple[str, str]]:
    columns, rows = read_csv(
        io.StringIO(text, newline=""), f"captions: {path}", skipinitialspace=True
    )
    column = next((name for name in IMAGE_COLUMNS if name in columns), None)
    if column is None or "caption" not in columns:
        raise DataError(
            f"captions: {path}: columns {columns[:8]}; expected `caption` and one of "
            f"{', '.join(IMAGE_COLUMNS)}; or lines NAME#NUMBER<TAB>CAPTION; or COCO's .json. Add "
            "a heading line."
        )
    for row in rows:
        if row[column]:
            yield row[column].strip(), row["caption"]
