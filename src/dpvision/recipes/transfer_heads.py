"""Private heads on frozen features of a public encoder: the cheapest DP transfer (Mehta et al.
2022; docs/adapt.md, docs/heads.md).

    dpvision adapt --data stores/mine --num-classes 10 --dataset-size 20000 --epsilon 1

The numbers of records and classes must be declared: dataset_size=1 means not declared yet, and is
refused. Batches are full: every record is in every release, so that T releases with noise sigma
sqrt(T) cost the same as one with noise sigma.
"""

from collections.abc import Callable

from dpvision.config import (
    DataConfig,
    FrozenEncoderConfig,
    HardwareConfig,
    HeadConfig,
    PrivacyConfig,
    RunConfig,
)
from dpvision.config.heads import HEADS
from dpvision.config.resolve import with_head

UNDECLARED = 1


def auto(name: str = "auto") -> RunConfig:
    """The head chosen by the declared numbers of records and classes, epsilon and feature
    dimension; prints the reason (docs/heads.md).
    """
    return RunConfig(
        recipe=f"transfer.{name}",
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
        optim=HEADS["many_steps"].optim,
        hardware=HardwareConfig(physical_batch_size=256),
    )


def _recipe(head: str) -> Callable[[], RunConfig]:
    def recipe() -> RunConfig:
        return with_head(auto(head), head)

    recipe.__doc__ = HEADS[head].summary
    return recipe


RECIPES = {"transfer.auto": auto} | {f"transfer.{head}": _recipe(head) for head in HEADS}
"""One recipe for each head, and one that chooses."""
