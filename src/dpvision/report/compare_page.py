"""One page that compares several runs: losses, epsilon and scores.

Losses are functions of the records, so the page is confidential unless every image behind these
runs is public (docs/privacy.md): ``page_path`` checks the output path before anything is read from
``confidential/``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from dpvision.config import to_dict
from dpvision.errors import CheckpointError, ConfigError, PrivacyError
from dpvision.eval.score import is_of_the_run, is_share, printed
from dpvision.eval.score_file import NOTHING_FITTED
from dpvision.report.compared_run import ComparedRun, made_of_public_images, read_compared
from dpvision.report.curves import Curve, Point, curves_figure, end_value, scaling_figure, size_text
from dpvision.report.figures import SERIES, bars_figure
from dpvision.report.html import render, write_page
from dpvision.runs.folder import read_run

_MOST_PANELS = 6
_Entries = list[tuple[int, dict[str, Any]]]


def make_compare_page(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write a page that compares runs, without scripts or network requests, and return its path.

    Args:
        run_dirs: one or more run folders; at most six colours, one for a warm and a random start of
            the same settings.
        out: file to write. If None, compare.html in the first run's ``confidential/``. Another
            folder is accepted only if all images behind the runs are public; private scores are
            then left out.

    Raises:
        PrivacyError: ``out`` is not under ``confidential/`` although a run used private images; a
            ledger was altered.
        ConfigError: no run, the same run twice, too many, or ``out`` is not an .html file.
        CheckpointError: there is no run, no loss has been logged, or a file cannot be read or
            written.
    """
    roots = [Path(run) for run in run_dirs]
    if not roots or len({root.resolve() for root in roots}) < len(roots):
        raise ConfigError(
            f"compare: {[str(root) for root in roots]}; expected one or more run folders, each "
            "once. Drop the duplicate."
        )
    path = page_path(roots, None if out is None else Path(out))
    is_open = not _is_confidential(path)
    runs = [
        read_compared(root, name, public_scores_only=is_open)
        for root, name in zip(roots, _names(roots), strict=True)
    ]
    colors = run_colors(runs)
    html = render(
        "compare_page.html",
        runs=runs,
        rows=[_row(run) for run in runs],
        is_open=is_open,
        loss_figures=_loss_figures(runs, colors),
        differing=_differing(runs),
        score_figures=_score_figures(runs),
        scores=_score_table(runs),
    )
    _make_folder(path.parent)
    return write_page(path, html)


def page_path(roots: Sequence[Path], out: Path | None) -> Path:
    """Return the path to write the page to.

    Raises:
        PrivacyError: ``out`` is outside a confidential folder although a run used private images.
        ConfigError: ``out`` is not an .html file.
        CheckpointError: there is no run.
    """
    if out is None:
        read_run(roots[0])
        return roots[0] / "confidential" / "compare.html"
    if out.suffix != ".html" or out.is_dir():
        raise ConfigError(
            f"compare: out={str(out)!r}; expected a file whose name ends in .html. Rename it."
        )
    closed = [root for root in roots if not made_of_public_images(root)]
    if closed and not _is_confidential(out):
        raise PrivacyError(
            f"compare: out={str(out)!r}; expected a path in a folder named confidential, because "
            f"losses of {closed[0]} come from private images. Drop --out, or put confidential/ "
            "into it."
        )
    return out


def run_colors(runs: Sequence[ComparedRun]) -> list[int]:
    """Return a colour for each run; a warm and a random start of the same settings share one.

    Raises:
        ConfigError: more colours are needed than there are.
    """
    colors: list[int] = []
    taken: dict[tuple[Any, ...], dict[str, int]] = {}
    for run in runs:
        privacy = run.config.privacy
        key = (
            run.config.recipe,
            run.num_parameters,
            run.about["store_id"],
            privacy.expected_batch_size,
            privacy.steps,
            privacy.guarantee,
        )
        starts = taken.setdefault(key, {})
        if run.start in starts or not starts:
            color = max(colors, default=-1) + 1
            starts = taken[key] = {} if run.start in starts else starts
        else:
            color = next(iter(starts.values()))
        starts[run.start] = color
        colors.append(color)
    if max(colors) >= len(SERIES):
        raise ConfigError(
            f"compare: {max(colors) + 1} different runs; expected at most {len(SERIES)}, one per "
            "colour (a warm and a random start of the same settings count once). Compare fewer "
            "runs."
        )
    return colors


def _row(run: ComparedRun) -> dict[str, str]:
    end, deviation, number = end_value(run.loss_N)
    planned = run.config.privacy.num_steps
    return {
        "name": run.name,
        "recipe": run.config.recipe,
        "start": run.start,
        "parameters": size_text(run.num_parameters),
        "cost": run.cost,
        "batch": f"{run.config.privacy.expected_batch_size:,.6g}",
        "steps": f"{len(run.step_N) if run.steps is None else run.steps:,} of {planned:,}",
        "gradients": "features once" if run.is_head else f"{run.gradient_N[-1]:,.0f}",
        "loss": "none" if run.is_head else f"{end:.4f} ± {deviation:.4f}",
        "averaged": f"{number:,}",
    }


def _loss_figures(runs: Sequence[ComparedRun], colors: Sequence[int]) -> dict[str, Markup]:
    with_loss = [(run, color) for run, color in zip(runs, colors, strict=True) if not run.is_head]
    if not with_loss:
        return {}
    drawn = {"steps": [Curve(r.label, c, r.start, r.step_N, r.loss_N) for r, c in with_loss]}
    if len({run.config.privacy.expected_batch_size * run.config.views for run, _ in with_loss}) > 1:
        drawn["sample-gradients"] = [
            Curve(r.label, c, r.start, r.gradient_N, r.loss_N) for r, c in with_loss
        ]
    return {name: Markup(curves_figure(curves, xlabel=name)) for name, curves in drawn.items()}


def _differing(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the differing settings that make the losses of these runs incomparable."""
    kept: dict[str, set[str]] = {}
    for run in (run for run in runs if not run.is_head):
        model = to_dict(run.config.model)
        of_loss = {
            "store": run.about["store_id"],
            "kind of model": model.get("kind"),
            "share of hidden patches": model.get("mask_ratio"),
            "patch size": model["encoder"].get("patch_size"),
            "image size": model["encoder"].get("image_size"),
            "crop": run.config.data.crop_scale,
            "normalisation": (run.config.data.mean, run.config.data.std),
        }
        for name, value in of_loss.items():
            kept.setdefault(name, set()).add(str(value))
    return [name for name, values in kept.items() if len(values) > 1]


def _by_protocol(runs: Sequence[ComparedRun]) -> dict[tuple[str, str], _Entries]:
    """Return (run index, score) pairs by (protocol, data), those that most runs have first."""
    found: dict[tuple[str, str], _Entries] = {}
    for i, run in enumerate(runs):
        for score in run.scores:
            test, train = score["test_data"], score["train_data"]
            data = test if train in (test, NOTHING_FITTED) else f"{test}, fitted to {train}"
            found.setdefault((score["protocol"], data), []).append((i, score))
    return dict(
        sorted(
            found.items(),
            key=lambda item: -len({i for i, score in item[1] if is_of_the_run(score["name"])}),
        )
    )


def _score_figures(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return title, data and SVG per protocol: score against size if the runs have several sizes,
    otherwise bars.
    """
    drawn: list[dict[str, Any]] = []
    for (protocol, data), entries in _by_protocol(runs).items():
        ours = [(runs[i], score) for i, score in entries if is_of_the_run(score["name"])]
        if not ours or not is_share(protocol) or len(drawn) == _MOST_PANELS:
            continue
        chance = max(score["chance"] for _, score in entries)
        private = any(score["visibility"] == "private" for _, score in entries)
        images = f"{'private' if private else 'public'} images ({data}), {protocol}"
        if len({run.num_parameters for run, _ in ours}) > 1:
            untrained = [
                (runs[i], score) for i, score in entries if score["name"] == "random weights"
            ]
            svg = scaling_figure([*_points(ours), *_untrained(untrained)], chance, images)
        else:
            bars = [
                (run.name + _more_than_kind(score), *_range(score), True) for run, score in ours
            ]
            beside = {
                (score["name"], *_range(score), False): None
                for _, score in entries
                if not is_of_the_run(score["name"])
            }
            svg = bars_figure([("Score", [*bars, *beside])], [chance], images)
        drawn.append({"title": protocol, "data": data, "private": private, "svg": Markup(svg)})
    return drawn


def _points(scored: Sequence[tuple[ComparedRun, dict[str, Any]]]) -> list[Point]:
    """Return points in series by start and planned epsilon. The name leaves out an epsilon that all
    share.
    """
    planned = [run.planned_cost for run, _ in scored]
    names = [
        run.start + ("" if len(set(planned)) == 1 else f", {cost}") + _more_than_kind(score)
        for (run, score), cost in zip(scored, planned, strict=True)
    ]
    places = {name: i % len(SERIES) for i, name in enumerate(dict.fromkeys(names))}
    return [
        Point(name, places[name], run.start, run.num_parameters, *_range(score))
        for name, (run, score) in zip(names, scored, strict=True)
    ]


def _untrained(scored: Sequence[tuple[ComparedRun, dict[str, Any]]]) -> list[Point]:
    """Return the distinct scores of the architectures with random weights."""
    points = (
        Point("random weights", None, "untrained", run.num_parameters, *_range(score))
        for run, score in scored
    )
    return list(dict.fromkeys(points))


def _score_table(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return a row for each protocol, data and kind of features, with a cell per run."""
    rows = []
    for (protocol, data), entries in _by_protocol(runs).items():
        for name in dict.fromkeys(score["name"] for _, score in entries):
            cells = [""] * len(runs)
            for i, score in entries:
                if score["name"] == name:
                    cells[i] = (
                        f"{printed(protocol, score['value'])} ± "
                        f"{printed(protocol, (score['high'] - score['low']) / 2)}"
                    )
            private = any(
                score["visibility"] == "private" for _, score in entries if score["name"] == name
            )
            rows.append(
                {"what": name, "how": protocol, "data": data, "cells": cells, "private": private}
            )
    return rows


def _more_than_kind(score: dict[str, Any]) -> str:
    """Return the suffix of a score's name after "encoder", "captioner" or "own head", such as
    averaged weights.
    """
    return (
        str(score["name"])
        .removeprefix("encoder")
        .removeprefix("captioner")
        .removeprefix("own head")
    )


def _range(score: dict[str, Any]) -> tuple[float, float, float]:
    return score["value"], score["low"], score["high"]


def _names(roots: Sequence[Path]) -> list[str]:
    """Return each folder's name, with enough of its path to be unique."""
    parts = [root.resolve().parts for root in roots]
    length = next(
        n
        for n in range(1, max(map(len, parts)) + 1)
        if len({part[-n:] for part in parts}) == len(parts)
    )
    return ["/".join(part[-length:]) for part in parts]


def _is_confidential(path: Path) -> bool:
    """Return whether a file is in a folder named confidential, after resolving links."""
    return "confidential" in path.resolve().parent.parts


def _make_folder(folder: Path) -> None:
    """Make a folder and its missing parents. A new confidential folder is accessible to its owner
    only.

    Raises:
        CheckpointError: a folder cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        for place in reversed(missing):
            place.mkdir(mode=0o700 if place.name == "confidential" else 0o777)
    except OSError as error:
        raise CheckpointError(
            f"compare: {folder} ({error.strerror}); expected a writable folder. Choose another "
            "--out."
        ) from None
