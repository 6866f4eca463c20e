"""The demo: a minute-sized ViP on procedural scenes that play the part of a private store."""

from dataclasses import replace

from dpvision.config import RunConfig
from dpvision.recipes.vip import micro


def demo() -> RunConfig:
    """vip.micro on 20,000 scenes at 32 px, epsilon 8, in a few minutes on two cores."""
    config = micro()
    privacy = replace(config.privacy, dataset_size=20_000, expected_batch_size=2000, steps=40)
    return replace(config, recipe="demo", privacy=privacy, optim=replace(config.optim, warmup_steps=5))
