"""All measurements of a captioner, one after the other, with what they have to be compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from dpvision.data.store import Store
from dpvision.errors import ConfigError
from dpvision.eval.any_of_labels import SeveralLabels
from dpvision.eval.captions.choice import ChoiceTest, answer_choices, choice_scores
from dpvision.eval.captions.cider_scores import cider_scores
from dpvision.eval.captions.image_source import Fit
from dpvision.eval.captions.label_sets import LabelSet
from dpvision.eval.captions.open_captioner import OpenCaptioner, open_captioner
from dpvision.eval.captions.zero_shot import ZeroShotSettings, zero_shot_scores
from dpvision.eval.metric import checked_metric
from dpvision.eval.probes.own_head import check_unseen
from dpvision.eval.score import Score
from dpvision.models.generate import GenerateSettings

Beside = Literal["random", "other"]
BESIDE: tuple[Beside, ...] = get_args(Beside)
"""Controls: the network untrained; of compositional tests, the captioner asked about another picture (what words alone give away)."""


@dataclass(frozen=True)
class ScoredOn:
    """Scores of one test, and the name of the data they were measured on."""

    test_data: str
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class CaptionerTests:
    """What to measure; whatever is left out is not measured."""

    store: Store | None = None
    """Pictures with labels (zero-shot) or captions (CIDEr) that the captioner was not trained on."""
    labels: LabelSet | None = None
    """For zero-shot classification of the store."""
    several: SeveralLabels | None = None
    """Of zero-shot classification: the classes any of which is right."""
    zero_shot: ZeroShotSettings | None = None
    """None: the defaults."""
    captions: GenerateSettings | None = None
    """How captions of the store are said, for CIDEr."""
    choices: tuple[ChoiceTest, ...] = ()
    """Compositional tests: ``aro``, ``sugarcrepe``, ``order``, ``scene_choices`` make them."""

    def __post_init__(self) -> None:
        if (self.labels is not None or self.captions is not None) and self.store is None:
            raise ConfigError("evaluate: no store; expected pictures with labels or captions for this. Name one with --store.")
        if self.labels is None and self.captions is None and not self.choices:
            raise ConfigError(
                "evaluate: nothing to measure; expected a test, e.g. --zero-shot store, --order, --captions or --scenes 2000."
            )


def score_captioner(
    run_or_checkpoint: str | Path,
    tests: CaptionerTests,
    *,
    against: Sequence[Beside] = BESIDE,
    fit: Fit = "squash",
    limit: int | None = None,
    ema: bool = False,
    batch_size: int = 32,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] | None = None,
) -> list[ScoredOn]:
    """Scores of a captioner and of its controls.

    Args:
        limit: at most so many pictures of the store for zero-shot and CIDEr.
        progress: called with a line on what is being done.

    Returns:
        one entry for each test. Scores are private if the pictures are, or if private pictures shaped the weights without a guarantee.

    Raises:
        ConfigError, CheckpointError: as ``open_captioner``.
        DataError: as the tests, or the store shares records with the one that the run was trained on.
    """
    ready = open_captioner(run_or_checkpoint, ema=ema, device=device)
    askers = [ready, *([ready.untrained()] if "random" in against else [])]
    found = []
    if tests.store is not None:
        check_unseen(ready.data, tests.store, "evaluate")
        name = tests.store.path.name
        if tests.labels is not None:
            settings = replace(tests.zero_shot or ZeroShotSettings(), fit=fit, limit=limit)
            metric = checked_metric(tests.store.meta.get("metric") or "accuracy")
            scores = zero_shot_scores(
                askers,
                tests.store,
                tests.labels,
                settings,
                metric=metric,
                several=tests.several,
                batch_size=batch_size,
                workers=workers,
                progress=progress,
            )
            found.append(ScoredOn(name, tuple(scores)))
        if tests.captions is not None:
            scores = cider_scores(
                askers, tests.store, tests.captions, fit, limit=limit, batch_size=batch_size, workers=workers, progress=progress
            )
            found.append(ScoredOn(name, tuple(scores)))
    for test in tests.choices:
        scores = _choice_scores(askers, test, fit, "other" in against, batch_size=batch_size, workers=workers, progress=progress)
        found.append(ScoredOn(test.pictures.test_data, tuple(scores)))
    return found


def _choice_scores(
    askers: Sequence[OpenCaptioner],
    test: ChoiceTest,
    fit: Fit,
    other: bool,
    *,
    batch_size: int,
    workers: int,
    progress: Callable[[str], None] | None,
) -> list[Score]:
    questions = [(asker.name, asker, test) for asker in askers]
    if other:
        questions.append((f"{askers[0].name}, other pictures", askers[0], test.dealt_out()))
    scores = []
    for name, asker, asked in questions:
        right_N = answer_choices(asker, asked, fit, batch_size=batch_size, workers=workers, progress=progress)
        private = asker.confidential or test.pictures.visibility == "private"
        scores += choice_scores(asked, right_N, name, "private" if private else "public", f"lowest loss, {fit}")
    return sorted(scores, key=lambda score: [s.protocol for s in scores].index(score.protocol))


def checked_beside(names: Sequence[str]) -> tuple[Beside, ...]:
    """The controls of these names. Raises ConfigError for an unknown one."""
    if set(names) - set(BESIDE):
        raise ConfigError(f"evaluate: against={','.join(names)!r}; expected random, other, both or none. Leave it out for both.")
    return tuple(c for c in BESIDE if c in names)


def checked_fit(name: str) -> Fit:
    """``name``, if it is a way to make pictures square. Raises ConfigError otherwise."""
    for fit in get_args(Fit):
        if name == fit:
            return fit
    raise ConfigError(f"evaluate: fit={name!r}; expected squash or crop. DP-Cap squashes.")
