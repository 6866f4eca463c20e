"""A small network, its loss and images that are vectors: for tests of the dense loop, also in
processes of their own.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Example = tuple[Tensor, Tensor]


class Numbers:
    """Images that are vectors: each is a function of its number and the epoch."""

    def __init__(self, num: int = 10) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def load(self, number: int, epoch: int) -> Example:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * epoch + number))
        return x, x.sum(dim=0)


def make_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4)
    )


def groups_of(model: nn.Sequential) -> list[dict]:
    first, last = list(model[1].parameters()), list(model[4].parameters())
    return [
        {"params": first, "lr": 1e-2, "weight_decay": 0.1},
        {"params": last, "lr": 3e-2, "weight_decay": 0.0},
    ]


def loss(model: nn.Module, examples: list[Example]) -> Tensor:
    x, y = map(torch.stack, zip(*examples, strict=True))
    return F.mse_loss(model(x), y)
