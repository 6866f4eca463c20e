"""Small batches, and a zoo of networks that each hide one difficulty of per-record gradients."""

import torch
import torch.nn.functional as F
from torch import nn

from dpvision.config import MAEConfig, ViTConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.models import mae, make_model

KEY = StepKey(seed=7, step=3)


def make_batch(num: int, size: int = 8, views: int = 1, seed: int = 0, dtype=torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        record_id_B=torch.randint(0, 2**62, (num,), generator=generator),
        valid_B=torch.ones(num, dtype=torch.bool),
        image_BVCHW=torch.randn(num, views, 3, size, size, generator=generator, dtype=torch.float64).to(dtype),
        label_B=torch.randint(0, 5, (num,), generator=generator),
    )


def rows(batch: Batch, index) -> Batch:
    return Batch(*(None if value is None else value[index] for value in batch))


def class_losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
    """Cross-entropy of every view, averaged over the views of a record."""
    views = [F.cross_entropy(model(batch.image_BVCHW[:, v]), batch.label_B, reduction="none") for v in range(batch.image_BVCHW.shape[1])]
    return torch.stack(views).mean(0)


def mae_losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
    order_BL = key.bits(batch.record_id_B, "mask.0", model.num_patches)
    return mae.losses(model, batch.image_BVCHW[:, 0], order_BL)


class Bare(nn.Module):
    """A bare token and a bare scale beside the layers, as in a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(6))
        self.scale = nn.Parameter(torch.ones(()))
        self.body = nn.Linear(192, 6)
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1)) * self.scale + self.token))


class Tied(nn.Module):
    """One weight under two names, used transposed and straight."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(192, 5, bias=False)
        self.up = nn.Linear(192, 5)
        self.up.weight = self.down.weight

    def forward(self, x):
        x = x.flatten(1)
        return self.up(torch.tanh(self.down(x) @ self.down.weight))


class Reused(nn.Module):
    """One module called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(192, 5)
        self.step = nn.Linear(5, 5)

    def forward(self, x):
        x = self.body(x.flatten(1))
        for _ in range(3):
            x = torch.tanh(self.step(x))
        return x


class Frozen(nn.Module):
    """A frozen weight in the middle, a frozen bias, and a parameter that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 5))
        self.body[0].bias.requires_grad_(False)
        self.body[2].weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.body(x.flatten(1))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 5)
    )


def tiny_mae() -> nn.Module:
    encoder = ViTConfig(image_size=8, patch_size=2, depth=2, width=16, num_heads=2)
    return make_model(MAEConfig(encoder=encoder, decoder_depth=1, decoder_width=8, decoder_num_heads=2), seed=1)


class GradientIsPicture(nn.Module):
    """Loss <w, x>: the gradient is the record's own picture, so a test can make any gradient it likes."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))


def picture_losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
    return (model.weight * batch.image_BVCHW[:, 0]).flatten(1).sum(1)


ZOO = {
    "bare": (Bare, class_losses),
    "tied": (Tied, class_losses),
    "reused": (Reused, class_losses),
    "frozen": (Frozen, class_losses),
    "convnet": (convnet, class_losses),
    "mae": (tiny_mae, mae_losses),
}
