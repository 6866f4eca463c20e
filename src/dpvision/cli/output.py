"""Output of commands: JSON or aligned text to standard output, progress to standard error."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from dpvision.cli import printable
from dpvision.environment import own_cores
from dpvision.errors import OPERATOR_ONLY, ConfigError

T = TypeVar("T")

CONFIG = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.AvoidSubcommands,
    tyro.conf.HelptextFromCommentsOff,
)
"""Flags get no --no-flag twin. A setting of a union type keeps the recipe's type, so that there are
no subcommands.
"""

FLAT = tyro.conf.arg(name="")
"""Annotates options whose flags have no prefix."""
StorePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]
RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
SourcePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Images = Annotated[
    tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES [IMAGES ...]")
]
RecipeName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]


@dataclass(frozen=True)
class Reading:
    """How images are read."""

    batch_size: int = 256
    """Images in one forward pass."""
    workers: int = field(default_factory=own_cores)
    """Threads that read images."""

    def check(self, command: str) -> None:
        """Raise ConfigError unless both are at least 1."""
        for name, value in vars(self).items():
            if not value >= 1:
                raise ConfigError(
                    f"{command}: {name}={value}; expected at least 1. Omit it for the default."
                )


def parse(target: Callable[..., T], name: str, argv: Sequence[str], **kwargs: Any) -> T:
    """Parse ``argv`` with tyro and call ``target``. On wrong usage, tyro prints help and exits with
    status 2.
    """
    return tyro.cli(target, prog=f"dpvision {name}", args=list(argv), config=CONFIG, **kwargs)


def emit(result: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print a result, as JSON or as text."""
    print(json.dumps(result, indent=1, allow_nan=False) if as_json else text)


def may_show(private: bool, asked: bool) -> bool:
    """Return whether output that depends on the records may be printed: they are public, both
    streams are terminals, or the operator asked.

    Otherwise the output may be a job's log, which others may read.
    """
    return not private or asked or (sys.stdout.isatty() and sys.stderr.isatty())


def private_scores(text: str, written: Sequence[str], asked: bool) -> str:
    """Return scores on private images as text for the operator; if they may not be printed, name
    the files instead.

    Args:
        text: the scores.
        written: files that contain them.
        asked: whether --show-confidential was given.
    """
    if may_show(True, asked):
        return (
            f"{OPERATOR_ONLY}functions of private images; choosing by them is a selection that "
            "no guarantee covers.\n"
            f"{text}"
        )
    where = (
        f"they are in {', '.join(written)}"
        if written
        else "they were not written: give --out confidential/FILE.json"
    )
    return (
        f"Scores on private images are not printed where others may read them; {where}. "
        "--show-confidential prints them."
    )


def unreadable_text(images: Sequence[Any]) -> str:
    """Return how many images could not be read, and the names and problems of the first 20."""
    if not images:
        return ""
    named = ", ".join(f"{one.name} ({one.problem})" for one in images[:20])
    more = f", and {len(images) - 20:,} more" if len(images) > 20 else ""
    return f"{len(images):,} could not be read: {named}{more}"


def pairs(rows: Mapping[str, Any]) -> str:
    """Return the rows as two aligned columns."""
    width = max(map(len, rows), default=0)
    return "\n".join(
        f"  {key:{width}}  {shown(value)}" for key, value in rows.items() if value is not None
    )


def shown(value: Any) -> str:
    """Format a number for display, and anything else by ``str``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table as text, with the first column left-aligned and the others right-aligned.

    Names are shown as they are: ``[bold]`` is no markup, and what does not print is escaped.
    """
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*(printable(shown(value)) for value in row))
    console = Console(width=120, no_color=True, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(made)
    return capture.get().rstrip()
