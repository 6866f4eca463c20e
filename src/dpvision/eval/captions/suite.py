"""Make the tests of a captioner, and run them with baselines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dpvision.data.store import Store
from dpvision.errors import ConfigError
from dpvision.eval.any_of_labels import load_any_of_labels
from dpvision.eval.captions.choice_files import benchmark_tests
from dpvision.eval.captions.cider import Cider
from dpvision.eval.captions.label_sets import load_label_set
from dpvision.eval.captions.open_captioner import CaptionProtocol, OpenCaptioner
from dpvision.eval.captions.order import order_test
from dpvision.eval.captions.scene_choices import scene_compositional
from dpvision.eval.captions.settings import Asking, CaptionTests, ChoiceFiles
from dpvision.eval.captions.two_tower import Asker, open_asker
from dpvision.eval.captions.zero_shot import ZeroShot, ZeroShotSettings, checked_methods
from dpvision.eval.score import Score
from dpvision.eval.scored_run import check_unseen
from dpvision.models.generate import GenerateSettings


@dataclass(frozen=True)
class ScoredOn:
    """Scores of one test, and the name of its data."""

    test_data: str
    scores: tuple[Score, ...]


def make_tests(
    ready: Asker, asked: CaptionTests, files: ChoiceFiles, store: Store | None = None
) -> tuple[list[CaptionProtocol], list[str]]:
    """Return the tests asked for, those on ``store`` first, and notes on what they leave out.

    Raises:
        ConfigError: as ``CaptionTests.check``, ``benchmark_tests`` and the tests.
        DataError: a benchmark's file, the store or its labels do not serve.
    """
    asked.check(store is not None)
    tests: list[CaptionProtocol] = []
    notes: list[str] = []
    if asked.zero_shot is not None and store is not None:
        classes = load_label_set(asked.zero_shot, store)
        any_of = None
        if asked.labels is not None:
            any_of = load_any_of_labels(asked.labels, store, len(classes.classes))
        methods = checked_methods([m.strip() for m in asked.method.split(",") if m.strip()])
        settings = ZeroShotSettings(methods, asked.prompt, asked.match_article, asked.limit)
        tests.append(ZeroShot(store, classes, settings, any_of))
    if asked.captions and store is not None:
        if not isinstance(ready, OpenCaptioner):
            raise ConfigError(
                f"evaluate: --captions with {ready.name}; expected a captioner: a model of two "
                "towers generates no text. Drop --captions."
            )
        how = GenerateSettings()
        if asked.beams is not None:
            how = GenerateSettings("beam", beams=asked.beams)
        tests.append(Cider(store, how, asked.limit))
    tests += benchmark_tests(files)
    if asked.scenes is not None:
        numbers = range(asked.first_scene, asked.first_scene + asked.scenes)
        tests.append(scene_compositional(numbers, ready.image_size))
    if asked.order and store is not None:
        made = order_test(store, limit=asked.limit)
        tests.append(made.test)
        notes.append(
            f"order test: {made.left_out:,} captions left out (no shuffle differs), "
            f"{made.short_of_shuffles:,} with under four shuffles"
        )
    return tests, notes


def score_captioner(
    run_or_checkpoint: str | Path,
    tests: Sequence[CaptionProtocol],
    how: Asking | None = None,
    *,
    untrained: bool = True,
    ema: bool = False,
    device: str | torch.device = "cpu",
) -> list[ScoredOn]:
    """Return the scores of a captioner and its baselines.

    Args:
        tests: ``ZeroShot``, ``Cider`` and compositional tests (``ChoiceTest``); ``make_tests``
            makes them.
        untrained: whether to also score the network with its initial random weights.

    Returns:
        One entry per test. Scores are private if the images are, or if the weights were trained on
        private images without a guarantee.

    Raises:
        ConfigError, CheckpointError: as ``open_asker``; no test.
        DataError: as the tests, or a store shares records with the training store.
    """
    if not tests:
        raise ConfigError(
            "evaluate: no test; expected one or more. Give --zero-shot store, --order, "
            "--captions or --scenes 2000."
        )
    ready = open_asker(run_or_checkpoint, ema=ema, device=device)
    for test in tests:
        if test.needs is not None:
            check_unseen(ready.data, test.needs, "evaluate")
    askers = [ready, *([ready.untrained()] if untrained else [])]
    return [ScoredOn(test.test_data, tuple(test.run(askers, how or Asking()))) for test in tests]
