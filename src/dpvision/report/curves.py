"""Plots of several runs: smoothed losses over the raw values, and scores against model size.

Like figures 3, 4 and 7 (training loss) and 5 (score against number of parameters) of the ViP paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from dpvision.report.figures import INK, MUTED, SERIES, svg_axes, thousands

DASHES = {"warm start": "-", "random start": (0, (4, 1.6)), "untrained": (0, (1, 1.6))}
"""Line style by kind of start."""
_WIDE = (10.2, 4.3)
_PANEL = (4.7, 3.1)
_MOST_POINTS = 600
_WINDOW_SHARE = 1 / 25
_START_SHARE = 1 / 20
_LINE_PT = 14.5  # height of a label's line


@dataclass(frozen=True)
class Curve:
    """One run's line."""

    label: str
    color: int
    """Index into ``figures.SERIES``."""
    start: str
    """A key of ``DASHES``."""
    x_N: np.ndarray
    """float64, ascending: steps, or sample-gradients."""
    loss_N: np.ndarray
    """float64, NaN where nothing was measured (an empty batch)."""


@dataclass(frozen=True)
class Point:
    """One run's score."""

    series: str
    """Points of one series are joined by a line if their sizes differ."""
    color: int | None
    """Index into ``figures.SERIES``; if None, grey, for baselines."""
    start: str
    num_parameters: int
    value: float
    low: float
    high: float


def smoothing_window(num: int) -> int:
    """Return the smoothing window for ``num`` values: a twenty-fifth of them, odd, at least 3."""
    return max(3, 2 * int(num * _WINDOW_SHARE / 2) + 1)


def smoothed(values_N: np.ndarray, window: int) -> np.ndarray:
    """Return the centred running mean over ``window`` values, float64 (N,).

    Near the start the window shrinks symmetrically, so that a steeply falling loss is not pulled
    down; at the end it is cut off on the right. NaN values are left out; a window of NaN only gives
    NaN.

    Args:
        window: odd.
    """
    known_N = np.isfinite(values_N)
    total = np.concatenate([[0.0], np.cumsum(np.where(known_N, values_N, 0.0))])
    count = np.concatenate([[0], np.cumsum(known_N)])
    place_N = np.arange(len(values_N))
    low_N = place_N - np.minimum(window // 2, place_N)
    high_N = np.minimum(place_N + np.minimum(window // 2, place_N) + 1, len(values_N))
    number_N = count[high_N] - count[low_N]
    return np.where(number_N > 0, (total[high_N] - total[low_N]) / np.maximum(number_N, 1), np.nan)


def end_value(values_N: np.ndarray) -> tuple[float, float, int]:
    """Return the mean and standard deviation of the last tenth of the finite values, and their
    number; NaN if there are none.
    """
    known = values_N[np.isfinite(values_N)]
    last = known[-max(1, len(known) // 10) :]
    return (
        (float(last.mean()), float(last.std()), len(last))
        if len(last)
        else (float("nan"), float("nan"), 0)
    )


def curves_figure(curves: Sequence[Curve], *, xlabel: str, ylabel: str = "loss") -> str:
    """Plot losses of several runs as SVG, each curve labelled at its end.

    The vertical axis spans the values after the first twentieth of each run; higher ones are cut
    off.

    Args:
        curves: at least one has a finite loss; runs of one colour differ in line style by their
            starts.
    """
    ends = [(curve, end_value(curve.loss_N)[0]) for curve in curves]
    alt = f"{ylabel.capitalize()} against {xlabel}, at the end: " + "; ".join(
        f"{curve.label} {end:.4g}" for curve, end in ends
    )
    with svg_axes(f"{alt}.", _WIDE) as (ax, svg):
        right, limits = max(float(curve.x_N[-1]) for curve in curves), _limits(curves)
        ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, right), ylim=limits)
        tips = []
        for curve in curves:
            line = smoothed(curve.loss_N, smoothing_window(len(curve.loss_N)))
            some = np.unique(np.linspace(0, len(line) - 1, _MOST_POINTS).astype(np.int64))
            color = SERIES[curve.color]
            ax.plot(curve.x_N[some], curve.loss_N[some], color=color, linewidth=0.8, alpha=0.28)
            ax.plot(
                curve.x_N[some],
                line[some],
                color=color,
                linestyle=DASHES[curve.start],
                dash_capstyle="butt",
            )
            known = np.flatnonzero(np.isfinite(line))
            tips.append((float(curve.x_N[known[-1]]), float(line[known[-1]]), color, curve.label))
        _name_ends(ax, tips)
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.xaxis.set_major_formatter(FuncFormatter(thousands))
    return svg[0]


def scaling_figure(points: Sequence[Point], chance: float, images: str) -> str:
    """Plot scores against the number of parameters as SVG: a line per series, with 95% intervals.

    Args:
        points: scores as shares in [0, 1], of one protocol.
        chance: score of guessing.
        images: description of the test data, for the alt text.
    """
    said = "; ".join(f"{p.series}, {size_text(p.num_parameters)}: {p.value:.1%}" for p in points)
    with svg_axes(
        f"Score against number of parameters on {images}. {said}; chance {chance:.1%}.", _PANEL
    ) as (ax, svg):
        low, high = min(p.low for p in points), max(p.high for p in points)
        sizes = sorted({p.num_parameters for p in points})
        ax.set(
            xscale="log",
            xlabel="parameters",
            ylabel="score",
            xlim=(sizes[0] / 1.12, sizes[-1] * 1.12),
        )
        series: dict[str, list[Point]] = {}
        for point in sorted(points, key=lambda p: p.num_parameters):
            series.setdefault(point.series, []).append(point)
        tips = []
        for place, (name, some) in enumerate(series.items()):
            color = MUTED if some[0].color is None else SERIES[some[0].color]
            shift = 1.012 ** (
                place - (len(series) - 1) / 2
            )  # side by side, so that intervals do not overlap
            x = [p.num_parameters * shift for p in some]
            style = (
                DASHES[some[0].start]
                if len({p.num_parameters for p in some}) == len(some)
                else "none"
            )
            ax.plot(
                x, [p.value for p in some], color=color, linestyle=style, marker="o", markersize=5
            )
            ax.vlines(x, [p.low for p in some], [p.high for p in some], color=color, linewidth=1.2)
            tips.append((x[-1], some[-1].value, color, name))
        reach = low - chance < 1.5 * (high - low)
        bottom = min(low, chance) if reach else low
        ax.set_ylim(bottom - 0.07 * (high - bottom), high + 0.07 * (high - bottom))
        if reach:
            ax.axhline(chance, color=INK, linewidth=1, linestyle=(0, (1, 3)))
            tips.append((ax.get_xlim()[1], chance, INK, "chance"))
        _name_ends(ax, tips)
        ax.set_xticks(sizes, [size_text(n) if n in _roomy(sizes) else "" for n in sizes])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.xaxis.set_minor_locator(MaxNLocator(1))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))
    return svg[0]


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions closest to the wanted ones (least squares) at least ``gap`` apart, within
    [low, high] if they fit.

    Isotonic regression by pooling neighbours that would overlap. The result is in the order of
    ``wanted``.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []  # sum of (wanted - offset), number
    for rank, i in enumerate(order):
        blocks.append([wanted[i] - rank * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, number = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += number
    top = max(low, high - (len(wanted) - 1) * gap)
    base = [
        min(max(total / number, low), top) for total, number in blocks for _ in range(int(number))
    ]
    placed = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        placed[i] = base[rank] + rank * gap
    return placed


def _name_ends(ax: Axes, tips: Sequence[tuple[float, float, str, str]]) -> None:
    """Label each line's end to the right of the frame, without overlaps, with a thin line from a
    dot.
    """
    low, high = ax.get_ylim()
    height_pt = ax.figure.get_size_inches()[1] * 72 * 0.8  # type: ignore[union-attr]
    gap = _LINE_PT / height_pt * (high - low)
    places = spread_apart(
        [min(max(y, low), high) for _, y, _, _ in tips], gap, low + gap / 2, high - gap / 2
    )
    for (x, y, color, label), place in zip(tips, places, strict=True):
        ax.plot([x], [y], "o", color=color, markersize=3.5, clip_on=False, zorder=4)
        ax.annotate(
            label,
            (x, y),
            (1.03, place),
            textcoords=ax.get_yaxis_transform(),
            va="center",
            color=color,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.8,
                "linestyle": (0, (1, 2)),
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _roomy(sizes: Sequence[int]) -> set[int]:
    """Return the sizes whose labels do not overlap on a logarithmic axis: the last, and others from
    the first on that fit.
    """
    room = 0.19 * np.log(1.25 * sizes[-1] / sizes[0])
    kept = [sizes[0]]
    for size in sizes[1:-1]:
        if np.log(size / kept[-1]) > room and np.log(sizes[-1] / size) > room:
            kept.append(size)
    return {*kept, sizes[-1]}


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the limits of the vertical axis: the values after the start of each run, and the start
    too if it is not far above.
    """
    later = np.concatenate(
        [curve.loss_N[int(len(curve.loss_N) * _START_SHARE) :] for curve in curves]
    )
    everything = np.concatenate([curve.loss_N for curve in curves])
    if not np.isfinite(later).any():
        later = everything
    low, high, top = (
        float(np.nanmin(everything)),
        float(np.nanmax(later)),
        float(np.nanmax(everything)),
    )
    high = top if top - low <= 1.3 * (high - low) else high
    pad = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad


def size_text(num_parameters: int) -> str:
    """Format a number of parameters: 99.0 M, 64 k."""
    return (
        f"{num_parameters / 1e6:,.1f} M"
        if num_parameters >= 1e6
        else f"{num_parameters / 1e3:,.0f} k"
    )
