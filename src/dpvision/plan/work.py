"""Operations and memory of one record in our transformers, by formula: two for each weight and
token, and attention's products.
"""

from dataclasses import dataclass

from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    MAEConfig,
    ViTConfig,
)
from dpvision.config.models import ModelConfig

CLIPPING = 1.15
"""Time of one-pass clipping over non-private training: 1.08 to 1.27 on a processor
(benchmarks/results/*clipping*.json).
"""
_BYTES_OF_A_TOKEN = 64
"""Activations kept for the backward pass, bytes a token, block and unit of width in float32, fitted
to the memory measured on a processor (benchmarks/results/*clipping*.json); Korthikanti et al.
(arXiv 2205.05198) count 34 in half precision, dropout masks included.
"""


@dataclass(frozen=True)
class Work:
    """Of one view of one record."""

    forward_flops: float
    activation_bytes: float
    """In float32; half of it in half precision."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.forward_flops + other.forward_flops, self.activation_bytes + other.activation_bytes
        )


def work_of(cfg: ModelConfig) -> Work | None:
    """Work of one view of one record; None for networks without a formula (residual networks,
    timm's, heads, classifiers tuned in part).
    """
    match cfg:
        case MAEConfig():
            visible = _patches(cfg.encoder) - int(_patches(cfg.encoder) * cfg.mask_ratio) + 1
            decoder = _blocks(
                cfg.decoder_depth,
                cfg.decoder_width,
                4.0,
                _patches(cfg.encoder) + 1,
                cfg.decoder_num_heads,
            )
            return _vit(cfg.encoder, visible) + decoder
        case CrossMAEConfig():
            hidden = int(_patches(cfg.encoder) * cfg.mask_ratio)
            visible = _patches(cfg.encoder) - hidden + 1
            return _vit(cfg.encoder, visible) + _cross(cfg.decoder, visible, hidden, 0)
        case CaptionerConfig():
            tokens = _patches(cfg.encoder) + 1
            decoder = _cross(cfg.decoder, tokens, cfg.num_tokens, cfg.vocab_size)
            encoder = _vit(cfg.encoder, tokens)
            return encoder + decoder if cfg.train_encoder else None
        case ClassifierConfig(encoder=ViTConfig() as vit, tuned="whole"):
            return _vit(vit, _patches(vit) + 1)
    return None


def _patches(cfg: ViTConfig) -> int:
    return (cfg.image_size // cfg.patch_size) ** 2


def _vit(cfg: ViTConfig, tokens: int) -> Work:
    embedding = 2 * 3 * cfg.patch_size**2 * cfg.width * _patches(cfg)
    return _blocks(cfg.depth, cfg.width, cfg.mlp_ratio, tokens, cfg.num_heads) + Work(embedding, 0)


def _blocks(depth: int, width: int, mlp_ratio: float, tokens: int, heads: int) -> Work:
    weights = (4 + 2 * mlp_ratio) * width**2
    flops = depth * (2 * weights * tokens + 4 * tokens**2 * width)
    return Work(flops, depth * tokens * (_BYTES_OF_A_TOKEN * width + 8 * heads * tokens))


def _cross(cfg: CrossDecoderConfig, seen: int, tokens: int, vocabulary: int) -> Work:
    """A decoder of ``tokens`` tokens that attends to ``seen`` ones, and a head over ``vocabulary``
    words.
    """
    own = (6 + 2 * cfg.mlp_ratio) * cfg.width**2
    flops = cfg.depth * (
        2 * own * tokens + 4 * cfg.width**2 * seen + 4 * tokens * (tokens + seen) * cfg.width
    )
    kept = cfg.depth * (
        tokens * (1.5 * _BYTES_OF_A_TOKEN * cfg.width + 8 * cfg.num_heads * (tokens + seen))
        + 12 * seen * cfg.width
    )
    return Work(flops + 2 * vocabulary * cfg.width * tokens, kept)
