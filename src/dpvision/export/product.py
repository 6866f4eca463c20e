"""What leaves a run: its model as one module, and what travels with it in every format.

Legend: B images, D width, K classes, C channels, H height, W width, L tokens, V vocabulary.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import BOS_ID, EOS_ID, ClassifierConfig, DataConfig
from dpvision.data.class_names import all_names
from dpvision.data.declared import window_of
from dpvision.data.rgb import Window
from dpvision.encoders.pooled import PooledNetwork, pooled_model
from dpvision.encoders.trained import filled, load_model
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models import Model, make_model
from dpvision.models.captioner import Captioner
from dpvision.models.classifier import Classifier
from dpvision.models.tuned import merged
from dpvision.runs.folder import read_run
from dpvision.runs.lineage import shaped_in_confidence
from dpvision.statement.statement import make_statement
from dpvision.strict_json import parse_json
from dpvision.train.words import TOKENIZER_FILE
from dpvision.weights import Lineage

Kind = Literal["encoder", "classifier", "captioner"]


class Features(nn.Module):
    """An encoder with one of its poolings: from x_BCHW to features, float32 (B, D)."""

    def __init__(self, pooled: PooledNetwork, pooling: str) -> None:
        super().__init__()
        self.pooled, self.pooling = pooled, pooling

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the features of normalised images."""
        return self.pooled.poolings(x_BCHW)[self.pooling]


@dataclass(frozen=True, kw_only=True)
class Product:
    """A run's model in evaluation mode on the CPU, and what travels with it."""

    kind: Kind
    recipe: str
    run_id: str
    module: nn.Module
    """From normalised images x_BCHW to features (B, D) or logits (B, K); a captioner is itself.
    Additions such as LoRA are merged.
    """
    trained: nn.Module
    """The network of the run with all its parts, as it was trained."""
    encoder: nn.Module
    """The part of ``module`` before pooling: a network of ``models``, or a library's."""
    pooling: str = "mean"
    head: nn.Linear | None = None
    """The last linear map of a classifier, centring included."""
    unit: bool = False
    """Whether a classifier scales its centred features to length 1 before the linear map."""
    image_size: int
    data: DataConfig
    """Normalisation, resizing and crop."""
    window: Window | None
    class_names: tuple[str, ...] = ()
    loss: Literal["softmax", "sigmoid"] = "softmax"
    temperature: float = 1.0
    thresholds_K: tuple[float, ...] | None = None
    tokenizer: bytes | None
    lineage: Lineage
    statement: dict[str, Any] | None
    """The run's statement; None for weights shaped by private images without a guarantee."""

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How an image becomes the input: a plain dict, equal in every format."""
        return {
            "image_size": self.image_size,
            "mean": list(self.data.mean),
            "std": list(self.data.std),
            "resize": self.data.resize,
            "crop": self.data.crop,
        }

    @property
    def properties(self) -> dict[str, Any]:
        """What every format's metadata hold under ``dpvision.NAME``, besides the lineage."""
        return {
            **self.preprocessing,
            **({} if self.window is None else {"window": list(self.window)}),
            **({"class_names": list(self.class_names)} if self.kind == "classifier" else {}),
            **(
                {
                    "loss": self.loss,
                    "temperature": self.temperature,
                    "thresholds": None if self.thresholds_K is None else list(self.thresholds_K),
                }
                if self.kind == "classifier"
                else {}
            ),
        }

    def encoder_alone(self) -> "Product":
        """Return a captioner's encoder without its decoder."""
        assert isinstance(self.trained, Captioner)
        module = Features(pooled_model(self.trained), self.pooling).eval()
        return replace(self, kind="encoder", trained=self.encoder, module=module, tokenizer=None)

    def probabilities(self, logit_BK: Tensor) -> Tensor:
        """Return a classifier's probabilities of its logits, by its loss and temperature."""
        scaled_BK = logit_BK / self.temperature
        return scaled_BK.softmax(1) if self.loss == "softmax" else scaled_BK.sigmoid()

    @torch.inference_mode()
    def reference(self, x_BCHW: Tensor) -> Tensor:
        """Return what a format must reproduce: features, logits, or a captioner's logits of
        ``captions_to_check``.
        """
        if isinstance(self.trained, Captioner):
            token_BL = captions_to_check(self.trained, len(x_BCHW))
            memory_BSD = self.trained.encode(x_BCHW)
            return self.trained.logits(self.trained.decode(token_BL, memory_BSD))
        if isinstance(self.trained, Classifier):
            return self.trained(x_BCHW)
        return self.module(x_BCHW)


def captions_to_check(model: Captioner, num: int) -> Tensor:
    """Return ``num`` captions of full length of arbitrary words, int64 (num, L)."""
    words, length = model.cfg.vocab_size - EOS_ID - 1, model.cfg.num_tokens
    token_BL = EOS_ID + 1 + torch.arange(num * length).reshape(num, length) % words
    token_BL[:, 0] = BOS_ID
    return token_BL


def open_product(run: Path, *, ema: bool = False, encoder: str | None = None) -> Product:
    """Open what leaves the newest checkpoint of a run.

    Args:
        ema: whether to take the averaged weights.

    Raises:
        CheckpointError: there is no run or checkpoint, or it was altered.
        PrivacyError: the run cannot be stated (``make_statement``).
    """
    _, _, about = read_run(run)
    checkpoint = load_checkpoint(run)
    lineage = checkpoint.manifest["lineage"]
    shaped = shaped_in_confidence(lineage)
    return _of_network(
        checkpoint,
        ema,
        run_id=about["run_id"],
        lineage=lineage,
        statement=None if shaped else _statement(run),
    )


def _of_network(checkpoint: Checkpoint, ema: bool, **about: Any) -> Product:
    trained, config = load_model(checkpoint, ema=ema)
    trained = trained.eval().requires_grad_(False)
    plain = _merged(trained, checkpoint, ema)
    pooled = pooled_model(plain)
    kind: Kind = "encoder"
    module: nn.Module = Features(pooled, "mean")
    if isinstance(plain, Classifier):
        kind, module = "classifier", plain
    elif isinstance(plain, Captioner):
        kind, module = "captioner", plain
    classes: dict[str, Any] = {}
    if isinstance(config.model, ClassifierConfig):
        names = checkpoint.manifest.get("class_names")
        classes = {
            "pooling": config.model.pooling,
            "class_names": all_names(names, config.model.num_classes),
            "loss": config.model.loss,
        }
    return Product(
        kind=kind,
        recipe=config.recipe,
        module=module.eval(),
        trained=trained,
        encoder=plain.encoder,
        head=plain.head if isinstance(plain, Classifier) else None,
        image_size=config.model.encoder.image_size,
        data=config.data,
        window=window_of(checkpoint.manifest),
        tokenizer=_tokenizer(checkpoint) if kind == "captioner" else None,
        **classes,
        **about,
    )


def _merged(trained: Model, checkpoint: Checkpoint, ema: bool) -> Model:
    """Return the network without additions (LoRA, FiLM), which are merged into its weights."""
    if not isinstance(trained, Classifier) or trained.cfg.tuned not in ("lora", "film"):
        return trained
    plain = make_model(replace(trained.cfg, tuned="whole"), 0)
    weights = checkpoint.ema if ema else checkpoint.model
    assert weights is not None
    together = replace(checkpoint, model=merged(weights, trained.cfg.lora_scale), ema=None)
    return filled(plain, together).eval().requires_grad_(False)


def _tokenizer(checkpoint: Checkpoint) -> bytes:
    if TOKENIZER_FILE not in checkpoint.files:
        raise CheckpointError(
            f"export: {checkpoint.path} has no {TOKENIZER_FILE}; expected the one it was trained "
            "with. Restore it."
        )
    return checkpoint.files[TOKENIZER_FILE]


def _statement(run: Path) -> dict[str, Any]:
    """Return the run's statement with the declarations of RUN/statement.json, if there is one."""
    file = run / "statement.json"
    if not file.exists():
        return make_statement(run)
    try:
        told = parse_json(file.read_bytes())["history"]
        tuning, stop = told["tuning"]["declared"], (told["stop"] or {}).get("declared")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"export: {file} cannot be read ({error!r}); expected what `dpvision report` wrote. "
            "Write it again."
        ) from None
    return make_statement(run, tuning=tuning, stop=stop or "not_declared")


def refused(to: str, part: str, remedy: str) -> ConfigError:
    """Return the error for a model that a format cannot hold.

    Args:
        part: what of the model the format lacks.
        remedy: a format that can hold it.
    """
    return ConfigError(f"export: --to {to}: {part}; expected a model that {to} can hold. {remedy}")


def dumped(value: Any) -> str:
    """Return a value as JSON text for metadata."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
