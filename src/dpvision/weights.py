"""Tensors as safetensors, with the lineage of the weights in the same file, and digests that
recognise tensors elsewhere.

Lineage is a list of entries (``runs.lineage``): every store that shaped the weights, with its
guarantee. It is in the metadata of each file of weights that dpvision writes, bound to the tensors
by a digest over both, so that a file that is copied, renamed or opened under another name keeps it.
This guards against mistakes: whoever writes the tensors again with another program gets a file
without lineage.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from dpvision.errors import CheckpointError
from dpvision.strict_json import parse_json

METADATA = "dpvision.lineage"
FORMAT = "dpvision-lineage-1"
FEWEST_NUMBERS = 64
"""Tensors with fewer numbers are not recognised elsewhere: short ones may agree by chance."""

Lineage = list[dict[str, Any]]


def pack(
    tensors: Mapping[str, Tensor], lineage: Lineage, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Bytes of a safetensors file of ``tensors`` that carries ``lineage``, and other
    ``metadata``.
    """
    # Clones, because safetensors refuses tensors that share memory (tied weights).
    kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    file = save(kept, {**(metadata or {}), METADATA: lineage_record(kept, lineage)})
    return _in_order(file) if metadata else file


def _in_order(file: bytes) -> bytes:
    """Sort the metadata of a safetensors file, which the library writes in a new order each time:
    the same weights are then the same bytes.
    """
    size = int.from_bytes(file[:8], "little")
    header = parse_json(file[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # tensors start at a multiple of 8
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(file)[8 + size :]))


def lineage_record(tensors: Mapping[str, Tensor], lineage: Lineage) -> str:
    """The lineage of tensors on the CPU as text for a file's metadata, bound to them."""
    record = {"format": FORMAT, "lineage": lineage, "digest": _binding(tensors, lineage)}
    return canonical(record).decode()


def unpack(path: Path) -> tuple[dict[str, Tensor], Lineage | None]:
    """Tensors of a safetensors file by name, on the CPU, and the lineage that it carries; None
    where it carries none.

    Raises:
        CheckpointError: the file cannot be read, or its lineage is not that of its tensors.
    """
    record = _record(path)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None
    return tensors, None if record is None else _bound(record, tensors, path)


def recorded_lineage(text: str, tensors: Mapping[str, Tensor], path: Path) -> Lineage:
    """The lineage of ``lineage_record``, read from the metadata of a file of these tensors.

    Raises:
        CheckpointError: it cannot be read, or is not that of the tensors.
    """
    return _bound(_parsed(text, path), tensors, path)


def read_lineage(path: Path) -> Lineage | None:
    """The lineage that a safetensors file carries, from its header alone: not compared with the
    tensors. Raises as ``unpack``.
    """
    record = _record(path)
    return None if record is None else record["lineage"]


def contents(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Digests by which tensors are recognised under other names, in other shapes or in a wider type
    -> how many numbers each has.

    Left out are tensors of fewer than ``FEWEST_NUMBERS`` numbers, and those whose numbers are all
    the same (zeros, ones): any model may have them.
    """
    found = {}
    for tensor in tensors:
        value = tensor.detach().cpu().flatten()
        if value.numel() < FEWEST_NUMBERS or bool((value == value[0]).all()):
            continue
        if value.is_floating_point():
            value = value.float()
        found[hashlib.sha256(_bytes(value)).hexdigest()[:16]] = value.numel()
    return found


def canonical(value: Any) -> bytes:
    """The one way in which lineage is written as JSON where digests are taken of it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def lineage_digest(lineage: Lineage) -> str:
    """Hex SHA-256 of a lineage."""
    return hashlib.sha256(canonical(lineage)).hexdigest()


def _binding(tensors: Mapping[str, Tensor], lineage: Lineage) -> str:
    digest = hashlib.sha256(canonical(lineage))
    for name, value in sorted(tensors.items()):
        digest.update(canonical([name, str(value.dtype), list(value.shape)]))
        digest.update(_bytes(value))
    return digest.hexdigest()


def _bytes(value: Tensor) -> Any:
    return value.contiguous().flatten().view(torch.uint8).numpy()


def _record(path: Path) -> dict[str, Any] | None:
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(METADATA)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None
    return None if text is None else _parsed(text, path)


def _bound(record: dict[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Lineage:
    if _binding(tensors, record["lineage"]) != record["digest"]:
        raise CheckpointError(
            f"weights: {path}: the lineage in it is not that of its tensors; expected the file "
            "as dpvision wrote it. Copy it again."
        )
    return record["lineage"]


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        record = parse_json(text)
        if (
            record["format"] != FORMAT
            or not isinstance(record["lineage"], list)
            or not isinstance(record["digest"], str)
        ):
            raise ValueError("unknown format")
        return record
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"weights: {path}: its lineage cannot be read ({error!r}); expected {FORMAT}. Copy "
            "the file again."
        ) from None


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"weights: {path} ({error}); expected a safetensors file. Correct the path, or copy it "
        "again."
    )
