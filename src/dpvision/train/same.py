"""Compare what the ranks of one run must agree on: before anything is charged, at every start, and
with every checkpoint.

Ranks that read different stores would train on records that no ledger charges; ranks that hold one
store in different orders would draw the same record twice, and it would change the sum by twice the
clipping norm. The compared values stay in memory: the digest of the records is a function of
private data and is never written, logged or shown.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpvision.config import RunConfig, to_dict
from dpvision.data.rows import Rows
from dpvision.data.store import Store
from dpvision.errors import PrivacyError
from dpvision.privacy.plan import DPPlan
from dpvision.runs.run import code_versions
from dpvision.train.distributed import Group, gather_texts

_ROWS_AT_ONCE = 1 << 16
_OF_A_MACHINE = ("data.store", "data.tokenizer", "init_from", "hardware.device", "hardware.workers")
"""Settings that may differ between ranks. For paths the contents are compared; the kind of device
is compared when the ranks join.
"""
_COMPUTED = ("epsilon", "epsilon_rdp")
"""Fields of a plan whose last digits may differ between machines, and which do not affect
execution.
"""
_SHOWN = ("store", "config", "plan", "version", "processor")
"""Facts whose values an error may show; all others are only named."""
_NAMED_AT_MOST = 4
_START = "Give all ranks one store (or exact copies of it), one command and one installation."
_WEIGHTS = (
    "A device, a library or dpvision computes differently on that rank: start again from an "
    "earlier checkpoint, without it."
)


def check_same_weights(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Refuse, on every rank, weights that are not bitwise equal on all ranks: each rank adds the
    same noise to the same sum.

    Raises:
        PrivacyError: names the tensors and the ranks.
    """
    if group.world_size > 1:
        check_same_everywhere(facts_of_tensors(tensors), group, remedy=_WEIGHTS)


def check_same_everywhere(facts: Mapping[str, str], group: Group, remedy: str = _START) -> None:
    """Refuse, on every rank, a run whose ranks differ in any of ``facts``.

    Args:
        facts: name -> value on this rank.
        remedy: last sentence of the error.

    Raises:
        PrivacyError: names the facts that differ and the ranks.
    """
    if group.world_size == 1:
        return
    digests = gather_texts(_digest_of_text(json.dumps(sorted(facts.items()))), group)
    if len(set(digests)) == 1:
        return
    ranks = [
        dict(json.loads(text)) for text in gather_texts(json.dumps(sorted(facts.items())), group)
    ]
    first, found = ranks[0], []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        others = [i for i, rank in enumerate(ranks) if rank.get(name) != first.get(name)]
        if others:
            shown = (
                f" ({ranks[others[0]].get(name)}; rank 0 has {first.get(name)})"
                if name.split(".")[0] in _SHOWN
                else ""
            )
            found.append(f"{name} on rank {', '.join(map(str, others))}{shown}")
    more = f", and {len(found) - _NAMED_AT_MOST} more" if len(found) > _NAMED_AT_MOST else ""
    raise PrivacyError(
        f"ranks: these differ from rank 0: {'; '.join(found[:_NAMED_AT_MOST])}{more}; expected "
        f"the same on all. {remedy}"
    )


def facts_of_start(
    config: RunConfig,
    plan: DPPlan,
    store: Store,
    rows: Rows,
    tokenizer: bytes | None,
    lineage: list[dict[str, Any]],
    tensors: Mapping[str, Tensor],
    progress: str,
    device: torch.device,
) -> dict[str, str]:
    """Collect what is compared at a start: store, records in their order, settings, plan, code,
    lineage and weights.

    Args:
        rows: int64 rows that may be drawn.
        tensors: tensors of the model, the optimizer and the average at this start.
        progress: updates and steps of the checkpoint that the run continues from.
    """
    settings = {
        name: value for name, value in _flat(to_dict(config), "") if name not in _OF_A_MACHINE
    }
    versions = code_versions()
    return {
        "store": store.store_id,
        "visibility of the store": store.visibility,
        "records": _digest_of_records(store, rows),
        **{f"config.{name}": value for name, value in settings.items()},
        **{
            f"plan.{name}": value
            for name, value in _flat(plan.to_dict(), "")
            if name not in _COMPUTED
        },
        **{f"version.{name}": value for name, value in versions.items()},
        "processor": _processor(device),
        "precision of products": torch.get_float32_matmul_precision(),
        "tokenizer": hashlib.sha256(tokenizer or b"").hexdigest(),
        "lineage": _digest_of_text(json.dumps(lineage, sort_keys=True)),
        "checkpoint": progress,
        **facts_of_tensors(tensors),
    }


def facts_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest the type, shape and bits of each tensor: NaNs with equal bits are equal, others
    differ.
    """
    return {f"tensor {name}": _digest_of_tensor(value) for name, value in tensors.items()}


def _digest_of_tensor(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest_of_records(store: Store, rows: Rows) -> str:
    """Digest ids, units, sizes and labels of ``rows`` in order, and the rows themselves, because a
    draw gives positions among them.
    """
    digest = hashlib.sha256()
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        for name in ("id", "unit", "size", "caption_size"):
            if name == "caption_size" and not isinstance(store.index, np.ndarray):
                continue  # a store of textures
            digest.update(np.ascontiguousarray(store.index[name][part]).astype("<i8").tobytes())
        for part_M in (part, *store.classes(part)):
            digest.update(
                len(part_M).to_bytes(8, "little")
                + np.ascontiguousarray(part_M).astype("<i8").tobytes()
            )
    return digest.hexdigest()


def _processor(device: torch.device) -> str:
    """The instruction set by which kernels are chosen: others round differently, and the ranks'
    weights would diverge.
    """
    if device.type == "cuda":
        return "cuda {}.{}".format(*torch.cuda.get_device_capability())
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value)
