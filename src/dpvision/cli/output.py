"""What commands print: JSON for machines, aligned text for people; both to standard output, progress to standard error."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from dpvision.errors import OPERATOR_ONLY

T = TypeVar("T")

CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
"""--flag without a --no-flag beside it; a setting of several kinds keeps the recipe's: --model.encoder.width, and no subcommand."""

StorePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]
RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
SourcePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
RecipeName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]


def parse(target: Callable[..., T], name: str, argv: Sequence[str], **kwargs: Any) -> T:
    """Parse ``argv`` with tyro into the arguments of ``target`` and call it; tyro prints help and exits 2 on wrong usage."""
    return tyro.cli(target, prog=f"dpvision {name}", args=list(argv), config=CONFIG, **kwargs)


def emit(result: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print one result."""
    print(json.dumps(result, indent=1, allow_nan=False) if as_json else text)


def may_show(private: bool, asked: bool) -> bool:
    """Whether what depends on the records may be printed: they are public, a person reads both streams, or the operator asks for it.

    Anything else is a job's log, which others may read.
    """
    return not private or asked or (sys.stdout.isatty() and sys.stderr.isatty())


def private_scores(text: str, written: Sequence[str], asked: bool) -> str:
    """Scores on private images as text, marked as the operator's; where they may not be printed, only where they are.

    Args:
        text: the scores.
        written: files that hold them.
        asked: --show-confidential.
    """
    if may_show(True, asked):
        return f"{OPERATOR_ONLY}functions of private images; choosing by them is a selection that no guarantee covers.\n{text}"
    where = f"they are in {', '.join(written)}" if written else "they are written nowhere: say --out confidential/FILE.json"
    return f"Scores on private images are not printed where others may read; {where}. --show-confidential prints them."


def pairs(rows: Mapping[str, Any]) -> str:
    """Two aligned columns."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {key:{width}}  {shown(value)}" for key, value in rows.items() if value is not None)


def shown(value: Any) -> str:
    """A number as people write it, anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as text, first column left, the others right."""
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*map(shown, row))
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(made)
    return capture.get().rstrip()
