"""Captions of a store as token rows of a batch; each record draws which of its captions a view
gets.

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
    """Reads, chooses and encodes captions; safe to use from several threads."""

    tokenizer: CaptionTokenizer
    num_tokens: int
    """L, BOS and EOS included, at least 2."""

    def read(
        self, store: Store, rows: np.ndarray, key: StepKey, views: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw and encode one caption per view for the records ``rows``.

        A record's captions are permuted by (seed, step, record id) in the stream "caption"; view v
        takes the v-th of them, starting over if there are fewer. So all captions are equally
        likely, and none repeats before each was used.

        Returns:
            token_BVL int64, and has_caption_B bool. A record without a caption, or with a damaged
            line in the store, gets the tokens of an empty caption, so that its loss is finite; the
            caller gives it weight zero.
        """
        captions = store.captions_many(rows)
        most = max(map(len, captions), default=0)
        # a record's i-th number is the same however many are drawn, so neighbours with more
        # captions change nothing
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

    The number of captions in a private store is private: the message is for the operator's terminal
    and goes into no file of the run. Nothing is raised during a step.

    Args:
        rows: int64 rows that may be drawn.

    Raises:
        DataError: a record has no caption.
    """
    missing = sum(
        int((~store.has_captions(rows[i : i + _AT_ONCE])).sum())
        for i in range(0, len(rows), _AT_ONCE)
    )
    if missing:
        raise DataError(
            f"store: {store.path}: {missing:,} of {len(rows):,} records have no caption; "
            "expected one each. Import the source with its captions (--captions FILE), or with "
            "--require-captions, which leaves such images out."
        )
