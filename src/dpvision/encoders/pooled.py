"""Networks as encoders: their output before pooling and head, pooled in several ways.

Legend: B images, L tokens, D feature dimension, C channels, H height, W width, G patches per side.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.encoders.encoder import Encoder
from dpvision.models import Model
from dpvision.models.captioner import Captioner
from dpvision.models.resnet import ResNet
from dpvision.models.timm_encoder import TimmEncoder
from dpvision.models.vit import ViT

LAST_WEIGHT = 2.0
"""Length of the last output's average in a row of pooling "stages"; that of a stage is 1. Chosen on
public images (docs/log/2026-11-26-stages.md).
"""


class PooledNetwork(nn.Module):
    """A network with pooled output.

    Tokens (B, L, D) give "mean" over the patch tokens and, if the patches form a square, "2x2", the
    means of the quadrants row by row (4 D). A map (B, D, H, W) gives "mean" and, if it has at least
    2 x 2 positions, "2x2".

    Args:
        output: function of the network and x_BCHW that returns tokens or a map.
        prefix: number of tokens before the patches. If None, one if the others then form a square.
        has_class_token: whether to offer the first token as "cls".
        bridge: linear map to a decoder's width. Offers "bridge": the mean of all tokens including
            the class token after this map, without positions (as in DP-Cap's few-shot probes).
        outputs: function of the network and x_BCHW that returns the outputs of its stages (of a
            transformer, of its blocks) and then its last output, each tokens or a map. If None,
            there is no pooling "stages".
    """

    def __init__(
        self,
        network: nn.Module,
        output: Callable[[Any, Tensor], Tensor],
        *,
        prefix: int | None = 0,
        has_class_token: bool = False,
        bridge: nn.Linear | None = None,
        outputs: Callable[[Any, Tensor], list[Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.network, self.bridge, self.outputs = network, bridge, outputs
        self._output, self._prefix, self._has_class_token = output, prefix, has_class_token

    def output(self, x_BCHW: Tensor) -> Tensor:
        """Return tokens (B, L, D) or a map (B, D, H, W), before pooling."""
        return self._output(self.network, x_BCHW)

    def poolings(self, x_BCHW: Tensor) -> dict[str, Tensor]:
        """Return features, float32 (B, D) or (B, 4 D), by name of pooling, from one forward pass;
        the first is the default.
        """
        found = self.output(x_BCHW).float()
        if found.ndim == 4:
            return _of_map(found)
        patch_BLD = found[:, self._num_prefix(found) :]
        made = {"mean": patch_BLD.mean(dim=1)}
        if _is_square(patch_BLD.shape[1]):
            made = _of_map(
                patch_BLD.transpose(1, 2).unflatten(-1, (math.isqrt(patch_BLD.shape[1]), -1))
            )
        if self._has_class_token:
            made["cls"] = found[:, 0]
        if self.bridge is not None:  # the mean commutes with an affine map
            made["bridge"] = self.bridge(found.mean(dim=1)).float()
        return made

    def stages(self, x_BCHW: Tensor) -> Tensor:
        """Return the averages of all stages in one row of length 1, float32 (B, D), from one
        forward pass:

            unit(unit(mean stage_1), ..., unit(mean stage_n), w unit(mean of the last output))

        with w = ``LAST_WEIGHT``. A class token follows its mean, in the same way.
        """
        assert self.outputs is not None
        outputs = [found.float() for found in self.outputs(self.network, x_BCHW)]
        weights = [1.0] * (len(outputs) - 1) + [LAST_WEIGHT]
        return _unit(
            torch.cat(
                [
                    weight * _unit(average_BD)
                    for found, weight in zip(outputs, weights, strict=True)
                    for average_BD in self._averages(found)
                ],
                dim=1,
            )
        )

    def _averages(self, found: Tensor) -> list[Tensor]:
        """Return the mean over positions, and the class token if there is one."""
        if found.ndim == 4:
            return [found.mean(dim=(2, 3))]
        mean_BD = found[:, self._num_prefix(found) :].mean(dim=1)
        return [mean_BD, found[:, 0]] if self._has_class_token else [mean_BD]

    def _num_prefix(self, token_BLD: Tensor) -> int:
        if self._prefix is not None:
            return self._prefix
        num = token_BLD.shape[1]
        return int(not _is_square(num) and _is_square(num - 1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the default pooling, (B, D)."""
        return next(iter(self.poolings(x_BCHW).values()))


def pooled_network(
    network: ViT | ResNet | TimmEncoder, bridge: nn.Linear | None = None
) -> PooledNetwork:
    """Return an encoder network of ``models`` with pooled output."""
    output = TimmEncoder.places if isinstance(network, TimmEncoder) else nn.Module.__call__
    return PooledNetwork(network, output, prefix=int(isinstance(network, ViT)), bridge=bridge)


def pooled_model(model: Model) -> PooledNetwork:
    """Return the encoder of a whole model with pooled output; a captioner's offers "bridge"."""
    return pooled_network(
        model.encoder, model.decoder.bridge if isinstance(model, Captioner) else None
    )


def attends(network: nn.Module) -> bool:
    """Return whether the network mixes positions by self-attention (such as Swin, whose output is a
    map).
    """
    return any(
        "Attention" in type(m).__name__ and "Pool" not in type(m).__name__
        for m in network.modules()
    )


def frozen(network: PooledNetwork, device: str | torch.device, **about: Any) -> Encoder:
    """Freeze ``network``, move it to ``device``, and return it as an encoder; ``about`` are the
    other fields of ``Encoder``.

    A convnet's weights are channels-last on a CPU, which makes features faster; those of
    ``backbone`` are not.
    """
    network = network.eval().requires_grad_(False).to(device)
    if about["family"] == "convnet" and torch.device(device).type == "cpu":
        network = network.to(memory_format=torch.channels_last)
    return Encoder(
        poolings=network.poolings,
        stages=None if network.outputs is None else network.stages,
        network=network,
        backbone=lambda: (
            _copy_on_cpu(network)
            .to(memory_format=torch.contiguous_format)
            .train()
            .requires_grad_(True)
        ),
        **about,
    )


def _copy_on_cpu(network: PooledNetwork) -> PooledNetwork:
    """Return a copy on the CPU. On the network's own device nothing is copied."""
    tensors: dict[int, Any] = {
        id(buffer): buffer.detach().to("cpu", copy=True) for buffer in network.buffers()
    }
    tensors |= {
        id(parameter): nn.Parameter(parameter.detach().to("cpu", copy=True))
        for parameter in network.parameters()
    }
    return copy.deepcopy(network, tensors)


def _of_map(map_BDHW: Tensor) -> dict[str, Tensor]:
    made = {"mean": map_BDHW.mean(dim=(2, 3))}
    if min(map_BDHW.shape[2:]) >= 2:
        made["2x2"] = F.adaptive_avg_pool2d(map_BDHW, 2).flatten(2).transpose(1, 2).flatten(1)
    return made


def _unit(x_BD: Tensor) -> Tensor:
    return F.normalize(x_BD, dim=1, eps=torch.finfo(x_BD.dtype).tiny)


def _is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number
