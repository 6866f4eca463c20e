"""Checkpoints: safetensors beside a JSON manifest that names their digests; written atomically,
verified when read, never unpickled.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpvision.errors import CheckpointError, remedy_for
from dpvision.files import disk_refusals, new_folder, remove_folder
from dpvision.strict_json import parse_json
from dpvision.weights import pack, read_lineage, unpack

FORMAT = "dpvision-checkpoint-1"
MANIFEST = "manifest.json"
_REQUIRED = (
    "format",
    "run_id",
    "ledger_steps",
    "updates",
    "config",
    "plan",
    "ledger_digest",
    "lineage",
    "tensors",
)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory (CPU tensors)."""

    path: Path
    manifest: dict[str, Any]
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, Tensor] | None
    files: dict[str, bytes] = field(default_factory=dict)
    """Other files that belong to the weights, by name: a captioner's tokenizer.json."""


def save_checkpoint(
    folder: Path,
    manifest: dict[str, Any],
    model: dict[str, Tensor],
    *,
    ema: dict[str, Tensor] | None = None,
    optimizer: dict[str, Tensor] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write ``folder`` (e.g. checkpoints/step-000123) whole or not at all; an existing one of that
    name is replaced.

    Args:
        manifest: run_id, ledger_steps, updates, config, plan, ledger_digest, lineage and anything
            else that may leave; ``format``, ``tensors`` and, where there are some, ``files`` (file
            name -> SHA-256) are added here.
        model, ema, optimizer: flat dicts of tensors.
        files: other files that belong to the weights, by name.

    Raises:
        CheckpointError: the disk refuses (full, read-only); what was saved before is untouched.
    """
    groups = {"model": model, "ema": ema, "optimizer": optimizer}
    remedy = "Earlier checkpoints are safe: free some, then --resume, or repeat the audit."
    with (
        disk_refusals("checkpoint", folder, remedy),
        new_folder(folder, replace=True) as partial,
    ):
        digests = {}
        for name, tensors in groups.items():
            if tensors is not None:
                blob = pack(tensors, manifest["lineage"])
                (partial / f"{name}.safetensors").write_bytes(blob)
                digests[f"{name}.safetensors"] = hashlib.sha256(blob).hexdigest()
        full = {"format": FORMAT, **manifest, "tensors": digests}
        if files:
            full["files"] = {name: hashlib.sha256(blob).hexdigest() for name, blob in files.items()}
            for name, blob in files.items():
                (partial / name).write_bytes(blob)
        (partial / MANIFEST).write_text(json.dumps(full, indent=1, allow_nan=False))
    return folder


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read and verify a checkpoint.

    Args:
        path: a checkpoint folder, or a run folder (its newest checkpoint is taken).

    Raises:
        CheckpointError: nothing there, a file is missing, a digest does not match, or a file
            carries another lineage than the manifest.
    """
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    groups: dict[str, dict[str, Tensor] | None] = {"model": None, "ema": None, "optimizer": None}
    for file, digest in manifest["tensors"].items():
        _verified(folder, file, digest)
        try:
            groups[Path(file).stem], lineage = unpack(folder / file)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {_older(folder)}") from None
        _check_lineage(folder, file, manifest, lineage)
    if groups["model"] is None:
        raise CheckpointError(
            f"checkpoint: {folder} has no model.safetensors; expected one. {_older(folder)}"
        )
    files = {
        name: _verified(folder, name, digest) for name, digest in manifest.get("files", {}).items()
    }
    return Checkpoint(folder, manifest, groups["model"], groups["ema"], groups["optimizer"], files)


def _verified(folder: Path, name: str, digest: str) -> bytes:
    """Bytes of a file of a checkpoint, as its manifest knows them."""
    try:
        blob = (folder / name).read_bytes()
    except OSError as error:
        remedy = remedy_for(error, _older(folder))
        raise CheckpointError(
            f"checkpoint: {folder / name} ({error.strerror}); expected a readable file. {remedy}"
        ) from None
    if hashlib.sha256(blob).hexdigest() != digest:
        raise CheckpointError(
            f"checkpoint: {folder / name} was altered (SHA-256 differs from {MANIFEST}). "
            f"{_older(folder)}"
        )
    return blob


def _check_lineage(
    folder: Path, file: str, manifest: dict[str, Any], lineage: list[dict[str, Any]] | None
) -> None:
    if lineage != manifest["lineage"]:
        raise CheckpointError(
            f"checkpoint: {folder / MANIFEST} has another lineage than {file} carries; expected "
            f"the same. One of them was altered: {_older(folder)}"
        )


_ENTRY = {"store_id", "visibility", "run_id", "guarantee"}
"""Fields of each entry of a lineage (``runs.lineage``)."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, its lineage compared with the one in the weights; the
    tensors are not read.

    Raises:
        CheckpointError: it cannot be read, lacks a field, or was altered.
    """
    try:
        manifest = parse_json((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint: {folder / MANIFEST} cannot be read ({error}). "
            f"{remedy_for(error, _older(folder))}"
        ) from None
    missing = [key for key in _REQUIRED if not isinstance(manifest, dict) or key not in manifest]
    if missing or manifest["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint: {folder / MANIFEST} lacks {missing or 'a known format'}; expected "
            f"{FORMAT}. {_older(folder)}"
        )
    files = [manifest["tensors"], manifest.get("files", {})]
    if (
        not all(isinstance(found, dict) for found in (manifest["config"], *files))
        or any(Path(name).name != name for name in (*files[0], *files[1]))
        or not isinstance(manifest["lineage"], list)
        or not all(
            isinstance(entry, dict) and entry.keys() >= _ENTRY for entry in manifest["lineage"]
        )
    ):
        raise CheckpointError(
            f"checkpoint: {folder / MANIFEST}: config, tensors, files or lineage of another kind; "
            f"expected {FORMAT}, with files of its own folder. {_older(folder)}"
        )
    if (weights := folder / "model.safetensors").exists():
        try:
            lineage = read_lineage(weights)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {_older(folder)}") from None
        _check_lineage(folder, weights.name, manifest, lineage)
    return manifest


def find_checkpoint(run_or_checkpoint: str | Path) -> Path:
    """Newest checkpoint folder of a run, or the checkpoint folder itself."""
    start = Path(run_or_checkpoint)
    if (start / MANIFEST).exists():
        return start
    if found := list_checkpoints(start):
        return found[-1]
    remedy = "Train first, or correct the path."
    if (start / "README.md").exists() and any(map(start.glob, ("*.safetensors", "*.onnx"))):
        remedy = "An export is loaded by the code in its README.md: give the run that it is from."
    raise CheckpointError(
        f"checkpoint: none in {start}; expected a run folder or a checkpoint folder. {remedy}"
    )


def list_checkpoints(base: Path) -> list[Path]:
    """Complete checkpoint folders of a run, below ``checkpoints`` and ``confidential/checkpoints``
    of ``base``, oldest first.
    """
    folders = [base / "confidential" / "checkpoints", base / "checkpoints"]
    return sorted(
        (p.parent for folder in folders for p in folder.glob(f"step-*/{MANIFEST}")),
        key=lambda path: path.name,
    )


def keep_newest(base: Path, count: int) -> None:
    """Delete all but the ``count`` newest checkpoints of ``list_checkpoints``."""
    for folder in list_checkpoints(base)[:-count]:
        remove_folder(folder)


def state_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, detached."""
    return {name: value.detach() for name, value in module.state_dict().items()}


def _older(folder: Path) -> str:
    return (
        f"Restore it from a backup, or move {folder.name} away to go on from an older checkpoint."
    )
