"""Several views of a record are rows of one batch: which belong to which record, also where no
record changes them (an expanded token).
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from per_record_loop import clipped_sum_loop, flat
from torch import nn

from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossDecoderConfig,
    DataConfig,
    MAEConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.dp.route import make_route
from dpvision.models import make_model
from dpvision.train.objectives import example_batch, loss_function

VIT = ViTConfig(image_size=16, patch_size=8, depth=1, width=8, num_heads=2)
MODELS = {
    "class token": MAEConfig(encoder=VIT, decoder_depth=1, decoder_width=8, decoder_num_heads=2),
    "FiLM": ClassifierConfig(encoder=VIT, num_classes=3, tuned="film"),
    "hidden words": CaptionerConfig(
        encoder=VIT,
        decoder=CrossDecoderConfig(depth=1, width=8, num_heads=2),
        vocab_size=20,
        num_tokens=6,
        parallel_rate=0.75,
    ),
}
SEEDS = {"hidden words": (0, 1, 2, 6, 7, 9, 11)}
"""Which captions are predicted at once depends on the key: the first key for each choice of two or
three views that the keys of 0 to 11 make.
"""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("views", [2, 3])
def test_no_parameter_is_slow_for_several_views_and_sums_are_those_of_single_records(
    name: str, views: int
) -> None:
    privacy = PrivacyConfig(dataset_size=100, expected_batch_size=10, steps=2, noise_multiplier=1.0)
    config = RunConfig(
        recipe="x", privacy=privacy, model=MODELS[name], data=DataConfig(views=views)
    )
    model, loss_fn = make_model(config.model, 0).double(), loss_function(config)
    for seed in SEEDS.get(name, range(1)):
        batch, key = example_batch(replace(config, seed=seed)), StepKey(seed, 0)
        batch = batch._replace(image_BVCHW=batch.image_BVCHW.double())
        assert make_route(loss_fn, model, batch, key).slow == {}
        total = clipped_sum(loss_fn, model, batch, key, max_grad_norm=0.2)
        expected, norms, _ = clipped_sum_loop(loss_fn, model, batch, key, 0.2)
        assert (flat(total.grads) - flat(expected)).norm() <= 1e-12 * len(norms)


class ViewsFirst(nn.Module):
    """A token for every view: the first views of all records, then the second; ``swap`` brings them
    into the order of the images.
    """

    def __init__(self, *, swap: bool) -> None:
        super().__init__()
        self.token, self.body, self.head, self.swap = (
            nn.Parameter(torch.randn(1, 6)),
            nn.Linear(192, 6),
            nn.Linear(6, 5),
            swap,
        )

    def forward(self, x_BVD: torch.Tensor) -> torch.Tensor:
        num, views = x_BVD.shape[:2]
        weight = torch.arange(1, views + 1, dtype=x_BVD.dtype)[:, None, None]
        token = self.token.expand(views * num, -1)
        if self.swap:
            y_BVD = (token.unflatten(0, (views, num)) * weight).transpose(0, 1) + torch.tanh(
                self.body(x_BVD)
            )
        else:
            y = token + torch.tanh(self.body(x_BVD.transpose(0, 1).flatten(0, 1)))
            y_BVD = (y.unflatten(0, (views, num)) * weight).transpose(0, 1)
        return self.head(y_BVD.tanh().mean(1))


@pytest.mark.parametrize("swap", [True, False])
def test_tokens_in_another_order_than_the_images_are_right(swap: bool) -> None:
    """Rows assumed to lie side by side would go to other records, and the clip would miss its
    bound.
    """
    torch.manual_seed(3)
    model = ViewsFirst(swap=swap).double()
    generator = torch.Generator().manual_seed(5)
    config = RunConfig(
        recipe="x",
        privacy=PrivacyConfig(
            dataset_size=100, expected_batch_size=10, steps=2, noise_multiplier=1.0
        ),
        model=ClassifierConfig(encoder=VIT, num_classes=5),
        data=DataConfig(views=2),
    )
    batch = example_batch(config)
    batch = batch._replace(
        image_BVCHW=torch.randn(4, 2, 3, 8, 8, generator=generator, dtype=torch.float64)
    )

    def losses(model: nn.Module, batch, key):
        return F.cross_entropy(model(batch.image_BVCHW.flatten(2)), batch.label_B, reduction="none")

    total = clipped_sum(losses, model, batch, StepKey(0, 0), max_grad_norm=0.2)
    expected, norms, _ = clipped_sum_loop(losses, model, batch, StepKey(0, 0), 0.2)
    assert (flat(total.grads) - flat(expected)).norm() <= 1e-12 * len(norms)
