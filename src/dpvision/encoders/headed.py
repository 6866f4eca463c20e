"""A run of a head, opened again: its public encoder by name, recognised, and the head on top.

Legend: B pictures, K classes, C channels, H height, W width.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import HeadConfig, RunConfig, from_dict
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.identity import check_same
from dpvision.encoders.open import open_encoder
from dpvision.errors import CheckpointError, ConfigError, DPVisionError
from dpvision.models.linear_head import LinearHead


class HeadedEncoder(nn.Module):
    """Encoder, pooling, head; frozen."""

    def __init__(self, encoder: Encoder, pooling: str, head: LinearHead) -> None:
        super().__init__()
        self.encoder, self.pooling, self.head = encoder, pooling, head

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Scores float32 (B, K) of pictures that were preprocessed for the encoder; the largest is the prediction."""
        return self.head(self.encoder.poolings(x_BCHW)[self.pooling].float())


def is_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of a head on frozen features."""
    return checkpoint.manifest["config"].get("model", {}).get("kind") == "head"


def open_headed(
    run_or_checkpoint: str | Path | Checkpoint, *, encoder: str | None = None, ema: bool = False, device: str | torch.device = "cpu"
) -> tuple[HeadedEncoder, RunConfig]:
    """The classifier of a head run, on ``device``, and the run's config.

    Args:
        encoder: where the encoder is now, if not where the run found it.
        ema: the moving average of the head's weights.

    Raises:
        ConfigError: the run is of another kind. CheckpointError: there is none, it was altered, its encoder is not there or is another.
    """
    checkpoint = run_or_checkpoint if isinstance(run_or_checkpoint, Checkpoint) else load_checkpoint(run_or_checkpoint)
    if not is_head(checkpoint):
        raise ConfigError(f"head: {checkpoint.path} is no run of a head; expected one made by `dpvision adapt`. Use dpvision.load.")
    config = from_dict(RunConfig, checkpoint.manifest["config"], f"{checkpoint.path}: config")
    assert isinstance(config.model, HeadConfig)
    about = checkpoint.manifest.get("encoder")
    weights = checkpoint.ema if ema else checkpoint.model
    if weights is None or not isinstance(about, dict):
        what = "averaged weights" if weights is None else "description of its encoder"
        raise CheckpointError(f"checkpoint: {checkpoint.path} has no {what}; expected one. Leave ema out, or restore the manifest.")
    spec = encoder or config.model.encoder.spec or ""
    try:
        opened = open_encoder(spec, device=device, image_size=about["image_size"])
    except DPVisionError as error:
        raise CheckpointError(
            f"head: {checkpoint.path} sits on {about['name']}, which is not at {spec!r} ({error}). Say where it is with encoder=SPEC."
        ) from None
    check_same(opened, about, str(checkpoint.path), device)
    head = LinearHead(config.model)
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint: {checkpoint.path} does not fit its config ({error}). Use the version that wrote it.") from None
    return HeadedEncoder(opened, about["pooling"], head.to(device)).eval(), config
