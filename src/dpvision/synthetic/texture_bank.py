"""The bank of periodic fields and closed contours for procedural textures.

Computed once from fixed seeds with NumPy.

Legend: M fields, S side of a field, Q contours, A angles of a contour.
"""

import functools
from collections.abc import Callable

import numpy as np

FIELD_SIDE = 128
NUM_FIELDS = 192
NUM_CONTOURS = 256
NUM_ANGLES = 128
_SEED = 20_261_121


@functools.cache
def fields_MSS() -> np.ndarray:
    """Return the fields, float32 (NUM_FIELDS, FIELD_SIDE, FIELD_SIDE), each periodic, of mean 0 and
    variance 1, clipped to +-3.

    Seventeen kinds in turn: random fields of several spectra, oriented ones, ridges, cells,
    mosaics, spots and labyrinths, stripes, marble, contour lines, bricks, pebbles. Their parameters
    are drawn from a fixed seed.
    """
    rng = np.random.Generator(np.random.PCG64(_SEED))
    made = [_KINDS[m % len(_KINDS)](rng) for m in range(NUM_FIELDS)]
    field = np.stack([(f - f.mean()) / max(f.std(), 1e-9) for f in made])
    return field.clip(-3, 3).astype(np.float32)


@functools.cache
def contours_QA() -> np.ndarray:
    """Return the contours, float32 (NUM_CONTOURS, NUM_ANGLES): radius of a closed contour at equal
    angles from -pi, at most 1.

    A quarter each: smooth blobs, polygons (rounded and not), superellipses, and rugged outlines
    with power-law detail.
    """
    rng = np.random.Generator(np.random.PCG64(_SEED + 1))
    angle = np.linspace(-np.pi, np.pi, NUM_ANGLES, endpoint=False)
    made = [_CONTOURS[q % len(_CONTOURS)](angle, rng) for q in range(NUM_CONTOURS)]
    return np.stack([c / c.max() for c in made]).astype(np.float32)


def random_field(
    rng: np.random.Generator,
    slope: float,
    *,
    low: float = 1.0,
    stretch: float = 1.0,
    angle: float = 0.0,
) -> np.ndarray:
    """Return a periodic Gaussian field (S, S) whose amplitude falls as frequency^-slope above
    ``low`` cycles.

    Args:
        stretch: 1 for isotropic; larger values stretch the pattern along ``angle`` (radians).
    """
    row, column = _frequencies()
    along = np.cos(angle) * column + np.sin(angle) * row
    across = -np.sin(angle) * column + np.cos(angle) * row
    radius = np.hypot(along * stretch, across / stretch)
    amplitude = np.maximum(radius, low) ** -slope
    amplitude[0, 0] = 0
    noise = np.fft.fft2(rng.standard_normal((FIELD_SIDE, FIELD_SIDE)))
    return _unit(np.fft.ifft2(noise * amplitude).real)


def _band_field(
    rng: np.random.Generator,
    centre: float,
    width: float,
    *,
    spread: float = np.pi,
    angle: float = 0.0,
) -> np.ndarray:
    """Return a periodic Gaussian field of frequencies near ``centre`` cycles; ``spread`` < pi keeps
    only directions near ``angle``.
    """
    row, column = _frequencies()
    radius = np.hypot(row, column)
    turn = np.angle(np.exp(2j * (np.arctan2(row, column) - angle))) / 2
    amplitude = np.exp(-(((radius - centre) / width) ** 2) / 2) * np.exp(
        -((turn / spread) ** 2) / 2
    )
    amplitude[0, 0] = 0
    noise = np.fft.fft2(rng.standard_normal((FIELD_SIDE, FIELD_SIDE)))
    return _unit(np.fft.ifft2(noise * amplitude).real)


def _cells(rng: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distances to the nearest and second nearest of ``num`` random points on the torus, and
    the nearest point's index.
    """
    points = rng.random((num, 2)) * FIELD_SIDE
    away_N2S = np.abs(np.arange(FIELD_SIDE) - points[..., None])
    y_NS, x_NS = np.square(np.minimum(away_N2S, FIELD_SIDE - away_N2S)).swapaxes(0, 1)
    # Squared distances.
    nearest = np.full((FIELD_SIDE, FIELD_SIDE), np.inf)
    second, who = nearest.copy(), np.zeros((FIELD_SIDE, FIELD_SIDE), dtype=np.int64)
    for i in range(num):
        distance = y_NS[i, :, None] + x_NS[i]
        np.minimum(second, np.maximum(nearest, distance), out=second)
        who[distance < nearest] = i
        np.minimum(nearest, distance, out=nearest)
    return np.sqrt(nearest), np.sqrt(second), who


def _warped(field: np.ndarray, rng: np.random.Generator, strength: float) -> np.ndarray:
    """Return the field sampled at positions displaced by a smooth random field, ``strength`` pixels
    on average.
    """
    grid = np.arange(FIELD_SIDE)
    move = [random_field(rng, 2.5) * strength for _ in range(2)]
    row, column = (
        (grid[:, None] + move[0]).round().astype(int),
        (grid[None] + move[1]).round().astype(int),
    )
    return field[row % FIELD_SIDE, column % FIELD_SIDE]


def _phase(rng: np.random.Generator, most: int) -> np.ndarray:
    """Return the phase 2 pi (p x + q y) of a periodic plane wave with at most ``most`` periods per
    side.
    """
    p, q = 0, 0
    while p == q == 0:
        p, q = rng.integers(-most, most + 1, 2)
    grid = np.arange(FIELD_SIDE) / FIELD_SIDE
    return 2 * np.pi * (p * grid[None] + q * grid[:, None])


def _plain(rng: np.random.Generator) -> np.ndarray:
    return random_field(rng, rng.uniform(1.0, 2.2))


def _rough(rng: np.random.Generator) -> np.ndarray:
    return random_field(rng, rng.uniform(0.3, 1.0))


def _oriented(rng: np.random.Generator) -> np.ndarray:
    return random_field(
        rng, rng.uniform(0.8, 1.8), stretch=rng.uniform(1.5, 4), angle=rng.uniform(0, np.pi)
    )


def _ridged(rng: np.random.Generator) -> np.ndarray:
    return -np.abs(random_field(rng, rng.uniform(1.2, 2.0)))


def _billows(rng: np.random.Generator) -> np.ndarray:
    return np.abs(random_field(rng, rng.uniform(1.5, 2.2), low=3))


def _grain(rng: np.random.Generator) -> np.ndarray:
    return _band_field(
        rng, rng.uniform(6, 20), 2, spread=rng.uniform(0.15, 0.5), angle=rng.uniform(0, np.pi)
    )


def _spots(rng: np.random.Generator) -> np.ndarray:
    return np.tanh(
        rng.uniform(2, 6) * (_band_field(rng, rng.uniform(4, 14), 1) - rng.uniform(0, 1))
    )


def _labyrinth(rng: np.random.Generator) -> np.ndarray:
    return np.tanh(rng.uniform(2, 6) * _band_field(rng, rng.uniform(4, 14), 1))


def _worley(rng: np.random.Generator) -> np.ndarray:
    return _cells(rng, int(rng.integers(12, 90)))[0]


def _cracks(rng: np.random.Generator) -> np.ndarray:
    near, second, _ = _cells(rng, int(rng.integers(12, 70)))
    return np.minimum(second - near, rng.uniform(1.5, 6))


def _mosaic(rng: np.random.Generator) -> np.ndarray:
    num = int(rng.integers(10, 80))
    return rng.standard_normal(num)[_cells(rng, num)[2]]


def _stripes(rng: np.random.Generator) -> np.ndarray:
    wave = np.sin(_phase(rng, 8) + rng.uniform(0, 2) * random_field(rng, 2.5))
    return np.tanh(rng.uniform(0.5, 5) * (wave - rng.uniform(-0.5, 0.5)))


def _marble(rng: np.random.Generator) -> np.ndarray:
    return np.sin(_phase(rng, 4) + rng.uniform(2, 6) * random_field(rng, rng.uniform(1.8, 2.6)))


def _contour_lines(rng: np.random.Generator) -> np.ndarray:
    return np.sin(rng.uniform(3, 9) * random_field(rng, rng.uniform(2.2, 3.0)))


def _bricks(rng: np.random.Generator) -> np.ndarray:
    rows = 2 * int(rng.integers(2, 6))
    columns = int(rng.integers(2, 7))
    grid = np.arange(FIELD_SIDE) / FIELD_SIDE
    v = grid * rows
    u = grid[None] * columns + 0.5 * rng.integers(0, 2) * (v.astype(int) % 2)[:, None]
    joint = np.minimum(
        np.abs((u + 0.5) % 1 - 0.5) / columns, (np.abs((v + 0.5) % 1 - 0.5) / rows)[:, None]
    )
    shade = rng.standard_normal((rows, columns))[v.astype(int)[:, None], u.astype(int) % columns]
    return np.where(
        joint < rng.uniform(0.008, 0.025), rng.uniform(-3, 3), rng.uniform(0, 0.8) * shade
    )


def _pebbles(rng: np.random.Generator) -> np.ndarray:
    """Return overlapping discs of power-law radii, each with a constant value."""
    grid = np.arange(FIELD_SIDE)
    field = np.zeros((FIELD_SIDE, FIELD_SIDE))
    for _ in range(250):
        radius = 3 * (1 - rng.random()) ** -0.5
        y, x = rng.random(2) * FIELD_SIDE
        dy, dx = np.abs(grid - y), np.abs(grid - x)
        near = (
            np.minimum(dy, FIELD_SIDE - dy)[:, None] ** 2
            + np.minimum(dx, FIELD_SIDE - dx)[None] ** 2
            < min(radius, 40) ** 2
        )
        field[near] = rng.standard_normal()
    return field


def _crumpled(rng: np.random.Generator) -> np.ndarray:
    return _warped(_KINDS[int(rng.integers(0, 16))](rng), rng, rng.uniform(2, 8))


_KINDS: tuple[Callable[[np.random.Generator], np.ndarray], ...] = (
    _plain,
    _oriented,
    _mosaic,
    _cracks,
    _stripes,
    _rough,
    _ridged,
    _spots,
    _worley,
    _marble,
    _labyrinth,
    _contour_lines,
    _bricks,
    _billows,
    _grain,
    _pebbles,
    _crumpled,
)


def _blob(angle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    order = np.arange(1, 7)
    size = rng.standard_normal(6) * 0.35 / order
    return np.exp(
        (size * np.cos(order * angle[:, None] + rng.uniform(0, 2 * np.pi, 6))).sum(axis=1)
    )


def _polygon(angle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a star-shaped polygon with random corners around the centre: triangle to octagon, with
    unequal sides.
    """
    corners = int(rng.integers(3, 9))
    turn = np.sort(
        np.arange(corners) + rng.uniform(-0.3, 0.3, corners)
    ) * 2 * np.pi / corners + rng.uniform(0, 2 * np.pi)
    reach = rng.uniform(0.7, 1.0, corners)
    out = np.empty_like(angle)
    for i, a in enumerate(angle):
        after = int(np.argmin((turn - a) % (2 * np.pi)))
        first, second = after - 1, after
        d1, d2 = (a - turn[first]) % (2 * np.pi), (turn[second] - a) % (2 * np.pi)
        out[i] = (
            reach[first]
            * reach[second]
            * np.sin(d1 + d2)
            / (reach[first] * np.sin(d1) + reach[second] * np.sin(d2))
        )
    return np.maximum(out, 0.05)


def _superellipse(angle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    power = np.exp(rng.uniform(np.log(0.8), np.log(8)))
    return (np.abs(np.cos(angle)) ** power + np.abs(np.sin(angle)) ** power) ** (-1 / power)


def _rugged(angle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    order = np.arange(1, 25)
    size = rng.standard_normal(24) * rng.uniform(0.2, 0.6) * order ** -rng.uniform(0.9, 1.4)
    return np.exp(
        (size * np.cos(order * angle[:, None] + rng.uniform(0, 2 * np.pi, 24))).sum(axis=1)
    )


_CONTOURS = (_blob, _polygon, _superellipse, _rugged)


@functools.cache
def _frequencies() -> tuple[np.ndarray, np.ndarray]:
    cycles = np.fft.fftfreq(FIELD_SIDE, 1 / FIELD_SIDE)
    return cycles[:, None], cycles[None]


def _unit(field: np.ndarray) -> np.ndarray:
    return field / field.std()
