"""The precision in which a frozen network computes features of images.

bfloat16 changes a row of features by 0.3% to 8% of its length, and no head's accuracy
(docs/heads.md, "Precision of features"). It is for the features that a head is trained on;
predictions and exports are computed in float32.

A row must have the same bits at every place of a pass. In float32 an operation that computes the
last elements of a tensor in another way than the others is found by comparing passes
(``identity.check_places``). Rounding to bfloat16 hides nearly all such differences and leaves a few
(tanh-GELU has four inputs with two results), so here the operations of the network must be known.

Legend: B images, D feature dimension, C channels, H height, W width.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpvision.devices import has_bfloat16
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError

Asked = Literal["auto", "float32", "bfloat16"]
_Features = TypeVar("_Features", Tensor, dict[str, Tensor])

_EXACT = {
    *("add", "sub", "mul", "div", "neg", "abs", "relu", "clamp", "clamp_min", "clamp_max"),
    *("hardtanh", "maximum", "minimum", "eq", "ne", "masked_fill", "where", "clone"),
}
"""Elementwise operations with one result by IEEE 754, in either precision."""
_ONE_RESULT = {"silu", "sigmoid", "hardsigmoid", "hardswish", "tanh", "elu", "leaky_relu"}
"""Those that give each of the 65,536 numbers of bfloat16 one result, wherever it is in a tensor
(tests/encoders/test_feature_precision.py goes through them); with PyTorch's default arguments.
"""
if torch.backends.cpu.get_cpu_capability() == "AVX512":  # AVX2 gives three numbers two results
    _ONE_RESULT.add("gelu")
_PLAIN = {"alpha": 1, "approximate": "none", "rounding_mode": None}
"""Arguments that make another operation of one of these."""
_UNTAGGED = {"hardswish", "_prelu_kernel", "log_sigmoid_forward", "glu"}
"""Elementwise operations that PyTorch does not tag as such."""


def precision_for(
    encoder: Encoder, pooling: str | None, asked: Asked, device: str | torch.device
) -> Literal["float32", "bfloat16"]:
    """Return the precision for features of a pooling on ``device``: what was asked for, or for
    "auto" bfloat16 of a network on a CPU that has instructions for it, if the bits of a row are
    known not to depend on its place.

    Raises:
        ConfigError: bfloat16 of features that no network of PyTorch computes, or of a network with
            an operation of which that is not known.
    """
    device = torch.device(device)
    is_network = encoder.network is not None and encoder.family != "fixed"
    if asked == "float32" or (asked == "auto" and not (is_network and has_bfloat16(device))):
        return "float32"
    if not is_network:
        raise ConfigError(
            f"model.encoder: precision='bfloat16' with {encoder.name}; expected float32, the only "
            "precision of features that no network of PyTorch computes. Leave it out."
        )
    if device.type == "cpu" and (operation := _unknown_operation(encoder, pooling)) is not None:
        if asked == "auto":
            return "float32"
        raise ConfigError(
            f"model.encoder: precision='bfloat16' with {encoder.name}, which computes {operation}; "
            "expected operations that are known to give an image the same bits at every place. Use "
            "float32."
        )
    return "bfloat16"


def in_precision(encoder: Encoder, precision: Asked) -> Encoder:
    """Return the encoder with features computed in ``precision`` (not "auto"); they are float32
    tensors in any case. ``backbone``, and so what is trained further or saved, stays as it is.
    """
    if precision == "float32":
        return encoder
    assert precision == "bfloat16", "chosen by precision_for"
    stages = None if encoder.stages is None else _lowered(encoder.stages)
    return replace(
        encoder, precision="bfloat16", poolings=_lowered(encoder.poolings), stages=stages
    )


def _lowered(function: Callable[[Tensor], _Features]) -> Callable[[Tensor], _Features]:
    """Return a function of images in autocast. ``PooledNetwork`` averages in float32."""

    def lowered(x_BCHW: Tensor) -> _Features:
        with torch.autocast(x_BCHW.device.type, torch.bfloat16):
            return function(x_BCHW)

    return lowered


@torch.no_grad()  # inference mode would show operations that are made of others
def _unknown_operation(encoder: Encoder, pooling: str | None) -> str | None:
    """Return an elementwise operation of the encoder in bfloat16, on a CPU, that is not known to
    give a number the same bits at every place; None if there is none.
    """
    seen = _Operations()
    with seen:
        in_precision(encoder, "bfloat16")(
            torch.zeros(2, 3, encoder.image_size, encoder.image_size), pooling
        )
    return seen.unknown


class _Operations(TorchDispatchMode):
    """Notes the first elementwise operation that is in neither list."""

    unknown: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode: PyTorch need not import its compiler (4 s)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._overloadpacket.__name__.removesuffix("_"), kwargs or {}
        if torch.Tag.pointwise in func.tags or name in _UNTAGGED:
            low = all(
                value.dtype == torch.bfloat16
                for value in tree_leaves((args, kwargs))
                if isinstance(value, Tensor)
            )
            plain = all(kwargs.get(key, default) == default for key, default in _PLAIN.items())
            if not (plain and (name in _EXACT or (low and name in _ONE_RESULT))):
                more = "".join(f" with {key}={value}" for key, value in kwargs.items())
                more += " in float32" if plain and name in _ONE_RESULT else ""
                self.unknown = self.unknown or name + more
        return func(*args, **kwargs)
