"""Small batches, their losses, and a zoo of networks that each hide one difficulty of per-record
gradients.

Here stand the ways of holding and sharing parameters; ``zoo_layers`` has the kinds of layers,
``zoo_tokens`` what is built of tokens, and ``zoo_published`` architectures as others wrote them. A
member is (builder, loss function).
"""

import torch
import torch.nn.functional as F
from torch import nn

from dpvision.config import MAEConfig, ViTConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.models import mae, make_model

KEY = StepKey(seed=7, step=3)
VOCABULARY = 11


def make_batch(
    num: int, size: int = 8, views: int = 1, seed: int = 0, dtype=torch.float32
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        record_id_B=torch.randint(0, 2**62, (num,), generator=generator),
        valid_B=torch.ones(num, dtype=torch.bool),
        image_BVCHW=torch.randn(
            num, views, 3, size, size, generator=generator, dtype=torch.float64
        ).to(dtype),
        label_B=torch.randint(0, 5, (num,), generator=generator),
        token_BVL=torch.randint(0, VOCABULARY, (num, 1, 7), generator=generator),
    )


def rows(batch: Batch, index) -> Batch:
    return Batch(*(None if value is None else value[index] for value in batch))


def class_losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
    """Cross-entropy of every view, averaged over the views of a record."""
    views = [
        F.cross_entropy(model(batch.image_BVCHW[:, v]), batch.label_B, reduction="none")
        for v in range(batch.image_BVCHW.shape[1])
    ]
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
    """A frozen weight in the middle, a frozen bias, and a parameter that the loss does not
    reach.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 5))
        self.body[0].bias.requires_grad_(False)
        self.body[2].weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.body(x.flatten(1))


class TwoBiases(nn.Module):
    """One weight with two different biases."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(192, 6)
        self.first, self.second = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.mixer = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.tanh(self.body(x.flatten(1)))
        x = torch.tanh(F.linear(x, self.mixer.weight, self.first))
        return self.head(torch.tanh(F.linear(x, self.mixer.weight, self.second)))


class BareInLinear(nn.Module):
    """A bare weight inside F.linear whose rows, and whose sum, are used outside of it as well; the
    bias is a scale, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(6, 192))
        self.bias = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        y = F.linear(x.flatten(1), self.weight, self.bias)
        return self.head(torch.tanh(y * self.bias + self.weight[:, 7] + self.weight.sum()))


class RightProduct(nn.Module):
    """x @ W for a matrix and for every token, and torch.matmul with a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(0.3 * torch.randn(12, 6))
        self.back = nn.Parameter(0.3 * torch.randn(5, 6))

    def forward(self, x):
        return torch.matmul(torch.tanh(patches(x) @ self.body).mean(1), self.back.T)


class TwoTowers(nn.Module):
    """Two towers for two halves of the image, and one head that both end in."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower, self.head = nn.Linear(96, 6), nn.Linear(96, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.upper(x[:, :, :4].flatten(1)))) + self.head(
            torch.sin(self.lower(x[:, :, 4:].flatten(1)))
        )


class Reversed(nn.Module):
    """Parameters registered in the opposite order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(6)
        self.body = nn.Linear(192, 6)

    def forward(self, x):
        return self.head(self.norm(self.body(x.flatten(1))))


class WithoutRule(nn.Module):
    """Parameters in an einsum, in a bilinear form and written into another tensor: no rule knows
    these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Parameter(0.3 * torch.randn(3, 12, 6))
        self.form = nn.Bilinear(6, 6, 5)
        self.token = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(5, 5)

    def forward(self, x):
        y = torch.einsum("bthc,hcd->btd", torch.stack([patches(x)] * 3, 2), self.mixer)
        first = torch.zeros_like(y)
        first[:, 0] = self.token
        y = torch.tanh(y + first).mean(1)
        return self.head(torch.tanh(self.form(y, y)))


class RuleAndUnknown(nn.Module):
    """One weight in a linear layer, and the same weight in a product for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = torch.tanh(self.body(patches(x)))
        return self.head(torch.tanh(torch.einsum("btc,dc->btd", x, self.body.weight)).mean(1))


class HiddenUse(nn.Module):
    """A weight used in F.linear, and again inside an autograd function of the model's own, where no
    rule sees it.
    """

    class Scale(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, scale):
            return x * scale

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, scale = ctx.saved_tensors
            return g * scale, (g * x).sum(0)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.Scale.apply(torch.tanh(self.body(x.flatten(1))), self.body.bias))


class WatchedWithoutGrad(nn.Module):
    """A weight that also sets a scale under no_grad: that use has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 6), nn.Linear(6, 5)

    def forward(self, x):
        y = self.body(x.flatten(1))
        with torch.no_grad():
            scale = 1 / (
                1
                + F.linear(x.flatten(1), self.body.weight).abs().mean(1, keepdim=True)
                + self.body.weight.norm()
            )
        return self.head(torch.tanh(y * scale))


class AsWideAsTheBatch(nn.Module):
    """Six tokens, six channels, six heads' worth of width: a batch of six looks like each of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 6)
        self.position = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6, 1, 1))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        x = self.norm(self.body(x.reshape(-1, 6, 32)) + self.position)
        x = self.head(x.transpose(0, 1)).transpose(0, 1).unflatten(2, (6, 1, 1)) * self.scale
        return torch.tanh(x.flatten(1)).unflatten(1, (6, 6)).mean(1)[:, :5]


def patches(x: torch.Tensor) -> torch.Tensor:
    """Images (B, 3, 8, 8) as 16 tokens of 12 numbers."""
    return F.unfold(x, 2, stride=2).mT


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(32),
        nn.Linear(32, 5),
    )


def tiny_mae() -> nn.Module:
    encoder = ViTConfig(image_size=8, patch_size=2, depth=2, width=16, num_heads=2)
    return make_model(
        MAEConfig(encoder=encoder, decoder_depth=1, decoder_width=8, decoder_num_heads=2), seed=1
    )


class GradientIsImage(nn.Module):
    """Loss <w, x>: the gradient is the record's own image, so a test can make any gradient it
    likes.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))


class TokenSums(nn.Module):
    """A linear layer whose inputs and output gradients are both the record's own image;
    ``token_sum_losses`` is the loss.

    Weight (P, Q). An image (1, T, Q + P) holds T tokens: their inputs x_t and the gradients w_t of
    their outputs, so that the gradient is sum over t of w_t x_t^T.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.map = nn.Linear(columns, rows, bias=False)


def token_sum_losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
    x_BTQ, w_BTP = batch.image_BVCHW[:, 0, 0].split(
        (model.map.in_features, model.map.out_features), 2
    )
    return (model.map(x_BTQ) * w_BTP).sum((1, 2))


def token_batch(x_BTQ: torch.Tensor, w_BTP: torch.Tensor) -> Batch:
    """A batch for ``TokenSums``."""
    return make_batch(len(x_BTQ))._replace(image_BVCHW=torch.cat([x_BTQ, w_BTP], 2)[:, None, None])


def image_losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
    return (model.weight * batch.image_BVCHW[:, 0]).flatten(1).sum(1)


ZOO = {
    "bare": (Bare, class_losses),
    "tied": (Tied, class_losses),
    "reused": (Reused, class_losses),
    "frozen": (Frozen, class_losses),
    "two_biases": (TwoBiases, class_losses),
    "bare_in_linear": (BareInLinear, class_losses),
    "right_product": (RightProduct, class_losses),
    "two_towers": (TwoTowers, class_losses),
    "reversed": (Reversed, class_losses),
    "without_rule": (WithoutRule, class_losses),
    "rule_and_unknown": (RuleAndUnknown, class_losses),
    "hidden_use": (HiddenUse, class_losses),
    "watched_without_grad": (WatchedWithoutGrad, class_losses),
    "as_wide_as_the_batch": (AsWideAsTheBatch, class_losses),
    "convnet": (convnet, class_losses),
    "mae": (tiny_mae, mae_losses),
}
