"""Trained parameters of our transformers, by formula: building one to count them imports torch,
which takes seconds.
"""

from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    HeadConfig,
    MAEConfig,
    ViTConfig,
)
from dpvision.config.models import ModelConfig

_CHANNELS = 3
_GRADIENT_TARGET = 108
"""Three channels, nine orientations, four cells (models/mae.py)."""


def count_parameters(cfg: ModelConfig) -> int:
    """Number of trained parameters of a config's network; of a head, 0 before its encoder is
    known.
    """
    counted = by_formula(cfg)
    if counted is None:
        from dpvision.models import count_parameters as count

        return count(cfg)
    return counted


def by_formula(cfg: ModelConfig) -> int | None:
    """The same; None for networks that have to be built (residual networks, timm's, classifiers
    trained in part).
    """
    match cfg:
        case HeadConfig():
            return cfg.num_parameters
        case MAEConfig():
            width, e = cfg.decoder_width, cfg.encoder
            blocks = cfg.decoder_depth * _block(width, e.mlp_ratio, qkv_bias=True)
            head = _linear(width, _target(cfg.target, e.patch_size))
            return _vit(e) + _linear(e.width, width) + width + blocks + 2 * width + head
        case CrossMAEConfig():
            head = _linear(cfg.decoder.width, _target(cfg.target, cfg.encoder.patch_size))
            return _vit(cfg.encoder) + _cross_decoder(cfg.decoder, cfg.encoder.width) + head
        case CaptionerConfig():
            width = cfg.decoder.width
            words = (
                cfg.vocab_size * width
                + 2 * width
                + _linear(width, cfg.vocab_size)
                + (width if cfg.parallel_rate > 0 else 0)
            )
            patches = (
                _linear(width, _target("pixels", cfg.encoder.patch_size))
                if cfg.reconstruction_weight > 0
                else 0
            )
            encoder = _vit(cfg.encoder) if cfg.train_encoder else 0
            return encoder + _cross_decoder(cfg.decoder, cfg.encoder.width) + words + patches
        case ClassifierConfig(encoder=ViTConfig() as vit, tuned="whole", train_head_bias=True):
            return _vit(vit) + _linear(vit.width, cfg.num_classes)
    return None


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _block(width: int, mlp_ratio: float, *, qkv_bias: bool) -> int:
    hidden = int(width * mlp_ratio)
    attention = _linear(width, 3 * width, qkv_bias) + _linear(width, width)
    return 4 * width + attention + _linear(width, hidden) + _linear(hidden, width)


def _vit(cfg: ViTConfig) -> int:
    blocks = cfg.depth * _block(cfg.width, cfg.mlp_ratio, qkv_bias=cfg.qkv_bias)
    return (
        _linear(_CHANNELS * cfg.patch_size**2, cfg.width)
        + (cfg.width if cfg.train_cls else 0)
        + blocks
        + 2 * cfg.width
    )


def _cross_decoder(cfg: CrossDecoderConfig, encoder_width: int) -> int:
    hidden = int(cfg.width * cfg.mlp_ratio)
    block = 8 * cfg.width**2 + 2 * cfg.width * hidden + 6 * cfg.width
    return _linear(encoder_width, cfg.width) + cfg.depth * block


def _target(kind: str, patch_size: int) -> int:
    return _GRADIENT_TARGET if kind == "gradients" else _CHANNELS * patch_size**2
