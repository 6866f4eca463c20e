"""A captioner as its measurements see it: the network, its tokenizer, and how it wants its images."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dpvision.checkpoint import load_checkpoint
from dpvision.config import CaptionerConfig, DataConfig
from dpvision.data.captions import clean_caption
from dpvision.data.tokenizer import CaptionTokenizer
from dpvision.encoders.trained import load_model
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models import make_model
from dpvision.models.captioner import Captioner
from dpvision.runs.lineage import shaped_in_confidence
from dpvision.train.words import TOKENIZER_FILE


@dataclass(frozen=True)
class OpenCaptioner:
    """A frozen captioner. Made by ``open_captioner``."""

    name: str
    """As scores print it."""
    model: Captioner
    tokenizer: CaptionTokenizer
    data: DataConfig
    """Normalisation constants are taken from it."""
    confidential: bool
    """Private images shaped these weights without a guarantee: whatever is computed with them is private too."""
    seed: int
    """Of the weights that its run started from, if it had no parent."""

    @property
    def image_size(self) -> int:
        """Side of the images it takes, in pixels."""
        return self.model.cfg.encoder.image_size

    @property
    def num_tokens(self) -> int:
        """Longest caption, with its beginning and its end."""
        return self.model.cfg.num_tokens

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.model.word_head.weight.device

    def encode(self, caption: str) -> np.ndarray:
        """int64 (num_tokens,): the caption cleaned as an import does it, between BOS and EOS, padded; a longer one is cut."""
        return self.tokenizer.encode(clean_caption(caption), self.num_tokens)

    def untrained(self) -> "OpenCaptioner":
        """The same network with the weights that its run's seed gives: the control called "random weights"."""
        model = make_model(self.model.cfg, self.seed)
        assert isinstance(model, Captioner)
        return replace(self, name="random weights", model=_frozen(model, self.device), confidential=False)


def open_captioner(run_or_checkpoint: str | Path, *, ema: bool = False, device: str | torch.device = "cpu") -> OpenCaptioner:
    """The captioner of a run's newest checkpoint, with the tokenizer that lies beside its tensors.

    Args:
        ema: the averaged weights. To score both and report the better is a selection.

    Raises:
        ConfigError: the run is of another kind.
        CheckpointError: as in ``load_model``; or the checkpoint has no tokenizer, or one of another size.
        DataError: the tokenizer's file is damaged.
    """
    checkpoint = load_checkpoint(run_or_checkpoint)
    model, config = load_model(checkpoint, ema=ema)
    if not isinstance(config.model, CaptionerConfig) or not isinstance(model, Captioner):
        raise ConfigError(
            f"captioner: {checkpoint.path} is of model kind {config.model.kind!r}; expected 'captioner'. Name the run of a captioner."
        )
    file = checkpoint.path / TOKENIZER_FILE
    if TOKENIZER_FILE not in checkpoint.files:
        raise CheckpointError(f"captioner: {checkpoint.path} names no {TOKENIZER_FILE}; expected the one it was trained with. Restore it.")
    tokenizer = CaptionTokenizer.load(file)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise CheckpointError(
            f"captioner: {file} has {tokenizer.vocab_size:,} entries; expected {config.model.vocab_size:,}, as the model. "
            "Restore the tokenizer that it was trained with."
        )
    return OpenCaptioner(
        name="captioner, averaged weights" if ema else "captioner",
        model=_frozen(model, device),
        tokenizer=tokenizer,
        data=config.data,
        confidential=shaped_in_confidence(checkpoint.manifest["lineage"]),
        seed=config.seed,
    )


def _frozen(model: Captioner, device: str | torch.device) -> Captioner:
    return model.to(device).eval().requires_grad_(False)
