"""All settings of a run: frozen dataclasses, validated when made, converted to and from JSON.

``HardwareConfig`` must not change the result beyond rounding; everything else is the recipe and
changes what is learned or what is guaranteed. Ranges are written so that NaN fails them.
"""

from dpvision.config.heads import FrozenEncoderConfig, HeadConfig
from dpvision.config.models import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    CaptionerConfig,
    ClassifierConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    EncoderConfig,
    MAEConfig,
    ModelConfig,
    ResNetConfig,
    TimmConfig,
    ViTConfig,
)
from dpvision.config.optim import LAMB_EPS, OptimConfig
from dpvision.config.plain import from_dict, to_dict, with_settings
from dpvision.config.privacy import PrivacyConfig
from dpvision.config.run import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DataConfig,
    HardwareConfig,
    RunConfig,
)

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "LAMB_EPS",
    "PAD_ID",
    "CaptionerConfig",
    "ClassifierConfig",
    "CrossDecoderConfig",
    "CrossMAEConfig",
    "DataConfig",
    "EncoderConfig",
    "FrozenEncoderConfig",
    "HardwareConfig",
    "HeadConfig",
    "MAEConfig",
    "ModelConfig",
    "OptimConfig",
    "PrivacyConfig",
    "ResNetConfig",
    "RunConfig",
    "TimmConfig",
    "ViTConfig",
    "from_dict",
    "to_dict",
    "with_settings",
]
