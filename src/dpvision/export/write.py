"""Export a run's model to a new folder: written, loaded again by the format's own library, compared
with the run, and only then given its name.
"""

import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dpvision.data.transform import LibraryData
from dpvision.errors import ConfigError
from dpvision.export.card import model_card
from dpvision.export.product import Product, dumped, open_product, refused, require_new
from dpvision.files import disk_refusals, new_folder
from dpvision.runs.folder import require_confidential

Format = Literal["timm", "transformers", "onnx", "safetensors", "peft"]
FORMATS: tuple[Format, ...] = get_args(Format)
TOLERANCE = 1e-5
"""Largest difference from the run's own outputs, relative to the largest of them if above 1."""
_OF_FEATURES = 1e-6
"""As much may differ the features, of length 1, that a head's long rows multiply: float32 features
of patches and scattering differ from those in float64 by 5e-6 to 14e-6.
"""
_ROWS = 3


@dataclass(frozen=True)
class Exported:
    """A finished export."""

    folder: Path
    files: dict[str, int]
    """Name of each file -> its bytes."""
    difference: float
    """Largest difference between outputs of the exported model and of the run."""
    headline: str | None
    """Of the statement; None for confidential weights."""
    how_to_load: str


def export(
    run: str | Path,
    to: Format,
    folder: str | Path,
    *,
    ema: bool = False,
    encoder: str | None = None,
) -> Exported:
    """Write a run's model in another program's format, with a model card and the run's statement.

    Args:
        folder: the new folder; its path needs a folder named confidential if the weights were
            trained on private images without a guarantee.
        ema: whether to take the averaged weights.
        encoder: spec of a head's encoder, if it has moved since the run.

    Raises:
        ConfigError: the format cannot hold this model, its library is not installed, the folder is
            not empty, or it is not confidential and must be.
        CheckpointError: there is no run or checkpoint, it was altered, or the disk refuses.
        PrivacyError: the run cannot be stated (``make_statement``).
    """
    run, folder = Path(run), Path(folder)
    require_new(folder)
    product = open_product(run, ema=ema, encoder=encoder)
    if product.statement is None:
        require_confidential(
            folder, "export", "weights trained on private images without a guarantee"
        )
    if to != "onnx" and product.data.own_sizes:
        raise refused(
            to, "every image is used at a resolution of its own (patches)", "Use --to onnx."
        )
    if to != "onnx" and isinstance(product.data, LibraryData):
        raise refused(
            to, "its encoder, and how images are resized, are transformers' (hf:)", "Use --to onnx."
        )
    if product.kind == "captioner" and to in ("timm", "transformers"):
        product = product.encoder_alone()  # neither has a decoder like ours
    target = importlib.import_module(f"dpvision.export.to_{to}")
    how_to_load = target.how_to_load(product)
    remedy = "Free some, or choose another folder."
    with disk_refusals("export", folder, remedy), new_folder(folder) as partial:
        stated = {}
        if product.statement is not None:
            text = json.dumps(product.statement, indent=1, allow_nan=False).encode() + b"\n"
            (partial / "statement.json").write_bytes(text)
            stated = {
                "headline": product.statement["headline"],
                "run_id": product.run_id,
                "sha256": hashlib.sha256(text).hexdigest(),
            }
        properties = {**product.properties, "statement": stated or None}
        metadata = {f"dpvision.{name}": dumped(value) for name, value in properties.items()}
        target.write(product, partial, metadata)
        (partial / "README.md").write_text(model_card(product, to, how_to_load))
        difference = _difference(product, target.read(product, partial), to)
        files = {
            path.relative_to(partial).as_posix(): path.stat().st_size
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
    return Exported(folder, files, difference, stated.get("headline"), how_to_load)


@torch.inference_mode()
def _difference(product: Product, exported: Callable[[Any], Any], to: str) -> float:
    """Return the largest difference between the exported model and the run's on pixels of fixed
    noise: for patches at each of their resolutions.
    """
    generator, side = torch.Generator().manual_seed(0), product.image_size
    sizes, mean, std = product.data.own_sizes, product.data.mean, product.data.std
    pixel_BCHW = torch.rand(max(_ROWS, len(sizes)), 3, side, side, generator=generator)
    x_BCHW = (pixel_BCHW - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    for x_CHW, own in zip(x_BCHW, sizes, strict=False):
        x_CHW[:, own:] = x_CHW[:, :, own:] = torch.nan  # as ``data.transform.normalise_canvas``
    ours, theirs = product.reference(x_BCHW), exported(x_BCHW)
    largest = ours.abs().max().item()
    difference = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else torch.inf
    most = TOLERANCE * max(1.0, largest)
    if product.head is not None and product.unit:
        most = max(most, _OF_FEATURES * product.head.weight.norm(dim=1).max().item())
    if not difference <= most:
        raise ConfigError(
            f"export: --to {to}: outputs differ by {difference:.3g}; expected at most {most:.3g}, "
            f"the largest being {largest:.3g}. This model does not fit the format: use onnx."
        )
    return difference
