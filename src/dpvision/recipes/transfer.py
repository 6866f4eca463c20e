"""DP transfer: a public encoder adapted to private images with labels (Mehta et al., TMLR 2022),
whole or its last layer.

At the paper's scale: ``torchrun --nproc-per-node 8 -m dpvision train transfer.pretrain_vit_b16
--data PUBLIC``, then the same with ``transfer.vit_b16 --data STORE``, which starts from it; or
``--init-from timm:vit_base_patch16_224.augreg_in21k`` with published weights. The paper's private
set is ImageNet-1K, epsilon 10 at delta 1e-6. It accounts by RDP; here the noise is calibrated by
the tighter PLD. The tables' other rows are in transfer_tables.py; one full-batch step on frozen
features, its best result, is transfer.one_step.

Steps are epochs x N / batch, rounded; 0.25 epochs of warm-up likewise. The paper states neither the
best rates nor LAMB's eps nor the area of the crops; docs/departures.md has the values here, and all
that differs from the paper.
"""

from collections.abc import Callable
from dataclasses import replace

from dpvision.config import (
    LAMB_EPS,
    ClassifierConfig,
    DataConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    TimmConfig,
)

RECORDS = 1_281_167
BATCH = 2**20
EPOCHS = 10
_WARMUP_EPOCHS = 0.25
ENCODERS = {
    "vit_b16": "vit_base_patch16_224",
    "vit_l16": "vit_large_patch16_224",
    "vit_h14": "vit_huge_patch14_224",
    "vit_h14_4b": "vit_huge_patch14_224",
    "r50x4": "resnetv2_50x4_bit",
    "r152x4": "resnetv2_152x4_bit",
}
"""The paper's models by timm's names; ViT-H/14-4b is ViT-H/14 with another pre-training."""
_MEAN = _STD = (0.5, 0.5, 0.5)  # pixels from -1 to 1, as these models expect

LAMB = OptimConfig(
    name="lamb",
    learning_rate=0.01,
    betas=(0.9, 0.999),
    eps=LAMB_EPS,
    weight_decay=0.0,
    schedule="linear",
    pretrained_multiplier=0.01,
)
"""Table 7: rates from 1e-4 to 1, multipliers from 1 to 1e-5; linear decay."""
MOMENTUM = {
    "name": "sgd",
    "learning_rate": 1.6,
    "schedule": "cosine",
    "pretrained_multiplier": 1.0,
    "betas": OptimConfig.betas,
    "eps": OptimConfig.eps,
}
"""Changes for SGD with momentum 0.9. Table 6: rates from 0.03 to 102.4 and no multiplier; cosine
decay.
"""


def steps(epochs: float, batch: int) -> int:
    """Number of steps in ``epochs``, at least one."""
    return max(1, round(epochs * RECORDS / batch))


def warmup_steps(batch: int) -> int:
    """A quarter of an epoch."""
    return round(_WARMUP_EPOCHS * RECORDS / batch)


def encoder(model: str, image_size: int = 384) -> TimmConfig:
    """The encoder of one of the paper's models."""
    return TimmConfig(name=ENCODERS[model], image_size=image_size)


def whole(model: str) -> RunConfig:
    """A whole model trained with DP-LAMB at batch 2^20 (Tables 2 and 3)."""
    return RunConfig(
        recipe=f"transfer.{model}",
        privacy=PrivacyConfig(
            dataset_size=RECORDS,
            expected_batch_size=BATCH,
            steps=steps(EPOCHS, BATCH),
            max_grad_norm=1.0,
            target_epsilon=10.0,
            delta=1e-6,
            delta_for=RECORDS,
        ),
        model=ClassifierConfig(
            encoder=encoder(model),
            num_classes=1000,
            head_init="zero",
            head_bias=-10.0,
            train_head_bias=False,
            loss="sigmoid",
            pooling="own",
        ),
        data=DataConfig(resize=448, crop_scale=(0.05, 1.0), mean=_MEAN, std=_STD),
        optim=LAMB,
        init_from=f"runs/transfer.pretrain_{model}",
    )


def last(model: str) -> RunConfig:
    """The same with only the last layer trained; the frozen encoder encodes every view anew, as in
    the paper.
    """
    config = whole(model)
    assert isinstance(config.model, ClassifierConfig)
    return replace(
        config,
        recipe=f"transfer.{model}_last",
        model=replace(config.model, tuned="head"),
        optim=replace(config.optim, pretrained_multiplier=1.0),
    )


_TITLES = {
    "vit_b16": "ViT-B/16",
    "vit_l16": "ViT-L/16",
    "vit_h14": "ViT-H/14",
    "vit_h14_4b": "ViT-H/14 from 4 billion images",
    "r50x4": "ResNet-50x4 (BiT)",
    "r152x4": "ResNet-152x4 (BiT)",
}
_SCORES = {
    "vit_b16": (71.1, 70.6), "r50x4": (70.1, 68.8), "r152x4": (72.9, 72.9),
    "vit_l16": (77.4, 77.3), "vit_h14": (80.1, 80.0), "vit_h14_4b": (81.0, 81.0),
}  # fmt: skip
"""ImageNet top-1 at batch 2^20 with privacy, whole and last layer (Tables 2 and 3)."""


def _functions() -> dict[str, Callable[[], RunConfig]]:
    def function(make: Callable[[str], RunConfig], model: str, doc: str) -> Callable[[], RunConfig]:
        def recipe() -> RunConfig:
            return make(model)

        recipe.__doc__ = doc
        return recipe

    made = {}
    for model, (whole_score, last_score) in _SCORES.items():
        title, table = _TITLES[model], 2 if model in ("vit_b16", "r50x4") else 3
        made[f"transfer.{model}"] = function(
            whole,
            model,
            f"{title} whole, DP-LAMB, batch 2^20, epsilon 10 (Table {table}): {whole_score}%.",
        )
        made[f"transfer.{model}_last"] = function(
            last, model, f"{title}, last layer, as transfer.{model} (Table {table}): {last_score}%."
        )
    return made


RECIPES = _functions()
"""Base recipes: each model, whole and last layer."""
