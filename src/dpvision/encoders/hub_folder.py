"""Weights in the folder of a model hub: one file, shards or a pickle, with config and licence; and
the image settings in the metadata of a file that dpvision exported.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from dpvision.data.transform import Filter, LibraryResize
from dpvision.encoders.weights_file import WeightsFile, open_weights
from dpvision.errors import CheckpointError
from dpvision.strict_json import parse_json

_WHOLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""Names of weights, the preferred one first. The second lists the files of several shards."""
_FRONT_MATTER = re.compile(r"\A\s*---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_LICENCE = re.compile(r"^(license|license_name):[ \t]*([^\s#].*?)[ \t]*$", re.MULTILINE)
_METADATA = "dpvision."
_MOST_BYTES = 64 << 20
"""Largest config.json or README.md that is read."""


def open_folder(folder: Path, otherwise: dict[str, Any]) -> WeightsFile:
    """Return the tensors of a folder's weights, and their lineage as in ``open_weights``.

    Args:
        otherwise: the lineage entry for files that carry none.

    Raises:
        CheckpointError: there are no weights, a shard is missing or outside the folder, or as
            ``open_weights``.
    """
    found = next((folder / name for name in _WHOLE if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(
            f"weights: {folder} has none of {', '.join(_WHOLE)}; expected a folder that "
            "save_pretrained wrote. Copy the whole folder."
        )
    if found.suffix != ".json":
        return open_weights(found, otherwise)
    shards = read_json(found).get("weight_map")
    names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise CheckpointError(
            f"weights: {found}: weight_map names {names[:3] or 'nothing'}; expected files of its "
            "own folder. Download it again."
        )
    parts = [open_weights(folder / name, otherwise) for name in names]
    lineage = [entry for part in parts for entry in part.lineage]
    return WeightsFile(
        {name: tensor for part in parts for name, tensor in part.tensors.items()},
        tuple(entry for i, entry in enumerate(lineage) if entry not in lineage[:i]),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: there is no such file, or it holds no object.
    """
    try:
        found = parse_json(_read(path), nan=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"weights: {path} ({error}); expected a JSON object. Download it again."
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"weights: {path}: {type(found).__name__}; expected a JSON object. Download it again."
        )
    return found


def licence_of(folder: Path) -> str | None:
    """Return the licence of a folder's weights: from the front matter of README.md, else from
    config.json; None if neither states one. ``license: other`` gives ``license_name``.
    """
    try:
        text = _FRONT_MATTER.match(_read(folder / "README.md").decode(errors="replace"))
        found = dict(_LICENCE.findall(text[1])) if text else {}
    except (OSError, ValueError):
        found = {}
    named = found.get("license")
    named = found.get("license_name", named) if named in (None, "other") else named
    if named is None and (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        named = config.get("license", dict(config.get("pretrained_cfg") or {}).get("license"))
    return named.strip("'\"")[:200] or None if isinstance(named, str) else None


def image_settings(metadata: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the image settings in the metadata of a file that dpvision exported, as fields of
    ``Encoder``: those of mean, std, image_size, resize, crop, own_sizes and library that it has.

    Args:
        metadata: by name, JSON text under ``dpvision.mean``, ``dpvision.std``, ...

    Raises:
        CheckpointError: a value is not what dpvision writes.
    """
    rules: dict[str, Callable[[Any], Any]] = {
        "mean": _colour,
        "std": _colour,
        "image_size": _side,
        "resize": _side,
        "crop": _crop,
        "own_sizes": _sides,
        "library": _library,
    }
    found: dict[str, Any] = {}
    for name, rule in rules.items():
        text = metadata.get(_METADATA + name)
        try:
            value = None if text is None else parse_json(text)
            if value is not None:
                found[name] = rule(value)
        except (ValueError, TypeError):
            raise CheckpointError(
                f"weights: {where}: {_METADATA}{name}={text!r}; expected what dpvision export "
                "writes. Export it again."
            ) from None
    if "resize" not in found:
        found.pop("crop", None)  # of the image as it is: the centred square, whatever is stated
    if any(not value > 0 for value in found.get("std", ())):
        raise CheckpointError(
            f"weights: {where}: {_METADATA}std={found['std']}; expected positive numbers. Export "
            "it again."
        )
    sizes = found.get("own_sizes", ())
    if sizes and sizes[-1] != found.get("image_size"):
        raise CheckpointError(
            f"weights: {where}: {_METADATA}own_sizes={sizes}; expected the last to be "
            f"{_METADATA}image_size. Export it again."
        )
    if "library" in found and not found["library"].side >= found.get("image_size", 1):
        raise CheckpointError(
            f"weights: {where}: {_METADATA}library={found['library']}; expected a side of at least "
            f"{_METADATA}image_size. Export it again."
        )
    return found


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES:,} bytes")
    return data


def _colour(value: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, value)
    if not all(map(math.isfinite, (red, green, blue))):
        raise ValueError(json.dumps(value))
    return red, green, blue


def _side(value: Any) -> int:
    sides = value if isinstance(value, list) else [value]
    side = sides[0] if sides and sides.count(sides[0]) == len(sides) else None
    if type(side) is not int or not side >= 1:
        raise ValueError(json.dumps(value))
    return side


def _sides(value: Any) -> tuple[int, ...]:
    sides = tuple(map(_side, value))
    if not sides or list(sides) != sorted(set(sides)):
        raise ValueError(json.dumps(value))
    return sides


def _library(value: Any) -> LibraryResize:
    made = LibraryResize(**value)
    if (
        type(made.side) is not int
        or not made.side >= 1
        or type(made.keep_aspect) is not bool
        or made.filter not in get_args(Filter)
    ):
        raise ValueError(json.dumps(value))
    return made


def _crop(value: Any) -> str:
    if value not in ("random", "centre"):  # "random", for the whole image: of earlier exports
        raise ValueError(json.dumps(value))
    return value
