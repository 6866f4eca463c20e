"""What leaves a run: its model as one module, and what travels with it in every format.

Legend: B images, D width, K classes, C channels, H height, W width, L tokens, V vocabulary.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import BOS_ID, EOS_ID, DataConfig
from dpvision.data.declared import window_of
from dpvision.data.rgb import Window
from dpvision.data.transform import LibraryData
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.pooled import PooledNetwork, pooled_model
from dpvision.encoders.trained import load_model
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models.captioner import Captioner
from dpvision.models.layers import LinearHead
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
    tokenizer: bytes | None = None
    lineage: Lineage
    statement: dict[str, Any] | None
    """The run's statement; None for weights shaped by private images without a guarantee."""

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How an image becomes the input: a plain dict, equal in every format.

        ``crop`` is "centre" for the centre of the image, which is resized to ``resize`` before if
        that is given, and None for the whole image.
        """
        centred = self.data.resize is None or self.data.crop == "centre"
        return {
            "image_size": self.image_size,
            "mean": list(self.data.mean),
            "std": list(self.data.std),
            "resize": self.data.resize,
            "crop": "centre" if centred else None,
            **({"own_sizes": list(self.data.own_sizes)} if self.data.own_sizes else {}),
            **(
                {"library": asdict(self.data.library)} if isinstance(self.data, LibraryData) else {}
            ),
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

    @torch.inference_mode()
    def reference(self, x_BCHW: Tensor) -> Tensor:
        """Return what a format must reproduce: features, logits, or a captioner's logits of
        ``captions_to_check``.
        """
        if isinstance(self.trained, Captioner):
            token_BL = captions_to_check(self.trained, len(x_BCHW))
            memory_BSD = self.trained.encode(x_BCHW)
            return self.trained.logits(self.trained.decode(token_BL, memory_BSD))
        return (self.trained if self.kind == "classifier" else self.module)(x_BCHW)


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
        encoder: spec of a head's encoder, if it has moved since the run.

    Raises:
        ConfigError: ``encoder`` is given for a run that is not of a head.
        CheckpointError: there is no run or checkpoint, it was altered, or a head's encoder is
            missing or another one.
        PrivacyError: the run cannot be stated (``make_statement``).
    """
    _, config, about = read_run(run)
    checkpoint = load_checkpoint(run)
    lineage = checkpoint.manifest["lineage"]
    shared = {
        "recipe": config.recipe,
        "run_id": about["run_id"],
        "lineage": lineage,
        "statement": None if shaped_in_confidence(lineage) else stated(run),
    }
    if config.model.kind in ("head", "classifier"):
        return _of_classifier(checkpoint, ema, encoder, shared)
    if encoder is not None:
        raise ConfigError(
            f"export: encoder={encoder!r} with {run}, which is not a head; expected none, because "
            "its encoder is among its weights. Leave it out."
        )
    return _of_network(checkpoint, ema, shared)


def _of_network(checkpoint: Checkpoint, ema: bool, shared: dict[str, Any]) -> Product:
    model, config = load_model(checkpoint, ema=ema)
    model.eval().requires_grad_(False)
    captions = isinstance(model, Captioner)
    return Product(
        kind="captioner" if captions else "encoder",
        module=model if captions else Features(pooled_model(model), "mean"),
        trained=model,
        encoder=model.encoder,
        image_size=config.model.encoder.image_size,
        data=config.data,
        window=window_of(checkpoint.manifest),
        tokenizer=_tokenizer(checkpoint) if captions else None,
        **shared,
    )


def _of_classifier(
    checkpoint: Checkpoint, ema: bool, encoder: str | None, shared: dict[str, Any]
) -> Product:
    trained = load_classifier(checkpoint, encoder=encoder, ema=ema)
    tuned = checkpoint.manifest["config"]["model"].get("tuned", "whole")
    merges = tuned in ("lora", "film")
    plain = load_classifier(_without_additions(checkpoint), ema=ema) if merges else trained
    network: Any = plain.network
    inner = network.network if isinstance(plain.head, LinearHead) else network.encoder
    return Product(
        kind="classifier",
        module=plain,
        trained=trained,
        encoder=inner.network if isinstance(inner, PooledNetwork) else inner,
        pooling=network.pooling,
        head=_linear(plain.head),
        unit=isinstance(plain.head, LinearHead) and plain.head.unit,
        image_size=plain.image_size,
        data=plain.data,
        window=plain.window,
        class_names=plain.class_names,
        loss=plain.loss,
        temperature=plain.temperature,
        thresholds_K=plain.thresholds_K,
        **shared,
    )


def _without_additions(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of a plain classifier: additions (LoRA, FiLM) merged into weights."""
    config = checkpoint.manifest["config"]
    plain = {**config, "model": {**config["model"], "tuned": "whole"}}

    def together(weights: dict[str, Tensor] | None) -> Any:
        return None if weights is None else merged(weights, config["model"]["lora_scale"])

    return replace(
        checkpoint,
        manifest={**checkpoint.manifest, "config": plain},
        model=together(checkpoint.model),
        ema=together(checkpoint.ema),
    )


def _linear(head: nn.Module) -> nn.Linear:
    """Return the linear map of a head. Centring and division are folded in, W (x - c) / s + b =
    (W / s) x + (b - (W / s) c), unless scaling to length 1 stands between.
    """
    if isinstance(head, nn.Linear):
        return head
    assert isinstance(head, LinearHead)
    linear = nn.Linear(head.weight.shape[1], head.weight.shape[0]).requires_grad_(False)
    linear.weight.copy_(head.weight)
    linear.bias.copy_(head.bias)
    if not head.unit:
        if head.spread is not None:
            linear.weight.div_(head.spread)
        linear.bias.sub_(linear.weight @ head.centre)
    return linear


def _tokenizer(checkpoint: Checkpoint) -> bytes:
    if TOKENIZER_FILE not in checkpoint.files:
        raise CheckpointError(
            f"export: {checkpoint.path} has no {TOKENIZER_FILE}; expected the one it was trained "
            "with. Restore it."
        )
    return checkpoint.files[TOKENIZER_FILE]


def stated(run: Path) -> dict[str, Any]:
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


def require_new(folder: Path) -> None:
    """Raise ConfigError for a folder that has files already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"export: {folder} is not empty; expected a new folder. Choose another name, or remove "
            "it."
        )


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
