"""Opacus' two ways to a sum of clipped gradients, called as its users call them, to measure beside
ours (Opacus 1.6).

A bare parameter in a module for which Opacus has no rule takes that whole module to torch.func, all
its layers with it. With the class and mask tokens that is the encoder or the whole model, which
Opacus then refuses for the position tables. Its users wrap such parameters in a layer or freeze
them. Here they are frozen, as DP-Cap's tokens are: some thousand numbers, so that Opacus gains next
to nothing by it.

Legend: B records.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import UnavailableError
from torch import Tensor, nn

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn

try:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
except ImportError:
    GradSampleModule = None

INSTALLED = GradSampleModule is not None

Step = Callable[[Batch], dict[str, Tensor]]
"""A batch's sum of clipped gradients by parameter name."""


def twin(model: nn.Module) -> nn.Module:
    """Another model over the same weights' memory, for hooks, compiled blocks and gradients of its
    own.
    """
    shared: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, shared | {id(b): b for b in model.buffers()})


def relative_difference(ours: dict[str, Tensor], oracle: dict[str, Tensor]) -> float:
    """Norm of the difference over the oracle's norm, all parameters together; infinite where the
    names differ.
    """
    if ours.keys() != oracle.keys():
        return float("inf")
    squares = [
        ((ours[n].double() - o.double()).square().sum(), o.double().square().sum())
        for n, o in oracle.items()
    ]
    return float((sum(d for d, _ in squares) / sum(o for _, o in squares)) ** 0.5)


def make_step(
    variant: str, model: nn.Module, loss_fn: LossFn, max_grad_norm: float, piece: int | None
) -> Step:
    """The step of "opacus_ghost" or "opacus_per_sample" on a model that it takes over, its bare
    parameters frozen.

    Args:
        piece: for opacus_per_sample, see ``make_per_sample_step``.

    Raises:
        UnavailableError: Opacus is not installed.
    """
    if not INSTALLED:
        raise UnavailableError("Opacus is not installed; run pip install opacus==1.6.0")
    freeze_bare_parameters(model)
    if variant == "opacus_ghost":
        return make_ghost_step(model, loss_fn, max_grad_norm)
    return make_per_sample_step(model, loss_fn, max_grad_norm, piece)


def freeze_bare_parameters(model: nn.Module) -> list[str]:
    """Freeze the parameters that stand directly in a module without a rule of Opacus'; their
    names.
    """
    bare = []
    for prefix, module in model.named_modules():
        if type(module) not in GradSampleModule.GRAD_SAMPLERS:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                parameter.requires_grad_(False)
                bare.append(name)
    return bare


def make_per_sample_step(
    model: nn.Module, loss_fn: LossFn, max_grad_norm: float, piece: int | None
) -> Step:
    """Hooks that keep every record's gradient (GradSampleModule), then norms, factors and the sum
    by hand.

    Args:
        model: taken over: its tensors get Opacus' attributes; bare parameters already frozen.
        piece: most records whose gradients are held at once, the rest one after another as by
            Opacus' BatchMemoryManager; None: all.
    """
    wrapped = GradSampleModule(model, loss_reduction="sum", strict=False)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def step_piece(batch: Batch) -> dict[str, Tensor]:
        _backward(loss_fn(model, batch, StepKey(0, 0)).sum())
        norm_B = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in params.values()]).norm(
            dim=0
        )
        factor_B = (max_grad_norm / norm_B).clamp(max=1.0).float()
        summed = {}
        for name, p in params.items():
            summed[name] = torch.einsum("i,i...", factor_B, p.grad_sample.to(p.dtype))
            p.grad_sample = None
            p.grad = None  # the hooks do not keep autograd from forming it too
        return summed

    def step(batch: Batch) -> dict[str, Tensor]:
        num_records = len(batch.record_id_B)
        total: dict[str, Tensor] = {}
        for start in range(0, num_records, piece or num_records):
            rows = slice(start, start + (piece or num_records))
            summed = step_piece(Batch._make(None if t is None else t[rows] for t in batch))
            total = (
                {name: total[name] + value for name, value in summed.items()} if total else summed
            )
        return total

    step.wrapped = wrapped  # type: ignore[attr-defined]  # its hooks live as long as it does
    return step


def make_ghost_step(model: nn.Module, loss_fn: LossFn, max_grad_norm: float) -> Step:
    """Ghost norms in a first backward pass, the sum by a second one through the weighted losses
    (fast gradient clipping).

    Args:
        model: taken over: its tensors get Opacus' attributes; bare parameters already frozen.
    """
    wrapped = GradSampleModuleFastGradientClipping(
        model,
        loss_reduction="sum",
        strict=False,
        max_grad_norm=max_grad_norm,
        use_ghost_clipping=True,
    )
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Opacus' two passes want an optimizer only to clear the first pass's gradients.
    optimizer = torch.optim.SGD(params.values(), lr=0.0)

    def step(batch: Batch) -> dict[str, Tensor]:
        _backward(
            DPTensorFastGradientClipping(
                wrapped, optimizer, loss_fn(model, batch, StepKey(0, 0)), "sum"
            )
        )
        summed = {name: p.grad for name, p in params.items() if p.grad is not None}
        optimizer.zero_grad()
        return summed

    return step


def _backward(loss: "Tensor | DPTensorFastGradientClipping") -> None:
    with warnings.catch_warnings():
        # Layers that read images or token ids have no input with a gradient; Opacus' hooks do not
        # need one.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        loss.backward()
