"""Warm starts on procedural textures: masked autoencoders trained without privacy on procedural
images (ViP, section 3.2, appendix A.2).

Settings of the MAE paper (its Table 8): AdamW with betas 0.9 and 0.95, weight decay 0.05 on
matrices, base rate 1.5e-4 per 256 images, batch 4096, 40 of 1000 epochs of warm-up, then a cosine;
75% masked. ViP has 1.3 million textures in its appendix (1.05 million in its section 4.1) and
pixels that are not normalised per patch. A random view of a texture (position, zoom, rotation,
mirroring, exposure) replaces the random resized crop (docs/departures.md).

``dpvision train vip.base`` starts from the run folder runs/synthetic.vip_base.
"""

from collections.abc import Callable
from dataclasses import replace

from dpvision.config import (
    CaptionerConfig,
    CrossMAEConfig,
    DataConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
)
from dpvision.recipes import dpcap, dpcap_micro, vip

_TEXTURES, _BATCH, _EPOCHS = 1_300_000, 4096, 1000
_BASE_RATE, _WARMUP_SHARE = 1.5e-4, 0.04


def _warm_start(name: str, start_of: Callable[[], RunConfig], epochs: int = _EPOCHS) -> RunConfig:
    private = start_of()
    steps = round(epochs * _TEXTURES / _BATCH)
    return replace(
        private,
        recipe=f"synthetic.{name}",
        privacy=PrivacyConfig(
            dataset_size=_TEXTURES,
            expected_batch_size=_BATCH,
            steps=steps,
            max_grad_norm=None,
            guarantee="none",
        ),
        data=replace(private.data, images="textures"),
        optim=OptimConfig(
            learning_rate=_BASE_RATE * _BATCH / 256,
            weight_decay=0.05,
            decayed="matrices",
            schedule="cosine",
            warmup_steps=round(_WARMUP_SHARE * steps),
        ),
        init_from=None,
    )


def vip_nano() -> RunConfig:
    """(Syn)-ViP-Nano: 1000 epochs of 1.3 million textures."""
    return _warm_start("vip_nano", vip.nano)


def vip_tiny() -> RunConfig:
    """(Syn)-ViP-Tiny: 1000 epochs of 1.3 million textures."""
    return _warm_start("vip_tiny", vip.tiny)


def vip_small() -> RunConfig:
    """(Syn)-ViP-Small: the paper's ImageNet linear probe is 46.0% (Table 9)."""
    return _warm_start("vip_small", vip.small)


def vip_base() -> RunConfig:
    """(Syn)-ViP-Base: the paper's ImageNet linear probe is 49.8% (Table 1)."""
    return _warm_start("vip_base", vip.base)


def vip_large() -> RunConfig:
    """(Syn)-ViP-Large: the paper's ImageNet linear probe is 50.2% (Table 9)."""
    return _warm_start("vip_large", vip.large)


def vip_base_20_epochs() -> RunConfig:
    """(Syn)-ViP-Base after 20 epochs (Figure 3b, the short end)."""
    return _warm_start("vip_base_20_epochs", vip.base, epochs=20)


def vip_base_900_epochs() -> RunConfig:
    """(Syn)-ViP-Base after 900 epochs (Figure 3b, the long end)."""
    return _warm_start("vip_base_900_epochs", vip.base, epochs=900)


def vip_base_decoder1() -> RunConfig:
    """The start of vip.base_decoder1 (Table 11)."""
    return _with_decoder(1)


def vip_base_decoder2() -> RunConfig:
    """The start of vip.base_decoder2 (Table 11)."""
    return _with_decoder(2)


def vip_base_decoder8() -> RunConfig:
    """The start of vip.base_decoder8 (Table 11)."""
    return _with_decoder(8)


def _with_decoder(depth: int) -> RunConfig:
    config = _warm_start(f"vip_base_decoder{depth}", vip.base)
    assert isinstance(config.model, MAEConfig)
    return replace(config, model=replace(config.model, decoder_depth=depth))


def vip_micro() -> RunConfig:
    """The warm start of vip.micro: 32 px, 200,000 textures, 240,000 sample-gradients; ten minutes
    or so on two cores.

    Not in the paper; small batches, because with so few sample-gradients the number of updates
    matters (docs/log).
    """
    private = vip.micro()
    return replace(
        private,
        recipe="synthetic.vip_micro",
        privacy=PrivacyConfig(
            dataset_size=200_000,
            expected_batch_size=64,
            steps=3750,
            max_grad_norm=None,
            guarantee="none",
        ),
        data=DataConfig(images="textures"),
        optim=OptimConfig(
            learning_rate=1e-3,
            weight_decay=0.05,
            decayed="matrices",
            schedule="cosine",
            warmup_steps=375,
        ),
        init_from=None,
    )


def _captioner_start(size: str, start_of: Callable[[], RunConfig]) -> RunConfig:
    """The captioner's network as a masked autoencoder, with the settings of ViP's warm start
    (DP-Cap, appendix A.1).
    """
    config = _warm_start(f"dpcap_{size}", start_of)
    return replace(config, model=_as_autoencoder(config))


def _as_autoencoder(config: RunConfig) -> CrossMAEConfig:
    assert isinstance(config.model, CaptionerConfig)
    return CrossMAEConfig(encoder=config.model.encoder, decoder=config.model.decoder)


def dpcap_tiny() -> RunConfig:
    """(Syn)-DP-Cap-Tiny: 1000 epochs of 1.3 million textures."""
    return _captioner_start("tiny", dpcap.tiny)


def dpcap_small() -> RunConfig:
    """(Syn)-DP-Cap-Small: 1000 epochs of 1.3 million textures."""
    return _captioner_start("small", dpcap.small)


def dpcap_base() -> RunConfig:
    """(Syn)-DP-Cap-Base: the paper's ImageNet linear probe is 44% (appendix B.1)."""
    return _captioner_start("base", dpcap.base)


def dpcap_large() -> RunConfig:
    """(Syn)-DP-Cap-Large: 1000 epochs of 1.3 million textures."""
    return _captioner_start("large", dpcap.large)


def dpcap_micro_start() -> RunConfig:
    """The warm start of dpcap.micro: the schedule of synthetic.vip_micro with the captioner's
    network.
    """
    private = dpcap_micro.micro()
    return replace(
        vip_micro(),
        recipe="synthetic.dpcap_micro",
        model=replace(_as_autoencoder(private), target="normalised_pixels"),
        hardware=private.hardware,
    )
