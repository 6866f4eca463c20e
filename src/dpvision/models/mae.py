"""Masked autoencoder (He et al. 2022) in ViP's form, loss on masked patches only.

``MAEConfig.target`` selects what it predicts: pixels, pixels normalised per patch, or histograms of
oriented gradients. Each is a fixed function of the record's image, so the loss stays separable and
private training is unchanged.

Legend: B records, L patches, S kept patches, M = L - S masked patches, D encoder width, E values
per patch, T values per target, C channels, H, W; P patch side, S cell side in the targets.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.config import MAEConfig
from dpvision.errors import ConfigError
from dpvision.models.layers import NORM_EPS, Block, patchify, sincos_positions, unpatchify
from dpvision.models.vit import CHANNELS, ViT


class MAE(nn.Module):
    """Encoder of the visible patches, and a small decoder that predicts the masked ones.

    Raises:
        ConfigError: the mask leaves no visible patch.
    """

    decoder_position_LD: Tensor

    def __init__(self, cfg: MAEConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.encoder = ViT(cfg.encoder)
        if self.num_visible < 1:
            raise ConfigError(
                f"model: mask_ratio={cfg.mask_ratio} of {self.num_patches} patches; expected at "
                "least one visible patch. Use a smaller mask_ratio or patch_size."
            )
        width = cfg.decoder_width
        self.decoder_embed = nn.Linear(cfg.encoder.width, width)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.decoder_blocks = nn.ModuleList(
            Block(width, cfg.decoder_num_heads, cfg.encoder.mlp_ratio)
            for _ in range(cfg.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, target_size(cfg.target, cfg.encoder.patch_size, CHANNELS))
        grid = cfg.encoder.image_size // cfg.encoder.patch_size
        self.register_buffer(
            "decoder_position_LD",
            sincos_positions(grid, width),
            persistent=cfg.encoder.positions == "loaded",
        )

    @property
    def num_patches(self) -> int:
        """Number of patches of an image, visible and masked."""
        return self.encoder.num_patches

    @property
    def num_visible(self) -> int:
        """Number of patches that the encoder sees.

        num_patches x (1 - mask_ratio), rounded down as in MAE's code.
        """
        return int(self.num_patches * (1 - self.cfg.mask_ratio))

    def forward(self, patch_BLE: Tensor, order_BL: Tensor) -> Tensor:
        """Return the predicted targets of the masked patches.

        The decoder's tokens are ordered class, visible, masked, each with its patch's position.
        Blocks are equivariant to permutations of tokens, so the original order need not be
        restored.

        Args:
            patch_BLE: all patches of the images.
            order_BL: permutation of the patches; the first ``num_visible`` are visible.

        Returns:
            prediction_BMT, row m for patch ``order_BL[:, num_visible + m]``.
        """
        S = self.num_visible
        seen_BS, masked_BM = order_BL[:, :S], order_BL[:, S:]
        seen_BSE = patch_BLE.take_along_dim(seen_BS[..., None], dim=1)
        latent_BTD = self.decoder_embed(
            self.encoder.encode(self.encoder.embed(seen_BSE, self.encoder.position_LD[seen_BS]))
        )
        cls_B1D, latent_BSD = (
            latent_BTD[:, :1],
            latent_BTD[:, 1:] + self.decoder_position_LD[seen_BS],
        )
        guess_BMD = self.mask_token + self.decoder_position_LD[masked_BM]
        token_BLD = torch.cat([cls_B1D, latent_BSD, guess_BMD], dim=1)
        for block in self.decoder_blocks:
            token_BLD = block(token_BLD)
        return self.head(self.decoder_norm(token_BLD[:, 1 + S :]))


def losses(model: MAE, x_BCHW: Tensor, order_BL: Tensor) -> Tensor:
    """Return the reconstruction loss of each image.

    Mean squared error over the targets of its masked patches.

    Args:
        x_BCHW: normalised images.
        order_BL: int64 random keys, one per record and patch; the patches with the smallest keys
            are visible.

    Returns:
        loss_B, float32 also under autocast (float64 for float64 images).
    """
    patch_BLE = patchify(x_BCHW, model.cfg.encoder.patch_size)
    order_BL = order_BL.argsort(dim=1)
    prediction_BMT = model(patch_BLE, order_BL)
    target_BLT = make_targets(x_BCHW, model.cfg.encoder.patch_size, model.cfg.target)
    target_BMT = target_BLT.take_along_dim(order_BL[:, model.num_visible :, None], dim=1)
    error_BMT = prediction_BMT.to(torch.promote_types(target_BMT.dtype, torch.float32)) - target_BMT
    return error_BMT.square().mean(dim=(1, 2))


@torch.no_grad()
def reconstruct(model: MAE, x_BCHW: Tensor, order_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images with predictions in the masked patches, and the mask; for reports.

    Args:
        x_BCHW, order_BL: as for ``losses``.

    Returns:
        (prediction_BCHW, normalised like the images, visible patches unchanged; mask_BL bool, True
        where masked).

    Raises:
        ConfigError: the model predicts gradients instead of pixels.
    """
    if model.cfg.target == "gradients":
        raise ConfigError(
            "reconstruct: target='gradients'; expected a model that predicts pixels. Use a run "
            "with --model.target pixels."
        )
    patch_BLE = patchify(x_BCHW, model.cfg.encoder.patch_size)
    order_BL = order_BL.argsort(dim=1)
    masked_BM = order_BL[:, model.num_visible :]
    hidden_BME = patch_BLE.take_along_dim(masked_BM[..., None], dim=1)
    prediction_BME = to_pixels(
        model(patch_BLE, order_BL).to(patch_BLE.dtype), hidden_BME, model.cfg.target
    )
    filled_BLE = patch_BLE.scatter(
        1, masked_BM[..., None].expand_as(prediction_BME), prediction_BME
    )
    mask_BL = torch.zeros_like(order_BL, dtype=torch.bool).scatter(1, masked_BM, True)
    return unpatchify(filled_BLE, model.cfg.encoder.patch_size), mask_BL


ORIENTATIONS = 9
CELLS = 2
"""Cells per side of a patch."""
_NORM_EPS = 1e-6


def target_size(kind: str, patch_size: int, channels: int = 3) -> int:
    """Return T, the number of values predicted per patch."""
    return channels * ORIENTATIONS * CELLS**2 if kind == "gradients" else channels * patch_size**2


def make_targets(x_BCHW: Tensor, patch_size: int, kind: str) -> Tensor:
    """Return the targets of all patches, (B, L, T), in raster order.

    Args:
        x_BCHW: normalised images.
        kind: "pixels" (ViP); "normalised_pixels" (MAE's better variant: each patch minus its mean,
            over its standard deviation); "gradients" (MaskFeat, Wei et al. 2022: histograms of
            gradient orientations).
    """
    if kind == "gradients":
        return _gradient_histograms(x_BCHW, patch_size)
    patch_BLE = patchify(x_BCHW, patch_size)
    if kind == "pixels":
        return patch_BLE
    mean, variance = patch_BLE.mean(dim=-1, keepdim=True), patch_BLE.var(dim=-1, keepdim=True)
    return (patch_BLE - mean) / (variance + _NORM_EPS).sqrt()


def to_pixels(prediction_BLT: Tensor, patch_BLE: Tensor, kind: str) -> Tensor:
    """Return pixels (B, L, E) of predicted targets, for display only.

    Normalised ones use the true patch's mean and variance.
    """
    if kind == "pixels":
        return prediction_BLT
    assert kind == "normalised_pixels", "gradients have no pixels"
    mean, variance = patch_BLE.mean(dim=-1, keepdim=True), patch_BLE.var(dim=-1, keepdim=True)
    return prediction_BLT * (variance + _NORM_EPS).sqrt() + mean


def _gradient_histograms(x_BCHW: Tensor, patch_size: int) -> Tensor:
    """Return gradient magnitudes by unsigned orientation in nine bins, of Euclidean norm 1.

    For each channel and each of 2 x 2 cells.

    Returns:
        (B, L, C x 4 x 9).
    """
    padded = F.pad(x_BCHW, (1, 1, 1, 1), mode="replicate")
    right = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    size_BCHW = (right * right + down * down).sqrt()
    bin_BCHW = (torch.atan2(down, right) * (ORIENTATIONS / math.pi)).floor().long() % ORIENTATIONS
    one_hot = torch.arange(ORIENTATIONS, device=x_BCHW.device)[:, None, None]
    # A plane per orientation, averaged over cells: this avoids scatter, which would need rules for
    # vmap and one-pass clipping.
    planes = torch.where(bin_BCHW[:, :, None] == one_hot, size_BCHW[:, :, None], 0.0).flatten(1, 2)
    cells = F.avg_pool2d(planes, patch_size // CELLS).unflatten(1, (-1, ORIENTATIONS))
    cells = cells / (cells.norm(dim=2, keepdim=True) + _NORM_EPS)
    return patchify(cells.flatten(1, 2), CELLS)
