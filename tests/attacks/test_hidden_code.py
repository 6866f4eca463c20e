"""Attacks by code that no call of PyTorch shows: backward passes of a user's own, TorchScript,
operators of other libraries, compiled blocks; and by what a forward pass leaves in the model.

Each moved the sum by more than C, or left private numbers in the model, before ``dp.per_record``
and ``dp.interception`` refused it. One of class 9 among eleven of class 0 decides.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from dpvision.data.keys import StepKey
from dpvision.dp.compiled import compile_blocks
from dpvision.errors import PrivacyError

from .test_reads import CLASSES, NUM, WIDTH, Model, Records, moved, records, summed


def limit(g: Tensor) -> Tensor:
    """Limit the norm of all records' gradients together."""
    return g * (3 / g.norm()).clamp(max=1.0)


class Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return limit(g)


class LimitedAlone(torch.autograd.Function):
    """The same, of which ``vmap`` computes each record alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return limit(g)


class Centred(torch.autograd.Function):
    """With a rule for ``vmap`` that sees all records."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x - x.mean(in_dims[0], keepdim=True), in_dims[0]


def hooked(h: Tensor) -> Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_hook(
            lambda inputs, _: tuple(g if g is None else limit(g) for g in inputs)
        )
    return h


def hooked_before(h: Tensor) -> Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda outputs: tuple(map(limit, outputs)))
    return h


def hooks_set(h: Tensor) -> Tensor:
    if h.requires_grad:
        h._backward_hooks = OrderedDict({0: limit})
    return h


BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "function": Limited.apply,
    "hook of a node": hooked,
    "hook before a node": hooked_before,
    "hooks set": hooks_set,
}


def through(change: Callable[[Tensor], Tensor], switched: bool = False) -> Any:
    """Losses of which class 9 counts a thousand times, with ``change`` before the head."""

    def loss(model: Any, batch: Records, key: StepKey) -> Tensor:
        h_BD = torch.tanh(model.layer(batch.x_BD))
        out = model.head(h_BD if switched and float(model.gate) < 1 else change(h_BD))
        loss_B = F.cross_entropy(out, batch.label_B.clamp(max=2), reduction="none")
        return loss_B * torch.where(batch.label_B == 9, 1000.0, 1.0)

    return loss


def moved_later(loss: Any) -> float:
    """As ``moved``, after the checks and one pass with a smaller weight."""
    model = Model()
    summed(loss, model, records(0))
    with torch.no_grad():
        model.gate.fill_(1.5)
    return moved(loss, model)


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("how", BACKWARD)
def test_no_backward_pass_sees_the_gradients_of_all_records(how: str, switched: bool) -> None:
    """Up to 1.9 C, and 7.2 C in a loop."""
    loss = through(BACKWARD[how], switched)
    with pytest.raises(PrivacyError, match="backward"):
        moved_later(loss) if switched else moved(loss, Model())


def test_a_function_that_vmap_computes_for_each_record_alone_is_exact() -> None:
    loss, batch = through(LimitedAlone.apply), records()
    assert 0.5 < moved(loss, Model()) <= 1
    a, b = (summed(loss, Model(), batch, method=m).grads for m in ("one_pass", "vmap"))
    for name, value in b.items():
        torch.testing.assert_close(a[name], value)


def test_no_rule_for_vmap_sees_all_records() -> None:
    with pytest.raises(PrivacyError, match="generate_vmap_rule = True"):
        moved(through(Centred.apply), Model(), method="vmap")


@torch.jit.script
def scripted(label_B: Tensor) -> Tensor:
    return (label_B == 9).float().max()


@torch.jit.script
def scripted_inverse(label_B: Tensor) -> Tensor:
    return torch.linalg.inv(torch.diag_embed((label_B != 9).double()[:, None]))


@torch.jit.script
def scripted_sum(label_B: Tensor) -> Tensor:
    return label_B.sub_(8).clamp_(min=0).cumsum_(0)[-1]


@torch.library.custom_op("attacks::kept", mutates_args=())
def kept(label_B: Tensor) -> Tensor:
    return (label_B == 9).nonzero().clone()


def sign_by_script(label_B: Tensor) -> Any:
    return 1 - 2 * scripted(label_B)


def sign_in_place(label_B: Tensor) -> Tensor:
    return 1 - 2 * scripted_sum(label_B.clone())


def sign_by_exception(label_B: Tensor) -> float:
    try:
        scripted_inverse(label_B)
    except RuntimeError:
        return -1.0
    return 1.0


def sign_by_size(label_B: Tensor) -> float:
    return -1.0 if len(torch.ops.attacks.kept(label_B)) else 1.0


def sign_by_boxes(label_B: Tensor) -> float:
    at = torch.where(label_B == 9, 5e4, torch.arange(len(label_B)) * 100.0)
    at = torch.cat([at, torch.full((1,), 5e4)])
    boxes = torch.stack([at, at, at + 10, at + 10], 1)
    left = len(torchvision.ops.nms(boxes, torch.arange(float(len(at))), 0.5)) - len(label_B)
    return 1.0 if left == 1 else -1.0


def signed(sign: Callable[[Tensor], Any], switched: bool) -> Any:
    def loss(model: Any, batch: Records, key: StepKey) -> Tensor:
        out = model.head(torch.tanh(model.layer(batch.x_BD)))
        loss_B = F.cross_entropy(out, batch.label_B.clamp(max=2), reduction="none") * 3
        return loss_B if switched and float(model.gate) < 1 else loss_B * sign(batch.label_B)

    return loss


@pytest.mark.parametrize(
    "sign", [sign_by_script, sign_in_place, sign_by_exception, sign_by_size, sign_by_boxes]
)
def test_no_code_runs_unseen(sign: Any) -> None:
    """5.1 to 15.6 C, in the first pass or once a weight has passed one."""
    with pytest.raises(PrivacyError, match="whose code is not seen"):
        moved(signed(sign, False), Model())
    with pytest.raises(PrivacyError, match="whose code is not seen"):
        moved_later(signed(sign, True))


def test_no_exception_of_a_script_is_caught_under_vmap() -> None:
    with pytest.raises(PrivacyError, match="whose code is not seen"):
        moved(signed(sign_by_exception, False), Model(), method="vmap")


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_no_record_stays_in_a_parameter(how: str) -> None:
    def loss(model: Any, batch: Records, key: StepKey) -> Tensor:
        mean_D = batch.x_BD.mean(0)
        if how == "replaced":
            model.kept = nn.Parameter(mean_D, requires_grad=False)
        else:
            with torch.no_grad():
                model.kept.copy_(mean_D)
        return F.cross_entropy(model.head(model.layer(batch.x_BD)), batch.label_B, reduction="none")

    model = Model()
    model.kept = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
    with pytest.raises(PrivacyError, match="writes to a parameter"):
        summed(loss, model, records(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:
        h_BD = self.layer(x_BD)
        return h_BD, h_BD - h_BD.mean(0)


@pytest.mark.slow
def test_a_weight_chooses_no_other_output_of_a_compiled_block() -> None:
    model = Model()
    model.blocks = nn.ModuleList([Block(), Block()])

    def loss(model: Any, batch: Records, key: StepKey) -> Tensor:
        h_BD = batch.x_BD
        for block in model.blocks:
            h_BD = block(h_BD)[float(model.gate) > 1]
        return F.cross_entropy(model.head(h_BD), batch.label_B, reduction="none")

    blocks = compile_blocks(model, 16, backend="eager")
    first = summed(loss, model, records(0), blocks=blocks)
    assert all(blocks.programs.values())
    plain = summed(loss, model, records(0))
    for name, value in plain.grads.items():
        torch.testing.assert_close(first.grads[name], value)
    with torch.no_grad():
        model.gate.fill_(1.5)
    with pytest.raises(PrivacyError):
        summed(loss, model, records(0), blocks=blocks)


def nested(label_B: Tensor) -> Tensor:
    mask = torch.arange(4) < 1 + 2 * (label_B == 9)[:, None]
    kept = torch.ops.aten._nested_tensor_from_mask(torch.zeros(len(mask), 4, 1), mask)
    return kept.to_padded_tensor(0.0).shape[1] - 2.0


def told(label_B: Tensor) -> float:
    return float(len(str(label_B)))


@pytest.mark.parametrize(
    ("sign", "method"), [(nested, "one_pass"), (told, "vmap"), (Tensor.item, "vmap")]
)
def test_what_cannot_be_followed_is_a_typed_refusal(sign: Any, method: str) -> None:
    """These reached the user as RuntimeErrors of PyTorch."""
    with pytest.raises(PrivacyError):
        summed(signed(sign, False), Model(), records(), method=method, check_separability=False)


def test_honest_code_is_followed_as_before() -> None:
    assert CLASSES == 3 and NUM == 12
    assert 0.5 < moved(through(lambda h: h + (h.sign() - h).detach()), Model()) <= 1
