"""The demo: a ViP trained in minutes on procedural scenes that stand in for a private store."""

from dataclasses import replace

from dpvision.config import DataConfig, MAEConfig, RunConfig, ViTConfig
from dpvision.recipes.vip import micro


def demo() -> RunConfig:
    """A quarter-million-parameter ViP on 40,000 scenes of 32 px at epsilon 8: two to three minutes of training on two cores."""
    config = micro()
    return replace(
        config,
        recipe="demo",
        init_from=None,
        privacy=replace(config.privacy, dataset_size=40_000, expected_batch_size=2000, steps=60),
        model=MAEConfig(
            encoder=ViTConfig(image_size=32, patch_size=4, depth=4, width=64, num_heads=4),
            decoder_depth=1, decoder_width=64, decoder_num_heads=4,  # plain pixels: the report shows what it fills in
        ),
        data=DataConfig(crop_scale=(0.6, 1.0)),
        optim=replace(config.optim, learning_rate=2e-3, warmup_steps=5),
    )  # fmt: skip
