"""A trained classifier as one module: normalised images in, a score for each class out.

    classifier = dpvision.load_classifier("runs/first")
    x_BCHW = torch.from_numpy(classifier.preprocess("photo.jpg"))[None]
    probability_BK = classifier.probabilities(x_BCHW)
    classifier.class_names[int(probability_BK[0].argmax())]

Legend: B images, D feature dimension, K classes, C channels, H height, W width.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import ClassifierConfig, DataConfig, HeadConfig, RunConfig
from dpvision.data.class_names import all_names
from dpvision.data.declared import window_of
from dpvision.data.rgb import Window
from dpvision.data.transform import Preprocess, in_use, preprocess_of
from dpvision.encoders.calibration import read_calibration
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.identity import check_same
from dpvision.encoders.open import open_encoder
from dpvision.encoders.trained import filled, load_model
from dpvision.errors import CheckpointError, ConfigError, DPVisionError
from dpvision.models.classifier import Classifier, head_input
from dpvision.models.layers import LinearHead
from dpvision.runs.folder import settings_of_checkpoint
from dpvision.runs.lineage import lineage_of_results, shaped_in_confidence
from dpvision.threads import is_traced

Loss = Literal["softmax", "sigmoid"]


class ImageClassifier(nn.Module):
    """A frozen classifier in evaluation mode. Made by ``load_classifier``.

    It is traceable (``torch.jit.trace``, ``torch.export.export`` with any number of images);
    docs/predict.md has the exceptions.

    Args:
        network: from normalised images to the head's input, float32 (B, D).
        head: from features to scores. Centring and scaling to length 1 are part of it.
        class_names: name of each class in the order of the scores; its number where the training
            store has no names.
        image_size: side of the images, px.
        data: preprocessing of the images.
        loss: "softmax" if an image has one class, "sigmoid" if each class is decided alone.
        multi_label: whether an image can have several classes, or none.
        window: declared range of the samples of more than 8 bits that the run was trained on.
        lineage: of all weights.
        run: ``run_id``, ``recipe``, and ``statement``: the SHA-256 of the run's statement.json, or
            None if there is none.
        temperature: divides the scores; 1 without calibration.
        thresholds_K: probability above which each class of a multi-label run is predicted. None if
            the run has no thresholds: its scores only define an order.
    """

    def __init__(
        self,
        network: nn.Module,
        head: nn.Module,
        *,
        class_names: tuple[str, ...],
        image_size: int,
        data: DataConfig,
        loss: Loss,
        multi_label: bool = False,
        window: Window | None = None,
        lineage: tuple[dict[str, Any], ...] = (),
        run: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        thresholds_K: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__()
        self.network, self.head = network, head
        self.class_names, self.loss, self.multi_label = class_names, loss, multi_label
        self.image_size, self.data, self.window = image_size, data, window
        self.lineage, self.run = lineage, dict(run or {})
        self.temperature, self.thresholds_K = temperature, thresholds_K

    def features(self, x_BCHW: Tensor) -> Tensor:
        """Return the head's input, float32 (B, D), of normalised images, float32."""
        return self.network(x_BCHW)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the scores, float32 (B, K), of normalised images, float32. The temperature is not
        applied; an offset of the calibration is part of the head's bias.
        """
        return self.head(self.network(x_BCHW)).float()

    def probabilities(self, x_BCHW: Tensor) -> Tensor:
        """Return the calibrated probability of each class, float32 (B, K): they add up to 1 with
        the softmax loss, and are independent with the sigmoid loss.
        """
        return self.calibrated(self(x_BCHW))

    def calibrated(self, score_BK: Tensor) -> Tensor:
        """Return the probabilities of scores: their softmax, or sigmoid, at the temperature."""
        score_BK = score_BK / self.temperature
        return score_BK.softmax(dim=1) if self.loss == "softmax" else score_BK.sigmoid()

    @property
    def mean(self) -> tuple[float, float, float]:
        """Mean of each channel that normalisation subtracts."""
        return self.data.mean

    @property
    def std(self) -> tuple[float, float, float]:
        """Standard deviation of each channel that normalisation divides by."""
        return self.data.std

    @property
    def preprocess(self) -> Preprocess:
        """Preprocessing as a function from one image (path, bytes, PIL image or uint8 array) to
        float32 (3, H, W).
        """
        return preprocess_of(self.image_size, self.data, self.window)

    @property
    def confidential(self) -> bool:
        """Whether the weights were trained on private images without a guarantee, so that
        everything computed with them is private.
        """
        return shaped_in_confidence(self.lineage)


class OpenHead(NamedTuple):
    """A head's run: its verified encoder, and the head."""

    config: RunConfig
    encoder: Encoder
    pooling: str
    head: LinearHead


def is_head(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is of a head on frozen features."""
    return checkpoint.manifest["config"].get("model", {}).get("kind") == "head"


def load_classifier(
    run_or_checkpoint: str | Path | Checkpoint,
    *,
    encoder: str | None = None,
    ema: bool = False,
    device: str | torch.device = "cpu",
) -> ImageClassifier:
    """Load the classifier of a run, frozen and in evaluation mode, on ``device``: of a head made by
    ``dpvision adapt`` with its public encoder, or of a classifier trained by ``dpvision train``.

    Args:
        run_or_checkpoint: run folder, or one checkpoint.
        encoder: spec of a head's encoder, as for ``dpvision adapt --encoder``, if it has moved
            since the run.
        ema: whether to use the averaged weights.

    Raises:
        ConfigError: the run is of another kind, or has no encoder apart from its own.
        CheckpointError: there is no checkpoint, it was altered, its encoder is missing or another
            one, or its calibration is damaged or for other weights.
    """
    checkpoint = (
        run_or_checkpoint
        if isinstance(run_or_checkpoint, Checkpoint)
        else load_checkpoint(run_or_checkpoint)
    )
    if is_head(checkpoint):
        opened = open_head(checkpoint, encoder=encoder, ema=ema, device=device)
        classifier = _of_head(opened, checkpoint, ema)
    elif encoder is None:
        classifier = _of_network(checkpoint, ema).to(device)
    else:
        raise ConfigError(
            f"classifier: encoder={encoder!r} with {checkpoint.path}, which is not a head; "
            "expected none, because its encoder is among its weights. Leave it out."
        )
    return classifier.eval().requires_grad_(False)


def open_head(
    checkpoint: Checkpoint,
    *,
    encoder: str | None = None,
    ema: bool = False,
    device: str | torch.device = "cpu",
) -> OpenHead:
    """Open a head and its encoder, on ``device``. Arguments and errors as ``load_classifier``.

    The encoder is opened by the run's spec and verified by its weights and its features of fixed
    noise.
    """
    config = settings_of_checkpoint(checkpoint)
    assert isinstance(config.model, HeadConfig)
    about = checkpoint.manifest.get("encoder")
    if not isinstance(about, dict):
        raise CheckpointError(
            f"checkpoint: {checkpoint.path} has no description of its encoder; expected one. "
            "Restore the manifest."
        )
    head = filled(LinearHead(config.model), checkpoint, ema=ema).to(device).eval()
    spec = encoder or config.model.encoder.spec or ""
    try:
        opened = open_encoder(spec, device=device, image_size=about["image_size"])
    except DPVisionError as error:
        raise CheckpointError(
            f"head: the encoder {about['name']} of {checkpoint.path} is not at {spec!r} "
            f"({error}). Give its location with encoder=SPEC."
        ) from None
    check_same(opened, about, str(checkpoint.path), device)
    return OpenHead(config, opened, about["pooling"], head)


def loss_of(model: HeadConfig | ClassifierConfig) -> Loss:
    """Return the loss whose probabilities a run's scores are to give."""
    if isinstance(model, ClassifierConfig):
        return model.loss
    loss: Any = getattr(model.settings, "loss", "auto")
    if loss == "auto":  # a head that is computed from moments
        return "sigmoid" if model.multi_label else "softmax"
    return loss


def threshold_of(model: HeadConfig | ClassifierConfig) -> float | None:
    """Return the score above which a multi-label run predicts a class, or None if its scores only
    define an order.
    """
    return 0.0 if isinstance(model, ClassifierConfig) else model.settings.threshold


def probability_of(score: float) -> float:
    """Return the sigmoid of a score."""
    return 1 / (1 + math.exp(-score))


def _of_head(opened: OpenHead, checkpoint: Checkpoint, ema: bool) -> ImageClassifier:
    model = opened.config.model
    assert isinstance(model, HeadConfig)
    network, encoder = OnePooling(opened.encoder, opened.pooling), opened.encoder
    return _made(network, opened.head, encoder.image_size, encoder.data, checkpoint, model, ema)


def _of_network(checkpoint: Checkpoint, ema: bool) -> ImageClassifier:
    kind = checkpoint.manifest["config"].get("model", {}).get("kind")
    if kind != "classifier":
        raise ConfigError(
            f"classifier: {checkpoint.path} has model kind {kind!r}; expected a run of "
            "`dpvision adapt`, or of `dpvision train` with a classifier. Open its encoder with "
            "dpvision.load."
        )
    network, config = load_model(checkpoint, ema=ema)
    assert isinstance(network, Classifier) and isinstance(config.model, ClassifierConfig)
    side, seen = config.model.encoder.image_size, DataConfig(**in_use(config.data))
    return _made(_HeadInput(network), network.head, side, seen, checkpoint, config.model, ema)


@torch.no_grad()
def _made(
    network: nn.Module,
    head: LinearHead | nn.Linear,
    image_size: int,
    data: DataConfig,
    checkpoint: Checkpoint,
    model: HeadConfig | ClassifierConfig,
    ema: bool,
) -> ImageClassifier:
    """Return the classifier with what the manifest and the run's folder say about it."""
    manifest, num_classes = checkpoint.manifest, model.num_classes or 0
    calibration = read_calibration(checkpoint, ema, num_classes)
    thresholds_K = None if calibration is None else calibration.thresholds
    own = threshold_of(model)
    if calibration is None and model.multi_label and own is not None:
        thresholds_K = (probability_of(own),) * num_classes
    if calibration is not None:
        head.bias.sub_(calibration.offset)
    return ImageClassifier(
        network,
        head,
        class_names=all_names(manifest.get("class_names"), num_classes),
        image_size=image_size,
        data=data,
        loss=loss_of(model),
        multi_label=model.multi_label,
        window=window_of(manifest),
        lineage=tuple(lineage_of_results(manifest["lineage"], checkpoint.path)),
        run={
            "run_id": manifest["run_id"],
            "recipe": manifest["config"]["recipe"],
            "statement": _statement_digest(checkpoint.path),
        },
        temperature=1.0 if calibration is None else calibration.temperature,
        thresholds_K=thresholds_K,
    )


def _statement_digest(checkpoint: Path) -> str | None:
    """Return the SHA-256 of the statement.json of a checkpoint's run, or None."""
    try:
        return hashlib.sha256(
            (checkpoint.parent.parent / "statement.json").read_bytes()
        ).hexdigest()
    except OSError:
        return None


class OnePooling(nn.Module):
    """One pooling of an encoder as a module."""

    def __init__(self, encoder: Encoder, pooling: str) -> None:
        super().__init__()
        self.network, self.pooling = encoder.network, pooling
        self._encoder = encoder  # its functions are methods of ``network``

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if self.network is None and is_traced():
            raise ConfigError(
                f"classifier: {self._encoder.name} is not computed by torch; expected an encoder "
                "that is, whose operations can be recorded. Train the head on another encoder."
            )
        return self._encoder(x_BCHW, self.pooling).float()


class _HeadInput(nn.Module):
    """A trained classifier without its head."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.encoder, self.pooling = classifier.encoder, classifier.cfg.pooling

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return head_input(self.encoder, self.pooling, x_BCHW)
