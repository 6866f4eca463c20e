"""The captioner's network as a masked autoencoder: the warm start of DP-Cap.

Sander et al., ICML 2024, appendix A.1.

The encoder sees the visible patches; the decoder's queries represent the hidden ones, attend to
each other in full and to the encoder's tokens by cross-attention, and a linear head predicts the
targets. Only hidden patches are predicted, as the loss needs no others.

Legend: B records, L patches, S kept patches, M = L - S masked patches, D decoder width, E values
per patch, T values per target.
"""

import torch
from torch import Tensor, nn

from dpvision.config import CrossMAEConfig, ViTConfig
from dpvision.errors import ConfigError
from dpvision.models.cross_decoder import CrossDecoder
from dpvision.models.layers import patchify
from dpvision.models.mae import make_targets, target_size
from dpvision.models.vit import CHANNELS, ViT


class CrossMAE(nn.Module):
    """Encoder of the visible patches, DP-Cap's decoder, and a head.

    The head predicts the targets of the hidden patches.

    The mask token is not trained (DP-Cap). ``encoder`` and ``decoder`` have the same names as in
    ``captioner.Captioner``, which starts from them unchanged (appendix A.1).

    Raises:
        ConfigError: the mask leaves no visible patch.
    """

    def __init__(self, cfg: CrossMAEConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.encoder = ViT(cfg.encoder)
        self.decoder = CrossDecoder(
            cfg.decoder, cfg.encoder.width, cfg.encoder.image_size // cfg.encoder.patch_size
        )
        self.patch_head = PatchHead(cfg.encoder, cfg.decoder.width, cfg.mask_ratio, cfg.target)

    @property
    def num_patches(self) -> int:
        """Number of patches of an image, visible and masked."""
        return self.encoder.num_patches

    def forward(self, patch_BLE: Tensor, order_BL: Tensor) -> Tensor:
        """Return the predicted targets of the masked patches, prediction_BMT.

        Args:
            patch_BLE: all patches of the images.
            order_BL: permutation of the patches; the first ``patch_head.num_visible`` are visible.
        """
        return self.patch_head(self.encoder, self.decoder, patch_BLE, order_BL)


class PatchHead(nn.Module):
    """Mask token and linear map with which a decoder predicts hidden patches.

    Also used by a captioner with a second loss (Cap + MAE).
    """

    def __init__(self, encoder: ViTConfig, width: int, mask_ratio: float, target: str) -> None:
        super().__init__()
        self.patch_size, self.target = encoder.patch_size, target
        num_patches = (encoder.image_size // encoder.patch_size) ** 2
        self.num_visible = int(num_patches * (1 - mask_ratio))
        if self.num_visible < 1:
            raise ConfigError(
                f"model: mask_ratio={mask_ratio} of {num_patches} patches; expected at least one "
                "visible patch. Use a smaller mask_ratio or patch_size."
            )
        self.mask_token = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.linear = nn.Linear(width, target_size(target, encoder.patch_size, CHANNELS))

    def forward(
        self, encoder: ViT, decoder: CrossDecoder, patch_BLE: Tensor, order_BL: Tensor
    ) -> Tensor:
        """Return the predictions with the given encoder and decoder.

        As ``CrossMAE.forward`` does.
        """
        S = self.num_visible
        seen_BS, masked_BM = order_BL[:, :S], order_BL[:, S:]
        seen_BSE = patch_BLE.take_along_dim(seen_BS[..., None], dim=1)
        token = encoder.encode(encoder.embed(seen_BSE, encoder.position_LD[seen_BS]))
        memory = decoder.remember(token, decoder.position_LD[seen_BS])
        return self.linear(decoder(self.mask_token + decoder.position_LD[masked_BM], memory))

    def losses(
        self, encoder: ViT, decoder: CrossDecoder, x_BCHW: Tensor, order_BL: Tensor
    ) -> Tensor:
        """Return the mean squared error of each image over the targets of its masked patches.

        As ``losses`` below.
        """
        patch_BLE = patchify(x_BCHW, self.patch_size)
        order_BL = order_BL.argsort(dim=1)
        prediction_BMT = self(encoder, decoder, patch_BLE, order_BL)
        target_BLT = make_targets(x_BCHW, self.patch_size, self.target)
        target_BMT = target_BLT.take_along_dim(order_BL[:, self.num_visible :, None], dim=1)
        error_BMT = (
            prediction_BMT.to(torch.promote_types(target_BMT.dtype, torch.float32)) - target_BMT
        )
        return error_BMT.square().mean(dim=(1, 2))


def losses(model: CrossMAE, x_BCHW: Tensor, order_BL: Tensor) -> Tensor:
    """Return the reconstruction loss of each image.

    Mean squared error over the targets of its masked patches.

    Args:
        x_BCHW: normalised images.
        order_BL: int64 random keys, one per record and patch; the patches with the smallest keys
            are visible.

    Returns:
        loss_B, float32 also under autocast (float64 for float64 images).
    """
    return model.patch_head.losses(model.encoder, model.decoder, x_BCHW, order_BL)
