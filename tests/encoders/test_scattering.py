import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dpvision.encoders.scattering import Scattering, _energy, make_scattering
from dpvision.errors import ConfigError


def _images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def _smooth(num: int, side: int) -> Tensor:
    """Images that fade to grey at the border, so that a shift moves nothing in or out."""
    x = F.avg_pool2d(
        torch.randn(num, 1, side, side, generator=torch.Generator().manual_seed(1)), 3, 1, 1
    )
    line = torch.hann_window(side, periodic=False).clamp(min=0)
    return x * line * line[:, None]


def _slow(bank: Scattering, x_HW: Tensor, *, coarser: bool) -> Tensor:
    """The definition, path by path in float64: (P, H / 2^J, W / 2^J).

    Args:
        coarser: go on with every 2^j-th pixel after a wavelet of scale j, as the fast way does;
            otherwise with all of them to the end.
    """
    pad, step = bank.pad_px, 1 << bank.num_scales

    def through(u: Tensor, filter_SS: Tensor) -> Tensor:
        return torch.fft.ifft2(torch.fft.fft2(u) * filter_SS.double())

    def average(u: Tensor, r: int) -> Tensor:
        inside = slice(pad >> r, (pad + bank.side_px) >> r, step >> r)
        return through(u, bank.low_RS[r].outer(bank.low_RS[r])).real[inside, inside]

    def wavelet(u: Tensor, j: int, direction: int, r: int) -> tuple[Tensor, int]:
        u = through(u, bank.waves_LSS[j, r][direction].real).abs()
        return (u[:: 1 << (j - r), :: 1 << (j - r)], j) if coarser else (u, r)

    x = F.pad(x_HW[None, None].double(), (pad,) * 4, mode="reflect")[0, 0]
    pairs = [
        (j, direction) for j in range(bank.num_scales) for direction in range(bank.num_directions)
    ]
    first, second = [], []
    for j1, l1 in pairs:
        u1, r1 = wavelet(x, j1, l1, 0)
        first.append(average(u1, r1))
        second += [average(*wavelet(u1, j2, l2, r1)) for j2, l2 in pairs if j2 > j1]
    return torch.stack([average(x, 0), *first, *second])


@pytest.mark.parametrize(("side", "scales", "directions"), [(32, 2, 8), (32, 3, 6), (24, 1, 4)])
def test_paths_are_those_of_the_definition_in_the_stated_order(
    side: int, scales: int, directions: int
) -> None:
    bank, x = make_scattering(side, scales, directions), _images(1, 2, side, side)
    torch.testing.assert_close(
        bank(x)[0, 1].double(), _slow(bank, x[0, 1], coarser=True), atol=1e-6, rtol=1e-4
    )


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("side", "scales", "directions"), [(32, 2, 8), (32, 3, 6), (24, 1, 4)])
def test_a_trace_computes_the_definition_without_complex_numbers(
    side: int, scales: int, directions: int
) -> None:
    """Formats of other programs take it: their Fourier transforms are missing, or less exact."""
    bank, x = make_scattering(side, scales, directions), _images(1, 2, side, side)
    traced = torch.jit.trace(bank, x, check_trace=False)
    assert "fft" not in str(traced.inlined_graph)
    torch.testing.assert_close(
        traced(x)[0, 1].double(), _slow(bank, x[0, 1], coarser=True), atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize(("scales", "directions"), [(2, 8), (3, 6)])
def test_leaving_out_pixels_on_the_way_changes_little(scales: int, directions: int) -> None:
    bank, x = make_scattering(32, scales, directions), _images(1, 1, 32, 32)
    whole = _slow(bank, x[0, 0], coarser=False)[1:]
    assert (bank(x)[0, 0, 1:] - whole).norm() < 0.02 * whole.norm()


@pytest.mark.parametrize(("scales", "directions"), [(1, 8), (2, 4), (2, 8), (3, 6)])
def test_shape_and_number_of_paths(scales: int, directions: int) -> None:
    paths = 1 + scales * directions + directions**2 * scales * (scales - 1) // 2
    grid = 32 >> scales
    assert make_scattering(32, scales, directions)(_images(2, 3, 32, 32)).shape == (
        2,
        3,
        paths,
        grid,
        grid,
    )


def test_thirty_two_pixels_give_eighty_one_paths_of_eight_by_eight() -> None:
    assert make_scattering(32)(_images(1, 3, 32, 32)).shape == (1, 3, 81, 8, 8)


@pytest.mark.parametrize(("scales", "directions"), [(1, 8), (2, 4), (2, 8), (3, 6), (4, 8)])
def test_littlewood_paley_sum_is_at_most_one_and_loses_little(scales: int, directions: int) -> None:
    bank = make_scattering(64, scales, directions)
    sums = [
        low_S.outer(low_S).square() + _energy(bank.waves_LSS, r)
        for r, low_S in enumerate(bank.low_RS)
    ]
    assert len(sums) == scales
    assert max(float(s.max()) for s in sums) <= 1 + 1e-5
    side = len(sums[0])
    square = torch.fft.fftfreq(side)[:, None].square() + torch.fft.fftfreq(side).square()
    assert (
        sums[0][square <= 0.375**2].min() > 0.5
    )  # up to the finest wavelet's own frequency, 3/4 of the finest that pixels hold


@pytest.mark.parametrize(("scales", "directions"), [(2, 8), (3, 4)])
def test_distances_do_not_grow(scales: int, directions: int) -> None:
    bank = make_scattering(32, scales, directions)
    x = _images(1, 1, 32, 32)
    far = [_images(1, 1, 32, 32, seed=1), torch.zeros(1, 1, 32, 32), x.flip(2), x.roll(1, 3)]
    spots = [
        x + 0.1 * F.one_hot(torch.tensor([at]), 1024).reshape(1, 1, 32, 32)
        for at in (0, 1, 33, 66, 1023, 500)
    ]
    for y in [*far, *spots]:
        assert (bank(x) - bank(y)).norm() <= (x - y).norm()


@pytest.mark.parametrize(("scales", "directions"), [(2, 8), (3, 4)])
def test_distances_do_not_grow_in_the_worst_direction_that_ascent_finds(
    scales: int, directions: int
) -> None:
    bank, x = make_scattering(32, scales, directions), _images(1, 1, 32, 32)
    y = (x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).requires_grad_(
        True
    )
    ratios = []
    for _ in range(60):
        ratio = (bank(x) - bank(y)).norm() / (x - y).norm()
        ratios.append(float(ratio.detach()))
        with torch.no_grad():
            y += 0.2 * F.normalize(torch.autograd.grad(ratio, y)[0].flatten(), dim=0).view_as(y)
    assert ratios[0] < 0.8 * max(ratios)  # it found something
    assert max(ratios) <= 1


def test_a_shift_of_a_pixel_moves_coefficients_far_less_than_pixels_and_less_with_more_scales() -> (
    None
):
    x = _smooth(8, 64)
    moved = {}
    for scales in (1, 2, 3, 4):
        bank = make_scattering(64, scales, 4)
        here, there = bank(x)[:, :, 1:], bank(x.roll(1, 3))[:, :, 1:]
        moved[scales] = float((here - there).norm() / here.norm())
    pixels = float((x - x.roll(1, 3)).norm() / x.norm())
    assert pixels > moved[1] > moved[2] > moved[3] > moved[4]
    assert moved[3] < 0.25 * pixels


@pytest.mark.parametrize("scale", [0, 1])
@pytest.mark.parametrize("direction", [0, 1, 4, 7])
def test_a_grating_answers_at_its_own_scale_and_direction(scale: int, direction: int) -> None:
    angle, frequency = math.pi * direction / 8, 0.75 * math.pi / 2**scale
    row, column = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    grating = (frequency * (math.cos(angle) * column + math.sin(angle) * row)).cos()
    first_order = make_scattering(32)(grating.expand(1, 1, 32, 32))[0, 0, 1:17, 4, 4]
    assert first_order.argmax() == 8 * scale + direction


def test_an_even_image_has_its_value_in_order_zero_and_nothing_else() -> None:
    coefficients = make_scattering(32)(torch.full((1, 1, 32, 32), 0.7))[0, 0]
    torch.testing.assert_close(coefficients[0], torch.full((8, 8), 0.7), atol=1e-5, rtol=0)
    assert coefficients[1:].abs().max() < 1e-5


def test_log_is_taken_of_orders_one_and_two() -> None:
    bank, x = make_scattering(32), _images(1, 1, 32, 32)
    plain, logarithm = bank(x), bank(x, log=True)
    torch.testing.assert_close(logarithm[:, :, 0], plain[:, :, 0])
    torch.testing.assert_close(
        logarithm[:, :, 1:].exp(), plain[:, :, 1:] + 1e-3, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(("side", "scales"), [(30, 2), (8, 2), (32, 0), (16, 3)])
def test_sizes_that_do_not_fit_are_refused(side: int, scales: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"side_px={side} with {scales} scales; "
        rf"expected a multiple of \d+ above \d+\. Use fewer",
    ):
        make_scattering(side, scales)
