"""Every command printed in README, docs, examples and help texts is taken by the real parser.

The commands are parsed, not run: an option, a subcommand or a value that disappears fails here.
"""

import ast
import contextlib
import functools
import io
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro

from dpvision.cli import COMMANDS, main
from dpvision.recipes import RECIPES

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"))
    if not {"log", "decisions"} & {*page.parts, page.stem}  # these are of their day
]
SOURCES = sorted(
    path for path in ROOT.glob("src/dpvision/**/*.py") if "dpvision" in path.read_text()
)
_CALL = re.compile(r"^(?:\$ )?((?:torchrun .*-m )?dpvision .*)$")
_PLACEHOLDER = dict.fromkeys(("B", "E", "K", "LOW", "HIGH", "M", "N", "NUM", "P", "k"), "2")
"""Numbers that stand as letters."""
_SEEN: dict[str, str] = {}
"""Commands that were parsed, with what was said against them: pages repeat each other."""


class _Parsed(BaseException):
    """Raised in place of running a command; no handler of the command line catches it."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], None]]:
    """Return a function that parses the words after ``dpvision`` without running anything; wrong
    usage raises SystemExit.
    """
    real_cli, real_subcommands = tyro.cli, tyro.extras.subcommand_cli_from_dict

    def inert(target: Any) -> Any:
        """Return a function with the arguments of ``target`` that does nothing."""
        if isinstance(target, type):
            return target
        return functools.wraps(target)(lambda *args, **kwargs: None)

    def cli(target: Any, **kwargs: Any) -> Any:
        found = real_cli(inert(target), **kwargs)
        if kwargs.get("return_unknown_args"):
            return found  # a first look, before the settings are known
        raise _Parsed

    def subcommands(commands: dict[str, Any], **kwargs: Any) -> Any:
        real_subcommands({name: inert(command) for name, command in commands.items()}, **kwargs)
        raise _Parsed

    monkeypatch.setattr(tyro, "cli", cli)
    monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", subcommands)

    def parse(words: list[str]) -> None:
        recipe = next((word for word in words if word in RECIPES), "transfer.auto")
        monkeypatch.setattr(  # --resume reads the run's settings: here those of the recipe
            "dpvision.runs.folder.read_run", lambda root: (root, RECIPES[recipe](), {})
        )
        with contextlib.suppress(_Parsed):
            main(words)
            raise AssertionError("the parser was not called")

    yield parse


def _joined(lines: list[str]) -> Iterator[str]:
    """Yield the commands of a help text: a line that calls dpvision and the lines it goes on in. A
    note follows three spaces, or stands on a line of its own after #.
    """
    at = 0
    while at < len(lines):
        found = _CALL.match(lines[at].strip())
        at += 1
        if found is None:
            continue
        command, *notes = re.split(r"\s{3,}", found[1])
        while at < len(lines) and lines[at].strip() and not _CALL.match(lines[at].strip()):
            if not notes and not lines[at].strip().startswith("#"):
                command += " " + lines[at].strip()
            at += 1
        yield command


def commands_of_page(page: Path) -> Iterator[str]:
    """Yield the commands of code blocks, indented or fenced, and those between backticks that have
    an option with a value or another word after it.
    """
    text, fenced = re.sub(r"\\\n *", " ", page.read_text()), False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if (fenced or line.startswith("    ")) and (found := _CALL.match(line.strip())):
            yield found[1]
        elif not fenced:
            yield from re.findall(r"`(dpvision [a-z][^`]* --[^`]* [^-`][^`]*)`", line)


def commands_of_source(path: Path) -> Iterator[str]:
    """Yield the commands of help texts: examples in docstrings and other literals of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines = node.value.splitlines()
            if any(line.startswith("  ") and _CALL.match(line.strip()) for line in lines[1:]):
                yield from _joined(lines)


def _words(command: str) -> list[str]:
    """Return the words after ``dpvision``; what stands in brackets may be given, and is."""
    whole = re.sub(r"\[\w+ \.\.\.\]|\B\.\.\.|[][|]", "", command)
    words = shlex.split(whole, comments=True)
    return [_PLACEHOLDER.get(word, word) for word in words[words.index("dpvision") + 1 :]]


def _refused(parse: Callable[[list[str]], None], command: str) -> str:
    """Return why the parser does not take a command, or "" if it does."""
    words = _words(command)
    if " ".join(words) not in _SEEN:
        _SEEN[" ".join(words)] = _why_refused(parse, command, words)
    return _SEEN[" ".join(words)]


def _why_refused(parse: Callable[[list[str]], None], command: str, words: list[str]) -> str:
    if words[:1] == ["--help"] or words[:1] == ["--version"]:
        return ""
    if words[0] not in COMMANDS:
        return f"{command}: no such command"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parse(words)
    except SystemExit as stop:
        if stop.code in (0, None):
            return ""  # --help
        return f"{command}: {said.getvalue()}"
    except AssertionError:
        return f"{command}: {said.getvalue()}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_of_a_page_are_taken(page: Path, parsed: Callable[[list[str]], None]) -> None:
    assert [why for line in commands_of_page(page) if (why := _refused(parsed, line))] == []


def test_commands_of_help_texts_are_taken(parsed: Callable[[list[str]], None]) -> None:
    found = {path: list(commands_of_source(path)) for path in SOURCES}
    assert sum(map(len, found.values())) > 50
    assert [
        (path.name, why)
        for path, lines in found.items()
        for line in lines
        if (why := _refused(parsed, line))
    ] == []


def test_an_option_that_is_not_there_is_found(parsed: Callable[[list[str]], None]) -> None:
    for line in (
        "dpvision plan vip.base --gpu 8",
        "dpvision data import a b --publik",
        "dpvision train vip.micro --optim.learn-rate 1",
        "dpvision evaluate captioner runs/a --stores b",
        "dpvision lodger stores/mine",
    ):
        assert _refused(parsed, line), line
        assert not _refused(parsed, "dpvision plan vip.base --gpus 8")
