"""What a masked autoencoder makes of pictures it sees a quarter of: three strips of pictures for a page.

Legend: B pictures, L patches, C channels, H height, W width.
"""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dpvision.checkpoint import load_checkpoint
from dpvision.config import DataConfig, RunConfig, from_dict
from dpvision.data.keys import StepKey
from dpvision.data.loader import pictures
from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.models import mae, make_model
from dpvision.models.layers import unpatchify

_GAP = 1 / 16
_LARGEST_PX = 128


@dataclass(frozen=True)
class Reconstructions:
    """Three strips of the same pictures, as data: URIs of PNG images."""

    seen: str
    """The patches that the model was shown; the others are transparent."""
    filled: str
    """The same, with the model's guess in place of what was hidden."""
    original: str
    count: int
    mask_ratio: float


def reconstruct_some(run: Path, store: Store, count: int = 8) -> Reconstructions:
    """Masked pictures, reconstructions and originals of ``count`` pictures spread over ``store``.

    Which ones, and their masks, depends on the store's size and the pictures' ids only.

    Args:
        run: run or checkpoint folder of a masked autoencoder.
        store: its pictures will be in the result.

    Raises:
        CheckpointError: there is no checkpoint, or it was altered.
        DataError: no picture could be read.
    """
    checkpoint = load_checkpoint(run)
    config = from_dict(RunConfig, checkpoint.manifest["config"], f"{checkpoint.path}: config")
    model = make_model(config.model, config.seed)
    assert isinstance(model, mae.MAE)
    model.load_state_dict(checkpoint.model)
    model.eval()
    rows = np.unique(np.linspace(0, store.num_records - 1, count).astype(np.int64))
    found = next(pictures(store, rows, config.model.encoder.image_size, config.data, batch_size=len(rows), workers=1), None)
    if found is None:
        raise DataError(f"report: none of {len(rows)} pictures of {store.path} could be read; expected pictures. Import the source again.")
    x_BCHW, row_B, _ = found
    record_id_B = torch.from_numpy(store.index["id"][row_B.numpy()].astype(np.int64))
    with torch.inference_mode():
        filled_BCHW, mask_BL = mae.reconstruct(model, x_BCHW, StepKey(config.seed, 0).bits(record_id_B, "report", model.num_patches))
    patch_numbers = 3 * config.model.encoder.patch_size**2
    hidden_BCHW = unpatchify(mask_BL[..., None].float().expand(-1, -1, patch_numbers), config.model.encoder.patch_size) > 0.5
    original = _pixels(x_BCHW, config.data)
    filled = _pixels(filled_BCHW, config.data)
    alpha = np.where(hidden_BCHW[:, :1].permute(0, 2, 3, 1).numpy(), 0, 255).astype(np.uint8)
    seen = np.concatenate([original, alpha], axis=-1)
    return Reconstructions(_strip(seen), _strip(filled), _strip(original), len(original), config.model.mask_ratio)


def _pixels(x_BCHW: Tensor, data: DataConfig) -> np.ndarray:
    """uint8 (B, H, W, 3) of normalised pictures."""
    mean, std = torch.tensor(data.mean)[:, None, None], torch.tensor(data.std)[:, None, None]
    return ((x_BCHW * std + mean).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def _strip(image_BHWC: np.ndarray) -> str:
    """One row of pictures with transparent gaps between them, as a data: URI."""
    B, H, W, C = image_BHWC.shape
    gap = max(2, round(W * _GAP))
    strip = np.zeros((H, B * (W + gap) - gap, 4), dtype=np.uint8)
    for b, image in enumerate(image_BHWC):
        here = strip[:, b * (W + gap) : b * (W + gap) + W]
        here[..., :C], here[..., 3] = image, image[..., 3] if C == 4 else 255
    picture = Image.fromarray(strip)
    if H > _LARGEST_PX:
        picture = picture.resize((round(picture.width * _LARGEST_PX / H), _LARGEST_PX), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
