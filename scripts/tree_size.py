"""Measure the source under src/dpvision: size by package, then how it is written.

    python scripts/tree_size.py [SOURCE ...]
    python scripts/tree_size.py /tmp/before/src/dpvision src/dpvision       two trees, in columns

SOURCE is a folder of Python files. A statement is an ``ast.stmt`` node, nested ones included; a
docstring is one. The lines of a function are all of it, docstring included; a comment's line may
hold code. A file with a single importer is imported by one file of its own package and by no other;
imports for type checking count.
"""

import argparse
import ast
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent.parent / "src" / "dpvision"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class File:
    """A module: its name below dpvision ("data.store"), its lines and its syntax tree's nodes."""

    module: str
    lines: list[str]
    nodes: list[ast.AST]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def statements(self, kind: type | tuple[type, ...] = ast.stmt) -> int:
        return sum(isinstance(node, kind) for node in self.nodes)


def read(source: Path) -> list[File]:
    files = []
    for path in sorted(source.rglob("*.py")):
        module = ".".join(path.relative_to(source).with_suffix("").parts)
        text = path.read_text()
        files.append(File(module, text.splitlines(), list(ast.walk(ast.parse(text)))))
    return files


def sizes(files: list[File]) -> dict[str, Counter[str]]:
    """Statements, files and lines by package or top module, "total" among them."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for file in files:
        for name in (file.package, "total"):
            found[name].update(statements=file.statements(), files=1, lines=len(file.lines))
    return found


def functions(files: list[File]) -> Iterator[Function]:
    return (node for file in files for node in file.nodes if isinstance(node, Function))


def num_parameters(function: Function) -> int:
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return len([arg for arg in named if arg.arg not in ("self", "cls")])


def num_lines(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def comment_lines(file: File) -> int:
    tokens = tokenize.generate_tokens(iter([line + "\n" for line in file.lines]).__next__)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def single_importers(files: list[File]) -> list[str]:
    """Modules that one file of their own package imports, and no other file."""
    importers: dict[str, set[str]] = {file.module: set() for file in files}
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                if (module := name.removeprefix("dpvision.")) in importers:
                    importers[module].add(file.module)
    packages = {module: module.rpartition(".")[0] for module in importers}
    return [
        module
        for module, who in importers.items()
        if len(who) == 1 and packages[module] and packages[who.copy().pop()] == packages[module]
    ]


MEASURES: dict[str, Callable[[list[File]], str]] = {
    "imports, of statements": lambda files: _share(
        files, lambda f: f.statements((ast.Import, ast.ImportFrom)), File.statements
    ),
    "lines over 100 columns": lambda files: str(
        sum(len(line) > 100 for file in files for line in file.lines)
    ),
    "lines with a comment": lambda files: _share(files, comment_lines, lambda f: len(f.lines)),
    "lines of a file, median": lambda files: f"{median(len(file.lines) for file in files):g}",
    "files under 110 lines": lambda files: str(sum(len(file.lines) < 110 for file in files)),
    "files with a single importer": lambda files: str(len(single_importers(files))),
    "lines of a function, median": lambda files: f"{median(map(num_lines, functions(files))):g}",
    "parameters, most": lambda files: str(max(map(num_parameters, functions(files)))),
    "functions with over 12": lambda files: str(
        sum(num_parameters(function) > 12 for function in functions(files))
    ),
}


def _share(files: list[File], part: Callable[[File], int], whole: Callable[[File], int]) -> str:
    return f"{sum(map(part, files)) / sum(map(whole, files)):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", metavar="SOURCE", nargs="*", type=Path, default=[HERE])
    sources = parser.parse_args().sources
    trees = [read(source) for source in sources]
    for source, files in zip(sources, trees, strict=True):
        if not any(functions(files)):
            parser.error(
                f"{source} has no Python function; expected a package's folder. Name {HERE}."
            )
        print(source)
    packages = [sizes(files) for files in trees]
    for name in [*sorted({name for size in packages for name in size} - {"total"}), "total"]:
        columns = [size.get(name, Counter()) for size in packages]
        parts = [
            f"{c['statements']:7,} statements "
            f"({c['statements'] / size['total']['statements']:4.0%}), {c['files']:3} files, "
            f"{c['lines']:6,} lines"
            for c, size in zip(columns, packages, strict=True)
        ]
        print(f"{name:16}", " | ".join(parts))
    for name, measure in MEASURES.items():
        print(f"{name:30}", " | ".join(f"{measure(files):>12}" for files in trees))


if __name__ == "__main__":
    main()
