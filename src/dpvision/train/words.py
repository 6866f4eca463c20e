"""Tokenizer loading and checks: against the model, the store and the parent run."""

from pathlib import Path

import numpy as np

from dpvision.checkpoint import Checkpoint
from dpvision.config import CaptionerConfig, RunConfig
from dpvision.data.caption_reader import CaptionReader, check_captions
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionTokenizer
from dpvision.errors import CheckpointError, ConfigError

TOKENIZER_FILE = "tokenizer.json"
"""Name of the tokenizer's copy in a checkpoint."""


def open_words(config: RunConfig, store: Store, rows: np.ndarray, before: Checkpoint | None) -> CaptionReader | None:
    """The reader of captions of a run, or None for a model without words.

    Args:
        before: the checkpoint that a resumed run goes on from, or that a new one starts from.

    Raises:
        ConfigError: no tokenizer is named, or its vocabulary is not the model's.
        DataError: its file is none, or a record has no caption.
        CheckpointError: the checkpoint has learned the words of another tokenizer.
    """
    if not isinstance(config.model, CaptionerConfig):
        return None
    tokenizer = open_tokenizer(config)
    theirs = None if before is None else before.files.get(TOKENIZER_FILE)
    if before is not None and theirs is not None and theirs != tokenizer.to_bytes():
        raise CheckpointError(
            f"checkpoint: {before.path} was trained with another tokenizer than {config.data.tokenizer}; expected the same, for its words' "
            f"numbers mean other words here. Say --data.tokenizer {before.path / TOKENIZER_FILE}."
        )
    check_captions(store, rows)
    return CaptionReader(tokenizer, config.model.num_tokens)


def open_tokenizer(config: RunConfig) -> CaptionTokenizer:
    """The tokenizer that a captioner's config names; raises as ``open_words``."""
    assert isinstance(config.model, CaptionerConfig)
    if config.data.tokenizer is None:
        raise ConfigError(
            "data: tokenizer=None; expected a tokenizer file for a captioner. Make one from public text with "
            "`dpvision data tokenizer FILE`, then say --data.tokenizer FILE."
        )
    tokenizer = CaptionTokenizer.load(Path(config.data.tokenizer))
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"model: vocab_size={config.model.vocab_size}; expected {tokenizer.vocab_size}, the entries of {config.data.tokenizer}. "
            f"Say --model.vocab-size {tokenizer.vocab_size}, or use another tokenizer."
        )
    return tokenizer
