"""What a run learned, as the pages show it first: its own scores in a sentence each, and classified
images.

Legend: B images, K classes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.checkpoint import load_checkpoint
from dpvision.data.decode import BadImage, decode
from dpvision.data.keys import StepKey
from dpvision.data.store import Store
from dpvision.encoders.classifier import is_head, load_classifier
from dpvision.errors import DataError
from dpvision.eval.score import CIDER, is_of_the_run, is_share, printed
from dpvision.report.html import image_uri

COUNT = 12
PARENT = "parent"
"""Name of the scores of what a captioner's run started from."""


@dataclass(frozen=True)
class Example:
    """One classified image."""

    image: str
    """data: URI."""
    predicted: str
    true: str

    @property
    def right(self) -> bool:
        """Whether the prediction is the label."""
        return self.predicted == self.true


@dataclass(frozen=True)
class Predictions:
    """Images of one store, drawn by a hash of their ids, with the class that a run predicts."""

    store: str
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Learned:
    """One score of the run itself."""

    value: str
    unit: str
    text: str
    bars: tuple[tuple[str, float, bool], ...]
    """(name, share of the bar's length, whether it is the run's) of the score and of what stands
    beside it.
    """


@torch.inference_mode()
def predict_some(run: str | Path, store: Store, count: int = COUNT) -> Predictions | None:
    """Labelled images of ``store`` with the classes that the run's own head predicts.

    Args:
        run: run folder.
        store: its images will be in the result. They are drawn by a hash of their ids, not chosen.

    Returns:
        None where the run has no head for one class an image, or the store no such label.

    Raises:
        CheckpointError: there is no checkpoint, it was altered, or its encoder is not there.
            DataError: no image could be read.
    """
    checkpoint = load_checkpoint(run)
    if (
        not is_head(checkpoint)
        or checkpoint.manifest["config"]["model"]["multi_label"]
        or store.generated
        or store.multi_label
    ):
        return None
    rows = np.flatnonzero(store.labelled)
    if not len(rows):
        return None
    classifier = load_classifier(checkpoint)
    order = np.argsort(
        StepKey(0, 0).uniform_numpy(store.index["id"][rows], "predictions", 1)[:, 0], kind="stable"
    )
    rows = rows[order][:count]
    files, images = [], []
    for row in rows.tolist():
        try:
            file = store.read(row)
            images.append(classifier.preprocess(decode(file)))
        except BadImage:
            continue
        files.append((file, int(store.labels[row])))
    if not files:
        raise DataError(
            f"report: none of {len(rows)} images of {store.path} could be read; expected images. "
            "Import the source again."
        )
    found = classifier(torch.from_numpy(np.stack(images))).argmax(dim=1).tolist()
    ours = checkpoint.manifest.get("class_names", store.label_names)

    def named(k: int, names: list[str] | None) -> str:
        return names[k] if names is not None and k < len(names) else f"class {k}"

    examples = [
        Example(image_uri(file), named(k, ours), named(label, store.label_names))
        for (file, label), k in zip(files, found, strict=True)
    ]
    return Predictions(store.path.name, tuple(examples))


def learned_of(scores: list[dict[str, Any]]) -> list[Learned]:
    """What the run's own scores say: of its classifier, or of its captions. Probes of an encoder
    have their figure.
    """
    found, bars = list[Learned](), tuple[tuple[str, float, bool], ...]()
    for score in scores:
        protocol, name, value = score["protocol"], score["name"], score["value"]
        interval = printed(protocol, score["low"], score["high"])
        chance = printed(protocol, score["chance"])
        images = f"{score['n']:,} {score['visibility']} images of {score['test_data']}"
        if name.startswith("own head") and protocol.startswith("own head,"):
            text = (
                f"of {images} classified correctly (95% interval {interval}). Always naming the "
                f"most frequent class: {chance}."
            )
            bars = (("this classifier", value, True), ("chance", score["chance"], False))
            found.append(Learned(f"{100 * value:.0f}%", "right", text, bars))
        elif (
            name.startswith("captioner")
            and is_of_the_run(name)
            and protocol.startswith((CIDER, "zero-shot"))
        ):
            before = [
                s
                for s in scores
                if (s["name"], s["protocol"], s["test_data"])
                == (PARENT, protocol, score["test_data"])
            ]
            share = is_share(protocol)
            text = (
                f"of {images} classified by words"
                if share
                else f"of its captions of {images}, times 100"
            )
            text += f" (95% interval {interval}). "
            text += "".join(f"Before this run: {printed(protocol, s['value'])}. " for s in before)
            text += (
                f"""{
                    "Always naming the most frequent class"
                    if share
                    else "These captions given to other images"
                }: """
                f"{chance}."
            )
            full = (
                1.0 if share else max(value, score["chance"], *(s["value"] for s in before)) or 1.0
            )
            bars = (
                ("after this run", value / full, True),
                *(("before", s["value"] / full, False) for s in before),
                ("chance", score["chance"] / full, False),
            )
            found.append(
                Learned(
                    f"{100 * value:.0f}%" if share else printed(protocol, value),
                    "right" if share else "CIDEr-D",
                    text,
                    bars,
                )
            )
    return found
