"""Initialise a new run's network from a parent run: all weights, or the parts that both have.

One case is the transfer of DP-Cap (Sander et al., ICML 2024, appendix A.1): a captioner takes
encoder and decoder from its warm start as a masked autoencoder, uses the decoder with causal
attention, and starts with new token embeddings.
"""

from torch import Tensor, nn

from dpvision.checkpoint import Checkpoint
from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossMAEConfig,
    MAEConfig,
    ModelConfig,
    RunConfig,
    to_dict,
)
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models.timm_encoder import TimmEncoder
from dpvision.models.tuned import merged, plain_names

_PARTS = {
    ("classifier", "classifier"): ("encoder", "head"),
    ("captioner", "captioner"): (
        "encoder",
        "decoder",
        "word_embed",
        "word_norm",
        "word_head",
        "hidden_word",
        "patch_head",
    ),
    ("captioner", "cross_mae"): ("encoder", "decoder", "patch_head"),
    ("cross_mae", "cross_mae"): ("encoder", "decoder", "patch_head"),
    ("mae", "mae"): (
        "encoder",
        "decoder_embed",
        "mask_token",
        "decoder_blocks",
        "decoder_norm",
        "decoder_position_LD",
        "head",
    ),
}
"""Parts taken, by (kind of the new run's model, kind of its parent's); only the encoder for all
other pairs.
"""


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights into ``model``.

    Raises:
        CheckpointError: a name or shape differs.
    """
    _load(model, checkpoint, checkpoint.model)


def start_from(model: nn.Module, cfg: ModelConfig, parent: Checkpoint) -> None:
    """Load a parent run's weights into a new run's ``model``.

    From a parent of the same kind all weights are taken, but a classifier keeps its head if the
    parent has another number of classes, and a captioner keeps its weights of a second loss or of
    parallel prediction if the parent has none. A captioner takes encoder and decoder of its warm
    start; every other pair shares the encoder only. Images may have another size, unless our
    encoder has loaded positions; those of timm are interpolated. The parent's added tuning weights
    are merged into the layers; this run's are newly initialised.

    Raises:
        CheckpointError: sizes that shapes do not show differ, a part is missing, or a name or shape
            differs.
    """
    theirs = parent.manifest["config"].get("model", {})
    kind = theirs.get("kind", "mae")
    parts = _PARTS.get((cfg.kind, kind), ("encoder",))
    if isinstance(cfg, ClassifierConfig) and theirs.get("num_classes") != cfg.num_classes:
        parts = ("encoder",)
    _check_sizes(cfg, theirs, parts, parent)
    own = {name: value.detach() for name, value in model.state_dict().items()}
    given = _fitted(model, merged(parent.model, theirs.get("lora_scale", 1.0)))
    names = plain_names(model)
    taken = {
        names.get(n, n): value
        for n, value in given.items()
        if n.split(".")[0] in parts and _wanted(n, own, cfg)
    }
    _check_parts(parts, own, taken, cfg, parent)
    added = set(own) - set(names.values())
    kept = {
        name: value
        for name, value in own.items()
        if name.split(".")[0] not in parts or name in added or _optional(name, cfg)
    }
    _load(model, parent, kept | taken)


def check_constants(config: RunConfig, parent: Checkpoint) -> None:
    """Refuse normalisation constants other than those that the parent was trained with.

    Raises:
        ConfigError: mean or std differ from the parent's.
    """
    theirs = parent.manifest["config"].get("data", {})
    for name in ("mean", "std"):
        mine = list(getattr(config.data, name))
        if (got := list(theirs.get(name, mine))) != mine:
            raise ConfigError(
                f"data: {name}={mine}; expected {got}, with which {parent.path} was trained. "
                f"Pass --data.{name} {' '.join(map(str, got))}."
            )


def _fitted(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Interpolate the position weights of a timm encoder to the new run's image size."""
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, TimmEncoder):
        return weights
    own = encoder.fitted(
        {
            name.removeprefix("encoder."): value
            for name, value in weights.items()
            if name.startswith("encoder.")
        }
    )
    return weights | {f"encoder.{name}": value for name, value in own.items()}


def _optional(name: str, cfg: ModelConfig) -> bool:
    """Return whether a captioner's parent of the same sizes may lack this weight."""
    return isinstance(cfg, CaptionerConfig) and name.split(".")[0] in ("patch_head", "hidden_word")


def _wanted(name: str, own: dict[str, Tensor], cfg: ModelConfig) -> bool:
    return name in own or not _optional(name, cfg)


def _check_sizes(
    cfg: ModelConfig, theirs: dict, parts: tuple[str, ...], parent: Checkpoint
) -> None:
    """Refuse a parent with other attention heads or targets: shapes do not show these, so its
    weights would load.
    """
    wanted = _flat("encoder", to_dict(cfg.encoder))
    found = _flat("encoder", theirs.get("encoder", {}))
    if getattr(cfg.encoder, "positions", "fixed") == "fixed":
        wanted.pop("encoder.image_size")
    if "decoder" in parts and isinstance(cfg, CaptionerConfig | CrossMAEConfig):
        wanted |= _flat("decoder", to_dict(cfg.decoder))
        found |= _flat("decoder", theirs.get("decoder", {}))
    if "decoder_blocks" in parts and isinstance(cfg, MAEConfig):
        wanted |= {"decoder_num_heads": cfg.decoder_num_heads}
    if isinstance(cfg, MAEConfig | CrossMAEConfig) and len(parts) > 1:
        wanted |= {"target": cfg.target}
        found |= {"target": "pixels"}  # older runs, before there were other targets, name none
    found |= {name: value for name, value in theirs.items() if name in wanted}
    for name, value in wanted.items():
        if (got := found.get(name, value)) not in (value, None):  # None: the file does not say
            what = ":" if isinstance(value, str) else " is of another size:"
            option = f"--model.{name.replace('_', '-')} {got}"
            raise CheckpointError(
                f"checkpoint: {parent.path}{what} {name}={got!r}; expected {value!r}, as in this "
                f"run. Start from another checkpoint, or give {option}."
            )


def _check_parts(
    parts: tuple[str, ...],
    own: dict[str, Tensor],
    taken: dict[str, Tensor],
    cfg: ModelConfig,
    parent: Checkpoint,
) -> None:
    """Refuse a parent that lacks a whole part, such as a released encoder without its decoder."""
    there = {name.split(".")[0] for name in taken}
    needed = {name.split(".")[0] for name in own if not _optional(name, cfg)}
    if lacking := [part for part in parts if part in needed - there]:
        raise CheckpointError(
            f"checkpoint: {parent.path} lacks {', '.join(lacking)}; expected the whole model, to "
            f"train a {cfg.kind} further. Start from a file with its decoder, or train the "
            "encoder alone, with a classifier's recipe."
        )


def _flat(part: str, values: dict) -> dict:
    return {f"{part}.{name}": value for name, value in values.items()}


def _load(model: nn.Module, checkpoint: Checkpoint, weights: dict[str, Tensor]) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise CheckpointError(
            f"checkpoint: {checkpoint.path} is of another model ({first}). Use the recipe that "
            "it was trained with."
        ) from None
