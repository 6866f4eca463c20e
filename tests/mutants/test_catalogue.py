"""docs/pitfalls.md and the tests that plant its mistakes name each other."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECTIONS = re.findall(
    r"^## .*?(?=^## |\Z)",
    (HERE.parents[1] / "docs" / "pitfalls.md").read_text(),
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.splitlines()[0].removeprefix("## "))
def test_every_pitfall_has_its_test_in_the_file_that_its_section_names(section: str) -> None:
    (file,) = re.findall(r"`tests/mutants/(test_\w+\.py)`", section)
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    tests = re.findall(r"^def test_(\w+)\(", (HERE / file).read_text(), re.MULTILINE)
    assert rows and sorted(rows) == sorted(tests)
