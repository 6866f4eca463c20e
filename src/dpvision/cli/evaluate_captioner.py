"""``dpvision evaluate captioner``: evaluation of a captioner."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from dpvision.cli.output import RunPath, table
from dpvision.cli.paths import check_run, check_store
from dpvision.cli.scores import FLAT, Printing, emit_scores, names_of
from dpvision.errors import ConfigError, DataError
from dpvision.eval.captions.settings import PROMPT, checked_controls, checked_fit
from dpvision.eval.score import Visibility, printed
from dpvision.eval.score_file import NOTHING_FITTED, check_out, merge_entries, write_scores
from dpvision.runs.folder import run_base

if TYPE_CHECKING:
    from dpvision.eval.captions.choice import ChoiceTest
    from dpvision.eval.captions.protocol import CaptionProtocol
    from dpvision.eval.captions.suite import ScoredOn

_PRINTING = Printing()


def evaluate_captioner(
    run: RunPath,
    store: Path | None = None,
    zero_shot: str | None = None,
    labels: Path | None = None,
    method: str = "trie,loss",
    prompt: str = PROMPT,
    match_article: bool = False,
    order: bool = False,
    captions: bool = False,
    beams: int | None = None,
    scenes: int | None = None,
    first_scene: int = 1_000_000_000,
    sugarcrepe: Path | None = None,
    negclip: Path | None = None,
    images: Path | None = None,
    aro: Path | None = None,
    aro_leave_out: Path | None = None,
    public: bool = False,
    allow_missing: bool = False,
    against: str = "random,other",
    fit: str = "squash",
    limit: int | None = None,
    out: Path | None = None,
    ema: bool = False,
    batch_size: int = 32,
    workers: int = 2,
    printing: Annotated[Printing, FLAT] = _PRINTING,
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
        run: Run or checkpoint folder of a captioner.
        store: Store with labels or captions, disjoint from the training images.
        zero_shot: Classify --store by this label set: store, cifar10, cifar100, or a file: one
            class per line, synonyms separated by commas, or JSON (docs/caption_measures.md).
        labels: For --zero-shot: file of sets of correct classes per image (ImageNet-ReaL's
            real.json; docs/evaluation.md).
        method: For --zero-shot: trie, loss or both.
        prompt: Text before the label.
        match_article: Use "an" before a, e, i, o, u if the prompt ends in "a".
        order: Run the order test on the captions of --store.
        captions: Score generated captions of --store by CIDEr.
        beams: Generate them by beam search of this width; if omitted, greedily.
        scenes: Run compositional tests on this many procedural scenes.
        first_scene: Number of the first scene; choose one beyond the training scenes.
        sugarcrepe: SugarCrepe's file or folder; its images are in --images.
        negclip: NegCLIP's negatives; their images are in --images.
        images: Folder of COCO images.
        aro: Folder with ARO's visual_genome_relation.json, visual_genome_attribution.json and
            images/.
        aro_leave_out: File of relations to leave out, one per line (ARO leaves out those that may
            hold both ways).
        public: The images of --sugarcrepe, --negclip and --aro need no protection.
        allow_missing: Leave out benchmark items whose image is missing, and record it in the
            score's name.
        against: Baselines: random (untrained weights), other (shown another image), both with a
            comma, or none.
        fit: How to make images square: squash or crop.
        limit: Maximum number of images from --store.
        out: Also write all scores here. Scores on private images need a folder named confidential
            in the path.
        ema: Use the averaged weights.
        batch_size: Images in one forward pass.
        workers: Threads that read images.
        printing: How scores are printed.
    """
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        if not value >= 1:
            raise ConfigError(
                f"evaluate: {name}={value}; expected at least 1. Omit it for the default."
            )
    controls = checked_controls([] if against.strip() == "none" else names_of(against))
    how_fit = checked_fit(fit)
    for asked_for, flag, what in (
        (order, "--order", "captions"),
        (captions, "--captions", "captions"),
        (zero_shot is not None, "--zero-shot", "labels"),
    ):
        if asked_for and store is None:
            raise ConfigError(
                f"evaluate: no store; expected images with {what} for {flag}. Give --store STORE."
            )
    if labels is not None and zero_shot is None:
        raise ConfigError(
            f"evaluate: labels={str(labels)!r} without --zero-shot; expected both. Give "
            "--zero-shot LABEL_SET."
        )
    check_run(run)
    check_store(store)
    import torch

    from dpvision.data.open import open_store
    from dpvision.eval.any_of_labels import load_any_of_labels
    from dpvision.eval.captions.cider_scores import Cider
    from dpvision.eval.captions.label_sets import load_label_set
    from dpvision.eval.captions.open_captioner import open_captioner
    from dpvision.eval.captions.order import order_test
    from dpvision.eval.captions.protocol import Asking
    from dpvision.eval.captions.scene_choices import scene_compositional
    from dpvision.eval.captions.suite import score_captioner
    from dpvision.eval.captions.zero_shot import ZeroShot, ZeroShotSettings, checked_methods
    from dpvision.models.generate import GenerateSettings

    ready = open_captioner(run, ema=ema)  # fail fast if the run is not a captioner
    opened = open_store(store) if store is not None else None
    visibility: Visibility = "public" if public else "private"
    tests, notes = (
        _benchmark_tests(
            sugarcrepe, negclip, images, aro, aro_leave_out, visibility, allow_missing
        ),
        list[str](),
    )
    if scenes is not None:
        tests.append(
            scene_compositional(
                range(first_scene, first_scene + _at_least_one(scenes)), ready.image_size
            )
        )
    if order and opened is not None:
        made = order_test(opened, limit=limit)
        tests.append(made.test)
        notes.append(
            f"order test: {made.left_out:,} captions left out (no shuffle differs), "
            f"{made.short_of_shuffles:,} with under four shuffles"
        )
    on_store: list[CaptionProtocol] = []
    if zero_shot is not None and opened is not None:
        classes = load_label_set(zero_shot, opened)
        any_of = (
            load_any_of_labels(labels, opened, len(classes.classes)) if labels is not None else None
        )
        asked = ZeroShotSettings(
            checked_methods(names_of(method)), prompt, match_article, limit=limit
        )
        on_store.append(ZeroShot(opened, classes, asked, any_of))
    if captions and opened is not None:
        on_store.append(
            Cider(
                opened,
                GenerateSettings() if beams is None else GenerateSettings("beam", beams=beams),
                limit,
            )
        )
    private = ready.confidential or any(test.images.visibility == "private" for test in tests)
    private = private or (
        len(on_store) > 0 and opened is not None and opened.results_visibility == "private"
    )
    if out is not None:
        check_out(out, private)
    with Console(stderr=True).status("reading") as status:
        how = Asking(how_fit, "other" in controls, batch_size, workers, status.update)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = score_captioner(
            run, [*on_store, *tests], how, untrained="random" in controls, ema=ema, device=device
        )
    written: list[Path] = []
    for part in found:
        if run_base(Path(run)) is not None:
            written += write_scores(
                run, list(part.scores), train_data=NOTHING_FITTED, test_data=part.test_data
            )
        if out is not None:
            stores = {"train_data": NOTHING_FITTED, "test_data": part.test_data}
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


def _benchmark_tests(
    sugarcrepe: Path | None,
    negclip: Path | None,
    images: Path | None,
    aro: Path | None,
    aro_leave_out: Path | None,
    visibility: Visibility,
    allow_missing: bool,
) -> "list[ChoiceTest]":
    from dpvision.eval.captions.aro import aro_tests
    from dpvision.eval.captions.sugarcrepe import negclip_test, sugarcrepe_test

    tests: list[ChoiceTest] = []
    for path, make, name in (
        (sugarcrepe, sugarcrepe_test, "sugarcrepe"),
        (negclip, negclip_test, "negclip"),
    ):
        if path is not None:
            if images is None:
                raise ConfigError(
                    f"evaluate: no folder of images; expected the COCO images of --{name}. Give "
                    "--images FOLDER."
                )
            tests.append(make(path, images, visibility=visibility, allow_missing=allow_missing))
    if aro is not None:
        leave_out = (
            frozenset(_lines(aro_leave_out)) if aro_leave_out is not None else frozenset[str]()
        )
        tests += aro_tests(
            aro, visibility=visibility, allow_missing=allow_missing, leave_out=leave_out
        )
    return tests


def _lines(path: Path) -> Sequence[str]:
    try:
        return [
            line.strip()
            for line in path.read_text(encoding="utf-8-sig").splitlines()
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"ARO: {path}: {error}; expected a text file with one relation per line. Give "
            "--aro-leave-out FILE."
        ) from None


def _at_least_one(scenes: int) -> int:
    if not scenes >= 1:
        raise ConfigError(f"evaluate: scenes={scenes}; expected at least 1. Use 2000.")
    return scenes
