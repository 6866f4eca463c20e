"""``dpvision evaluate captioner``: evaluation of a captioner."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from dpvision.cli.output import FLAT, Reading, RunPath, table
from dpvision.cli.paths import check_captioner, check_store
from dpvision.cli.scores import Printing, emit_scores, names_of
from dpvision.eval.captions.settings import (
    Asking,
    CaptionTests,
    ChoiceFiles,
    Square,
    checked_controls,
    checked_fit,
)
from dpvision.eval.score import printed
from dpvision.eval.score_file import NOTHING_FITTED, check_out, merge_entries, write_scores
from dpvision.runs.folder import run_base

if TYPE_CHECKING:
    from dpvision.eval.captions.suite import ScoredOn


def evaluate_captioner(
    run: RunPath,
    store: Path | None = None,
    tests: Annotated[CaptionTests, FLAT] = CaptionTests(),
    files: Annotated[ChoiceFiles, FLAT] = ChoiceFiles(),
    against: str = "random,other",
    fit: str | None = None,
    out: Path | None = None,
    ema: bool = False,
    reading: Annotated[Reading, FLAT] = Reading(32),
    printing: Annotated[Printing, FLAT] = Printing(),
) -> None:
    """Evaluate a captioner: zero-shot classification, choice between true and false captions, and
    CIDEr of generated captions.

      dpvision evaluate captioner runs/cap --store stores/cifar10 --zero-shot cifar10
      dpvision evaluate captioner runs/cap --store stores/flickr8k-test --captions --order
      dpvision evaluate captioner runs/cap --scenes 2000 --sugarcrepe sugarcrepe.json --images
      val2017 --public

    docs/caption_measures.md has the protocols. Scores are written where `dpvision evaluate` writes
    them.

    Args:
        run: Run or checkpoint folder of a captioner; dpcap:FILE@vocab.txt, a file of DP-Cap with
            BERT's vocabulary; or hf:DIR, a CLIP or SigLIP model with its tokenizer.
        store: Store with labels or captions, disjoint from the training images.
        tests: The tests.
        files: Files of benchmarks.
        against: Baselines: random (untrained weights), other (shown another image), both with a
            comma, or none.
        fit: How to make images square: squash (the default for captioners) or crop. The default for
            hf:DIR is the folder's own preprocessing.
        out: Also write all scores here. Scores on private images need a folder named confidential
            in the path.
        ema: Use the averaged weights.
        reading: How images are read.
        printing: How scores are printed.
    """
    reading.check("evaluate")
    controls = checked_controls([] if against.strip() == "none" else names_of(against))
    square: Square = "squash" if fit is None else checked_fit(fit)
    tests.check(store is not None)
    if not str(run).startswith("hf:"):
        check_captioner(run)
    check_store(store)
    import torch

    from dpvision.data.open import open_store
    from dpvision.eval.captions.suite import make_tests, score_captioner
    from dpvision.eval.captions.two_tower import TwoTower, open_asker

    ready = open_asker(run, ema=ema)  # fail fast if the run is not a captioner
    if fit is None and isinstance(ready, TwoTower):
        square = "own preprocessing"
    opened = open_store(store) if store is not None else None
    made, notes = make_tests(ready, tests, files, opened)
    if out is not None:
        check_out(out, ready.confidential or any(test.visibility == "private" for test in made))
    with Console(stderr=True).status("reading") as status:
        how = Asking(
            square, "other" in controls, reading.batch_size, reading.workers, status.update
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = score_captioner(
            run, made, how, untrained="random" in controls, ema=ema, device=device
        )
    written: list[Path] = []
    for part in found:
        stores = {"train_data": NOTHING_FITTED, "test_data": part.test_data}
        if run_base(Path(run)) is not None:
            written += write_scores(run, list(part.scores), **stores)
        if out is not None:
            written.append(merge_entries(out, [score.to_dict() | stores for score in part.scores]))
    text = "\n\n".join([captioner_table(part) for part in found] + notes)
    entries = [
        score.to_dict() | {"test_data": part.test_data} for part in found for score in part.scores
    ]
    scores = [score for part in found for score in part.scores]
    emit_scores(scores, text, written, printing, scores=entries, notes=notes)


def captioner_table(part: "ScoredOn") -> str:
    """Return the scores of one test as a table that includes chance."""
    rows = [
        (
            s.protocol,
            s.name,
            printed(s.protocol, s.value),
            printed(s.protocol, s.low, s.high),
            printed(s.protocol, s.chance),
            s.n,
        )
        for s in part.scores
    ]
    return table(
        f"{part.test_data}, {part.scores[0].visibility}",
        ("protocol", "who", "score", "95%", "chance", "n"),
        rows,
    )
