"""timm's models as trainable encoders: pooling for a head, and positions for other image sizes.

Legend: B records, L positions, D width, C channels, H height, W width.
"""

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpvision.config import TimmConfig
from dpvision.errors import ConfigError

if TYPE_CHECKING:
    from timm.models.resnetv2 import ResNetV2

Network = TypeVar("Network", bound=nn.Module)
_BIT = re.compile(r"resnetv2_(50|101|152)x(\d+)_bit")
_BIT_DEPTHS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}
_BIT_EPS = 1e-8
_POSITIONS = "model.pos_embed"


class TimmEncoder(nn.Module):
    """A timm model without its classifier.

    With timm's initialisation, drawn from torch's global generator. BatchNorm stays in evaluation
    mode, so it is a fixed affine map by the statistics of the loaded weights, which no image
    updates; its scale and shift may be trained.
    """

    def __init__(self, cfg: TimmConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = make_timm(cfg)
        self._channels_last = getattr(self.model, "output_fmt", None) == "NHWC"
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all layers but BatchNorm, which stays in evaluation mode."""
        return keep_statistics(super().train(mode))

    def places(self, x_BCHW: Tensor) -> Tensor:
        """Return a vector per patch, or per position of the last map, (B, L, D).

        In raster order, without class token and registers.
        """
        return self._tokens(self.model.forward_features(x_BCHW))

    def _tokens(self, found: Tensor) -> Tensor:
        if found.ndim == 3:
            return found[:, getattr(self.model, "num_prefix_tokens", 0) :]
        return found.flatten(1, 2) if self._channels_last else found.flatten(2).transpose(1, 2)

    def pooled(self, x_BCHW: Tensor, pooling: str) -> Tensor:
        """Return a head's input, (B, D).

        The "mean" over positions, the class token ("cls"), or the input of timm's classifier
        ("own").
        """
        if pooling == "own":
            return self.model(x_BCHW)
        found = self.model.forward_features(x_BCHW)
        if pooling == "cls":
            return found[:, 0]
        if found.ndim == 4 and not self._channels_last:
            # Not by way of ``_tokens``: torch 2.15's BatchNorm in evaluation mode gives wrong
            # gradients on a CPU for one image whose output gradient is channels-last.
            return found.mean((2, 3))
        return self._tokens(found).mean(1)

    def width(self, pooling: str) -> int:
        """Return the feature dimension of ``pooled``.

        Raises:
            ConfigError: the model has no class token to pool.
        """
        if pooling == "cls" and getattr(self.model, "cls_token", None) is None:
            raise ConfigError(
                f"model: pooling='cls'; expected 'mean' or 'own': {self.cfg.name} has no class "
                "token. Use own."
            )
        return self.model.head_hidden_size if pooling == "own" else self.model.num_features

    def fitted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``weights`` with trained positions interpolated by timm to this image size.

        They are named as in ``state_dict``; the size is this encoder's.

        Only a vision transformer's position table is interpolated.
        """
        from timm.layers import resample_abs_pos_embed
        from timm.models import VisionTransformer

        model: Any = self.model
        given = weights.get(_POSITIONS)
        if (
            given is None
            or not isinstance(model, VisionTransformer)
            or model.pos_embed is None
            or given.shape == model.pos_embed.shape
        ):
            return weights
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        return weights | {
            _POSITIONS: resample_abs_pos_embed(
                given, list(model.patch_embed.grid_size), num_prefix_tokens=prefix
            )
        }


def keep_statistics(model: Network) -> Network:
    """Put every BatchNorm of a model into evaluation mode, in place, and return the model."""
    for part in model.modules():
        if isinstance(part, _BatchNorm):
            part.eval()
    return model


def is_timm_name(name: str) -> bool:
    """Return whether ``TimmConfig`` accepts a name."""
    import timm

    return timm.is_model(name) or _BIT.fullmatch(name) is not None


def make_timm(cfg: TimmConfig) -> Any:
    """Make timm's model of a config, without its classifier and without loading weights.

    Raises:
        ConfigError: timm does not accept the name, the options or the image size.
    """
    import timm  # takes seconds, so only for such networks

    try:
        known = timm.get_pretrained_cfg(cfg.name) if timm.is_model(cfg.name) else None
        if known is None:
            return _bit(cfg)
        more: dict[str, Any] = cfg.arguments | (
            {"img_size": cfg.image_size} if known.fixed_input_size else {}
        )
        model: Any = timm.create_model(cfg.name, pretrained=False, **more)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        got = f"name={cfg.name!r}, image_size={cfg.image_size}, options={list(cfg.options)}"
        raise ConfigError(
            f"model.encoder: {got} ({error}); expected arguments that timm.create_model accepts. "
            "Change them."
        ) from None
    model.reset_classifier(0)
    return model


def _bit(cfg: TimmConfig) -> "ResNetV2":
    """Make a Big Transfer ResNet of any width (Kolesnikov et al. 2020); timm registers only
    some.
    """
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    match = _BIT.fullmatch(cfg.name)
    if match is None:
        raise ConfigError(
            f"model.encoder: name={cfg.name!r}; expected one of timm's models. `dpvision doctor "
            f"{cfg.name}` lists similar names."
        )
    depth, width = match.groups()
    conv = partial(StdConv2d, eps=_BIT_EPS)
    return ResNetV2(
        list(_BIT_DEPTHS[depth]),
        num_classes=0,
        width_factor=int(width),
        stem_type="fixed",
        conv_layer=conv,
        **cfg.arguments,
    )
