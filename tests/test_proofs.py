"""docs/proofs.md names every place that draws noise or another secret, and names code and tests
that are there.
"""

import ast
import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "dpvision"
PAGE = (ROOT / "docs" / "proofs.md").read_text()
CODE = re.findall(r"`([\w.]+):([\w.]+)`", PAGE)
TESTS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
SECRET = {"privatize", "derive_rng", "Stream", "Keystream", "Normals", "box_muller", "normals"}
"""Functions and classes that give noise or secret draws."""
INSIDE = {"privacy.stream", "privacy.sampling", "dp.normals", "dp.noise"}
"""Modules that define them; ``privatize`` is all that ``dp.noise`` offers."""


def calls(path: Path) -> list[str]:
    """``module:function`` of each call of ``SECRET`` in a file."""
    module = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
    found: list[str] = []

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = (*names, node.name)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.split(".")[-1] in SECRET and not called.startswith("torch."):
                found.append(f"{module}:{'.'.join(names)}")
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    visit(ast.parse(path.read_text()), ())
    return [] if module in INSIDE else found


def test_every_place_that_draws_noise_or_another_secret_is_named() -> None:
    places = {place for path in SOURCES.rglob("*.py") for place in calls(path)}
    assert {"train.loop:_take", "adapt.release:Releases._privatize"} <= places
    named = {f"{module}:{name}" for module, name in CODE}
    assert places <= named, f"docs/proofs.md lacks {sorted(places - named)}"


def test_a_new_place_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCES", tmp_path)
    (tmp_path / "new.py").write_text("class A:\n  def f(self):\n    return noise.privatize(1)\n")
    assert calls(tmp_path / "new.py") == ["new:A.f"]


@pytest.mark.parametrize(("module", "name"), sorted(set(CODE)))
def test_the_code_that_a_proof_is_about_is_there(module: str, name: str) -> None:
    found = importlib.import_module(f"dpvision.{module}")
    try:
        assert reduce(getattr, name.split("."), found) is not None
    except AttributeError:  # a field without a default
        owner = reduce(getattr, name.split(".")[:-1], found)
        assert name.split(".")[-1] in owner.__dataclass_fields__


def test_the_attacks_that_the_page_names_are_there() -> None:
    assert len(TESTS) > 20
    for file, name in TESTS:
        text = (ROOT / file).read_text()
        assert not name or f"def {name}(" in text, f"{file}::{name}"


def test_every_head_and_law_has_its_proof() -> None:
    from dpvision.config.heads import HEADS
    from dpvision.privacy.sampling import LAWS

    assert all(f"`{name}`" in PAGE for name in HEADS)
    assert all(f"`privacy.sampling:{law.__name__}.event`" in PAGE for law in LAWS.values())
