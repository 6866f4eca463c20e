"""Imports go one way only (docs/tour.md); this walks the syntax trees and holds it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "dpvision"

# Packages on one line do not import each other; each may import the lines above it.
ORDER = [
    {"code_digest", "errors", "environment", "mixing", "precision", "strict_json", "threads"},
    {"config", "weights", "files", "devices"},
    {"privacy", "models", "synthetic", "checkpoint"},
    {"data", "plan"},
    {"dp", "optim", "runs"},
    {"train"},
    {"encoders"},
    {"eval", "adapt", "curate"},
    {"statement"},
    {"export", "report"},
    {"audit", "demo", "doctor", "tune"},
    {"cli"},
]
PROGRAMS = {"doctor", "demo", "cli"}
"""What a user starts, with the name of a recipe."""
RANK = {package: rank for rank, packages in enumerate(ORDER) for package in packages}
# dp and optim share a line, yet optim takes the type that dp gives: the wall itself (decision
# 0007).
ALLOWED = {("optim", "dp")}


def _package(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def _import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Import statements that run, those inside functions included; imports for type checking only
    do not count.
    """
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in skipped
    ]


def _imports(path: Path) -> set[str]:
    """Packages of dpvision that a file imports at run time."""
    packages = set()
    for node in _import_statements(path):
        if isinstance(node, ast.Import):
            packages |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dpvision.")}
        elif node.module and node.module.split(".")[0] == "dpvision":
            parts = node.module.split(".")
            packages |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return packages


def _module(path: Path) -> str:
    return ".".join(("dpvision", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


MODULES = {_module(path): path for path in SRC.rglob("*.py")}


def _imported_modules(path: Path) -> set[str]:
    """Modules of dpvision that a file imports at run time; of ``from package import name`` the
    module of that name, if there is one.
    """
    names = set()
    for node in _import_statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.module and not node.level, f"{path}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in full}
    return names & set(MODULES)


FILES = sorted(
    p for p in SRC.rglob("*.py") if p.parent != SRC or _package(p) not in ("__init__", "__main__")
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SRC).as_posix())
def test_a_file_imports_only_packages_above_its_own(path: Path) -> None:
    package = _package(path)
    for other in _imports(path) - {package}:
        if package == "recipes":
            assert other in ("config", "errors"), f"recipes import config only, not {other}"
        elif other == "recipes":
            assert package in PROGRAMS, "recipes are imported by programs only"
        else:
            assert RANK[other] < RANK[package] or (package, other) in ALLOWED, (
                f"{package} imports {other}"
            )


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count, too: a late import may spare start-up time, but not hide a
    cycle.
    """
    graph = {name: _imported_modules(path) for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > len(graph), "the walk finds no imports"
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the cycle


def test_detection_and_segmentation_load_only_when_a_command_asks_for_them() -> None:
    """One module of the command line imports ``eval.dense``, and nothing imports that module:
    ``dpvision evaluate`` opens it by its name. Their library is imported within functions.
    """
    command = "dpvision.cli.evaluate_dense"
    inside = "dpvision.eval.dense"
    for name, path in MODULES.items():
        found = {other for other in _imported_modules(path) if other.startswith(inside)}
        assert not found or name == command or name.startswith(inside), name
        assert command not in _imported_modules(path), name
        top = {
            alias.name if isinstance(node, ast.Import) else node.module or ""
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not [library for library in top if library.startswith("faster_coco_eval")], name


@pytest.mark.parametrize("part", ["probes", "captions", "dense"])
def test_the_parts_of_eval_leave_each_other_alone_and_what_they_share_imports_none(
    part: str,
) -> None:
    outside = [path for path in (SRC / "eval").rglob("*.py") if path.parent.name != part]
    assert outside and not [path for path in outside if f"dpvision.eval.{part}" in path.read_text()]


def test_every_package_has_its_place() -> None:
    assert {_package(p) for p in FILES} <= set(RANK) | {"recipes"}


SAME_NAME = {
    # a command, and what it does
    "demo": {".", "cli", "recipes"},
    "ledger": {"cli", "privacy"},
    "calibrate": {"cli", "eval/probes"},
    "overlap": {"cli", "data"},
    "plan": {"cli", "privacy"},
    "predict": {"cli", "encoders"},
    "tokenizer": {"cli", "data"},
    "verify": {"cli", "statement"},
    # a classifier: the network that is trained, and the one that is loaded
    "classifier": {"encoders", "models"},
    # what is opened by its name or place, whatever its kind
    "open": {"data", "encoders"},
    # what the command line takes
    "settings": {"eval/captions", "eval/dense", "eval/probes"},
    # a run: its settings, and itself
    "run": {"config", "runs"},
    # the same part of both kinds of evaluation
    "suite": {"eval/captions", "eval/probes"},
}
"""Module name -> the packages that may share it."""


def test_no_two_modules_share_a_name_unless_it_means_the_same() -> None:
    packages: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        packages.setdefault(path.stem, set()).add(path.parent.relative_to(SRC).as_posix())
    assert {
        name: where for name, where in packages.items() if len(where) > 1 and name != "__init__"
    } == SAME_NAME


def test_privacy_never_imports_torch() -> None:
    for path in (SRC / "privacy").glob("*.py"):
        assert "import torch" not in path.read_text() and "from torch" not in path.read_text(), path


def test_files_stay_below_600_lines() -> None:
    long = {
        p.relative_to(SRC).as_posix(): n
        for p in SRC.rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 600
    }
    assert not long, f"two ideas in one file? {long}"
