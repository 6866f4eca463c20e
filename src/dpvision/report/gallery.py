"""Images with what people and captioners say of them: some drawn at random, some from those that the captioner does best (DP-Cap's
figures 7 and 8).

Images are not chosen by hand: their order follows from a hash of their ids.

Legend: N candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from dpvision.data.keys import StepKey
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError
from dpvision.eval.captions.caption_images import one_line
from dpvision.eval.captions.cider import cider_d
from dpvision.eval.captions.cider_scores import say_captions
from dpvision.eval.captions.open_captioner import OpenCaptioner, open_captioner
from dpvision.models.generate import GenerateSettings
from dpvision.report.compared_run import made_of_public_images
from dpvision.report.strips import picture_uri

NUM_CANDIDATES = 500
BEST_SHARE = 0.1
OWN = "This run"
_REFERENCES_SHOWN = 3


@dataclass(frozen=True)
class Saying:
    """What one captioner said."""

    name: str
    text: str
    cider: float
    """CIDEr-D, 0 to 10, with the weights of all candidates."""


@dataclass(frozen=True)
class Row:
    """One image of the gallery."""

    picture: str
    """data: URI."""
    people: tuple[str, ...]
    said: tuple[Saying, ...]
    """In the order of ``Gallery.means``."""


@dataclass(frozen=True)
class Gallery:
    """Images of one store and what is said of them. Made by ``make_gallery``."""

    store: str
    """Name of its folder."""
    visibility: Literal["private", "public"]
    """"public" when the store's images and all captioners' words may be shown to anybody."""
    means: dict[str, float]
    """Mean CIDEr-D over the candidates, by captioner; the run's own first."""
    chance: float
    """That of the run's own captions, each given to the next image."""
    open_names: frozenset[str]
    """Captioners whose words about public images may leave."""
    num_candidates: int
    random: tuple[Row, ...]
    best: tuple[Row, ...]

    def public_part(self) -> "Gallery | None":
        """What of it may stand in report.html: nothing where the images are private, else without captioners that must not leave."""
        if self.visibility == "public":
            return self
        if not self.open_names:
            return None
        kept = {name: mean for name, mean in self.means.items() if name in self.open_names}

        def part(rows: tuple[Row, ...]) -> tuple[Row, ...]:
            return tuple(replace(row, said=tuple(s for s in row.said if s.name in kept)) for row in rows)

        return replace(self, visibility="public", means=kept, random=part(self.random), best=part(self.best))


def gallery_of_run(run: str | Path, store_dir: str | Path, beside: Sequence[str | Path] = (), *, count: int = 8) -> Gallery:
    """The gallery of a run's captioner on a store, with those of other runs beside it, by greedy captions.

    Words of a run beside it may leave only when all of its images are public: the statement of this run does not speak for another's.

    Args:
        beside: run folders of other captioners.
        count: images of each kind.

    Raises:
        ConfigError: a run is no captioner, or is named twice. CheckpointError: there is no checkpoint, or it lacks its tokenizer.
        DataError: fewer than two images with captions could be read.
    """
    runs = {OWN: Path(run)}
    for other in map(Path, beside):
        name = other.name if other.name not in runs else f"{other.parent.name}/{other.name}"
        if name in runs or other.resolve() in [known.resolve() for known in runs.values()]:
            raise ConfigError(f"gallery: {other} is named twice; expected each run once. Leave one out.")
        runs[name] = other
    captioners = {name: open_captioner(path) for name, path in runs.items()}
    open_names = {name for name, path in runs.items() if not captioners[name].confidential and (name == OWN or made_of_public_images(path))}
    return make_gallery(captioners, open_store(store_dir), open_names, count=count)


def make_gallery(
    captioners: Mapping[str, OpenCaptioner],
    store: Store,
    open_names: set[str],
    *,
    count: int = 8,
    score: Callable[[Sequence[str], Sequence[Sequence[str]]], np.ndarray] = cider_d,
) -> Gallery:
    """As ``gallery_of_run``, of open captioners; the first is the run's own, whose best captions are shown.

    The best are drawn from the tenth of the candidates whose captions have the highest score, as in the paper's figure 8.

    Args:
        open_names: captioners whose words about public images may leave.
        score: (captions, references of each) -> float64 (N,).
    """
    rows = _candidates(store)
    said = {name: say_captions(ready, store, rows, GenerateSettings(), "squash") for name, ready in captioners.items()}
    own = next(iter(captioners))
    rows = np.array([row for row in rows.tolist() if all(row in by_row for by_row in said.values())], dtype=np.int64)
    if len(rows) < 2:
        raise DataError(f"gallery: {store.path}: {len(rows)} images with captions could be read; expected two. Name a store with captions.")
    references = store.captions_many(rows)
    scores = {name: score([by_row[row] for row in rows.tolist()], references) for name, by_row in said.items()}
    own_texts = [said[own][row] for row in rows.tolist()]
    # Several other images for each: one pairing can by luck bring like images together.
    moves = range(1, min(len(own_texts), 9))
    chance = float(np.mean([score([*own_texts[k:], *own_texts[:k]], references).mean() for k in moves or (0,)]))

    def shown(place: int) -> Row:
        row = int(rows[place])
        captions = tuple(Saying(name, one_line(by_row[row]), float(scores[name][place])) for name, by_row in said.items())
        return Row(picture_uri(store.read(row)), tuple(map(one_line, references[place][:_REFERENCES_SHOWN])), captions)

    num_best = max(1, round(BEST_SHARE * len(rows)))
    best = np.argsort(-scores[own], kind="stable")[:num_best]
    # Drawn anew: in the order of the random ones, those that are shown there already would come first.
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
    """Rows with captions, int64, at most NUM_CANDIDATES, in an order that is drawn by the images' ids."""
    row_N = np.arange(store.num_records)
    row_N = row_N[store.has_captions(row_N)]
    return row_N[_drawn_order(store, row_N, "gallery")][:NUM_CANDIDATES]


def _drawn_order(store: Store, row_N: np.ndarray, stream: str) -> np.ndarray:
    """A random order of rows, as their places, int64 (N,)."""
    return np.argsort(StepKey(0, 0).uniform_numpy(store.index["id"][row_N], stream, 1)[:, 0], kind="stable")
