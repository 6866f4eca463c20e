"""Read image folders, parquet files and WebDataset tars as samples.

Every kind yields ``Sample``; importer.py alone interprets its fields (label, unit, captions).
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from dpvision.data.beside import (
    HIDDEN,
    MASK,
    check_dicom,
    check_folders,
    check_packed,
    check_table,
    check_tar,
    is_hidden,
    is_mask_of,
    is_nifti,
    refuse_nifti,
    split_of,
    tar_folders,
)
from dpvision.data.captions import CAPTION_FIELDS, MAX_TEXT_BYTES, decode_text
from dpvision.data.decode import MAX_FILE_BYTES
from dpvision.data.dicom_source import DIRECTORY, EVERYTHING, DicomRule, dicom_source, may_be_dicom
from dpvision.data.folders import (
    IMAGE_EXTENSIONS,
    image_stems,
    is_image,
    join_rows,
    refuse_cycles,
    refuse_unless_hidden,
    refuse_unreadable,
)
from dpvision.data.img2dataset import STATUS, failure, rows_only, stats_of
from dpvision.data.ordered import ordered_map
from dpvision.data.parquet_files import Layout, parquet_layout, parquet_rows
from dpvision.data.remote import is_url, layout_of, list_files, remote_parts
from dpvision.data.sample import Sample, Source, file_sample, stamp_of
from dpvision.data.table_files import METADATA_NAMES, read_metadata, require_fields
from dpvision.data.tarindex import Member, scan
from dpvision.errors import DataError
from dpvision.strict_json import parse_json

_BESIDE = (".txt", ".json")
_DICOM = frozenset(("dcm", "dicom"))


def open_source(
    source: str | Path,
    *,
    unit_from: str | None = None,
    label_from: str | None = None,
    label_separator: str | None = None,
    for_import: bool = True,
    workers: int = 2,
    dicom: DicomRule | None = EVERYTHING,
) -> Source:
    """Open an image folder, parquet files, WebDataset tars or DICOM files.

    Args:
        source: a folder of images (flat, or with class folders), a .parquet or .tar file, a folder
            of either, or a pattern such as ``photos/train-*.tar``, also as a URL (``remote``); a
            folder of DICOM files, its
            DICOMDIR, or one such file.
        unit_from, label_from: fields to read (parquet columns, columns of metadata.csv, ``parent``,
            keys of the json).
        label_separator: if given, an empty label in a table is an empty list, not a missing label.
        for_import: refuse also what would be lost or wrong in a data set: tables below the source,
            tars of class folders. Splits, and masks beside images, are always refused (``beside``).
        workers: threads that scan tars.
        dicom: which DICOM files and frames; refused where there are none. If None, DICOM files are
            refused.

    Raises:
        DataError: ``source`` does not exist or is of no known kind, or a field does not exist in
            it.
    """
    url = str(source) if is_url(source) and for_import else None
    kind, paths = ("", []) if url else _recognise(Path(source), for_import)
    wanted = [name for name in (unit_from, label_from) if name is not None]
    separated = label_separator is not None
    if kind == "dicom":
        if dicom is None:
            raise DataError(
                f"source: {source}: DICOM files; expected tars, parquet files or a folder of "
                "images. Import them with dpvision data import."
            )
        return dicom_source(paths[0], unit_from, label_from, separated, dicom)
    if dicom is not None and (dicom.series, dicom.frames) != (EVERYTHING.series, EVERYTHING.frames):
        raise DataError(
            f"source: {source}: no DICOM files; expected some with --series or --frames. Drop "
            "these options, or give the folder of the DICOM files."
        )
    if url is not None:
        return _remote_source(url, unit_from, label_from)
    if kind == "tar":
        refuse_folders = for_import and "parent" not in wanted and label_from is None
        tars = tuple(TarPart(path, stamp_of(path), refuse_folders) for path in paths)
        return Source(_tar_samples(tars, workers), parts=tars)
    if kind == "parquet":
        return _parquet_source(paths, label_from or "label", wanted)
    return _folder_source(paths[0], unit_from, label_from, separated)


def _recognise(source: Path, for_import: bool) -> tuple[str, list[Path]]:
    if source.is_dir():
        image, dicom, tars, parquets, nifti = _survey(source, for_import)
        if tars and parquets:
            packed = [*tars, *parquets]
            counted = {path for path in map(stats_of, packed) if Path(path).exists()}
            parquets = [] if rows_only(source, packed, counted) else parquets
        if tars and parquets:
            raise DataError(
                f"source: {source}: tars and parquet files; expected one kind. Name them, e.g. "
                f"{source}/*.tar in quotes."
            )
        packed = [*tars, *parquets]
        if dicom is not None:
            check_dicom(source, dicom, image or next(iter(packed), None), for_import)
        if packed and image:
            raise DataError(
                f"source: {packed[0]} beside the image {image}; expected one kind. Move the "
                f"other away, or name the files, e.g. '{packed[0].parent}/*{packed[0].suffix}' "
                "in quotes."
            )
        if nifti is not None and not (image or dicom or packed):
            refuse_nifti(nifti)
        check_packed(source, packed, for_import)
        return (
            ("tar", tars)
            if tars
            else ("parquet", parquets)
            if parquets
            else ("dicom" if dicom else "folder", [source])
        )
    if is_nifti(source.name):
        refuse_nifti(source)
    if source.is_file() and (source.name == DIRECTORY or may_be_dicom(source)):
        return "dicom", [source.parent if source.name == DIRECTORY else source]
    paths = (
        sorted(path for path in source.parent.glob(source.name) if not path.is_dir())
        if "*" in source.name
        else [source]
    )
    kinds = {path.suffix for path in paths if path.is_file()}
    for kind in ("tar", "parquet"):
        if kinds == {f".{kind}"}:
            check_packed(source.parent, paths, for_import)
            return kind, paths
    if not kinds:
        got = "neither a file nor a folder" if source.exists() else "nothing there"
    elif len(kinds) == 1:
        (kind,) = kinds
        got = f"a {kind} file" if kind else "a file without an extension"
    else:
        got = f"files of several kinds, {', '.join(sorted(kinds))}"
    raise DataError(
        f"source: {source}: {got}; expected a folder of images, .parquet files or uncompressed "
        ".tar files. Give the folder that the images are in."
    )


def _survey(
    root: Path, for_import: bool
) -> tuple[Path | None, Path | None, list[Path], list[Path], Path | None]:
    """Return an image and a DICOM file below a folder, all tars and parquets, and a NIfTI file.

    None stands for a file of a kind that is not there.

    Hidden folders are passed over.
    """
    image, dicom, nifti, tars, parquets = None, None, None, list[Path](), list[Path]()
    listed = any((root / name).exists() for name in METADATA_NAMES)
    inner = list[tuple[Path, tuple[str, ...], bool]]()
    for at, below, names in os.walk(root, onerror=refuse_unreadable, followlinks=True):
        folder = Path(at)
        refuse_cycles(folder, below)
        below[:] = sorted(name for name in below if not is_hidden(name))
        if dicom is None:
            others = {DIRECTORY, *filter(is_hidden, names)}
            files = (folder / name for name in sorted(names) if name not in others)
            dicom = next((path for path in files if may_be_dicom(path)), None)
        nifti = next((folder / name for name in names if is_nifti(name)), nifti)
        first = next((name for name in names if is_image(name) and not is_hidden(name)), None)
        image = folder / first if first and image is None else image
        for name in METADATA_NAMES if for_import else ():
            if name in names and folder != root:
                check_table(folder / name, root)
        if below and not listed:
            inner.append((folder, tuple(below), first is not None))
        for suffix, found in ((".tar", tars), (".parquet", parquets)):
            found += [
                folder / name for name in names if name.endswith(suffix) and not is_hidden(name)
            ]
    for folder, folders, has_images in inner:  # after the tables, which name what is lost
        check_folders(
            folder, folders, top=folder == root, has_images=has_images, for_import=for_import
        )
    return image, dicom, sorted(tars), sorted(parquets), nifti


def _folder_source(
    root: Path, unit_from: str | None, label_from: str | None, separated: bool
) -> Source:
    label = label_from or "label"
    columns, rows = read_metadata(
        root, [label, *([unit_from] if unit_from else [])], label if separated else None
    )
    tables = {root / name for name in METADATA_NAMES}
    require_fields(
        [name for name in (unit_from, label_from) if name is not None],
        {"parent", "label", *columns},
        root,
    )
    rows, missed = join_rows(root, rows)
    if rows and len(missed.rows) == len(rows):
        raise DataError(
            f"source: {root}: no file_name of its table is a file there, for example "
            f"{next(iter(rows))!r}; expected paths inside the folder. Change them, or move the "
            "table to the folder that they start from."
        )
    counts = Counter({"table_rows_without_file": 0} if rows else {})

    def walk() -> Iterator[Sample]:
        for folder, below, names in os.walk(
            root, onerror=refuse_unless_hidden(root), followlinks=True
        ):
            below.sort()
            hidden = is_hidden(Path(folder).relative_to(root).as_posix())
            if not hidden:
                refuse_cycles(Path(folder), below)
            beside = _texts_beside(folder, names)
            texts = {path for found in beside.values() for path in found}
            stems = image_stems(names)
            for name in sorted(names):
                path = Path(folder, name)
                if path in tables or path in texts:
                    continue
                inside = path.relative_to(root)
                row = rows.pop(inside.as_posix(), {})
                if (
                    hidden
                    or is_hidden(name)
                    or (not row and is_mask_of(path.stem, stems) and is_image(name))
                ):
                    yield Sample(
                        inside.as_posix(),
                        b"",
                        {},
                        problem=HIDDEN if hidden or is_hidden(name) else MASK,
                    )
                    continue
                fields: dict[str, Any] = {}
                if len(inside.parts) > 1:
                    fields["parent"] = inside.parts[-2]
                    # photos/PERSON/1.jpg with --unit-from parent: that folder is the person, not
                    # the class
                    if not (unit_from == "parent" and len(inside.parts) == 2) and not (
                        columns and split_of(inside.parts[0])
                    ):
                        fields["label"] = inside.parts[0]
                fields |= _read_beside(beside.get(path.stem, []) if is_image(name) else [])
                yield file_sample(path, inside.as_posix(), fields | row)
        if counts:
            counts["table_rows_without_file"] = len(rows)

    return Source(walk(), counts=counts, missed=missed)


def _texts_beside(folder: str, names: list[str]) -> dict[str, list[Path]]:
    """NAME.txt and NAME.json files next to an image of that name, by NAME."""
    found: dict[str, list[Path]] = {}
    texts = sorted(name for name in names if name.lower().endswith(_BESIDE))
    stems = image_stems(names) if texts else set()
    for name in texts:
        if Path(name).stem in stems:
            found.setdefault(Path(name).stem, []).append(Path(folder, name))
    return found


def _read_beside(paths: list[Path]) -> dict[str, Any]:
    """Read caption fields from the text files next to an image.

    Classes and persons come from folders and the table only.

    An unreadable file becomes an empty text, a null caption or its bytes, and the importer counts
    it.
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
        fields |= (
            {name: found[name] for name in CAPTION_FIELDS if name in found}
            if isinstance(found, dict)
            else {}
        )
    return fields


def _text_or_bytes(data: bytes) -> str | bytes:
    """Return the text of a file, or its bytes.

    The bytes if the encoding cannot be determined, or the file is too long for a caption.
    """
    text = decode_text(data) if len(data) <= MAX_TEXT_BYTES else None
    return data if text is None else text.strip()


def _parquet_source(paths: list[Path], label: str, wanted: list[str]) -> Source:
    stamps = [stamp_of(path) for path in paths]  # before anything of a file is read
    layout, others = parquet_layout(paths[0], label, wanted)
    parts = tuple(ParquetPart(*part, layout) for part in zip(paths, stamps, strict=True))
    counts = {"image_columns_not_read": others} if others else {}
    samples = (sample for part in parts for sample in part.samples({}, Path()))
    return Source(samples, layout.label_names, counts, parts=parts)


def _remote_source(url: str, unit_from: str | None, label_from: str | None) -> Source:
    wanted = [name for name in (unit_from, label_from) if name is not None]
    kind, files = list_files(url)
    if kind == "tar":
        refuse = "parent" not in wanted and label_from is None
        tar = TarPart(Path(), [], refuse)
        return Source(iter(()), parts=remote_parts(files, tar), remote=True)
    layout, others = layout_of(files[0], label_from or "label", wanted)
    parts = remote_parts(files, ParquetPart(Path(), [], layout))
    counts = {"image_columns_not_read": others} if others else {}
    return Source(iter(()), layout.label_names, counts, parts=parts, remote=True)


@dataclass(frozen=True)
class _FilePart:
    """One file of a source."""

    path: Path
    stamp: list[int]
    shared: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path.absolute())

    def now(self) -> list[int]:
        """``stamp_of`` the file."""
        return stamp_of(self.path)


@dataclass(frozen=True)
class FolderPart:
    """A folder of images as one file of a source."""

    path: Path
    opened: Callable[[], Source]
    """Opens the folder again."""
    stamp: list[Any]
    shared: ClassVar[bool] = True
    settings: ClassVar[list[Any]] = []

    @classmethod
    def of(cls, path: Path, opened: Callable[[], Source]) -> "FolderPart":
        """Return the part, stamped."""
        return cls(path, opened, _folder_stamp(path))

    @property
    def name(self) -> str:
        """The folder's path."""
        return str(self.path.absolute())

    def now(self) -> list[Any]:
        """Bytes of all files, and a digest of their names and stamps."""
        return _folder_stamp(self.path)

    def samples(self, noted: dict[str, Any], scratch: Path) -> Iterator[Sample]:
        """Yield the samples of the folder."""
        yield from self.opened().samples

    def check(self, noted: dict[str, Any], seen: set[str]) -> None:
        """A single part goes with itself."""


def _folder_stamp(root: Path) -> list[Any]:
    digest, size = blake2b(digest_size=16), 0
    for folder, below, names in os.walk(root, followlinks=True):
        below.sort()
        for name in sorted(names):
            path = Path(folder, name)
            with contextlib.suppress(DataError):  # a broken link is counted when it is read
                stamp = stamp_of(path)
                size += stamp[0]
                digest.update(f"{path.relative_to(root)}\0{stamp}\0".encode("utf-8", "replace"))
    return [size, digest.hexdigest()]


@dataclass(frozen=True)
class ParquetPart(_FilePart):
    """One parquet file of a source."""

    layout: Layout

    @property
    def settings(self) -> list[Any]:
        """Columns and class names, which the first file decides."""
        found = self.layout
        return [
            str(self.path.resolve()),
            found.image,
            found.columns,
            sorted(found.useful),
            found.label,
            found.label_names,
        ]

    def samples(self, noted: dict[str, Any], scratch: Path) -> Iterator[Sample]:
        """Yield the samples of the file; ``noted`` stays as it is."""
        for key, data, row in parquet_rows(self.path, self.layout):
            problem = None if data else failure(row.get(STATUS))
            yield Sample(key, data or b"", row, problem=problem)

    def check(self, noted: dict[str, Any], seen: set[str]) -> None:
        """Every file is checked by itself."""


@dataclass(frozen=True)
class TarPart(_FilePart):
    """One tar of a source."""

    refuse_folders: bool
    """Refuse folders of images whose names would be lost."""

    @property
    def settings(self) -> list[Any]:
        """What is refused."""
        return [str(self.path.resolve()), self.refuse_folders]

    def samples(self, noted: dict[str, Any], scratch: Path) -> Iterator[Sample]:
        """Yield the samples of the tar, checked by itself; ``noted`` gets what ``check`` needs."""
        return self.of_members(scan(self.path), noted, set())

    def check(self, noted: dict[str, Any], seen: set[str]) -> None:
        """Raise DataError if the tar does not go with those before.

        Args:
            noted: by ``samples``.
            seen: folders of the tars before, to which this tar's are added.
        """
        if "folders" in noted:
            seen.update(noted["folders"])
            check_tar(self.path, noted["plain"], seen)

    def of_members(
        self, members: list[Member], noted: dict[str, Any], seen: set[str]
    ) -> Iterator[Sample]:
        """Yield the samples of the tar's members; arguments as for ``check``."""
        path, groups = self.path, dict[str, dict[str, Member]]()
        hidden = [member for member in members if is_hidden(member.name)]
        for member in members:
            if is_hidden(member.name):
                continue
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            stem, _, extension = name.partition(
                "."
            )  # WebDataset: the key ends at the first dot of the file's name
            parts = groups.setdefault(f"{folder}/{stem}" if folder else stem, {})
            if extension.lower() in parts:
                raise DataError(
                    f"source: {path}: two members {member.name}; expected different names. Merge "
                    "tars with names of their own."
                )
            parts[extension.lower()] = member
        if self.refuse_folders:
            images = [
                key for key, parts in groups.items() if not IMAGE_EXTENSIONS.isdisjoint(parts)
            ]
            noted["plain"] = all(set(parts) <= IMAGE_EXTENSIONS for parts in groups.values())
            noted["folders"] = sorted(tar_folders(images, noted["plain"]))
            self.check(noted, seen)
        place = path.resolve()
        yield from (
            Sample(member.name, b"", {}, place=(place, 0), problem=HIDDEN) for member in hidden
        )
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                for key, parts in _dotted(groups, path).items():
                    images = [extension for extension in parts if extension in IMAGE_EXTENSIONS]
                    if set(parts) <= IMAGE_EXTENSIONS and is_mask_of(key, groups):
                        yield Sample(key, b"", {}, place=(place, 0), problem=MASK)
                        continue
                    yield _tar_sample(fd, place, key, parts)
                    for extension in images[1:]:
                        yield Sample(
                            f"{key}.{extension}",
                            b"",
                            {},
                            place=(place, 0),
                            problem="second image of a name",
                        )
            finally:
                os.close(fd)
        except OSError as error:
            raise DataError(
                f"source: {path}: {error.strerror}; expected a readable tar. Check it and import "
                "again."
            ) from None


def _tar_samples(tars: Sequence[TarPart], workers: int) -> Iterator[Sample]:
    seen: set[str] = set()
    scanned = ordered_map(scan, [tar.path for tar in tars], workers=workers, ahead=2 * workers)
    for tar, members in zip(tars, scanned, strict=True):
        yield from tar.of_members(members, {}, seen)


def _dotted(groups: dict[str, dict[str, Member]], path: Path) -> dict[str, dict[str, Member]]:
    """Return the groups, with images that have dots in their names taken apart.

    The key of such an image ends at the last dot.

    By WebDataset's rule, the first dot, IMG_2020.01.02.png is no image, and all images of 2020 are
    parts of one sample.
    """
    made: dict[str, dict[str, Member]] = {}
    for key, parts in groups.items():
        dotted = IMAGE_EXTENSIONS.isdisjoint(parts) and any(
            is_image(extension) for extension in parts
        )
        for extension, member in parts.items():
            _, dot, last = extension.rpartition(".") if dotted else ("", "", extension)
            if not dot:
                made.setdefault(key, {})[extension] = member
                continue
            name = member.name.removeprefix("./")[: -len(last) - 1]
            if last in made.setdefault(name, {}):
                raise DataError(
                    f"source: {path}: two members {member.name}; expected different names. Merge "
                    "tars with names of their own."
                )
            made[name][last] = member
    return made


def _tar_sample(fd: int, path: Path, key: str, parts: dict[str, Member]) -> Sample:
    member_of_image = next(
        (member for extension, member in parts.items() if extension in IMAGE_EXTENSIONS), None
    )
    if member_of_image is None or member_of_image.size > MAX_FILE_BYTES:
        none = "no image" if _DICOM.isdisjoint(parts) else "DICOM in a tar"
        broken = next((member.problem for member in parts.values() if member.problem), none)
        return Sample(
            key,
            b"",
            {},
            place=(path, 0),
            problem=broken if member_of_image is None else "oversized",
        )
    place = (path, member_of_image.offset)
    if broken := next((member.problem for member in parts.values() if member.problem), ""):
        return Sample(key, b"", {}, place=place, problem=broken)

    def beside(extension: str, limit: int | None = None) -> bytes:
        size = parts[extension].size
        return os.pread(fd, size if limit is None else min(size, limit), parts[extension].offset)

    try:
        fields = (
            parse_json(beside("json"), nan=True) if "json" in parts else {}
        )  # it detects UTF-8, UTF-16 and UTF-32 in bytes
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        if "txt" in parts:
            fields.setdefault("text", _text_or_bytes(beside("txt", MAX_TEXT_BYTES + 1)))
        if "cls" in parts:
            fields["label"] = beside("cls").decode().strip()
    except (ValueError, RecursionError):  # damaged UTF-8 or JSON, or JSON nested too deeply
        return Sample(key, b"", {}, place=place, problem="damaged text")
    folder = key.rpartition("/")[0]
    fields = {"parent": folder.rpartition("/")[2]} | fields if folder else fields
    return Sample(key, os.pread(fd, member_of_image.size, member_of_image.offset), fields, place)
