"""Choose the best of several heads by a private score, as one private selection
(``privacy.selection``).

Each run draws a candidate from a public list, trains its head, and counts, with noise, the records
that the head classifies correctly. The score uses the training records: a noisy head overfits one
record less than holding records out would cost. The whole selection is charged as one step before
the first run. It releases the head with the highest score, its candidate's name and that score. The
number of runs is secret, and so is everything that reveals it: this module reports no progress,
keeps nothing of a run that lost, and does not resume after a crash, because one charge pays for one
whole selection.

Legend: B records of a block, K classes, D feature dimension.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from dpvision.adapt.defaults import with_rate
from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.fit import fit_head
from dpvision.adapt.gradient import logits
from dpvision.adapt.integer_products import WholeWeight
from dpvision.adapt.integer_rows import IntegerBlock, IntegerStream
from dpvision.adapt.release import Contributions, Releases
from dpvision.config import HeadConfig, RunConfig
from dpvision.config.resolve import with_candidate
from dpvision.dp.clipped import ClippedSum
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy.plan import DPPlan, run_plans
from dpvision.privacy.stream import Key, Stream, new_key, subkey

_REHEARSAL_RECORDS = 64


@dataclass(frozen=True)
class Candidate:
    """One of the settings to choose from."""

    name: str
    """Released if it wins."""
    fit: Callable[[FeatureStream, Releases], Head]
    """Trains the head. It reads the records only through the releases left; its other settings are
    public.
    """
    max_grad_norm: float | None = None
    """Clip norm; if None, the plan's. It does not change epsilon, since noise is relative to it."""


@dataclass(frozen=True)
class Selected:
    """Everything that a selection releases."""

    head: Head
    candidate: str
    score: float
    """Noisy number of correctly classified records, as a fraction of the declared number: can be
    below 0 or above 1.
    """


def choose_head(
    config: RunConfig,
    stream: FeatureStream,
    plan: DPPlan,
    charge: Callable[[], int],
    *,
    bounded: bool = True,
) -> tuple[RunConfig, Selected]:
    """Choose the best of ``config.model.choice.candidates`` by a private score.

    Args:
        plan: must have a selection.
        charge: ``ledger.append``; called once, before anything is computed from the records.
        bounded: as in ``defaults.steps_rate``, for candidates without a rate.

    Returns:
        The config of the chosen candidate, and everything that the selection releases.

    Raises:
        ConfigError: a candidate cannot be trained with these releases. Nothing has been charged.
        PrivacyError: the secret number of runs was 0 (Poisson only). Nothing is released, and the
            epsilon is spent.
    """
    assert isinstance(config.model, HeadConfig)
    asked: dict[str, RunConfig] = {}
    for name in config.model.choice.candidates:
        candidate = with_candidate(config, name)
        assert isinstance(candidate.model, HeadConfig)
        optim = with_rate(candidate.optim, run_plans(plan)[0], bounded=bounded)
        asked[name] = replace(candidate, model=candidate.model.settled(), optim=optim)
    candidates = [Candidate(name, partial(_fit_last, one)) for name, one in asked.items()]
    selected = select_head(stream, candidates, plan, charge)
    if selected is None:
        raise PrivacyError(
            "adapt: selection_runs=0 was drawn, as a Poisson number sometimes is; expected at "
            "least 1. Nothing is released, but the epsilon is spent. Start a new run under "
            "another --name; with --model.selection-shape 1 the number is never 0."
        )
    return asked[selected.candidate], selected


def _fit_last(config: RunConfig, stream: FeatureStream, releases: Releases) -> Head:
    return fit_head(config, stream, releases).head


def select_head(
    stream: FeatureStream,
    candidates: Sequence[Candidate],
    plan: DPPlan,
    charge: Callable[[], int],
    *,
    key: Key | None = None,
) -> Selected | None:
    """Return the head of the best run, or None if the number of runs drawn is 0 (Poisson only).

    Each candidate is first trained on random numbers, so that an invalid setting is refused before
    anything is charged.

    Args:
        candidates: two or more with different names, fixed without looking at these records.
        plan: from ``make_plan(config, ask_selection(config, ...))``.
        charge: ``ledger.append``.
        key: secret key for the number of runs, the candidates, and the draws and noise of every
            run; if None, new ones.

    Raises:
        ConfigError: fewer than two candidates, a duplicate name, or a candidate that cannot be
            trained with these releases.
        PrivacyError: the plan has no selection, or is used up; or there are more records than
            declared, which the score's full batch does not take.
    """
    check_candidates(candidates)
    run_plan, score_plan = run_plans(plan)
    score_plan.sampler.require(stream.num_records)
    _rehearse(stream, candidates, run_plan, score_plan)
    if charge() != 0:
        raise PrivacyError(
            "select: the plan's one selection was already charged; expected an empty ledger. "
            "Start a new run under another --name: it spends its own epsilon."
        )
    key = new_key() if key is None else key
    key.spend(0)  # the one step of this selection
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
    """Refuse fewer than two candidates, or duplicate names."""
    names = [candidate.name for candidate in candidates]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"select: candidates={names}; expected two or more with different names. Train a "
            "single one without selection: that costs less."
        )


def _run(
    stream: FeatureStream,
    candidate: Candidate,
    run_plan: DPPlan,
    score_plan: DPPlan,
    key: Key,
    run: int,
) -> Selected:
    """Train and score one candidate: the base mechanism of theorems 2 and 6."""

    def keys(part: str) -> tuple[Key, Key]:
        """Return the keys of draws and of noise."""
        return subkey(key, f"selection, draws of {part}", run=run), subkey(
            key, f"selection, noise of {part}", run=run
        )

    plan = (
        run_plan.another_run()
        if candidate.max_grad_norm is None
        else replace(
            run_plan,
            noise=run_plan.noise.clipped_to(candidate.max_grad_norm),
        )
    )
    head = candidate.fit(stream, Releases(plan, itertools.count().__next__, *keys("head")))
    scorer = Releases(score_plan.another_run(), itertools.count().__next__, *keys("score"))
    # The head takes features that are centred, divided and scaled to length 1 at most: it includes
    # the stream's other steps.
    records = IntegerStream(
        FeatureStream(
            stream.feature_ND,
            stream.label,
            stream.num_classes,
            centre_D=head.centre_D,
            spread_D=head.spread_D,
            unit=head.unit,
        )
    )
    _, released = scorer.release(records, lambda blocks: hits(blocks, head, score_plan))
    return Selected(head, candidate.name, float(released.grads["hits"]))


def hits(blocks: Iterator[IntegerBlock], head: Head, plan: DPPlan) -> ClippedSum:
    """Return the number of records whose predicted class is one of their labels: each contributes 0
    or 1 under the name "hits".

    Predictions are those of ``head`` on a record's integers (``IntegerStream``), after the head's
    centring and unit length: in float32 the predictions of tied records depend on how many records
    a block has. A class predicted from NaN scores counts like any other: no record can raise an
    error here.
    """
    total, weight = Contributions(plan, {"hits": ()}), WholeWeight(head.weight_KD)
    for block in blocks:
        predicted_B = logits(block, weight, head.bias_K).argmax(dim=1)
        if block.label_B is not None:
            hit_B = predicted_B == block.label_B
        else:
            assert block.target_BK is not None
            hit_B = block.target_BK[torch.arange(len(predicted_B)), predicted_B] > 0
        total.add(
            "hits", (total.factors(hit_B.double(), block.row_B) * hit_B).sum(dtype=torch.float64)
        )
    return total.sum()


def _rehearse(
    stream: FeatureStream, candidates: Sequence[Candidate], run_plan: DPPlan, score_plan: DPPlan
) -> None:
    """Run every candidate on random numbers of the stream's shape."""
    rng, num = np.random.default_rng(0), min(_REHEARSAL_RECORDS, run_plan.unit.sampled_from)
    feature_ND = rng.normal(size=(num, stream.feature_ND.shape[1])).astype(np.float32)
    shape = (num, stream.num_classes) if stream.multi_label else num
    label = rng.integers(0, 2 if stream.multi_label else stream.num_classes, shape)
    for candidate in candidates:
        _run(
            replace(stream, feature_ND=feature_ND, label=label),
            candidate,
            run_plan,
            score_plan,
            new_key(),
            0,
        )
