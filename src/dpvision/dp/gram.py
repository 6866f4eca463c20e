"""Norms of sums of outer products from Gram matrices, with a proven bound on their error.

    ||sum over t of l_t r_t^T||^2 = sum over t, t' of L_tt' R_tt',
    L_tt' = <l_t, l_t'>,  R_tt' = <r_t, r_t'>     (Goodfellow 2015)

A computed entry of L is off by at most gamma_P |l_t| |l_t'| (``rounding.gamma``), one of R by
gamma_Q |r_t| |r_t'|, so by Cauchy-Schwarz

    |computed - true| <= gamma_Q ||L||_F sum |r_t|^2 + gamma_P ||R||_F sum |l_t|^2
                         + gamma_T ||L||_F ||R||_F

Where outer products cancel, this is no longer small beside the value. Underflow takes up to P times
the least normal number from an entry; it is covered by adding ``_lost`` to squared lengths, since
gamma_P _lost is more than that.

Legend: B records, N records of a chunk, T, S places, P, Q widths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpvision.dp.outer_products import (
    GRAM_NUMBERS,
    MOST_TERMS,
    OneHot,
    OuterProducts,
    Recomputed,
    Side,
    chunks,
    product,
    wide,
)
from dpvision.dp.rounding import UNIT, gamma

_PANEL = 48
"""Columns of a symmetric Gram matrix computed at a time: with 197 places, 0.61 of the arithmetic of
the whole matrix. A multiple of 16, the float32 numbers of a vector register, so that products have
no remainder but in the last panel.
"""


@dataclass(frozen=True, eq=False)
class SquareNorms:
    """Squared norms of records' gradients, how far to trust them, and what rounding may do to the
    sum of the gradients. float64.
    """

    value_B: Tensor
    """Possibly below zero by rounding."""
    error_B: Tensor
    """Proven bound on the distance of the value from the squared norm."""
    length_B: Tensor
    """(sum over t of |l_t| |r_t|)^2: bounds what rounding the factors of the outer products can do
    to their sum.
    """
    work_B: Tensor
    """(T + 1)^2 x length: in units of the roundoff, the square of what adding up the outer products
    of one record can round by.
    """

    def __add__(self, other: "SquareNorms") -> "SquareNorms":
        return SquareNorms(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )

    @staticmethod
    def certain(value_B: Tensor) -> "SquareNorms":
        """Norms of gradients that are written out, whose numbers are those that are added."""
        zero_B = torch.zeros_like(value_B)
        return SquareNorms(value_B, zero_B, zero_B, 4 * value_B)

    @staticmethod
    def joined(parts: list["SquareNorms"]) -> "SquareNorms":
        """The norms of several chunks of records."""
        return SquareNorms(
            *(
                torch.cat([getattr(part, name) for part in parts])
                for name in SquareNorms.__dataclass_fields__
            )
        )


def square_norms(outers: list[OuterProducts]) -> SquareNorms:
    """||sum over uses u of G_ui||^2 for every record: the squared norm of one weight's gradient.

    Args:
        outers: all uses of the weight by the same records.
    """
    first = outers[0]
    if len(outers) == 1 and not any(
        isinstance(side, OneHot | Recomputed) for side in (first.left, first.right)
    ):
        return square_norms_of_shared([first.left], first.right)
    # ||sum over u of G_u||^2 = sum over pairs (u, v) of <G_u, G_v>, each from the Gram matrices
    # between the rows of the two uses; a pair of different uses counts twice.
    total_B = torch.zeros(first.num_records, dtype=torch.float64, device=first.device)
    length_B = torch.zeros_like(total_B)
    for i, a in enumerate(outers):
        for b in outers[i:]:
            for rows in chunks(
                len(total_B), 2 * a.left.places * b.left.places, GRAM_NUMBERS, total_B.device
            ):
                product_NTS = _cross_gram(a.left, b.left, rows) * _cross_gram(
                    a.right, b.right, rows
                )
                total_B[rows] += (1 if a is b else 2) * product_NTS.sum(2).sum(
                    1, dtype=torch.float64
                )
            if a is b:
                length_B += (_square_lengths(a.left) * _square_lengths(a.right)).sqrt().sum(1)
    # For several uses, or rows made again, the plain form of the bound: |l_t| |l_t'| |r_t| |r_t'|
    # for every pair.
    places = sum(outer.left.places for outer in outers)
    terms = max(_terms(outer.left) + _terms(outer.right) for outer in outers) + places + 2
    length_B = length_B.square()
    error_B = 1.1 * gamma(terms, wide(_dtype(first))) * length_B
    return SquareNorms(total_B, error_B, length_B, (places + 1) ** 2 * length_B)


def square_norms_of_shared(lefts: list[Side], right: Side) -> SquareNorms:
    """Return the sum of ||G_ui||^2 over weights u with the same input, whose Gram matrix is
    computed once.
    """
    parts = [
        _symmetric_dot([left.rows(rows) for left in lefts], right.rows(rows))
        for rows in chunks(
            right.num_records,
            2 * right.places * min(right.places, _PANEL),
            GRAM_NUMBERS,
            right.device,
        )
    ]
    return SquareNorms.joined(parts)


def written_square_norms(outer: OuterProducts, rows: slice, value_N: Tensor) -> SquareNorms:
    """Return what rounding can change in ``value_N``, the squared norms of outer products that are
    written out for the norm only; the value itself is zero.
    """
    lengths_NT = [
        torch.linalg.vector_norm(side.rows(rows), dim=2, dtype=torch.float64)
        for side in (outer.left, outer.right)
    ]
    length_N = (lengths_NT[0] * lengths_NT[1]).sum(1)
    places = outer.left.places
    off_N = gamma(places, wide(_dtype(outer))) * length_N
    return SquareNorms(
        torch.zeros_like(length_N),
        off_N * (2 * value_N.sqrt() + off_N),
        length_N**2,
        ((places + 1) * length_N) ** 2,
    )


def _symmetric_dot(lefts_NTP: list[Tensor], right_NTQ: Tensor) -> SquareNorms:
    """sum over t, t' of (sum over lefts of l l^T) o (r r^T), by panels of columns, each from its
    diagonal block on.
    """
    # Both Gram matrices are symmetric, so only panels of columns from the diagonal block down are
    # computed: a number below that block counts twice. A panel gives its part of the value, of both
    # Frobenius norms, and from its diagonal the lengths |l_t|^2 and |r_t|^2: all that the bound at
    # the top of this file needs, without a whole Gram matrix in memory.
    num, places, width = right_NTQ.shape
    value_N, square_l_N, square_r_N = torch.zeros(
        3, num, dtype=torch.float64, device=right_NTQ.device
    )
    length_l_NT, length_r_NT = torch.empty(
        2, num, places, dtype=torch.float64, device=right_NTQ.device
    )
    dtype = wide(right_NTQ.dtype)
    left_width = max(left.shape[2] for left in lefts_NTP)
    for start in range(0, places, _PANEL):
        stop = min(start + _PANEL, places)
        gram_l, gram_r = _panel(lefts_NTP, start, stop), _panel([right_NTQ], start, stop)
        own = (
            stop - start
        )  # rows of the diagonal block; those below it stand for the columns to its right, too
        for gram, length_NT in ((gram_l, length_l_NT), (gram_r, length_r_NT)):
            length_NT[:, start:stop] = gram[:, :own].diagonal(dim1=1, dim2=2)
        square_l_N += _symmetric_sum(
            torch.linalg.vector_norm(gram_l, dim=2).double().square_(), own
        )
        square_r_N += _symmetric_sum(
            torch.linalg.vector_norm(gram_r, dim=2).double().square_(), own
        )
        value_N += _symmetric_sum(gram_l.mul_(gram_r).sum(2).double(), own)
    lost = _lost(dtype)
    length_l_NT += lost
    length_r_NT += lost
    length_N, sum_l_N, sum_r_N = (
        (length_l_NT * length_r_NT).sqrt_().sum(1),
        length_l_NT.sum(1),
        length_r_NT.sum(1),
    )
    # Squares of numbers below 2^-63 are lost to a norm; no Frobenius norm exceeds the sum of
    # squared lengths.
    norm_l_N = torch.minimum(square_l_N.sqrt() + places * 2.0**-60, sum_l_N)
    norm_r_N = torch.minimum(square_r_N.sqrt() + places * 2.0**-60, sum_r_N)
    off_l_N, off_r_N = (
        gamma(_blocked(left_width) + len(lefts_NTP), dtype) * sum_l_N,
        gamma(_blocked(width), dtype) * sum_r_N,
    )
    error_N = (
        norm_l_N * off_r_N
        + norm_r_N * off_l_N
        + off_l_N * off_r_N
        + gamma(places + 1, dtype) * norm_l_N * norm_r_N
    )
    # A tenth more, for the bound's own numbers, which are float32 too.
    length_N = length_N.square()
    return SquareNorms(value_N, 1.1 * error_N, length_N, (places + 1) ** 2 * length_N)


def _panel(sides_NTP: list[Tensor], start: int, stop: int) -> Tensor:
    """Columns of the sum of Gram matrices from their diagonal block on, (N, T - start, stop -
    start).
    """
    gram_NSO = product(sides_NTP[0][:, start:], sides_NTP[0][:, start:stop].mT)
    for side in sides_NTP[1:]:
        gram_NSO += product(side[:, start:], side[:, start:stop].mT)
    return gram_NSO


def _symmetric_sum(value_NS: Tensor, own: int) -> Tensor:
    """Sum of numbers per row of a panel, float64 (N,): twice those below its diagonal block, for
    the mirrored part.
    """
    total_N = value_NS.sum(1)
    return total_N if own == value_NS.shape[1] else 2 * total_N - value_NS[:, :own].sum(1)


def _cross_gram(a: Side, b: Side, rows: slice) -> Tensor:
    """<a_t, b_t'>, (N, Ta, Tb)."""
    if a is b and isinstance(a, Recomputed):
        return a.kept[rows]
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.kept[rows, :, None] == b.kept[rows, None, :]).to(wide(a.dtype))
    if isinstance(a, OneHot):
        return _cross_gram(b, a, rows).mT
    if isinstance(b, OneHot):
        value_NTP = a.rows(rows)
        index_NTS = b.kept[rows, None, :].expand(-1, value_NTP.shape[1], -1)
        return value_NTP.gather(2, index_NTS).to(wide(value_NTP.dtype))
    return product(a.rows(rows), b.rows(rows).mT)


def _blocked(width: int) -> int:
    """Roundings of a term of an inner product in ``product``: inside its block, and as the blocks
    are added up.
    """
    return width if width <= MOST_TERMS else MOST_TERMS + -(-width // MOST_TERMS)


def _terms(side: Side) -> int:
    return 1 if isinstance(side, OneHot) else _blocked(side.width)


def _lost(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny / UNIT[dtype]


def _square_lengths(side: Side) -> Tensor:
    """|row|^2 of every place of every record, float64 (B, T)."""
    if isinstance(side, OneHot):
        return torch.ones(side.kept.shape, dtype=torch.float64, device=side.device)
    if isinstance(side, Recomputed):
        return side.kept.diagonal(dim1=1, dim2=2).double() + _lost(side.kept.dtype)
    parts = [
        torch.linalg.vector_norm(side.rows(rows), dim=2, dtype=torch.float64).square()
        for rows in chunks(side.num_records, side.places * side.width, GRAM_NUMBERS, side.device)
    ]
    return torch.cat(parts) + _lost(torch.float32)


def _dtype(outer: OuterProducts) -> torch.dtype:
    return torch.promote_types(outer.left.dtype, outer.right.dtype)
