"""The chunked vocabulary head against torch's linear layer and cross-entropy: values, gradients,
memory.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dpvision.models import head
from dpvision.models.head import linear_cross_entropy

B, L, D, V = 5, 7, 6, 11


def operands(*, bias: bool = True, ignored: str = "some", seed: int = 0, dtype=torch.float64):
    """hidden_BLD, weight_VD, bias_V (or None), target_BL; leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias_V = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((B, L, D), (V, D), (V,))
    )
    target = torch.randint(0, V, (B, L), generator=generator)
    if ignored != "none":
        target[0, 2:] = -100
        target[3] = -100
    if ignored == "all":
        target[:] = -100
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias_V.requires_grad_() if bias else None,
        target,
    )


def reference(hidden_BLD, weight_VD, bias_V, target_BL):
    return F.cross_entropy(
        F.linear(hidden_BLD, weight_VD, bias_V).mT, target_BL, reduction="none", ignore_index=-100
    )


def gradients(function, inputs, g_BL):
    leaves = [t for t in inputs[:3] if t is not None]
    return torch.autograd.grad(function(*inputs), leaves, g_BL)


@pytest.mark.parametrize("room", [1, L * V, 2 * L * V + 1, 10**6])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("aligned", [False, True])
def test_values_and_gradients_are_torchs_for_any_chunk(monkeypatch, room, bias, ignored, aligned):
    """Chunks of one record, of two, and of all; with every token weighed differently; with words of
    probability zero too, as on a GPU.
    """
    monkeypatch.setitem(head._CHUNK_NUMBERS, "cpu", room)
    monkeypatch.setattr(head, "adds_by_place", lambda device: aligned)
    inputs = operands(bias=bias, ignored=ignored)
    g_BL = torch.linspace(-2, 3, B * L, dtype=torch.float64).view(B, L)
    torch.testing.assert_close(
        linear_cross_entropy(*inputs), reference(*inputs), rtol=1e-12, atol=1e-12
    )
    for made, expected in zip(
        gradients(linear_cross_entropy, inputs, g_BL),
        gradients(reference, inputs, g_BL),
        strict=True,
    ):
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


def test_ignored_tokens_have_a_loss_and_gradients_of_exactly_zero():
    """Whatever their hidden states hold, short of infinity."""
    hidden, weight, bias, target = operands(ignored="some")
    with torch.no_grad():
        hidden[3] = 1e150
    losses_BL = linear_cross_entropy(hidden, weight, bias, target)
    assert torch.equal(losses_BL == 0, target == -100)
    hidden_grad, weight_grad = torch.autograd.grad(losses_BL.sum(), [hidden, weight])
    assert (
        not hidden_grad[target == -100].any()
        and weight_grad.isfinite().all()
        and weight_grad.norm() < 1e6
    )


@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(bias):
    hidden, weight, bias_V, target = operands(bias=bias)
    leaves = [hidden, weight] if bias_V is None else [hidden, weight, bias_V]
    assert torch.autograd.gradcheck(
        lambda h, w, b=None: linear_cross_entropy(h, w, b, target), leaves
    )


@pytest.mark.parametrize("bias", [True, False])
def test_under_vmap_it_gives_each_records_own_gradient(bias):
    hidden, weight, bias_V, target = (
        None if t is None else t.detach() for t in operands(bias=bias)
    )

    def loss(weight, hidden_LD, target_L):
        return linear_cross_entropy(hidden_LD[None], weight, bias_V, target_L[None]).sum()

    made = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weight, hidden, target)
    for i in range(B):
        one = weight.clone().requires_grad_()
        expected = torch.autograd.grad(
            reference(hidden[i : i + 1], one, bias_V, target[i : i + 1]).sum(), one
        )[0]
        torch.testing.assert_close(made[i], expected, rtol=1e-12, atol=1e-12)


def test_a_tied_weight_gets_both_its_gradients():
    _, weight, bias, target = operands(ignored="none")

    def loss(function):
        return function(
            torch.tanh(F.embedding(target, weight)), weight, bias, target.roll(1, 1)
        ).sum()

    (made,), (expected,) = (
        torch.autograd.grad(loss(function), weight)
        for function in (linear_cross_entropy, reference)
    )
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_operands_change_nothing_for_the_others(frozen):
    inputs = list(operands())
    inputs[frozen] = inputs[frozen].detach()
    leaves = [t for t in inputs[:3] if t.requires_grad]
    made, expected = (
        torch.autograd.grad(function(*inputs).sum(), leaves)
        for function in (linear_cross_entropy, reference)
    )
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_under_autocast_losses_are_float32_and_gradients_the_parameters_own(dtype, eps):
    """Logits are rounded to half precision: each by half an eps of its size and D products of
    rounded factors; 8 eps of the largest.
    """
    inputs = operands(dtype=torch.float32)
    expected = reference(*inputs)
    with torch.autocast("cpu", dtype):
        made = linear_cross_entropy(*inputs)
    largest = F.linear(*inputs[:3]).abs().max().item()
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, expected, rtol=0, atol=8 * eps * largest)
    for grad, leaf in zip(torch.autograd.grad(made.sum(), inputs[:3]), inputs[:3], strict=True):
        assert grad.dtype == leaf.dtype == torch.float32


@pytest.mark.parametrize("room", [1, 2 * L * V + 1, 10**6])
def test_kept_gradients_of_logits_are_torchs_and_their_gram_matrices_the_given_products(
    monkeypatch, room
):
    monkeypatch.setitem(head._CHUNK_NUMBERS, "cpu", room)
    hidden, weight, bias_V, target = (t.detach() for t in operands())
    logits = F.linear(hidden, weight, bias_V).requires_grad_()
    losses = F.cross_entropy(logits.mT, target, reduction="sum", ignore_index=-100)
    operands_ = hidden, weight, bias_V, target
    delta, gram = head.head_forward(*operands_, keep=True, product=lambda a, b: 3 * (a @ b))[2:]
    assert delta is not None and gram is not None
    torch.testing.assert_close(delta, *torch.autograd.grad(losses, logits), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gram, 3 * (delta @ delta.mT), rtol=1e-12, atol=1e-12)
    assert head.head_forward(*operands_, keep=False)[2:] == (None, None)


class LargeTensors(TorchDispatchMode):
    """Notes the memory of all results that have as many numbers as asked for."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.places, self.held = numbers, set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.numel() == self.numbers:
                self.places.add(t.untyped_storage().data_ptr())
                self.held.append(t)  # so that no other tensor takes its place
        return out


@pytest.mark.parametrize("bias", [True, False])
def test_one_tensor_of_all_logits_is_made_and_none_if_no_gradient_needs_it(monkeypatch, bias):
    """torch's own way makes several in the forward pass alone, so the measurement would see it."""
    num, length, width, words = 16, 8, 4, 100
    monkeypatch.setitem(head._CHUNK_NUMBERS, "cpu", 2 * length * words)
    hidden = torch.randn(num, length, width, requires_grad=True)
    weight, bias_V = (
        torch.randn(words, width, requires_grad=True),
        torch.randn(words, requires_grad=True) if bias else None,
    )
    target = torch.randint(0, words, (num, length))

    def made(function, *head, grad: bool) -> int:
        with LargeTensors(num * length * words) as seen, torch.set_grad_enabled(grad):
            loss = function(hidden, *head, target).sum()
            if grad:
                loss.backward()
        return len(seen.places)

    frozen = weight.detach(), None if bias_V is None else bias_V.detach()
    assert made(linear_cross_entropy, weight, bias_V, grad=True) == 1
    assert made(linear_cross_entropy, weight, bias_V, grad=False) == 0
    assert made(linear_cross_entropy, *frozen, grad=True) == 0
    assert made(reference, weight, bias_V, grad=True) >= 3
