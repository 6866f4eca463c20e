"""The demo's runs: a private captioner and its public warm start.

``dpvision demo`` makes their stores and the tokenizer. Not of the papers; settings were tried on
public scenes only.
"""

from dataclasses import replace

from dpvision.config import (
    CaptionerConfig,
    CrossDecoderConfig,
    DataConfig,
    HardwareConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)

VOCAB_SIZE = 440


def start() -> RunConfig:
    """The warm start, without a guarantee on public scenes: it learns to name the largest object,
    whose colour is one of five.
    """
    return RunConfig(
        recipe="demo.start",
        privacy=PrivacyConfig(
            dataset_size=3000,
            expected_batch_size=128,
            steps=250,
            max_grad_norm=None,
            guarantee="none",
        ),
        model=CaptionerConfig(
            encoder=ViTConfig(
                image_size=32,
                patch_size=8,
                depth=2,
                width=64,
                num_heads=4,
                qkv_bias=False,
                train_cls=False,
            ),
            decoder=CrossDecoderConfig(depth=1, width=64, num_heads=4),
            vocab_size=VOCAB_SIZE,
            num_tokens=6,
        ),
        data=DataConfig(crop_scale=(0.9, 1.0), horizontal_flip=False),
        optim=OptimConfig(
            learning_rate=4e-3, weight_decay=0.05, schedule="linear", warmup_steps=25
        ),
        hardware=HardwareConfig(physical_batch_size=256),
    )


def demo() -> RunConfig:
    """The private captioner, from ``demo.start``: 16,000 scenes of 32 px at epsilon 4, 60,000
    sample-gradients.

    Its captions name ten colours, of which the warm start has seen five.
    """
    public = start()
    return replace(
        public,
        recipe="demo",
        privacy=PrivacyConfig(
            dataset_size=16_000,
            expected_batch_size=1000,
            steps=60,
            max_grad_norm=1.0,
            target_epsilon=4.0,
        ),
        optim=replace(public.optim, learning_rate=8e-3, weight_decay=0.005, warmup_steps=6),
        init_from="runs/demo.start",
    )
