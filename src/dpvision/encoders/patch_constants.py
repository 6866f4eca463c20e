"""The constants of ``patch_features``, computed from procedural textures by ``learn_constants`` and
shipped with the package.

    python -m dpvision.encoders.patch_constants        recomputes the shipped files (about half an
                                                       hour on one core)

Shipping them makes features identical on all machines, and saves the first run the computation.

Legend: N textures, B images, C channels, H height, W width, P paths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.encoders.patches import PatchBank, learn_bank
from dpvision.encoders.scattering import Scattering, make_scattering
from dpvision.encoders.whitening import Whitening, cell_frequencies, fit_whitening
from dpvision.errors import CheckpointError
from dpvision.synthetic.textures import textures
from dpvision.threads import is_traced

SIZES = (32, 64, 128, 224)
"""Resolutions of input images, px."""
SCATTERING_CAP = 64
"""Larger images are resized to this side before scattering, px: four times the area would take four
times as long.
"""
FOLDER = Path(__file__).parent / "constants"
HIGHEST_ORDER = 3
_SCATTERING_CELLS = 8
_SCATTERING_CHANNELS = 243
_BATCH = 16
_SCATTERED_PX = 4 * 32 * 32
"""Pixels whose wavelet coefficients fit into a core's cache; with four times as many, each takes
1.5 to 2 times as long.
"""


@dataclass(frozen=True)
class PatchSettings:
    """Settings that determine the constants of one size; tuned on training images of CIFAR-10 and
    EuroSAT (docs/features_free.md).
    """

    side_px: int
    stride: int
    num_textures: int
    num_atoms: int = 800
    patch_px: int = 6
    cells: int = 3
    floor: float = 0.2
    """Regularisation w of the patches' whitening."""
    energy: tuple[float, ...] = (4.0, 2.0, 1.0, 0.5)
    """Energy of the patches' frequencies over the cells (``whitening.cell_frequencies``)."""
    scattering_floor: float = 0.3


SETTINGS = {
    # Strides that give about 30 positions per side, and leave out an even number of pixels.
    32: PatchSettings(32, stride=1, num_textures=4000),
    64: PatchSettings(64, stride=2, num_textures=4000),
    128: PatchSettings(128, stride=4, num_textures=3000),
    224: PatchSettings(224, stride=6, num_textures=2000),
}


class SizeConstants(nn.Module):
    """The maps learned from textures of one size."""

    def __init__(self, bank: PatchBank, patches: Whitening, scattering: Whitening) -> None:
        super().__init__()
        self.bank, self.patches, self.scattering = bank, patches, scattering


@torch.inference_mode()
def learn_constants(settings: PatchSettings) -> SizeConstants:
    """Learn bank and whitening from procedural textures of the settings' size."""
    texture_NCHW = textures(torch.arange(settings.num_textures), settings.side_px)
    bank = learn_bank(
        texture_NCHW, settings.num_atoms, settings.patch_px, settings.stride, settings.cells
    )
    transform = make_scattering(min(settings.side_px, SCATTERING_CAP), centred=True)
    patches = fit_whitening(
        _over(bank, texture_NCHW), settings.floor, cells_QQ=_patch_frequencies(settings)
    )
    scattering = fit_whitening(
        _over(partial(scattering_channels, transform), texture_NCHW),
        settings.scattering_floor,
        mirror_channels(transform),
        _scattering_frequencies(),
    )
    return SizeConstants(bank, patches, scattering)


def scattering_channels(transform: Scattering, x_BCHW: Tensor) -> Tensor:
    """Return log S on 8 x 8 cells, averaged with the mirror image: float32 (B, C P, 8 x 4), the
    left half, which the right half mirrors.
    """
    if x_BCHW.shape[-1] != transform.side_px:
        x_BCHW = F.interpolate(x_BCHW, (transform.side_px,) * 2, mode="bilinear", antialias=True)
    count = max(1, _SCATTERED_PX // transform.side_px**2)
    if x_BCHW.device.type == "cpu" and not is_traced() and len(x_BCHW) > count:
        return torch.cat([scattering_channels(transform, part) for part in x_BCHW.split(count)])
    s_BCHW = transform(x_BCHW, log=True).flatten(1, 2)
    mirrored_BCHW = s_BCHW[:, mirror_channels(transform).to(x_BCHW.device)].flip(-1)
    s_BCHW = F.adaptive_avg_pool2d((s_BCHW + mirrored_BCHW) / 2, _SCATTERING_CELLS)
    return s_BCHW[..., : _SCATTERING_CELLS // 2].flatten(2)


def _patch_frequencies(settings: PatchSettings) -> Tensor:
    return cell_frequencies(settings.cells, settings.cells, settings.energy)


def _scattering_frequencies() -> Tensor:
    """Return the transform over the left half of the cells: its row cosines are the even
    frequencies of a symmetric full row.
    """
    return cell_frequencies(_SCATTERING_CELLS, _SCATTERING_CELLS // 2, [1.0])


def feature_orders(*, scattering: bool) -> Tensor:
    """Return the spatial frequency of each dimension of ``patch_features``, 0 (the mean over cells)
    to ``HIGHEST_ORDER``: int64 (D,).

    For patches it is u + v over 3 x 3 cells; for scattering (u + v) / 2 over 8 x 8 cells, rounded
    up, since its cells are less than half as wide.
    """
    settings = SETTINGS[32]
    cell = torch.arange(settings.cells)
    order_D = (cell[:, None] + cell).flatten().repeat_interleave(2 * settings.num_atoms)
    if scattering:
        cell = torch.arange(_SCATTERING_CELLS)
        order_Q = (cell[:, None] + cell[::2] + 1).div(2, rounding_mode="floor").flatten()
        order_D = torch.cat([order_D, order_Q.repeat_interleave(_SCATTERING_CHANNELS)])
    return order_D.clamp(max=HIGHEST_ORDER)


def mirror_channels(transform: Scattering) -> Tensor:
    """Return the channel that each channel becomes in the mirror image (direction pi - angle):
    int64 (3 P,).
    """
    scales, count = transform.num_scales, transform.num_directions
    back = [(count - direction) % count for direction in range(count)]
    paths = [0, *(1 + scale * count + direction for scale in range(scales) for direction in back)]
    for first in range(scales - 1):
        deeper, start = scales - 1 - first, len(paths)
        paths += [
            start + (one * deeper + scale) * count + two
            for one in back
            for scale in range(deeper)
            for two in back
        ]
    path_P = torch.tensor(paths)
    return torch.cat([path_P + colour * len(paths) for colour in range(3)])


def save_constants(constants: SizeConstants, path: Path) -> None:
    """Write a safetensors file, with lower triangles as float16."""
    tensors = {"weight": constants.bank.weight_PK, "bias": constants.bank.bias_K}
    for name, whitening in (("patches", constants.patches), ("scattering", constants.scattering)):
        tensors[f"{name}.mean"] = whitening.mean_CQ
        tensors[f"{name}.matrix"] = whitening.matrix_CC[_triangle(len(whitening.matrix_CC))].half()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load_constants(side_px: int, folder: Path = FOLDER) -> SizeConstants:
    """Load the constants of one of ``SIZES``.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path, settings = folder / f"patches-{side_px}px.safetensors", SETTINGS[side_px]
    try:
        found = load_file(path)
        bank = PatchBank(
            found["weight"], found["bias"], settings.patch_px, settings.stride, settings.cells
        )
        return SizeConstants(
            bank,
            _whitening(found, "patches", _patch_frequencies(settings)),
            _whitening(found, "scattering", _scattering_frequencies()),
        )
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"patches: {path} cannot be read ({error}); expected a file of this package. "
            "Reinstall dpvision."
        ) from None


def _whitening(found: dict[str, Tensor], name: str, cells_QQ: Tensor) -> Whitening:
    mean_CQ = found[f"{name}.mean"]
    matrix_CC = torch.zeros(len(mean_CQ), len(mean_CQ))
    matrix_CC[_triangle(len(mean_CQ))] = found[f"{name}.matrix"].float()
    return Whitening(mean_CQ, matrix_CC, cells_QQ)


def _triangle(side: int) -> tuple[Tensor, Tensor]:
    row, column = torch.tril_indices(side, side)
    return row, column


def _over(function: Callable[[Tensor], Tensor], texture_NCHW: Tensor) -> Tensor:
    return torch.cat([function(part.float() / 255) for part in texture_NCHW.split(_BATCH)])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for size, chosen in SETTINGS.items():
        save_constants(learn_constants(chosen), FOLDER / f"patches-{size}px.safetensors")
        print(f"{size} px: {FOLDER / f'patches-{size}px.safetensors'}", flush=True)
