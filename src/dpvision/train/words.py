"""Load the tokenizer of a run, and check it against the model, the store and the parent run."""

from pathlib import Path

from dpvision.checkpoint import Checkpoint
from dpvision.config import CaptionerConfig, RunConfig
from dpvision.data.rows import Rows
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionReader, CaptionTokenizer, check_captions
from dpvision.errors import CheckpointError, ConfigError

TOKENIZER_FILE = "tokenizer.json"
"""Name of the tokenizer's copy in a checkpoint."""


def open_words(
    config: RunConfig, store: Store, rows: Rows, before: Checkpoint | None
) -> CaptionReader | None:
    """Open the caption reader of a run, or return None for a model without captions.

    Args:
        before: the checkpoint that a resumed run continues from, or that a new run starts from.

    Raises:
        ConfigError: no tokenizer is named, or its vocabulary size is not the model's.
        DataError: the tokenizer's file is invalid, or a record has no caption.
        CheckpointError: the checkpoint was trained with another tokenizer, or is a file of DP-Cap
            without a vocabulary.
    """
    if not isinstance(config.model, CaptionerConfig):
        return None
    tokenizer = open_tokenizer(config)
    theirs = None if before is None else before.files.get(TOKENIZER_FILE)
    if before is not None and theirs is None and _has_words(before):
        raise CheckpointError(
            f"checkpoint: {before.path} has no tokenizer; expected the one that it was trained "
            "with, because token ids differ. Name BERT's vocabulary: --init-from "
            "dpcap:FILE@vocab.txt, and the same file in --data.tokenizer."
        )
    if before is not None and theirs is not None and theirs != tokenizer.to_bytes():
        file = before.path / TOKENIZER_FILE
        raise CheckpointError(
            f"checkpoint: {before.path} was trained with another tokenizer than "
            f"{config.data.tokenizer}; expected the same, because token ids differ. Pass "
            f"--data.tokenizer {file if file.exists() else 'with the vocabulary of --init-from'}."
        )
    check_captions(store, rows)
    return CaptionReader(tokenizer, config.model.num_tokens)


def _has_words(checkpoint: Checkpoint) -> bool:
    return checkpoint.manifest["config"].get("model", {}).get("kind") == "captioner"


def open_tokenizer(config: RunConfig) -> CaptionTokenizer:
    """Open the tokenizer named by a captioner's config; raises as ``open_words``."""
    assert isinstance(config.model, CaptionerConfig)
    if config.data.tokenizer is None:
        raise ConfigError(
            "data: tokenizer=None; expected a tokenizer file for a captioner. Make one from "
            "public text with `dpvision data tokenizer FILE`, then pass --data.tokenizer FILE."
        )
    tokenizer = CaptionTokenizer.load(Path(config.data.tokenizer))
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"model: vocab_size={config.model.vocab_size}; expected {tokenizer.vocab_size}, the "
            f"entries of {config.data.tokenizer}. Pass --model.vocab-size "
            f"{tokenizer.vocab_size}, or use another tokenizer."
        )
    return tokenizer
