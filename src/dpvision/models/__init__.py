"""Networks from a config: they know no data, no privacy and no device."""

import torch

from dpvision.config import MAEConfig
from dpvision.models.layers import init_weights
from dpvision.models.mae import MAE


def make_model(cfg: MAEConfig, seed: int) -> MAE:
    """The network of a config with the paper's initialisation, a function of ``seed`` alone; float32, on the CPU.

    The global random state is neither used nor moved.

    Raises:
        ConfigError: the config's sizes do not fit together.
    """
    # The constructors of torch's layers draw from the global state; what they draw is replaced.
    with torch.random.fork_rng(devices=[]):
        model = MAE(cfg)
    init_weights(model, torch.Generator().manual_seed(seed))
    return model


def make_model_on_meta(cfg: MAEConfig) -> MAE:
    """The network's structure without memory for its weights: for counting and for planning."""
    with torch.device("meta"):
        return MAE(cfg)


def count_parameters(cfg: MAEConfig) -> int:
    """Number of trained parameters of a config's network."""
    return sum(p.numel() for p in make_model_on_meta(cfg).parameters() if p.requires_grad)
