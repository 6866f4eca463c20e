"""What img2dataset counted beside its shards: addresses tried, and why some failed."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from dpvision.data.img2dataset import stats_of
from dpvision.data.remote import is_url, opening
from dpvision.errors import DataError
from dpvision.strict_json import parse_json

_COUNTS = ("count", "successes", "failed_to_download", "failed_to_resize")
_BY_REASON, _SUCCESS = "status_dict", "success"
_REASONS, _OTHERS = 1000, "other reasons"
"""Reasons that are listed: servers and libraries word theirs in very many ways."""
_MOST_BYTES = 1 << 26


def downloads(shards: Sequence[str]) -> dict[str, Any] | None:
    """Return the sums of the counts beside shards: addresses tried, images that came, those that
    failed, by reason; None if the first shard has none.

    img2dataset counts an address once, however often it tried it.

    Args:
        shards: paths and URLs.

    Raises:
        DataError: a file of counts is damaged, or a URL cannot be read.
    """
    total, reasons = Counter[str](), Counter[str]()
    for at, shard in enumerate(shards):
        name = str(stats_of(PurePath(shard)))
        if is_url(shard):
            name = f"{shard.rpartition('.')[0]}_stats.json"
        data = _read(name)
        if data is None and at == 0:
            return None
        if data is None:
            total["shards_without_counts"] += 1
            continue
        try:
            found = parse_json(data, nan=True)
            total.update({count: _number(found[count]) for count in _COUNTS})
            by_reason = found.get(_BY_REASON, {})
            reasons.update({str(reason): _number(num) for reason, num in by_reason.items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DataError(
                f"source: {name}: damaged; expected img2dataset's counts as JSON. Copy it again, "
                "or remove it."
            ) from None
    del reasons[_SUCCESS]
    listed = dict(reasons.most_common(_REASONS))
    if more := reasons.total() - sum(listed.values()):
        listed[_OTHERS] = more
    return {**total, "reasons": listed}


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(json.dumps(value))
    return value


def _read(name: str) -> bytes | None:
    if not is_url(name):
        try:
            with open(name, "rb") as file:
                return file.read(_MOST_BYTES)
        except OSError:
            return None
    with opening(name) as (system, inside):
        return system.cat_file(inside, 0, _MOST_BYTES) if system.exists(inside) else None
