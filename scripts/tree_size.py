"""Count AST statements, files and lines of each package under src/dpvision.

    python scripts/tree_size.py [SOURCE ...]

A statement is an ``ast.stmt`` node, nested ones included; a docstring is one. Several sources
(other checkouts' src/dpvision) stand in columns beside each other.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent.parent / "src" / "dpvision"


def tree_size(source: Path) -> dict[str, Counter[str]]:
    """Statements, files and lines by package or top module, "total" among them."""
    sizes: dict[str, Counter[str]] = {}
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
        count = Counter(statements=statements, files=1, lines=len(text.splitlines()))
        for name in (path.relative_to(source).parts[0], "total"):
            sizes[name] = sizes.get(name, Counter()) + count
    return sizes


def main() -> None:
    sources = [Path(argument) for argument in sys.argv[1:]] or [HERE]
    sizes = [tree_size(source) for source in sources]
    for source in sources:
        print(source)
    for name in [*sorted({name for size in sizes for name in size} - {"total"}), "total"]:
        columns = [size.get(name, Counter()) for size in sizes]
        parts = [
            f"{c['statements']:7,} statements "
            f"({c['statements'] / size['total']['statements']:4.0%}), {c['files']:3} files, "
            f"{c['lines']:6,} lines"
            for c, size in zip(columns, sizes, strict=True)
        ]
        print(f"{name:16}", " | ".join(parts))


if __name__ == "__main__":
    main()
