"""Optimizers that accept a ``DPGradient`` only, so that everything they do is post-processing."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dpvision.config import OptimConfig
from dpvision.dp.clipped import require_seal
from dpvision.dp.noise import DPGradient
from dpvision.errors import CheckpointError, ConfigError, PrivacyError


class Optimizer:
    """torch.optim's AdamW or SGD, or timm's LAMB, over the trained parameters, with its state as a
    flat dict of named tensors.

    Weight decay is decoupled and acts on every trained parameter (ViP, appendix A.2), or on
    matrices only (``decayed``). In LAMB it is part of the update whose norm is adapted (You et al.
    2020, algorithm 2).
    """

    def __init__(self, config: OptimConfig, model: nn.Module) -> None:
        self._params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        values = list(self._params.values())
        # Decay is applied here for AdamW and SGD: torch's SGD couples it with the gradient.
        self._decay = {
            p: config.weight_decay if config.decayed == "all" or p.ndim >= 2 else 0.0
            for p in values
        }
        alpha, self._global_clip = config.pretrained_multiplier, config.global_clip
        self._factor = {
            p: 1.0 if alpha == 1 or name.startswith("head.") else alpha
            for name, p in self._params.items()
        }
        if alpha != 1 and not any(name.startswith("head.") for name, _ in model.named_parameters()):
            raise ConfigError(
                f"optim: pretrained_multiplier={alpha}; expected 1 for a model without a "
                "separate head. Leave it out."
            )
        groups: list[dict[str, Any]] = [
            {"params": [p for p in values if self._factor[p] == factor]}
            for factor in dict.fromkeys(self._factor.values())
        ]
        # Fused kernels round differently; on a CPU the plain loop stays, bit for bit what it was.
        self._fused = config.name != "lamb" and all(p.device.type != "cpu" for p in values)
        self._counting: dict[str, dict[str, Any]] = {}
        """LAMB's parameter groups, one per parameter, which have their own step counts."""
        if config.name == "adamw":
            self._torch: torch.optim.Optimizer = _without_compiler(torch.optim.AdamW)(
                groups,
                lr=config.rate,
                betas=config.betas,
                eps=config.eps,
                weight_decay=0.0,
                fused=self._fused or None,
            )
        elif config.name == "lamb":
            from timm.optim import Lamb  # takes seconds, so only where it is used

            # By default timm skips the adaptation of parameters without decay, and clips the whole
            # gradient, which is clipped already.
            own = [{"params": [p], "weight_decay": self._decay[p]} for p in values]
            self._torch = Lamb(
                own,
                lr=config.rate,
                betas=config.betas,
                eps=config.eps,
                always_adapt=True,
                max_grad_norm=None,
            )
            self._decay = dict.fromkeys(values, 0.0)
            self._counting = dict(zip(self._params, self._torch.param_groups, strict=True))
        else:
            self._torch = _without_compiler(torch.optim.SGD)(
                groups, lr=config.rate, momentum=config.momentum, fused=self._fused or None
            )

    @torch.no_grad()
    def step(self, gradient: DPGradient, learning_rate: float) -> None:
        """Apply one privatized gradient in place.

        Args:
            gradient: float32 tensors for exactly the trained parameters.
            learning_rate: rate of this step.

        Raises:
            PrivacyError: ``gradient`` is not a DPGradient as ``privatize`` returned it.
        """
        if not isinstance(gradient, DPGradient):
            raise PrivacyError(
                f"optimizer: {type(gradient).__name__}; expected a DPGradient, the only "
                "releasable gradient. Use noise.privatize."
            )
        require_seal(gradient, "optimizer", "Give the optimizer what privatize returns.")
        for group in self._torch.param_groups:
            group["lr"] = learning_rate * self._factor[group["params"][0]]
        grads = [gradient.grads[name] for name in self._params]
        if self._global_clip is not None:
            grads = list(torch._foreach_mul(grads, _shortening(gradient, self._global_clip)))
        for parameter, grad in zip(self._params.values(), grads, strict=True):
            parameter.grad = grad.to(parameter.device, parameter.dtype)
        decayed = {
            p: 1 - learning_rate * self._factor[p] * decay
            for p, decay in self._decay.items()
            if decay
        }
        if decayed:
            torch._foreach_mul_(list[Tensor](decayed), list(decayed.values()))
        self._torch.step()
        for parameter in self._params.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as {"PARAMETER/SLOT": tensor}, empty before the first step."""
        state = self._torch.state
        found = {
            f"{name}/{slot}": torch.as_tensor(value)
            for name, parameter in self._params.items()
            for slot, value in state.get(parameter, {}).items()
            if value is not None
        }
        counts = {
            f"{name}/step": torch.as_tensor(group["step"])
            for name, group in self._counting.items()
            if "step" in group
        }
        return found | counts

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state returned by ``tensors``.

        Raises:
            CheckpointError: the names differ from this model's trained parameters.
        """
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, slot = key.rsplit("/", 1)
            state.setdefault(name, {})[slot] = value
        if state and set(state) != set(self._params):
            wrong = sorted(set(state) ^ set(self._params))[0]
            raise CheckpointError(
                f"optimizer: {wrong}; expected state for exactly the trained parameters. Resume "
                "with the config of the run."
            )
        for name, slots in state.items():
            parameter = self._params[name]
            # Adam keeps its step count on the CPU unless it is fused, everything else on the
            # parameter's device.
            self._torch.state[parameter] = {
                s: v.clone()
                if s == "step" and not self._fused
                else v.to(parameter.device, copy=True)
                for s, v in slots.items()
            }
            if name in self._counting:
                self._counting[name]["step"] = self._torch.state[parameter].pop("step")


def _without_compiler(kind: type[torch.optim.Optimizer]) -> Any:
    """Return an optimizer of torch whose methods do not import PyTorch's compiler: two seconds of
    every start, for a decorator that matters to compiled steps only.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "step")}
    return type(kind.__name__, (kind,), methods)


def _shortening(gradient: DPGradient, global_clip: float) -> Tensor:
    """Return min(1, global_clip / norm of the whole gradient), on the gradient's device: the host
    does not wait for it.
    """
    norm = torch.stack(
        [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradient.grads.values()]
    ).norm()
    return torch.where(norm > 0, global_clip / norm, 1.0).clamp(max=1.0)
