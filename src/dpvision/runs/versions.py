"""The code that made a checkpoint: library versions and a digest of dpvision's sources."""

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import dpvision


@cache
def code_versions() -> dict[str, str]:
    """Versions for the manifest and the statement; all of them public."""
    names = ("dpvision", "torch", "numpy", "dp-accounting")
    return {**{name: version(name) for name in names}, "python": platform.python_version(), "code_sha256": _code_digest()}


def _code_digest() -> str:
    root = Path(dpvision.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
