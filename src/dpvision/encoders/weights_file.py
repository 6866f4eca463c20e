"""Weights of a file with their lineage: every file of weights that is not part of a checkpoint is opened here.

Where the lineage comes from, the first that there is:

1. The file's own metadata, which dpvision writes into every file of weights (``weights``).
2. The run folder that the file is in: the file is that run, whatever it is called.
3. Neither: what the caller knows (a library's public name), or "undeclared", so that a run that starts from it
   needs a declaration (``runs.lineage.inherit``).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dpvision.checkpoint import MANIFEST, find_checkpoint, read_manifest
from dpvision.encoders.unpickle import load_pickle_safely
from dpvision.errors import CheckpointError
from dpvision.weights import unpack


@dataclass(frozen=True)
class WeightsFile:
    """Tensors by name, on the CPU, and what shaped them."""

    tensors: dict[str, Tensor]
    lineage: tuple[dict[str, Any], ...]


def open_weights(path: str | Path, otherwise: dict[str, Any]) -> WeightsFile:
    """Tensors and lineage of a file: safetensors are read, anything else goes through ``load_pickle_safely``.

    Args:
        otherwise: the lineage entry of a file that carries none and is in no run's folder.

    Raises:
        CheckpointError: the file is missing, damaged, or refused; its lineage is not that of its tensors, or that of its run cannot be
            read.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        tensors, carried = unpack(path)
    else:
        tensors, carried = load_pickle_safely(path), None
    lineage = list(carried or [])
    lineage += [entry for entry in lineage_of_run_around(path) or [] if entry not in lineage]
    if carried is None and not lineage:
        lineage = [otherwise]
    return WeightsFile(tensors, tuple(lineage))


def lineage_of_run_around(path: Path) -> list[dict[str, Any]] | None:
    """Lineage of the run or checkpoint whose folder a file is in, symbolic links followed; None where it is in none.

    Raises:
        CheckpointError: there is one, and it cannot be read.
    """
    for folder in path.resolve().parents:
        if _values(folder / MANIFEST, "lineage") is not None:
            return read_manifest(folder)["lineage"]
        about = _values(folder / "run.json", "store_visibility")
        if about is not None:
            try:
                return read_manifest(find_checkpoint(folder))["lineage"]
            except CheckpointError:
                return [_entry_of_run(folder / "run.json", about)]
    return None


def _values(path: Path, field: str) -> dict[str, Any] | None:
    """A JSON object that dpvision wrote, known by one of its fields; None for no file, and for other programs' files of the name."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and field in values else None


def _entry_of_run(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run without a readable checkpoint: its store; a guarantee cannot be read without one."""
    try:
        return {
            "store_id": str(about["store_id"]), "visibility": str(about["store_visibility"]), "licence": None,
            "run_id": str(about["run_id"]), "guarantee": None,
        }  # fmt: skip
    except KeyError as error:
        raise CheckpointError(f"weights: {path} lacks {error}; expected what the run wrote. Restore it.") from None
