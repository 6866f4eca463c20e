"""Find weights opened under another model's name, by the statistics in their BatchNorm layers.

timm has pairs of models whose tensors have the same shapes and which compute different functions:
``tf_efficientnet_lite0`` pads as TensorFlow does, has another eps, and its images are normalised
otherwise than those of ``efficientnet_lite0``. A file opened under the wrong name of the two loses
accuracy without an error. A trained BatchNorm layer stores mean and variance of its input, so that
the right name is the one under which the layers' inputs are closest to what is stored. The images
are sixteen procedural textures, shipped with the package, since to make them takes longer than the
rest of the check: no private image is read.

    python -m dpvision.encoders.batch_statistics        makes their file

What this cannot see: a model without BatchNorm, and names or normalisations that timm does not
list for these shapes.

Legend: B images, C channels, H height, W width.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpvision.errors import CheckpointError
from dpvision.synthetic.textures import textures

Colours = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation by which images are normalised."""

TEXTURES = Path(__file__).parent / "constants" / "textures-64px.safetensors"
_NUM_IMAGES, _SIZE_PX = 16, 64
_FITS, _WORSE = 0.1, 5.0
"""A normalisation is refused where another one fits the first layer within _FITS, in nats of a
median channel, and it is _WORSE times as far.
"""
_ALL_FIT, _ALL_WORSE = 0.6, 1.06
"""The same for a name, over all layers."""
_MOST = 5.0  # of a channel, so that those which hardly vary do not decide


def check_statistics(
    name: str, tensors: Mapping[str, Tensor], mean: Any, std: Any, where: str
) -> None:
    """Refuse weights whose BatchNorm statistics fit another name or normalisation in timm better.

    Args:
        name: timm's name of the model, with or without a tag.
        tensors: the file's tensors under timm's names; a classifier does not count.
        mean, std: the normalisation of images under this name.
        where: the file, for errors.

    Raises:
        CheckpointError: another name or tag of the same shapes fits (names it).
    """
    base, given = name.partition(".")[0], (tuple(mean), tuple(std))
    twin = base.removeprefix("tf_") if base.startswith("tf_") else f"tf_{base}"
    names = [n for n in (base, twin) if timm.is_model(n)]
    known = {label: colours for n in names for label, colours in _tags(n).items()}
    if (len(names) == 1 and set(known.values()) <= {given}) or not _learned(tensors):
        return
    model = _model(base, tensors)
    first = {
        colours: _distances(model, colours, first=True)[0].median().item()
        for colours in {given, *known.values()}
    }
    best = min(first, key=first.__getitem__)
    if first[best] <= _FITS and first[given] > _WORSE * first[best]:
        labels = [label for label, colours in known.items() if colours == best]
        raise CheckpointError(
            f"weights: {where}: normalisation={_words(given)}, of timm:{name}; expected "
            f"{_words(best)}, by the statistics in the file's first BatchNorm. Use "
            f"{_one_of(labels, where)}, whose tensors have the same shapes; or state mean and std "
            "in config.json beside the file (docs/encoders.md)."
        )
    if len(names) == 2:
        ours, theirs = (
            sum(layer_C.clamp_max(_MOST).mean().item() for layer_C in layers) / len(layers)
            for layers in (_distances(m, given) for m in (model, _model(twin, tensors)))
        )
        if theirs <= _ALL_FIT and ours > _ALL_WORSE * theirs:
            raise CheckpointError(
                f"weights: {where}: name=timm:{name}; expected timm:{twin}, whose tensors have the "
                "same shapes, by the statistics in the file's BatchNorm layers. Use "
                f"{_one_of([twin], where)}; or state the architecture in config.json beside the "
                "file (docs/encoders.md)."
            )


def _tags(base: str) -> dict[str, Colours]:
    """Return the normalisation of a model, and those of its tags that have another, by name."""
    found: dict[str, Colours] = {}
    for label in (base, *timm.list_pretrained(f"{base}.*")):
        cfg = timm.get_pretrained_cfg(label)
        if cfg is not None and (tuple(cfg.mean), tuple(cfg.std)) != found.get(base):
            found[label] = (tuple(cfg.mean), tuple(cfg.std))
    return found


def _learned(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether there are running statistics, other than those that a new layer has."""
    return any(
        bool(t.any()) if n.endswith("running_mean") else bool((t != 1).any())
        for n, t in tensors.items()
        if n.endswith(("running_mean", "running_var"))
    )


def _model(name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
    with torch.device("meta"):  # all that is there comes from the tensors
        model = timm.create_model(name, num_classes=0).eval()
    given = {n: t.cpu().float() if t.is_floating_point() else t.cpu() for n, t in tensors.items()}
    model.load_state_dict(given, strict=False, assign=True)  # without the classifier
    return model


def make_images() -> Tensor:
    """Return the images anew, uint8."""
    return textures(torch.arange(_NUM_IMAGES), _SIZE_PX)


class _Enough(Exception):
    """Ends a forward pass after the first layer."""


@torch.inference_mode()
def _distances(model: nn.Module, colours: Colours, *, first: bool = False) -> list[Tensor]:
    """Return how far each BatchNorm's input is from the stored statistics, by channel, in the order
    of the forward pass: the divergence KL(input, stored) of two normal distributions.

    Args:
        first: the first layer only.
    """
    found: list[Tensor] = []

    def compare(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        input_C = given[0].transpose(0, 1).flatten(1)
        mean_C: Any = layer.running_mean
        var_C: Any = layer.running_var
        ratio_C = input_C.var(1).clamp_min(1e-8) / var_C.clamp_min(1e-8)
        shift_C = (input_C.mean(1) - mean_C).square() / var_C.clamp_min(1e-8)
        found.append(0.5 * (ratio_C + shift_C - 1 - ratio_C.log()))
        if first:
            raise _Enough

    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    hooks = [layer.register_forward_pre_hook(compare) for layer in layers]
    mean, std = (torch.tensor(value)[:, None, None] for value in colours)
    images_BCHW = load_file(TEXTURES)["images"].float() / 255
    with contextlib.suppress(_Enough):
        model((images_BCHW - mean) / std)
    for hook in hooks:
        hook.remove()
    return found


def _words(colours: Colours) -> str:
    mean, std = (f"({', '.join(f'{value:.3g}' for value in part)})" for part in colours)
    return f"mean {mean} and std {std}"


def _one_of(labels: list[str], where: str) -> str:
    """Return names to use, at most three."""
    return " or ".join(f"timm:{label}@{where}" for label in labels[:3])


if __name__ == "__main__":
    save_file({"images": make_images()}, TEXTURES)
