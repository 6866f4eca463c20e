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

A model has about a hundred weights, and on a GPU the host would not keep up with a dozen small
operations for each. So a weight leaves numbers per place only (``PlaceSums``); value and bound of
all weights with as many places are then computed together (``summed_squares``).

Legend: B records, N records of a chunk, G weights, T, S places, P, Q widths.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dpvision.devices import padded_rows, row_sums, send
from dpvision.dp.outer_products import (
    GRAM_NUMBERS,
    MOST_TERMS,
    OUTER_NUMBERS,
    OneHot,
    OuterProducts,
    Side,
    WithGram,
    chunks,
    in_half,
    most_terms_at_once,
    product,
    wide,
)
from dpvision.dp.rounding import UNIT, gamma

_PANEL = {"cpu": 32, "cuda": 512}
"""Columns of a symmetric Gram matrix computed at a time. On a CPU, with 197 places, 0.58 of the
arithmetic of the whole matrix; a multiple of 16, the float32 numbers of a vector register, so that
products have no remainder but in the last panel. On a GPU few launches count for more.
"""
_CLASH = 512
"""Rows that begin a multiple of this many numbers apart (2 KB) fall into few sets of a CPU's cache:
MKL's narrow AVX-512 products then run at a third to two thirds of their speed. They are copied
first.
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
    def total(parts: Sequence["SquareNorms"]) -> "SquareNorms":
        """The squared norms of gradients for disjoint parameters, one part or more."""
        return SquareNorms(
            *(
                added(torch.stack([getattr(part, field.name) for part in parts]))
                for field in fields(SquareNorms)
            )
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
        isinstance(side, OneHot | WithGram) for side in (first.left, first.right)
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
                value_N = row_sums(row_sums(product_NTS), torch.float64)
                total_B[rows] += (1 if a is b else 2) * value_N
            if a is b:
                length_B += row_sums((_square_lengths(a.left) * _square_lengths(a.right)).sqrt())
    # For several uses, or a Gram matrix that is kept, the plain form of the bound:
    # |l_t| |l_t'| |r_t| |r_t'| for every pair.
    places = sum(outer.left.places for outer in outers)
    terms = max(_terms(outer.left) + _terms(outer.right) for outer in outers) + places + 2
    length_B = length_B.square()
    error_B = 1.1 * gamma(terms, wide(_dtype(first))) * length_B
    return SquareNorms(total_B, error_B, length_B, (places + 1) ** 2 * length_B)


def square_norms_of_shared(lefts: list[Side], right: Side) -> SquareNorms:
    """Return the sum of ||G_ui||^2 over weights u with the same input, whose Gram matrix is
    computed once.
    """
    return summed_squares(sums_of_shared(lefts, right))


def written_square_norms(
    outers: Sequence[OuterProducts],
    kept: Sequence[Tensor],
    rows: slice,
    value_N: Tensor,
    dtype: torch.dtype,
) -> SquareNorms:
    """The squared norms ``value_N`` of records' gradients that are written out for the norm only,
    with what rounding can change in them and in the sum.

    The uses of a weight round the same numbers: so their lengths are added, not their squares.

    Args:
        outers: all uses as outer products, which the sum adds up.
        kept: norms, float64 (N,), of the gradients of uses that are kept written out.
        dtype: precision of the products and of their sum.
    """
    count = len(outers) + len(kept)
    off_N, length_N, work_N = torch.zeros(3, len(value_N), dtype=torch.float64).to(value_N.device)
    for norm_N in kept:
        off_N += gamma(count - 1, dtype) * norm_N
        work_N += 2 * norm_N
    for outer in outers:
        lengths_NT = [
            torch.linalg.vector_norm(padded_rows(side.rows(rows)), dim=2, dtype=torch.float64)
            for side in (outer.left, outer.right)
        ]
        own_N, places = row_sums(lengths_NT[0] * lengths_NT[1]), outer.left.places
        off_N += gamma(places + count - 1, dtype) * own_N
        length_N += own_N
        work_N += (places + 1) * own_N
    error_N = off_N * (2 * value_N.sqrt() + off_N)
    return SquareNorms(value_N, error_N, length_N.square(), work_N.square() + 4 * value_N)


@dataclass(frozen=True, eq=False)
class PlaceSums:
    """What value and bound need of two Gram matrices: L of the left rows (the sum of those of
    several weights), and R of the right rows. Float32 or wider, K parts of the matrices: their
    rows, or tiles. A number above the diagonal may count at the part of its mirror image.
    """

    tensors: tuple[Tensor, ...]
    """value_NK, sums over the parts of L o R; norm_l_NK and norm_r_NK, norms of the parts of L and
    of R, whose squares add up to the squared norm; square_l_NT and square_r_NT, the diagonals:
    squared lengths of the rows.
    """
    off_l: float
    """Relative error of an entry of L (``rounding.gamma``)."""
    off_r: float
    summed: int
    """Bounds the roundings of a number in the sum of its part."""
    dtype: torch.dtype
    """Precision of the matrices."""


def sums_of_shared(lefts: list[Side], right: Side) -> list[PlaceSums]:
    """Sums by place of the Gram matrices of weights with the same input: of all together, or of
    each, where a kernel makes them of the rows.
    """
    sides, device = [*lefts, right], right.device
    if not all(in_half(side.dtype, right.dtype, device) for side in sides):
        return [_place_sums(lefts, right)]
    return [_tile_sums(left, right) for left in lefts]


def _tile_sums(left: Side, right: Side) -> PlaceSums:
    """As ``_place_sums``, without a Gram matrix in memory (``pass_triton``)."""
    from dpvision.dp.pass_triton import TILE, tile_sums

    numbers = right.places * (left.width + right.width)
    parts = [
        tile_sums(left.rows(rows), right.rows(rows))
        for rows in chunks(right.num_records, numbers, OUTER_NUMBERS, right.device)
    ]
    off_l, off_r = (gamma(side.width) for side in (left, right))
    return PlaceSums(_joined(parts), off_l, off_r, TILE, torch.float32)


def _place_sums(lefts: list[Side], right: Side) -> PlaceSums:
    panel = _PANEL.get(right.device.type, _PANEL["cuda"])
    places = right.places
    numbers = places * (places + min(places, panel))
    if any(_clashes(side.rows(slice(0, 1)), panel) for side in (*lefts, right)):
        numbers = max(numbers, places * MOST_TERMS)  # the copy too stays in the cache
    parts = [
        _by_place([left.rows(rows) for left in lefts], right.rows(rows), panel)
        for rows in chunks(right.num_records, numbers, GRAM_NUMBERS, right.device)
    ]
    dtype = wide(right.dtype)
    off_l, off_r = (gamma(_roundings(sides), dtype) for sides in (lefts, [right]))
    return PlaceSums(_joined(parts), off_l, off_r, places, dtype)


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Tensors of several chunks of records."""
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def _by_place(lefts_NTP: list[Tensor], right_NTQ: Tensor, panel: int) -> tuple[Tensor, ...]:
    """The tensors of ``PlaceSums`` for some records, by panels of columns, each from its diagonal
    block on.
    """
    # Both Gram matrices are symmetric, so only panels of columns from the diagonal block down are
    # computed: a number below that block counts twice, once for the mirrored column. A panel gives
    # its part of the rows' sums and squared norms, and from its diagonal the squared lengths.
    num, places, _ = right_NTQ.shape
    panels_l, panels_r = _panels(lefts_NTP, panel), _panels([right_NTQ], panel)
    if len(panels_r) == 1:
        gram_l, gram_r = panels_l[0], panels_r[0]
        norms = [torch.linalg.vector_norm(padded_rows(gram), dim=2) for gram in (gram_l, gram_r)]
        squares = [gram.diagonal(dim1=1, dim2=2).clone() for gram in (gram_l, gram_r)]
        return row_sums(gram_l.mul_(gram_r)), *norms, *squares
    double = {"dtype": torch.float64, "device": right_NTQ.device}
    value_NT, sum_l_NT, sum_r_NT = torch.zeros(3, num, places, **double)  # type: ignore[call-overload]
    length_l_NT, length_r_NT = torch.empty(2, num, places, **double)  # type: ignore[call-overload]
    for start, gram_l, gram_r in zip(range(0, places, panel), panels_l, panels_r, strict=True):
        own = slice(start, min(start + panel, places))
        for gram, sum_NT, length_NT in (
            (gram_l, sum_l_NT, length_l_NT),
            (gram_r, sum_r_NT, length_r_NT),
        ):
            length_NT[:, own] = gram[:, : own.stop - start].diagonal(dim1=1, dim2=2)
            norm_NT = torch.linalg.vector_norm(padded_rows(gram), dim=2)
            _fold(sum_NT, norm_NT.double().square_(), own)
        _fold(value_NT, row_sums(gram_l.mul_(gram_r)).double(), own)
    return value_NT, sum_l_NT.sqrt_(), sum_r_NT.sqrt_(), length_l_NT, length_r_NT


def _fold(total_NT: Tensor, part_NS: Tensor, own: slice) -> None:
    """Add numbers of a panel's rows: once in its diagonal block, twice below it."""
    size = own.stop - own.start
    total_NT[:, own] += part_NS[:, :size]
    total_NT[:, own.stop :] += part_NS[:, size:].mul_(2)


def summed_squares(parts: Sequence[PlaceSums]) -> SquareNorms:
    """Squared norms over one weight or more, with the bound at the top of this file."""
    alike: dict[Any, list[PlaceSums]] = {}
    for part in parts:
        kinds = [(value.shape[1], value.dtype) for value in part.tensors]
        alike.setdefault((*kinds, part.dtype, part.summed), []).append(part)
    return SquareNorms.total([_squares(same) for same in alike.values()])


def _squares(parts: list[PlaceSums]) -> SquareNorms:
    """Squared norms over weights with as many places, in as many parts."""
    dtype, places = parts[0].dtype, parts[0].tensors[4].shape[1]
    value_GNK, norm_l_GNK, norm_r_GNK, square_l_GNT, square_r_GNT = (
        torch.stack(kind).double() for kind in zip(*(part.tensors for part in parts), strict=True)
    )
    square_l_GNT += _lost(dtype)
    square_r_GNT += _lost(dtype)
    length_GN = row_sums((square_l_GNT * square_r_GNT).sqrt_()).square_()
    sum_l_GN, sum_r_GN = row_sums(square_l_GNT), row_sums(square_r_GNT)
    # Squares of numbers below 2^-63 are lost to a norm; no Frobenius norm exceeds the sum of
    # squared lengths.
    norm_l_GN, norm_r_GN = (
        torch.minimum(row_sums(norm_GNK.square_()).sqrt_() + places * 2.0**-60, sum_GN)
        for norm_GNK, sum_GN in ((norm_l_GNK, sum_l_GN), (norm_r_GNK, sum_r_GN))
    )
    offs = tuple(part.off_l for part in parts), tuple(part.off_r for part in parts)
    off_l_G1, off_r_G1 = _columns(offs, value_GNK.device)
    off_l_GN, off_r_GN = off_l_G1 * sum_l_GN, off_r_G1 * sum_r_GN
    error_GN = (
        norm_l_GN * off_r_GN
        + norm_r_GN * off_l_GN
        + off_l_GN * off_r_GN
        + gamma(parts[0].summed + 1, dtype) * norm_l_GN * norm_r_GN
    )
    # A tenth more, for the bound's own numbers, which are float32 too.
    value_N, error_N, length_N = map(added, (row_sums(value_GNK), 1.1 * error_GN, length_GN))
    return SquareNorms(value_N, error_N, length_N, (places + 1) ** 2 * length_N)


def added(value_GN: Tensor) -> Tensor:
    """Sum over the first dimension, (N,), by elementwise additions of halves: ``sum`` adds in an
    order that depends on a record's place among the columns.
    """
    while len(value_GN) > 1:
        half = len(value_GN) // 2
        rest = value_GN[2 * half :]
        value_GN = value_GN[:half] + value_GN[half : 2 * half]
        value_GN = torch.cat([value_GN, rest]) if len(rest) else value_GN
    return value_GN[0]


@functools.lru_cache(maxsize=256)
def _columns(rows: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """Numbers as float64 (R, G, 1) on a device; they are the same in every pass."""
    return send(torch.tensor(rows, dtype=torch.float64)[:, :, None], device)


def _panels(sides_NTP: list[Tensor], panel: int) -> list[Tensor]:
    """The sum of Gram matrices in panels of columns, each from its diagonal block down:
    (N, T - start, at most ``panel``).
    """
    made: list[Tensor] = []
    for side in sides_NTP:
        most = most_terms_at_once(side.dtype, side.device)
        for first in range(0, side.shape[2], most):
            part = side[:, :, first : first + most]
            if _clashes(part, panel):
                room = part.new_empty(*part.shape[:2], part.shape[2] + 16)
                part = room[:, :, :-16].copy_(part)
            fresh = [
                product(part[:, start:], part[:, start : start + panel].mT)
                for start in range(0, part.shape[1], panel)
            ]
            made = [a.add_(b) for a, b in zip(made, fresh, strict=True)] if made else fresh
    return made


def _clashes(rows_NTP: Tensor, panel: int) -> bool:
    """Whether products of several panels of these rows are faster with a copy (``_CLASH``)."""
    _, places, _ = rows_NTP.shape
    return rows_NTP.device.type == "cpu" and places > panel and rows_NTP.stride(1) % _CLASH == 0


def _cross_gram(a: Side, b: Side, rows: slice) -> Tensor:
    """<a_t, b_t'>, (N, Ta, Tb)."""
    if a is b and isinstance(a, WithGram):
        return a.gram_BTT[rows]
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.kept[rows, :, None] == b.kept[rows, None, :]).to(wide(a.dtype))
    if isinstance(a, OneHot):
        return _cross_gram(b, a, rows).mT
    if isinstance(b, OneHot):
        value_NTP = a.rows(rows)
        index_NTS = b.kept[rows, None, :].expand(-1, value_NTP.shape[1], -1)
        return value_NTP.gather(2, index_NTS).to(wide(value_NTP.dtype))
    return product(a.rows(rows), b.rows(rows).mT)


def _roundings(sides: list[Side]) -> int:
    """Bounds the roundings of a term of a sum of Gram matrices: inside its block, and as the
    blocks of all sides are added up.
    """
    most = [most_terms_at_once(side.dtype, side.device) for side in sides]
    inside = max(min(side.width, terms) for side, terms in zip(sides, most, strict=True))
    return inside + sum(-(-side.width // terms) for side, terms in zip(sides, most, strict=True))


def _terms(side: Side) -> int:
    return 1 if isinstance(side, OneHot) else _roundings([side])


def _lost(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny / UNIT[dtype]


def _square_lengths(side: Side) -> Tensor:
    """|row|^2 of every place of every record, float64 (B, T)."""
    if isinstance(side, OneHot):
        return torch.ones(side.kept.shape, dtype=torch.float64, device=side.device)
    if isinstance(side, WithGram):
        return side.gram_BTT.diagonal(dim1=1, dim2=2).double() + _lost(side.gram_BTT.dtype)
    parts = [
        torch.linalg.vector_norm(padded_rows(side.rows(rows)), dim=2, dtype=torch.float64).square()
        for rows in chunks(side.num_records, side.places * side.width, GRAM_NUMBERS, side.device)
    ]
    return torch.cat(parts) + _lost(torch.float32)


def _dtype(outer: OuterProducts) -> torch.dtype:
    return torch.promote_types(outer.left.dtype, outer.right.dtype)
