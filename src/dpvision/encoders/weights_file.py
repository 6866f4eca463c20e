"""Open a file of weights that is not part of a checkpoint, with its lineage.

The lineage comes from the first of these that exists:

1. The file's metadata, which dpvision writes into every file of weights (``weights``).
2. The run folder that contains the file, whatever the file's name.
3. The caller (a library's public name), or "undeclared": a run that starts from it then needs a
   declaration (``runs.lineage.inherit``), and is refused where config.json beside the file says
   that dpvision exported the weights: another program saved them again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dpvision.checkpoint import MANIFEST, find_checkpoint, read_manifest
from dpvision.encoders.unpickle import load_pickle_safely
from dpvision.errors import CheckpointError
from dpvision.runs.lineage import lineage_of_results, without_lineage
from dpvision.strict_json import parse_json
from dpvision.weights import unpack


@dataclass(frozen=True)
class WeightsFile:
    """Tensors by name, on the CPU, and their lineage."""

    tensors: dict[str, Tensor]
    lineage: tuple[dict[str, Any], ...]


def open_weights(path: str | Path, otherwise: dict[str, Any]) -> WeightsFile:
    """Return tensors and lineage of a file. Safetensors are read directly, other formats by
    ``load_pickle_safely``.

    Args:
        otherwise: the lineage entry for a file that carries none and is not in a run folder.

    Raises:
        CheckpointError: the file is missing, damaged, or refused; its lineage does not match its
            tensors, or its run's lineage cannot be read.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        raise CheckpointError(
            f"weights: {path} is a graph of ONNX; expected tensors by name. Open it as "
            f"onnx:NODE@{path} (docs/encoders.md)."
        )
    if path.suffix == ".safetensors":
        tensors, carried = unpack(path)
    else:
        tensors, carried = load_pickle_safely(path), None
    lineage = list(carried or [])
    lineage += [entry for entry in lineage_of_run_around(path) or [] if entry not in lineage]
    if carried is None and not lineage:
        beside = _values(path.parent / "config.json", "dpvision") or {}
        lineage = [without_lineage(otherwise, beside.get("dpvision"))]
    return WeightsFile(tensors, tuple(lineage))


def lineage_of_run_around(path: Path) -> list[dict[str, Any]] | None:
    """Return the lineage of the run or checkpoint whose folder contains a file, after resolving
    links, or None if there is none.

    Raises:
        CheckpointError: the lineage cannot be read.
    """
    for folder in path.resolve().parents:
        if _values(folder / MANIFEST, "lineage") is not None:
            return lineage_of_results(read_manifest(folder)["lineage"], folder)
        if _values(folder / "run.json", "store_visibility") is not None:
            try:
                newest = find_checkpoint(folder)
                return lineage_of_results(read_manifest(newest)["lineage"], newest)
            except CheckpointError:
                return [_entry_of_run(folder / "run.json")]
    return None


def _values(path: Path, field: str) -> dict[str, Any] | None:
    """Return a JSON object written by dpvision, identified by ``field``, or None if there is no
    such file or field.
    """
    try:
        values = parse_json(path.read_bytes(), nan=True)
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and field in values else None


def _entry_of_run(path: Path) -> dict[str, Any]:
    """Return the lineage entry of a run without a readable checkpoint: its store, without a
    guarantee.
    """
    try:
        about = parse_json(path.read_bytes())
        return {
            "store_id": str(about["store_id"]),
            "visibility": str(about["store_visibility"]),
            "licence": None,
            "run_id": str(about["run_id"]),
            "guarantee": None,
        }
    except KeyError as error:
        raise CheckpointError(
            f"weights: {path} lacks {error}; expected what the run wrote. Restore it."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"weights: {path}: {error}; expected what the run wrote. Restore it."
        ) from None
