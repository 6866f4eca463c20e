"""``dpvision evaluate``: how good are an encoder's frozen features?"""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from dpvision.cli.output import RunPath, emit, parse, table
from dpvision.data.store import Store
from dpvision.eval.score import Score
from dpvision.eval.suite import evaluate as run_suite
from dpvision.eval.suite import write_scores
from dpvision.train.folder import read_run


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(evaluate, "evaluate", argv)


def evaluate(
    run: RunPath,
    train: Path,
    test: Path | None = None,
    ema: bool = False,
    batch_size: int = 256,
    workers: int = 2,
    json: bool = False,
) -> None:
    """Probe an encoder on labelled pictures: k-NN and a logistic probe on frozen features, random weights and raw pixels beside it.

    Scores from public stores go to the run's scores.json (and into its report), those from private stores to confidential/.

      dpvision evaluate runs/first --train stores/pets-train --test stores/pets-test

    Args:
        run: Run folder; its newest checkpoint is taken.
        train: Store with labels to fit the probe on.
        test: Store with labels to score on; left out, a fifth of --train's people is held out.
        ema: Use the averaged weights.
        batch_size: Pictures in one forward pass.
        workers: Threads that read pictures.
        json: Print JSON.
    """
    read_run(run)  # before the work: scores are written beside run.json
    with Console(stderr=True).status("features") as status:
        scores = run_suite(
            run,
            Store.open(train),
            Store.open(test) if test is not None else None,
            ema=ema,
            batch_size=batch_size,
            workers=workers,
            device="cuda" if torch.cuda.is_available() else "cpu",
            progress=lambda n: status.update(f"features: {n:,} pictures"),
        )
    written = write_scores(run, scores, train_data=train.name, test_data=(test or train).name)
    text = scores_table(scores) + "\nwritten to " + ", ".join(map(str, written))
    emit({"scores": [score.to_dict() for score in scores], "written": [str(path) for path in written]}, json, text)


def scores_table(scores: Sequence[Score]) -> str:
    """Scores as a table, best first within each protocol."""
    rows = [
        (s.protocol, s.name, f"{s.value:.1%}", f"{s.low:.1%} to {s.high:.1%}") for s in sorted(scores, key=lambda s: (s.protocol, -s.value))
    ]
    first = scores[0]
    return table(f"{first.n:,} test records, chance {first.chance:.1%}, {first.visibility}", ("protocol", "features", "score", "95%"), rows)
