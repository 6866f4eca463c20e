"""Every recipe's loss on fake CUDA tensors, at its full size: no device is needed, nothing is
computed, and mixed devices raise.

Fake tensors know shapes, types and devices only, so ``.item()`` and CUDA's autocast do not work
here: float32, forward pass.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from dpvision.config import HeadConfig, RunConfig, TimmConfig, to_dict
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.per_record import LossModule, prefixed
from dpvision.models import make_model
from dpvision.recipes import RECIPES
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.step import to_device

CUDA = torch.device("cuda", 0)


def distinct() -> dict[str, RunConfig]:
    """The first recipe of each network, size and number of views."""
    found: dict[str, tuple[str, RunConfig]] = {}
    for name, make in RECIPES.items():
        config = make()
        if not isinstance(config.model, HeadConfig):
            found.setdefault(
                json.dumps([to_dict(config)["model"], config.data.views], sort_keys=True),
                (name, config),
            )
    return dict(found.values())


SUBJECTS = distinct()


def losses(config: RunConfig, loss_fn: Any, *, left_behind: str = "") -> Tensor:
    """Losses of two records on fake CUDA tensors; ``left_behind`` is the name of a parameter or
    buffer that stays on the CPU.
    """
    assert not isinstance(config.model, HeadConfig)
    # timm calls .item() on tensors that it makes while it builds a network.
    with torch.device("meta") if isinstance(config.model.encoder, TimmConfig) else FakeTensorMode():
        model = make_model(config.model, config.seed)
    tensors = {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert not left_behind or left_behind in tensors
    with FakeTensorMode():
        moved = {
            name: torch.empty(t.shape, dtype=t.dtype, device="cpu" if name == left_behind else CUDA)
            for name, t in tensors.items()
        }
        batch = Batch._make(
            None if t is None else torch.empty_like(t, device=CUDA)
            for t in example_batch(config, 2)
        )
        return functional_call(LossModule(loss_fn, model), prefixed(moved), (batch, StepKey(0, 0)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("vip.nano", "dpcap.tiny") else pytest.mark.slow)
        for n in SUBJECTS
    ],
)
def test_no_recipes_loss_mixes_devices(name: str) -> None:
    config = SUBJECTS[name]
    loss_B = losses(config, loss_function(config))
    assert loss_B.device.type == "cuda" and loss_B.shape == (2,) and loss_B.dtype == torch.float32


def on_images(loss_fn: Any, fault: Any) -> Any:
    def faulty(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return loss_fn(model, batch._replace(image_BVCHW=fault(batch.image_BVCHW)), key)

    return faulty


@pytest.mark.parametrize("fault", ["mask", "constant", "generator", "buffer"])
def test_a_planted_fault_is_found(fault: str) -> None:
    config = RECIPES["vip.nano"]()
    faults = {
        "mask": lambda x: torch.where(torch.ones(x.shape[-1]) > 0, x, 0.0),
        "constant": lambda x: x - torch.tensor([0.5, 0.4, 0.3])[:, None, None],
        "generator": lambda x: x + torch.randn(x.shape, generator=torch.Generator()),
        "buffer": lambda x: x,
    }
    loss_fn = on_images(loss_function(config), faults[fault])
    with pytest.raises(RuntimeError, match=r"device"):
        losses(config, loss_fn, left_behind="decoder_position_LD" if fault == "buffer" else "")


def test_the_device_of_a_batch_is_the_one_asked_for() -> None:
    """``to_device`` pins for CUDA only, and moves every tensor."""
    with FakeTensorMode():
        batch = example_batch(RECIPES["dpcap.tiny"](), 2)
        assert all(
            t is None or t.device.type == "meta" for t in to_device(batch, torch.device("meta"))
        )
