"""``dpvision adapt``: train a private classifier on a public encoder."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dpvision.cli.head_text import head_text
from dpvision.cli.output import RecipeName, emit, may_show, private_scores
from dpvision.cli.paths import check_store
from dpvision.cli.progress import ProgressLine
from dpvision.cli.run_args import (
    RunArgs,
    announce,
    check_places,
    dry_run,
    executed,
    goes_on,
    resumed_hardware,
    saved_config,
)
from dpvision.cli.scores import Printing, emit_scores, scores_table
from dpvision.cli.train import TrainArgs, train
from dpvision.cli.typed import joined, parse_first, parse_run
from dpvision.config import ClassifierConfig, HeadConfig, RunConfig
from dpvision.config.heads import HEADS
from dpvision.config.resolve import BUDGETS, resolve
from dpvision.errors import OPERATOR_ONLY, ConfigError, PrivacyError
from dpvision.eval.score import check_seeds
from dpvision.privacy.printed import up, up_delta
from dpvision.recipes import get_recipe, recipe_lines
from dpvision.runs.folder import STOPPED
from dpvision.runs.spent import charge_words, lost_words, resume_words

if TYPE_CHECKING:
    from dpvision.adapt.prepare import Prepared
    from dpvision.adapt.session import HeadSession
    from dpvision.eval.score import Score
    from dpvision.privacy.plan import DPPlan

_DOC = """Train a private classifier on labelled private images, from a public encoder.

By default the encoder is frozen: each image's features are computed once and cached in the store's
folder, and a linear head is trained on them with differential privacy in about a minute. You
declare three public numbers: records, classes and epsilon.

  dpvision data import IMAGES stores/all --classes classes.txt
  dpvision data split stores/all stores/mine stores/test
  dpvision adapt --data stores/mine --encoder patches+scattering --num-classes 10
      --dataset-size 20000 --epsilon 1 --dry-run
  dpvision adapt --data stores/mine --encoder patches+scattering --num-classes 10
      --dataset-size 20000 --epsilon 1 --name first
  dpvision evaluate runs/first --test stores/test
  dpvision report runs/first

An ENCODER is a dpvision run folder, timm:NAME (weights in timm's cache) or timm:NAME@FILE,
torchvision:NAME@FILE, hf:DIR, onnx:NODE@FILE, vip:FILE, mae:FILE, dpcap:FILE, simclr:FILE,
tan:FILE, or one that needs no file: patches+scattering (the default), patches+scattering+zooms
(about a point more accurate, three times the work), patches, scattering, hog, pixels. Nothing is
downloaded (docs/weights.md).

--head auto (the default) chooses a head by the declared numbers and prints the reason;
docs/heads.md has the rules. To train the network itself, name a recipe that does (dpvision adapt
--help lists them): it runs as `dpvision train` does, starting from --encoder's weights.
--non-private trains the same head without noise, for comparison; its results are confidential if
the images are private."""

_Head = Literal[("auto", *HEADS)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class Shorts:
    """Short options for settings."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="STORE")] = None
    """Store with labels, made by `dpvision data import`."""
    encoder: Annotated[str | None, tyro.conf.arg(metavar="ENCODER")] = None
    """Public encoder; patches+scattering, which needs no file, if omitted."""
    num_classes: int | None = None
    """Declared number of classes K: labels are 0 to K - 1."""
    dataset_size: int | None = None
    """Declared number of records."""
    epsilon: float | None = None
    """Epsilon of the whole head. Without it, the plan at epsilon 1 is printed and nothing is spent.
    Short for --privacy.target-epsilon, or for --privacy.target-unit-epsilon if people are declared
    (--privacy.num-units).
    """
    public_store: Annotated[Path | None, tyro.conf.arg(metavar="STORE")] = None
    """For a head: standardise features by the images of this store, imported with --public. A
    hundred photographs of about the resolution of yours will do (docs/heads.md).
    """


@dataclass(frozen=True)
class _What(Shorts):
    recipe: RecipeName = ""
    """Name of a recipe (dpvision adapt --help lists them)."""
    head: _Head | None = None
    """Kind of head; short for the recipe transfer.HEAD."""
    total_epsilon: float | None = None
    """In place of --epsilon: the epsilon of all runs on this store together, this head's included,
    as for a head on an encoder that was fine-tuned on the same images (docs/transfer.md).
    """
    select: str | None = None
    """Choose among these heads (HEAD,HEAD,...) by a private score, within epsilon: each head gets
    2.3 to 2.5 times the noise (docs/selection.md).
    """
    test: Annotated[Path | None, tyro.conf.arg(metavar="STORE")] = None
    """Labelled store to score the result on. Scores are public only if its images are."""
    seeds: int | None = None
    """Repeat the run with this many seeds, NAME/seed-0 and so on, and print mean and standard
    deviation of the scores on --test. For public images, or without a guarantee.
    """


@dataclass(frozen=True)
class AdaptArgs(RunArgs, _What):
    """Arguments of `dpvision adapt`."""

    non_private: bool = False
    """Train the same head without noise, for comparison: short for --privacy.guarantee none."""


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    if not argv:
        print(
            "usage: dpvision adapt [RECIPE] --data STORE [--encoder ENCODER] --num-classes K "
            "--dataset-size N --epsilon E\n"
            "\n"
            f"{_DOC}"
        )
        sys.exit(2)
    first, _, _ = parse_first(AdaptArgs(), get_recipe("transfer.auto"), argv)
    if first.recipe and first.head is not None and first.recipe != f"transfer.{first.head}":
        raise ConfigError(
            f"adapt: recipe {first.recipe!r} and --head {first.head}; expected one of the two. "
            "Drop one."
        )
    if first.select is not None and (first.head or first.recipe or "transfer.auto") not in (
        "auto",
        "transfer.auto",
    ):
        raise ConfigError(
            f"adapt: --select {first.select} with {first.head or first.recipe}; expected one of "
            "the two. Drop one."
        )
    if first.seeds is None:
        named = first.recipe or f"transfer.{first.head or 'auto'}"
        first = replace(first, resume=goes_on(first, named))
    recipe = first.recipe or _recipe(first)
    saved = saved_config("adapt", first.root(recipe), recipe) if first.resume else None
    default = saved or recipe_on(first, recipe)
    doc = "\n".join(
        [_DOC, "", "recipes, of heads and of networks:", "", *recipe_lines("transfer.")]
    )
    args, typed = parse_run(AdaptArgs(recipe=recipe), default, argv, "adapt", doc)
    args = replace(args, resume=first.resume)
    short = {
        "privacy.guarantee": "none" if args.non_private else None,
        "model.candidates": args.select and _candidates(args.select),
    }
    asked = settings_asked(args, joined(typed, short), default)
    if args.total_epsilon is not None and not args.resume:
        asked["epsilon"] = _rest(args, default, asked)
    if args.seeds is None:
        _adapt(args, default, asked)
    else:
        _adapt_seeds(args, default, asked)


def _rest(args: AdaptArgs, default: RunConfig, asked: Mapping[str, Any]) -> float:
    """Return the epsilon that --total-epsilon leaves for this head, and print it.

    Raises:
        ConfigError: no head of full batches under a guarantee, another option fixes the noise, or
            several runs would be made.
    """
    assert args.total_epsilon is not None
    given = [name for name in BUDGETS if asked.get(name) is not None]
    given += [name for name in ("seeds", "select", "non_private") if getattr(args, name)]
    config = resolve(default, {**asked, "epsilon": args.total_epsilon} if not given else asked)
    if given or not isinstance(config.model, HeadConfig) or config.privacy.sampling != "full_batch":
        what = f"{given[0]} given" if given else f"the recipe {args.recipe} and its batches"
        raise ConfigError(
            f"adapt: --total-epsilon {args.total_epsilon} with {what}; expected one head of full "
            "batches, whose epsilon follows. Plan other runs by --epsilon."
        )
    check_places(args.root(args.recipe), config, dry_run=args.dry_run)
    if config.data.store is None:
        return args.total_epsilon  # refused later, with what is missing
    from dpvision.privacy.account import epsilon_left
    from dpvision.privacy.plan import make_plan

    def plan_of(epsilon: float) -> "DPPlan":
        privacy = resolve(default, {**asked, "epsilon": epsilon}).privacy
        # The epsilon of full batches does not depend on the number of steps.
        return make_plan(replace(privacy, steps=privacy.steps or 1))

    epsilon = epsilon_left(Path(config.data.store), args.total_epsilon, plan_of)
    args.say(
        f"Epsilon of this head: {up(epsilon)}, so that all runs on this store together have "
        f"at most {args.total_epsilon}"
    )
    return epsilon


def _adapt(args: AdaptArgs, default: RunConfig, asked: Mapping[str, Any]) -> "list[Score]":
    """Train a new or resumed head or network; return its scores on --test."""
    if not isinstance(default.model, HeadConfig):
        return _train(args, default, asked)
    if args.resume:
        return _resume(args, default, asked)
    config = resolve(default, asked)
    check_places(args.root(args.recipe), config, dry_run=args.dry_run)
    check_store(args.test)
    from dpvision.adapt.prepare import prepare

    return adapt_new(args, prepare(config), asked)


def _adapt_seeds(args: AdaptArgs, default: RunConfig, asked: Mapping[str, Any]) -> None:
    """Make a run for each seed, and print mean and standard deviation of their scores.

    Raises:
        ConfigError: one seed, no test store, or --resume.
        PrivacyError: private images under a guarantee.
    """
    from dpvision.data.open import open_store
    from dpvision.eval.seeds import over_seeds

    check_seeds("adapt", args.seeds)
    assert args.seeds is not None
    root, runs = args.root(args.recipe), []
    resume = args.resume or args.resume_or_start
    if args.test is None or resume:
        raise ConfigError(
            f"adapt: --seeds {args.seeds} with {'--resume' if resume else 'no --test'}; "
            "expected new runs, scored on --test STORE. Resume the run of one seed with --runs "
            f"{root} --name seed-0."
        )
    config = resolve(default, asked)
    check_places(root, config, dry_run=args.dry_run)
    private = config.data.store and open_store(config.data.store).results_visibility == "private"
    if private and config.privacy.guarantee == "dp":
        raise PrivacyError(
            f"adapt: --seeds {args.seeds} on private images; expected a public store, or "
            "--non-private. Each seed would spend epsilon, and the choice of one by its score is a "
            "selection. Train one seed, or choose among heads with --select."
        )
    for seed in range(args.seeds):
        one = replace(args, seeds=None, runs=root, name=f"seed-{seed}", json=False)
        # What a run prints goes beside the result, which is one table or one JSON document.
        with contextlib.redirect_stdout(sys.stderr):
            runs.append(_adapt(one, default, {**asked, "seed": config.seed + seed}))
        if args.dry_run:
            break
    if args.dry_run:
        emit(
            {"dry_run": True, "seeds": args.seeds},
            args.json,
            f"Dry run: {args.seeds} such runs would be made in {root}.",
        )
    elif runs[0]:  # in a process of rank 0
        scores = over_seeds(runs)
        folders = [str(root / f"seed-{seed}") for seed in range(args.seeds)]
        printing = Printing(args.show_confidential, args.json)
        emit_scores(scores, scores_table(scores), [], printing, runs=folders)


def adapt_new(args: AdaptArgs, made: "Prepared", asked: Mapping[str, Any]) -> "list[Score]":
    """Train a new head, or with --dry-run print its plan. Return its scores on --test.

    Raises:
        ConfigError: no epsilon, and no noise, was asked for. What the run would spend is printed.
    """
    from dpvision.adapt.session import compare_images, new_head_session
    from dpvision.privacy.account import check_total

    root = args.root(args.recipe)
    _check_test(args, made.config)
    charge, charged = charge_words(made.store, made.plan)
    if args.total_epsilon is not None:  # and again when the ledger is opened
        check_total(made.store.path, made.plan, args.total_epsilon)
    text = "\n".join(filter(None, [head_text(made), charged]))
    if args.dry_run:
        with _comparing(args) as say:
            compare_images(made, say)
        people = {} if made.people is None else {"num_people": len(made.label)}
        result = dry_run(made.plan, made.store, made.lineage, charge) | {
            "operator_only": {"num_records": len(made.row_N), **people},
            "head": made.model.head,
            "candidates": made.model.choice.candidates,
            "reason": made.model.choice.reason,
            "feature_width": made.model.encoder.width,
        }
        emit(
            result,
            args.json,
            f"{text}\nDry run: every check passed, no features were computed, nothing was charged.",
        )
        return []
    args.say(text)
    require_budget("adapt", made.plan, asked)
    with contextlib.ExitStack() as stack:
        with _comparing(args) as say:
            session = stack.enter_context(
                new_head_session(made, root, total_epsilon=args.total_epsilon, say=say)
            )
        return _finish(args, session, root)


def require_budget(command: str, plan: "DPPlan", asked: Mapping[str, Any]) -> None:
    """Refuse to spend the default epsilon of a head's recipe: the user has to name one.

    Raises:
        ConfigError: neither an epsilon nor a noise multiplier was asked for.
    """
    if plan.guarantee == "dp" and all(asked.get(name) is None for name in BUDGETS):
        raise ConfigError(
            f"{command}: no --epsilon; expected the epsilon to spend. A run would spend epsilon "
            f"{up(plan.stated_epsilon)} at delta {up_delta(plan.delta)}; nothing was charged. "
            f"Give --epsilon {up(plan.stated_epsilon)}, or another."
        )


def _resume(args: AdaptArgs, saved: RunConfig, asked: Mapping[str, Any]) -> "list[Score]":
    from dpvision.adapt.session import resumed_head_session

    root = args.root(args.recipe)
    hardware = resumed_hardware("adapt", root, asked, saved)
    with contextlib.ExitStack() as stack:
        with _comparing(args) as say:
            session = stack.enter_context(resumed_head_session(root, hardware, say=say))
        _check_test(args, session.config)
        made = session.prepared
        args.say(
            (
                f"{head_text(made)}\n"
                f"{charge_words(made.store, made.plan, besides=[session.run.folder.run_id])[1]}"
            ).rstrip()
        )
        announce(
            resume_words(
                session.plan,
                session.charged_before,
                session.updates,
                session.updates > 0,
                "releases",
            )
        )
        return _finish(args, session, root)


@contextlib.contextmanager
def _comparing(args: AdaptArgs) -> Iterator[Callable[[str], None]]:
    """Show how far the comparison of public with private images is."""
    with ProgressLine(
        "opening", private=True, asked=args.show_confidential, quiet=args.quiet
    ) as line:
        yield lambda text: line.say(f"{OPERATOR_ONLY}comparing images: {text}")


def _finish(args: AdaptArgs, session: "HeadSession", root: Path) -> "list[Score]":
    """Train, save and score the head, and print what was executed. Return the scores."""
    from dpvision.adapt.session import adapt
    from dpvision.checkpoint import find_checkpoint, read_manifest
    from dpvision.cli.next_steps import after_run
    from dpvision.runs.lineage import runs_on

    made, plan = session.prepared, session.plan
    if not session.finished:
        with _progress_line(args, made) as (public, features, step):
            adapt(session, public_progress=public, progress=features, on_step=step)
    steps, complete = session.run.ledger.steps, session.run.ledger.steps == plan.steps
    behind = runs_on(made.lineage, made.store.store_id)
    result, said = executed(root, plan, steps, behind, complete, "releases")
    scores = _score(args, root)
    chosen = read_manifest(find_checkpoint(root)).get("chosen")
    lines = [said]
    if not complete:
        more = (
            f"dpvision adapt --resume --runs {root.parent} --name {root.name}"
            if not session.finished
            else "start a new run"
        )
        lines.append(
            "The head of these releases is saved. The others were not made, but epsilon counts "
            f"them. To use them: {more}"
        )
    if chosen is not None:
        lines.append(
            f"Chosen: {chosen['candidate']}; its noisy score is {chosen['score']:.1%} of the "
            "records correct."
        )
    lines += lost_words(session.lost, "releases")
    if scores:
        lines.append(_scores_text(args, scores, root))
    lines += [
        *after_run(
            root,
            made.store,
            made.config,
            released=session.run.folder.base == root,
            scored=bool(scores),
        ),
        f"In Python: dpvision.load_classifier({str(root)!r})",
    ]
    result |= {
        "head": chosen["candidate"] if chosen else made.model.head,
        "reason": made.model.choice.reason,
        "chosen": chosen,
        "scores": [score.to_dict() for score in scores],
    }
    emit(result, args.json, "\n".join(lines))
    if not complete:
        sys.exit(STOPPED)
    return scores


def _scores_text(args: AdaptArgs, scores: "list[Score]", root: Path) -> str:
    """The scores; private ones for the operator only."""
    if all(score.visibility == "public" for score in scores):
        return scores_table(scores)
    return private_scores(
        scores_table(scores), [str(root / "confidential" / "scores.json")], args.show_confidential
    )


@contextlib.contextmanager
def _progress_line(
    args: AdaptArgs, made: "Prepared"
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None], Callable[[int], None]]]:
    """Show progress of the public images' features, of the features and of the steps; if the
    features resume an earlier start, print a line that stays.
    """
    called, total = False, len(made.row_N)
    private = made.store.visibility == "private"
    label = OPERATOR_ONLY if private else ""
    with ProgressLine(
        "reading images", private=private, asked=args.show_confidential, quiet=args.quiet
    ) as line:

        def show(done: int) -> None:
            nonlocal called
            if done and not called:
                shown = f"{label}features: going on at {done:,} of {total:,} images."
                may = may_show(private, args.show_confidential)
                line.stay(shown if may else "Features: going on where they stopped.")
            called = True
            line.count("features (once: they are kept)", done, total)

        yield (
            lambda done: line.say(f"features of public images: {done:,}", public=True),
            show,
            lambda steps: line.say(f"step {steps} of {made.plan.steps}", public=True),
        )


def _check_test(args: AdaptArgs, config: RunConfig) -> None:
    """Refuse a test store that cannot be scored, before the budget is spent."""
    if args.test is None:
        return
    from dpvision.data.open import open_store
    from dpvision.eval.probes.own_head import scorable

    scorable(config, open_store(args.test))


def _score(args: AdaptArgs, root: Path) -> "list[Score]":
    if args.test is None:
        return []
    from dpvision.data.open import open_store
    from dpvision.eval.probes.own_head import score_own_head
    from dpvision.eval.score_file import NOTHING_FITTED, note_scored, write_scores

    store = open_store(args.test)
    note_scored(root, store)
    private = store.results_visibility == "private"
    with ProgressLine(
        "test images", private=private, asked=args.show_confidential, quiet=args.quiet
    ) as line:
        scores = score_own_head(
            root, store, progress=lambda n: line.count("test images", n, store.num_records)
        )
    write_scores(root, scores, train_data=NOTHING_FITTED, test_data=args.test.name)
    return scores


def _train(args: AdaptArgs, default: RunConfig, asked: Mapping[str, Any]) -> "list[Score]":
    """Run a recipe that trains the network, as ``dpvision train`` does; return its scores."""
    if not isinstance(default.model, ClassifierConfig):
        raise ConfigError(
            f"adapt: {args.recipe} trains a {default.model.kind!r}; expected a classifier or a "
            f"head. Use `dpvision train {args.recipe}`."
        )
    _check_test(args, default if args.resume else resolve(default, asked))
    train(
        TrainArgs(
            **{f.name: getattr(args, f.name) for f in fields(TrainArgs) if hasattr(args, f.name)}
        ),
        default,
        asked,
    )
    if args.test is not None and not args.dry_run and int(os.environ.get("RANK", "0")) == 0:
        scores = _score(args, root := args.root(args.recipe))
        if not args.json:
            print(_scores_text(args, scores, root))
        return scores
    return []


def _recipe(args: AdaptArgs) -> str:
    """Return the default recipe: the head's, or the run's with --resume and --name."""
    from dpvision.runs.folder import read_run, run_base

    if (
        args.resume
        and args.name
        and not args.head
        and run_base(root := args.runs / args.name) is not None
    ):
        return read_run(root)[1].recipe or "transfer.auto"
    return f"transfer.{args.head or 'auto'}"


def recipe_on(args: Shorts, recipe: str) -> RunConfig:
    """Return a recipe's config, of a network on the encoder asked for."""
    config = get_recipe(recipe)
    if args.encoder is None or isinstance(config.model, HeadConfig):
        return config
    from dpvision.encoders.starting_weights import adapted

    return adapted(config, args.encoder)


def settings_asked(args: Shorts, typed: Mapping[str, Any], recipe: RunConfig) -> dict[str, Any]:
    """Return the settings that were typed, and those that the short options stand for.

    Raises:
        ConfigError: a public store, and a recipe that trains a network.
    """
    if args.public_store is not None and not isinstance(recipe.model, HeadConfig):
        raise ConfigError(
            f"adapt: --public-store {args.public_store} with {recipe.recipe}, which trains a "
            "network; expected a head, whose features it standardises. Leave it out, or take "
            "transfer.auto."
        )
    short = {
        "data.store": args.data,
        "privacy.dataset_size": args.dataset_size,
        "epsilon": args.epsilon,
        "model.num_classes": args.num_classes,
        "model.encoder.spec" if isinstance(recipe.model, HeadConfig) else "init_from": args.encoder,
        "model.public_store": args.public_store and str(args.public_store),
    }
    return joined(typed, short)


def _candidates(typed: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in typed.split(","))
    for name in names:
        if name not in HEADS:
            raise ConfigError(
                f"adapt: --select {typed}: {name!r}; expected names among {', '.join(HEADS)}. "
                "Separate them with commas."
            )
    return names
