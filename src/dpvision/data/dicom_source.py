"""Read DICOM files as samples: an export of a PACS, a folder with a DICOMDIR, or one file.

Each frame is a sample; that of a file with one frame is the file, that of others holds nothing but
what the pixels depend on (``dicom.frame_file``). The importer stores pixels only.

Tags named by the operator become fields, without the blanks that DICOM pads them with.
"""

import difflib
import importlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpvision.data.beside import HIDDEN, is_hidden
from dpvision.data.dicom import frame_file, is_dicom, num_frames, read_file, read_tag
from dpvision.data.folders import Missed, join_rows, refuse_cycles, refuse_unless_hidden
from dpvision.data.rgb import BadImage
from dpvision.data.sample import Sample, Source, file_sample
from dpvision.data.table_files import METADATA_NAMES, Row, one_form, read_metadata
from dpvision.errors import OPERATOR_ONLY, DataError

if TYPE_CHECKING:
    from pydicom import Dataset

PATIENT, INSTANCE = "PatientID", "SOPInstanceUID"
DIRECTORY = "DICOMDIR"
_EXTENSIONS = (".dcm", ".dicom", ".dic", ".ima")
_SHOWN = 8


@dataclass(frozen=True)
class DicomRule:
    """Which DICOM files and frames are imported."""

    series: tuple[str, ...] = ()
    """Of DICOM files, import those of which a tag has one of these values: TAG=VALUE[,VALUE], e.g.
    Modality=CR,DX or ViewPosition=PA. Several must all hold.
    """
    frames: str = "all"
    """Of DICOM files with several frames, import all, the first, the middle one, or those with
    these numbers, from 0: all, first, middle, or e.g. 0,4,9.
    """

    def wanted(self) -> dict[str, frozenset[str]]:
        """Return the values of each tag. Raises DataError for an unknown tag or no value."""
        found: dict[str, frozenset[str]] = {}
        for one in self.series:
            tag, _, values = one.partition("=")
            several = frozenset(value.strip() for value in values.split(",") if value.strip())
            if not several or tag in found:
                raise DataError(
                    f"data import: series={one!r}; expected TAG=VALUE[,VALUE], each tag once. "
                    "Write e.g. --series Modality=CR,DX."
                )
            _check_keyword(tag, "--series", ())
            found[tag] = several
        return found

    def picked(self, num: int) -> Iterable[int]:
        """Return the frames to import of ``num``. Raises DataError for another word."""
        if self.frames in ("all", "first", "middle"):
            return {"all": range(num), "first": [0], "middle": [num // 2]}[self.frames]
        try:
            listed = sorted({int(word) for word in self.frames.split(",")})
        except ValueError:
            listed = [-1]
        if listed[0] < 0:
            raise DataError(
                f"data import: frames={self.frames}; expected all, first, middle or numbers from "
                "0, with commas. Write e.g. --frames 0,4,9."
            )
        return takewhile(lambda k: k < num, listed)


EVERYTHING = DicomRule()


def may_be_dicom(path: Path) -> bool:
    """Whether a file is DICOM by its extension, or by its content if it has no usual extension."""
    if path.suffix.lower() in _EXTENSIONS:
        return True
    try:
        if path.suffix[1:].isalpha() or not path.is_file():  # opening a pipe would wait
            return False
        with path.open("rb") as file:
            return is_dicom(file.read(132))
    except OSError:
        return False


def dicom_source(
    root: Path,
    unit_from: str | None,
    label_from: str | None,
    separated: bool,
    rule: DicomRule = EVERYTHING,
) -> Source:
    """Open a folder of DICOM files, or one.

    A table metadata.csv or metadata.jsonl in the folder has fields by ``file_name`` or by
    ``SOPInstanceUID``.

    Args:
        unit_from, label_from: tags by keyword, columns of the table, ``parent`` (the file's
            folder), or ``label`` for the first folder below ``root``.
        separated: an empty label in the table is an empty list, not a missing label.

    Raises:
        DataError: pydicom is not installed, an unknown tag or column, or a table that does not fit.
            At the end of the samples: no file has the values of ``rule.series``.
    """
    try:
        importlib.import_module("pydicom")
    except ImportError:
        raise DataError(
            f"source: {root}: DICOM, and pydicom is not installed; expected the extra dicom. "
            "Install it: pip install 'dpvision[dicom]'."
        ) from None
    wanted, label, unit = rule.wanted(), label_from or "label", unit_from or PATIENT
    rule.picked(1)
    columns, rows, missed = list[str](), dict[str, Row](), Missed()
    if root.is_dir():
        columns, rows = read_metadata(
            root, [label, unit], label if separated else None, ("file_name", INSTANCE)
        )
    for option, name in (("--unit-from", unit_from), ("--label-from", label_from)):
        if name is not None and name not in (known := ["parent", "label", *columns]):
            _check_keyword(name, option, known)
    by_name = "file_name" in columns
    if by_name:
        rows, missed = join_rows(root, rows)
    without_row = set[str]()
    counts = Counter({"table_rows_without_file": 0} if rows else {})
    tags = {unit, *([] if label == "label" else [label])} - {"parent", *columns}
    chosen = dict[str, Counter[str]]((tag, Counter()) for tag in wanted)

    def samples() -> Iterator[Sample]:
        used, num_kept, has_table = set[str](), 0, bool(rows)
        for path in _files(root):
            inside = path.relative_to(root).as_posix() if path != root else path.name
            if is_hidden(inside):
                yield Sample(inside, b"", {}, problem=HIDDEN)
                continue
            whole = file_sample(path, inside, {})
            if whole.problem is None and not is_dicom(whole.image):
                whole = whole._replace(image=b"", problem="no DICOM beside DICOM")
            if whole.problem == "not an image" and path.suffix.lower() in _EXTENSIONS:
                whole = whole._replace(problem="DICOM: without its preamble")
            if whole.problem is not None:
                yield whole
                continue
            try:
                header = read_file(whole.image)
                found = {tag: read_tag(header, tag) for tag in (*wanted, *tags, INSTANCE)}
                num = num_frames(header)
            except BadImage as error:
                yield whole._replace(image=b"", problem=error.reason)
                continue
            for tag in wanted:
                chosen[tag][str(found[tag] or "no value")] += 1
            if not all(str(found[tag]) in values for tag, values in wanted.items()):
                yield whole._replace(image=b"", problem="DICOM: of another series")
                continue
            num_kept += 1
            name = one_form(inside) if by_name else str(found[INSTANCE])
            fields: dict[str, Any] = {tag: found[tag] for tag in tags}
            parts = Path(inside).parts
            fields |= {"parent": parts[-2]} if len(parts) > 1 else {}
            fields |= {"label": parts[0]} if len(parts) > 1 and label_from == "label" else {}
            fields |= rows.get(name, {})
            used.add(name)
            for sample in _frames(whole, header, num, rule):
                if has_table and name not in rows:
                    without_row.add(sample.key)
                yield sample._replace(fields=fields)
        if wanted and not num_kept:
            _refuse_empty(rule, chosen)
        if has_table:
            counts["table_rows_without_file"] = len(rows.keys() - used)

    return Source(
        samples(), counts=counts, missed=missed._replace(files=without_row), unit_from=PATIENT
    )


def _files(root: Path) -> Iterator[Path]:
    """Yield the files of a folder in a fixed order, without tables and DICOMDIR; or the file."""
    if root.is_file():
        yield root
        return
    tables = {root / name for name in METADATA_NAMES}
    for folder, below, names in os.walk(root, onerror=refuse_unless_hidden(root), followlinks=True):
        below.sort()
        refuse_cycles(Path(folder), below)
        for name in sorted(names):
            if Path(folder, name) not in tables and name != DIRECTORY:
                yield Path(folder, name)


def _frames(whole: Sample, header: "Dataset", num: int, rule: DicomRule) -> Iterator[Sample]:
    """Yield the frames of a file; after one that is damaged none."""
    none = True
    for k in rule.picked(num):
        none = False
        if num == 1:
            yield whole
            continue
        key = f"{whole.key}#{k}"
        try:
            yield Sample(key, frame_file(header, k), {})
        except BadImage as error:
            yield Sample(key, b"", {}, problem=error.reason)
            return
    if none:
        yield whole._replace(image=b"", problem="DICOM: without these frames")


def _refuse_empty(rule: DicomRule, chosen: dict[str, Counter[str]]) -> None:
    found = "; ".join(
        f"{tag}: " + ", ".join(f"{value} ({n:,})" for value, n in values.most_common(_SHOWN))
        for tag, values in chosen.items()
    )
    raise DataError(
        f"data import: --series {' --series '.join(rule.series)}: {OPERATOR_ONLY}no file; found "
        f"{found}; expected some. Change the values, which are compared letter by letter."
    )


def _check_keyword(name: str, option: str, columns: Iterable[str]) -> None:
    """Raise DataError for a name that is no keyword of a DICOM tag."""
    names = importlib.import_module("pydicom.datadict").keyword_dict
    if name not in names:
        near = difflib.get_close_matches(name, [*names, *columns], 1)
        others = f" or one of {', '.join(columns)}" if columns else ""
        raise DataError(
            f"data import: {option} {name}; expected the keyword of a DICOM tag{others}. "
            + (f"Did you mean {near[0]}?" if near else "Write e.g. Modality.")
        )
