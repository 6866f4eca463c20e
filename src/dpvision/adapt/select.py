"""The best of several heads by a private score, as one private selection (``privacy.selection``).

A run draws a candidate from a public list, trains its head, and counts the records whose class it predicts, with the score's own noise.
It scores on the records it was trained on: what a head with noise in every number remembers of one record is less than what holding
records out would cost. The whole is charged as one step before the first run. What leaves is the head with the highest score, its
candidate's name and that score. How many runs there were is secret, and so is everything that tells it: this module reports no progress,
keeps nothing of a run that lost, and does not go on after a crash, for a charge pays for one whole selection.

Legend: B records of a block, K classes, D feature dimensions.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dpvision.adapt.feature_stream import Block, FeatureStream, Head
from dpvision.adapt.release import Contributions, Releases
from dpvision.dp.clip import ClippedSum
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.stream import Stream, new_key, subkey

_REHEARSAL_RECORDS = 64


@dataclass(frozen=True)
class Candidate:
    """One setting among those to choose from."""

    name: str
    """Released if it wins."""
    fit: Callable[[FeatureStream, Releases], Head]
    """Trains the head from the releases that are left, and from nothing else of the records; its other settings are public."""
    max_grad_norm: float | None = None
    """Clip norm; if None, the plan's. It changes nothing about the price, as noise is relative to it."""


@dataclass(frozen=True)
class Selected:
    """What leaves a selection."""

    head: Head
    candidate: str
    score: float
    """Share of the declared number of records whose class the head predicts, with noise: below 0 and above 1 are possible."""


def select_head(
    stream: FeatureStream,
    candidates: Sequence[Candidate],
    plan: DPPlan,
    charge: Callable[[], int],
    *,
    key: bytes | None = None,
) -> Selected | None:
    """The head of the best run; None where the law of the number of runs has drawn 0 (Poisson only).

    Each candidate is tried on random numbers before the charge, so that a setting which cannot be is refused while it costs nothing.

    Args:
        candidates: two or more with different names, fixed without looking at these records.
        plan: of ``make_plan(config, ask_selection(config, ...))``.
        charge: ``ledger.append``.
        key: 32 secret bytes, for the number of runs, the candidates, and draws and noise of every run; None for fresh ones.

    Raises:
        ConfigError: fewer than two candidates, a name twice, or a candidate that cannot be trained with these releases.
        PrivacyError: the plan has no selection, or is used up.
    """
    check_candidates(candidates)
    run_plan, score_plan = plan.run_plans()
    _rehearse(stream, candidates, run_plan, score_plan)
    if charge() != 0:
        raise PrivacyError("select: the plan's one selection was charged before; expected a fresh ledger. Start a new run: it costs anew.")
    key = new_key() if key is None else key
    rng = Stream(subkey(key, "selection"))
    assert plan.selection is not None
    best: Selected | None = None
    for run in range(plan.selection.draw_runs(rng)):
        candidate = candidates[rng.integer(len(candidates))]
        selected = _run(stream, candidate, run_plan, score_plan, key, run)
        if best is None or selected.score > best.score:
            best = selected
    return best


def check_candidates(candidates: Sequence[Candidate]) -> None:
    """Refuse a list that there is nothing to choose from."""
    names = [candidate.name for candidate in candidates]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"select: candidates={names}; expected two or more with different names. With one, train it: that costs less.")


def _run(stream: FeatureStream, candidate: Candidate, run_plan: DPPlan, score_plan: DPPlan, key: bytes, run: int) -> Selected:
    """One run: what theorems 2 and 6 call the base mechanism."""

    def keys(part: str) -> tuple[bytes, bytes]:
        """Of draws and of noise."""
        return subkey(key, f"selection, draws of {part}", run=run), subkey(key, f"selection, noise of {part}", run=run)

    plan = run_plan if candidate.max_grad_norm is None else replace(run_plan, max_grad_norm=candidate.max_grad_norm)
    head = candidate.fit(stream, Releases(plan, itertools.count().__next__, *keys("head")))
    scorer = Releases(score_plan, itertools.count().__next__, *keys("score"))
    # The head takes records as they come: centring, scaling and maps of the stream are part of it.
    records = FeatureStream(stream.feature_ND, stream.label, stream.num_classes)
    _, released = scorer.release(records, lambda blocks: hits(blocks, head, score_plan))
    return Selected(head, candidate.name, float(released.grads["hits"]))


def hits(blocks: Iterator[Block], head: Head, plan: DPPlan) -> ClippedSum:
    """Number of records whose predicted class is theirs, or one of theirs: each record contributes 0 or 1 under the name "hits".

    A class that is predicted from scores which are not numbers counts like any other: no record can raise an error here.
    """
    total = Contributions(plan, {"hits": ()})
    for block in blocks:
        predicted_B = head.predict(block.x_BE)
        if block.label_B is not None:
            hit_B = predicted_B == block.label_B
        else:
            assert block.target_BK is not None
            hit_B = block.target_BK[torch.arange(len(predicted_B)), predicted_B] > 0
        total.add("hits", (total.factors(hit_B.double()) * hit_B).sum(dtype=torch.float64))
    return total.sum()


def _rehearse(stream: FeatureStream, candidates: Sequence[Candidate], run_plan: DPPlan, score_plan: DPPlan) -> None:
    """Run every candidate on random numbers of the stream's shape."""
    rng = np.random.default_rng(0)
    feature_ND = rng.normal(size=(_REHEARSAL_RECORDS, stream.feature_ND.shape[1])).astype(np.float32)
    shape = (_REHEARSAL_RECORDS, stream.num_classes) if stream.multi_label else _REHEARSAL_RECORDS
    label = rng.integers(0, 2 if stream.multi_label else stream.num_classes, shape)
    for candidate in candidates:
        _run(replace(stream, feature_ND=feature_ND, label=label), candidate, run_plan, score_plan, new_key(), 0)
