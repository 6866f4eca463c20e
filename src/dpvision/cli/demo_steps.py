"""The steps of ``dpvision demo`` on procedural scenes: a private classifier, then a private
captioner from a public warm start.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpvision.adapt.session import adapt, new_head_session
from dpvision.cli.output import emit
from dpvision.cli.recipe import get_recipe
from dpvision.cli.run_args import STOPPED
from dpvision.config import CaptionerConfig, HeadConfig, RunConfig
from dpvision.data.caption_text import scene_captions
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import train_tokenizer
from dpvision.errors import DataError
from dpvision.eval.captions.label_sets import load_label_set
from dpvision.eval.captions.open_captioner import open_captioner
from dpvision.eval.captions.zero_shot import ZeroShotSettings, zero_shot_scores
from dpvision.eval.probes.own_head import score_own_head
from dpvision.eval.score import Score
from dpvision.eval.score_file import NOTHING_FITTED, write_scores
from dpvision.privacy.printed import up, up_delta
from dpvision.report.gallery import gallery_of_run
from dpvision.report.learned import PARENT
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import make_report
from dpvision.runs.spent import charge_words
from dpvision.synthetic.scenes import ATTRIBUTES, Scene
from dpvision.train.loop import fit
from dpvision.train.start import new_session

LABEL = "colour"
CLASSIFIER_EPSILON = 2.0
PUBLIC_COLOURS = ("red", "yellow", "green", "cyan", "black")
"""The colours that captions of public scenes name; those of private scenes name all ten."""
# Scene numbers: private parts, warm start and test are different scenes of the same kind; the
# tokenizer's sentences begin at 0.
_FIRST_LABELLED, _FIRST_PUBLIC, _FIRST_TEST, _FIRST_CAPTIONED = (
    10_000_000,
    20_000_000,
    30_000_000,
    40_000_000,
)
_NUM_LABELLED, _NUM_PUBLIC, _NUM_TEST, _NUM_SENTENCES = 3000, 6000, 1000, 4000
_GALLERY = 6


@dataclass(frozen=True)
class Place:
    """Where a demo keeps its files, and where it says what it does."""

    stores: Path
    runs: Path
    json: bool

    def say(self, text: str) -> None:
        """Print a line for people."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def free_run(self, name: str) -> Path:
        """A run folder that is not there yet: NAME, or NAME-2 and so on."""
        number = 1
        while (root := self.runs / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        return root


def run_demo(place: Place) -> None:
    """What ``dpvision demo`` does without --data."""
    start = time.monotonic()
    captioner = get_recipe("demo")
    size = captioner.model.encoder.image_size
    place.say("1/4  Images: procedural scenes, some of which play the private ones")
    labelled = _scenes(place, "demo-labelled", _NUM_LABELLED, _FIRST_LABELLED, size, public=False)
    captioned = _scenes(
        place,
        "demo-captioned",
        captioner.privacy.dataset_size,
        _FIRST_CAPTIONED,
        size,
        public=False,
    )
    plain = _scenes(
        place, "demo-public", _NUM_PUBLIC, _FIRST_PUBLIC, size, public=True, keep=_named_in_public
    )
    test = _scenes(place, "demo-test", _NUM_TEST, _FIRST_TEST, size, public=True)
    unnamed = _scenes(
        place,
        "demo-test-new-colours",
        _NUM_TEST,
        _FIRST_TEST,
        size,
        public=True,
        keep=_named_in_private_only,
    )
    place.say(
        f"2/4  A private classifier: the {LABEL} of the largest object, from non-private features"
    )
    head, found = fit_classifier(place, labelled, _NUM_LABELLED, len(ATTRIBUTES[LABEL]), test)
    page = make_report(head, test.path, store_dir=labelled.path, tuning="public")
    make_operator_page(head, labelled.path)
    place.say(f"     {_said(found[0])}")
    place.say(
        "3/4  A captioner: a public warm start that knows five colours, then private captions "
        "that name all ten"
    )
    run, learned, epsilon = _captioner(place, captioner, plain, captioned, [test, unnamed])
    for (after, before), store in zip(learned, (test, unnamed), strict=True):
        place.say(f"     {store.path.name}: {_said(after)}")
        place.say(f"     {_compared(after, before)}")
    place.say("4/4  Report")
    gallery = gallery_of_run(run.private, test.path, [run.start], count=_GALLERY).public_part()
    captions = make_report(
        run.private, test.path, store_dir=captioned.path, tuning="public", gallery=gallery
    )
    make_operator_page(run.private, captioned.path)
    minutes = (time.monotonic() - start) / 60
    result = {
        "classifier": _result(head, CLASSIFIER_EPSILON, page, found),
        "captioner": _result(
            run.private, epsilon, captions, [score for pair in learned for score in pair]
        ),
        "seconds": 60 * minutes,
    }
    text = f"Done in {minutes:.1f} minutes. Open in a browser:\n  {page}\n  {captions}\n"
    text += f"Then: dpvision verify {head / 'statement.json'} --run {head} --store {labelled.path}"
    emit(result, place.json, text)


def _result(
    root: Path, epsilon: float | None, page: Path, scores: Sequence[Score]
) -> dict[str, Any]:
    return {
        "run": str(root),
        "epsilon": epsilon,
        "report": str(page),
        "scores": [score.to_dict() for score in scores],
    }


def fit_classifier(
    place: Place, store: Store, dataset_size: int, num_classes: int, test: Store
) -> tuple[Path, list[Score]]:
    """A private head on features that need no training, and its scores on ``test``, written where
    they may be.
    """
    config = get_recipe("transfer.auto")
    assert isinstance(config.model, HeadConfig)
    config = replace(
        config,
        model=replace(config.model, num_classes=num_classes),
        data=replace(config.data, store=str(store.path)),
        privacy=replace(
            config.privacy,
            dataset_size=dataset_size,
            expected_batch_size=dataset_size,
            target_epsilon=CLASSIFIER_EPSILON,
        ),
    )
    root = place.free_run("demo-classifier")
    with new_head_session(config, root) as session:
        plan = session.plan
        charged = charge_words(store, plan, besides=[session.run.folder.run_id])[1]
        place.say(
            f"     {dataset_size:,} private images, {num_classes} classes, epsilon "
            f"{up(plan.epsilon)} at delta {up_delta(plan.delta)}. {charged}"
        )
        adapt(session)
    scores = score_own_head(root, test)
    write_scores(root, scores, train_data=NOTHING_FITTED, test_data=test.path.name)
    return root, scores


@dataclass(frozen=True)
class _Runs:
    start: Path
    private: Path


def _captioner(
    place: Place, config: RunConfig, plain: Store, captioned: Store, tests: Sequence[Store]
) -> tuple[_Runs, list[tuple[Score, Score]], float | None]:
    """The public warm start and the private run from it; of each test the private captioner's score
    and its parent's; epsilon.
    """
    words = _tokenizer(place.stores / "demo-words.json", config)
    runs = _Runs(place.free_run("demo-start"), place.free_run("demo"))
    start = get_recipe("demo.start")
    size = replace(start.privacy, dataset_size=plain.num_records)
    _train(
        replace(
            start, privacy=size, data=replace(start.data, store=str(plain.path), tokenizer=words)
        ),
        runs.start,
        place,
    )
    config = replace(
        config,
        data=replace(config.data, store=str(captioned.path), tokenizer=words),
        init_from=str(runs.start),
    )
    epsilon = _train(config, runs.private, place)
    askers = [open_captioner(runs.private), replace(open_captioner(runs.start), name=PARENT)]
    asked = ZeroShotSettings(("trie",), prompt="a", match_article=True)
    found = []
    for test in tests:
        after, before = zero_shot_scores(askers, test, load_label_set("store", test), asked)
        write_scores(
            runs.private, [after, before], train_data=NOTHING_FITTED, test_data=test.path.name
        )
        found.append((after, before))
    return runs, found, epsilon


def _train(config: RunConfig, root: Path, place: Place) -> float | None:
    """A run from its first step to its last; gives epsilon. Ctrl-C saves, and ends the demo."""
    with new_session(config, root) as session:
        plan = session.plan
        what = (
            f"epsilon {up(plan.epsilon)} at delta {up_delta(plan.delta)}, "
            if plan.epsilon is not None
            else "public images, "
        )
        place.say(
            f"     {what}{plan.steps} steps of {plan.expected_batch_size:,.0f} images (Ctrl-C "
            "saves and stops)"
        )
        if not fit(session):
            place.say(
                f"     Stopped and saved: dpvision train {config.recipe} --name {root.name} "
                f"--runs {root.parent} --resume goes on."
            )
            sys.exit(STOPPED)
    return plan.epsilon


def _tokenizer(path: Path, config: RunConfig) -> str:
    """A tokenizer from the sentences of scenes, which are public: each of their words is one
    token.
    """
    assert isinstance(config.model, CaptionerConfig)
    if not path.exists():
        train_tokenizer(scene_captions(_NUM_SENTENCES), config.model.vocab_size).save(path)
    return str(path)


def _said(score: Score) -> str:
    interval = f"{score.low:.1%} to {score.high:.1%}"
    return (
        f"{score.value:.1%} of {score.n:,} {score.visibility} images right ({interval}); the "
        f"most frequent class: {score.chance:.1%}"
    )


def _compared(after: Score, before: Score) -> str:
    """What private training changed, by the intervals."""
    words = (
        "ahead of"
        if after.low > before.high
        else "behind"
        if after.high < before.low
        else "not to be told from"
    )
    return (
        f"That is {words} its public warm start: {before.value:.1%} ({before.low:.1%} to "
        f"{before.high:.1%})."
    )


def caption_of(scene: Scene) -> str:
    """What the demo's captions say of a scene: "a red disc" for the largest object."""
    article = "an" if scene.main.colour[0] in "aeiou" else "a"
    return f"{article} {scene.main.colour} {scene.main.shape}"


def _any(scene: Scene) -> bool:
    return True


def _named_in_public(scene: Scene) -> bool:
    return scene.main.colour in PUBLIC_COLOURS


def _named_in_private_only(scene: Scene) -> bool:
    return scene.main.colour not in PUBLIC_COLOURS


def _scenes(
    place: Place,
    name: str,
    num: int,
    first: int,
    size: int,
    *,
    public: bool,
    keep: Callable[[Scene], bool] | None = None,
) -> Store:
    """Scenes with the colour as label and a short caption of the largest object; those of ``num``
    that ``keep`` keeps.
    """
    folder = place.stores / name
    if folder.exists():
        store = open_store(folder)
        if (
            keep is None and abs(store.num_records - num) > num // 100
        ):  # identical scenes are one record
            raise DataError(
                f"demo: {folder} holds {store.num_records} records; expected {num} scenes. "
                "Remove it, or use another --stores."
            )
        return store
    return write_scenes(
        folder,
        num,
        size,
        first=first,
        label=LABEL,
        caption_of=caption_of,
        keep=keep or _any,
        public=public,
    )
