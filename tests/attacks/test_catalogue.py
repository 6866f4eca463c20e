"""Every table of docs/attacks.md names the tests that repeat its attacks; these exist, and
docs/audits.md has what came of each.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attacks.md").read_text()
AUDITS = (ROOT / "docs" / "audits.md").read_text()
SECTIONS = re.findall(r"^## .*?(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)


def files(text: str) -> list[str]:
    """Files under tests/ that a text names; a name without a folder is one of tests/attacks."""
    named = re.findall(r"`(?:tests/(\w+)/)?(test_\w+\.py)`", text)
    return [f"{folder or 'attacks'}/{name}" for folder, name in named]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.splitlines()[0].removeprefix("## "))
def test_every_row_has_a_file_that_repeats_it(section: str) -> None:
    """Named in the row, or above its table."""
    named: list[str] = []
    for block in section.split("\n\n"):
        named = named if block.startswith("|") else [*named, *files(block)]
        assert named or not block.startswith("|"), block[:100]
    for name in files(section):
        assert "def test_" in (ROOT / "tests" / name).read_text(), name


def test_every_file_of_attacks_is_named() -> None:
    own = {f"attacks/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert own - {f"attacks/{Path(__file__).name}"} <= set(files(PAGE))


def test_every_file_that_repeats_attacks_is_in_the_table_of_audits() -> None:
    """``python benchmarks/mutants.py --only FILE --json RESULT``, then ``--page RESULT``, adds
    one. tests/mutants has a table of its own, by mistake.
    """
    table = re.findall(r"^\| `(\w+/test_\w+\.py)` \| (\d+) \| (\d+) \|", AUDITS, re.MULTILINE)
    repeated = {name for name, tests, succeed in table if int(tests) > 0 and succeed == "0"}
    assert {name for name in files(PAGE) if not name.startswith("mutants/")} <= repeated
