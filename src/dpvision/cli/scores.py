"""Shared by the commands that score: arguments, and printing of scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dpvision.cli.output import emit, private_scores, table
from dpvision.eval.score import Score, wilson_interval

if TYPE_CHECKING:
    from dpvision.eval.class_scores import ClassRow, ClassScores, Value

_CLASSES = 20
"""Most classes of a table."""

Encoders = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ENCODER [ENCODER ...]")
]


@dataclass(frozen=True)
class Printing:
    """How a command prints its scores."""

    show_confidential: bool = False
    """Print scores on private images even if the output is not a terminal, such as a job's log."""
    json: bool = False
    """Print JSON, with private scores too."""


def names_of(text: str) -> list[str]:
    """Split names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def emit_scores(
    found: Sequence[Score], text: str, written: Sequence[Path], printing: Printing, **more: Any
) -> None:
    """Print scores and the files they are in; private scores only if ``private_scores`` allows it.

    Args:
        text: the scores as text.
        more: further JSON entries, which may replace "scores".
    """
    files = list(dict.fromkeys(map(str, written)))
    if files:
        text += "\nwritten to " + ", ".join(files)
    if any(score.visibility == "private" for score in found):
        text = private_scores(text, files, printing.show_confidential)
    entries = {"scores": [score.to_dict() for score in found], **more, "written": files}
    emit(entries, printing.json, text)


def scores_table(scores: Sequence[Score]) -> str:
    """Format scores as a table, best first within each protocol."""
    rows = [
        (s.protocol, s.name, _shown(s), f"{s.low:.1%} to {s.high:.1%}", f"{s.chance:.1%}")
        for s in sorted(scores, key=lambda s: (s.protocol, -s.value))
    ]
    first, columns = scores[0], ("protocol", "features", "score", "95%", "chance")
    if len({row[-1] for row in rows}) == 1:  # chance is the same for all, so the title has it
        title = f"{first.n:,} test records, chance {first.chance:.1%}, {first.visibility}"
        text = table(title, columns[:-1], [row[:-1] for row in rows])
    else:
        text = table(f"{first.n:,} test records, {first.visibility}", columns, rows)
    if any(s.high < s.chance for s in scores):
        text += (
            "\n"
            "Below chance: do the labels of training and test images count from the same "
            "number, or have the same class names?"
        )
    if any(s.std is not None for s in scores):
        text += "\nMean and standard deviation over seeds; intervals are Student's over the seeds."
    drawn = next((s for s in scores if " draws" in s.protocol and s.std is None), None)
    if drawn is not None:
        low, high = wilson_interval(round(drawn.value * drawn.n), drawn.n)
        half = f"{(high - low) / 2:.1%}"
        text += (
            "\n"
            "Intervals of scores over draws are Student's over the draws; Wilson's over test "
            f"records would be about +- {half}."
        )
    return text


def class_tables(found: "ClassScores", file: Path) -> str:
    """Format figures per class as a table, and those of groups over all classes as another.

    Args:
        file: where all of them are written.
    """
    from dpvision.eval.class_scores import ALL

    wholes = [row for row in found.rows if row.name == ALL]
    classes = [row for row in found.rows if row.name != ALL and row.group == ALL]
    most = sorted(classes, key=_auroc)[:_CLASSES] if len(classes) > _CLASSES else classes
    people = "" if found.units == found.images else f" of {found.units:,} persons"
    title = f"{found.images:,} test records{people}, {found.visibility}; in percent"
    names = tuple(wholes[0].figures)
    rows = [_cells(row.name, row) for row in most] + [_cells("all classes", wholes[0])]
    lines = [table(title, ("class", "images", *names), rows)]
    if len(classes) > _CLASSES:
        lines.append(
            f"The {_CLASSES} classes of lowest AUROC; the other {len(classes) - _CLASSES} are in "
            f"{file}."
        )
    if len(wholes) > 1:
        lines.append(
            table(
                "all classes by group; in percent",
                ("group", "images", *names),
                [_cells(row.group, row) for row in wholes[1:]],
            )
        )
        lines.append(f"Each class in each group: {file}.")
    lines.append(
        "Intervals: 95%, bootstrap over "
        f"{'persons' if found.units < found.images else 'images'}; without an error they have no "
        "width. -: no images of the class, or no others."
    )
    if found.fitted:
        lines.append(
            "Fitted here: `dpvision calibrate` used images of this import, so these are no test "
            "figures. Calibrate or test on other images."
        )
    return "\n".join(lines)


def released_text(entry: dict[str, Any], file: Path) -> str:
    """Format the figures that a release made public (``eval.probes.release_scores``).

    Args:
        file: where they are written.
    """
    from dpvision.eval.class_scores import ALL
    from dpvision.statement.released_scores import text

    units = "persons" if entry["charged"]["of_person"] else "images"
    wholes = [row for row in entry["rows"] if row["name"] == ALL]
    classes = [row for row in entry["rows"] if row["name"] != ALL and row["group"] == ALL]
    lines = [text(entry), ""]
    for what, key, rows in (("class", "name", classes), ("group", "group", wholes)):
        title, measures = f"by {what}; in percent", rows[0]["figures"]
        shown = [
            (
                row[key],
                f"{row['count']:,.0f} +- {1.96 * row['count_std']:,.0f}",
                *map(_released, row["figures"].values()),
            )
            for row in rows
        ]
        lines.append(table(title, (what, units, *measures), shown))
    lines.append(
        "Intervals: 95%, with the noise. too few: fewer than five standard deviations of noise."
        f"\nwritten to {file}, with each class in each group and the table itself"
    )
    return "\n".join(lines)


def _released(value: dict[str, float] | None) -> str:
    return "too few" if value is None else _interval(tuple(value.values()))


def _cells(name: str, row: "ClassRow") -> tuple[str | int, ...]:
    return name, row.images, *map(_interval, row.figures.values())


def _auroc(row: "ClassRow") -> float:
    value = row.figures["AUROC"]
    return 2.0 if value is None else value.value


def _interval(value: "Value | tuple[float, ...] | None") -> str:
    if value is None:
        return "-"
    shown = [f"{100 * share:.1f}".replace("100.0", "100") for share in value]
    return "{} ({}-{})".format(*shown)


def _shown(score: Score) -> str:
    return f"{score.value:.1%}" + ("" if score.std is None else f" +- {score.std:.1%}")
