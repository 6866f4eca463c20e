"""Frozen features and labels of private records, read in blocks; and the linear head trained on
them.

Training and prediction transform a record in the same way. Each step is a function of the record
and of public numbers:

    x -> (x - centre) / spread -> x / ||x|| (``unit``) -> x * scale -> (x, constant)
      -> map (x, constant)

A record with non-finite features or an invalid label is in no block: it contributes exactly zero
and raises nothing, since whether a release raises must not depend on one record.

Legend: N records, B records of a block, D feature dimension, E row width after the map (D, or D + 1
with a constant), K classes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpvision.adapt.integer_products import WholeWeight, to_digits
from dpvision.adapt.person_rows import PersonFeatures
from dpvision.errors import DataError

LARGEST_NORM = 1e15
"""Rows longer than this count as non-finite: beyond it, float32 products with the clip factor could
overflow.
"""
_BLOCK_BYTES = 1 << 26
_PIECE = 16


class Block(NamedTuple):
    """Valid records only, so that B is secret."""

    x_BE: Tensor
    """float32."""
    norm_B: Tensor
    """float64; norms of the rows of x_BE, within 6 eps of float32."""
    label_B: Tensor | None
    """int64 in [0, K); None for multi-label records."""
    target_BK: Tensor | None
    """float32, 0 or 1; None for single-label records."""
    row_B: np.ndarray
    """int64 positions of the records in the stream."""

    def class_sum(self, x_BE: Tensor, num_classes: int) -> Tensor:
        """Return the sums of the rows of ``x_BE`` by class, float64 (K, E): Y^T X, without building
        Y for single labels.
        """
        x_BE = x_BE.double()
        if self.label_B is None:
            assert self.target_BK is not None
            return self.target_BK.double().T @ x_BE
        return x_BE.new_zeros(num_classes, x_BE.shape[1]).index_add_(0, self.label_B, x_BE)

    def target_square_B(self) -> Tensor:
        """Return ||y||^2, the number of labels of each record, float64 (B,)."""
        if self.target_BK is None:
            return torch.ones(len(self.x_BE), dtype=torch.float64)
        return self.target_BK.double().sum(1)


@dataclass(frozen=True, eq=False)
class FeatureStream:
    """Features and labels, in memory or memory-mapped; read in blocks of about 64 MiB."""

    feature_ND: np.ndarray | PersonFeatures
    """float32 or float16. Where people are drawn, the N rows are people's."""
    label: np.ndarray
    """Integers (N,); or (N, K), 1 for each class that a record belongs to and 0 elsewhere."""
    num_classes: int
    """Public: declared, never counted in the data."""
    centre_D: Tensor | None = None
    """Public point subtracted from every record, such as the mean of public features; float32."""
    spread_D: Tensor | None = None
    """Public positive divisor of each dimension, such as the spread of public features; float32."""
    unit: bool = False
    """Whether to scale every record to length 1. A record of length 0 is unchanged."""
    scale_D: Tensor | None = None
    """Public positive factor of each dimension, float32."""
    constant: float = 0.0
    """Appended to every record, so that the head has a trained bias. If 0, nothing is appended."""
    map_EE: Tensor | None = None
    """Linear map computed from public or released numbers, float32; applied to the row as x @
    map^T.
    """

    def __post_init__(self) -> None:
        feature, label = self.feature_ND, self.label
        if (
            feature.ndim != 2
            or feature.dtype not in (np.float32, np.float16)
            or 0 in feature.shape[1:]
        ):
            raise DataError(
                f"features: array {feature.dtype}{list(feature.shape)}; expected float32 or "
                "float16 (N, D). Compute the features again."
            )
        single = label.ndim == 1 and np.issubdtype(label.dtype, np.integer)
        several = label.ndim == 2 and label.shape[1] == self.num_classes
        if not self.num_classes >= 2 or len(label) != len(feature) or not (single or several):
            raise DataError(
                f"features: labels {label.dtype}{list(label.shape)} for {len(feature)} records, "
                f"num_classes={self.num_classes}; expected two classes or more, and integers "
                "(N,) or zeros and ones (N, num_classes). Declare the classes, label every "
                "record."
            )
        if not -math.inf < self.constant < math.inf:
            raise DataError(
                f"features: constant={self.constant}; expected a finite number. Use 0 for no "
                "trained bias."
            )

    @property
    def num_records(self) -> int:
        return len(self.feature_ND)

    @property
    def width(self) -> int:
        """E, the width of a head's input rows."""
        return self.feature_ND.shape[1] + (self.constant != 0)

    @property
    def multi_label(self) -> bool:
        return self.label.ndim == 2

    @property
    def longest_row(self) -> float | None:
        """Public bound on the length of every row, up to float32 rounding, or None if there is no
        bound.
        """
        if not self.unit or self.map_EE is not None:
            return None
        return math.hypot(1.0 if self.scale_D is None else float(self.scale_D.max()), self.constant)

    @cached_property
    def _map(self) -> WholeWeight:
        assert self.map_EE is not None
        return WholeWeight(self.map_EE)

    def mapped(self, map_EE: Tensor) -> "FeatureStream":
        """Return the stream with ``map_EE`` applied after its own map."""
        both_EE = map_EE if self.map_EE is None else map_EE.double() @ self.map_EE.double()
        return replace(self, map_EE=both_EE.float())

    def blocks(
        self, rows: np.ndarray | None = None, num_bytes: int | None = None
    ) -> Iterator[Block]:
        """Yield all records, or those at ``rows`` (sorted int64), in order.

        Args:
            num_bytes: size of a block's rows; if None, about 64 MiB.
        """
        count = self.num_records if rows is None else len(rows)
        step = max(1, (num_bytes or _BLOCK_BYTES) // (4 * max(self.width, self.num_classes)))
        for start in range(0, count, step):
            row_B = (
                np.arange(start, min(start + step, count))
                if rows is None
                else rows[start : start + step]
            )
            yield self._block(slice(start, start + step) if rows is None else row_B, row_B)

    def _block(self, here: slice | np.ndarray, row_B: np.ndarray) -> Block:
        # A copy: the array may be a read-only map of a file.
        x_BE, norm_B = self._rows(torch.from_numpy(np.array(self.feature_ND[here])).float())
        label = self.label[here]
        valid_B = norm_B <= LARGEST_NORM  # false for NaN
        if self.multi_label:
            valid_B &= torch.from_numpy(((label == 0) | (label == 1)).all(axis=1))
        else:
            valid_B &= torch.from_numpy((label >= 0) & (label < self.num_classes))
        if not valid_B.all():
            x_BE, norm_B, label, row_B = (
                x_BE[valid_B],
                norm_B[valid_B],
                label[valid_B.numpy()],
                row_B[valid_B.numpy()],
            )
        if self.multi_label:
            return Block(x_BE, norm_B, None, torch.from_numpy(label.astype(np.float32)), row_B)
        return Block(x_BE, norm_B, torch.from_numpy(label.astype(np.int64)), None, row_B)

    def _rows(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return a head's input rows and their lengths."""
        x_BE, norm_B = x_BD, None
        if self.centre_D is not None:
            x_BE = x_BE - self.centre_D
        if self.spread_D is not None:
            x_BE = x_BE / self.spread_D
        if self.unit:
            norm_B = _norms(x_BE)
            scale_B = torch.where(norm_B > 0, 1 / norm_B, 1.0).float()
            # A row whose square overflows, or that is longer than LARGEST_NORM, becomes NaN and is
            # dropped.
            x_BE = x_BE * torch.where(norm_B <= LARGEST_NORM, scale_B, torch.nan)[:, None]
        if self.scale_D is not None:
            x_BE = x_BE * self.scale_D
        if self.constant:
            x_BE = torch.cat([x_BE, torch.full((len(x_BE), 1), self.constant)], dim=1)
        if self.map_EE is not None:
            x_BE = _mapped(x_BE, self._map)
        return x_BE, _norms(x_BE)

    def head(self, weight_KE: Tensor, bias_K: Tensor) -> "Head":
        """Return the head on untransformed features that is equivalent to ``weight_KE`` and
        ``bias_K`` on this stream's rows.
        """
        weight_KE, bias_K = weight_KE.double(), bias_K.double()
        if self.map_EE is not None:
            weight_KE = weight_KE @ self.map_EE.double()
        if self.constant:
            weight_KE, bias_K = weight_KE[:, :-1], bias_K + self.constant * weight_KE[:, -1]
        if self.scale_D is not None:
            weight_KE = weight_KE * self.scale_D
        return Head(weight_KE.float(), bias_K.float(), self.centre_D, self.spread_D, self.unit)


@dataclass(frozen=True, eq=False)
class Head:
    """A linear classifier on frozen features: scores = weight x + bias, with x centred, divided
    and scaled as in training.
    """

    weight_KD: Tensor
    """float32."""
    bias_K: Tensor
    centre_D: Tensor | None = None
    spread_D: Tensor | None = None
    unit: bool = False

    def scores(self, x_BD: Tensor) -> Tensor:
        """Return the scores, float32 (B, K), of features, float32 (B, D)."""
        if self.centre_D is not None:
            x_BD = x_BD - self.centre_D
        if self.spread_D is not None:
            x_BD = x_BD / self.spread_D
        if self.unit:
            x_BD = x_BD / torch.linalg.vector_norm(x_BD, dim=1, keepdim=True).clamp(
                min=torch.finfo(x_BD.dtype).tiny
            )
        return x_BD @ self.weight_KD.T + self.bias_K

    def predict(self, x_BD: Tensor) -> Tensor:
        """Return the class with the largest score, int64 (B,)."""
        return self.scores(x_BD).argmax(dim=1)


def _mapped(x_BE: Tensor, weight: WholeWeight) -> Tensor:
    """Return the rows times the weight, float32, from exact products: the bits of a float32 product
    depend on the number of rows.

    A row is rounded to 24 bits, relative to its largest entry, as much as float32 keeps of that
    entry.
    """
    finite_B = torch.isfinite(x_BE).all(dim=1)
    digit_BE, scale_B, _ = to_digits(x_BE.masked_fill(~finite_B[:, None], 0.0), 3)
    return weight.times(digit_BE, scale_B).float().masked_fill_(~finite_B[:, None], torch.nan)


def _norms(x_BE: Tensor) -> Tensor:
    """Return the lengths of rows, float64, within 6 eps of float32 (as
    ``dp.weight_grads.sum_of_squares`` argues): the margin of 32 covers their squares too.

    Groups of 16 squares are summed in float32 and the groups in float64, several times as fast as
    float64 throughout. Below 1e-17, squares underflow and lengths come out too small: contributions
    of such rows are far below any clip norm.
    """
    whole = x_BE.shape[1] // _PIECE * _PIECE
    piece_BQ = torch.linalg.vector_norm(x_BE[:, :whole].unflatten(1, (-1, _PIECE)), dim=2).double()
    return (piece_BQ.square().sum(dim=1) + x_BE[:, whole:].double().square().sum(dim=1)).sqrt()
