"""Smoothed curves keep to what was measured, and what is written beside a line can be read."""

import re

import numpy as np
import pytest
from scipy.optimize import minimize

from dpvision.errors import ConfigError
from dpvision.report.compare_page import make_compare_page
from dpvision.report.curves import (
    Curve,
    Point,
    curves_figure,
    end_value,
    scaling_figure,
    smoothed,
    smoothing_window,
    spread_apart,
)


@pytest.mark.parametrize("num", [1, 2, 30, 200, 6100])
def test_smoothing_is_the_mean_of_each_window_written_out(num: int) -> None:
    rng = np.random.default_rng(num)
    values = rng.normal(size=num)
    values[rng.random(num) < 0.2] = np.nan
    window = smoothing_window(num)
    assert window % 2 == 1 and abs(window - max(3, num / 25)) <= 1
    for got, i in zip(smoothed(values, window), range(num), strict=True):
        half = min(window // 2, i)
        known = [v for v in values[i - half : i + half + 1] if np.isfinite(v)]
        assert got == pytest.approx(np.mean(known), abs=1e-9) if known else np.isnan(got)


def test_smoothing_does_not_move_a_straight_line_before_its_end() -> None:
    line = np.linspace(3.0, 1.0, 500)
    window = smoothing_window(500)
    assert np.allclose(smoothed(line, window)[: -(window // 2)], line[: -(window // 2)])


def test_the_end_is_the_last_tenth_of_what_was_measured() -> None:
    values = np.concatenate([np.full(90, 9.0), [1.0, 3.0] * 5, [np.nan] * 7])
    assert end_value(values) == (2.0, 1.0, 10)
    assert end_value(np.array([np.nan]))[2] == 0


@pytest.mark.parametrize("seed", range(4))
def test_labels_are_as_near_as_they_can_be_without_touching(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted, gap = rng.random(5) * (1.0 if seed % 2 else 0.2), 0.15
    placed = np.array(spread_apart(wanted, gap, 0.0, 1.0))
    order = np.argsort(wanted)
    assert (
        (np.diff(placed[order]) >= gap - 1e-9).all()
        and placed.min() >= -1e-9
        and placed.max() <= 1 + 1e-9
    )
    apart = [
        {"type": "ineq", "fun": lambda p, i=i: p[order[i + 1]] - p[order[i]] - gap}
        for i in range(4)
    ]
    best = minimize(
        lambda p: ((p - wanted) ** 2).sum(),
        np.linspace(0, 0.8, 5)[np.argsort(order)],
        bounds=[(0, 1)] * 5,
        constraints=apart,
    )
    assert best.success and ((placed - wanted) ** 2).sum() == pytest.approx(best.fun, abs=1e-5)


def test_labels_that_have_room_stay_where_their_lines_end() -> None:
    assert spread_apart([0.7, 0.1, 0.4], 0.1, 0.0, 1.0) == pytest.approx([0.7, 0.1, 0.4])


def _curve(label: str, color: int, start: str, offset: float, steps: int = 3000) -> Curve:
    x = np.arange(1, steps + 1, dtype=np.float64)
    return Curve(label, color, start, x, offset + 5 * np.exp(-x / 20) + 0.01 * np.sin(x))


def _heights(svg: str) -> dict[str, float]:
    """Text in the figure -> its place from the top, in points."""
    return {
        text: float(y)
        for y, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]*)</text>', svg)
    }


def test_each_line_is_named_where_it_ends_and_the_figure_says_its_end_values() -> None:
    svg = curves_figure(
        [_curve("small: 19 M", 0, "warm start", 0.5), _curve("large <b>", 1, "random start", 0.4)],
        xlabel="steps",
    )
    assert "small: 19 M 0.5" in svg and "large &lt;b&gt; 0.4" in svg and "<b>" not in svg
    height = _heights(svg)
    # Both are centred on their line, so they are as high as the axis' own numbers there.
    assert height["small: 19 M"] == pytest.approx(height["0.50"], abs=3) and height[
        "large &lt;b&gt;"
    ] == pytest.approx(height["0.40"], abs=3)
    assert (
        "stroke-dasharray: 8" in svg
        and "var(--series-1)" in svg
        and "var(--series-2)" in svg
        and "#0103" not in svg
    )


def test_names_of_lines_that_end_together_do_not_touch() -> None:
    height = _heights(
        curves_figure(
            [_curve(f"run {i}", i, "warm start", 0.5 + i / 1e4) for i in range(4)], xlabel="steps"
        )
    )
    places = [height[f"run {i}"] for i in (3, 2, 1, 0)]
    assert (np.diff(places) > 12).all()


def test_a_steep_start_does_not_flatten_the_rest() -> None:
    svg = curves_figure(
        [_curve("a", 0, "warm start", 0.5), _curve("b", 1, "warm start", 0.45)], xlabel="steps"
    )
    height = _heights(svg)
    assert not {"1.00", "2.00", "1", "2", "4", "5"} & height.keys()  # the first losses are above 5
    assert height["b"] - height["a"] > 100


def test_an_empty_batch_at_the_start_or_the_end_is_no_trouble() -> None:
    curve = _curve("only", 0, "warm start", 0.5, 50)
    curve.loss_N[[0, -1]] = np.nan
    assert "nan" not in curves_figure([curve], xlabel="steps").lower()


def test_points_of_one_size_are_not_joined() -> None:
    def drawn(sizes: tuple[int, int, int]) -> int:
        points = [
            Point("warm start", 0, "warm start", n, 0.4 + i / 50, 0.38 + i / 50, 0.42 + i / 50)
            for i, n in enumerate(sizes)
        ]
        svg = scaling_figure(points, 0.1, "public images")
        return len(
            re.findall(
                r'<path d="M [^"]*L [^"]*L [^"]*"[^>]*fill: none; stroke: var\(--series-1\)', svg
            )
        )

    assert (
        drawn((1_000_000, 2_000_000, 4_000_000)) == 1
        and drawn((1_000_000, 2_000_000, 2_000_000)) == 0
    )


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ConfigError, match="one or more run folders"):
        make_compare_page([])
