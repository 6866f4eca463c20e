"""The linear classifier on frozen features that a head's run produces.

Legend: B records, D feature dimension, K classes.
"""

import torch
from torch import Tensor, nn

from dpvision.config import HeadConfig
from dpvision.errors import ConfigError


class LinearHead(nn.Module):
    """scores = weight x + bias, where x is the feature minus the run's public centre, scaled to
    length 1 if ``model.unit``.
    """

    def __init__(self, cfg: HeadConfig) -> None:
        super().__init__()
        if cfg.num_classes is None or cfg.encoder.width < 1:
            raise ConfigError(
                f"head: num_classes={cfg.num_classes}, width={cfg.encoder.width}; expected both "
                "set. Open a run made by `dpvision adapt`."
            )
        self.unit = cfg.features.unit
        self.weight = nn.Parameter(
            torch.zeros(cfg.num_classes, cfg.encoder.width), requires_grad=False
        )
        self.bias = nn.Parameter(torch.zeros(cfg.num_classes), requires_grad=False)
        self.register_buffer("centre", torch.zeros(cfg.encoder.width))
        self.centre: Tensor

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return scores, float32 (B, K). The largest is the prediction; for multi-label records,
        every score above zero is one.
        """
        x_BD = x_BD - self.centre
        if self.unit:
            x_BD = x_BD / torch.linalg.vector_norm(x_BD, dim=1, keepdim=True).clamp(
                min=torch.finfo(x_BD.dtype).tiny
            )
        return x_BD @ self.weight.T + self.bias
