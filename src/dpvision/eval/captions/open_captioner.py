"""A captioner for evaluation (network, tokenizer and preprocessing), and the interface of its
tests.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpvision.checkpoint import load_checkpoint
from dpvision.config import BOS_ID, EOS_ID, PAD_ID, CaptionerConfig, DataConfig, from_dict
from dpvision.data.captions import clean_caption
from dpvision.data.declared import window_of
from dpvision.data.rgb import Window
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionTokenizer
from dpvision.encoders.papers import paper_checkpoint
from dpvision.encoders.trained import filled, load_model
from dpvision.errors import CheckpointError, ConfigError
from dpvision.eval.captions.candidate_losses import candidate_losses
from dpvision.eval.captions.settings import Asking
from dpvision.eval.score import Score, Visibility
from dpvision.models import make_model
from dpvision.models.captioner import Captioner
from dpvision.runs.lineage import lineage_of_results, shaped_in_confidence
from dpvision.train.words import TOKENIZER_FILE


@dataclass(frozen=True)
class OpenCaptioner:
    """A frozen captioner. Made by ``open_captioner``."""

    name: str
    """Name in scores."""
    model: Captioner
    tokenizer: CaptionTokenizer
    data: DataConfig
    """Gives the normalisation."""
    confidential: bool
    """Whether these weights were trained on private images without a guarantee, so that everything
    computed with them is private.
    """
    seed: int
    """Seed of the run's initial weights."""
    window: Window | None = None
    """Declared range of the samples of more than 8 bits that it was trained on."""

    rule = "lowest loss"
    special = 2  # BOS and EOS

    @property
    def image_size(self) -> int:
        """Side of its input images, in pixels."""
        return self.model.cfg.encoder.image_size

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens of a caption, including BOS and EOS."""
        return self.model.cfg.num_tokens

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.model.word_head.weight.device

    def encode(self, caption: str) -> np.ndarray:
        """Return the tokens of a caption, int64 (num_tokens,): cleaned as at import, between BOS
        and EOS, padded or truncated.
        """
        return self.tokenizer.encode(clean_caption(caption), self.num_tokens)

    def words(self, caption: str) -> list[int]:
        """Return the tokens of a caption, cleaned as at import, without BOS, EOS and truncation."""
        return self.tokenizer.words(clean_caption(caption))

    def row(self, words: list[int]) -> np.ndarray:
        """Return ``words`` between BOS and EOS, padded, int64 (num_tokens,)."""
        made = np.full(self.num_tokens, PAD_ID, dtype=np.int64)
        made[: len(words) + self.special] = [BOS_ID, *words, EOS_ID]
        return made

    @torch.inference_mode()
    def look(self, x_BCHW: Tensor) -> Tensor:
        """Return the encoder's tokens for the decoder, (B, S, D)."""
        return self.model.encode(x_BCHW)

    def losses(self, memory_BSD: Tensor, token_BCL: Tensor) -> Tensor:
        """Return the loss of every candidate given its image (``candidate_losses``)."""
        return candidate_losses(self.model, memory_BSD, token_BCL)

    def untrained(self) -> "OpenCaptioner":
        """Return the same network with the initial weights of its run's seed: the baseline "random
        weights".
        """
        model = make_model(self.model.cfg, self.seed)
        assert isinstance(model, Captioner)
        return replace(
            self, name="random weights", model=_frozen(model, self.device), confidential=False
        )


def open_captioner(
    spec: str | Path, *, ema: bool = False, device: str | torch.device = "cpu"
) -> OpenCaptioner:
    """Open the captioner of a run's newest checkpoint with the checkpoint's tokenizer, or of a file
    of DP-Cap.

    Args:
        spec: a run or checkpoint folder, or ``dpcap:FILE@VOCABULARY`` (``encoders.papers``), where
            VOCABULARY is BERT's vocab.txt.
        ema: whether to use the averaged weights. Scoring both and reporting the better is a
            selection.

    Raises:
        ConfigError: the run is of another kind, or there is no vocabulary.
        CheckpointError: as in ``load_model``; or the checkpoint has no tokenizer, or one of another
            size.
        DataError: the tokenizer's file is damaged.
    """
    kind, colon, rest = str(spec).partition(":")
    if colon and kind == "dpcap":
        return _released(rest, ema, device)
    checkpoint = load_checkpoint(spec)
    kind = checkpoint.manifest["config"].get("model", {}).get("kind")
    if kind != "captioner":
        raise ConfigError(
            f"captioner: {checkpoint.path} has model kind {kind!r}; expected 'captioner'. Give a "
            "run of a dpcap recipe; `dpvision evaluate RUN --test STORE` scores classifiers and "
            "heads."
        )
    model, config = load_model(checkpoint, ema=ema)
    assert isinstance(config.model, CaptionerConfig) and isinstance(model, Captioner)
    file = checkpoint.path / TOKENIZER_FILE
    if TOKENIZER_FILE not in checkpoint.files:
        raise CheckpointError(
            f"captioner: {checkpoint.path} has no {TOKENIZER_FILE}; expected the one it was "
            "trained with. Restore it."
        )
    tokenizer = CaptionTokenizer.load(file)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise CheckpointError(
            f"captioner: {file} has {tokenizer.vocab_size:,} entries; expected "
            f"{config.model.vocab_size:,}, as the model. Restore the tokenizer that it was "
            "trained with."
        )
    return OpenCaptioner(
        name="captioner, averaged weights" if ema else "captioner",
        model=_frozen(model, device),
        tokenizer=tokenizer,
        data=config.data,  # with its store: test images must not be among those trained on
        confidential=shaped_in_confidence(
            lineage_of_results(checkpoint.manifest["lineage"], checkpoint.path)
        ),
        seed=config.seed,
        window=window_of(checkpoint.manifest),
    )


def _released(rest: str, ema: bool, device: str | torch.device) -> OpenCaptioner:
    checkpoint = paper_checkpoint("dpcap", rest)
    about = checkpoint.manifest["config"]
    if TOKENIZER_FILE not in checkpoint.files:
        raise ConfigError(
            f"captioner: dpcap:{rest} has no tokenizer; expected BERT's vocabulary after the file. "
            f"Give dpcap:{rest}@vocab.txt, with vocab.txt of bert-base-uncased."
        )
    model = Captioner(from_dict(CaptionerConfig, about["model"], checkpoint.path.name))
    return OpenCaptioner(
        name=about["recipe"],
        model=_frozen(filled(model, checkpoint, ema=ema), device),
        tokenizer=CaptionTokenizer(checkpoint.files[TOKENIZER_FILE].decode()),
        data=from_dict(DataConfig, about["data"], checkpoint.path.name),
        confidential=shaped_in_confidence(checkpoint.manifest["lineage"]),
        seed=0,
    )


def _frozen(model: Captioner, device: str | torch.device) -> Captioner:
    return model.to(device).eval().requires_grad_(False)


class CaptionProtocol(ABC):
    """A test of captioners: a frozen dataclass whose fields are data and settings."""

    @property
    @abstractmethod
    def test_data(self) -> str:
        """Name of the data in files of scores."""

    @property
    def needs(self) -> Store | None:
        """The store whose images must not have been trained on, or None if the images are not from
        a store.
        """
        return None

    @property
    def visibility(self) -> Visibility:
        """Visibility of the images: those of the store, or private if there is none."""
        return "private" if self.needs is None else self.needs.results_visibility

    @abstractmethod
    def run(self, askers: Sequence[Any], how: Asking) -> list[Score]:
        """Return scores of the captioner (or ``TwoTower``), the first of ``askers``, and of its
        untrained baseline, if there is a second.
        """
