"""The input of a loss function: one physical batch of records.

Legend: B records (rows), V views of a record, C channels, H height, W width, L tokens, K labels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class HostRows(NamedTuple):
    """Ids and validity of a batch's rows on the CPU.

    A pass reads them here and need not ask the device.
    """

    record_id_B: Tensor
    valid_B: Tensor


class Batch(NamedTuple):
    """One physical batch; every tensor has the record as its first dimension.

    A row with ``valid_B`` False is padding, weight 0.

    ``dp`` takes any named tuple of tensors whose first two are ``record_id_B`` and ``valid_B``.
    """

    record_id_B: Tensor
    """int64, the records' own immutable ids; where people are drawn, theirs: a row is then one
    person, whose images are its views.
    """
    valid_B: Tensor
    """bool; False for padding rows and for records that could not be decoded: they contribute
    exactly zero.
    """
    image_BVCHW: Tensor
    """float32, normalised; uint8 on the way to a device (``train.feed``)."""
    token_BVL: Tensor | None = None
    """int64 token ids, None without captions."""
    label_B: Tensor | None = None
    """int64 of shape (B,), -1 if unlabelled. With several labels per record, uint8 (B, K): 1 for
    each class of the record, 0 elsewhere, ``multi_label.NOT_KNOWN`` throughout if unlabelled. None
    if the store has no labels.
    """
    label_BV: Tensor | None = None
    """The same for each view, (B, V) or (B, V, K), where the views are images of one person;
    label_B is then None.
    """


def mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``change`` to every tensor of a batch."""
    return type(batch)._make(None if value is None else change(value) for value in batch)


def take(batch: Batch, rows: slice | Tensor) -> Batch:
    """Select rows of a batch."""
    return mapped(batch, lambda value: value[rows])


def rows_where(mask_B: Tensor, first: Batch, second: Batch) -> Batch:
    """Take rows of ``first`` where ``mask_B`` is True, of ``second`` elsewhere.

    Both have the same tensors.
    """
    others = iter([value for value in second if value is not None])
    return mapped(
        first,
        lambda value: torch.where(mask_B.view(-1, *[1] * (value.ndim - 1)), value, next(others)),
    )
