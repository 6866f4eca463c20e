"""A captioner for small experiments: procedural scenes of 32 px, 1.5 to 3 hours of a CPU core. Not
in the paper; results in docs/dpcap.md.

    dpvision data scenes stores/scenes --num 1000000 --size-px 32     the images with their captions
    dpvision data tokenizer stores/words.json --scenes 20000 --vocab-size 440
    dpvision train synthetic.dpcap_micro
    dpvision train dpcap.micro --data stores/scenes --data.tokenizer stores/words.json

No flips and mild crops: the caption of a mirrored scene would be false. Settings are rules of thumb
and from public trials on scenes; nothing was chosen by looking at a private store.
"""

from dataclasses import replace
from typing import Any

from dpvision.config import (
    CaptionerConfig,
    CrossDecoderConfig,
    DataConfig,
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.recipes.variation import Variation


def micro() -> RunConfig:
    """A small DP-Cap for a million captioned scenes of 32 px on two CPU cores: epsilon 8, 2.6
    million sample-gradients.

    Narrow on purpose: the noise on a step's mean grows with the square root of the number of
    parameters, and at this compute a network of 0.4 million learns to name colours, while one of
    1.5 million hardly does. The rate is the best of three (docs/log).
    """
    return RunConfig(
        recipe="dpcap.micro",
        privacy=PrivacyConfig(
            dataset_size=1_000_000,
            expected_batch_size=1000,
            steps=2600,
            max_grad_norm=1.0,
            target_epsilon=8.0,
        ),
        model=CaptionerConfig(
            encoder=ViTConfig(
                image_size=32,
                patch_size=8,
                depth=4,
                width=64,
                num_heads=4,
                qkv_bias=False,
                train_cls=False,
            ),
            decoder=CrossDecoderConfig(depth=2, width=64, num_heads=4),
            vocab_size=440,
            num_tokens=28,
        ),
        data=DataConfig(crop_scale=(0.8, 1.0), horizontal_flip=False),
        optim=OptimConfig(
            learning_rate=8e-3, weight_decay=0.005, schedule="linear", warmup_steps=130
        ),
        hardware=HardwareConfig(physical_batch_size=250),
        init_from="runs/synthetic.dpcap_micro",
    )


def _row(doc: str, **changes: Any) -> Variation:
    return Variation(doc, micro, **changes)


def micro_vip() -> RunConfig:
    """A masked autoencoder at dpcap.micro's epsilon, batch and steps, from the captioner's warm
    encoder: the baseline of DP-Cap.

    Its rate, half the captioner's, is from separate trials (docs/log).
    """
    captioner = micro()
    assert isinstance(captioner.model, CaptionerConfig)
    return replace(
        captioner,
        recipe="dpcap.micro_vip",
        privacy=replace(captioner.privacy, max_grad_norm=0.1),
        optim=replace(captioner.optim, learning_rate=4e-3),
        model=MAEConfig(
            encoder=captioner.model.encoder,
            decoder_depth=1,
            decoder_width=64,
            decoder_num_heads=4,
            target="normalised_pixels",
        ),
    )


VARIATIONS: dict[str, Variation] = {
    "dpcap.micro_eps2": _row("dpcap.micro at epsilon 2.", privacy={"target_epsilon": 2.0}),
    "dpcap.micro_eps1": _row("dpcap.micro at epsilon 1.", privacy={"target_epsilon": 1.0}),
    "dpcap.micro_random_start": _row("dpcap.micro from random weights.", run={"init_from": None}),
    "dpcap.micro_non_private": _row(
        "dpcap.micro without a guarantee: no clipping, no noise, small batches and more steps.",
        privacy={
            "guarantee": "none",
            "target_epsilon": None,
            "max_grad_norm": None,
            "expected_batch_size": 250,
            "steps": 8000,
        },
        optim={"warmup_steps": 800, "weight_decay": 0.05, "learning_rate": 1e-3},
    ),
}
