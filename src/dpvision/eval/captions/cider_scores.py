"""CIDEr of generated captions, with human and mismatched-caption baselines.

Legend: N images, B images of a batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.eval.captions.choice import encoded_images
from dpvision.eval.captions.cider import cider_d
from dpvision.eval.captions.image_source import StoreImages
from dpvision.eval.captions.open_captioner import OpenCaptioner
from dpvision.eval.captions.protocol import Asking, CaptionProtocol
from dpvision.eval.captions.settings import Fit
from dpvision.eval.score import CIDER, Z_95, Score, Visibility
from dpvision.models.generate import GenerateSettings, generate


@dataclass(frozen=True)
class Cider(CaptionProtocol):
    """``cider_scores`` as a protocol."""

    store: Store
    settings: GenerateSettings = field(default_factory=GenerateSettings)
    """How captions are generated."""
    limit: int | None = None
    """Maximum number of images."""

    @property
    def test_data(self) -> str:
        return self.store.path.name

    @property
    def needs(self) -> Store:
        return self.store

    def run(self, askers: Sequence[OpenCaptioner], how: Asking) -> list[Score]:
        return cider_scores(
            askers,
            self.store,
            self.settings,
            how.fit,
            limit=self.limit,
            batch_size=how.batch_size,
            workers=how.workers,
            progress=how.progress,
        )


def say_captions(
    ready: OpenCaptioner,
    store: Store,
    row_N: np.ndarray,
    settings: GenerateSettings,
    fit: Fit,
    *,
    batch_size: int = 32,
    workers: int = 2,
    progress: Callable[[str], None] | None = None,
) -> dict[int, str]:
    """Return the first generated caption of each image, by row. Images that do not decode are left
    out.
    """
    said: dict[int, str] = {}
    for memory_BSD, place_B in encoded_images(
        ready, StoreImages(store, row_N), fit, batch_size=batch_size, workers=workers
    ):
        for place, captions in zip(
            place_B.tolist(), generate(ready.model, memory_BSD, settings), strict=True
        ):
            said[int(row_N[place])] = ready.tokenizer.decode(captions[0].ids)
        if progress is not None:
            progress(f"captions, {ready.name}: {len(said):,} of {len(row_N):,} images")
    return said


def cider_scores(
    askers: Sequence[OpenCaptioner],
    store: Store,
    settings: GenerateSettings | None = None,
    fit: Fit = "squash",
    *,
    limit: int | None = None,
    batch_size: int = 32,
    workers: int = 2,
    progress: Callable[[str], None] | None = None,
) -> list[Score]:
    """Return the mean CIDEr-D of each captioner's captions of a store's images, with the store's
    captions as references.

    Chance is the score of the same captions assigned to the next image. If images have two captions
    or more, a score named "people" is added: each caption against the others of its image, with one
    reference fewer than the captioners have.

    Args:
        settings: settings of the generation; sampling is refused.
        limit: maximum number of images, a fixed random subset.

    Raises:
        DataError: fewer than two readable images with a caption; ``method="sample"``.
        CheckpointError: a captioner's logits are not finite.
    """
    settings = settings or GenerateSettings()
    if settings.method == "sample":
        raise DataError(
            "CIDEr: method='sample'; expected greedy or beam, which are deterministic. Use "
            "--method greedy."
        )
    row_N = _rows_with_captions(store, limit)
    scores = []
    for ready in askers:
        said = say_captions(
            ready,
            store,
            row_N,
            settings,
            fit,
            batch_size=batch_size,
            workers=workers,
            progress=progress,
        )
        references = [store.captions(row) for row in said]
        how = f"{CIDER}, {_described(settings)}, {_numbers(references)} references, {fit}"
        visibility: Visibility = (
            "private" if ready.confidential or store.results_visibility == "private" else "public"
        )
        captions = list(said.values())
        figure_N = cider_d(captions, references)
        chance = float(cider_d([*captions[1:], captions[0]], references).mean())
        low, high = _interval(figure_N)
        scores.append(
            Score(
                ready.name,
                float(figure_N.mean()),
                low,
                high,
                len(figure_N),
                chance,
                how,
                visibility,
            )
        )
    return scores + people_scores(store, row_N)


def people_scores(store: Store, row_N: np.ndarray) -> list[Score]:
    """Return the CIDEr-D of reference captions: each is held out against the others of its image,
    averaged over an image's captions.

    Only images with the most common number of captions are used, so that all have the same number
    of references; if that is one, the list is empty. Chance: the held-out captions assigned to the
    next image.
    """
    captions = [store.captions(int(row)) for row in row_N]
    counts = np.bincount([len(own) for own in captions])
    usual = int(counts.argmax())
    alike = [own for own in captions if len(own) == usual]
    if usual < 2 or len(alike) < 2:
        return []
    figures, chances = [], []
    for k in range(usual):
        others = [own[:k] + own[k + 1 :] for own in alike]
        held_out = [own[k] for own in alike]
        figures.append(cider_d(held_out, others))
        chances.append(cider_d([*held_out[1:], held_out[0]], others).mean())
    figure_N = np.mean(figures, axis=0)
    how = f"{CIDER}, people's captions held out one by one, {usual - 1} references"
    return [
        Score(
            "people",
            float(figure_N.mean()),
            *_interval(figure_N),
            len(figure_N),
            float(np.mean(chances)),
            how,
            store.results_visibility,
        )
    ]


def _rows_with_captions(store: Store, limit: int | None) -> np.ndarray:
    row_N = np.arange(store.num_records)
    row_N = row_N[store.has_captions(row_N)]
    if len(row_N) < 2:
        raise DataError(
            f"CIDEr: {store.path}: {len(row_N)} images with a caption; expected two or more. "
            "Import captions with them."
        )
    if limit is not None and limit < len(row_N):
        row_N = np.sort(np.random.Generator(np.random.PCG64(0)).permutation(row_N)[:limit])
    return row_N


def _described(settings: GenerateSettings) -> str:
    if settings.method == "greedy":
        return "greedy captions"
    return (
        f"{settings.method} captions ({settings.beams} beams, length penalty "
        f"{settings.length_penalty:g})"
    )


def _numbers(references: Sequence[Sequence[str]]) -> str:
    counts = sorted({len(own) for own in references})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _interval(figure_N: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of the mean over images, for fixed word weights."""
    half = Z_95 * float(figure_N.std(ddof=1)) / math.sqrt(len(figure_N))
    return max(0.0, float(figure_N.mean()) - half), min(10.0, float(figure_N.mean()) + half)
