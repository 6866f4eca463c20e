"""Scattering transform in two dimensions (Bruna & Mallat 2013; Oyallon & Mallat 2015): wavelets,
modulus and average, to order 2.

    S0 = x * phi,   S1(j, l) = |x * psi_jl| * phi,   S2(j1, l1, j2, l2) = ||x * psi_j1l1| *
                    psi_j2l2| * phi   with j2 > j1,

each at every 2^J-th pixel. psi_jl are Morlet wavelets of J scales and L directions, phi a Gaussian
as wide as the largest of them. At every resolution |phi|^2 + 1/2 sum (|psi(w)|^2 + |psi(-w)|^2) <=
1 holds for the filters' Fourier transforms as they are used (Littlewood-Paley), so that no layer
expands distances. Images are padded by mirroring, which repeats a pixel at most four times;
subsampling an average by 2^J leaves about 4^-J of its energy. With J >= 2 this gives ||S(x) -
S(y)|| <= ||x - y||.

Legend: B images, N their channels, C channels, H height, W width, P paths, J scales, L directions,
R resolutions, S side of a padded image.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.errors import ConfigError
from dpvision.threads import is_traced

_CENTRE = 0.75 * math.pi  # frequency of the finest wavelet, radians per pixel
_WIDTH = 0.8  # of its Gaussian envelope, pixels


class Scattering(nn.Module):
    """The transform for one image size. Made by ``make_scattering``.

    Args:
        low_RS: Fourier transform of phi along one axis (a Gaussian is the same along both) at each
            resolution r: float32 (S / 2^r,).
        centred: whether averages are at the centre of each square of 2^J pixels, which mirroring
            preserves; otherwise at its first pixel.
        waves_LSS: Fourier transforms, which are real, of the wavelets of scale j used at resolution
            r, by (j, r): float32 (L, S / 2^r, S / 2^r).
    """

    def __init__(
        self,
        side_px: int,
        num_scales: int,
        num_directions: int,
        low_RS: tuple[Tensor, ...],
        centred: bool,
        waves_LSS: dict[tuple[int, int], Tensor],
    ) -> None:
        super().__init__()
        self.side_px, self.num_scales, self.num_directions = side_px, num_scales, num_directions
        self.low_RS, self.centred, self.waves_LSS = low_RS, centred, waves_LSS
        # 4^(r - j) psi_j with each value repeated for the real and imaginary part of a spectrum:
        # (L, S / 2^r, 2 S / 2^r).
        for (j, r), wave_LSS in waves_LSS.items():
            pairs_LST = (wave_LSS * 0.25 ** (j - r)).repeat_interleave(2, dim=-1)
            self.register_buffer(f"wave_{j}_{r}", pairs_LST)
        for resolution, low_S in enumerate(low_RS):
            self.register_buffer(f"average_{resolution}", self._average_matrix(resolution, low_S))
            self.register_buffer(f"fourier_{resolution}", _fourier_matrix(len(low_S)))

    def _average_matrix(self, resolution: int, low_S: Tensor) -> Tensor:
        """Return the matrix of the convolution with phi along one axis at every 2^J-th pixel:
        (H / 2^J, S / 2^r).
        """
        step, count = 1 << self.num_scales, len(low_S)
        place_H = (
            self.pad_px + step * torch.arange(self.side_px // step) + (step - 1) / 2 * self.centred
        )
        # phi between the pixels of a coarser grid, by its Fourier series, which is real and even.
        freq_S = torch.fft.fftfreq(count, 1 / count)
        offset_HS = place_H[:, None] / 2**resolution - torch.arange(count)
        return (2 * math.pi / count * offset_HS[..., None] * freq_S).cos() @ low_S / count

    def forward(self, x_BCHW: Tensor, *, log: bool = False) -> Tensor:
        """Return coefficients, float32 (B, C, P, H / 2^J, W / 2^J): order 0, order 1 by (j, l),
        order 2 by (j1, l1, j2, l2) with j2 > j1.

        Args:
            x_BCHW: float32 on the filters' device, ``side_px`` high and wide.
            log: whether to return log(S + 1e-3) for orders 1 and 2, for pixels in [0, 1]. The bound
                on distances then does not hold.
        """
        x_NHW = F.pad(x_BCHW, (self.pad_px,) * 4, mode="reflect").flatten(0, 1)
        freq_NST = self._spectrum(x_NHW, 0)
        first, second = [], []
        for j1 in range(self.num_scales):
            # |x * psi| is band-limited to every 2^j-th pixel, so the path continues on the
            # coarser grid.
            u_NLSS = self._modulus(freq_NST[:, None], j1, 0)
            first.append(self._average(u_NLSS, j1))
            if j1 + 1 < self.num_scales:
                freq_NLST = self._spectrum(u_NLSS, j1)[:, :, None]
                deeper = [
                    self._average(self._modulus(freq_NLST, j2, j1), j2)
                    for j2 in range(j1 + 1, self.num_scales)
                ]
                second.append(torch.stack(deeper, dim=2).flatten(1, 3))  # l1, then j2, then l2
        wave_NPHW = torch.cat([*first, *second], dim=1)
        if log:
            wave_NPHW = (wave_NPHW.clamp(min=0) + 1e-3).log()
        paths_NPHW = torch.cat([self._average(x_NHW[:, None], 0), wave_NPHW], dim=1)
        return paths_NPHW.unflatten(0, x_BCHW.shape[:2])

    @property
    def pad_px(self) -> int:
        """Padding on each side in pixels: the support of the widest filters."""
        return 2 << self.num_scales

    def _average(self, u: Tensor, resolution: int) -> Tensor:
        """Return the convolution with phi at every 2^J-th pixel of the image: (..., H / 2^J, W /
        2^J).
        """
        matrix_HS = self.get_buffer(f"average_{resolution}")
        return matrix_HS @ u @ matrix_HS.T

    def _spectrum(self, u_SS: Tensor, resolution: int) -> Tensor:
        """Return the Fourier transform of real (..., S, S) as pairs, float32 (..., S, 2 S): the
        real and the imaginary part of each value, because ONNX has few operations on complex
        numbers. A trace has it as matrix products: onnxruntime's own transform is thirty times
        less exact.
        """
        if is_traced():
            pairs_ST = torch.stack([u_SS, torch.zeros_like(u_SS)], dim=-1).flatten(-2)
            return _products(pairs_ST, self.get_buffer(f"fourier_{resolution}"))
        return torch.view_as_real(torch.fft.fft2(u_SS)).flatten(-2)

    def _modulus(self, freq_ST: Tensor, scale: int, resolution: int) -> Tensor:
        """Return |u * psi| at every 2^(j - r)-th pixel for all directions, float32.

        Args:
            freq_ST: transform of u at resolution r, as pairs.
            scale: j of psi.
        """
        wave_LST = self.get_buffer(f"wave_{scale}_{resolution}")
        freq_ST = _fold_product(freq_ST, wave_LST, 1 << (scale - resolution))
        side = int(freq_ST.shape[-2])
        if is_traced():
            # The inverse of the transform is its transpose, divided by the number of values.
            pairs_ST = _products(freq_ST, self.get_buffer(f"fourier_{scale}").T) / side**2
            real, imag = pairs_ST.unflatten(-1, (side, 2)).unbind(-1)
        else:
            freq = torch.view_as_complex(freq_ST.unflatten(-1, (side, 2)))
            real, imag = torch.view_as_real(torch.fft.ifft2(freq)).unbind(-1)
        return (real * real).addcmul_(imag, imag).sqrt_()


def make_scattering(
    side_px: int,
    num_scales: int = 2,
    num_directions: int = 8,
    *,
    centred: bool = False,
) -> Scattering:
    """Make filters for square images of ``side_px`` pixels.

    Args:
        side_px: a multiple of 2^num_scales, more than 2^(num_scales + 1) (mirroring needs that many
            pixels).
        num_scales: J, at least 1. Coefficients are nearly invariant to shifts well below 2^J
            pixels.

    Raises:
        ConfigError: the side does not fit the scales.
    """
    if not (num_scales >= 1 and side_px % (1 << num_scales) == 0 and side_px > 2 << num_scales):
        step = 1 << max(num_scales, 1)
        raise ConfigError(
            f"scattering: side_px={side_px} with {num_scales} scales; expected a multiple of "
            f"{step} above {2 * step}. Use fewer scales, or another image size."
        )
    padded = side_px + (4 << num_scales)
    low = [_gaussian(padded >> r, r, _WIDTH * 2 ** (num_scales - 1)) for r in range(num_scales)]
    angles = [math.pi * i / num_directions for i in range(num_directions)]
    waves = {
        (j, r): torch.stack([_morlet(padded >> r, r, j, angle, num_directions) for angle in angles])
        for r in range(num_scales)
        for j in range(r + 1 if r else 0, num_scales)
    }
    # The largest common factor of all wavelets that keeps the sum at most one at every resolution
    # and frequency.
    room = 1.0
    for r in {r for _, r in waves}:
        energy_SS = _energy(waves, r)
        seen = energy_SS > 1e-12
        room = min(room, float(((1 - low[r].outer(low[r]).square())[seen] / energy_SS[seen]).min()))
    return Scattering(
        side_px,
        num_scales,
        num_directions,
        tuple(low_S.float() for low_S in low),
        centred,
        {key: (math.sqrt(room) * wave_LSS).float() for key, wave_LSS in waves.items()},
    )


def _energy(waves_LSS: dict[tuple[int, int], Tensor], resolution: int) -> Tensor:
    """Return 1/2 sum (|psi(w)|^2 + |psi(-w)|^2) of real transforms (a real image has equal energy
    at w and -w); 0 without wavelets.
    """
    one_way = sum(
        wave_LSS.square().sum(dim=0) for (_, r), wave_LSS in waves_LSS.items() if r == resolution
    )
    if not isinstance(one_way, Tensor):
        return torch.zeros(())
    return (one_way + one_way.flip(0, 1).roll((1, 1), (0, 1))) / 2


def _frequencies(side: int, resolution: int) -> tuple[Tensor, Tensor]:
    """Return frequencies, radians per full-resolution pixel, of a grid of every 2^r-th pixel with
    aliases: float64 (3, 3, side, side).
    """
    base = 2 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64) / 2**resolution
    # The filters used at a resolution are below 1e-7 beyond the next repetition of its band.
    alias = 2 * math.pi / 2**resolution * torch.arange(-1, 2, dtype=torch.float64)
    line = alias[:, None] + base
    return line[:, None, :, None].expand(3, 3, side, side), line[None, :, None, :].expand(
        3, 3, side, side
    )


def _gaussian(side: int, resolution: int, width_px: float) -> Tensor:
    """Return the Fourier transform of a Gaussian of standard deviation ``width_px`` along one axis,
    1 at frequency 0: (side,).
    """
    row = _frequencies(side, resolution)[0][:, 0, :, 0]
    envelope_S = (-((row * width_px) ** 2) / 2).exp().sum(dim=0)
    return envelope_S / envelope_S[0]


def _morlet(side: int, resolution: int, scale: int, angle: float, num_directions: int) -> Tensor:
    """Return the Fourier transform of a Morlet wavelet: a Gaussian at frequency xi minus one at 0
    that makes its mean zero.
    """
    row, column = _frequencies(side, resolution)
    along, across = (
        math.cos(angle) * column + math.sin(angle) * row,
        -math.sin(angle) * column + math.cos(angle) * row,
    )
    width_px, slant = _WIDTH * 2**scale, 4 / num_directions
    centre = _CENTRE / 2**scale

    def envelope(shift: float) -> Tensor:
        return (
            (-(((along - shift) * width_px) ** 2 + (across * width_px / slant) ** 2) / 2)
            .exp()
            .sum(dim=(0, 1))
        )

    wave, plain = envelope(centre), envelope(0.0)
    return wave - wave[0, 0] / plain[0, 0] * plain


def _fourier_matrix(side: int) -> Tensor:
    """Return the Fourier transform along one axis as a real matrix on pairs: float32 (2 S, 2 S)."""
    place = torch.arange(side, dtype=torch.float64)
    angle_SS = 2 * math.pi / side * (place.outer(place) % side)
    cos, sin = angle_SS.cos(), angle_SS.sin()
    of_real, of_imag = torch.stack([cos, -sin], dim=-1), torch.stack([sin, cos], dim=-1)
    return torch.stack([of_real, of_imag], dim=1).reshape(2 * side, 2 * side).float()


def _products(pairs_ST: Tensor, matrix_TT: Tensor) -> Tensor:
    """Return the transform by a matrix on pairs along the last axis, then along the other."""
    for _ in range(2):
        pairs_ST = (pairs_ST @ matrix_TT).unflatten(-1, (-1, 2)).transpose(-3, -2).flatten(-2)
    return pairs_ST


def _fold_product(freq_ST: Tensor, pairs_LST: Tensor, factor: int) -> Tensor:
    """Return the Fourier transform of a convolution at every ``factor``-th pixel: the sum of the
    aliasing parts of the product. Both are pairs of real and imaginary part.

    Computed part by part, because the whole product would be ``factor`` squared times as large as
    the result (measured: twelve times as slow). A real wavelet times a complex spectrum is two real
    products, a third of the time of a complex one.
    """
    side = int(freq_ST.shape[-2]) // factor
    total: Tensor | None = None
    for top in range(0, factor * side, side):
        for left in range(0, 2 * factor * side, 2 * side):
            piece, wave = (
                value[..., top : top + side, left : left + 2 * side]
                for value in (freq_ST, pairs_LST)
            )
            total = piece * wave if total is None else total.addcmul_(piece, wave)
    assert total is not None
    return total
