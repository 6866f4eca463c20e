"""A plain vision transformer encoder: pre-LayerNorm, class token, positions that are not trained.

Dosovitskiy et al. 2021; MAE.

Legend: B records, L tokens, D width, C channels, H height, W width, E values per patch.
"""

import torch
from torch import Tensor, nn

from dpvision.config import ViTConfig
from dpvision.models.layers import NORM_EPS, Block, patchify, sincos_positions

CHANNELS = 3


class ViT(nn.Module):
    """Vision transformer encoder from a config. ``make_model`` initialises its weights as in the
    paper.

    The patch embedding is a linear map of unfolded patches. It equals a convolution with stride =
    kernel, and lets the masked autoencoder embed only the patches that it keeps.

    Positions are a buffer: the fixed sin-cos table, or with ``positions="loaded"`` whatever the
    weights contain.
    """

    position_LD: Tensor

    def __init__(self, cfg: ViTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embed = nn.Linear(CHANNELS * cfg.patch_size**2, cfg.width)
        self.cls_token = nn.Parameter(torch.zeros(cfg.width), requires_grad=cfg.train_cls)
        self.blocks = nn.ModuleList(
            Block(cfg.width, cfg.num_heads, cfg.mlp_ratio, cfg.qkv_bias) for _ in range(cfg.depth)
        )
        self.norm = nn.LayerNorm(cfg.width, eps=NORM_EPS)
        self.register_buffer(
            "position_LD",
            sincos_positions(cfg.image_size // cfg.patch_size, cfg.width),
            persistent=cfg.positions == "loaded",
        )

    @property
    def num_patches(self) -> int:
        """Number of patches of an image, without the class token."""
        return (self.cfg.image_size // self.cfg.patch_size) ** 2

    def embed(self, patch_BLE: Tensor, position: Tensor) -> Tensor:
        """Return the tokens of patches with their positions, after the class token (position zero).

        Args:
            patch_BLE: flattened patches (``layers.patchify``), all or some.
            position: their rows of ``position_LD``, (L, D) or (B, L, D).

        Returns:
            (B, 1 + L, D).
        """
        token_BLD = self.patch_embed(patch_BLE) + position
        return torch.cat([self.cls_token.expand(token_BLD.shape[0], 1, -1), token_BLD], dim=1)

    def encode(self, token_BLD: Tensor) -> Tensor:
        """Apply the blocks and the final norm to embedded tokens, (B, L, D)."""
        for block in self.blocks:
            token_BLD = block(token_BLD)
        return self.norm(token_BLD)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the tokens after the final norm, class token first: (B, 1 + L, D)."""
        return self.encode(self.embed(patchify(x_BCHW, self.cfg.patch_size), self.position_LD))

    def forward_blocks(self, x_BCHW: Tensor) -> list[Tensor]:
        """Return the output of every block, before the final norm: ``depth`` tensors of shape (B, 1
        + L, D), for probes.
        """
        token_BLD = self.embed(patchify(x_BCHW, self.cfg.patch_size), self.position_LD)
        outputs = []
        for block in self.blocks:
            token_BLD = block(token_BLD)
            outputs.append(token_BLD)
        return outputs
