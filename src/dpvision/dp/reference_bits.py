"""Reference bits: what a record adds to a sum must have the same bits whatever other records share
its pass.

The proof of a sum's bound (docs/clipping.md) needs a record's inputs, output gradients, norm and
factor to be functions of the record, the weights and the key, bit for bit. On some processors they
are not: the rows of a float32 product have other last bits among 15 rows than among 16. Removing
one record then changes the contributions of all others in its pass, and the loss may magnify the
change.

A record's reference bits are those in a pass of M rows, the physical batch size. Public records
show, on the device, in the precision and with the threads of the run, at which numbers of rows n <=
M all places of a pass give them; a pass of any other number of rows is padded to the next of those.
A sum does not depend on the padding: rows that are not valid are in no product of weight gradients.

Legend: B records (rows), N records of a chunk.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.data.batch import Batch, mapped, take
from dpvision.data.keys import StepKey
from dpvision.devices import send
from dpvision.dp.fingerprint import scattered
from dpvision.dp.one_pass import How, forward_backward, weigh
from dpvision.dp.outer_products import OUTER_NUMBERS, OneHot, Side, chunks
from dpvision.dp.per_record import default_chunk, even_chunks, per_record_gradients
from dpvision.dp.route import route_key, trained
from dpvision.dp.separable import random_records
from dpvision.dp.weight_grads import sum_of_squares
from dpvision.errors import PrivacyError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDS, _MANY_NUMBERS = 4, 2**15
"""Most repetitions of a check, and numbers of a pass's images from which on one is enough."""
_ADMITTED: "weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[int, ...]]]" = (
    weakref.WeakKeyDictionary()
)


def admitted(
    loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey, rows: int, method: str, how: How
) -> tuple[int, ...]:
    """Return the numbers of rows that a pass may have, ascending, the last ``rows``; checked at the
    first use, on random images.

    Args:
        batch: its shapes count, not what it holds: that is private.

    Raises:
        PrivacyError: as ``admit``.
    """
    found = _ADMITTED.get(model, {}).get(_name(loss_fn, model, batch, rows, method, how))
    return found or admit(loss_fn, model, _stand_ins(batch, rows), key, (), method, how)


def admit(
    loss_fn: Any,
    model: nn.Module,
    public: Batch,
    key: StepKey,
    sizes: Sequence[int],
    method: str,
    how: How,
) -> tuple[int, ...]:
    """Check passes of M = len(public) rows, then of each of ``sizes``; return those at which a
    record has its reference bits.

    The cost is three passes of M rows, and two of every other size. Small passes are repeated with
    other images, since a few numbers may agree by chance. Parameters that are all zero hold small
    numbers meanwhile: behind a zero head every gradient vanishes, and with it every difference.

    Raises:
        PrivacyError: a record's bits depend on its place, or on the records beside it, in a pass of
            M rows.
    """
    # For each round of images: digests of a pass of M distinct records are the reference. Then for
    # every size, a pass of the last records in reverse, and one of copies of the first, must give
    # each record the digests that it has there. A size that fails is dropped; M itself is refused.
    num = len(public.record_id_B)
    numbers = sum(v.numel() for v in public if v is not None and v.is_floating_point())
    found = sorted({num, *(size for size in sizes if 0 < size < num)}, reverse=True)
    with _perturbed(model):
        for number in range(max(1, min(_ROUNDS, _MANY_NUMBERS // max(1, numbers)))):
            batch = _distinct(public, number)
            reference = _digests(loss_fn, model, batch, key, method, how)
            for size in found.copy():
                for rows in ([*range(num - size, num)][::-1], [0] * size):
                    other = _difference(
                        reference,
                        _digests(loss_fn, model, _taken(batch, rows), key, method, how),
                        rows,
                    )
                    if other is not None and size == num:
                        raise PrivacyError(
                            f"bits: in a pass of {num} rows, {other} of a record depends on its "
                            "place or on the records beside it; expected the same bits. Use "
                            "another number of rows (--hardware.physical-batch-size, rows=), a "
                            "multiple of 16 if possible; or set MKL_CBWR=AVX512,STRICT "
                            "(slower), or compute on one thread (OMP_NUM_THREADS=1)."
                        )
                    if other is not None:
                        found.remove(size)
                        break
    _ADMITTED.setdefault(model, {})[_name(loss_fn, model, public, num, method, how)] = tuple(
        reversed(found)
    )
    return tuple(reversed(found))


def forget_admitted(model: nn.Module) -> None:
    """Forget the numbers of rows of a model, so that they are checked again."""
    _ADMITTED.pop(model, None)


def _distinct(public: Batch, number: int) -> Batch:
    """The records with other noise, or in a user's own form in another order, for every ``number``;
    the first of them twice, in distinct company.
    """
    generator = torch.Generator().manual_seed(number)

    def noisy(value: Tensor) -> Tensor:
        if not isinstance(public, Batch):
            return value.roll(number, 0)
        if not (number and value.is_floating_point()):
            return value
        return value + torch.randn(value.shape, generator=generator).to(value.device, value.dtype)

    rows = [*range(len(public.record_id_B))]
    rows[len(rows) // 2] = 0
    return _taken(mapped(public, noisy), rows)


def _taken(batch: Batch, rows: list[int]) -> Batch:
    return take(batch, send(torch.tensor(rows), batch.record_id_B.device))


def next_size(sizes: Sequence[int], num_records: int) -> int:
    """The smallest of ``sizes`` (ascending) that holds ``num_records``."""
    return next(size for size in sizes if size >= num_records)


def vmap_chunks(
    loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey, how: How
) -> Iterator[tuple[slice, dict[str, Tensor], Tensor]]:
    """Yield (records, their gradients, their losses) of each chunk, computed by ``vmap``."""
    params = {name: p.detach() for name, p in trained(model).items()}
    for part in even_chunks(len(batch.record_id_B), how.chunk_size or default_chunk(params)):
        yield (
            part,
            *per_record_gradients(loss_fn, model, params, take(batch, part), key, how.loss_scale),
        )


def written_norms(grads: dict[str, Tensor]) -> Tensor:
    """Norm of each record's whole gradient, float64; ``sum_of_squares`` bounds its error."""
    return torch.stack([sum_of_squares(value) for value in grads.values()]).sum(0).sqrt()


def _name(loss_fn: Any, model: nn.Module, batch: Batch, rows: int, method: str, how: How) -> Any:
    """All that may choose other kernels, so that it needs a check of its own."""
    return (
        route_key(loss_fn, model, batch),
        rows,
        method,
        how.chunk_size,
        how.compiled is not None,
        torch.get_num_threads(),
    )


def _difference(
    reference: dict[str, Tensor], found: dict[str, Tensor], rows: list[int]
) -> str | None:
    """Return the name of a number whose bits differ from those of the reference's ``rows``, or
    None.
    """
    if reference.keys() != found.keys():
        return "the way through the network"
    return next(
        (
            name
            for name, digest_B in found.items()
            if not torch.equal(digest_B, reference[name][rows])
        ),
        None,
    )


def _digests(
    loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey, method: str, how: How
) -> dict[str, Tensor]:
    """A digest (B,) of every number of each record that the sum and the bound on it depend on, by a
    name for messages.
    """
    if method == "vmap":
        parts = [
            {"loss": losses_B, "norm": written_norms(grads), **_named("gradient", grads)}
            for _, grads, losses_B in vmap_chunks(loss_fn, model, batch, key, how)
        ]
        return {name: torch.cat([_hashed(part[name]) for part in parts]) for name in parts[0]}
    passed = forward_backward(loss_fn, model, batch, key, how)
    weighed = weigh(passed, batch, np.arange(len(batch.record_id_B)), how)
    found = {
        "loss": _hashed(passed.losses_B),
        "norm": _hashed(weighed.norms_B),
        "clip factor": _hashed(weighed.factor_B),
    }
    found["error of the sum"] = _hashed(weighed.cost_KB.T)
    for slot in (slot for group in passed.groups for slot in group):
        name = min(slot.names)
        if slot.written_BW is not None:
            found[f"gradient of {name}"] = _hashed(slot.written_BW)
        for i, outer in enumerate(slot.outers):
            found[f"factors of {name}, use {i}"] = _of_side(outer.left) * 3 + _of_side(outer.right)
        slot.release()
    with torch.autocast(batch.record_id_B.device.type, enabled=False):
        for name in passed.slow:
            found[f"gradient of {name}"] = torch.cat(
                [_hashed(passed.slow_gradients(rows)[name]) for rows in passed.chunks]
            )
    return found


def _named(kind: str, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind} of {name}": value for name, value in grads.items()}


def _of_side(side: Side) -> Tensor:
    if isinstance(side, OneHot):
        return _hashed(side.kept)
    parts = chunks(side.num_records, side.places * side.width, OUTER_NUMBERS, side.device)
    return torch.cat([_hashed(side.rows(part)) for part in parts])


def _hashed(value_BX: Tensor) -> Tensor:
    """Digest of each record's bits, int64 (B,) on the CPU: a sum of integers times fixed random
    ones, so exact in any order.
    """
    flat_BX = value_BX.detach().reshape(len(value_BX), -1).contiguous()
    if flat_BX.dtype != torch.bool:
        flat_BX = flat_BX.view(_BITS[flat_BX.element_size()])
    return scattered(flat_BX.long()).mul_(_factors(flat_BX.shape[1], flat_BX.device)).sum(1).cpu()


@functools.lru_cache(maxsize=8)
def _factors(num: int, device: torch.device) -> Tensor:
    """Fixed random odd numbers, int64. Weights of one shape share them."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator) | 1).to(device)


@contextlib.contextmanager
def _perturbed(model: nn.Module) -> Iterator[None]:
    """Within the context, parameters that are all zero hold small numbers."""
    zeros = [(p, p.detach().clone()) for p in model.parameters() if not p.any()]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p, _ in zeros:
                p.copy_(0.02 * torch.randn(p.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for p, before in zeros:
                p.copy_(before)


def _stand_ins(batch: Batch, num: int) -> Batch:
    """Random records in the shapes of ``batch``, on its device; captions have one word and several
    lengths.
    """
    made = random_records(batch, num)
    if isinstance(made, Batch) and made.token_BVL is not None:
        num_tokens = made.token_BVL.shape[2]
        last_B11 = (1 + made.record_id_B % max(1, num_tokens - 2))[:, None, None]
        place_L = torch.arange(num_tokens)
        token = torch.full_like(made.token_BVL, EOS_ID + 1)
        token = token.masked_fill(place_L == last_B11, EOS_ID)
        token = token.masked_fill(place_L > last_B11, PAD_ID).masked_fill(place_L == 0, BOS_ID)
        made = made._replace(token_BVL=token)
    return mapped(made, lambda value: value.to(batch.record_id_B.device))
