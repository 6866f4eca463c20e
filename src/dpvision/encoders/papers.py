"""The papers' checkpoints as ours: ViP, masked autoencoders, DP-Cap.

The layouts are those of the authors' code (Yu et al. 2024, He et al. 2022, Sander et al. 2024).
Constants that our networks lack are added to weights next to them; the function stays the same:

- The class token's row of the positions (zero in the fixed tables) goes into the class token. In a
  decoder it goes into the bias before it and into the mask token, and is subtracted from all rows.
- DP-Cap's type embeddings go into the bias of the patch embedding, the class token, the bias of the
  bridge, and the token embeddings.

Pixels of a predicted patch change their order from (row, column, channel) to (channel, row,
column), and DP-Cap's entries of BERT's vocabulary to our numbers (``data.wordpiece.OURS``).

Legend: B images, L tokens, D width, C channels, P patch side, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpvision.checkpoint import Checkpoint
from dpvision.config import (
    CaptionerConfig,
    CrossDecoderConfig,
    MAEConfig,
    ViTConfig,
    to_dict,
)
from dpvision.data.tokenizer import CaptionTokenizer
from dpvision.data.wordpiece import OURS
from dpvision.encoders.third_party import check_fit, without_wrapper
from dpvision.encoders.weights_file import open_weights
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models import make_model_on_meta
from dpvision.models.layers import sincos_positions, sincos_sequence
from dpvision.runs.lineage import undeclared_weights
from dpvision.train.words import TOKENIZER_FILE

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""ImageNet's, with which all of these were trained."""

PUBLISHED = {
    "vip": {
        "nano": ((192, 12), (512, 16)),
        "tiny": ((384, 12), (512, 16)),
        "small": ((576, 12), (512, 16)),
        "base": ((768, 12), (512, 16)),
        "large": ((1024, 16), (512, 16)),
    },
    "mae": {
        "base": ((768, 12), (512, 16)),
        "large": ((1024, 16), (512, 16)),
        "huge": ((1280, 16), (512, 16)),
    },
    "dpcap": {
        "tiny": ((384, 6), (384, 6)),
        "small": ((576, 12), (576, 12)),
        "base": ((768, 12), (768, 12)),
        "large": ((1024, 16), (768, 12)),
    },
}
"""Width and number of heads of the published encoders and decoders; shapes do not show heads."""
_POSITION_TOLERANCE = 1e-4  # the published tables were made in float32 or in float64
_PATCHES = "patch_embed.proj.weight"
_VIT_NAMES = {
    "patch_embed.": "patch_embed.proj.",
    "attention.out": "attn.proj",
    "attention.qkv": "attn.qkv",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
    "head.": "decoder_pred.",
}
_CAPTIONER_NAMES = {
    "decoder.bridge.": "decoder_embed.",
    "decoder.blocks.": "decoder.layers.",
    "self_attention.qkv": "self_attn.c_attn",
    "self_attention.out": "self_attn.c_proj",
    "cross_attention.q.": "multihead_attn.q_proj.",
    "cross_attention.kv.": "multihead_attn.kv_proj.",
    "cross_attention.out": "multihead_attn.c_proj",
    "mlp.0": "linear1",
    "mlp.2": "linear2",
    "word_embed.": "text_embedding_layer_SimVLM.",
    "word_norm.": "decoder_pred_text.0.",
    "word_head.": "decoder_pred_text.1.",
}
"""Parts of our names, and what stands for them in the files."""
_NOT_ENCODER = ("decoder_", "mask_token")
_CLASSIFIER = ("head.", "fc_norm.")  # of a fine-tuned encoder
_NOT_CAPTIONER = ("mask_token", "text_pos_embed", "text_decoder_pos_", "encoder_text_type_")


@dataclass(frozen=True)
class _Asked:
    """What a spec asks for: ``FILE``, then any of ``@NAME``, ``@heads=N``, ``@heads=N,M`` and, for
    DP-Cap, ``@VOCABULARY``.
    """

    kind: str
    file: Path
    name: str | None = None
    heads: tuple[int, ...] = ()
    vocabulary: Path | None = None

    @property
    def remedy(self) -> str:
        """What to do about a file of another layout."""
        what = "DP-Cap" if self.kind == "dpcap" else "a masked autoencoder"
        return f"Choose {what}'s file, with all its tensors (docs/papers_files.md lists them)."


def paper_checkpoint(kind: str, rest: str, *, whole: bool = True) -> Checkpoint:
    """Return a checkpoint in memory of a file in a paper's layout.

    Args:
        kind: "vip", "mae" or "dpcap".
        rest: ``FILE``, with ``@NAME`` (``PUBLISHED``) or ``@heads=N`` (``@heads=N,M`` with a
            decoder) where the widths are of no published model; for DP-Cap also ``@VOCABULARY``.
        whole: whether to take the decoder of a masked autoencoder, if the file has one.

    Returns:
        Weights under the names of ``models.MAE`` or ``models.captioner.Captioner``; a manifest with
        the model's config, the normalisation, and the lineage: the file's own, or undeclared; and
        DP-Cap's tokenizer, if a vocabulary is given.

    Raises:
        ConfigError: ``rest`` has another form, or a name that is not published.
        CheckpointError: the file cannot be read, a tensor does not fit (names the first), or its
            number of heads must be given.
        DataError: the vocabulary cannot be read.
    """
    asked = _parsed(kind, rest)
    shown = f"{kind}:{asked.file.name}"
    weights = open_weights(asked.file, undeclared_weights(shown))
    given = without_wrapper(weights.tensors, [_PATCHES], str(asked.file), asked.remedy)
    files = {}
    if kind == "dpcap":
        model, tensors = _captioner(asked, given)
        if asked.vocabulary is not None:
            files[TOKENIZER_FILE] = _tokenizer(asked, model["vocab_size"])
    else:
        model, tensors = _autoencoder(asked, given, whole and "decoder_embed.weight" in given)
    manifest = {
        "config": {"recipe": shown, "model": model, "data": {"mean": [*MEAN], "std": [*STD]}},
        "lineage": list(weights.lineage),
    }
    return Checkpoint(asked.file, manifest, tensors, None, None, files)


def _parsed(kind: str, rest: str) -> _Asked:
    """Split a spec at its "@" signs from the right, until what is left is a file."""
    found: dict[str, Any] = {}
    file = rest
    while "@" in file and not Path(file).exists():
        file, _, part = file.rpartition("@")
        name: str
        value: Any
        if part.startswith("heads="):
            name, value = "heads", _numbers(part, f"{kind}:{rest}")
        elif part in PUBLISHED[kind]:
            name, value = "name", part
        elif kind == "dpcap" and Path(part).exists():
            name, value = "vocabulary", Path(part)
        else:
            more = " or an existing file, the vocabulary" if kind == "dpcap" else ""
            raise ConfigError(
                f"encoder: {kind}:{rest}: {part!r}; expected one of {', '.join(PUBLISHED[kind])}, "
                f"heads=N, heads=N,M{more}. Correct the part after @."
            )
        if name in found:
            raise ConfigError(
                f"encoder: {kind}:{rest}: {part!r} is the second {name}; expected one. Drop one."
            )
        found[name] = value
    if not file:
        raise ConfigError(
            f"encoder: {kind}:{rest!r}; expected {kind}:FILE. Give the file of the weights; a "
            f"folder called {kind} is opened by its name alone, without a colon."
        )
    return _Asked(kind, Path(file), **found)


def _numbers(part: str, where: str) -> tuple[int, ...]:
    numbers = part.removeprefix("heads=").split(",")
    if len(numbers) > 2 or not all(n.isascii() and n.isdigit() and int(n) > 0 for n in numbers):
        raise ConfigError(
            f"encoder: {where}: {part!r}; expected heads=N for the encoder, or heads=N,M for "
            "encoder and decoder, from 1. Write e.g. @heads=12,16."
        )
    return tuple(map(int, numbers))


def _heads(asked: _Asked, *widths: int) -> tuple[int, ...]:
    """Return the numbers of heads of the encoder, and of the decoder if its width is given."""
    known = PUBLISHED[asked.kind]
    fits = {
        name: tuple(heads for _, heads in parts)
        for name, parts in known.items()
        if tuple(width for width, _ in parts)[: len(widths)] == widths
    }
    where = f"weights: {asked.file}: width={', '.join(map(str, widths))}"
    if asked.name is not None and asked.name not in fits:
        theirs = ", ".join(str(width) for width, _ in known[asked.name][: len(widths)])
        raise CheckpointError(
            f"{where}; expected {theirs} of {asked.kind}:FILE@{asked.name}. Drop @{asked.name}, or "
            "choose its file."
        )
    if len(asked.heads) < len(widths) and not fits:
        parts, form = ("encoder", "N") if len(widths) == 1 else ("encoder and decoder", "N,M")
        raise CheckpointError(
            f"{where}; expected that of a published model ({', '.join(known)}): a file does not "
            f"hold the number of heads of its {parts}. Give {asked.kind}:{asked.file}@heads={form}."
        )
    published = next(iter(fits.values()), ())
    return (*asked.heads, *published[len(asked.heads) :])[: len(widths)]


def _shape(asked: _Asked, given: dict[str, Tensor], name: str, ndim: int) -> tuple[int, ...]:
    got = tuple(given[name].shape) if name in given else "nothing"
    if len(got) != ndim or isinstance(got, str):
        raise CheckpointError(
            f"weights: {asked.file}: {name}={got}; expected {ndim} dimensions. {asked.remedy}"
        )
    return got


def _vit(asked: _Asked, given: dict[str, Tensor], num_heads: int) -> ViTConfig:
    """Return the encoder's config from the shapes of its tensors."""
    width, channels, patch, other_side = _shape(asked, given, _PATCHES, 4)
    _, num_tokens, _ = _shape(asked, given, "pos_embed", 3)
    hidden, _ = _shape(asked, given, "blocks.0.mlp.fc1.weight", 2)
    grid = math.isqrt(max(num_tokens - 1, 0))
    if channels != 3 or patch != other_side or grid < 1 or grid**2 != num_tokens - 1:
        raise CheckpointError(
            f"weights: {asked.file}: {_PATCHES}={(width, channels, patch, other_side)}, "
            f"{num_tokens} positions; expected RGB, square patches and images, and a class token. "
            "Open another model with timm:NAME@FILE."
        )
    return ViTConfig(
        image_size=grid * patch,
        patch_size=patch,
        depth=_depth(given, "blocks."),
        width=width,
        num_heads=num_heads,
        mlp_ratio=hidden / width,
    )


def _depth(given: dict[str, Tensor], start: str) -> int:
    return len({n.removeprefix(start).split(".")[0] for n in given if n.startswith(start)})


def _autoencoder(
    asked: _Asked, given: dict[str, Tensor], whole: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a masked autoencoder, or of its encoder without ``whole``."""
    widths = {"pos_embed": _shape(asked, given, _PATCHES, 4)[0]}
    if whole:
        widths["decoder_pos_embed"] = _shape(asked, given, "decoder_embed.weight", 2)[0]
    heads = _heads(asked, *widths.values())
    vit = _vit(asked, given, heads[0])
    tables = {name: _table(width, vit) for name, width in widths.items()}
    if not all(_is_fixed(given, name, table) for name, table in tables.items()):
        vit = replace(vit, positions="loaded")
    cfg = MAEConfig(encoder=vit)
    if whole:
        cfg = MAEConfig(
            encoder=vit,
            decoder_depth=_depth(given, "decoder_blocks."),
            decoder_width=widths["decoder_pos_embed"],
            decoder_num_heads=heads[1],
        )
    shapes = {name: tuple(table.shape) for name, table in tables.items()}
    shapes |= {"cls_token": (1, vit.width)} | (
        {"mask_token": (1, cfg.decoder_width)} if whole else {}
    )
    ignored = _CLASSIFIER + (() if whole else _NOT_ENCODER)
    made = _renamed(asked, given, cfg, shapes, ignored, "" if whole else "encoder.")

    # Nothing but the sum of the class token and its position is used.
    position_LD = given["pos_embed"][0].float()
    _add(made, "encoder.cls_token", position_LD[0])
    loaded = {"encoder.position_LD": position_LD[1:]}
    if whole:
        # Tokens of the decoder are bias + position or mask token + position: the class token's
        # position moves into the bias and the mask token, and out of all other positions.
        position_LD = given["decoder_pos_embed"][0].float()
        _add(made, "decoder_embed.bias", position_LD[0])
        _add(made, "mask_token", position_LD[0])
        loaded["decoder_position_LD"] = position_LD[1:] - position_LD[0]
        for name in ("head.weight", "head.bias"):
            by_pixel = made[name].unflatten(0, (vit.patch_size, vit.patch_size, 3))
            made[name] = by_pixel.movedim(2, 0).flatten(0, 2)
    about: dict[str, Any] = to_dict(cfg) if whole else {"kind": "mae", "encoder": to_dict(vit)}
    # ViP predicts plain pixels; a file of MAE does not say whether its pixels are normalised.
    if not whole or asked.kind == "mae":
        about["target"] = None
    return about, made | (loaded if vit.positions == "loaded" else {})


def _captioner(asked: _Asked, given: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a captioner."""
    width, _ = _shape(asked, given, "decoder_embed.weight", 2)
    vocab_size, _ = _shape(asked, given, "text_embedding_layer_SimVLM.weight", 2)
    hidden, _ = _shape(asked, given, "decoder.layers.0.linear1.weight", 2)
    _, num_words, _ = _shape(asked, given, "text_decoder_pos_embed", 3)
    heads = _heads(asked, _shape(asked, given, _PATCHES, 4)[0], width)
    vit = replace(_vit(asked, given, heads[0]), qkv_bias=False, train_cls=False)
    depth = _depth(given, "decoder.layers.")
    decoder = CrossDecoderConfig(depth, width, heads[1], hidden / width)
    cfg = CaptionerConfig(encoder=vit, decoder=decoder, vocab_size=vocab_size)
    if not vocab_size > max(OURS):
        raise CheckpointError(
            f"weights: {asked.file}: {vocab_size} entries in the vocabulary; expected BERT's "
            "30,522. Choose DP-Cap's file."
        )
    tables = {
        "pos_embed": _table(vit.width, vit),
        "decoder_pos_embed": _table(width, vit),
        "text_decoder_pos_embed": sincos_sequence(num_words, width),
    }
    shapes = {name: tuple(table.shape) for name, table in tables.items()}
    types = ("encoder_image", "decoder_image", "decoder_text")
    for name, size in zip(types, (vit.width, width, width), strict=True):
        shapes[f"{name}_type_embedding"] = (1, size)
    shapes["cls_token"] = (1, vit.width)
    made = _renamed(asked, given, cfg, shapes, _NOT_CAPTIONER)
    for name, table in tables.items():
        if not _is_fixed(given, name, table):
            raise CheckpointError(
                f"weights: {asked.file}: {name} differs from the fixed sin-cos table by more than "
                f"{_POSITION_TOLERANCE}; expected DP-Cap's positions, which are not trained. "
                "Choose another file."
            )
    of_encoder, of_bridge, of_words = (given[f"{name}_type_embedding"] for name in types)
    for name, value in (
        ("encoder.cls_token", of_encoder),
        ("encoder.patch_embed.bias", of_encoder),
        ("decoder.bridge.bias", of_bridge),
        ("word_embed.weight", of_words),
    ):
        _add(made, name, value)
    # Row i of ours is row j of the file's, where OURS[j] = i; the permutation is its own inverse.
    order_V = torch.arange(vocab_size)
    order_V[list(OURS.values())] = torch.tensor(list(OURS))
    for name in ("word_embed.weight", "word_head.weight", "word_head.bias"):
        made[name] = made[name][order_V]
    return to_dict(cfg), made


def _table(width: int, vit: ViTConfig) -> Tensor:
    """Return the fixed positions of a file, (1 + L, D): zeros for the class token."""
    table_LD = sincos_positions(vit.image_size // vit.patch_size, width)
    return torch.cat([torch.zeros_like(table_LD[:1]), table_LD])


def _is_fixed(given: dict[str, Tensor], name: str, table_LD: Tensor) -> bool:
    """Return whether positions are the table's; True for those of another shape, which
    ``_renamed`` refuses.
    """
    if name not in given or given[name].shape != (1, *table_LD.shape):
        return True
    return bool((given[name][0].float() - table_LD).abs().max() <= _POSITION_TOLERANCE)


def _renamed(
    asked: _Asked,
    given: dict[str, Tensor],
    cfg: MAEConfig | CaptionerConfig,
    shapes: dict[str, tuple[int, ...]],
    ignored: tuple[str, ...],
    start: str = "",
) -> dict[str, Tensor]:
    """Return the file's tensors under our names, in our shapes, without positions.

    Args:
        shapes: of the file's tokens and positions, without their first dimension, 1.
        ignored: starts of names that are not used.
        start: of our names; others are left out.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or not part of the model.
    """
    ours = {
        name: tensor
        for name, tensor in make_model_on_meta(cfg).state_dict().items()
        if name.startswith(start) and not name.endswith("position_LD")
    }
    names = {}
    for name in ours:
        in_file = name.removeprefix("encoder.")
        parts = _CAPTIONER_NAMES if name.startswith(("decoder.", "word_")) else _VIT_NAMES
        for part, theirs in parts.items():
            in_file = in_file.replace(part, theirs)
        names[name] = in_file
    side = cfg.encoder.patch_size
    wanted = {names[name]: tensor for name, tensor in ours.items()}
    wanted |= {name: torch.empty(1, *shape, device="meta") for name, shape in shapes.items()}
    wanted[_PATCHES] = torch.empty(cfg.encoder.width, 3, side, side, device="meta")
    check_fit(given, wanted, str(asked.file), ignored, asked.remedy)
    return {name: given[names[name]].reshape(ours[name].shape).float() for name in ours}


def _add(made: dict[str, Tensor], name: str, constant: Tensor) -> None:
    made[name] = made[name] + constant.flatten().float()


def _tokenizer(asked: _Asked, vocab_size: int) -> bytes:
    assert asked.vocabulary is not None
    tokenizer = CaptionTokenizer.load(asked.vocabulary)
    if not tokenizer.is_wordpiece or tokenizer.vocab_size != vocab_size:
        kind = "WordPiece" if tokenizer.is_wordpiece else "byte-pair encoding"
        raise CheckpointError(
            f"weights: {asked.vocabulary}: {kind} of {tokenizer.vocab_size:,} entries; expected "
            f"BERT's WordPiece of {vocab_size:,}, as in {asked.file}. Use vocab.txt of "
            "bert-base-uncased."
        )
    return tokenizer.to_bytes()
