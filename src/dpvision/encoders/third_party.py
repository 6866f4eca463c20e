"""Third-party encoders of timm and torchvision: architecture, pooled features, and weights from a
file or timm's caches.

Nothing is downloaded.

Legend: B images, L tokens, D width, C channels, H height, W width, G patches on a side.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import timm
import torch
import torchvision
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from dpvision.encoders.batch_statistics import check_statistics
from dpvision.encoders.encoder import Encoder, Family
from dpvision.encoders.pooled import PooledNetwork, attends, frozen
from dpvision.encoders.timm_file import TimmFile, from_efficientnet_pytorch, timm_file
from dpvision.encoders.weights_file import WeightsFile, open_weights
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models.timm_cache import find_timm_weights, timm_licence
from dpvision.runs.lineage import named_weights, undeclared_weights

Rename = Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]
"""From the model and a file's tensors to the same tensors under the model's names."""

_SEED = 0  # for weights that are not loaded from a file
_SIZES_PX = (8, 1024)  # those of the textures that heads take their centre from
_REMEDY = "Give the name of the file's model."


def third_party_encoder(
    kind: str,
    name: str,
    file: Path | None = None,
    image_size: int | None = None,
    device: str | torch.device = "cpu",
) -> Encoder:
    """Return the encoder of a timm model or a torchvision classification model, frozen, in
    evaluation mode, on ``device``.

    Mean, standard deviation and image size are those that a timm file states (``timm_file``), else
    those of the library's preprocessing; torchvision's ViTs take the size of the file's positions,
    or the size that they are built for. Without a file, the weights come from timm's caches, or
    else from the library's initialisation under a fixed seed; ``weights`` and ``name`` of the
    result say which.

    Args:
        kind: "timm" or "torchvision".
        name: the library's name of the model. A tag for timm (``vit_base_patch16_224.mae``) only
            determines the preprocessing.
        file: weights: safetensors, or a pickle (opened as ``unpickle`` describes), or a folder in
            timm's layout. Its classifier may have any number of classes.
        image_size: side of the images in pixels, 8 to 1024, for models that accept any.

    Raises:
        ConfigError: no such model, or it gives neither tokens nor a map, or does not accept this
            size.
        CheckpointError: the file cannot be read or does not fit, or, where it states no
            normalisation, as ``check_statistics``.
    """
    check_name(kind, name)
    if image_size is not None and not _SIZES_PX[0] <= image_size <= _SIZES_PX[1]:
        raise ConfigError(
            f"encoder: {kind}:{name}: image_size={image_size}; expected {_SIZES_PX[0]} to "
            f"{_SIZES_PX[1]} pixels. Leave it out for the size of the weights."
        )
    cached, stated = file is None and kind == "timm", None
    if kind == "timm" and file is not None:
        stated = timm_file(name, file)
    elif (found := find_timm_weights(name)[0] if cached else file) is not None:
        stated = TimmFile(found, licence=timm_licence(name) if cached else None)
    if stated is None:
        shown, where = f"{kind}:{name}, random weights", "none"
        weights, licence = None, None
    else:
        path, licence, where = stated.path, stated.licence, str(stated.path)
        shown = f"{kind}:{name}" + ("" if cached else f"@{path.name}")
        otherwise = named_weights(shown, licence) if cached else undeclared_weights(shown, licence)
        weights = open_weights(path, otherwise)
        if kind == "timm":
            tensors = from_efficientnet_pytorch(name, weights.tensors)
            weights = replace(weights, tensors=tensors)
    images: dict[str, Any] = {} if stated is None else dict(stated.images)
    made = encoder_from(
        kind,
        name,
        shown,
        weights,
        where,
        image_size=images.pop("image_size", None) if image_size is None else image_size,
        device=device,
        options={} if stated is None else stated.options,
    )
    images.pop("image_size", None)  # that of the model, or what the caller asked for
    if kind == "timm" and stated is not None and not cached and not stated.says:
        network = cast(PooledNetwork, made.network).network
        check_statistics(name, network.state_dict(), made.mean, made.std, where)
    return replace(made, licence=licence, **images)


def encoder_from(
    kind: str,
    name: str,
    shown: str,
    weights: WeightsFile | None,
    where: str,
    *,
    image_size: int | None = None,
    device: str | torch.device = "cpu",
    rename: Rename | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Encoder:
    """Return the encoder as ``third_party_encoder`` does, from weights in memory.

    Args:
        shown: name of the encoder in tables.
        where: file of the weights, for errors.
        rename: converts the file's names (and values) to the library's form.
        options: further arguments of the library's constructor.
    """
    make, tensors = (
        {"timm": _timm, "torchvision": _torchvision}[kind],
        None if weights is None else weights.tensors,
    )
    if kind == "torchvision" and tensors is not None:
        options = {**_vit_size(name, tensors), **options}
    pooled, size, mean, std, mixes_places = make(
        name, image_size, options, lambda m, classifier: _fit(m, tensors, classifier, where, rename)
    )
    pooled.eval()
    try:
        with torch.inference_mode():
            found = pooled.output(torch.zeros(1, 3, size, size))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"encoder: {kind}:{name}: image_size={size} ({error}); expected a size that the "
            "model accepts. Choose a larger one."
        ) from None
    if not isinstance(found, Tensor) or found.ndim not in (3, 4):
        raise ConfigError(
            f"encoder: {kind}:{name} gives neither tokens nor a feature map; expected an image "
            "encoder. Choose another model."
        )
    family: Family = "transformer" if found.ndim == 3 or mixes_places else "convnet"
    blocks = _blocks(pooled.network) if kind == "timm" else None
    return frozen(
        pooled,
        device,
        name=shown,
        image_size=size,
        mean=mean,
        std=std,
        family=family,
        blocks=blocks,
        lineage=() if weights is None else weights.lineage,
        weights="random" if weights is None else "trained",
    )


def check_name(kind: str, name: str) -> None:
    """Raise ConfigError, with the closest names, unless the library has a classification model
    ``name``.
    """
    known = (
        timm.list_models()
        if kind == "timm"
        else torchvision.models.list_models(module=torchvision.models)
    )
    base = name.partition(".")[0] if kind == "timm" else name
    if base not in known:
        close = difflib.get_close_matches(base, known, n=4, cutoff=0.5)
        hint = (
            f"one of its {len(known)} models, e.g. {', '.join(close)}"
            if close
            else f"one of its {len(known)} models"
        )
        raise ConfigError(
            f"encoder: {kind}:{name}; expected {hint}. Use one of them. Nothing is downloaded: "
            f"give weights as {kind}:NAME@FILE."
        )


_Made = tuple[PooledNetwork, int, tuple[float, float, float], tuple[float, float, float], bool]
_FitWeights = Callable[[nn.Module, str], None]


def _timm(name: str, image_size: int | None, options: Mapping[str, Any], fit: _FitWeights) -> _Made:
    check_name("timm", name)
    model: Any
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = timm.create_model(name, pretrained=False, **options)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"encoder: timm:{name} ({error}); expected a model with a known tag. Drop the part "
            "after the dot."
        ) from None
    config = resolve_model_data_config(model)
    classifier = model.pretrained_cfg.get("classifier") or "head"
    fit(model, classifier if isinstance(classifier, str) else classifier[0].partition(".")[0])
    model.reset_classifier(0)
    free = image_size is not None and not model.pretrained_cfg.get("fixed_input_size")
    size = image_size if free and image_size is not None else config["input_size"][-1]
    channels_last = getattr(model, "output_fmt", None) == "NHWC"
    prefix = getattr(model, "num_prefix_tokens", None)

    def features(model: Any, x_BCHW: Tensor) -> Tensor:
        found = model.forward_features(x_BCHW)
        return found.permute(0, 3, 1, 2) if channels_last and found.ndim == 4 else found

    pooled = PooledNetwork(
        model,
        features,
        prefix=prefix,
        has_class_token=getattr(model, "cls_token", None) is not None,
        outputs=_timm_outputs(model),
    )
    return pooled, size, config["mean"], config["std"], attends(model)


def _timm_outputs(model: Any) -> Callable[[Any, Tensor], list[Tensor]] | None:
    """Return a function of a timm model that gives the outputs of its stages or blocks and its last
    output, or None if timm has none for its kind.

    A stage whose output is the last one, as in a ResNet, is left out.
    """
    if not hasattr(model, "forward_intermediates"):
        return None
    parameters, more = signature(model.forward_intermediates).parameters, {}
    if "return_prefix_tokens" in parameters:
        more = {"return_prefix_tokens": True, "output_fmt": "NLC"}
    elif "extra_blocks" in parameters:
        more = {"extra_blocks": True}  # EfficientNets: all stages, not one for each resolution
    channels_last = getattr(model, "output_fmt", None) == "NHWC"

    def outputs(model: Any, x_BCHW: Tensor) -> list[Tensor]:
        last, found = model.forward_intermediates(x_BCHW, **more)
        stages = [
            torch.cat(stage[::-1], dim=1) if isinstance(stage, tuple) else stage
            for stage in found
            if stage is not last
        ]
        if channels_last and last.ndim == 4:
            last = last.permute(0, 3, 1, 2)
        late = [s for s in stages if s.ndim == 3 or _is_late(s.shape, x_BCHW.shape[-1])]
        return [*late, last]

    return outputs


def _torchvision(
    name: str, image_size: int | None, options: Mapping[str, Any], fit: _FitWeights
) -> _Made:
    check_name("torchvision", name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        # They warn without init_weights. torchvision sets transform_input whenever it loads its
        # published weights.
        more = (
            {"init_weights": True, "transform_input": True}
            if name in ("googlenet", "inception_v3")
            else {}
        )
        model = torchvision.models.get_model(name, weights=None, **more, **options).eval()
    # the newest weights entry, a table in the library's code; only its preprocessing is used
    newest = torchvision.models.get_model_weights(name)["DEFAULT"].transforms()
    is_vit = isinstance(model, torchvision.models.VisionTransformer)
    size = (
        model.image_size if is_vit else newest.crop_size[0]
    )  # newest may be for another size than the model's, as vit_h_14's
    classifier = (
        "heads"
        if is_vit
        else "head"
        if hasattr(model, "head")
        else "fc"
        if hasattr(model, "fc")
        else "classifier"
    )
    fit(model, classifier)
    if is_vit:
        blocks = [f"encoder.layers.{n}" for n, _ in model.encoder.layers.named_children()]
        nodes = [*blocks, "encoder.ln"]
    else:
        nodes = _stage_maps(model, size, classifier)
    # Swin's and MaxViT's stages have several layouts.
    nodes = nodes if is_vit or not attends(model) else nodes[-1:]
    extractor = create_feature_extractor(model, nodes)

    def features(model: Any, x_BCHW: Tensor) -> Tensor:
        return model(x_BCHW)[nodes[-1]]

    def outputs(model: Any, x_BCHW: Tensor) -> list[Tensor]:
        return list(model(x_BCHW).values())

    pooled = PooledNetwork(
        extractor,
        features,
        prefix=1 if is_vit else 0,
        has_class_token=is_vit,
        outputs=outputs if len(nodes) > 1 else None,
    )
    return (
        pooled,
        size if is_vit else image_size or size,
        tuple(newest.mean),
        tuple(newest.std),
        attends(model),
    )


def _vit_size(name: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return ``image_size`` for torchvision's ViT of this name from the positions in a file; empty
    if it has none or is no ViT.
    """
    vit = re.fullmatch(r"vit_[a-z]_(\d+)", name)
    shapes = [t.shape for n, t in tensors.items() if f".{n}".endswith(".encoder.pos_embedding")]
    if vit is None or not shapes or len(shapes[0]) != 3:
        return {}
    return {"image_size": math.isqrt(max(1, shapes[0][1] - 1)) * int(vit[1])}


@torch.inference_mode()
def _stage_maps(model: nn.Module, size: int, classifier: str) -> list[str]:
    """Return the nodes of a convnet's stages, at the model's default size, and then the last map
    with more than one position, whose average is the default pooling.
    """
    # AlexNet's and VGG's avgpool only resizes the map for the classifier
    names = [
        n for n in get_graph_node_names(model)[1] if n != "avgpool" and not n.startswith(classifier)
    ]
    outputs = create_feature_extractor(model, names)(torch.zeros(1, 3, size, size))
    maps = [
        n
        for n in names
        if isinstance(outputs[n], Tensor) and outputs[n].ndim == 4 and min(outputs[n].shape[2:]) > 1
    ]
    if not maps:
        raise ConfigError(
            "encoder: a torchvision model without a feature map; expected a convnet or a "
            "transformer. Choose another."
        )
    # A block is a child of the model, or of its container of blocks. A stage is the last block with
    # its resolution and number of channels.
    ends: dict[torch.Size, str] = {}
    for name, following in pairwise([*maps, ""]):
        if _block(name) != _block(following):
            shape = outputs[name].shape
            ends.pop(shape, None)
            ends[shape] = name
    return [name for shape, name in ends.items() if _is_late(shape, size)]


def _is_late(shape: torch.Size, size: int) -> bool:
    """Return whether a stage with output (B, C, H, W) counts: earlier ones, which have more than a
    third of the image's resolution, hold edges and colours, and cost accuracy.
    """
    return 3 * shape[-1] <= size


def _block(node: str) -> tuple[str, ...]:
    parts = node.split(".")
    return tuple(parts[: 2 if parts[0] in ("features", "layers", "trunk_output") else 1])


def _blocks(model: nn.Module) -> Callable[[Tensor], list[Tensor]] | None:
    """Return a function that gives the tokens after each block, class token first, for timm's ViTs
    with a class token; else None.
    """
    if not isinstance(model, timm.models.VisionTransformer) or model.cls_token is None:
        return None

    def blocks(x_BCHW: Tensor) -> list[Tensor]:
        found: Any = model.forward_intermediates(
            x_BCHW, return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
        )
        # distillation tokens and registers are left out: the contract is one class token, then
        # patches
        return [torch.cat([prefix_BLD[:, :1], patch_BLD], dim=1) for patch_BLD, prefix_BLD in found]

    return blocks


def _fit(
    model: nn.Module,
    tensors: dict[str, Tensor] | None,
    classifier: str,
    where: str,
    rename: Rename | None,
) -> None:
    """Load tensors into a model. Prefixes of wrapper modules are removed; the classifier may be
    missing or different.
    """
    if tensors is None:
        return
    wanted = model.state_dict()
    body = {
        n: t
        for n, t in wanted.items()
        if not n.startswith(f"{classifier}.") and not n.endswith("num_batches_tracked")
    }
    given = without_wrapper(tensors, body, where)
    given = given if rename is None else rename(model, given)
    check_fit(
        given,
        body,
        where,
        ignored=(
            f"{classifier}.",
            "fc.",
            "head.",
            "heads.",
            "classifier.",
            "AuxLogits.",
            "aux1.",
            "aux2.",
        ),
    )
    model.load_state_dict(
        {
            n: given[n]
            for n in wanted
            if n in body or (n in given and given[n].shape == wanted[n].shape)
        },
        strict=False,
    )


def without_wrapper(
    tensors: dict[str, Tensor], wanted: Collection[str], where: str, remedy: str = _REMEDY
) -> dict[str, Tensor]:
    """Return the tensors of the model in a file without the prefix of wrapper modules (``model.``,
    ``module.encoder.`` and the like).

    Args:
        wanted: one or more names of the model. The prefix before the first name that matches most
            of the others is removed.

    Raises:
        CheckpointError: no tensor has the first name, or several prefixes match equally well.
    """
    anchor = next(iter(wanted))
    found = [
        name.removesuffix(anchor)
        for name in tensors
        if name == anchor or name.endswith(f".{anchor}")
    ]
    if not found:
        some = ", ".join(list(tensors)[:4])
        raise CheckpointError(
            f"weights: {where} has no tensor {anchor!r} (it has {some} ...); expected one. {remedy}"
        )
    covers = {prefix: sum(prefix + name in tensors for name in wanted) for prefix in found}
    best = sorted(prefix for prefix in found if covers[prefix] == max(covers.values()))
    if len(best) > 1:
        raise CheckpointError(
            f"weights: {where} has {len(best)} models, under {best}; expected one. Save only one "
            "of them to a file."
        )
    return {
        name.removeprefix(best[0]): tensor
        for name, tensor in tensors.items()
        if name.startswith(best[0])
    }


def check_fit(
    given: dict[str, Tensor],
    wanted: dict[str, Tensor],
    where: str,
    ignored: tuple[str, ...],
    remedy: str = _REMEDY,
) -> None:
    """Check that every wanted tensor is given with its shape, and no others except names that start
    with one of ``ignored``.

    Raises:
        CheckpointError: a tensor does not fit (names the first).
    """
    for name, tensor in wanted.items():
        got = tuple(given[name].shape) if name in given else "nothing"
        if got != tuple(tensor.shape):
            rule = f"expected shape {tuple(tensor.shape)}"
            raise CheckpointError(f"weights: {where}: {name}={got}; {rule}. {remedy}")
    for name in given:
        if (
            name not in wanted
            and not name.startswith(ignored)
            and not name.endswith("num_batches_tracked")
        ):
            raise CheckpointError(
                f"weights: {where}: {name} is not a tensor of this model; expected no others. "
                f"{remedy}"
            )
