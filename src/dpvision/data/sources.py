"""Read image folders, parquet files and WebDataset tars as samples.

Every kind yields ``Sample``; importer.py alone interprets its fields (label, unit, captions).
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dpvision.data.captions import CAPTION_FIELDS, MAX_TEXT_BYTES, decode_text
from dpvision.data.decode import HEAD_BYTES, MAX_FILE_BYTES, may_be_image
from dpvision.data.join import join_names
from dpvision.data.metadata_table import METADATA_NAMES, Row, read_metadata
from dpvision.data.ordered import ordered_map
from dpvision.data.tarindex import Member, scan
from dpvision.errors import DataError

IMAGE_EXTENSIONS = frozenset(
    ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "tif", "tiff", "bmp", "ppm", "pgm", "avif", "jp2", "heic", "heif"]
)
_BESIDE = (".txt", ".json")


class Sample(NamedTuple):
    """One image of a source with its metadata."""

    key: str
    """The image's name in the source."""
    image: bytes
    """The image file; empty when ``problem`` is set."""
    fields: dict[str, Any]
    """Everything that ``--unit-from`` and ``--label-from`` can name; ``label`` and the ``CAPTION_FIELDS`` are used by default."""
    place: tuple[Path, int] | None = None
    """Tar and offset at which the bytes stay; if None, the importer copies them to a shard of the store."""
    problem: str | None = None
    """Reason to leave the image out, found before decoding."""


class Missed(NamedTuple):
    """Names of a table that has no file for some rows, and no row for some files."""

    table: str = ""
    rows: Collection[str] = ()
    files: Collection[str] = frozenset()


class Source(NamedTuple):
    """Samples in a fixed order."""

    samples: Iterator[Sample]
    label_names: list[str] | None = None
    """Names of integer labels, if the source has them."""
    counts: Mapping[str, int] = MappingProxyType({})
    """Further counts for the import's summary, final when the samples are at their end."""
    missed: Missed = Missed()
    """Rows and files that the join of a table with the files did not match."""


def open_source(
    source: str | Path,
    *,
    unit_from: str | None = None,
    label_from: str | None = None,
    label_separator: str | None = None,
    workers: int = 2,
) -> Source:
    """Open an image folder, parquet files or WebDataset tars.

    Args:
        source: a folder of images (flat, or with class folders), a .parquet or .tar file, a folder of either, or a pattern such as
            ``photos/train-*.tar``.
        unit_from, label_from: fields to read (parquet columns, columns of metadata.csv, ``parent``, keys of the json).
        label_separator: if given, an empty label in a table is an empty list, not a missing label.
        workers: threads that scan tars.

    Raises:
        DataError: ``source`` does not exist or is of no known kind, or a field does not exist in it.
    """
    kind, paths = _recognise(Path(source))
    wanted = [name for name in (unit_from, label_from) if name is not None]
    if kind == "tar":
        return Source(_tar_samples(paths, workers))
    if kind == "parquet":
        return _parquet_source(paths, label_from or "label", wanted)
    return _folder_source(paths[0], unit_from, label_from, label_separator is not None)


def _recognise(source: Path) -> tuple[str, list[Path]]:
    if source.is_dir():
        tars, parquets = sorted(source.glob("*.tar")), sorted(source.rglob("*.parquet"))
        if tars and parquets:
            raise DataError(f"source: {source}: tars and parquet files; expected one kind. Name them, e.g. {source}/*.tar in quotes.")
        packed = [*tars, *parquets]
        if packed and (image := next((Path(at, name) for at, _, names in os.walk(source) for name in names if _is_image(name)), None)):
            raise DataError(
                f"source: {packed[0]} beside the image {image}; expected one kind. Move the other away, or name the files, e.g. "
                f"'{packed[0].parent}/*{packed[0].suffix}' in quotes."
            )
        return ("tar", tars) if tars else ("parquet", parquets) if parquets else ("folder", [source])
    paths = sorted(path for path in source.parent.glob(source.name) if not path.is_dir()) if "*" in source.name else [source]
    kinds = {path.suffix for path in paths if path.is_file()}
    for kind in ("tar", "parquet"):
        if kinds == {f".{kind}"}:
            return kind, paths
    if not kinds:
        got = "nothing there"
    elif len(kinds) == 1:
        (kind,) = kinds
        got = f"a {kind} file" if kind else "a file without an extension"
    else:
        got = f"files of several kinds, {', '.join(sorted(kinds))}"
    raise DataError(
        f"source: {source}: {got}; expected a folder of images, .parquet files or uncompressed .tar files. Give the folder "
        "that the images are in."
    )


def _require_fields(wanted: Iterable[str], known: Iterable[str], where: object) -> None:
    for name in wanted:
        if name not in set(known):
            raise DataError(f"source: {where}: field={name!r}; expected one of {sorted(known)}. Change --unit-from or --label-from.")


def _folder_source(root: Path, unit_from: str | None, label_from: str | None, separated: bool) -> Source:
    label = label_from or "label"
    columns, rows = read_metadata(root, [label, *([unit_from] if unit_from else [])], label if separated else None)
    tables = {root / name for name in METADATA_NAMES}
    _require_fields([name for name in (unit_from, label_from) if name is not None], {"parent", "label", *columns}, root)
    rows, missed = _join(root, rows)
    if rows and len(missed.rows) == len(rows):
        raise DataError(
            f"source: {root}: no file_name of its table is a file there, for example {next(iter(rows))!r}; expected paths inside the "
            "folder. Change them, or move the table to the folder that they start from."
        )
    counts = Counter({"table_rows_without_file": 0} if rows else {})

    def walk() -> Iterator[Sample]:
        for folder, below, names in os.walk(root, onerror=_raise, followlinks=True):
            _refuse_cycles(Path(folder), below)
            below.sort()
            beside = _texts_beside(folder, names)
            texts = {path for found in beside.values() for path in found}
            for name in sorted(names):
                path = Path(folder, name)
                if path in tables or path in texts:
                    continue
                inside = path.relative_to(root)
                fields: dict[str, Any] = {}
                if len(inside.parts) > 1:
                    fields["parent"] = inside.parts[-2]
                    # photos/PERSON/1.jpg with --unit-from parent: that folder is the person, not the class
                    if not (unit_from == "parent" and len(inside.parts) == 2):
                        fields["label"] = inside.parts[0]
                fields |= _read_beside(beside.get(path.stem, []) if _is_image(name) else [])
                yield file_sample(path, inside.as_posix(), fields | rows.pop(inside.as_posix(), {}))
        if counts:
            counts["table_rows_without_file"] = len(rows)

    return Source(walk(), counts=counts, missed=missed)


def _join(root: Path, rows: dict[str, Row]) -> tuple[dict[str, Row], Missed]:
    """Return the rows under the names of their files (``join_names``), and the names on both sides that have no match."""
    if not rows:
        return rows, Missed()
    files = []
    for folder, below, names in os.walk(root, onerror=_raise, followlinks=True):
        _refuse_cycles(Path(folder), below)
        inside = Path(folder).relative_to(root)
        files += [(inside / name).as_posix() for name in names]
    file_of = join_names(rows, files)
    found = set(file_of.values())
    missed = Missed(
        table=next(name for name in METADATA_NAMES if (root / name).exists()),
        rows=[name for name in rows if name not in file_of],
        files=frozenset(file for file in files if _is_image(file) and file not in found),
    )
    return {file_of.get(name, name): row for name, row in rows.items()}, missed


def _refuse_cycles(folder: Path, below: list[str]) -> None:
    """Links to folders are followed, like links to files: otherwise their images would be silently missing."""
    for name in below:
        link = folder / name
        if link.is_symlink() and folder.resolve().is_relative_to(link.resolve()):
            raise DataError(f"source: {link} leads back to {link.resolve()}; expected no cycle of links. Remove the link.")


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower().removeprefix(".") in IMAGE_EXTENSIONS


def _texts_beside(folder: str, names: list[str]) -> dict[str, list[Path]]:
    """NAME.txt and NAME.json files next to an image of that name, by NAME."""
    stems = {Path(name).stem for name in names if _is_image(name)}
    found: dict[str, list[Path]] = {}
    for name in sorted(names):
        if Path(name).suffix.lower() in _BESIDE and Path(name).stem in stems:
            found.setdefault(Path(name).stem, []).append(Path(folder, name))
    return found


def _read_beside(paths: list[Path]) -> dict[str, Any]:
    """Caption fields from the text files next to an image; classes and persons come from folders and the table only.

    An unreadable file becomes an empty text, a null caption or its bytes, and the importer counts it.
    """
    fields: dict[str, Any] = {}
    for path in paths:
        try:
            data = b"" if not path.is_file() else path.open("rb").read(MAX_TEXT_BYTES + 1)
        except OSError:
            data = b""
        if path.suffix.lower() == ".txt":
            fields.setdefault("text", _text_or_bytes(data))
            continue
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = {"captions": [None]}
        fields |= {name: found[name] for name in CAPTION_FIELDS if name in found} if isinstance(found, dict) else {}
    return fields


def _text_or_bytes(data: bytes) -> str | bytes:
    """The text of a file; its bytes if the encoding cannot be determined or the file is too long for a caption."""
    text = decode_text(data) if len(data) <= MAX_TEXT_BYTES else None
    return data if text is None else text.strip()


def _raise(error: OSError) -> None:
    raise DataError(f"source: {error.filename}: {error.strerror}; expected a readable folder. Check its permissions.") from None


def file_sample(path: Path, key: str, fields: dict[str, Any]) -> Sample:
    """Read a file as a sample; one that is not a file, oversized or unreadable gets a ``problem`` instead of bytes."""
    try:
        if not path.is_file():
            return Sample(key, b"", fields, problem="not a file")
        if path.stat().st_size > MAX_FILE_BYTES:
            return Sample(key, b"", fields, problem="oversized")
        with path.open("rb") as file:  # a folder of photos has videos too, which need not be read whole
            head = file.read(HEAD_BYTES)
            return Sample(key, head + file.read(), fields) if may_be_image(head) else Sample(key, b"", fields, problem="not an image")
    except OSError:
        return Sample(key, b"", fields, problem="cannot be read")


def _parquet_source(paths: list[Path], label: str, wanted: list[str]) -> Source:
    schema = _arrow(paths[0], partial(pq.read_schema, paths[0]))
    image = _image_column(schema, paths[0])
    _require_fields(wanted, set(schema.names) - {image}, paths[0])
    useful = {label, *wanted, *CAPTION_FIELDS} - {image}
    columns, label_names = [image, *sorted(useful & set(schema.names))], _class_names(schema, label)

    def rows() -> Iterator[Sample]:
        for path in paths:
            file = _arrow(path, partial(pq.ParquetFile, path))
            found = file.schema_arrow
            if image not in found.names or useful & set(found.names) != set(columns) - {image}:
                raise DataError(f"source: {path}: columns {found.names}; expected those of {paths[0]}, {columns}. Import it separately.")
            if _class_names(found, label) != label_names:
                raise DataError(
                    f"source: {path}: class names unlike those of {paths[0]}; expected the same, in one order. Import it apart."
                )
            batches = file.iter_batches(batch_size=512, columns=columns)
            number = 0
            while (batch := _arrow(path, partial(next, batches, None))) is not None:
                for row in batch.to_pylist():
                    cell = row.pop(image)
                    data, name = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
                    key = name or f"{path.stem}-{number}"
                    number += 1
                    yield Sample(key, data, row) if data else Sample(key, b"", row, problem="no image")

    return Source(rows(), label_names)


def _arrow(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"source: {path}: {error}; expected a parquet file. Copy it again or remove it.") from None


def _image_column(schema: pa.Schema, path: Path) -> str:
    def holds_bytes(kind: pa.DataType) -> bool:
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    for field in schema:
        in_struct = pa.types.is_struct(field.type) and any(f.name == "bytes" and holds_bytes(f.type) for f in field.type.fields)
        if field.name not in CAPTION_FIELDS and (holds_bytes(field.type) or in_struct):  # captions may be binary too
            return field.name
    raise DataError(f"source: {path}: columns {schema.names}; expected one with image bytes (binary, or a struct with `bytes`). Add it.")


def _class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Class names from the metadata that Hugging Face datasets writes into the schema, for a column of classes or of lists."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
        if isinstance(feature, list):
            (feature,) = feature
        names = feature.get("feature", feature)["names"]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names]


def _tar_samples(paths: list[Path], workers: int) -> Iterator[Sample]:
    for path, members in zip(paths, ordered_map(scan, paths, workers=workers, ahead=2 * workers), strict=True):
        groups: dict[str, dict[str, Member]] = {}
        for member in members:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            stem, _, extension = name.partition(".")  # WebDataset: the key ends at the first dot of the file's name
            parts = groups.setdefault(f"{folder}/{stem}" if folder else stem, {})
            if extension.lower() in parts:
                raise DataError(f"source: {path}: two members {member.name}; expected different names. Merge tars with names of their own.")
            parts[extension.lower()] = member
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                for key, parts in _dotted(groups, path).items():
                    images = [extension for extension in parts if extension in IMAGE_EXTENSIONS]
                    yield _tar_sample(fd, path.resolve(), key, parts)
                    for extension in images[1:]:
                        yield Sample(f"{key}.{extension}", b"", {}, place=(path.resolve(), 0), problem="second image of a name")
            finally:
                os.close(fd)
        except OSError as error:
            raise DataError(f"source: {path}: {error.strerror}; expected a readable tar. Check it and import again.") from None


def _dotted(groups: dict[str, dict[str, Member]], path: Path) -> dict[str, dict[str, Member]]:
    """Return the groups with those taken apart whose images have dots in their names: there the key ends at the last dot.

    By WebDataset's rule, the first dot, IMG_2020.01.02.png is no image, and all images of 2020 are parts of one sample.
    """
    made: dict[str, dict[str, Member]] = {}
    for key, parts in groups.items():
        dotted = IMAGE_EXTENSIONS.isdisjoint(parts) and any(_is_image(extension) for extension in parts)
        for extension, member in parts.items():
            _, dot, last = extension.rpartition(".") if dotted else ("", "", extension)
            if not dot:
                made.setdefault(key, {})[extension] = member
                continue
            name = member.name.removeprefix("./")[: -len(last) - 1]
            if last in made.setdefault(name, {}):
                raise DataError(f"source: {path}: two members {member.name}; expected different names. Merge tars with names of their own.")
            made[name][last] = member
    return made


def _tar_sample(fd: int, path: Path, key: str, parts: dict[str, Member]) -> Sample:
    member_of_image = next((member for extension, member in parts.items() if extension in IMAGE_EXTENSIONS), None)
    if member_of_image is None or member_of_image.size > MAX_FILE_BYTES:
        return Sample(key, b"", {}, place=(path, 0), problem="no image" if member_of_image is None else "oversized")
    place = (path, member_of_image.offset)

    def beside(extension: str, limit: int | None = None) -> bytes:
        size = parts[extension].size
        return os.pread(fd, size if limit is None else min(size, limit), parts[extension].offset)

    try:
        fields = json.loads(beside("json")) if "json" in parts else {}  # json.loads detects UTF-8, UTF-16 and UTF-32 in bytes
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        if "txt" in parts:
            fields.setdefault("text", _text_or_bytes(beside("txt", MAX_TEXT_BYTES + 1)))
        if "cls" in parts:
            fields["label"] = beside("cls").decode().strip()
    except (ValueError, RecursionError):  # damaged UTF-8 or JSON, or JSON nested too deeply
        return Sample(key, b"", {}, place=place, problem="damaged text")
    return Sample(key, os.pread(fd, member_of_image.size, member_of_image.offset), fields, place)
