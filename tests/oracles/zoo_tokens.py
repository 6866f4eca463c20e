"""The zoo's networks of tokens: embeddings and heads, positions, attention, several views."""

import torch
import torch.nn.functional as F
from torch import nn
from zoo import VOCABULARY, class_losses, patches

from dpvision.models.head import linear_cross_entropy


class Captioner(nn.Module):
    """Embedding and vocabulary head in one weight; the states know the image."""

    def __init__(
        self, *, tied: bool = True, bias: bool = False, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12, padding_idx=padding_idx)
        self.image = nn.Linear(12, 12)
        self.mixer = nn.Linear(12, 12)
        self.head = nn.Linear(12, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def states(self, x, token_BL):
        return torch.tanh(
            self.mixer(self.embedding(token_BL).cumsum(1))
            + self.image(patches(x)).mean(1, keepdim=True)
        )


def token_losses(model, batch, key):
    """Next-token loss through logits, averaged over the tokens."""
    token_BL = batch.token_BVL[:, 0]
    logit_BLV = model.head(model.states(batch.image_BVCHW[:, 0], token_BL[:, :-1]))
    return F.cross_entropy(logit_BLV.mT, token_BL[:, 1:], reduction="none").mean(1)


def chunked_token_losses(model, batch, key):
    """The same through the vocabulary head; tokens 3 have no loss."""
    token_BL = batch.token_BVL[:, 0]
    hidden_BLD = model.states(batch.image_BVCHW[:, 0], token_BL[:, :-1])
    target_BL = token_BL[:, 1:].masked_fill(token_BL[:, 1:] == 3, -100)
    return linear_cross_entropy(hidden_BLD, model.head.weight, model.head.bias, target_BL).sum(1)


class Positions(nn.Module):
    """Class token by expand, a register by repeat and one by expand_as; positions sliced, one table
    added in place; masked tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.class_token, self.register = (
            nn.Parameter(torch.randn(1, 1, 12)),
            nn.Parameter(torch.randn(1, 1, 12)),
        )
        self.mask_token = nn.Parameter(torch.randn(12))
        self.position, self.row = (
            nn.Parameter(torch.randn(1, 40, 12)),
            nn.Parameter(torch.randn(1, 18, 1)),
        )
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        x = patches(x)
        x = torch.where(x[..., :1] > 0.5, self.mask_token, x)
        x = torch.cat(
            [self.class_token.expand(len(x), -1, -1), self.register.repeat(len(x), 1, 1), x], 1
        )
        x = x + self.position[:, : x.shape[1]]
        x = self.body(x)
        x += self.row
        return self.head(torch.tanh(x + self.class_token.expand_as(x)).mean(1))


class LayerScale(nn.Module):
    """A scale of channels in place, one of whole images, one computed from the parameter, one
    divided by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 1), nn.Linear(6, 5)
        self.gamma, self.whole, self.log_scale = (
            nn.Parameter(torch.ones(6)),
            nn.Parameter(torch.ones(())),
            nn.Parameter(torch.zeros(6, 1)),
        )

    def forward(self, x):
        x = self.body(x)
        x.mul_(self.gamma.view(1, -1, 1, 1))
        x = x * self.whole / self.log_scale.exp()[..., None]
        return self.head(torch.tanh(x).mean((2, 3)))


class AttentionBias(nn.Module):
    """Attention with a trained bias of its scores, by table and index, once inside the kernel and
    once by hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table, self.head = (
            nn.Linear(12, 36),
            nn.Parameter(torch.randn(31, 2)),
            nn.Linear(12, 5),
        )
        self.register_buffer("index", torch.arange(16)[:, None] - torch.arange(16) + 15)

    def forward(self, x):
        q, k, v = self.qkv(patches(x)).unflatten(2, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.flatten()].unflatten(0, (16, 16)).permute(2, 0, 1)
        kernel = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        by_hand = (q @ k.mT + bias).softmax(-1) @ v
        return self.head((kernel + by_hand.sin()).transpose(1, 2).flatten(2).mean(1))


class TorchAttention(nn.Module):
    """nn.MultiheadAttention, whose one call uses four parameters, and whose output layer sees its
    tokens in another order.
    """

    def __init__(self, *, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.head = (
            nn.MultiheadAttention(12, 2, batch_first=batch_first),
            nn.Linear(12, 5),
        )
        self.batch_first, self.need_weights = batch_first, need_weights

    def forward(self, x):
        x = patches(x) if self.batch_first else patches(x).transpose(0, 1)
        y, _ = self.attention(x, x, x, need_weights=self.need_weights)
        return self.head(torch.tanh(y).mean(1 if self.batch_first else 0))


class CrossAttention(nn.Module):
    """nn.MultiheadAttention whose keys have another width: each projection is a parameter; learned
    queries; trained k and v rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            8, 2, kdim=12, vdim=12, batch_first=True, add_bias_kv=True
        )
        self.query, self.head = nn.Parameter(torch.randn(1, 3, 8)), nn.Linear(8, 5)

    def forward(self, x):
        x = patches(x)
        return self.head(
            torch.tanh(self.attention(self.query.expand(len(x), -1, -1), x, x)[0]).mean(1)
        )


class Small(nn.Module):
    """Token layers and a convolution, for losses that put several views of a record through one
    pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.body, self.head = (
            nn.Conv2d(3, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Linear(4, 6),
            nn.Linear(6, 5),
        )
        self.token = nn.Parameter(torch.randn(1, 36, 4))

    def forward(self, x):
        return self.head(
            torch.tanh(self.body(self.norm(self.conv(x)).flatten(2).mT + self.token)).mean(1)
        )


def _own_loss(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def views_side_by_side(model, batch, key):
    """Two views of a record in neighbouring rows."""
    x = batch.image_BVCHW[:, 0]
    logits = model(torch.stack([x, x.flip(-1)], 1).flatten(0, 1))
    return _own_loss(logits, batch.label_B.repeat_interleave(2)).unflatten(0, (-1, 2)).mean(1)


def views_one_after_the_other(model, batch, key):
    """All first views, then all second ones: a record's rows lie apart."""
    x = batch.image_BVCHW[:, 0]
    return (
        _own_loss(model(torch.cat([x, x.flip(-1)])), batch.label_B.repeat(2))
        .unflatten(0, (2, -1))
        .mean(0)
    )


def tokens_first(model, batch, key):
    """Tokens of all records in rows of one matrix, those of one place side by side."""
    x = patches(batch.image_BVCHW[:, 0])
    y = model(x.transpose(0, 1).reshape(-1, 12)).unflatten(0, (16, -1))
    return _own_loss(torch.tanh(y).mean(0), batch.label_B)


TOKENS = {
    "captioner": (lambda: Captioner(tied=False, bias=True, padding_idx=2), token_losses),
    "captioner_tied": (Captioner, token_losses),
    "captioner_chunked": (lambda: Captioner(tied=False), chunked_token_losses),
    "captioner_chunked_bias": (lambda: Captioner(tied=False, bias=True), chunked_token_losses),
    "captioner_chunked_tied": (lambda: Captioner(bias=True), chunked_token_losses),
    "positions": (Positions, class_losses),
    "layer_scale": (LayerScale, class_losses),
    "attention_bias": (AttentionBias, class_losses),
    "attention_batch_first": (
        lambda: TorchAttention(batch_first=True, need_weights=False),
        class_losses,
    ),
    "attention_weights": (
        lambda: TorchAttention(batch_first=True, need_weights=True),
        class_losses,
    ),
    "attention_tokens_first": (
        lambda: TorchAttention(batch_first=False, need_weights=False),
        class_losses,
    ),
    "cross_attention": (CrossAttention, class_losses),
    "views_side_by_side": (Small, views_side_by_side),
    "views_one_after_the_other": (Small, views_one_after_the_other),
    "tokens_first": (
        lambda: nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 5)),
        tokens_first,
    ),
}
