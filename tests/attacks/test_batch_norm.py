"""BatchNorm: by fixed statistics it is an affine map of each record, whoever wrote the layer; every
way to statistics of the batch is refused, also where it begins after the checks.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.dp.rounding import reserve
from dpvision.dp.route import make_route
from dpvision.dp.separable import check_separable
from dpvision.errors import PrivacyError

KEY, C = StepKey(0, 0), 0.5
Norms = Callable[[int], nn.Module]


class Net(nn.Module):
    """Convolution, norm, ReLU, mean, head."""

    def __init__(self, norm: nn.Module, affine: bool = True) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), norm, nn.Linear(4, 5)
        for p in norm.parameters():
            p.requires_grad_(affine)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def losses(model: nn.Module, batch: Batch, _key: StepKey) -> Tensor:
    return F.cross_entropy(model(batch.image_BVCHW[:, 0]), batch.label_B, reduction="none")


def made(norm: nn.Module, affine: bool = True) -> Net:
    """The net in training mode but for its norm, with statistics and scales unlike the first."""
    torch.manual_seed(0)
    model = Net(norm, affine)
    norm.eval()
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        for p in norm.parameters():
            p.add_(0.3 * torch.randn(4))
    return model


def records(num: int = 3) -> Batch:
    x = torch.randn(num, 1, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    valid_B = torch.ones(num, dtype=torch.bool)
    return Batch(torch.arange(1, num + 1), valid_B, x, label_B=torch.arange(num) % 5)


def by_affine_map(model: Net, batch: Batch) -> dict[str, Tensor]:
    """The clipped sum in float64, record by record, with the norm written as its affine map."""
    params = {n: p.double() for n, p in model.named_parameters() if p.requires_grad}
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    most = C * (1 - reserve(model.conv.weight.dtype))
    norm, total = model.norm, {n: torch.zeros_like(p) for n, p in leaves.items()}
    mean, var = norm.running_mean.double(), norm.running_var.double()
    weight = leaves.get("norm.weight", norm.weight.double())
    bias = leaves.get("norm.bias", norm.bias.double())
    for x, label in zip(batch.image_BVCHW[:, 0].double(), batch.label_B, strict=True):
        h = F.conv2d(x[None], leaves["conv.weight"], leaves["conv.bias"])
        h = ((h.movedim(1, -1) - mean) / (var + norm.eps).sqrt() * weight + bias).relu()
        score_BK = F.linear(h.mean((1, 2)), leaves["head.weight"], leaves["head.bias"])
        grads = torch.autograd.grad(F.cross_entropy(score_BK, label[None]), list(leaves.values()))
        size = torch.cat([g.flatten() for g in grads]).norm()
        for name, g in zip(leaves, grads, strict=True):
            total[name] += g * min(1.0, most / float(size))
    return total


KINDS: dict[str, Norms] = {
    "BatchNorm2d": nn.BatchNorm2d,
    "momentum None": lambda n: nn.BatchNorm2d(n, momentum=None),
    "SyncBatchNorm": nn.SyncBatchNorm,
    "BatchNormAct2d": lambda n: BatchNormAct2d(n, apply_act=False),
}


@pytest.mark.parametrize("affine", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_fixed_statistics_the_sum_is_that_of_an_affine_map(kind: str, affine: bool) -> None:
    model, batch = made(KINDS[kind](4), affine), records()
    before = {name: value.clone() for name, value in model.norm.named_buffers()}
    assert make_route(losses, model, batch, KEY).slow == {}
    for rows in (None, 4):
        found = clipped_sum(losses, model, batch, KEY, max_grad_norm=C, rows=rows)
        for name, value in by_affine_map(model, batch).items():
            torch.testing.assert_close(found.grads[name].double(), value, rtol=1e-4, atol=1e-6)
    model, batch = model.double(), batch._replace(image_BVCHW=batch.image_BVCHW.double())
    found = clipped_sum(losses, model, batch, KEY, max_grad_norm=C)
    assert (found.norms_B > C).all()
    for name, value in by_affine_map(model, batch).items():
        torch.testing.assert_close(found.grads[name], value, rtol=1e-9, atol=1e-12, msg=name)
    for name, value in model.norm.named_buffers():
        assert torch.equal(value, before[name].to(value)), name


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_training_mode_is_refused_at_the_step_where_it_begins(kind: str, checked: bool) -> None:
    """With a frozen scale and shift too, of which no gradient tells."""
    model, batch = made(KINDS[kind](4), affine=False), records()
    clipped_sum(losses, model, batch, KEY, max_grad_norm=C)
    before = {name: value.clone() for name, value in model.norm.named_buffers()}
    model.train()
    with pytest.raises(
        PrivacyError, match=r"'norm' \(\w+\) uses statistics of the batch.*eval mode"
    ):
        clipped_sum(losses, model, batch, KEY, max_grad_norm=C, check_separability=checked)
    assert all(torch.equal(v, before[n]) for n, v in model.norm.named_buffers())


@pytest.mark.parametrize("kind", ["BatchNorm2d", "SyncBatchNorm", "BatchNormAct2d"])
def test_without_running_statistics_it_is_refused_in_evaluation_mode_too(kind: str) -> None:
    make = {"BatchNorm2d": nn.BatchNorm2d, "SyncBatchNorm": nn.SyncBatchNorm}.get(kind)
    norm = (make or BatchNormAct2d)(4, track_running_stats=False)
    with pytest.raises(PrivacyError, match="uses statistics of the batch"):
        clipped_sum(losses, Net(norm.eval()), records(), KEY, max_grad_norm=C)


class Stubborn(nn.BatchNorm2d):
    """A subclass that uses the batch's statistics in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class Updating(nn.BatchNorm2d):
    """A subclass that moves its statistics in evaluation mode, and uses them."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.lerp_(x.detach().mean((0, 2, 3)).to(self.running_mean), 0.5)
        return super().forward(x)


class Switching(Net):
    """Turns its norm to training mode in the forward pass, from a turn on, and back."""

    def __init__(self, norm: nn.Module, first: int) -> None:
        super().__init__(norm, affine=False)
        self.turn, self.first = 0, first

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        self.norm.train(self.turn > self.first)
        out = super().forward(x)
        self.norm.eval()
        return out


class Functional(Net):
    """Calls the function with ``training`` as a switch says."""

    training_now = True

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        h = (
            F.batch_norm(self.conv(x), None, None, n.weight, n.bias, True)
            if self.training_now
            else n(self.conv(x))
        )
        return self.head(h.relu().mean((2, 3)))


@pytest.mark.parametrize(
    "model",
    [
        lambda: Net(Stubborn(4).eval()),
        lambda: Net(Stubborn(4).eval(), affine=False),
        lambda: Net(Updating(4).eval()),
        lambda: Switching(nn.BatchNorm2d(4).eval(), 0),
        lambda: Functional(nn.BatchNorm2d(4).eval()),
        lambda: Functional(nn.BatchNorm2d(4).eval(), affine=False),
    ],
    ids=["subclass", "subclass, frozen", "updating", "switching", "functional", "frozen"],
)
def test_batch_statistics_behind_an_evaluation_mode_are_measured(model: Callable) -> None:
    words = "mixes records|statistics of the batch|the same batch gives|changes the buffer"
    with pytest.raises(PrivacyError, match=words):
        check_separable(losses, model(), records(), KEY)
    with pytest.raises(PrivacyError, match=words):
        clipped_sum(losses, model(), records(), KEY, max_grad_norm=C)


@pytest.mark.parametrize("method", ["one_pass", "vmap"])
def test_a_switch_after_the_checks_moves_no_other_record(method: str) -> None:
    """As in a run whose checks are over: refused, or each record is alone."""
    model = Functional(nn.BatchNorm2d(4).eval(), affine=False)
    model.training_now = False

    def gradient(batch: Batch) -> Tensor:
        total = clipped_sum(
            losses, model, batch, KEY, max_grad_norm=C, method=method, check_separability=False
        )
        return torch.cat([value.flatten() for value in total.grads.values()])

    gradient(records())
    model.training_now = True
    batch = records()
    removed = batch._replace(valid_B=torch.tensor([True, True, False]))
    moved = (gradient(batch) - gradient(removed)).norm()
    assert moved <= C
    other = batch._replace(image_BVCHW=batch.image_BVCHW.clone())
    other.image_BVCHW[2] *= 5
    two = gradient(other) - gradient(other._replace(valid_B=removed.valid_B))
    torch.testing.assert_close(gradient(other) - two, gradient(removed), rtol=0, atol=1e-6)
