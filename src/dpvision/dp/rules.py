"""The rule of each torch function."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dpvision.dp.broadcast import attention
from dpvision.dp.matrix_rules import embedding, getitem, head, linear, make_conv, matmul
from dpvision.dp.norms import batch_norm, group_norm, layer_norm, rms_norm
from dpvision.dp.rule import Rule
from dpvision.models.head import linear_cross_entropy

RULES: dict[Callable[..., Any], Rule] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    F.conv1d: make_conv(1),
    F.conv2d: make_conv(2),
    F.conv3d: make_conv(3),
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.rms_norm: rms_norm,
    F.embedding: embedding,
    F.scaled_dot_product_attention: attention,
    torch.Tensor.__getitem__: getitem,
    linear_cross_entropy: head,
}
"""Functions with a rule; a rule returns ``NotImplemented`` for a call that it does not handle
(weights only, for example).
"""


def _named(*names: str) -> set[Callable[..., Any]]:
    return {
        getattr(owner, name)
        for owner in (torch, torch.Tensor)
        for name in names
        if hasattr(owner, name)
    }


ELEMENTWISE = _named(
    "add",
    "add_",
    "__radd__",
    "mul",
    "mul_",
    "__rmul__",
    "sub",
    "sub_",
    "__rsub__",
    "rsub",
    "div",
    "div_",
    "true_divide",
    "__rtruediv__",
    "where",
    "addcmul",
    "lerp",
    "maximum",
    "minimum",
    "pow",
    "multiply",
    "subtract",
    "divide",
)
"""Functions that broadcast their arguments and act elementwise."""


EXPANDING = _named("expand", "expand_as", "broadcast_to", "repeat")
"""Functions that repeat a tensor along new or length-1 dimensions."""
