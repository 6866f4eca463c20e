"""The classifier that a run of a head made, for pictures of one's own.

classifier, preprocess = load_classifier("runs/first")
scores_BK = classifier(torch.from_numpy(preprocess(picture))[None])
"""

from pathlib import Path

import torch

from dpvision.data.transform import Preprocess
from dpvision.encoders.headed import HeadedEncoder, open_headed


def load_classifier(
    run_or_checkpoint: str | Path, *, encoder: str | None = None, ema: bool = False, device: str | torch.device = "cpu"
) -> tuple[HeadedEncoder, Preprocess]:
    """Encoder and head of a run, frozen and in evaluation mode, and the preprocessing that the head was fitted with.

    The encoder is opened again by the name that the run knows, and recognised by its weights and by its features of fixed noise.

    Args:
        run_or_checkpoint: run folder, or one checkpoint folder.
        encoder: where the encoder is now (a spec as for ``dpvision adapt --encoder``), if not where the run found it.
        ema: the moving average of the head's weights.

    Returns:
        classifier, on ``device``: normalised pictures float32 (B, 3, H, W) -> scores float32 (B, K), of which the largest is the class;
        preprocess: one PIL image, or uint8 array (H, W, 3) -> float32 (3, H, W).

    Raises:
        ConfigError: the run is of another kind. CheckpointError: there is none, it was altered, its encoder is not there or is another.
    """
    classifier, _ = open_headed(run_or_checkpoint, encoder=encoder, ema=ema, device=device)
    return classifier, classifier.encoder.preprocess
