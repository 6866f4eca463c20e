"""What commands that make a store print, and their options for labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dpvision.cli.output import emit, pairs
from dpvision.cli.typed import words_of
from dpvision.data.dicom import CUT, NO_RANGE
from dpvision.data.import_labels import LabelRule
from dpvision.data.person_names import SHARED_FILE
from dpvision.errors import OPERATOR_ONLY, DataError

if TYPE_CHECKING:
    from dpvision.data.store import Store

_DARK_BELOW = 1 << 15
"""Images of 16 bits whose largest value is below may have fewer bits."""


@dataclass(frozen=True)
class Labels(LabelRule):
    """The labels of images, of which the command line reads the classes from a file."""

    classes: Path | None = None
    """File with the class names in the order of their numbers, one per line or a JSON list; or a
    JSON object from the labels in SOURCE to names, {"1": "cat", "2": "dog"}.
    """


@dataclass(frozen=True)
class Range:
    """The values of images of more than 8 bits."""

    max_value: int | None = None
    """White in images of more than 8 bits whose files do not state it, such as 4095 for 12-bit
    cameras that write 16 bits. They are stored as 8-bit PNG.
    """
    window: tuple[float, float] | None = None
    """Black and white in images of more than 8 bits, e.g. -160 240 for Hounsfield units, or of
    floating-point values.
    """

    def declared(self, command: str) -> tuple[float, float] | None:
        """Return black and white. Raises DataError if both options are given."""
        if None not in (self.max_value, self.window):
            raise DataError(
                f"{command}: --max-value and --window; expected one of them. Drop --max-value."
            )
        return self.window if self.max_value is None else (0, self.max_value)


def said(store: "Store", as_json: bool, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print what a new store holds, and what to do next.

    Args:
        more: further counts.
    """
    from dpvision.cli.next_steps import to_train
    from dpvision.data.declared import has_units, numbers_to_declare

    summary = store.import_summary()
    result = {
        "store": str(store.path),
        "store_id": store.store_id,
        "visibility": store.visibility,
        "operator_only": store.results_visibility == "private",
        "num_records": store.num_records,
        "multi_label": store.multi_label,
        "declare": numbers_to_declare(store),
        **summary,
        **more,
    }
    kind = ", several labels per record" if store.multi_label else ""
    lines = [
        f"{label(store)}{store.num_records:,} records in {store.path} ({store.visibility}{kind})",
        pairs(_flat({**summary, **more})),
        *_left_out_lines(store, summary),
        *_range_lines(summary),
        *_caption_lines(summary),
        *(unit_lines(store) if has_units(store) else []),
        *to_train(store),
    ]
    emit(result, as_json, "\n".join(lines))


def label(store: "Store") -> str:
    """Return what begins a line that is for the operator only."""
    return OPERATOR_ONLY if store.results_visibility == "private" else ""


def unit_lines(store: "Store") -> list[str]:
    """Return which numbers to declare for a store with persons."""
    from dpvision.data.declared import numbers_to_declare, rounded_up

    field, numbers = store.meta["unit_field"], numbers_to_declare(store)
    people: dict[str, Any] = {
        "sampling_unit": "person",
        "num_units": numbers[0]["num_units"],
        "dataset_size": rounded_up(store.num_records),
    }
    return [
        f"{label(store)}The guarantee will be for a {field} with all its images. Declare one of "
        "these (see docs/data.md, persons):",
        *(
            "  " + " ".join(word for name in one for word in words_of(f"privacy.{name}", one[name]))
            for one in [*numbers, people]
        ),
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in values.items():
        made |= (
            _flat(value, f"{prefix}{key}: ") if isinstance(value, dict) else {prefix + key: value}
        )
    return made


def _left_out_lines(store: "Store", summary: dict[str, Any]) -> list[str]:
    """Return lines with the list of files left out, and how to convert unsupported formats."""
    from dpvision.data.import_merge import DICOM_FILE, UNMATCHED_FILE

    left_out = summary.get("left_out")
    confidential = store.path / "confidential"
    lines = [
        f"{text}: {confidential / name}"
        for text, name in (
            ("Rows without a file, files without a row", UNMATCHED_FILE),
            ("Images of two persons, with both", SHARED_FILE),
            ("Images that may show a name: burned-in annotation or overlay", DICOM_FILE),
        )
        if (confidential / name).exists()
    ]
    if not left_out:
        return lines
    lines += [f"Files left out, with the reason: {store.path / 'confidential' / 'left_out.jsonl'}"]
    if "HEIF" in left_out:
        lines.append(
            "HEIF images (.heic) need pillow-heif: pip install pillow-heif, or convert them: "
            "magick mogrify -format jpg *.heic"
        )
    if "DICOM" in left_out:
        lines.append("DICOM images need pydicom: pip install 'dpvision[dicom]'")
    if "DICOM: transfer syntax" in left_out:
        lines.append(
            "DICOM images in a transfer syntax without a decoder need python-gdcm (pip install "
            "'dpvision[dicom]'), or decompression by DCMTK or gdcmconv."
        )
    return lines


def _caption_lines(summary: dict[str, Any]) -> list[str]:
    """Return a line if there are captions that may say nothing."""
    if not (found := summary.get("captions_suspicious")):
        return []
    return [
        f"{sum(found.values()):,} captions may say nothing about their image "
        f"({', '.join(found)}), and are kept. If they are no captions, empty these fields in the "
        "source and import again."
    ]


def _range_lines(summary: dict[str, Any]) -> list[str]:
    """Return lines if images of 16 bits do not fill their range, or on the declared range."""
    lines = []
    if num := summary.get("dicom", {}).get(NO_RANGE):
        lines.append(
            f"{num:,} DICOM images of more than 8 bits have no window of their own: the range that "
            "their bits allow is black to white, so they may be dark or flat. To choose it, import "
            "again with --window LOW HIGH, e.g. -160 240 for Hounsfield units."
        )
    if num := summary.get("dicom", {}).get(CUT):
        lines.append(
            f"{num:,} DICOM images lose more than half of their pixels to their window, which "
            "makes these black or white. Choose another with --window LOW HIGH."
        )
    return lines + _declared_range_lines(summary)


def _declared_range_lines(summary: dict[str, Any]) -> list[str]:
    if "window" in summary:
        low, high = summary["window"]
        return [
            f"Runs on this store read files of more than 8 bits by the same range, {low:g} to "
            f"{high:g}, also for prediction; with another encoder: preprocess(FILE, "
            f"window=({low:g}, {high:g}))."
        ]
    found = {
        name: n
        for name, n in summary.get("largest_values_of_16_bits", {}).items()
        if int(name.split()[-1]) < _DARK_BELOW
    }
    if not found:
        return []
    most = int(list(found)[-1].split()[-1])
    return [
        f"{sum(found.values()):,} images of 16 bits are dark: their values do not pass {most}, "
        f"and 65535 is white. If their range is smaller, import again with --max-value {most}, "
        "or with --window LOW HIGH."
    ]
