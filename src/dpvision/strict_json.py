"""The one reader of JSON that a guarantee depends on: no name twice in an object, no NaN, no number
beyond floats.

Of two values under one name Python's reader keeps the last, and others the first: a person would
read another statement than ``verify``.
"""

import json
import math
from typing import Any


def parse_json(data: str | bytes, *, nan: bool = False) -> Any:
    """Parse JSON text.

    Args:
        nan: whether NaN and Infinity are accepted: programs write them for a missing cell.

    Raises:
        ValueError: not JSON, nested too deeply, a name twice in an object, or a number that is not
            finite.
    """
    try:
        if nan:
            return json.loads(data, object_pairs_hook=_each_name_once)
        return json.loads(
            data, object_pairs_hook=_each_name_once, parse_constant=_finite, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r} is twice in an object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is not finite")
    return value
