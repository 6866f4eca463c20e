"""Attacks by the records beside a record: models and losses that no check on a few random records
can tell from one that takes every record for itself.

In each, one record moved the sum by more than C, or the norms at a layer were those of other
records, before the records were followed from call to call (``dp.record_flow``).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision import clipped_sum
from dpvision.data.batch import Batch, HostRows
from dpvision.data.keys import StepKey
from dpvision.dp import route, separable
from dpvision.dp.clip import ClippedSum
from dpvision.dp.separable import check_separable
from dpvision.errors import PrivacyError
from dpvision.models import make_model
from dpvision.recipes import RECIPES
from dpvision.train.objectives import example_batch, loss_function

KEY, NUM, WIDTH, CLASSES = StepKey(0, 0), 12, 6, 3
Forward = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A layer by ``forward(model, x_B2D, key_B)``, and a head."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.path = forward

    def forward(self, x_B2D: Tensor, key_B: Tensor) -> Tensor:
        return self.head(self.path(self, x_B2D, key_B).mean(1))


def loss_fn(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """The rows are sorted by whether the label is 2, which no random record has."""
    assert batch.label_B is not None
    out = model(batch.image_BVCHW[:, 0, 0], (batch.label_B >= 2).long())
    return F.cross_entropy(out, batch.label_B, reduction="none") * 3


def records(num: int = NUM) -> Batch:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM, 1, 3, 2, WIDTH, generator=generator)
    x *= torch.exp(2 * torch.randn(NUM, 1, 1, 1, 1, generator=generator))
    label = torch.randint(0, CLASSES, (NUM,), generator=generator)
    return Batch(
        torch.arange(1, num + 1), torch.ones(num, dtype=torch.bool), x[:num], None, label[:num]
    )


def summed(model: nn.Module, loss: Any, batch: Batch, **settings: Any) -> ClippedSum:
    return clipped_sum(loss, model, batch, KEY, max_grad_norm=1.0, rows=16, **settings)


def off(a: ClippedSum, b: ClippedSum) -> float:
    """How far two sums are apart."""
    return float(
        sum((a.grads[n].double() - b.grads[n].double()).square().sum() for n in a.grads) ** 0.5
    )


def indexed(model: Model, x: Tensor, key: Tensor) -> Tensor:
    order = key.argsort(stable=True)
    return model.layer(x[order])[order.argsort()]


def selected(model: Model, x: Tensor, key: Tensor) -> Tensor:
    order = key.argsort(stable=True)
    return model.layer(x.index_select(0, order)).index_select(0, order.argsort())


def gathered(model: Model, x: Tensor, key: Tensor) -> Tensor:
    order = key.argsort(stable=True)
    h = model.layer(x.gather(0, order[:, None, None].expand_as(x)))
    return h.gather(0, order.argsort()[:, None, None].expand_as(h))


def scattered(model: Model, x: Tensor, key: Tensor) -> Tensor:
    order = key.argsort(stable=True)
    h = model.layer(x[order])
    return torch.zeros_like(h).scatter(0, order[:, None, None].expand_as(h), h)


def written(model: Model, x: Tensor, key: Tensor) -> Tensor:
    order = key.argsort(stable=True)
    h = model.layer(x[order])
    out = torch.zeros_like(h)
    out[order] = h
    return out


def taken(model: Model, x: Tensor, key: Tensor) -> Tensor:
    order = key.sort(stable=True).indices
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    h = model.layer(torch.take_along_dim(x, order[:, None, None], 0))
    return torch.take_along_dim(h, back[:, None, None], 0)


def rolled(model: Model, x: Tensor, key: Tensor) -> Tensor:
    """By nothing, where there are three records."""
    return model.layer(x.roll(len(x) - 3, 0)).roll(3 - len(x), 0)


def multiplied(model: Model, x: Tensor, key: Tensor) -> Tensor:
    order_BB = F.one_hot(key.argsort(stable=True), len(key)).to(x.dtype)
    h = model.layer((order_BB @ x.flatten(1)).view_as(x))
    return (order_BB.mT @ h.flatten(1)).view_as(h)


def listed(model: Model, x: Tensor, key: Tensor) -> Tensor:
    order = key.argsort(stable=True)
    back = order.argsort().tolist()
    return model.layer(x[order.tolist()])[back]


@pytest.mark.parametrize(
    "path",
    [indexed, selected, gathered, scattered, written, taken, rolled, multiplied, listed],
)
def test_rows_in_another_order_are_clipped_one_by_one_or_refused(path: Forward) -> None:
    """Place r of the layer held another record: its inputs, with the norms and factors of row r."""
    batch = records()
    wanted = sum_by_hand(path, batch)
    try:
        total = summed(Model(path), loss_fn, batch)
    except PrivacyError:
        return
    assert off(total, wanted) < 1e-4


def sum_by_hand(path: Forward, batch: Batch) -> ClippedSum:
    """The sum by the reference, of a model of the same losses that leaves the rows in place."""
    return summed(Model(lambda model, x, key: model.layer(x)), loss_fn, batch, method="vmap")


def test_sorted_rows_are_trained_all_the_same() -> None:
    """They go through ``vmap``, and nothing is refused."""
    assert off(summed(Model(indexed), loss_fn, records()), sum_by_hand(indexed, records())) < 1e-4


def masked(model: Model, x: Tensor, key: Tensor) -> Tensor:
    h = model.layer(x) * 1.0
    h[x > 1.0] = 0.0
    return h


@pytest.mark.parametrize(
    "path",
    [
        lambda model, x, key: model.layer(x)[:, [1, 0]],
        lambda model, x, key: model.layer(x.flip(1)).roll(1, dims=1),
        lambda model, x, key: model.layer(x.gather(1, x.argsort(1))).sort(dim=2).values,
        lambda model, x, key: model.layer(x)[torch.arange(len(x))[:, None], x.argmax(2) % 2],
        lambda model, x, key: torch.cat([model.layer(x[:, :1]), x[:, 1:]], 1),
        lambda model, x, key: model.layer(x).transpose(0, 1).softmax(2).transpose(0, 1),
        lambda model, x, key: torch.where(key[:, None, None] == 0, model.layer(x), x),
        masked,
    ],
    ids=["list", "flip", "gather", "arange", "cat", "softmax", "where", "mask"],
)
def test_rows_that_stay_in_place_keep_their_rules(path: Forward) -> None:
    model, batch = Model(path), records()
    assert not route.make_route(loss_fn, model, batch, KEY).slow


def mean_of_guarded(model: nn.Module, batch: Batch) -> Tensor:
    return F.softplus(-model(batch.image_BVCHW[:, 0, 0], batch.label_B)).mean(1)


def finite(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    loss_B = mean_of_guarded(model, batch)
    return torch.where(torch.isfinite(loss_B).all(), loss_B, torch.zeros_like(loss_B))


def no_nan(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    loss_B = mean_of_guarded(model, batch)
    return loss_B * (0.0 if bool(torch.isnan(loss_B).any()) else 1.0)


def scaled(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    x = batch.image_BVCHW
    return mean_of_guarded(model, batch._replace(image_BVCHW=x / (255.0 if x.max() > 20 else 1.0)))


def scaled_tensor(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    x = batch.image_BVCHW
    return mean_of_guarded(model, batch._replace(image_BVCHW=x / x.max().clamp(min=20.0)))


def without_class(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    assert batch.label_B is not None
    return mean_of_guarded(model, batch) * (1.0 - (batch.label_B == 2).any().float())


def one_class(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    assert batch.label_B is not None
    return mean_of_guarded(model, batch) * (batch.label_B != batch.label_B[0]).any()


def far_class(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Beyond the classes that the check tries."""
    assert batch.label_B is not None
    return mean_of_guarded(model, batch) * (1.0 - (batch.label_B == 1000).any().float())


def read_item(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    most = batch.image_BVCHW.abs().max().item()
    return mean_of_guarded(model, batch) * (0.0 if most > 1e4 else 1.0)


def odd_steps(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    loss_B = mean_of_guarded(model, batch)
    return loss_B if key.step % 2 == 0 else loss_B * loss_B.mean().detach()


def in_place(model: Model, x: Tensor, key: Tensor) -> Tensor:
    return model.layer(x)


DECIDING = [finite, no_nan, scaled, scaled_tensor, without_class, one_class, odd_steps]


@pytest.mark.parametrize("loss", [*DECIDING, far_class, read_item])
@pytest.mark.parametrize("checked", [True, False])
def test_no_record_decides_what_others_give(loss: Any, checked: bool) -> None:
    """By a value that random records never have. Refused by the check before a run, and without it
    by the pass; ``odd_steps`` at step 0 is right.
    """
    if not checked and loss is odd_steps:
        return
    with pytest.raises(PrivacyError, match=r"mixes records|in Python"):
        summed(Model(in_place), loss, records(), check_separability=checked)


@pytest.mark.parametrize("loss", DECIDING)
def test_the_check_sees_hostile_records(loss: Any) -> None:
    batch = separable.random_records(records(), 3)
    with pytest.raises(PrivacyError, match="mixes records"):
        check_separable(loss, Model(in_place), batch, KEY, separable._OTHER_STEPS)


@pytest.mark.parametrize("step", [1, 3, 997, 2**20 + 1])
def test_the_check_looks_at_odd_and_spread_steps(step: int) -> None:
    """It looked at steps 0 and 2^20 only."""

    def at_step(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        loss_B = mean_of_guarded(model, batch)
        return loss_B * loss_B.mean().detach() if key.step == step else loss_B

    batch = separable.random_records(records(), 3)
    with pytest.raises(PrivacyError, match="mixes records"):
        check_separable(at_step, Model(in_place), batch, KEY, separable._OTHER_STEPS)


def test_a_classs_images_alone_do_not_hide_mixing() -> None:
    """Labels that all records share were rolled, which changed nothing."""
    batch = records(3)
    batch = batch._replace(label_B=torch.ones(3, dtype=torch.long))
    with pytest.raises(PrivacyError, match="mixes records"):
        check_separable(one_class, Model(in_place), batch, KEY)


def test_rows_of_another_batch_decide_nothing() -> None:
    """``host=`` of the batch before made padding rows count: record 3 gave 9.95 C."""
    batch = records()
    host = HostRows(batch.record_id_B, batch.valid_B)
    ids = torch.tensor([1, 2, 3] + [3] * (NUM - 3))
    padded = batch._replace(record_id_B=ids, valid_B=torch.arange(NUM) < 3)
    with pytest.raises(PrivacyError, match="host= has other ids"):
        summed(Model(in_place), loss_fn, padded, host=host)
    with pytest.raises(PrivacyError, match="host= has other ids"):
        summed(Model(in_place), loss_fn, padded, host=HostRows(ids[:3], padded.valid_B[:3]))
    own = HostRows(padded.record_id_B, padded.valid_B)
    a, b = (summed(Model(in_place), loss_fn, padded, host=h) for h in (own, None))
    assert a.num_records == 3 and off(a, b) == 0


def mixed(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(0)


def limited(gradient: Tensor) -> Tensor:
    """Mixes records only where their gradients are long, which those of random records are not."""
    return gradient * (30.0 / gradient.norm()).clamp(max=1.0)


def hooked_tensor(hook: Any) -> Forward:
    def path(model: Model, x: Tensor, key: Tensor) -> Tensor:
        h = model.layer(x)
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return path


@pytest.mark.parametrize("hook", [mixed, limited])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("place", ["tensor", "full", "before", "everywhere"])
def test_a_backward_hook_that_may_mix_records_is_refused_by_name(
    hook: Any, checked: bool, place: str
) -> None:
    """``limited`` on a tensor was accepted, since random records do not reach its limit; one long
    gradient then shrank eleven others: 9.2 C. A layer's hook ended in an exception of ``dp``'s own.
    """
    model, where = Model(in_place), r"layer 'layer' \(Linear\)"
    handle = None
    if place == "tensor":
        model, where = Model(hooked_tensor(hook)), "a tensor of the forward pass"
    elif place == "full":
        model.layer.register_full_backward_hook(lambda _layer, into, _out: (hook(into[0]),))
    elif place == "before":
        model.layer.register_full_backward_pre_hook(lambda _layer, out: (hook(out[0]),))
    else:
        where = r"layer '' \(Model\)"
        handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    name = hook.__name__ if place == "tensor" else "<lambda>"
    try:
        with pytest.raises(PrivacyError, match=f"{where} has the backward hook .*{name}; expected"):
            summed(model, loss_fn, records(), check_separability=checked)
    finally:
        if handle is not None:
            handle.remove()


def test_a_parameters_own_hook_sees_no_gradient_of_records() -> None:
    """As of a logger that watches gradients: the sum is that of the model without it."""
    seen: list[Tensor] = []
    model = Model(in_place)
    plain = summed(model, loss_fn, records())
    for p in model.parameters():
        p.register_hook(seen.append)
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    assert off(summed(model, loss_fn, records()), plain) == 0 and not seen
    assert all(p.grad is None for p in model.parameters())


def test_calls_that_only_a_pass_with_gradients_makes_are_refused() -> None:
    def path(model: Model, x: Tensor, key: Tensor) -> Tensor:
        h = model.layer(x)
        return h * 1.0 if torch.is_grad_enabled() else h

    with pytest.raises(PrivacyError, match="with gradients, and did otherwise without"):
        summed(Model(path), loss_fn, records())


def one_attention(x: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=mask)[0]


@torch.library.custom_op("attacks::view", mutates_args=())
def _joined(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True).expand_as(x).clone()


@torch.library.custom_op("attacks::whole", mutates_args=())
def _joined_if_whole(x: Tensor) -> Tensor:
    assert torch.equal(x, x.round())
    return x.sum(0, keepdim=True).expand_as(x).clone()


@torch.library.custom_op("attacks::into", mutates_args=("out",))
def _joined_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sum(0, keepdim=True))


def one_hot(batch: Batch) -> Tensor:
    assert batch.label_B is not None
    return F.one_hot(batch.label_B, CLASSES).float()


JOINING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention over records": lambda x, on: one_attention(x),
    "convolution along records": lambda x, on: (
        F.conv1d(x.T[:, None], torch.ones(1, 1, 3, dtype=x.dtype), padding=1)[:, 0].T
    ),
    "pooling along records": lambda x, on: F.avg_pool1d(x.T[None], 3, 1, 1)[0].T,
    "product with a matrix of records": lambda x, on: torch.ones(len(x), len(x), dtype=x.dtype) @ x,
    "normalised over records": lambda x, on: F.layer_norm(x, tuple(x.shape)),
    "groups over records": lambda x, on: F.group_norm(x[None], 1)[0],
    "Fourier transform of records": lambda x, on: torch.fft.fft(x, dim=0).real,
    "orthogonal columns": lambda x, on: torch.linalg.qr(x[:, :1])[0],
    "differences of records": lambda x, on: x.diff(dim=0, prepend=torch.zeros_like(x[:1])),
    "quantiles, refused beyond [0, 1]": lambda x, on: torch.quantile(
        x.detach(), x[:, 0].sigmoid(), dim=0
    ),
    "product of integers": lambda x, on: (
        torch.ones(len(x), len(x), dtype=torch.long) @ (x > 1).long()
    ).to(x.dtype),
    "Fourier transform of complex numbers": lambda x, on: (
        torch.fft.fft(torch.complex(x, x), dim=0).real
    ),
    "kernel": lambda x, on: (
        F.conv1d(
            x.T[:, None],
            torch.where(on, torch.ones(3), torch.eye(3)[1]).to(x.dtype)[None, None],
            padding=1,
        )[:, 0].T
    ),
    "matrix": lambda x, on: torch.where(on, 1.0, torch.eye(len(x), dtype=x.dtype)) @ x,
    "mask": lambda x, on: one_attention(x, on | torch.eye(len(x), dtype=torch.bool)),
}


@pytest.mark.parametrize("name", JOINING)
def test_a_layer_over_records_that_a_weight_switches_on_reaches_no_other_record(name: str) -> None:
    """No record that is tried at first shows it: up to 22.6 C, once a weight had passed 5. The
    kernel, the matrix and the mask join nothing before.
    """

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

    path = JOINING[name]

    def losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        x = batch.image_BVCHW[:, 0, 0, 0]
        on = model.layer.weight[0, 0].detach() > 5
        out_B, joined = model.layer(x)[:, 0], path(x * 1.0, on)[:, 0].detach()
        return 1e3 * out_B * torch.where(on, joined, torch.ones_like(out_B))

    model = Switched()
    for weight in (0.5, 6.0):
        with torch.no_grad():
            model.layer.weight[0, 0] = weight
        assert off(*(summed(model, losses, records(num)) for num in (NUM, NUM - 1))) <= 1.0
    params = dict(model.named_parameters())
    assert route.route_of(losses, model, records(), KEY).slow.keys() == params.keys()


def written(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    torch.ops.attacks.into(x, out)
    return out


@pytest.mark.parametrize(
    "operator", [written, torch.ops.attacks.view, lambda x: torch.ops.attacks.whole(x.round())]
)
@pytest.mark.parametrize("method", ["one_pass", "vmap"])
def test_an_operator_that_is_not_of_pytorch_is_refused(operator: Any, method: str) -> None:
    """Named as a view, refusing the numbers of a trial, or returning none: what it writes."""

    def path(model: Model, x: Tensor, key: Tensor) -> Tensor:
        return model.layer(x) * operator(x).detach()

    with pytest.raises(PrivacyError, match="an operator that is not PyTorch's own"):
        summed(Model(path), loss_fn, records(), check_separability=False, method=method)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, batch: F.binary_cross_entropy(out.sigmoid(), one_hot(batch), reduction="none"),
        lambda out, batch: torch.logdet(out[:, :, None] * out[:, None] + torch.eye(CLASSES)),
        lambda out, batch: torch.linalg.cholesky(out[:, :, None] * out[:, None] + torch.eye(3)),
        lambda out, batch: F.cross_entropy(out[:, :1], batch.label_B * 0, reduction="none"),
    ],
    ids=["probabilities", "determinant", "cholesky", "one class"],
)
def test_a_call_that_refuses_random_numbers_is_tried_on_its_own_kind(loss: Any) -> None:
    def losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        own = loss(model(batch.image_BVCHW[:, 0, 0], batch.label_B), batch)
        return own.reshape(len(own), -1).sum(1)

    assert not route.make_route(losses, Model(in_place), records(), KEY).slow


def test_models_of_this_package_are_not_taken_for_such() -> None:
    """Attention, convolutions and norms over a record's own places keep their rules."""
    for name in ("vip.micro", "dpcap.micro", "supervised.micro"):
        config = RECIPES[name]()
        model, loss = make_model(config.model, 0), loss_function(config)
        assert not route.route_of(loss, model, example_batch(config), KEY).slow
