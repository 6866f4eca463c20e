"""A plain vision transformer for images of any size, for detection and segmentation, initialised
from a ``ViT``. It adds:

- Positions: the square table of pre-training, resized bicubically to the image's grid, then
  trained.
- Windows (ViTDet, Li et al. 2022, section 3): most blocks attend within squares of ``window``
  tokens; a few, the global ones, everywhere. Other grids are padded with zeros right and below; as
  in ViTDet, padding is not masked in the attention.
- Relative positions (ViTDet, Li et al. 2022, after MViTv2): a query q adds q . R_row[i - i'] + q .
  R_column[j - j'] to its logit with the token at (i', j'); zero at the start. The class token has
  none.
- Stochastic depth (Huang et al. 2016), whole records, its probability rising linearly from 0 at the
  first block.

Stochastic depth draws from torch's global generator: this network is only for training without
privacy.

Legend: B records, C channels, H height, W width (px); D width, h x w grid of patches, L tokens, N
heads, K head width, R relative offsets.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError
from dpvision.models.layers import Block, patchify
from dpvision.models.vit import ViT

Grid = tuple[int, int]


class DenseViT(nn.Module):
    """A transformer that returns its blocks' maps, for images of any size that its patches tile.

    Without windows, relative positions and stochastic depth, at the size of pre-training, it equals
    ``ViT.forward_blocks``.
    """

    def __init__(
        self,
        vit: ViT,
        *,
        window: int = 0,
        global_blocks: tuple[int, ...] = (),
        relative_positions: bool = False,
        drop_path: float = 0.0,
        class_token: bool = True,
        checkpointing: bool = False,
        relative_grid: int | None = None,
    ) -> None:
        """Copy ``vit``'s weights, without its final norm.

        Args:
            window: side of the windows in tokens; if 0, all blocks are global.
            global_blocks: indices of the global blocks of a windowed network, from 0.
            relative_positions: whether to add relative positions to all blocks.
            drop_path: probability of the last block's stochastic depth, 0 <= p < 1.
            class_token: whether to keep the class token; must be False with windows.
            checkpointing: whether to recompute each block in the backward pass instead of storing
                its activations.
            relative_grid: side in tokens of global blocks' relative positions; other sides
                interpolate them linearly. If None, the grid of pre-training.

        Raises:
            ConfigError: a value out of range, or a class token with windows.
        """
        super().__init__()
        self.width, self.patch_size, self.depth = vit.cfg.width, vit.cfg.patch_size, vit.cfg.depth
        grid = vit.cfg.image_size // vit.cfg.patch_size if relative_grid is None else relative_grid
        for name, value, fits, rule in (
            ("window", window, window >= 0, "0 (none) or a number of tokens"),
            (
                "global_blocks",
                global_blocks,
                all(0 <= b < self.depth for b in global_blocks),
                f"blocks from 0 to {self.depth - 1}",
            ),
            ("drop_path", drop_path, 0 <= drop_path < 1, "0 <= drop_path < 1"),
            ("relative_grid", relative_grid, grid >= 1, "at least 1 token"),
            (
                "class_token",
                class_token,
                not (class_token and window),
                f"False with windows (of {window})",
            ),
        ):
            if not fits:
                raise ConfigError(
                    f"dense_vit: {name}={value!r}; expected {rule}. Change the value."
                )
        self.patch_embed = copy.deepcopy(vit.patch_embed)
        self.cls_token = nn.Parameter(vit.cls_token.detach().clone()) if class_token else None
        self.position_LD = nn.Parameter(vit.position_LD.detach().clone())
        self.checkpointing = checkpointing
        blocks = []
        taken: list[Any] = [copy.deepcopy(block) for block in vit.blocks]
        for i, block in enumerate(taken):
            side = 0 if i in global_blocks else window
            rate = drop_path * i / max(self.depth - 1, 1)
            relative = (side or grid) if relative_positions else None
            blocks.append(DenseBlock(block, side, relative, rate))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_BCHW: Tensor, blocks: tuple[int, ...]) -> list[Tensor]:
        """Return the maps after ``blocks`` (from 0), before the final norm, in the given order;
        later blocks are not computed.

        Args:
            x_BCHW: normalised images, H and W multiples of the patch.

        Returns:
            (B, D, H / patch, W / patch) for each of ``blocks``.

        Raises:
            ConfigError: a side is not a multiple of the patch, or there is no such block.
        """
        (height, width), p = x_BCHW.shape[-2:], self.patch_size
        if height % p or width % p or not height or not width:
            raise ConfigError(
                f"dense_vit: image of {height} x {width} px; expected multiples of the patch, "
                f"{p} px. Pad it."
            )
        if not blocks or not all(0 <= b < self.depth for b in blocks):
            raise ConfigError(
                f"dense_vit: blocks={blocks}; expected some of 0 to {self.depth - 1}. Choose "
                "others."
            )
        grid = (height // p, width // p)
        token_BLD = self.patch_embed(patchify(x_BCHW, p)) + self.positions(grid)
        if self.cls_token is not None:
            token_BLD = torch.cat([self.cls_token.expand(len(token_BLD), 1, -1), token_BLD], dim=1)
        found: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks[: max(blocks) + 1]):
            if self.checkpointing and self.training:
                token_BLD = checkpoint(block, token_BLD, grid, use_reentrant=False)
            else:
                token_BLD = block(token_BLD, grid)
            if i in blocks:
                found[i] = token_BLD[:, -grid[0] * grid[1] :].transpose(1, 2).unflatten(-1, grid)
        return [found[b] for b in blocks]

    def positions(self, grid: Grid) -> Tensor:
        """Return the position table resized to ``grid``, (h w, D), in raster order."""
        return resample_abs_pos_embed(
            self.position_LD[None], list(grid), num_prefix_tokens=0, antialias=False
        )[0]


class DenseBlock(nn.Module):
    """A ``Block``'s weights with windows, relative positions and stochastic depth."""

    def __init__(self, block: Block, window: int, relative: int | None, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = block.norm1, block.norm2, block.mlp
        self.qkv, self.out, self.num_heads = (
            block.attention.qkv,
            block.attention.out,
            block.attention.num_heads,
        )
        self.window = window
        self.row_RK: nn.Parameter | None = None
        self.column_RK: nn.Parameter | None = None
        if relative is not None:
            head_width = block.norm1.normalized_shape[0] // self.num_heads
            self.row_RK, self.column_RK = (
                nn.Parameter(torch.zeros(2 * relative - 1, head_width)) for _ in range(2)
            )
        self.drop_path = StochasticDepth(drop_path, "row")

    def forward(self, x_BLD: Tensor, grid: Grid) -> Tensor:
        """Return the tokens after attention and MLP, (B, L, D): an optional class token, then
        ``grid``'s in raster order.
        """
        x_BLD = x_BLD + self.drop_path(self._mixed(self.norm1(x_BLD), grid))
        return x_BLD + self.drop_path(self.mlp(self.norm2(x_BLD)))

    def _mixed(self, x_BLD: Tensor, grid: Grid) -> Tensor:
        if not self.window:
            return self._attention(x_BLD, grid)
        side, (h, w) = self.window, grid
        x_BhwD = F.pad(x_BLD.unflatten(1, grid), (0, 0, 0, -w % side, 0, -h % side))
        cut = (
            x_BhwD.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
        )  # B, windows down, across, side, side, D
        mixed = (
            self._attention(cut.flatten(3, 4).flatten(0, 2), (side, side))
            .unflatten(1, (side, side))
            .unflatten(0, cut.shape[:3])
        )
        return mixed.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :h, :w].flatten(1, 2)

    def _attention(self, x_BLD: Tensor, grid: Grid) -> Tensor:
        q_BNLK, k_BNLK, v_BNLK = (
            self.qkv(x_BLD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        if self.row_RK is None or self.column_RK is None:
            mixed_BNLK = F.scaled_dot_product_attention(q_BNLK, k_BNLK, v_BNLK)
        else:
            q, k = self._with_relative(q_BNLK, k_BNLK, grid, self.row_RK, self.column_RK)
            mixed_BNLK = F.scaled_dot_product_attention(q, k, v_BNLK, scale=1.0)
        return self.out(mixed_BNLK.transpose(1, 2).flatten(2))

    @staticmethod
    def _with_relative(
        q: Tensor, k: Tensor, grid: Grid, row_RK: Tensor, column_RK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (B, N, L, K + h + w + padding), whose product is scaled logit +
        relative positions.

        A key at (i', j') gets one-hot vectors of i' and j', a query the values that they select: no
        (L, L) table per head is stored, which would take 800 MB per image at 64 x 64 tokens.
        """
        (h, w), first = grid, q.shape[2] - grid[0] * grid[1]
        q_BNhwK = q[:, :, first:].unflatten(2, grid)
        by_row = torch.einsum("bnhwk,hik->bnhwi", q_BNhwK, relative_table(row_RK, h).to(q.dtype))
        by_column = torch.einsum(
            "bnhwk,wjk->bnhwj", q_BNhwK, relative_table(column_RK, w).to(q.dtype)
        )
        picked = F.pad(torch.cat([by_row, by_column], dim=-1).flatten(2, 3), (0, 0, first, 0))
        unit_row = torch.eye(h, dtype=k.dtype, device=k.device).repeat_interleave(w, 0)
        unit_column = torch.eye(w, dtype=k.dtype, device=k.device).repeat(h, 1)
        units = F.pad(torch.cat([unit_row, unit_column], dim=1), (0, 0, first, 0)).expand(
            *k.shape[:2], -1, -1
        )
        # Fused GPU kernels need widths that are multiples of 8; zeros change no product.
        spare = q.new_zeros(()).expand(*q.shape[:3], -(q.shape[-1] + h + w) % 8)
        return torch.cat([q * q.shape[-1] ** -0.5, picked, spare], dim=-1), torch.cat(
            [k, units, spare], dim=-1
        )


def relative_table(place_RK: Tensor, side: int) -> Tensor:
    """Return the vectors of every pair of positions on a line, (side, side, K): entry (i, i') is
    the vector of i - i'.

    Args:
        place_RK: vectors of the distances -(S - 1) to S - 1, in this order; interpolated linearly
            if S is not ``side``.
    """
    if len(place_RK) != 2 * side - 1:
        place_RK = F.interpolate(place_RK.T[None], size=2 * side - 1, mode="linear")[0].T
    at = torch.arange(side, device=place_RK.device)
    return place_RK[at[:, None] - at[None] + side - 1]


def plain_vit(encoder: Encoder) -> ViT:
    """Return a copy of an encoder's network.

    Raises:
        ConfigError: it is not a plain ``models.vit.ViT`` (a run's, ``vip:``, ``mae:`` or
            ``random:``).
    """
    network = getattr(encoder.backbone(), "network", None) if encoder.backbone is not None else None
    if not isinstance(network, ViT):
        raise ConfigError(
            f"encoder: {encoder.name} is not a plain vision transformer; expected a run of one, "
            "random:RUN, vip:FILE or mae:FILE, whose blocks accept windows and other positions. "
            "Use one of these."
        )
    return network


def dense_backbone(encoder: Encoder, **kw: Any) -> DenseViT:
    """Return a new trainable ``DenseViT`` with a copy of an encoder's weights, on the CPU; ``kw``
    are its arguments. Raises as ``plain_vit`` and ``DenseViT``.
    """
    return DenseViT(plain_vit(encoder).requires_grad_(True), **kw)


def layer_decay_groups(
    backbone: DenseViT,
    rest: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    layer_decay: float,
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups, with rates learning_rate x layer_decay^(depth + 1 - layer)
    (ELECTRA, BEiT).

    Layer 0 is the patch embedding with class token and positions, layer i + 1 is block i, and
    ``rest`` has the full rate. Norms, biases, the class token and all positions have no weight
    decay.

    Args:
        rest: parameters outside the backbone; backbone parameters and frozen ones are ignored.
        layer_decay: in (0, 1]; 1 gives the same rate everywhere.

    Returns:
        Groups with "params", "lr" and "weight_decay": first layer first, decaying weights before
        the others.
    """
    layers: list[dict[str, nn.Parameter]] = [{} for _ in range(backbone.depth + 2)]
    for name, parameter in backbone.named_parameters():
        layers[int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0][name] = parameter
    ours = {id(parameter) for parameter in backbone.parameters()}
    layers[-1] = {
        f"rest.{i}": parameter for i, parameter in enumerate(rest) if id(parameter) not in ours
    }
    groups = []
    for layer, named in enumerate(layers):
        rate = learning_rate * layer_decay ** (backbone.depth + 1 - layer)
        for decays in (True, False):
            chosen = [
                p for name, p in named.items() if p.requires_grad and _decays(name, p) == decays
            ]
            if chosen:
                groups.append(
                    {"params": chosen, "lr": rate, "weight_decay": weight_decay if decays else 0.0}
                )
    return groups


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim > 1 and name.rpartition(".")[2] not in (
        "position_LD",
        "row_RK",
        "column_RK",
    )
