"""The code that made a checkpoint: library versions and a digest of dpvision's sources."""

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import dpvision
from dpvision.errors import ConfigError


@cache
def code_versions() -> dict[str, str]:
    """Return versions for the manifest and the statement; all of them public. Runs read them before
    the first charge.

    Raises:
        ConfigError: a package can be imported, but is not installed, so its version is unknown.
    """
    found = {}
    for name in ("dpvision", "torch", "numpy", "dp-accounting"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            install = (
                f"pip install {Path(dpvision.__file__).parents[2]}"
                if name == "dpvision"
                else f"pip install {name}"
            )
            raise ConfigError(
                f"versions: {name} is found by its path alone (PYTHONPATH, say); expected an "
                "installed package, whose version the checkpoints and the statement name. Run "
                f"{install}."
            ) from None
    return {**found, "python": platform.python_version(), "code_sha256": _code_digest()}


def _code_digest() -> str:
    root = Path(dpvision.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
