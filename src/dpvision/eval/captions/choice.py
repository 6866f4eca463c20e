"""Choice tests, the common form of all compositional tests: one caption of an image is true, the
others are false.

The answer is the caption with the lowest loss (Sander et al., ICML 2024, appendix A.3.2), or with
the highest cosine of a model of two towers; a tie is wrong. Micro accuracy counts items, macro
accuracy averages the groups' accuracies (relations, pairs of attributes, subsets), as ARO's own
scripts do.

Legend: N items, B images of a batch, C candidates of an image, L tokens, S encoder tokens, D width.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpvision.config import PAD_ID
from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.eval.captions.candidate_losses import best_candidate
from dpvision.eval.captions.image_source import ImageSource, StoreImages, image_batches
from dpvision.eval.captions.open_captioner import CaptionProtocol
from dpvision.eval.captions.settings import Asking
from dpvision.eval.captions.two_tower import Asker
from dpvision.eval.metric import measure
from dpvision.eval.score import Score, Visibility, wilson_interval


@dataclass(frozen=True)
class Choice:
    """One item: an image and its candidate captions."""

    image: int
    """Position of the image in the source."""
    captions: tuple[str, ...]
    """Two or more; the first is true of the image, the others are not."""
    group: str = ""
    """Group for macro accuracy: a relation, a pair of attributes, a subset."""


@dataclass(frozen=True)
class ChoiceTest(CaptionProtocol):
    """A compositional test: images and items."""

    name: str
    """Name in protocols."""
    images: ImageSource
    choices: tuple[Choice, ...]
    groups_called: str = "groups"
    """Name of the groups, in the plural."""
    min_group: int = 1
    """Groups with fewer items do not count for macro accuracy (ARO's attribution: 25)."""
    show_groups: bool = False
    """Whether to also give a score for each group."""

    @property
    def test_data(self) -> str:
        return self.images.test_data

    @property
    def needs(self) -> Store | None:
        return self.images.store if isinstance(self.images, StoreImages) else None

    @property
    def visibility(self) -> Visibility:
        return self.images.visibility

    def run(self, askers: Sequence[Asker], how: Asking) -> list[Score]:
        """Return the scores by protocol, the captioner before its baselines."""
        asked = [(asker.name, asker, self) for asker in askers]
        if how.other_images:
            asked.append((f"{askers[0].name}, other images", askers[0], self.dealt_out()))
        scores: list[Score] = []
        for name, asker, test in asked:
            right_N = answer_choices(asker, test, how)
            private = asker.confidential or self.images.visibility == "private"
            scores += choice_scores(
                test, right_N, name, "private" if private else "public", f"{asker.rule}, {how.fit}"
            )
        return sorted(scores, key=lambda score: [s.protocol for s in scores].index(score.protocol))

    def dealt_out(self) -> "ChoiceTest":
        """Return the items with each image replaced by the next one of another photograph: the
        baseline "other images", which shows what text alone reveals.
        """
        asked = sorted({choice.image for choice in self.choices})
        photographs = [self.images.photograph(place) for place in asked]
        if len(set(photographs)) < 2:
            raise DataError(
                f"{self.name}: items about {len(set(photographs))} image; expected two or more "
                "for the baseline. Add images."
            )
        n = len(asked)
        after = {
            place: next(
                asked[(i + k) % n]
                for k in range(1, n)
                if photographs[(i + k) % n] != photographs[i]
            )
            for i, place in enumerate(asked)
        }
        return replace(
            self,
            choices=tuple(replace(choice, image=after[choice.image]) for choice in self.choices),
        )


def encoded_images(
    ready: Asker, source: ImageSource, how: Asking
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yield memory_BSD of the images in order (of two towers, embeddings), on the asker's device,
    and their positions place_B, int64.
    """
    for x_BCHW, place_B in image_batches(
        source,
        ready.data,
        ready.image_size,
        how.fit,
        batch_size=how.batch_size,
        workers=how.workers,
    ):
        yield ready.look(x_BCHW.to(ready.device)), place_B


def answer_choices(ready: Asker, test: ChoiceTest, how: Asking | None = None) -> np.ndarray:
    """Return for each item 1 if its true caption has the lowest loss, 0 if not, -1 if the image
    does not decode: int8 (N,).

    Raises:
        DataError: an item has fewer than two captions; a caption is empty; losses are not finite.
    """
    how, items_of = how or Asking(), dict[int, list[int]]()
    for n, choice in enumerate(test.choices):
        if len(choice.captions) < 2 or not all(caption.strip() for caption in choice.captions):
            raise DataError(
                f"{test.name}: captions={choice.captions!r}; expected two or more, none of them "
                "empty. Remove the item."
            )
        items_of.setdefault(choice.image, []).append(n)
    rows: dict[str, bytes] = {}
    right_N = np.full(len(test.choices), -1, dtype=np.int8)
    for memory_BSD, place_B in encoded_images(ready, test.images, how):
        asked = [b for b, place in enumerate(place_B.tolist()) if place in items_of]
        if not asked:
            continue
        items = [items_of[int(place_B[b])] for b in asked]
        # Score each distinct caption of an image once, so that equal captions have bit-identical
        # losses and tie.
        said = [
            _distinct(ready, rows, [c for n in own for c in test.choices[n].captions])
            for own in items
        ]
        token_BCL = np.full(
            (len(asked), max(map(len, said)), ready.num_tokens), PAD_ID, dtype=np.int64
        )
        for b, own_rows in enumerate(said):
            token_BCL[b, : len(own_rows)] = [np.frombuffer(row, dtype=np.int64) for row in own_rows]
        loss_BC = ready.losses(
            memory_BSD[asked], torch.from_numpy(token_BCL).to(memory_BSD.device)
        ).cpu()
        for b, own in enumerate(items):
            place_of = {row: c for c, row in enumerate(said[b])}
            for n in own:
                loss_C = loss_BC[
                    b, [place_of[rows[caption]] for caption in test.choices[n].captions]
                ]
                if not torch.isfinite(loss_C).all():
                    raise DataError(
                        f"{test.name}: losses are not finite; expected finite ones. The run "
                        "diverged: train again."
                    )
                right_N[n] = (
                    best_candidate(loss_C[None], torch.arange(len(loss_C))[None]).item() == 0
                )
        if how.progress is not None:
            how.progress(f"{test.name}: {int(place_B[-1]) + 1:,} of {len(test.images):,} images")
    return right_N


def _distinct(ready: Asker, rows: dict[str, bytes], captions: Sequence[str]) -> list[bytes]:
    for caption in captions:
        if caption not in rows:
            rows[caption] = ready.encode(caption).tobytes()
    return list(dict.fromkeys(rows[caption] for caption in captions))


def choice_scores(
    test: ChoiceTest,
    right_N: np.ndarray,
    name: str,
    visibility: Visibility,
    how: str = "lowest loss",
) -> list[Score]:
    """Return micro accuracy, macro accuracy if there are groups, and with ``show_groups`` each
    group's accuracy.

    Chance is random guessing among each item's candidates. Intervals of micro and group accuracy
    treat the items of a photograph as one cluster; macro's adds up the groups' variances as if
    items were independent.

    Args:
        right_N: from ``answer_choices``; items without an image (-1) are left out.
        name: name of the captioner in the scores.

    Raises:
        DataError: no item is left.
    """
    kept_N = right_N >= 0
    if not kept_N.any():
        raise DataError(
            f"{test.name}: no item with a readable image; expected one or more. Check the folder "
            "of images."
        )
    choices = [choice for choice, kept in zip(test.choices, kept_N, strict=True) if kept]
    right_N = right_N[kept_N].astype(np.int64)
    numbers: dict[Hashable, int] = {}
    image_N = np.array(
        [
            numbers.setdefault(test.images.photograph(choice.image), len(numbers))
            for choice in choices
        ]
    )
    chance_N = np.array([1 / len(choice.captions) for choice in choices])
    names, group_N, num_G = np.unique(
        [choice.group for choice in choices], return_inverse=True, return_counts=True
    )
    lost = int((~kept_N).sum())
    how += f", {lost} items without a readable image left out" if lost else ""

    def score(what: str, of: np.ndarray) -> Score:
        value = float(right_N[of].mean())
        low, high = clustered_interval(right_N[of], image_N[of])
        return Score(
            name,
            value,
            low,
            high,
            int(of.sum()),
            float(chance_N[of].mean()),
            f"{what}, {how}",
            visibility,
        )

    if len(names) < 2:
        return [score(test.name, np.ones(len(choices), dtype=bool))]
    scores = [score(f"{test.name}, micro", np.ones(len(choices), dtype=bool))]
    large_G = num_G >= test.min_group
    if large_G.sum() >= 2:
        of = large_G[group_N]
        value, low, high = measure(
            np.where(right_N[of] == 1, group_N[of], -1), group_N[of], "mean_per_class"
        )
        chance = float(np.mean([chance_N[group_N == g].mean() for g in np.flatnonzero(large_G)]))
        with_at_least = f" of {test.min_group} items or more" if test.min_group > 1 else ""
        said = (
            f"{test.name}, macro over {int(large_G.sum())} {test.groups_called}{with_at_least}, "
            f"{how}"
        )
        scores.append(Score(name, value, low, high, int(of.sum()), chance, said, visibility))
    if test.show_groups:
        scores += [
            score(f"{test.name}, {group}", group_N == g) for g, group in enumerate(names.tolist())
        ]
    return scores


def clustered_interval(right_N: np.ndarray, cluster_N: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of a share whose items are correlated within clusters (images).

    It is Wilson's interval at the effective number of independent items given the variance between
    clusters (Kish's design effect), at most N and at least the number of clusters.
    """
    n, share = len(right_N), float(right_N.mean())
    _, cluster_N = np.unique(cluster_N, return_inverse=True)
    num_clusters = int(cluster_N.max()) + 1
    excess = np.bincount(cluster_N, weights=right_N - share)
    variance = float((excess**2).sum()) / n**2 * (num_clusters / max(1, num_clusters - 1))
    effective = (
        num_clusters
        if variance == 0
        else min(n, max(num_clusters, math.floor(share * (1 - share) / variance)))
    )
    return wilson_interval(share * effective, effective)
