"""Classes of records that may have several, from a file beside the store.

Legend: N records, K classes.
"""

import json
from pathlib import Path

import numpy as np

from dpvision.data.store import Store
from dpvision.errors import DataError


def read_labels(path: str | Path, store: Store, rows: np.ndarray, num_classes: int) -> np.ndarray:
    """Which classes the records of ``rows`` have: int8 (N, K), 0 or 1.

    For whoever holds the records: messages name them, and stand in no file of a run.

    Args:
        path: JSON object {key of a record in its source: list of its classes}; an empty list is an answer too.
        rows: int64 positions in the store.

    Raises:
        DataError: the file cannot be read, a record is not in it, a class is out of range, or no record has any.
    """
    try:
        listed = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"labels: {path} ({error}); expected a JSON object of keys and lists of classes. Correct the path.") from None
    if not isinstance(listed, dict):
        raise DataError(f"labels: {path} holds a {type(listed).__name__}; expected an object of keys and lists of classes. Write one.")
    label_NK = np.zeros((len(rows), num_classes), dtype=np.int8)
    missing = []
    for i, row in enumerate(rows.tolist()):
        key = store.record(row).key
        classes = listed.get(key)
        if classes is None:
            missing.append(key)
            continue
        if not isinstance(classes, list) or not all(type(c) is int and 0 <= c < num_classes for c in classes):
            raise DataError(f"labels: {path}: {key}={classes!r}; expected a list of classes from 0 to {num_classes - 1}. Correct it.")
        label_NK[i, classes] = 1
    if missing:
        raise DataError(
            f"labels: {path} lacks {len(missing)} of {len(rows)} records, {missing[0]!r} first; expected a list for each. "
            "Write [] for a record of no class."
        )
    if not label_NK.any():
        raise DataError(f"labels: {path} gives no record a class; expected some. Correct the file.")
    return label_NK
