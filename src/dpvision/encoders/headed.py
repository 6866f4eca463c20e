"""Load the classifier of a head's run: its public encoder, verified, and the head on top.

    classifier = dpvision.load_classifier("runs/first")
    score_BK = classifier(torch.from_numpy(classifier.preprocess("photo.jpg"))[None])
    classifier.class_names[int(score_BK[0].argmax())]

Legend: B images, K classes.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import HeadConfig, RunConfig
from dpvision.data.class_names import all_names
from dpvision.data.declared import window_of
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.identity import check_same
from dpvision.encoders.open import open_encoder
from dpvision.encoders.trained import filled
from dpvision.errors import CheckpointError, ConfigError, DPVisionError
from dpvision.models.layers import LinearHead
from dpvision.runs.folder import settings_of_checkpoint


@dataclass(frozen=True, kw_only=True)
class HeadedEncoder(Encoder):
    """Encoder, pooling and head. Its features are scores, float32 (B, K); the largest is the
    prediction.
    """

    encoder: Encoder
    pooling: str
    head: LinearHead
    config: RunConfig
    """Config of the head's run."""
    class_names: tuple[str, ...]
    """Name of each class in the order of the scores; its number where the training store has no
    names.
    """


def is_head(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is of a head on frozen features."""
    return checkpoint.manifest["config"].get("model", {}).get("kind") == "head"


def load_classifier(
    run_or_checkpoint: str | Path | Checkpoint,
    *,
    encoder: str | None = None,
    ema: bool = False,
    device: str | torch.device = "cpu",
) -> HeadedEncoder:
    """Load encoder and head of a run, frozen and in evaluation mode, on ``device``.

    The encoder is opened by the run's spec and verified by its weights and its features of fixed
    noise.

    Args:
        run_or_checkpoint: run folder, or one checkpoint.
        encoder: spec of the encoder, as for ``dpvision adapt --encoder``, if it has moved since the
            run.
        ema: whether to use the moving average of the head's weights.

    Raises:
        ConfigError: the run is of another kind.
        CheckpointError: there is no checkpoint, it was altered, or its encoder is missing or
            another one.
    """
    checkpoint = (
        run_or_checkpoint
        if isinstance(run_or_checkpoint, Checkpoint)
        else load_checkpoint(run_or_checkpoint)
    )
    if not is_head(checkpoint):
        raise ConfigError(
            f"head: {checkpoint.path} is not a head; expected a run made by `dpvision adapt`. "
            "Use dpvision.load."
        )
    config = settings_of_checkpoint(checkpoint)
    assert isinstance(config.model, HeadConfig)
    about = checkpoint.manifest.get("encoder")
    if not isinstance(about, dict):
        raise CheckpointError(
            f"checkpoint: {checkpoint.path} has no description of its encoder; expected one. "
            "Restore the manifest."
        )
    head, pooling = (
        filled(LinearHead(config.model), checkpoint, ema=ema).to(device).eval(),
        about["pooling"],
    )
    spec = encoder or config.model.encoder.spec or ""
    try:
        opened = open_encoder(spec, device=device, image_size=about["image_size"])
    except DPVisionError as error:
        raise CheckpointError(
            f"head: the encoder {about['name']} of {checkpoint.path} is not at {spec!r} "
            f"({error}). Give its location with encoder=SPEC."
        ) from None
    check_same(opened, about, str(checkpoint.path), device)
    return HeadedEncoder(
        name=f"head on {opened.name}",
        image_size=opened.image_size,
        mean=opened.mean,
        std=opened.std,
        own_sizes=opened.own_sizes,
        resize=opened.resize,
        crop=opened.crop,
        library=opened.library,
        poolings=lambda x_BCHW: {"scores": head(opened(x_BCHW, pooling).float())},
        family="fixed",
        lineage=tuple(checkpoint.manifest["lineage"]),
        encoder=opened,
        pooling=pooling,
        head=head,
        config=config,
        class_names=all_names(
            checkpoint.manifest.get("class_names"), config.model.num_classes or 0
        ),
        window=window_of(checkpoint.manifest),
    )
