"""The index and the site's menu name every page, links between pages lead somewhere, and commands
can be pasted into a shell.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from dpvision.cli import COMMANDS, main

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


EXPERIMENTS = [page for page in PAGES if re.match(r"log/\d{4}", page)]


def test_the_index_and_the_menu_name_every_page_but_experiments() -> None:
    index, menu = (DOCS / "index.md").read_text(), (DOCS.parent / "mkdocs.yml").read_text()
    pages = [page for page in PAGES if page not in EXPERIMENTS]
    assert [page for page in pages if page != "index.md" and f"]({page})" not in index] == []
    assert [page for page in pages if not re.search(rf"[\s:'\"]{re.escape(page)}\b", menu)] == []


def test_the_index_of_experiments_has_each_one_with_its_question_and_a_verdict() -> None:
    """Newest first, by the pages' own dates and headings."""
    rows = re.findall(
        r"^\| (\S+) \| \[(.+)\]\((\S+\.md)\) \| (.+) \|$",
        (DOCS / "log" / "index.md").read_text(),
        flags=re.M,
    )
    assert sorted(f"log/{name}" for _, _, name, _ in rows) == EXPERIMENTS
    assert [date for date, *_ in rows] == sorted((date for date, *_ in rows), reverse=True)
    for date, question, name, _ in rows:
        page = (DOCS / "log" / name).read_text()
        assert page.startswith(f"# {question}\n\n{date}\n") and "\n**Verdict.** " in page, name


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_images_and_headings_that_are_there(page: str) -> None:
    here = DOCS / page
    for target, anchor in re.findall(
        r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", here.read_text()
    ):
        there = (here.parent / target).resolve() if target else here
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), flags=re.M)
            slugs = {
                re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")
                for heading in headings
            }
            assert anchor in slugs, f"{target}#{anchor}"


_BELOW = {
    "evaluate": [["captioner"], ["detection", "."], ["segmentation", "."]],
    "data": [
        ["import"],
        ["inspect"],
        ["split"],
        ["curate"],
        ["scenes"],
        ["tokenizer"],
        ["overlap"],
    ],
    "train": [["vip.micro"], ["dpcap.micro"], ["supervised.micro"], ["transfer.micro_lora"]],
}
"""Commands, and recipes of each kind of model, with help of their own."""
_COMMAND = re.compile(r"^(?:\$ )?((?:torchrun [^#]*-m )?dpvision .*)$")


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options in the help of each command and of the commands and recipes below it."""
    found: dict[str, set[str]] = {}
    for name in COMMANDS:
        for below in [[], *_BELOW.get(name, [])]:
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                main([name, *below, "--help"])
            found.setdefault(name, set()).update(re.findall(r"--[a-z][\w.-]*", said.getvalue()))
    return found


def _commands(page: Path) -> list[str]:
    """The lines of code blocks, indented or fenced, that call dpvision; a line that ends in a
    backslash goes on.
    """
    text, lines, fenced = re.sub(r"\\\n *", " ", page.read_text()), [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if (fenced or line.startswith("    ")) and (found := _COMMAND.match(line.strip())):
            lines.append(found[1])
    return lines


@pytest.mark.parametrize("page", ["../README.md", "../examples/README.md", *PAGES])
def test_commands_are_words_of_a_shell_and_options_of_their_command(
    page: str, options: dict[str, set[str]]
) -> None:
    for line in _commands(DOCS / page):
        words = shlex.split(line, comments=True)
        at = words.index("dpvision") + 1
        assert words[at] in COMMANDS, line
        unknown = [
            word
            for word in words[at:]
            if word.startswith("--") and word.split("=")[0] not in options[words[at]] | {"--help"}
        ]
        assert not unknown, (unknown, line)
        assert not re.search(r"\S {3,}(?![# ])", line), (
            f"{line}: a note after a command begins with #"
        )
