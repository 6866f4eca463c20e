"""Images with reference and generated captions: random ones, and random ones among the captioner's
best (DP-Cap's figures 7 and 8).

Images are not chosen by hand: their order follows from a hash of their ids.

Legend: N candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from dpvision.checkpoint import find_checkpoint, list_checkpoints, read_manifest
from dpvision.data.keys import StepKey
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError
from dpvision.eval.captions.caption_images import one_line
from dpvision.eval.captions.cider import cider_d, say_captions
from dpvision.eval.captions.open_captioner import OpenCaptioner, open_captioner
from dpvision.models.generate import GenerateSettings
from dpvision.report.html import image_uri
from dpvision.runs.folder import read_run
from dpvision.runs.lineage import shaped_in_confidence

NUM_CANDIDATES = 500
BEST_SHARE = 0.1
OWN = "This run"
_REFERENCES_SHOWN = 3


@dataclass(frozen=True)
class Saying:
    """One captioner's caption of an image."""

    name: str
    text: str
    cider: float
    """CIDEr-D, 0 to 10, with TF-IDF weights from all candidates."""


@dataclass(frozen=True)
class Row:
    """One image of the gallery."""

    image: str
    """data: URI."""
    people: tuple[str, ...]
    said: tuple[Saying, ...]
    """In the order of ``Gallery.means``."""


@dataclass(frozen=True)
class Gallery:
    """Images of one store with their captions. Made by ``make_gallery``."""

    store: str
    """Name of its folder."""
    visibility: Literal["private", "public"]
    """"public" if the store's images and all captioners' captions may be released."""
    means: dict[str, float]
    """Mean CIDEr-D over the candidates, by captioner; this run's first."""
    chance: float
    """Mean CIDEr-D of this run's captions assigned to other images."""
    open_names: frozenset[str]
    """Captioners whose captions of public images may be released."""
    num_candidates: int
    random: tuple[Row, ...]
    best: tuple[Row, ...]

    def public_part(self) -> "Gallery | None":
        """Return the part for report.html: None if the images are private, else without captioners
        that may not be released.
        """
        if self.visibility == "public":
            return self
        if not self.open_names:
            return None
        kept = {name: mean for name, mean in self.means.items() if name in self.open_names}

        def part(rows: tuple[Row, ...]) -> tuple[Row, ...]:
            return tuple(
                replace(row, said=tuple(s for s in row.said if s.name in kept)) for row in rows
            )

        return replace(
            self, visibility="public", means=kept, random=part(self.random), best=part(self.best)
        )


def gallery_of_run(
    run: str | Path, store_dir: str | Path, beside: Sequence[str | Path] = (), *, count: int = 8
) -> Gallery:
    """Return the gallery of a run's captioner, and of other runs' captioners, on a store, with
    greedy captions.

    Captions of another run may be released only if all its images are public, because this run's
    statement does not cover it.

    Args:
        beside: run folders of other captioners.
        count: images of each kind.

    Raises:
        ConfigError: a run is not a captioner, or is given twice.
        CheckpointError: there is no checkpoint, or it lacks its tokenizer.
        DataError: fewer than two images with captions could be read.
    """
    runs = {OWN: Path(run)}
    for other in map(Path, beside):
        name = other.name if other.name not in runs else f"{other.parent.name}/{other.name}"
        if name in runs or other.resolve() in [known.resolve() for known in runs.values()]:
            raise ConfigError(
                f"gallery: {other} is given twice; expected each run once. Drop one --beside."
            )
        runs[name] = other
    captioners = {name: open_captioner(path) for name, path in runs.items()}
    open_names = {
        name
        for name, path in runs.items()
        if not captioners[name].confidential and (name == OWN or made_of_public_images(path))
    }
    return make_gallery(captioners, open_store(store_dir), open_names, count=count)


def made_of_public_images(root: Path) -> bool:
    """Return whether a run's store is public and was not cleared of private twins, and its parents
    are public or have a guarantee.

    Raises:
        CheckpointError: there is no run, or its newest manifest cannot be read.
    """
    base, config, about = read_run(root)
    if about["results_visibility"] != "public":
        return False
    if not list_checkpoints(base):
        return config.init_from is None  # without a checkpoint the parent's lineage is unknown
    return not shaped_in_confidence(read_manifest(find_checkpoint(base))["lineage"])


def make_gallery(
    captioners: Mapping[str, OpenCaptioner],
    store: Store,
    open_names: set[str],
    *,
    count: int = 8,
    score: Callable[[Sequence[str], Sequence[Sequence[str]]], np.ndarray] = cider_d,
) -> Gallery:
    """Return the gallery of open captioners. The first is this run's, whose best captions are
    shown.

    The best are drawn from the tenth of the candidates whose captions score highest, as in the
    paper's figure 8.

    Args:
        open_names: captioners whose captions of public images may be released.
        score: function of captions and their references that returns float64 (N,).
    """
    rows = _candidates(store)
    said = {
        name: say_captions(ready, store, rows, GenerateSettings())
        for name, ready in captioners.items()
    }
    own = next(iter(captioners))
    rows = np.array(
        [row for row in rows.tolist() if all(row in by_row for by_row in said.values())],
        dtype=np.int64,
    )
    if len(rows) < 2:
        raise DataError(
            f"gallery: {store.path}: {len(rows)} images with captions could be read; expected "
            "two. Give --gallery a store with captions."
        )
    references = store.captions_many(rows)
    scores = {
        name: score([by_row[row] for row in rows.tolist()], references)
        for name, by_row in said.items()
    }
    own_texts = [said[own][row] for row in rows.tolist()]
    # Several other images for each: a single pairing can match similar images by chance.
    moves = range(1, min(len(own_texts), 9))
    chance = float(
        np.mean([score([*own_texts[k:], *own_texts[:k]], references).mean() for k in moves or (0,)])
    )

    def shown(place: int) -> Row:
        row = int(rows[place])
        captions = tuple(
            Saying(name, one_line(by_row[row]), float(scores[name][place]))
            for name, by_row in said.items()
        )
        return Row(
            image_uri(store.read(row)),
            tuple(map(one_line, references[place][:_REFERENCES_SHOWN])),
            captions,
        )

    num_best = max(1, round(BEST_SHARE * len(rows)))
    best = np.argsort(-scores[own], kind="stable")[:num_best]
    # A separate order: the random one would repeat the images already shown.
    best = best[_drawn_order(store, rows[best], "gallery, best")]
    public = store.results_visibility == "public"
    return Gallery(
        store=store.path.name,
        visibility="public" if public and set(captioners) <= open_names else "private",
        means={name: float(values.mean()) for name, values in scores.items()},
        chance=chance,
        open_names=frozenset(open_names) if public else frozenset(),
        num_candidates=len(rows),
        random=tuple(map(shown, range(min(count, len(rows))))),
        best=tuple(map(shown, best[:count].tolist())),
    )


def _candidates(store: Store) -> np.ndarray:
    """Return at most NUM_CANDIDATES rows with captions, int64, in a random order given by the
    images' ids.
    """
    row_N = np.arange(store.num_records)
    row_N = row_N[store.has_captions(row_N)]
    return row_N[_drawn_order(store, row_N, "gallery")][:NUM_CANDIDATES]


def _drawn_order(store: Store, row_N: np.ndarray, stream: str) -> np.ndarray:
    """Return a random permutation of the rows, int64 (N,)."""
    return np.argsort(
        StepKey(0, 0).uniform_numpy(store.index["id"][row_N], stream, 1)[:, 0], kind="stable"
    )
