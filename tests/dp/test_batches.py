"""What a loss function gets and returns: the batch must stay as it is, and every record has a loss
of its own.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.dp.per_record import per_record_gradients
from dpvision.dp.support import check_exact
from dpvision.errors import PrivacyError

KEY = StepKey(0, 0)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 5))


def make_batch(num: int) -> Batch:
    image = torch.randn(num, 1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(
        torch.arange(num), torch.ones(num, dtype=torch.bool), image, None, torch.arange(num) % 5
    )


def in_place(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return F.cross_entropy(
        model(batch.image_BVCHW[:, 0].sub_(0.5).div_(0.25)), batch.label_B, reduction="none"
    )


def own_copy(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return F.cross_entropy(
        model(batch.image_BVCHW[:, 0].clone().sub_(0.5).div_(0.25)), batch.label_B, reduction="none"
    )


def averaged(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return F.cross_entropy(model(batch.image_BVCHW[:, 0]), batch.label_B)


def column(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return F.cross_entropy(model(batch.image_BVCHW[:, 0]), batch.label_B, reduction="none")[:, None]


def passes(loss_fn: Callable[..., Tensor], num: int) -> list[Callable[[], object]]:
    """All that read a batch through a loss function."""
    model = make_model()
    params = {name: p.detach() for name, p in model.named_parameters()}
    return [
        lambda: clipped_sum(loss_fn, model, make_batch(num), KEY, max_grad_norm=1.0),
        lambda: clipped_sum(loss_fn, model, make_batch(num), KEY, max_grad_norm=1.0, method="vmap"),
        lambda: clipped_sum(loss_fn, model, make_batch(num), KEY, max_grad_norm=None),
        lambda: per_record_gradients(loss_fn, model, params, make_batch(num), KEY),
        lambda: check_exact(loss_fn, model, make_batch(num), KEY),
    ]


@pytest.mark.parametrize("num", [4, 300])
def test_a_loss_that_changes_its_batch_is_refused(num: int) -> None:
    """With more than 256 records, norms and sums came from two passes, the second over images
    normalised twice: one record moved the sum by 2.5 C.
    """
    for run in passes(in_place, num):
        with pytest.raises(
            PrivacyError, match=r"changes the batch in place; .*Write x = \(x - mean\) / std"
        ):
            run()


def test_a_loss_may_change_a_copy_and_no_record_moves_the_sum_by_more_than_the_norm() -> None:
    model, batch = make_model(), make_batch(300)
    whole = clipped_sum(own_copy, model, batch, KEY, max_grad_norm=0.1).grads
    for record in (0, 17, 299):
        less = batch._replace(
            valid_B=batch.valid_B.clone().index_fill_(0, torch.tensor([record]), False)
        )
        other = clipped_sum(own_copy, model, less, KEY, max_grad_norm=0.1).grads
        moved = torch.cat(
            [(whole[name].double() - other[name].double()).flatten() for name in whole]
        ).norm()
        assert 0.099 < moved <= 0.1


@pytest.mark.parametrize("loss_fn", [averaged, column])
def test_losses_that_are_not_one_per_record_are_refused(loss_fn: Callable[..., Tensor]) -> None:
    for run in passes(loss_fn, 6):
        with pytest.raises(
            PrivacyError, match=r"losses of shape .*; expected one per record, .*reduction='none'"
        ):
            run()
