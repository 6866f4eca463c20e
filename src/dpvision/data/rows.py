"""A row of a store's index, and the keyed hash that is a record's id. Imports nothing that is slow
to import: the processes of an import read this.
"""

from hashlib import blake2b

import numpy as np

ROW = np.dtype(
    [
        ("shard", "<u4"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("caption_offset", "<u8"),
        ("caption_size", "<u4"),
        ("id", "<i8"),
        ("unit", "<i8"),
        ("label", "<i4"),
    ]
)
"""caption_offset and caption_size: the record's line in records.jsonl. unit and label are -1 for
none. With several labels per record, label is the position of the record's set (multi_label.py).
"""


def keyed_hash(key: bytes, data: bytes) -> int:
    """63-bit keyed BLAKE2b of ``data``.

    Reveals nothing about ``data`` without the key, and differs between stores.
    """
    return int.from_bytes(blake2b(data, key=key, digest_size=8).digest(), "little") >> 1
