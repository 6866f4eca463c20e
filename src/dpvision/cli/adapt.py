"""``dpvision adapt``: train a private classifier on a public encoder."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro
from rich.console import Console

from dpvision.cli.head_text import head_text
from dpvision.cli.output import CONFIG, RecipeName, emit, may_show, private_scores
from dpvision.cli.paths import check_store
from dpvision.cli.recipe import (
    get_recipe,
    recipe_lines,
    spelled_out,
    typed_privacy,
    typed_settings,
    untyped_delta,
    with_budget,
    with_values,
)
from dpvision.cli.run_args import (
    STOPPED,
    RunArgs,
    Where,
    announce,
    check_places,
    lost_words,
    resume_words,
    resumed_hardware,
    saved_config,
    spent,
)
from dpvision.cli.train import TrainArgs, train
from dpvision.config import ClassifierConfig, HeadConfig, RunConfig
from dpvision.config.head_presets import PRESETS, HeadName, with_candidates, with_head
from dpvision.errors import OPERATOR_ONLY, ConfigError

if TYPE_CHECKING:
    from dpvision.adapt.prepare import Prepared
    from dpvision.adapt.session import HeadSession
    from dpvision.eval.score import Score

_DOC = """Train a private classifier on labelled private images, from a public encoder.

By default the encoder is frozen: each image's features are computed once and cached in the store's folder, and a linear head is trained
on them with differential privacy in about a minute. You declare three public numbers: records, classes and epsilon.

  dpvision data import IMAGES stores/all --classes classes.txt
  dpvision data split stores/all stores/mine stores/test
  dpvision adapt --data stores/mine --encoder patches+scattering --num-classes 10 --dataset-size 20000 --epsilon 1 --dry-run
  dpvision adapt --data stores/mine --encoder patches+scattering --num-classes 10 --dataset-size 20000 --epsilon 1 --name first
  dpvision evaluate runs/first --test stores/test
  dpvision report runs/first

An ENCODER is a dpvision run folder, timm:NAME (weights in timm's cache) or timm:NAME@FILE, torchvision:NAME@FILE, vip:FILE, mae:FILE,
simclr:FILE, tan:FILE, or one that needs no file: patches+scattering (the default), patches, scattering, hog, pixels. Nothing is downloaded.

--head auto (the default) chooses a head by the declared numbers and prints the reason; docs/heads.md has the rules. To train the network
itself, name a recipe that does (dpvision adapt --help lists them): it runs as `dpvision train` does, starting from --encoder's weights.
--non-private trains the same head without noise, for comparison; its results are confidential if the images are private."""

_Head = Literal["auto", "one_step", "many_steps", "least_squares", "feature_covariance", "prototypes"]


@dataclass(frozen=True)
class Shorts:
    """Short options for settings, applied by ``with_shorts``."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="STORE")] = None
    """Store with labels, made by `dpvision data import`."""
    encoder: Annotated[str | None, tyro.conf.arg(metavar="ENCODER")] = None
    """Public encoder; patches+scattering, which needs no file, if omitted."""
    num_classes: int | None = None
    """Declared number of classes K: labels are 0 to K - 1."""
    dataset_size: int | None = None
    """Declared number of records."""
    epsilon: float | None = None
    """Epsilon of the whole head; 1 if omitted. Short for --privacy.target-epsilon, or for --privacy.target-unit-epsilon if people are
    declared (--privacy.num-units)."""


@dataclass(frozen=True)
class _What(Shorts):
    recipe: RecipeName = "transfer.auto"
    """Name of a recipe (dpvision adapt --help lists them)."""
    head: _Head | None = None
    """Kind of head; short for the recipe transfer.HEAD."""
    select: str | None = None
    """Choose among these heads (HEAD,HEAD,...) by a private score, within epsilon: each head gets 2.3 to 2.5 times
    the noise (docs/selection.md)."""
    test: Annotated[Path | None, tyro.conf.arg(metavar="STORE")] = None
    """Labelled store to score the result on. Scores are public only if its images are."""


@dataclass(frozen=True)
class AdaptArgs(RunArgs, _What):
    """Arguments of `dpvision adapt`."""

    resume: bool = False
    """Continue a stopped run with its own settings, the releases left, and new secret keys."""
    dry_run: bool = False
    """Print the plan, run all checks and stop: no features are computed, nothing is charged."""


@dataclass(frozen=True)
class Early(Where):
    """Options that determine the defaults of other settings."""

    head: str | None = None
    select: str | None = None
    dataset_size: int | None = None
    resume: bool = False
    privacy: "_EarlyPrivacy" = field(default_factory=lambda: _EarlyPrivacy())


@dataclass(frozen=True)
class _EarlyPrivacy:
    guarantee: str | None = None
    dataset_size: int | None = None
    num_units: int | None = None
    sampling_unit: str | None = None


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    if not argv:
        print(f"usage: dpvision adapt [RECIPE] --data STORE [--encoder ENCODER] --num-classes K --dataset-size N --epsilon E\n\n{_DOC}")
        sys.exit(2)
    argv = spelled_out(argv)
    asks = any(a in ("-h", "--help") for a in argv)
    recipe = argv[0] if not argv[0].startswith("-") else None
    early = Early() if asks else tyro.cli(Early, args=[*argv[recipe is not None :]], return_unknown_args=True, config=CONFIG)[0]
    if recipe is not None and early.head is not None and recipe != f"transfer.{early.head}":
        raise ConfigError(f"adapt: recipe {recipe!r} and --head {early.head}; expected one of the two. Drop one.")
    if early.select is not None and (early.head or recipe or "transfer.auto") not in ("auto", "transfer.auto"):
        raise ConfigError(f"adapt: --select {early.select} with {early.head or recipe}; expected one of the two. Drop one.")
    recipe = recipe or _recipe(early)
    default = AdaptArgs(recipe=recipe, config=default_config(recipe, early, typed_privacy(argv)))
    rest = list(argv) if not argv[0].startswith("-") else [recipe, *argv]
    args = tyro.cli(AdaptArgs, prog="dpvision adapt", description=_DOC + _recipes(asks), args=rest, default=default, config=CONFIG)
    config = with_shorts(args, args.config)
    if not args.resume and (reason := untyped_delta(get_recipe(recipe).privacy, config.privacy, typed_privacy(argv))):
        raise ConfigError(reason)
    if not isinstance(config.model, HeadConfig):
        _train(args, config)
        return
    if args.resume:
        _resume(args, config, default.config)
        return
    check_places(args.root(recipe), config, dry_run=args.dry_run)
    check_store(args.test)
    from dpvision.adapt.prepare import prepare, with_enough_steps

    made = prepare(config)
    if config.model.head == "auto" and not config.model.candidates:
        # The head's steps and optimizer become the defaults; typed settings stay.
        assert made.model.head != "auto"
        chosen = with_head(config, made.model.head, made.model.reason)
        config = with_values(chosen, config, typed_settings(argv))
        if config != chosen or "steps" in typed_privacy(argv):
            made = prepare(config, encoder=made.encoder)
    longer = with_enough_steps(config, made.encoder, made.plan)
    if longer.privacy.steps != made.plan.steps and "steps" not in typed_privacy(argv):
        made = prepare(longer, encoder=made.encoder)
    adapt_new(args, made)


def adapt_new(args: AdaptArgs, made: "Prepared") -> None:
    from dpvision.adapt.session import new_head_session
    from dpvision.runs.lineage import runs_on

    root = args.root(args.recipe)
    _check_test(args, made.config)
    text = head_text(made)
    if args.dry_run:
        result = {"dry_run": True, **made.plan.to_dict(), "store_visibility": made.store.visibility}
        result |= {
            "operator_only": {"num_records": len(made.row_N), **({} if made.people is None else {"num_people": len(made.label)})},
            "head": made.model.head,
            "candidates": made.model.candidates,
            "reason": made.model.reason,
            "feature_width": made.model.encoder.width,
            "total": spent(made.plan, made.plan.steps, runs_on(made.lineage, made.store.store_id))[0],
        }
        emit(result, args.json, f"{text}\nDry run: every check passed, no features were computed, nothing was charged.")
        return
    args.say(text)
    with new_head_session(made, root) as session:
        _finish(args, session, root)


def _resume(args: AdaptArgs, config: RunConfig, saved: RunConfig) -> None:
    from dpvision.adapt.session import resumed_head_session

    root = args.root(args.recipe)
    if config.data.store is None:
        config = replace(config, data=replace(config.data, store=saved.data.store))
    with resumed_head_session(root, resumed_hardware("adapt", root, config, saved)) as session:
        _check_test(args, session.config)
        args.say(head_text(session.prepared))
        announce(resume_words(session.plan, session.charged_before, session.updates, session.updates > 0, "releases"))
        _finish(args, session, root)


def _finish(args: AdaptArgs, session: "HeadSession", root: Path) -> None:
    """Train, save and score the head, and print what was executed."""
    from dpvision.adapt.session import adapt
    from dpvision.checkpoint import find_checkpoint, read_manifest
    from dpvision.cli.next_steps import after_run
    from dpvision.runs.lineage import runs_on

    made, plan = session.prepared, session.plan
    if not session.finished:
        with _progress_line(args, made) as (features, step):
            adapt(session, progress=features, on_step=step)
    steps, complete = session.run.ledger.steps, session.run.ledger.steps == plan.steps
    behind = runs_on(made.lineage, made.store.store_id)
    cost, said = spent(plan, steps, behind)
    scores = _score(args, root)
    chosen = read_manifest(find_checkpoint(root)).get("chosen")
    lines = [f"{'Finished' if complete else 'Stopped'} after {steps} of {plan.steps} releases: {said}. Run folder: {root}"]
    if not complete:
        more = f"dpvision adapt --resume --runs {root.parent} --name {root.name}" if not session.finished else "start a new run"
        lines.append(f"The head of these releases is saved. The others were not made, but epsilon counts them. To use them: {more}")
    if chosen is not None:
        lines.append(f"Chosen: {chosen['candidate']}; its noisy score is {chosen['score']:.1%} of the records correct.")
    lines += lost_words(session.lost, "releases")
    if scores:
        lines.append(_scores_text(args, scores, root))
    lines += after_run(root, made.store, made.config, released=session.run.folder.base == root, scored=bool(scores))
    lines.append(f"In Python: dpvision.load_classifier({str(root)!r})")
    result: dict[str, Any] = {
        "run": str(root), "complete": complete, "steps": steps,
        "head": chosen["candidate"] if chosen else made.model.head,
        "reason": made.model.reason, "chosen": chosen, **cost, "guarantee": plan.guarantee,
        "scores": [score.to_dict() for score in scores],
    }  # fmt: skip
    emit(result, args.json, "\n".join(lines))
    if not complete:
        sys.exit(STOPPED)


def _scores_text(args: AdaptArgs, scores: "list[Score]", root: Path) -> str:
    """The scores; private ones for the operator only."""
    from dpvision.cli.scores import scores_table

    if all(score.visibility == "public" for score in scores):
        return scores_table(scores)
    return private_scores(scores_table(scores), [str(root / "confidential" / "scores.json")], args.show_confidential)


@contextlib.contextmanager
def _progress_line(args: AdaptArgs, made: "Prepared") -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show progress of the features and the steps; if the features resume an earlier start, print a line that stays."""
    console, called, total = Console(stderr=True, quiet=args.quiet), False, len(made.row_N)
    private = made.store.visibility == "private"
    label = OPERATOR_ONLY if private else ""
    with console.status("reading images") as status:

        def show(done: int) -> None:
            nonlocal called
            if done and not called:
                shown = f"{label}features: going on at {done:,} of {total:,} images."
                may = may_show(private, args.show_confidential)
                console.print(shown if may else "Features: going on where they stopped.", highlight=False)
            called = True
            status.update(f"{label}features: {done:,} of {total:,} images (once: they are kept)")

        yield show, lambda steps: status.update(f"step {steps} of {made.plan.steps}")


def _check_test(args: AdaptArgs, config: RunConfig) -> None:
    """Refuse a test store that cannot be scored, before the budget is spent."""
    from dpvision.data.open import open_store
    from dpvision.eval.probes.own_head import scorable

    if args.test is not None:
        scorable(config, open_store(args.test))


def _score(args: AdaptArgs, root: Path) -> "list[Score]":
    from dpvision.data.open import open_store
    from dpvision.eval.probes.own_head import score_own_head
    from dpvision.eval.score_file import NOTHING_FITTED, write_scores

    if args.test is None:
        return []
    store = open_store(args.test)
    with Console(stderr=True, quiet=args.quiet).status("test images") as status:
        scores = score_own_head(root, store, progress=lambda n: status.update(f"test images: {n:,} of {store.num_records:,}"))
    write_scores(root, scores, train_data=NOTHING_FITTED, test_data=args.test.name)
    return scores


def _train(args: AdaptArgs, config: RunConfig) -> None:
    """Run a recipe that trains the network, as ``dpvision train`` does."""
    if not isinstance(config.model, ClassifierConfig):
        raise ConfigError(
            f"adapt: {args.recipe} trains a {config.model.kind!r}; expected a classifier or a head. Use `dpvision train {args.recipe}`."
        )
    root = args.root(args.recipe)
    _check_test(args, config)
    train(TrainArgs(**{f.name: getattr(args, f.name) for f in fields(TrainArgs)} | {"config": config}))
    if args.test is not None and not args.dry_run and int(os.environ.get("RANK", "0")) == 0:
        scores = _score(args, root)
        if not args.json:
            print(_scores_text(args, scores, root))


def _recipe(early: Early) -> str:
    """Return the default recipe: the head's, or the run's with --resume and --name."""
    from dpvision.runs.folder import read_run, run_base

    if early.resume and early.name and not early.head and run_base(root := early.runs / early.name) is not None:
        return read_run(root)[1].recipe or "transfer.auto"
    return f"transfer.{early.head or 'auto'}"


def with_shorts(args: Shorts, config: RunConfig) -> RunConfig:
    """Return the config with the short options applied."""
    privacy: dict[str, Any] = {}
    if args.epsilon is not None:
        if config.privacy.guarantee == "none":
            raise ConfigError(f"adapt: --epsilon {args.epsilon} with --non-private; expected one of the two. Drop --epsilon.")
        if config.privacy.noise_multiplier is not None:
            raise ConfigError(
                "adapt: --epsilon with --privacy.noise-multiplier; expected only one, since it determines the other. Drop one."
            )
        privacy |= {"target_epsilon": None, "target_unit_epsilon": None}
        privacy |= {"target_epsilon" if config.privacy.num_units is None else "target_unit_epsilon": args.epsilon}
    if args.dataset_size is not None:
        privacy["dataset_size"] = args.dataset_size
        if config.privacy.sampling == "full_batch" and config.privacy.sampling_unit == "record":
            privacy["expected_batch_size"] = args.dataset_size
    config = replace(config, privacy=replace(config.privacy, **privacy))
    if args.data is not None:
        config = replace(config, data=replace(config.data, store=str(args.data)))
    model = config.model
    if args.num_classes is not None and isinstance(model, HeadConfig | ClassifierConfig):
        model = replace(model, num_classes=args.num_classes)
    if args.encoder is not None and isinstance(model, HeadConfig):
        model = replace(model, encoder=replace(model.encoder, spec=args.encoder))
    config = replace(config, model=model)
    if args.encoder is not None and isinstance(model, ClassifierConfig):
        from dpvision.encoders.starting_weights import adapted

        config = adapted(config, args.encoder)
    return config


def default_config(recipe: str, early: Early, typed: dict[str, str]) -> RunConfig:
    """Return the default settings: the recipe's, adjusted by the options; with --resume the run's own."""
    if early.resume:
        return saved_config("adapt", early.root(recipe), recipe)
    config = get_recipe(recipe)
    changes: dict[str, Any] = {}
    if early.privacy.guarantee in ("none", "simulated"):
        changes |= {"guarantee": early.privacy.guarantee, "noise_multiplier": None, "target_epsilon": None}
    declared = early.privacy.dataset_size if early.dataset_size is None else early.dataset_size
    if declared is not None and declared >= 1 and config.privacy.sampling == "full_batch":
        changes |= {"dataset_size": declared, "expected_batch_size": declared}
        people = early.privacy.num_units if early.privacy.sampling_unit == "person" else None
        if people is not None and people >= 1:
            changes |= {"num_units": people, "sampling_unit": "person", "expected_batch_size": people}
    config = replace(config, privacy=with_budget(replace(config.privacy, **changes), typed))
    return config if early.select is None else with_candidates(config, _candidates(early.select))


def _candidates(typed: str) -> tuple[HeadName, ...]:
    names = tuple(name.strip() for name in typed.split(","))
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"adapt: --select {typed}: {name!r}; expected names among {', '.join(PRESETS)}. Separate them with commas.")
    return cast(tuple[HeadName, ...], names)


def _recipes(asks: bool) -> str:
    return "\n\nrecipes, of heads and of networks:\n\n" + "\n".join(recipe_lines("transfer.")) if asks else ""
