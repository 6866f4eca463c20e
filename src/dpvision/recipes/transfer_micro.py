"""Transfer for small experiments: vip.micro's encoder adapted to 32 px images in ten classes by
every tuning method, minutes on a laptop.

    dpvision train synthetic.vip_micro
    dpvision train transfer.micro_film --data stores/mine

Not in the paper. All rows have one epsilon and the same number of sample-gradients. Rates come from
rules of thumb and one public trial (CIFAR-10, docs/transfer.md): 1e-2 for parameters that start at
zero, a tenth of it for pretrained ones; nothing was chosen by looking at a private store.
"""

from dpvision.config import (
    ClassifierConfig,
    DataConfig,
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
)
from dpvision.recipes import vip
from dpvision.recipes.variation import Variation

_NEW = {"pretrained_multiplier": 1.0}
"""For runs whose trained parameters are all new, or few."""


def micro() -> RunConfig:
    """The whole of vip.micro's encoder and a head from zeros: 50,000 images, epsilon 8, 150,000
    sample-gradients.
    """
    parent = vip.micro().model
    assert isinstance(parent, MAEConfig)
    return RunConfig(
        recipe="transfer.micro",
        privacy=PrivacyConfig(
            dataset_size=50_000,
            expected_batch_size=2500,
            steps=60,
            max_grad_norm=1.0,
            target_epsilon=8.0,
        ),
        model=ClassifierConfig(encoder=parent.encoder, num_classes=10),
        data=DataConfig(crop_scale=(0.6, 1.0)),
        optim=OptimConfig(
            learning_rate=1e-2,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            schedule="linear",
            warmup_steps=3,
            pretrained_multiplier=0.1,
        ),
        hardware=HardwareConfig(physical_batch_size=250),
        init_from="runs/synthetic.vip_micro",
    )


VARIATIONS: dict[str, Variation] = {
    "transfer.micro_head": Variation(
        "transfer.micro, the head alone.", micro, model={"tuned": "head"}, optim=_NEW
    ),
    "transfer.micro_last_block": Variation(
        "transfer.micro, the last block and the head.", micro, model={"tuned": "last_blocks"}
    ),
    "transfer.micro_lora": Variation(
        "transfer.micro, LoRA of rank 4 on attention, and the head.",
        micro,
        model={"tuned": "lora", "lora_rank": 4},
        optim=_NEW,
    ),
    "transfer.micro_film": Variation(
        "transfer.micro, FiLM after the norms, and the head.",
        micro,
        model={"tuned": "film"},
        optim=_NEW,
    ),
    "transfer.micro_biases": Variation(
        "transfer.micro, biases and the head.", micro, model={"tuned": "biases"}, optim=_NEW
    ),
    "transfer.micro_average": Variation(
        "transfer.micro with the mean of its iterates (algorithm 1).",
        micro,
        optim={"average": True},
    ),
}
