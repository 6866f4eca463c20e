"""Every table of docs/attacks.md names the tests that repeat its attacks, and these exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attacks.md").read_text()
SECTIONS = re.findall(r"^## .*?(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
NAMES = re.compile(r"`(?:tests/\w+/)?(test_\w+\.py)`")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.splitlines()[0].removeprefix("## "))
def test_every_row_has_a_file_that_repeats_it(section: str) -> None:
    """Named in the row, or above its table."""
    files: list[str] = []
    for block in section.split("\n\n"):
        files = files if block.startswith("|") else [*files, *NAMES.findall(block)]
        assert files or not block.startswith("|"), block[:100]
    for name in NAMES.findall(section):
        found = list((ROOT / "tests").rglob(name))
        assert found and all("def test_" in path.read_text() for path in found), name


def test_every_file_of_attacks_is_named() -> None:
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert files <= set(NAMES.findall(PAGE))
