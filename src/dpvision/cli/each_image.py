"""Shared by the commands that compute something for each image: predict and caption."""

import contextlib
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from dpvision.cli.output import unreadable_text
from dpvision.cli.progress import ProgressLine
from dpvision.errors import OPERATOR_ONLY, DataError
from dpvision.runs.folder import require_confidential


class _Result(Protocol):
    @property
    def problem(self) -> str | None: ...


R = TypeVar("R", bound=_Result)


@dataclass(frozen=True)
class Release:
    """Where outputs on private images may be written."""

    release_private_outputs: bool = False
    """Write what is computed from private images anywhere. You decide this for the people shown; no
    epsilon covers it.
    """

    def check(self, out: Path | None, command: str, what: str, private: bool, name: str) -> None:
        """Refuse a file outside a folder named confidential.

        Args:
            what: content of the file.
            name: the option that gives it.

        Raises:
            ConfigError: ``private``, and the file is elsewhere and was not released.
        """
        if out is not None and private and not self.release_private_outputs:
            remedy = ", or give --release-private-outputs"
            require_confidential(out, command, what, remedy, name=name)


@dataclass(frozen=True)
class Results(Generic[R]):
    """What was computed for all images."""

    num_done: int
    made: list[R]
    """The results of readable images, if they are to be kept."""
    unreadable: list[R]


def for_each(
    results: Iterable[R],
    out: Path | None,
    writer: Callable[[Path], AbstractContextManager[Callable[[R], object]]],
    print_one: Callable[[R], None],
    *,
    command: str,
    what: str,
    total: int | None,
    private: bool,
    json: bool,
) -> Results[R]:
    """Write each result to ``out`` or print it, show progress, and name the images that could not
    be read.

    Args:
        writer: opens ``out``, and gives the function that is called with every result.
        print_one: prints a result, without ``out`` and ``json``. No progress then on the same
            terminal.
        what: name of the results, for the progress.
        total: expected number of images, if known.
        json: whether to return the results of readable images.

    Raises:
        DataError: no image could be read, or ``out`` cannot be written.
    """
    made, unreadable, num_done = list[R](), list[R](), 0
    prints = out is None and not json
    quiet = prints and (sys.stdout.isatty() or not sys.stderr.isatty())
    with contextlib.ExitStack() as stack:
        write: Callable[[R], object] | None = print_one if prints else None
        if out is not None:
            write = stack.enter_context(writer(out))
        line = stack.enter_context(ProgressLine(private=private, quiet=quiet))
        for one in results:
            if write is not None:
                write(one)
            if one.problem is not None:
                unreadable.append(one)
                continue
            num_done += 1
            if json:
                made.append(one)
            line.count(what, num_done, total)
        if num_done == 0:
            raise DataError(
                f"{command}: {unreadable_text(unreadable) or 'no images'}; expected at least one "
                "readable image. Give other paths."
            )
    if unreadable:
        print((OPERATOR_ONLY if private else "") + unreadable_text(unreadable), file=sys.stderr)
    return Results(num_done, made, unreadable)
