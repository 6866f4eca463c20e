"""Run all tests of a captioner, with baselines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dpvision.errors import ConfigError
from dpvision.eval.captions.open_captioner import open_captioner
from dpvision.eval.captions.protocol import Asking, CaptionProtocol
from dpvision.eval.score import Score
from dpvision.eval.scored_run import check_unseen


@dataclass(frozen=True)
class ScoredOn:
    """Scores of one test, and the name of its data."""

    test_data: str
    scores: tuple[Score, ...]


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
        tests: ``ZeroShot``, ``Cider``, and compositional tests (``ChoiceTest``) from ``aro``,
            ``sugarcrepe``, ``order`` and ``scene_choices``.
        untrained: whether to also score the network with its initial random weights.

    Returns:
        One entry per test. Scores are private if the images are, or if the weights were trained on
        private images without a guarantee.

    Raises:
        ConfigError, CheckpointError: as ``open_captioner``; no test.
        DataError: as the tests, or a store shares records with the training store.
    """
    if not tests:
        raise ConfigError(
            "evaluate: no test; expected one or more. Give --zero-shot store, --order, "
            "--captions or --scenes 2000."
        )
    ready = open_captioner(run_or_checkpoint, ema=ema, device=device)
    for test in tests:
        if test.needs is not None:
            check_unseen(ready.data, test.needs, "evaluate")
    askers = [ready, *([ready.untrained()] if untrained else [])]
    return [ScoredOn(test.test_data, tuple(test.run(askers, how or Asking()))) for test in tests]
