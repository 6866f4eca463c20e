"""Norms and weighted sums of outer products against gradients written out, for random shapes, kinds
of sides and numbers of uses.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpvision.dp import gram, outer_products
from dpvision.dp.gram import (
    _by_place,
    added,
    square_norms,
    square_norms_of_shared,
    sums_of_shared,
)
from dpvision.dp.outer_products import (
    Dense,
    OneHot,
    OuterProducts,
    Patches,
    WithGram,
    aligned_rows,
    product,
    scaled,
)
from dpvision.dp.rounding import gamma

KINDS = ("dense", "one_hot", "with_gram", "patches")


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_side(kind: str, generator, num: int, places: int, width: int):
    """(a side, the same as a plain tensor (B, T, width))."""
    if kind == "one_hot":
        index = torch.randint(0, width, (num, places), generator=generator)
        return OneHot(index, width, torch.float64), F.one_hot(index, width).double()
    value = draw(generator, num, places, width)
    if kind == "with_gram":
        return WithGram(value, value @ value.mT), value
    return Dense(value), value


def make_use(generator, kinds, num, places, rows, columns):
    left, left_value = make_side(kinds[0], generator, num, places, rows)
    right, right_value = make_side(kinds[1], generator, num, places, columns)
    return OuterProducts(left, right, torch.Size([rows, columns])), torch.einsum(
        "btp,btq->bpq", left_value, right_value
    )


uses = st.lists(
    st.tuples(
        st.sampled_from(KINDS[:3]), st.sampled_from(("dense", "one_hot")), st.integers(1, 120)
    ),
    min_size=1,
    max_size=3,
)
fast = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fast
@given(
    uses,
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 2**31),
    st.sampled_from([1, 40, 2**20]),
)
def test_square_norms_are_those_of_the_gradients_written_out(uses, num, rows, columns, seed, room):
    """Uses of several lengths and kinds together, whatever the chunks; panels of symmetric Gram
    matrices included (120 places).
    """
    generator = torch.Generator().manual_seed(seed)
    made = [make_use(generator, kinds[:2], num, kinds[2], rows, columns) for kinds in uses]
    written = sum(grad for _, grad in made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram, "GRAM_NUMBERS", {"cpu": room, "cuda": room})
        squares_B = square_norms([use for use, _ in made]).value_B
    size_B = sum(grad.flatten(1).norm(dim=1) for _, grad in made) + 1
    scale_B = size_B.square() + sum(use.left.places for use, _ in made) ** 2 * (rows + columns)
    assert squares_B.dtype == torch.float64
    assert ((squares_B - written.square().sum((1, 2))).abs() <= 1e-12 * scale_B).all()


@fast
@given(
    uses,
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 2**31),
    st.sampled_from([1, 40, 2**20]),
    st.booleans(),
)
def test_weighted_sum_is_that_of_the_gradients_written_out(
    uses, num, rows, columns, seed, room, split
):
    """Records left out may hold anything; one block of records or several."""
    generator = torch.Generator().manual_seed(seed)
    factor_B, keep_B = draw(generator, num), torch.rand(num, generator=generator) > 0.3
    cut = int(torch.randint(0, num + 1, (), generator=generator)) if split else 0
    blocks = [part for part in (slice(0, cut), slice(cut, num)) if part.stop > part.start]
    for kinds in uses:
        use, grad_BPQ = make_use(generator, kinds[:2], num, kinds[2], rows, columns)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outer_products, "OUTER_NUMBERS", {"cpu": room, "cuda": room})
            everything = use.weighted_sum(factor_B, None, blocks)
            if isinstance(use.right, Dense):
                use.right.kept[~keep_B] = torch.nan
            kept = use.weighted_sum(torch.where(keep_B, factor_B, 0.0), keep_B, blocks)
        tolerance = {"rtol": 0, "atol": 1e-12 * (1 + num * kinds[2])}
        torch.testing.assert_close(
            everything, torch.einsum("b,bpq->pq", factor_B, grad_BPQ), **tolerance
        )
        torch.testing.assert_close(
            kept, torch.einsum("b,bpq->pq", factor_B[keep_B], grad_BPQ[keep_B]), **tolerance
        )


@fast
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_patches_are_the_input_of_the_convolution(
    channels, per_record, kernel, stride, padding, dilation, unfolded, seed
):
    """Against autograd of F.conv2d, one record at a time: the gradient written out, its norm, and
    the weighted sum of all in blocks and of all but one; ``unfolded`` as on a GPU.
    """
    generator = torch.Generator().manual_seed(seed)
    num, filters = 3, 4
    images = draw(generator, num * per_record, channels, 7, 6)
    x = images.clone()
    weight = draw(generator, filters, channels, *kernel).requires_grad_()
    y = F.conv2d(images, weight, None, stride, padding, dilation)
    g = draw(generator, *y.shape)
    chosen = g * y
    expected = torch.stack(
        [
            torch.autograd.grad(part.sum(), weight, retain_graph=True)[0]
            for part in chosen.unflatten(0, (num, per_record)).unbind(0)
        ]
    )
    left = Dense(g.flatten(2).mT.reshape(num, -1, filters))
    use = OuterProducts(
        left, Patches(x, per_record, kernel, stride, padding, dilation), weight.shape
    )
    assert use.right.places == left.places and use.right.width == weight[0].numel()
    size = expected.norm() + g.norm() * x.norm()
    factor_B, keep_B = draw(generator, num), torch.tensor([True, False, True])
    with pytest.MonkeyPatch.context() as patch:
        if unfolded:
            patch.setattr(outer_products, "one_by_one_pays", lambda device: False)
        assert (use.write_out(slice(0, num)) - expected).norm() <= 1e-12 * size
        assert (
            square_norms([use]).value_B - expected.flatten(1).square().sum(1)
        ).norm() <= 1e-12 * size**2
        for blocks in ([slice(0, num)], [slice(0, 1), slice(1, num)]):
            everything = use.weighted_sum(factor_B, None, blocks)
            assert (
                everything - torch.einsum("b,b...->...", factor_B, expected)
            ).norm() <= 1e-11 * size
            x[per_record] = math.nan  # of the record that is left out
            kept = use.weighted_sum(torch.where(keep_B, factor_B, 0.0), keep_B, blocks)
            own = torch.einsum("b,b...->...", factor_B[keep_B], expected[keep_B])
            assert (kept - own).norm() <= 1e-11 * size
            x.copy_(images)


@pytest.mark.parametrize("places", [1, 47, 95, 96, 97, 120, 143, 144, 145, 197])
def test_panels_cover_every_pair_of_places_once(places):
    generator = torch.Generator().manual_seed(places)
    right = draw(generator, 2, places, 5)
    lefts = [draw(generator, 2, places, width) for width in (3, 7)]
    expected = sum((left.mT @ right).square().sum((1, 2)) for left in lefts)
    torch.testing.assert_close(
        square_norms_of_shared([Dense(left) for left in lefts], Dense(right)).value_B,
        expected,
        rtol=1e-12,
        atol=0,
    )
    for left in lefts:
        use = OuterProducts(Dense(left), Dense(right), torch.Size([left.shape[2], 5]))
        torch.testing.assert_close(
            square_norms([use]).value_B, (left.mT @ right).square().sum((1, 2)), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_operands_are_accumulated_in_float32(dtype):
    """2000 products whose sum half precision would round to a multiple of 2 or more."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        (1 + torch.rand(3, 4, 2000, generator=generator)).to(dtype),
        torch.rand(3, 2000, 5, generator=generator).to(dtype),
    )
    made = product(a, b)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), a.double() @ b.double(), rtol=1e-5, atol=0)
    assert scaled(a, torch.tensor([0.1, 0.2, 0.3])).dtype == torch.float32


@pytest.mark.parametrize("places", [1, 16, 97, 197])
@pytest.mark.parametrize("common", [0.0, 1e2, 1e4, 1e6])
def test_the_error_of_a_float32_gram_is_within_its_bound(places, common):
    """The bound is proven; that it is not absurd either: without cancellation it is below 1e-3 of
    the squared norm.
    """
    generator = torch.Generator().manual_seed(places)
    right = (draw(generator, 4, places, 80) + common * draw(generator, 4, 1, 80)).float()
    left = draw(generator, 4, places, 60)
    left = (left - left.mean(1, keepdim=True) * (places > 1)).float()
    found = square_norms([OuterProducts(Dense(left), Dense(right), torch.Size([60, 80]))])
    true_B = (left.double().mT @ right.double()).square().sum((1, 2))
    lengths_B = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)
    torch.testing.assert_close(found.length_B, lengths_B.square(), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.work_B, ((places + 1) * lengths_B).square(), rtol=1e-4, atol=0)
    assert ((found.value_B - true_B).abs() <= found.error_B).all()
    assert common or (found.error_B <= 1e-3 * found.value_B).all()


@pytest.mark.parametrize("places", [1, 47, 97])
@pytest.mark.parametrize("widths", [(20, 30, 40), (20, 512, 1536)], ids=["as_they_are", "copied"])
def test_panels_of_gram_matrices_give_the_sums_of_whole_ones(places, widths):
    """A GPU takes whole matrices, a CPU panels of columns from the diagonal on, of a copy where
    rows begin a multiple of 512 numbers apart.
    """
    generator = torch.Generator().manual_seed(places)
    *lefts, right = (draw(generator, 3, places, width) for width in widths)
    for panel in (16, 48):
        parts, whole = _by_place(lefts, right, panel), _by_place(lefts, right, 512)
        for i, power in enumerate((1, 2, 2, 1, 1)):
            ours, theirs = (made[i].pow(power).sum(1) for made in (parts, whole))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    value_NT, _, norm_r_NT, square_l_NT, _ = _by_place(lefts, right, 512)
    gram_l = sum(left @ left.mT for left in lefts)
    torch.testing.assert_close(value_NT, (gram_l * (right @ right.mT)).sum(2))
    torch.testing.assert_close(norm_r_NT, (right @ right.mT).norm(dim=2))
    torch.testing.assert_close(square_l_NT, gram_l.diagonal(dim1=1, dim2=2))


def test_the_bound_counts_every_block_of_every_weight_with_the_same_input():
    """Three weights of 3,000 numbers a place are nine blocks of at most 1,024, added one after
    the other: a term of the first is rounded inside its block and eight times more.
    """
    generator = torch.Generator().manual_seed(0)
    lefts = [Dense(draw(generator, 1, 2, 3000).float()) for _ in range(3)]
    (sums,) = sums_of_shared(lefts, Dense(draw(generator, 1, 2, 40).float()))
    assert sums.off_l >= gamma(1024 + 8)
    assert gamma(40) <= sums.off_r <= gamma(42)


@pytest.mark.parametrize("width", [96, 512, 2048])
def test_norms_have_the_same_bits_wherever_a_record_is(width):
    """Rows that are copied are multiplied a few records at a time: 7, 8 and 8 of 23."""
    generator = torch.Generator().manual_seed(width)
    sides = [draw(generator, 23, 97, n).float() for n in (64, width)]
    shape = torch.Size([64, width])
    here, moved = (
        square_norms([OuterProducts(*(Dense(side.roll(by, 0)) for side in sides), shape)])
        for by in (0, 9)
    )
    for name in ("value_B", "error_B", "length_B", "work_B"):
        assert torch.equal(getattr(moved, name), getattr(here, name).roll(9, 0))
    true_B = (sides[0].double().mT @ sides[1].double()).square().sum((1, 2))
    assert ((here.value_B - true_B).abs() <= here.error_B).all()


@pytest.mark.parametrize("num", [1, 2, 7, 70])
def test_sums_over_weights_have_the_same_bits_wherever_a_record_is(num):
    """The sum that ``added`` replaces has other bits for some columns (24 and 30 of them)."""
    generator = torch.Generator().manual_seed(num)
    for columns in (24, 30, 40):
        value_GN = draw(generator, num, columns) * 10.0 ** draw(generator, num, 1)
        order = torch.randperm(columns, generator=generator)
        made = added(value_GN)
        assert torch.equal(added(value_GN[:, order].contiguous()), made[order])
        torch.testing.assert_close(made, value_GN.sum(0))


def test_rows_of_products_on_a_gpu_are_aligned():
    room = aligned_rows(3, 5, 197, torch.device("cpu"))
    assert room.shape == (3, 5, 197) and room.stride() == (1000, 200, 1)
    torch.bmm(torch.ones(3, 5, 2), torch.ones(3, 2, 197), out=room)
    assert (room == 2).all()


@pytest.mark.parametrize("scale", [1e-25, 1e-15, 1e-8, 1.0])
def test_the_bound_covers_underflow(scale):
    """Tiny output gradients times huge inputs: products of ordinary size, whose Gram matrices
    underflow or nearly so.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (
        (draw(generator, 3, 12, 60) * scale).float(),
        (draw(generator, 3, 12, 80) * min(1 / scale, 1e17)).float(),
    )
    found = square_norms([OuterProducts(Dense(left), Dense(right), torch.Size([60, 80]))])
    true_B = (left.double().mT @ right.double()).square().sum((1, 2))
    assert ((found.value_B - true_B).abs() <= found.error_B).all()


def test_pieces_of_blocks_count_among_what_is_added_in_float32(monkeypatch):
    """600 pieces of two blocks, added in float32, moved a sum by 0.9976 C: 0.0004 are reserved."""
    use = OuterProducts(
        Dense(torch.ones(40, 1, 8)), Dense(torch.ones(40, 1, 8)), torch.Size([8, 8])
    )
    blocks, factor_B = [slice(0, 20), slice(20, 40)], torch.ones(40)
    assert use.weighted_sum(factor_B, None, blocks).dtype == torch.float32
    monkeypatch.setitem(outer_products.OUTER_NUMBERS, "cpu", 8)
    total = use.weighted_sum(factor_B, None, blocks)
    assert total.dtype == torch.float64 and (total == 40).all()
