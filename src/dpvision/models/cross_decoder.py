"""The decoder of DP-Cap: post-LayerNorm blocks with self-attention and cross-attention.

Vaswani et al. 2017.

The same decoder (Sander et al., ICML 2024, appendix A.1) predicts hidden patches with full
self-attention in the warm start, and words with causal self-attention in the captioner. As in
DP-Cap, attention and MLP have no bias.

Legend: B records, L decoder tokens, S encoder tokens (class token and patches), D decoder width, E
encoder width, H heads, K head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpvision.config import CrossDecoderConfig
from dpvision.models.layers import sincos_positions

POST_NORM_EPS = 1e-5
"""LayerNorm epsilon of DP-Cap's decoder."""


class KeysValues(NamedTuple):
    """Keys and values for attention."""

    k_BHLK: Tensor
    v_BHLK: Tensor


def attend(q_BHLK: Tensor, memory: KeysValues, seen: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v with heads joined, (B, L, D).

    Not fused, because fused kernels have no ``vmap`` batching rule.

    Args:
        seen: bool, broadcast to (B, H, L, S): the attention mask, True for visible tokens of the
            memory; if None, all.
    """
    score_BHLS = q_BHLK * q_BHLK.shape[-1] ** -0.5 @ memory.k_BHLK.transpose(-2, -1)
    if seen is not None:
        score_BHLS = score_BHLS.masked_fill(~seen, -torch.inf)
    return (score_BHLS.softmax(dim=-1) @ memory.v_BHLK).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head attention of the tokens to each other, without bias."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def project(self, x_BLD: Tensor) -> tuple[Tensor, KeysValues]:
        """Return queries (B, H, L, K), and keys and values."""
        q_BHLK, k_BHLK, v_BHLK = (
            self.qkv(x_BLD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        return q_BHLK, KeysValues(k_BHLK, v_BHLK)


class CrossAttention(nn.Module):
    """Multi-head attention of the tokens to the encoder's, without bias."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def queries(self, x_BLD: Tensor) -> Tensor:
        """Return queries, (B, H, L, K)."""
        return self.q(x_BLD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def offer(self, memory_BSD: Tensor) -> KeysValues:
        """Return keys and values of the encoder's tokens, equal for every word of a caption."""
        return KeysValues(
            *self.kv(memory_BSD)
            .unflatten(-1, (2, self.num_heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )


class CrossBlock(nn.Module):
    """Post-LayerNorm block: x = norm(x + part(x)) for each part.

    The parts are self-attention, cross-attention and MLP, in turn.
    """

    def __init__(self, cfg: CrossDecoderConfig) -> None:
        super().__init__()
        hidden = int(cfg.width * cfg.mlp_ratio)
        self.self_attention = SelfAttention(cfg.width, cfg.num_heads)
        self.norm1 = nn.LayerNorm(cfg.width, eps=POST_NORM_EPS)
        self.cross_attention = CrossAttention(cfg.width, cfg.num_heads)
        self.norm2 = nn.LayerNorm(cfg.width, eps=POST_NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.width, hidden, bias=False),
            nn.GELU(),
            nn.Linear(hidden, cfg.width, bias=False),
        )
        self.norm3 = nn.LayerNorm(cfg.width, eps=POST_NORM_EPS)

    def forward(self, x_BLD: Tensor, memory_BSD: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the tokens after the block, (B, L, D).

        ``seen`` masks the self-attention as in ``attend``.
        """
        q_BHLK, own = self.self_attention.project(x_BLD)
        x_BLD = self.norm1(x_BLD + self.self_attention.out(attend(q_BHLK, own, seen)))
        return self.look_and_think(x_BLD, self.cross_attention.offer(memory_BSD))

    def look_and_think(self, x_BLD: Tensor, memory: KeysValues) -> Tensor:
        """Apply cross-attention and MLP, (B, L, D)."""
        x_BLD = self.norm2(
            x_BLD + self.cross_attention.out(attend(self.cross_attention.queries(x_BLD), memory))
        )
        return self.norm3(x_BLD + self.mlp(x_BLD))

    def extend(
        self, x_B1D: Tensor, memory: KeysValues, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """Apply the block to one new token, (B, 1, D); return it and the extended past.

        The token attends to itself and ``past``.
        """
        q_BH1K, own = self.self_attention.project(x_B1D)
        if past is not None:
            own = KeysValues(*(torch.cat(pair, dim=2) for pair in zip(past, own, strict=True)))
        x_B1D = self.norm1(x_B1D + self.self_attention.out(attend(q_BH1K, own)))
        return self.look_and_think(x_B1D, memory), own


class CrossDecoder(nn.Module):
    """A bridge from the encoder's width, fixed patch positions, and the blocks."""

    position_LD: Tensor

    def __init__(self, cfg: CrossDecoderConfig, encoder_width: int, grid: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.bridge = nn.Linear(encoder_width, cfg.width)
        self.blocks = nn.ModuleList(CrossBlock(cfg) for _ in range(cfg.depth))
        self.register_buffer("position_LD", sincos_positions(grid, cfg.width), persistent=False)

    def remember(self, token_BSE: Tensor, position: Tensor | None = None) -> Tensor:
        """Return the encoder's tokens as input for the blocks, (B, S, D).

        Bridged, with positions added to the patches only.

        Args:
            token_BSE: encoder output, class token first.
            position: rows of ``position_LD`` of the patches, (S - 1, D) or (B, S - 1, D); if None,
                all of them in raster order.
        """
        bridged_BSD = self.bridge(token_BSE)
        position = self.position_LD if position is None else position
        return torch.cat([bridged_BSD[:, :1], bridged_BSD[:, 1:] + position], dim=1)

    def forward(self, x_BLD: Tensor, memory_BSD: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the tokens after all blocks, (B, L, D).

        ``seen`` is a bool mask broadcast to (B, H, L, L), or None for full attention.
        """
        for block in self.blocks:
            x_BLD = block(x_BLD, memory_BSD, seen)
        return x_BLD
