"""The gate lets through what keeps records apart, and refuses what mixes them, with the layer's
name and the remedy.
"""

import pytest
import torch
import torch.nn.functional as F
import zoo
import zoo_layers
import zoo_tokens
from torch import nn
from zoo import KEY, class_losses, mae_losses, make_batch

from dpvision.dp.separable import check_separable
from dpvision.dp.support import check_exact
from dpvision.dp.weight_grads import Slot
from dpvision.errors import PrivacyError

MEMBERS = {**zoo.ZOO, **zoo_layers.LAYERS, **zoo_tokens.TOKENS}


def net(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))


class BatchMean(nn.Module):
    """Batch normalisation by hand: no module to recognise it by."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Shuffled(nn.Module):
    """Reads its neighbour, only a little."""

    def forward(self, x):
        return x + 1e-9 * x.roll(1, 0)


@pytest.mark.parametrize("name", MEMBERS)
def test_the_zoo_passes(name):
    build, loss_fn = MEMBERS[name]
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check_separable(loss_fn, model, make_batch(4), KEY)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state) and all(
        p.dtype == torch.float32 for p in model.parameters()
    )


@pytest.mark.parametrize(
    "norm",
    [nn.GroupNorm(2, 8), nn.LayerNorm([8, 6, 6]), nn.BatchNorm2d(8).eval(), nn.InstanceNorm2d(8)],
)
def test_norms_of_a_single_record_pass(norm):
    check_separable(class_losses, net(norm), make_batch(4), KEY)


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(8), nn.SyncBatchNorm(8), nn.BatchNorm2d(8, track_running_stats=False).eval()],
)
def test_batchnorm_is_named_with_its_remedy(norm):
    with pytest.raises(
        PrivacyError, match=r"layer '1' \(\w*BatchNorm\w*\).*GroupNorm or LayerNorm"
    ):
        check_separable(class_losses, net(norm), make_batch(4), KEY)


@pytest.mark.parametrize("layer", [BatchMean(), Shuffled()])
def test_batch_statistics_by_hand_are_measured_and_named(layer):
    with pytest.raises(
        PrivacyError, match=rf"layer '1' \({type(layer).__name__}\) mixes records.*GroupNorm"
    ):
        check_separable(class_losses, net(layer), make_batch(4), KEY)


def contrastive(model, batch, key):
    z = F.normalize(model(batch.image_BVCHW[:, 0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


def averaged_by_valid(model, batch, key):
    return class_losses(model, batch, key) / batch.valid_B.sum()


def neighbours_label(model, batch, key):
    return F.cross_entropy(model(batch.image_BVCHW[:, 0]), batch.label_B.roll(1), reduction="none")


def paired_backwards(model, batch, key):
    out = model(batch.image_BVCHW[:, 0])
    return (out * out.flip(0).detach()).sum(1)


def summed_ids(model, batch, key):
    mask = key.uniform(batch.record_id_B.sum()[None], "mask", 5)
    return (model(batch.image_BVCHW[:, 0]) * mask).sum(1)


@pytest.mark.parametrize(
    "loss_fn", [contrastive, averaged_by_valid, neighbours_label, paired_backwards, summed_ids]
)
def test_losses_that_look_at_other_records_are_refused(loss_fn):
    with pytest.raises(PrivacyError, match=r"loss function mixes records.*loss per record"):
        check_separable(loss_fn, net(), make_batch(4), KEY)


def test_mask_keyed_by_row_is_refused():
    def loss_fn(model, batch, key):
        mask = key.uniform(torch.arange(len(batch.record_id_B)), "mask", 5)
        return (model(batch.image_BVCHW[:, 0]) * mask).sum(1)

    with pytest.raises(PrivacyError, match=r"depends on its row.*record_id_B"):
        check_separable(loss_fn, net(), make_batch(4), KEY)


def test_unkeyed_random_numbers_are_refused():
    def loss_fn(model, batch, key):
        return (model(batch.image_BVCHW[:, 0]) * torch.rand(len(batch.record_id_B), 5)).sum(1)

    with pytest.raises(PrivacyError, match=r"keyed random numbers only.*StepKey"):
        check_separable(loss_fn, net(), make_batch(4), KEY)


def test_dropout_in_training_is_named():
    with pytest.raises(PrivacyError, match=r"layer '1' \(Dropout\).*StepKey"):
        check_separable(class_losses, net(nn.Dropout(0.1)), make_batch(4), KEY)
    check_separable(class_losses, net(nn.Dropout(0.1)).eval(), make_batch(4), KEY)


def test_loss_averaged_over_the_batch_is_refused():
    with pytest.raises(PrivacyError, match=r"one per record.*Do not average"):
        check_separable(
            lambda model, batch, key: class_losses(model, batch, key).mean(),
            net(),
            make_batch(4),
            KEY,
        )


def test_views_of_one_record_may_mix():
    def loss_fn(model, batch, key):
        a, b = model(batch.image_BVCHW[:, 0]), model(batch.image_BVCHW[:, 1])
        return (a - b).square().sum(1)

    check_separable(loss_fn, net(), make_batch(4, views=2), KEY)


def test_one_record_is_not_enough():
    with pytest.raises(PrivacyError, match="at least 2"):
        check_separable(mae_losses, zoo.tiny_mae(), make_batch(1), KEY)


def test_gradient_that_is_not_finite_is_not_called_mixing():
    with pytest.raises(PrivacyError, match="not finite"):
        check_separable(
            lambda model, batch, key: class_losses(model, batch, key) * float("nan"),
            net(),
            make_batch(4),
            KEY,
        )


@pytest.mark.parametrize("name", MEMBERS)
def test_the_zoo_is_exact_in_one_pass(name):
    build, loss_fn = MEMBERS[name]
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check_exact(loss_fn, model, make_batch(4), KEY)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state) and all(
        p.dtype == torch.float32 for p in model.parameters()
    )


def test_a_wrong_rule_is_found_before_the_run(monkeypatch):
    """A bias with half its gradient, in the sum as in the norm: no clip norm is exceeded, the sum
    is another one.
    """
    add_written = Slot.add_written

    def half(slot, grad_BW):
        add_written(slot, grad_BW * 0.5 if slot.names == {"two.bias"} else grad_BW)

    model = zoo_layers.Linears()
    check_exact(class_losses, model, make_batch(4), KEY)
    monkeypatch.setattr(Slot, "add_written", half)
    with pytest.raises(
        PrivacyError,
        match=r"one-pass gradients of .* differ from those of single records.*Use method='vmap'",
    ):
        check_exact(class_losses, model, make_batch(4), KEY)


class Counting(nn.Module):
    """Keeps the largest number that it has seen in a buffer, and reads it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        out = x + 0.0 * self.seen
        with torch.no_grad():
            self.seen.copy_(torch.maximum(self.seen, x.sum()))
        return out


def test_a_forward_pass_that_changes_a_buffer_is_refused_and_leaves_it_as_it_was():
    """A private run discards the change; the checks do not copy a model that is in float64."""
    model = net(Counting()).double()
    with pytest.raises(PrivacyError, match=r"changes the buffer '1\.seen'"):
        check_separable(class_losses, model, make_batch(4), KEY)
    assert model[1].seen == 0
