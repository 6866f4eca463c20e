"""The version of a statement's sentences."""

import hashlib
from functools import cache
from pathlib import Path

from dpvision.config import unit
from dpvision.dp import rounding
from dpvision.privacy import printed
from dpvision.report import (
    choice_phrases,
    head_phrases,
    kept_phrases,
    lineage_phrases,
    numbers,
    phrases,
    unit_phrases,
)

_MODULES = (
    choice_phrases,
    head_phrases,
    kept_phrases,
    lineage_phrases,
    numbers,
    phrases,
    printed,
    rounding,
    unit,
    unit_phrases,
)


@cache
def phrase_version() -> str:
    """Digest of the code that writes a statement's sentences: ``verify`` can write them again if
    its own is the same.
    """
    return hashlib.sha256(
        b"".join(Path(str(module.__file__)).read_bytes() for module in _MODULES)
    ).hexdigest()[:16]
