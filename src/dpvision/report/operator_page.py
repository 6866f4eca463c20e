"""confidential/operator.html: training metrics and private results of a run, for its operator."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from dpvision.data.open import open_store
from dpvision.errors import CheckpointError
from dpvision.eval.score_file import read_class_scores, read_scores
from dpvision.privacy.plan import DPPlan
from dpvision.report.figures import series_figure
from dpvision.report.gallery import Gallery
from dpvision.report.html import render, write_page
from dpvision.report.learned import learned_of, predict_some
from dpvision.report.neighbours import neighbours_of_run
from dpvision.report.reconstructions import reconstruct_some
from dpvision.runs.folder import read_run
from dpvision.strict_json import parse_json

_METRICS = (
    "step",
    "loss",
    "batch_size",
    "grad_norm_mean",
    "grad_norm_median",
    "clip_fraction",
    "step_s",
    "images_per_s",
    "time",
)
"""What the page needs of a line of metrics.jsonl: numbers, or None where nothing was measured."""


def make_operator_page(
    run_dir: str | Path,
    private_store: str | Path | None = None,
    *,
    test_store: str | Path | None = None,
    gallery: Gallery | None = None,
) -> Path:
    """Write RUN/confidential/operator.html: losses, gradient norms, batch sizes, throughput,
    private scores and images.

    Made for every run, even without a guarantee.

    Args:
        run_dir: run folder.
        private_store: store whose images are reconstructed and compared on the page; if None, no
            images.
        test_store: store whose images are shown with a classifier's predictions: images that it was
            not trained on.
        gallery: images with their captions.

    Raises:
        CheckpointError: there is no run, or its metrics cannot be read.
    """
    root = Path(run_dir)
    base, config, about = read_run(root)
    plan = _read_plan(base / "plan.json")
    metrics = list(_read_metrics(root / "confidential" / "metrics.jsonl"))
    predictions = images = alike = None
    if private_store is not None:
        store = open_store(private_store)
        images, alike = reconstruct_some(root, store), neighbours_of_run(root, store)
    if test_store is not None:
        predictions = predict_some(root, open_store(test_store))
    scores = [
        *read_scores(root / "confidential" / "scores.json"),
        *([] if base != root else read_scores(base / "scores.json")),
    ]
    classes = read_class_scores(base) | read_class_scores(root / "confidential")
    html = render(
        "operator_page.html",
        recipe=config.recipe,
        about=about,
        plan=plan,
        summary=_summary(metrics, plan),
        figures=_figures(metrics, plan),
        scores=scores,
        classes=classes,
        learned=learned_of(scores),
        predictions=predictions,
        images=images,
        alike=alike,
        gallery=gallery,
    )
    return write_page(root / "confidential" / "operator.html", html)


def _figures(metrics: list[dict[str, Any]], plan: DPPlan) -> dict[str, Markup]:
    if not metrics:
        return {}
    columns = {name: _column(metrics, name) for name in _METRICS}
    step = columns["step"]
    clip = None if plan.max_grad_norm is None else ("clip norm", plan.max_grad_norm)
    norms = {"median": columns["grad_norm_median"], "mean": columns["grad_norm_mean"]}
    hours = (columns["time"] - columns["time"][0]) / 3600
    drawn = {
        "loss": series_figure(step, {"loss": columns["loss"]}, xlabel="steps", ylabel="loss"),
        "norms": series_figure(
            step, norms, xlabel="steps", ylabel="gradient norm", reference=clip, log=True
        ),
        "clipped": series_figure(
            step,
            {"clipped": columns["clip_fraction"]},
            xlabel="steps",
            ylabel="share clipped",
            limits=(0, 1.02),
        ),
        "batch": series_figure(
            step,
            {"drawn": columns["batch_size"]},
            xlabel="steps",
            ylabel="records in the batch",
            reference=("expected", plan.expected_batch_size),
        ),
        "rate": series_figure(
            hours,
            {"rate": columns["images_per_s"]},
            xlabel="hours since the start",
            ylabel="images per second",
        ),
    }
    return {name: Markup(svg) for name, svg in drawn.items()}


def _summary(metrics: list[dict[str, Any]], plan: DPPlan) -> dict[str, str]:
    if not metrics:
        return {}
    seconds = _column(metrics, "step_s")
    last = metrics[-1]
    return {
        "steps logged": f"{len(metrics):,} of {plan.steps:,}",
        "last loss": f"{last['loss']:.4f}" if last["loss"] is not None else "none (empty batch)",
        "seconds per step, median": f"{np.nanmedian(seconds):.2f}",
        "hours in steps": f"{np.nansum(seconds) / 3600:.2f}",
        "gradients that were not finite": (
            f"{sum(line.get('num_non_finite') or 0 for line in metrics):,}"
        ),
    }


def _column(metrics: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return the values of one metric, float64, NaN if not measured."""
    return np.array(
        [line[name] if line[name] is not None else np.nan for line in metrics], dtype=np.float64
    )


def _read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of metrics.jsonl, without torn or damaged lines."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = parse_json(line)
            numbers = [*(entry[name] for name in _METRICS), entry.get("num_non_finite")]
            if all(number is None or type(number) in (int, float) for number in numbers):
                yield entry


def _read_plan(path: Path) -> DPPlan:
    try:
        return DPPlan.from_dict(parse_json(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"report: {path} cannot be read ({error}). Restore it as the run wrote it."
        ) from None
