"""Select the trainable parameters of a classifier.

All, its last blocks, the head alone, or small additions to frozen weights.

LoRA (Hu et al. 2022):  y = W x + s B A x, A of shape (r, D) and B of shape (P, r), B zero at first;
    W is a linear layer or a 1 x 1 convolution
FiLM (Perez et al. 2018):  y = norm(x) (1 + scale) + shift, both zero at first, before the
    activation where a norm has one
BitFit (Ben Zaken et al. 2022):  biases

An addition wraps the module that it adapts, which it keeps under the name ``frozen``, so that a
parent's weights still fit (``plain_names``). The head is always trained. Additions are linear maps
and products with bare parameters, for which one-pass clipping has rules; adapters from libraries
would need additional rules.

Legend: D inputs, P outputs, r rank.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpvision.config import ClassifierConfig
from dpvision.errors import ConfigError
from dpvision.models.resnet import ResNet
from dpvision.models.timm_encoder import TimmEncoder
from dpvision.models.vit import ViT

Encoder = ViT | ResNet | TimmEncoder
_FROZEN = ".frozen."
_STAGE = re.compile(r"(layer|s)\d")
"""Stages of timm's ResNet and RegNet."""


class LoRA(nn.Module):
    """A frozen linear layer or 1 x 1 convolution plus a trained low-rank one."""

    def __init__(
        self,
        frozen: nn.Linear | nn.Conv2d,
        rank: int,
        scale: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, scale
        num_out, num_in, *ones = frozen.weight.shape
        bound, device = 1 / math.sqrt(num_in), frozen.weight.device
        self.down = nn.Parameter(
            torch.empty(rank, num_in, *ones, device=device).uniform_(
                -bound, bound, generator=generator
            )
        )
        self.up = nn.Parameter(torch.zeros(num_out, rank, *ones, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.frozen, nn.Linear):
            added = F.linear(F.linear(x, self.down), self.up)
        else:
            low = F.conv2d(x, self.down, None, self.frozen.stride, self.frozen.padding)
            added = F.conv2d(low, self.up)
        return self.frozen(x) + self.scale * added


class FiLM(nn.Module):
    """A frozen norm followed by a trained scale and shift per channel."""

    def __init__(self, frozen: Any) -> None:
        super().__init__()
        self._channels_first = (
            isinstance(frozen, nn.GroupNorm | _BatchNorm) or "2d" in type(frozen).__name__
        )
        self.frozen, weight = frozen, frozen.weight
        self.scale, self.shift = (
            nn.Parameter(torch.zeros(weight.shape[-1], device=weight.device)) for _ in range(2)
        )
        self.act: nn.Module = nn.Identity()
        if isinstance(getattr(frozen, "act", None), nn.Module):
            self.act, frozen.act = frozen.act, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(x)
        shape = (-1, *[1] * (y.ndim - 2)) if self._channels_first else (-1,)
        return self.act(y + (y * self.scale.view(shape) + self.shift.view(shape)))


def tune(
    encoder: Encoder, head: nn.Linear, cfg: ClassifierConfig, generator: torch.Generator | None
) -> None:
    """Freeze the parameters that ``cfg.tuned`` excludes, in place, and insert its additions.

    Args:
        generator: draws LoRA's matrices A; None on the meta device.

    Raises:
        ConfigError: the encoder has no such part, fewer blocks, or linear maps smaller than the
            rank.
    """
    head.bias.requires_grad_(cfg.train_head_bias)
    if cfg.tuned == "whole":
        return
    encoder.requires_grad_(False)
    match cfg.tuned:
        case "last_blocks":
            for parameter in _last(encoder, cfg.last_blocks):
                parameter.requires_grad_(True)
        case "biases":
            biases = [
                p
                for name, p in encoder.named_parameters()
                if name.rpartition(".")[2].endswith("bias")
            ]
            _require(biases, encoder, cfg, "biases", "Use lora or last_blocks.")
            for parameter in biases:
                parameter.requires_grad_(True)
        case "lora":
            maps = list(_linear_maps(encoder, cfg.lora_on))
            others = any(True for _ in _linear_maps(encoder, "both"))
            _require(
                maps,
                encoder,
                cfg,
                f"linear maps in its blocks (lora_on={cfg.lora_on!r})",
                "Pass --model.lora-on both." if others else "Use film or biases.",
            )
            for owner, name, linear in maps:
                most = min(linear.weight.shape[:2])
                if not cfg.lora_rank <= most:
                    raise ConfigError(
                        f"model: lora_rank={cfg.lora_rank}; expected at most {most}, the width "
                        "of a linear map. Lower it."
                    )
                setattr(owner, name, LoRA(linear, cfg.lora_rank, cfg.lora_scale, generator))
        case "film":
            from timm.layers import RmsNorm, RmsNorm2d  # takes seconds, so only now

            kinds = (nn.LayerNorm, nn.GroupNorm, _BatchNorm, nn.RMSNorm, RmsNorm, RmsNorm2d)
            norms = [
                (owner, name, part)
                for owner, name, part in _children(encoder)
                if isinstance(part, kinds)
            ]
            norms = [
                (owner, name, part)
                for owner, name, part in norms
                if any(True for _ in part.parameters())
            ]
            _require(
                norms, encoder, cfg, "norms with a scale of their own", "Use biases or last_blocks."
            )
            for owner, name, norm in norms:
                setattr(owner, name, FiLM(norm))


def plain_names(module: nn.Module) -> dict[str, str]:
    """Return a map from tensor names before ``tune`` to names in ``module``.

    Additions are left out.
    """
    added = {
        f"{owner}.{name}"
        for owner, part in module.named_modules()
        if isinstance(part, LoRA | FiLM)
        for name in part._parameters
    }
    return {name.replace(_FROZEN, "."): name for name in module.state_dict() if name not in added}


def merged(weights: dict[str, Tensor], lora_scale: float) -> dict[str, Tensor]:
    """Merge additions into a tuned network's weights.

    The result defines the same function, under the names before ``tune``.

    LoRA: W + s B A. FiLM: norm weight x (1 + scale), norm bias x (1 + scale) + shift.

    Args:
        weights: named as in ``state_dict``; returned unchanged if there are no additions.
        lora_scale: the s that they were trained with.
    """
    made = {name.replace(_FROZEN, "."): value for name, value in weights.items()}
    for name in weights:
        place, _, kind = name.rpartition(".")
        if f"{place}{_FROZEN}weight" not in weights:
            continue
        if kind == "up":
            up, down, weight = made.pop(name), made.pop(f"{place}.down"), made[f"{place}.weight"]
            product = (up.flatten(1) @ down.flatten(1)).view_as(weight)
            made[f"{place}.weight"] = weight + lora_scale * product
        elif kind == "scale":
            scale, shift = made.pop(name), made.pop(f"{place}.shift")
            made[f"{place}.weight"] = made[f"{place}.weight"] * (1 + scale)
            made[f"{place}.bias"] = (
                made.get(f"{place}.bias", torch.zeros_like(shift)) * (1 + scale) + shift
            )
    return made


def blocks_of(encoder: Encoder) -> list[nn.Module]:
    """Return the encoder's blocks in order.

    A transformer's blocks, or the residual blocks of all stages.
    """
    model: Any = encoder.model if isinstance(encoder, TimmEncoder) else encoder
    stages: Any = next(
        (
            found
            for name in ("blocks", "stages", "layers")
            if (found := getattr(model, name, None)) is not None
        ),
        [part for name, part in model.named_children() if _STAGE.fullmatch(name)],
    )
    blocks: list[nn.Module] = []
    for stage in stages:
        inner = getattr(stage, "blocks", stage if isinstance(stage, nn.Sequential) else None)
        blocks += [stage] if inner is None else list(inner)
    return blocks


def _last(encoder: Encoder, num: int) -> list[nn.Parameter]:
    """Return the parameters of the last ``num`` blocks and of all that follows, in order of use."""
    blocks = blocks_of(encoder)
    if not num <= len(blocks):
        raise ConfigError(
            f"model: last_blocks={num}; expected at most {len(blocks)}, the blocks of the "
            "encoder. Use tuned=whole for all."
        )
    first = next(blocks[-num].parameters())
    parameters = list(encoder.parameters())
    start = next(i for i, parameter in enumerate(parameters) if parameter is first)
    return parameters[start:]


def _linear_maps(
    encoder: Encoder, where: str
) -> Iterator[tuple[nn.Module, str, nn.Linear | nn.Conv2d]]:
    for block in blocks_of(encoder):
        for owner, name, part in _children(block):
            attention = "Attention" in type(owner).__name__
            if where not in ("both", "attention" if attention else "mlp"):
                continue
            # Subclasses are left out: their weights may be used without a call.
            if type(part) is nn.Linear or (
                type(part) is nn.Conv2d and part.kernel_size == (1, 1) and part.groups == 1
            ):
                yield owner, name, part


def _children(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return (owner, name in owner, module) for every submodule of ``module``."""
    return [
        (owner, name, part) for owner in module.modules() for name, part in owner.named_children()
    ]


def _require(
    found: list[Any], encoder: Encoder, cfg: ClassifierConfig, what: str, remedy: str
) -> None:
    if not found:
        raise ConfigError(
            f"model: tuned={cfg.tuned!r}; expected an encoder with {what}: "
            f"{type(encoder).__name__} has none. {remedy}"
        )
