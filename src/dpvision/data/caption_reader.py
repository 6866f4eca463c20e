"""Captions of a store as rows of a batch: which caption a view gets is the record's own draw.

Legend: B records, V views, L tokens.
"""

from dataclasses import dataclass

import numpy as np

from dpvision.data.keys import StepKey
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionTokenizer
from dpvision.errors import DataError

_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class CaptionReader:
    """Reads, chooses and encodes; safe to use from several threads."""

    tokenizer: CaptionTokenizer
    num_tokens: int
    """L, with BOS and EOS, at least 2."""

    def read(self, store: Store, rows: np.ndarray, key: StepKey, views: int) -> tuple[np.ndarray, np.ndarray]:
        """Token rows of the records ``rows``.

        A record's captions are put in an order drawn by (seed, step, record id) in the stream "caption"; view v takes the v-th of them,
        starting over where there are fewer. So each is as likely as the others, and no view repeats one before all had their turn.

        Returns:
            token_BVL int64, and has_caption_B bool. A record without a caption, or whose line in the store is damaged, gets the tokens
            of an empty one, with which any loss is finite: it is to have weight zero.
        """
        captions = store.captions_many(rows)
        most = max(map(len, captions), default=0)
        # number i of a record is the same however many are drawn, so that neighbours with more captions change nothing
        uniform = key.uniform_numpy(store.index["id"][rows], "caption", max(most, 1))
        token_BVL = np.empty((len(rows), views, self.num_tokens), dtype=np.int64)
        empty_L = self.tokenizer.encode("", self.num_tokens)
        for b, own in enumerate(captions):
            if not own:
                token_BVL[b] = empty_L
                continue
            order = np.argsort(uniform[b, : len(own)], kind="stable").tolist()
            encoded = {i: self.tokenizer.encode(own[i], self.num_tokens) for i in order[:views]}
            for v in range(views):
                token_BVL[b, v] = encoded[order[v % len(own)]]
        return token_BVL, np.array([bool(own) for own in captions], dtype=bool)


def check_captions(store: Store, rows: np.ndarray) -> None:
    """Refuse a store that a captioner cannot be trained on.

    How many captions there are is private where the images are: the message is for whoever holds them, and stands in no file of the
    run. During a step nothing is raised.

    Args:
        rows: int64 rows that take part.

    Raises:
        DataError: a record has no caption.
    """
    missing = sum(int((~store.has_captions(rows[i : i + _AT_ONCE])).sum()) for i in range(0, len(rows), _AT_ONCE))
    if missing:
        raise DataError(
            f"store: {store.path}: {missing:,} of {len(rows):,} records have no caption; expected one each. "
            "Import the source with its captions (--captions FILE), or with --require-captions, which leaves such images out."
        )
