"""The gates that a private run passes before its first step, on public records: ``dp.support`` for
a run's model and loss.

Two or three records go through the run's own network. As many as a physical batch go through a
small network of the same kind: what mixes records at some batch sizes only is code, which does not
depend on widths and depths, while float64 at those of a large run takes minutes of CPU and more
memory than the run has.
"""

from dataclasses import replace

from torch import nn

from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    MAEConfig,
    ModelConfig,
    ResNetConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.batch import take
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.dp.route import share_route
from dpvision.dp.separable import check_separable, in_float64, perturb_zeros
from dpvision.dp.support import check_at_sizes, check_exact
from dpvision.models import make_model
from dpvision.train.objectives import example_batch

_DEPTH, _HEADS, _WIDTH, _SIDE = 2, 2, 16, 4
_VOCABULARY = 4096
"""Large enough for the head to compute a batch in several chunks, as the run does."""
_LARGE = 20_000_000
"""Parameters from which ``check_separable`` takes two records of the run's network, and three of
the small one.
"""


def check_gates(config: RunConfig, model: nn.Module, loss_fn: LossFn) -> None:
    """Refuse a run whose records' gradients are not functions of one record each, or are not
    computed exactly.

    Args:
        model: the run's, at its first weights, on the CPU.

    Raises:
        PrivacyError: as ``check_separable``, ``check_exact`` and ``check_at_sizes``.
    """
    key, batch = StepKey(config.seed, 0), example_batch(config)
    small = replace(config, model=small_model(config.model))
    is_large = sum(p.numel() for p in model.parameters()) >= _LARGE and small.model != config.model
    perturbed = perturb_zeros(model).double()  # one copy for the three checks
    if is_large:
        # Two records show at any depth what reaches a layer's bias, three what the small network
        # does with every weight. That three records of the run's network give what each gives
        # alone, to rounding, is the next check's.
        pair = take(batch, slice(0, 2))
        check_separable(loss_fn, perturbed, pair, key, weights_by_biases=True)
    else:
        check_separable(loss_fn, perturbed, batch, key)
    share_route(
        loss_fn, model, batch, key, perturbed, in_float64(batch)
    )  # the run follows this route
    check_exact(loss_fn, perturbed, batch, key)
    if small.model != config.model:
        del perturbed  # its memory
        perturbed = perturb_zeros(make_model(small.model, config.seed)).double()
    if is_large:
        check_separable(loss_fn, perturbed, example_batch(small), key)
    check_at_sizes(
        loss_fn, perturbed, example_batch(small, config.hardware.physical_batch_size), key
    )


def small_model(cfg: ModelConfig) -> ModelConfig:
    """Return a small network of the same kind and options: stacks of one or two blocks of width 16,
    on up to 4 x 4 patches. timm's networks stay as they are, since their options have no common
    names.
    """
    match cfg:
        case MAEConfig():
            depth = min(cfg.decoder_depth, _DEPTH)
            return replace(
                cfg,
                encoder=_small_vit(cfg.encoder),
                decoder_depth=depth,
                decoder_width=_WIDTH,
                decoder_num_heads=_HEADS,
            )
        case CrossMAEConfig():
            return replace(
                cfg, encoder=_small_vit(cfg.encoder), decoder=_small_decoder(cfg.decoder)
            )
        case CaptionerConfig():
            vocabulary = min(cfg.vocab_size, _VOCABULARY)
            return replace(
                cfg,
                encoder=_small_vit(cfg.encoder),
                decoder=_small_decoder(cfg.decoder),
                vocab_size=vocabulary,
            )
        case ClassifierConfig(encoder=ViTConfig() as encoder):
            return replace(cfg, encoder=_small_vit(encoder), last_blocks=1)
        case ClassifierConfig(encoder=ResNetConfig() as encoder):
            return replace(cfg, encoder=_small_resnet(encoder), last_blocks=1)
    return cfg


def _small_vit(cfg: ViTConfig) -> ViTConfig:
    side = min(cfg.image_size // cfg.patch_size, _SIDE)
    return replace(
        cfg,
        image_size=side * cfg.patch_size,
        depth=min(cfg.depth, _DEPTH),
        width=_WIDTH,
        num_heads=_HEADS,
    )


def _small_decoder(cfg: CrossDecoderConfig) -> CrossDecoderConfig:
    return replace(cfg, depth=min(cfg.depth, _DEPTH), width=_WIDTH, num_heads=_HEADS)


def _small_resnet(cfg: ResNetConfig) -> ResNetConfig:
    depths = tuple(min(depth, _DEPTH) for depth in cfg.depths)
    # A stem of 7 x 7 divides the side by four, every stage but the first by two.
    size = min(cfg.image_size, _SIDE * 2 ** (len(depths) - 1) * (4 if cfg.stem == "7x7" else 1))
    # The first stage has a shortcut of its own if it changes the number of channels.
    stem = _WIDTH if cfg.stem_width == cfg.widths[0] else _WIDTH // 2
    return replace(
        cfg,
        image_size=size,
        depths=depths,
        widths=(_WIDTH,) * len(depths),
        stem_width=stem,
        groups=_SIDE,
    )
