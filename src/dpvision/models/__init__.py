"""Networks built from a config, independent of data, privacy and device."""

from typing import overload

import torch

from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossMAEConfig,
    HeadConfig,
    MAEConfig,
    ModelConfig,
)
from dpvision.errors import ConfigError
from dpvision.models.captioner import Captioner
from dpvision.models.classifier import Classifier, init_classifier
from dpvision.models.cross_mae import CrossMAE
from dpvision.models.layers import init_weights
from dpvision.models.mae import MAE
from dpvision.models.tuned import tune

Model = MAE | Classifier | CrossMAE | Captioner
"""The networks that a run can train; each has an ``encoder``."""


@overload
def make_model(cfg: MAEConfig, seed: int) -> MAE: ...
@overload
def make_model(cfg: ClassifierConfig, seed: int) -> Classifier: ...
@overload
def make_model(cfg: CrossMAEConfig, seed: int) -> CrossMAE: ...
@overload
def make_model(cfg: CaptionerConfig, seed: int) -> Captioner: ...
@overload
def make_model(cfg: ModelConfig, seed: int) -> Model: ...
def make_model(cfg: ModelConfig, seed: int) -> Model:
    """Make the network of a config with the paper's initialisation, float32, on the CPU.

    Its weights are a function of ``seed`` alone.

    The global random state is neither used nor changed.

    Raises:
        ConfigError: the config's sizes do not fit together, or it is of a head on frozen features
            (``layers.LinearHead``).
    """
    # torch's layers draw from the global state when constructed; except for timm's models, these
    # weights are replaced.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(cfg)
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Classifier):
        init_classifier(model, generator)
    else:
        init_weights(model, generator)
    return model


def make_model_on_meta(cfg: ModelConfig) -> Model:
    """Make the network on the meta device, for counting and planning.

    Its weights take no memory.
    """
    with torch.device("meta"):
        model = _build(cfg)
        if isinstance(model, Classifier):
            tune(model.encoder, model.head, model.cfg, None)
        return model


def count_parameters(cfg: ModelConfig) -> int:
    """Return the number of trainable parameters of a config's network.

    For a head, 0 while its encoder is unknown.
    """
    if isinstance(cfg, HeadConfig):
        return cfg.num_parameters
    return sum(p.numel() for p in make_model_on_meta(cfg).parameters() if p.requires_grad)


def _build(cfg: ModelConfig) -> Model:
    match cfg:
        case MAEConfig():
            return MAE(cfg)
        case ClassifierConfig():
            return Classifier(cfg)
        case CrossMAEConfig():
            return CrossMAE(cfg)
        case CaptionerConfig():
            return Captioner(cfg)
        case HeadConfig():
            raise ConfigError(
                "model: kind='head' is a head on frozen features; expected a network. Train "
                "heads with `dpvision adapt`, score them with `dpvision evaluate RUN --test "
                "STORE`, and open them with dpvision.load_classifier."
            )
