"""Private heads on frozen features of a public encoder: the cheapest DP transfer (Mehta et al.
2022; docs/adapt.md, docs/heads.md).

    dpvision adapt --data stores/mine --num-classes 10 --dataset-size 20000 --epsilon 1

The numbers of records and classes must be declared: dataset_size=1 means not declared yet, and is
refused. Batches are full: every record is in every release, so that T releases with noise sigma
sqrt(T) cost the same as one with noise sigma.
"""

from dpvision.config import (
    DataConfig,
    FrozenEncoderConfig,
    HardwareConfig,
    HeadConfig,
    PrivacyConfig,
    RunConfig,
)
from dpvision.config.head_presets import PRESETS, HeadName, with_head

UNDECLARED = 1


def auto() -> RunConfig:
    """The head chosen by the declared numbers of records and classes, epsilon and feature
    dimension; prints the reason (docs/heads.md).
    """
    return RunConfig(
        recipe="transfer.auto",
        privacy=PrivacyConfig(
            dataset_size=UNDECLARED,
            expected_batch_size=UNDECLARED,
            steps=None,
            max_grad_norm=1.0,
            target_epsilon=1.0,
            sampling="full_batch",
        ),
        model=HeadConfig(encoder=FrozenEncoderConfig(spec="patches+scattering")),
        data=DataConfig(crop_scale=(1.0, 1.0), horizontal_flip=False),
        optim=PRESETS["many_steps"].optim,
        hardware=HardwareConfig(physical_batch_size=256),
    )


def one_step() -> RunConfig:
    """One full-batch step from a head of zeros, sigmoid loss, bias -10 (figure 1b): no
    hyperparameters to choose.
    """
    return _of("one_step")


def many_steps() -> RunConfig:
    """60 to 500 full-batch steps of SGD with momentum from zeros, at a rate that follows from the
    plan (docs/heads.md).
    """
    return _of("many_steps")


def least_squares() -> RunConfig:
    """Ridge regression from one release of second moments (Mehta et al. 2023, arXiv 2211.13403)."""
    return _of("least_squares")


def feature_covariance() -> RunConfig:
    """A released covariance whitens the features, then softmax steps: DP-FC (arXiv 2211.13403), 2 +
    6 releases.
    """
    return _of("feature_covariance")


def prototypes() -> RunConfig:
    """The nearest noisy class mean, from one release: for few records and for rare classes."""
    return _of("prototypes")


def _of(head: HeadName) -> RunConfig:
    config = with_head(auto(), head)
    return RunConfig(
        f"transfer.{head}", config.privacy, config.model, config.data, config.optim, config.hardware
    )
