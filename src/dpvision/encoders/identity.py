"""Check an encoder's identity, and that an image's features depend on that image alone.

A head's guarantee requires features that depend on one record each. An encoder that mixes images of
a batch (such as normalisation by batch statistics) is refused, and so is an encoder that differs
from the one that a head was trained on.

Legend: B images, D feature dimension, C channels, H height, W width.
"""

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from dpvision.data.transform import LibraryResize
from dpvision.devices import keep_freed_memory, kernels
from dpvision.encoders.encoder import Encoder
from dpvision.errors import CheckpointError, ConfigError

_BRIGHTNESS = (0.2, 0.4, 0.6, 0.8)
_CONTRAST = (0.02, 0.3, 0.1, 0.2)
"""Images so different that any batch statistic changes the features."""
_TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
"""Relative to the largest feature: rounding depends on the batch size, on a GPU with reduced
precision in the third digit.
"""
_SAME = 1e-2
_PROBE_IMAGES, _PROBE_NUMBERS = 2, 32


@torch.inference_mode()
def check_alone(
    encoder: Encoder, pooling: str | None = None, device: str | torch.device = "cpu"
) -> tuple[str, int]:
    """Refuse an encoder whose features of an image depend on the other images of the batch, or are
    not finite.

    Args:
        pooling: if None, the default.

    Returns:
        The pooling, and its feature dimension D.

    Raises:
        ConfigError: features depend on the batch (naming the layers if they can be identified),
            features of a public image are not finite, two passes differ, or there is no such
            pooling.
    """
    x_BCHW = _public_images(encoder).to(device)
    pooling, whole_BD = encoder.named(x_BCHW, pooling)
    if whole_BD.ndim != 2 or not torch.isfinite(whole_BD).all():
        raise ConfigError(
            f"encoder: features of {encoder.name} are not finite on public images; expected "
            "finite numbers. Use other weights."
        )
    again_BD = encoder(x_BCHW, pooling)
    alone_BD = torch.cat([encoder(x_BCHW[i : i + 1], pooling) for i in range(len(x_BCHW))])
    room = _TOLERANCE["cuda" if whole_BD.is_cuda else "cpu"] * float(whole_BD.abs().max())
    for other_BD, what in (
        (again_BD, "differ from one pass to the next"),
        (alone_BD, "depend on the other images of a batch"),
    ):
        if not float((other_BD - whole_BD).abs().max()) <= room:
            raise ConfigError(
                f"encoder: features of {encoder.name} {what}{_culprits(encoder)}; expected a "
                "function of one image, which the guarantee needs. Use an encoder whose "
                "normalisation has running statistics or needs none."
            )
    return pooling, whole_BD.shape[1]


@torch.inference_mode()
def check_places(
    encoder: Encoder, pooling: str, num_rows: int, device: str | torch.device = "cpu"
) -> None:
    """Refuse an encoder whose features of an image change a bit with its place among ``num_rows``
    images: a record that leaves moves all later ones by a place. Images are always computed
    ``num_rows`` at a time (``feature_file``).

    Raises:
        ConfigError: they do.
    """
    if torch.device(device).type == "cpu":
        keep_freed_memory()
    size, generator = encoder.image_size, torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(num_rows, 3, size, size, generator=generator).to(device)
    reference_BD = encoder(x_BCHW, pooling)
    for rows in ([*range(num_rows)][::-1], [0] * num_rows):
        if not torch.equal(encoder(x_BCHW[rows], pooling), reference_BD[rows]):
            raise ConfigError(
                f"encoder: features of {encoder.name} change in their last bits with an image's "
                f"place among {num_rows}; expected a function of one image. Use another "
                "--hardware.physical-batch-size, a multiple of 16, or OMP_NUM_THREADS=1."
            )


def describe(
    encoder: Encoder, pooling: str, width: int, device: str | torch.device = "cpu"
) -> dict[str, Any]:
    """Return a description of an encoder for manifests, ready for JSON and without paths;
    ``check_same`` compares with it.
    """
    return {
        "name": encoder.name,
        "pooling": pooling,
        "image_size": encoder.image_size,
        "width": width,
        "mean": list(encoder.mean),
        "std": list(encoder.std),
        "resize": encoder.resize,
        "crop": encoder.crop,
        "library": None if encoder.library is None else asdict(encoder.library),
        "licence": encoder.licence,
        "weights": weights_digest(encoder),
        "fingerprint": fingerprint(encoder, device),
        "probe": _probe(encoder, pooling, device),
    }


def check_same(
    encoder: Encoder, about: dict[str, Any], where: str, device: str | torch.device = "cpu"
) -> None:
    """Refuse an encoder that differs from its description by ``describe``.

    Weights are compared bit by bit; encoders without weights by their features of fixed noise,
    whose last digits may differ between machines.

    Args:
        where: the head that the encoder belongs to, for the error.

    Raises:
        CheckpointError: image size, normalisation, weights or features differ.
    """
    remedy = "Give the encoder that the head was trained on (encoder=, or --model.encoder.spec)."
    # older descriptions lack these
    about = {"resize": None, "crop": "random", "library": None} | about
    for name in ("image_size", "mean", "std", "resize", "crop", "library"):
        got: Any = getattr(encoder, name)
        got = asdict(got) if isinstance(got, LibraryResize) else got
        if (list(got) if isinstance(got, tuple) else got) != about[name]:
            raise CheckpointError(
                f"encoder: {name}={got} of {encoder.name}; expected {about[name]}, as in "
                f"{where}. {remedy}"
            )
    try:
        width = encoder(_public_images(encoder).to(device), about["pooling"]).shape[1]
    except ConfigError:  # no such pooling
        width = None
    if width != about["width"]:
        raise CheckpointError(
            f"encoder: {encoder.name} has no features {about['pooling']!r} of dimension "
            f"{about['width']}; expected {where}'s. {remedy}"
        )
    theirs, mine = (
        torch.tensor(about["probe"]),
        torch.tensor(_probe(encoder, about["pooling"], device)),
    )
    weights = weights_digest(encoder)
    other = weights is not None and about["weights"] is not None and weights != about["weights"]
    if other or not float((mine - theirs).abs().max()) <= _SAME * float(theirs.abs().max()):
        raise CheckpointError(
            f"encoder: {encoder.name} has other {'weights' if other else 'features'} than "
            f"{about['name']} of {where}; expected the same. {remedy}"
        )


def _public_images(encoder: Encoder) -> Tensor:
    """Return four images of fixed noise, normalised for the encoder: float32 (B, C, H, W)."""
    size, generator = encoder.image_size, torch.Generator().manual_seed(0)
    bright, contrast = (torch.tensor(v)[:, None, None, None] for v in (_BRIGHTNESS, _CONTRAST))
    pixel_BCHW = (bright + contrast * torch.randn(4, 3, size, size, generator=generator)).clamp(
        0, 1
    )
    mean, std = (torch.tensor(v)[:, None, None] for v in (encoder.mean, encoder.std))
    return (pixel_BCHW - mean) / std


@torch.inference_mode()
def _probe(encoder: Encoder, pooling: str, device: str | torch.device) -> list[list[float]]:
    x_BCHW = _public_images(encoder)[:_PROBE_IMAGES].to(device)
    return encoder(x_BCHW, pooling)[:, :_PROBE_NUMBERS].float().cpu().tolist()


def _culprits(encoder: Encoder) -> str:
    """Return the layers that use batch statistics even in evaluation mode, as text."""
    if encoder.backbone is None:
        return ""
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    found = [
        name
        for name, module in encoder.backbone().named_modules()
        if isinstance(module, norms[0])
        and not isinstance(module, norms[1])
        and module.running_mean is None
    ]
    return (
        f" ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''} without running statistics)"
        if found
        else ""
    )


@torch.inference_mode()
def fingerprint(encoder: Encoder, device: str | torch.device = "cpu") -> str:
    """Return a digest of an encoder's preprocessing, weights, and features of four images of fixed
    noise at each of its resolutions.

    The noise distinguishes encoders without weights (patches of textures), the weights those that
    noise might not. Machines that differ in the last bits of float32 have other features of noise.
    In bfloat16 those of a few images can be the same and others not, so the digest is of what the
    bits depend on, too.
    """
    about = [
        encoder.name,
        encoder.family,
        encoder.image_size,
        encoder.own_sizes,
        encoder.mean,
        encoder.std,
        encoder.resize,
        encoder.crop,
        *(() if encoder.library is None else (asdict(encoder.library),)),
        *(() if encoder.precision == "float32" else (encoder.precision, kernels(device))),
    ]
    digest = hashlib.sha256(json.dumps(about).encode())
    _add_weights(digest, encoder)
    noise_BCHW = torch.randn(
        4, 3, encoder.image_size, encoder.image_size, generator=torch.Generator().manual_seed(0)
    )
    for side in encoder.own_sizes or (encoder.image_size,):
        x_BCHW = noise_BCHW.to(device, copy=True)
        x_BCHW[..., side:, :] = x_BCHW[..., side:] = torch.nan  # as ``normalise_canvas``
        stages = {} if encoder.stages is None else {"stages": encoder.stages(x_BCHW)}
        for name, x_BD in (encoder.poolings(x_BCHW) | stages).items():
            digest.update(name.encode() + x_BD.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def weights_digest(encoder: Encoder) -> str | None:
    """Return a digest of an encoder's weights, the same on every machine; None for encoders without
    weights.
    """
    if encoder.backbone is None and encoder.arrays is None:
        return None
    digest = hashlib.sha256()
    _add_weights(digest, encoder)
    return digest.hexdigest()


def _add_weights(digest: Any, encoder: Encoder) -> None:
    for name, value in encoder.state().items():
        digest.update(
            name.encode()
            + value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
