"""Parts of a plain transformer, and the linear classifier of a private head.

Every part works under ``torch.func.vmap(grad)`` with one record, draws no random number in its
forward pass, and keeps no statistics of the data.

Legend: B records, L tokens, D width, H heads, K head width, or classes of a linear head, C
channels, P patch side.
"""

import torch
from torch import Tensor, nn

from dpvision.config import HeadConfig
from dpvision.errors import ConfigError

NORM_EPS = 1e-6
"""LayerNorm epsilon of MAE and ViP."""


def sincos_positions(grid: int, width: int) -> Tensor:
    """Return the fixed two-dimensional sin-cos position table of a square grid (MoCo v3, MAE).

    A quarter of the width each for sin and cos of the column, then of the row, at frequencies
    10000^(-4 i / width).

    Args:
        grid: tokens along one side.
        width: a multiple of 4.

    Returns:
        (grid * grid, width) float32, rows in raster order.
    """
    frequency = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.arange(grid, dtype=torch.float64)[:, None] * frequency
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)
    column = wave.repeat(grid, 1)
    row = wave.repeat_interleave(grid, dim=0)
    return torch.cat([column, row], dim=1).float()


def sincos_sequence(length: int, width: int) -> Tensor:
    """Return the fixed sin-cos position table of a sequence (Vaswani et al. 2017).

    At frequencies 10000^(-2 i / width), sines first.

    Args:
        length: tokens.
        width: a multiple of 2.

    Returns:
        (length, width) float32.
    """
    frequency = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()


def patchify(x_BCHW: Tensor, patch_size: int) -> Tensor:
    """Split images into patches in raster order, each flattened as (C, row, column).

    That is the layout of a convolution's weight.

    Returns:
        (B, L, C * patch_size^2).
    """
    rows = x_BCHW.unflatten(2, (-1, patch_size)).unflatten(4, (-1, patch_size))  # B C h P w P
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(patch_BLE: Tensor, patch_size: int) -> Tensor:
    """Invert ``patchify``.

    Returns:
        (B, C, H, W) with H = W.
    """
    grid = round(patch_BLE.shape[1] ** 0.5)
    blocks = patch_BLE.unflatten(2, (-1, patch_size, patch_size)).unflatten(
        1, (grid, grid)
    )  # B h w C P P
    return blocks.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class Attention(nn.Module):
    """Multi-head self-attention.

    Not fused, because torch's fused kernels have no batching rule: under ``vmap`` they run record
    by record.
    """

    def __init__(self, width: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the tokens after attention, (B, L, D)."""
        q_BHLK, k_BHLK, v_BHLK = (
            self.qkv(x_BLD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        scale = q_BHLK.shape[-1] ** -0.5
        weight_BHLL = (q_BHLK * scale @ k_BHLK.transpose(-2, -1)).softmax(dim=-1)
        mixed_BHLK = weight_BHLL @ v_BHLK
        return self.out(mixed_BHLK.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-LayerNorm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: float, qkv_bias: bool = True) -> None:
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attention = Attention(width, num_heads, qkv_bias)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the tokens after attention and MLP, (B, L, D)."""
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD))
        return x_BLD + self.mlp(self.norm2(x_BLD))


def init_weights(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise as MAE does, drawing from ``generator`` in the modules' order.

    Linear weights Xavier-uniform, biases 0, LayerNorms 1 and 0; embeddings N(0, 1); bare parameters
    (class and mask tokens) N(0, 0.02).
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, generator=generator)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
        else:
            for token in part.parameters(recurse=False):
                nn.init.normal_(token, std=0.02, generator=generator)


class LinearHead(nn.Module):
    """Linear classifier: scores = weight x + bias.

    x is the feature minus the run's public centre, divided by its public spread if the run has a
    public store, and scaled to length 1 if ``model.unit``.
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
        public = cfg.features.public_store is not None
        self.register_buffer("spread", torch.ones(cfg.encoder.width) if public else None)
        self.spread: Tensor | None

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return scores, float32 (B, K).

        The largest is the prediction; for multi-label records, every score above zero is one.
        """
        x_BD = x_BD - self.centre
        if self.spread is not None:
            x_BD = x_BD / self.spread
        if self.unit:
            x_BD = x_BD / torch.linalg.vector_norm(x_BD, dim=1, keepdim=True).clamp(
                min=torch.finfo(x_BD.dtype).tiny
            )
        return x_BD @ self.weight.T + self.bias
