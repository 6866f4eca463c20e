"""A figure of a classifier's scores per class: AUROC, ROC curves, reliability, confusion matrix."""

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpvision import files
from dpvision.eval.class_scores import ALL, FITTED, NUM_BINS, ClassScores

_MOST_CLASSES = 20
_INK, _BAR, _SECOND = "#1f2430", "#2f6fb2", "#b4532a"
_STYLE: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 9, "text.color": _INK}


def write_class_figure(found: ClassScores, beside: Path) -> Path:
    """Write the figure as PNG beside a file, with its name; return its path.

    Above 20 classes it has the 20 of lowest AUROC, and no confusion matrix. A class has one colour
    in its AUROC and its ROC curve.
    """
    rows = [row for row in found.rows if row.group == ALL and row.name != ALL]
    shown = [(row.name, row.figures["AUROC"]) for row in rows]
    defined = sorted(
        ((name, value) for name, value in shown if value is not None), key=lambda one: one[1].value
    )[:_MOST_CLASSES]
    confusion = found.confusion_KK if len(rows) <= _MOST_CLASSES else None
    height = max(3.4, 0.8 + 0.26 * max(len(defined), len(rows) if confusion else 0))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(15 if confusion else 11.5, height), dpi=140, layout="constrained")
        axes = figure.subplots(1, 4 if confusion else 3)
        _auroc(axes[0], [(name, *value) for name, value in defined])
        _roc(axes[1], [found.roc[name] for name, _ in defined])
        _reliability(axes[2], found)
        if confusion:
            _confusion(axes[3], np.array(confusion), found.class_names)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    path = beside.with_suffix(".png")
    files.write_file(path, buffer.getvalue())
    return path


def _colours(num: int) -> list[Any]:
    colours = matplotlib.colormaps["tab10" if num <= 10 else "tab20"]
    return [colours(k) for k in range(num)]


def _auroc(ax: Axes, classes: list[tuple[str, float, float, float]]) -> None:
    colours = _colours(len(classes))
    for y, (_, value, low, high) in enumerate(classes):
        ax.plot([low, high], [y, y], color=_INK, linewidth=1.2)
        ax.plot([value], [y], "o", color=colours[y], markersize=5)
    ax.axvline(0.5, color=_SECOND, linestyle=(0, (4, 2)), linewidth=1)
    ax.set_yticks(range(len(classes)), [name for name, *_ in classes])
    least = min((low for _, _, low, _ in classes), default=0.5)
    ax.set(xlim=(min(0.48, least - 0.02), 1.005), title="AUROC, 95% interval (dashed: chance)")
    ax.spines[["top", "right"]].set_visible(False)


def _roc(ax: Axes, curves: list[tuple[list[float], list[float]]]) -> None:
    ax.plot([0, 1], [0, 1], color=_SECOND, linestyle=(0, (4, 2)), linewidth=1)
    for (false, true), colour in zip(curves, _colours(len(curves)), strict=True):
        ax.plot(false, true, color=colour, linewidth=1.2)
    ax.set(
        xlim=(-0.01, 1.01),
        ylim=(-0.01, 1.01),
        xlabel="false positive rate",
        ylabel="true positive rate",
        title="ROC, each class against all others",
    )
    ax.spines[["top", "right"]].set_visible(False)


def _reliability(ax: Axes, found: ClassScores) -> None:
    bins = [one for one in found.reliability if one[0]]
    most = max((num for num, _, _ in bins), default=1)
    ax.plot([0, 1], [0, 1], color=_SECOND, linestyle=(0, (4, 2)), linewidth=1)
    ax.scatter(
        [mean for _, mean, _ in bins],
        [right for _, _, right in bins],
        s=[12 + 150 * num / most for num, _, _ in bins],
        color=_BAR,
        alpha=0.8,
        zorder=3,
    )
    what = "the predicted class" if found.confusion_KK is not None else "each class"
    ax.set(
        xlim=(0, 1.02),
        ylim=(0, 1.02),
        xlabel=f"mean probability of {what}, {NUM_BINS} bins",
        ylabel="share that is right",
        title=f"reliability (area: number){FITTED if found.fitted else ''}",
    )
    ax.spines[["top", "right"]].set_visible(False)


def _confusion(ax: Axes, counts_KK: np.ndarray, names: tuple[str, ...]) -> None:
    share_KK = counts_KK / np.maximum(counts_KK.sum(axis=1, keepdims=True), 1)
    ax.imshow(share_KK, cmap="Blues", vmin=0, vmax=1)
    for i, j in np.ndindex(*counts_KK.shape):
        if counts_KK[i, j]:
            ink = "white" if share_KK[i, j] > 0.55 else _INK
            ax.text(j, i, f"{counts_KK[i, j]:,}", ha="center", va="center", color=ink, fontsize=7)
    places = range(len(names))
    ax.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(places, names)
    ax.set(xlabel="predicted", ylabel="declared", title="images, declared and predicted")
