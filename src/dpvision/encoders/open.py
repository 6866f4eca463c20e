"""Open an encoder by its spec: a run, a third-party model, a file of weights, or features without
training.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpvision.checkpoint import load_checkpoint
from dpvision.config import FrozenEncoderConfig
from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_precision import precision_for
from dpvision.encoders.fixed import FIXED, fixed_encoder
from dpvision.encoders.identity import check_alone
from dpvision.encoders.trained import run_encoder
from dpvision.errors import ConfigError
from dpvision.runs.lineage import runs_with_these_weights

_FORMS = (
    "a run folder, random:RUN, {timm,torchvision}:NAME, hf:DIR, onnx:NODE@FILE, "
    "{vip,mae,dpcap,simclr,tan}:FILE, pixels, hog, scattering, patches, patches+scattering or "
    "patches+scattering+zooms"
)
_LIBRARIES = ("timm", "torchvision")
_RELEASED = ("vip", "mae", "dpcap", "simclr", "tan")


def open_encoder(
    spec: str | Path,
    *,
    ema: bool = False,
    device: str | torch.device = "cpu",
    image_size: int | None = None,
) -> Encoder:
    """Open the encoder that ``spec`` names, frozen and in evaluation mode, on ``device``. Also
    available as ``dpvision.load``.

    A kind counts only before a colon. Without one, ``spec`` is an encoder without training of that
    name, or else a folder; ``./hog`` is a folder.

    Args:
        spec: a run or checkpoint folder; ``random:RUN``, its architecture with its initial weights;
            ``timm:NAME`` or ``torchvision:NAME``, with ``@FILE`` for weights of a file;
            ``hf:DIR``, a folder of transformers; ``onnx:NODE@FILE``, a value of an ONNX graph;
            ``vip:FILE``, ``mae:FILE``, ``dpcap:FILE``, ``simclr:FILE``, ``tan:FILE``, released
            checkpoints; ``pixels``, ``hog``, ``scattering``, ``patches``, ``patches+scattering``,
            ``patches+scattering+zooms``.
        ema: whether to use a run's averaged weights.
        image_size: image size for encoders that accept any (pixels, hog, scattering, most
            convnets), or the maximum resolution of patches; ignored by the others.

    Raises:
        ConfigError: ``spec`` has none of these forms, or ``ema`` and it is not a run.
        CheckpointError: the file or the run cannot be read, or does not fit.
    """
    spec = str(spec)
    word, colon, rest = spec.partition(":")
    kind = word if colon else ""
    if ema and (spec in FIXED or kind in (*_LIBRARIES, *_RELEASED, "hf", "onnx", "random")):
        raise ConfigError(
            f"encoder: --ema with {spec}; expected a run, the only encoder with averaged "
            "weights. Drop --ema."
        )
    if kind in _LIBRARIES:
        from dpvision.encoders.third_party import third_party_encoder

        name, _, file = rest.partition("@")
        return third_party_encoder(
            kind, name, Path(file) if file else None, image_size=image_size, device=device
        )
    if kind in _RELEASED:
        from dpvision.encoders.released import released_encoder

        return released_encoder(kind, rest, device=device)
    if kind == "hf" and rest:
        from dpvision.encoders.hugging_face import hugging_face_encoder

        return hugging_face_encoder(Path(rest), device=device)
    if kind == "onnx":
        from dpvision.encoders.onnx_file import onnx_encoder

        return onnx_encoder(rest, image_size=image_size, device=device)
    if spec in FIXED:
        return fixed_encoder(spec, image_size, device=device)
    if kind == "random" and rest:
        return run_encoder(rest, untrained=True, device=device)
    if spec and Path(spec).exists():  # an empty text would be the working directory
        return run_encoder(spec, ema=ema, device=device)
    raise ConfigError(
        f"encoder: {spec!r}; expected {_FORMS}. Use patches+scattering, which needs no file."
    )


def open_frozen(
    cfg: FrozenEncoderConfig, device: str | torch.device
) -> tuple[Encoder, FrozenEncoderConfig]:
    """Open the encoder that a head's config names, and return it, in float32, with its actual
    pooling, image size, feature dimension and the precision for features. A run is named by its
    recipe, because a statement must not contain paths.

    Raises:
        ConfigError: a timm architecture without weights, an image size or a precision that the
            encoder does not accept (patches accept any maximum resolution, rounded down to one of
            theirs), or as ``check_alone``.
        CheckpointError: the encoder cannot be read.
    """
    assert cfg.spec is not None
    encoder = open_encoder(cfg.spec, device=device, image_size=cfg.image_size or None)
    kind, _, name = cfg.spec.partition(":")
    if encoder.weights == "random" and kind != "random":
        from dpvision.models.timm_cache import find_timm_weights

        places = find_timm_weights(name)[1] if kind == "timm" else ["nowhere, without a file"]
        raise ConfigError(
            f"encoder: {cfg.spec} has no weights on this machine (looked for "
            f"{'; '.join(places)}); expected pretrained weights. Nothing is downloaded: use "
            f"{cfg.spec}@FILE, or let timm download them first."
        )
    if cfg.image_size not in (0, encoder.image_size) and not encoder.own_sizes:
        raise ConfigError(
            f"encoder: image_size={cfg.image_size}; expected {encoder.image_size}, the only size "
            f"of {encoder.name}. Leave it out."
        )
    # Fixed encoders, which need no file, take precedence over a folder of the same name.
    if encoder.family != "fixed" and Path(cfg.spec).exists():
        manifest = load_checkpoint(cfg.spec).manifest
        name = f"{manifest['config']['recipe']}, run {manifest['run_id'][:8]}"
        encoder = replace(encoder, name=name)
    pooling, width = check_alone(encoder, cfg.pooling, device)
    return encoder, replace(
        cfg,
        pooling=pooling,
        image_size=encoder.image_size,
        width=width,
        precision=precision_for(encoder, pooling, cfg.precision, device),
    )


def trained_on(encoder: Encoder, images: dict[str, Any]) -> Encoder:
    """Return an encoder that an evaluation will train further, with the lineage entry ``images`` of
    its training images added.
    """
    return replace(encoder, lineage=(*encoder.lineage, images))


def recognised(encoder: Encoder, *stores: Store) -> Encoder:
    """Return the encoder with its lineage extended by runs without a guarantee on ``stores`` that
    wrote the same weights.

    Raises:
        PrivacyError: a store's file of digests is damaged.
    """
    for store in stores:
        for entry in runs_with_these_weights(store, encoder.tensors()):
            if not any(known["run_id"] == entry["run_id"] for known in encoder.lineage):
                encoder = trained_on(encoder, entry)
    return encoder
