"""The whole way in a few minutes, with the code of a real run: ``on_scenes`` trains a private
classifier and a private captioner on procedural scenes, ``on_images`` a classifier on a folder of
images.

    demo.on_scenes(demo.Place(Path("stores"), Path("runs"), say=print))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpvision.adapt.session import adapt, new_head_session
from dpvision.config import CaptionerConfig, HeadConfig, RunConfig
from dpvision.data.declared import rounded_up
from dpvision.data.import_labels import LabelRule, read_classes
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import scene_captions, train_tokenizer
from dpvision.errors import OPERATOR_ONLY, DataError, RunStopped
from dpvision.eval.captions.label_sets import load_label_set
from dpvision.eval.captions.open_captioner import open_captioner
from dpvision.eval.captions.zero_shot import ZeroShotSettings, zero_shot_scores
from dpvision.eval.probes.own_head import score_own_head
from dpvision.eval.score import Score
from dpvision.eval.score_file import NOTHING_FITTED, note_scored, write_scores
from dpvision.privacy.printed import up, up_delta
from dpvision.recipes import get_recipe
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
_TRAIN_SHARE = 0.8


@dataclass(frozen=True)
class Place:
    """Where a demo keeps its files, and who hears what it does."""

    stores: Path
    runs: Path
    say: Callable[[str], None] = lambda line: None
    """Called with each line of progress."""

    def free_run(self, name: str) -> Path:
        """Return a run folder that is not there yet: NAME, or NAME-2 and so on."""
        number = 1
        while (root := self.runs / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        return root


@dataclass(frozen=True)
class Finished:
    """A finished run of the demo."""

    run: Path
    store: Path
    """Of the private images."""
    epsilon: float | None
    scores: Sequence[Score]
    """On private images they are confidential."""
    report: Path
    operator_page: Path
    """Under the run's confidential/ folder."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dict with the public scores, ready for JSON."""
        public = [score.to_dict() for score in self.scores if score.visibility == "public"]
        return {
            "run": str(self.run),
            "epsilon": self.epsilon,
            "report": str(self.report),
            "scores": public,
        }


def on_scenes(place: Place) -> tuple[Finished, Finished]:
    """Train and report a private classifier and a private captioner on scenes that play the private
    images.

    Raises:
        RunStopped: by a signal; the run in progress is saved.
        DataError: a store of the demo's name holds other scenes.
    """
    config = get_recipe("demo")
    size = config.model.encoder.image_size
    place.say("1/4  Images: procedural scenes, some of which play the private ones")
    labelled = _scenes(place, "demo-labelled", _NUM_LABELLED, _FIRST_LABELLED, size, public=False)
    captioned = _scenes(
        place, "demo-captioned", config.privacy.dataset_size, _FIRST_CAPTIONED, size, public=False
    )
    # Public captions name five colours; one test asks for all ten, the other for the five new ones.
    plain = _scenes(place, "demo-public", _NUM_PUBLIC, _FIRST_PUBLIC, size, keep=_in_public)
    tests = (
        _scenes(place, "demo-test", _NUM_TEST, _FIRST_TEST, size),
        _scenes(
            place,
            "demo-test-new-colours",
            _NUM_TEST,
            _FIRST_TEST,
            size,
            keep=lambda scene: not _in_public(scene),
        ),
    )
    place.say(
        f"2/4  A private classifier: the {LABEL} of the largest object, from non-private features"
    )
    classifier = _classifier(place, labelled, _NUM_LABELLED, len(ATTRIBUTES[LABEL]), tests[0])
    place.say(f"     {_said(classifier.scores[0])}")
    place.say(
        "3/4  A captioner: a public warm start that knows five colours, then private captions "
        "that name all ten"
    )
    captioner = _captioner(place, config, plain, captioned, tests)
    return classifier, captioner


def on_images(data: Path, classes: Path, place: Place) -> Finished:
    """Train and report a private classifier on four fifths of a folder's images, and score it on
    the rest; people are not cut in two.

    Args:
        data: folder of images, parquet file or tar files; imported as private.
        classes: file with the names of the classes, one a line.

    Raises:
        DataError: the images cannot be imported, or were imported with other classes.
    """
    place.say("1/2  Images")
    declared = read_classes(classes)
    names = tuple(declared.values() if isinstance(declared, dict) else declared)
    folder = place.stores / f"demo-{data.resolve().stem}"
    store = (
        open_store(folder)
        if folder.exists()
        else import_source(data, folder, labels=LabelRule(classes=declared))
    )
    if tuple(store.label_names or ()) != names:
        raise DataError(
            f"demo: {folder} was imported with other classes; expected those of --classes. "
            "Remove it, or use another --stores."
        )
    place.say(f"     {OPERATOR_ONLY}{store.num_records:,} private records in {store.path}")
    place.say(
        "2/2  A private classifier, from non-private features; a fifth of the images is held out"
    )
    one, two = (store.path.with_name(f"{store.path.name}-{part}") for part in ("train", "test"))
    train, test = (
        (open_store(one), open_store(two))
        if one.exists() and two.exists()
        else split_store(store.path, one, two, _TRAIN_SHARE)
    )
    place.say(
        "     Each repetition of this command is charged to these images again; dpvision ledger "
        f"{train.path} shows the total."
    )
    return _classifier(place, train, rounded_up(train.num_records), len(names), test)


def _classifier(
    place: Place, store: Store, dataset_size: int, num_classes: int, test: Store
) -> Finished:
    """Train a private head on features that need no training; score it on ``test``."""
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
    note_scored(root, test)
    scores = score_own_head(root, test)
    write_scores(root, scores, train_data=NOTHING_FITTED, test_data=test.path.name)
    public = test.results_visibility == "public"
    report = make_report(
        root,
        test.path if public else None,
        store_dir=store.path,
        tuning="public" if public else "none",
    )
    operator_page = make_operator_page(root, store.path, test_store=None if public else test.path)
    return Finished(root, store.path, CLASSIFIER_EPSILON, scores, report, operator_page)


def _captioner(
    place: Place, config: RunConfig, plain: Store, captioned: Store, tests: Sequence[Store]
) -> Finished:
    """Train a captioner on public scenes, then on private ones; score both on ``tests``."""
    assert isinstance(config.model, CaptionerConfig)
    words = place.stores / "demo-words.json"
    if not words.exists():  # sentences of scenes are public; each of their words is one token
        train_tokenizer(scene_captions(_NUM_SENTENCES), config.model.vocab_size).save(words)
    parent, root = place.free_run("demo-start"), place.free_run("demo")
    start = get_recipe("demo.start")
    _train(
        replace(
            start,
            privacy=replace(start.privacy, dataset_size=plain.num_records),
            data=replace(start.data, store=str(plain.path), tokenizer=str(words)),
        ),
        parent,
        place,
    )
    data = replace(config.data, store=str(captioned.path), tokenizer=str(words))
    epsilon = _train(replace(config, data=data, init_from=str(parent)), root, place)
    askers = [open_captioner(root), replace(open_captioner(parent), name=PARENT)]
    asked = ZeroShotSettings(("trie",), prompt="a", match_article=True)
    scores = []
    for test in tests:
        after, before = zero_shot_scores(askers, test, load_label_set("store", test), asked)
        write_scores(root, [after, before], train_data=NOTHING_FITTED, test_data=test.path.name)
        place.say(f"     {test.path.name}: {_said(after)}")
        place.say(f"     {_compared(after, before)}")
        scores += [after, before]
    place.say("4/4  Report")
    gallery = gallery_of_run(root, tests[0].path, [parent], count=_GALLERY).public_part()
    report = make_report(
        root, tests[0].path, store_dir=captioned.path, tuning="public", gallery=gallery
    )
    operator_page = make_operator_page(root, captioned.path)
    return Finished(root, captioned.path, epsilon, scores, report, operator_page)


def _train(config: RunConfig, root: Path, place: Place) -> float | None:
    """Train a run from its first step to its last, and return its epsilon."""
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
            raise RunStopped(
                f"     Stopped and saved: dpvision train {config.recipe} --name {root.name} "
                f"--runs {root.parent} --resume goes on."
            )
    return plan.epsilon


def _said(score: Score) -> str:
    interval = f"{score.low:.1%} to {score.high:.1%}"
    return (
        f"{score.value:.1%} of {score.n:,} {score.visibility} images right ({interval}); the "
        f"most frequent class: {score.chance:.1%}"
    )


def _compared(after: Score, before: Score) -> str:
    """Return what private training changed, by the intervals."""
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
    """Return the demo's caption of a scene: "a red disc" for the largest object."""
    article = "an" if scene.main.colour[0] in "aeiou" else "a"
    return f"{article} {scene.main.colour} {scene.main.shape}"


def _in_public(scene: Scene) -> bool:
    return scene.main.colour in PUBLIC_COLOURS


def _scenes(
    place: Place,
    name: str,
    num: int,
    first: int,
    size: int,
    *,
    public: bool = True,
    keep: Callable[[Scene], bool] | None = None,
) -> Store:
    """Return a store of scenes with the colour as label and a short caption of the largest object:
    those of ``num`` that ``keep`` keeps.
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
        keep=keep or (lambda scene: True),
        public=public,
    )
