"""One number for the code that made a run, the same wherever that code lies (SECURITY.md)."""

import hashlib
from pathlib import Path

TEXTS = (".py", ".html", ".css", ".js", ".json")
CONSTANTS = (".safetensors",)
"""Kinds of a package's files that count."""


def code_digest(package: Path) -> str:
    """Return the SHA-256 of a package's code, which a wheel, an sdist, a checkout and an editable
    install of one version share.

    What is hashed has a line for each file of ``TEXTS`` and ``CONSTANTS``, as ``sha256sum ./PATH``
    prints it, in the order of the paths as bytes. Line ends of texts count as a line feed; other
    files, such as ``__pycache__``, modes and times do not count.

    Args:
        package: its folder, such as ``src/dpvision``.
    """
    lines = []
    for path in package.rglob("*"):
        if path.suffix in (*TEXTS, *CONSTANTS) and path.is_file():
            content = path.read_bytes()
            if path.suffix in TEXTS:
                content = content.replace(b"\r\n", b"\n")
            name = path.relative_to(package).as_posix()
            lines.append((name, f"{hashlib.sha256(content).hexdigest()}  ./{name}\n"))
    return hashlib.sha256("".join(line for _, line in sorted(lines)).encode()).hexdigest()
