"""``dpvision tune``: choose settings by several runs, in one of four ways whose price is printed
first.
"""

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dpvision.cli.adapt import (
    AdaptArgs,
    Shorts,
    adapt_new,
    recipe_on,
    require_budget,
    settings_asked,
)
from dpvision.cli.output import RecipeName, emit, may_show, private_scores, shown
from dpvision.cli.paths import check_store
from dpvision.cli.recipe import get_recipe
from dpvision.cli.run_args import STOPPED, RunArgs, check_places
from dpvision.cli.tune_price import Price, charged_refusal, price_table, prices
from dpvision.cli.tune_space import How, grid, parse_space
from dpvision.cli.tune_trials import (
    LOSS,
    OWN_HEAD,
    Study,
    Trial,
    TrialStopped,
    check_study,
    plan_of,
    run_ids,
    search,
    study_folder,
    trial_folder,
)
from dpvision.cli.typed import parse_first, parse_run, words_of
from dpvision.config import ClassifierConfig, HeadConfig, RunConfig, to_dict
from dpvision.config.head_presets import candidate_name
from dpvision.config.resolve import read_of, resolve
from dpvision.errors import ConfigError
from dpvision.eval.probes.settings import checked_protocols
from dpvision.privacy.printed import up
from dpvision.runs.spent import charge_words

if TYPE_CHECKING:
    from dpvision.data.store import Store

_MOST_CANDIDATES = 100
_DOC = """Choose settings of a recipe by trials. Trials on private images cost privacy: a table of
what each way costs is printed first.

  dpvision tune vip.micro --how public --data stores/public
      --space "optim.learning_rate=log 1e-4..1e-2" --trials 20 --dry-run
  dpvision tune vip.micro --how simulated --simulate 4 --data stores/public
      --space "privacy.steps=100,200,400"
  dpvision tune transfer.many_steps --how charged --budget 8 --epsilon 2 --data stores/mine
      --num-classes 10 --dataset-size 20000 --test stores/test
      --space "optim.learning_rate=log 1..100" "privacy.max_grad_norm=0.5,1,2"
  dpvision tune transfer.many_steps --how private-selection --epsilon 2 --data stores/mine
      --num-classes 10 --dataset-size 20000 --space "optim.learning_rate=3,10,30"

A setting's values are a list A,B,C, a range LOW..HIGH (of whole numbers if both are), or log
LOW..HIGH, searched by Optuna (extra `tune`). Each trial is a run, RUNS/NAME/trial-NNN; a trial that
fails or crashes counts. docs/tuning.md explains the four ways."""


@dataclass(frozen=True)
class _What(Shorts):
    recipe: RecipeName = ""
    """Name of a recipe; a head by its name, such as transfer.many_steps."""
    how: How | None = None
    """simulated: TAN simulations (--simulate K). public: private runs on public images. charged:
    private runs on the private images, each charged. private-selection: a secret number of runs,
    one charge, for heads.
    """
    space: tuple[str, ...] = ()
    """Settings to vary: NAME=A,B,C, NAME=LOW..HIGH or "NAME=log LOW..HIGH"."""
    trials: int = 20
    """Number of trials; with private-selection the mean of their secret number."""
    budget: float | None = None
    """Epsilon that all trials together may cost (charged). If omitted, what --trials cost."""
    test: Annotated[Path | None, tyro.conf.arg(metavar="STORE")] = None
    """Labelled store of other images to score trials on; public, unless trials are simulated. If
    omitted, trials are compared by loss.
    """
    objective: str | None = None
    """own_head, a protocol of `dpvision evaluate` (knn, ridge, ...), or loss. If omitted, own_head
    for classifiers, ridge for other networks, loss without --test.
    """
    simulate: Annotated[float | None, tyro.conf.arg(metavar="K")] = None
    """Divides batch and noise of simulated trials."""


@dataclass(frozen=True)
class TuneArgs(RunArgs, _What):
    """Arguments of `dpvision tune`."""

    resume: bool = False
    """Continue a stopped or killed study: the same command, with --resume."""
    dry_run: bool = False
    """Print what each way costs and stop."""


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    first, _, asks = parse_first(TuneArgs(), get_recipe("transfer.many_steps"), argv)
    if not first.recipe and not asks:
        print(
            f"usage: dpvision tune RECIPE --how WAY --space NAME=VALUES ... --data STORE\n\n{_DOC}"
        )
        sys.exit(2)
    recipe = first.recipe or "transfer.many_steps"
    default = recipe_on(first, recipe)
    args, typed = parse_run(
        TuneArgs(recipe=recipe, name=f"tune-{recipe}"), default, argv, "tune", _DOC
    )
    asked = settings_asked(args, typed, default)
    tune(args, resolve(default, asked), asked)


def tune(args: TuneArgs, config: RunConfig, asked: Mapping[str, Any]) -> None:
    """Print the prices, run the trials, and print what they found.

    Args:
        asked: the settings of ``config`` that were asked for, by dotted name.
    """
    how = args.how
    objective = _check(args, config)
    assert how is not None and args.data is not None, "checked"
    space = parse_space(args.space, config, how)
    candidates = (
        tuple(candidate_name(one) for one in grid(space, _MOST_CANDIDATES))
        if how == "private-selection"
        else ()
    )
    if (
        objective == LOSS
        and (views := [name for name in space if name.startswith(("data.", "model."))])
        and not candidates
    ):
        raise ConfigError(
            f"tune: {views[0]} with --objective loss; expected settings that leave the loss "
            "comparable. Give --test STORE."
        )
    root = args.root(args.recipe)
    if candidates:
        check_places(root, config, dry_run=args.dry_run)
    else:
        check_store(args.data, args.test)
        if not args.dry_run:
            check_study(root, resume=args.resume)
            if importlib.util.find_spec("optuna") is None:
                raise ConfigError(
                    "tune: optuna is not installed; expected it for the search. uv pip install "
                    "'optuna>=5,<6' (extra `tune`)."
                )
    from dpvision.data.open import open_store
    from dpvision.privacy.planner import simulated

    store, test = open_store(args.data), None if args.test is None else open_store(args.test)
    _check_stores(how, store, test)
    private = "private" in {one.results_visibility for one in (store, test) if one is not None}
    fixed = config
    if isinstance(config.model, HeadConfig) and not candidates:
        from dpvision.adapt.prepare import with_planned_steps

        # The same number in all trials, whose price it determines, and in the command that uses the
        # best one.
        fixed = with_planned_steps(config)
        asked = {**asked, "privacy.steps": fixed.privacy.steps}
    if args.simulate is not None:
        simulated(fixed.privacy, args.simulate)  # raises with the reason
    plan = plan_of(fixed)
    if how == "charged" and (reason := charged_refusal(plan)):
        raise ConfigError(reason)
    price = prices(config, plan, args.trials, args.budget, candidates, private=private)
    table = price_table(price, how, args.trials)
    charge: dict[str, Any] | None = None
    if how == "charged":
        charge, charged = charge_words(
            store, plan, runs=max(1, price.fits), chosen=True, besides=run_ids(root)
        )
        table += f"\n{charged}"
    if candidates:
        assert isinstance(config.model, HeadConfig)
        config = replace(
            config,
            model=replace(config.model, candidates=candidates, selection_runs=float(args.trials)),
        )
        charge, charged = charge_words(store, plan_of(config))
        table += f"\n{charged}" if args.dry_run else ""
    if args.dry_run:
        result = {
            "dry_run": True,
            "how": how,
            "trials": args.trials,
            "prices": price.to_dict(),
            "store_total": charge,
        }
        emit(result, args.json, f"{table}\nDry run: nothing was trained or charged.")
        return
    args.say(table)
    if how in ("charged", "private-selection") and isinstance(config.model, HeadConfig):
        require_budget("tune", plan, asked)
    if how == "charged" and price.fits == 0:
        raise ConfigError(
            f"tune: --budget {args.budget}; expected at least {up(price.one)}, the price of one "
            "trial. Give more."
        )
    if candidates:
        from dpvision.adapt.prepare import prepare

        shared = {
            name: getattr(args, name)
            for name in {f.name for f in fields(AdaptArgs)} & {f.name for f in fields(TuneArgs)}
        }
        adapt_new(AdaptArgs(**shared), prepare(config), asked)
        return
    private = private and how == "simulated"
    budget = price.budget if how == "charged" else None
    study = Study(
        root,
        fixed,
        space,
        how,
        args.trials,
        objective,
        args.test,
        args.simulate,
        plan,
        budget,
        private,
        args.quiet,
    )
    question = {
        "how": how,
        "space": sorted(args.space),
        "trials": args.trials,
        "budget": args.budget,
        "objective": objective,
        "test": str(args.test),
        "simulate": args.simulate,
        "config": {name: value for name, value in to_dict(fixed).items() if name != "hardware"},
    }
    with study_folder(root, question, resume=args.resume) as folder:
        try:
            trials, refused = search(
                study, folder, _told(args.quiet, may_show(private, args.show_confidential))
            )
        except TrialStopped:
            print("Stopped; the trial is saved. Continue with --resume.", file=sys.stderr)
            sys.exit(STOPPED)
        _finish(args, asked, study, trials, price, store, folder, private)
        if refused is not None:
            raise refused
        if all(trial.score is None for trial in trials):
            raise ConfigError(
                "tune: every trial failed; expected one with a score. The reasons are above."
            )


def _told(quiet: bool, all_of_it: bool) -> Callable[[str, str], None]:
    """Return what prints progress: a line, and if results may be printed what depends on them."""

    def say(text: str, detail: str) -> None:
        if not quiet:
            print(text + (detail if all_of_it else ""), file=sys.stderr, flush=True)

    return say


def _check(args: TuneArgs, config: RunConfig) -> str:
    """Refuse what needs no data to be refused, and return the objective."""
    how, model, privacy = args.how, config.model, config.privacy
    if how is None:
        raise ConfigError(
            "tune: no --how; expected simulated, public, charged or private-selection. "
            "docs/tuning.md compares them."
        )
    if args.data is None:
        raise ConfigError(
            "tune: no --data; expected a store made by `dpvision data import`. Give --data STORE."
        )
    if privacy.guarantee != "dp":
        raise ConfigError(
            f"tune: guarantee={privacy.guarantee}; expected a private recipe to tune. Name one."
        )
    if isinstance(model, HeadConfig) and (model.head == "auto" or model.candidates):
        raise ConfigError(
            f"tune: {args.recipe} chooses its head; expected one head. Name it, e.g. "
            "transfer.many_steps."
        )
    if not 1 <= args.trials <= 10_000:
        raise ConfigError(f"tune: --trials {args.trials}; expected 1 to 10000. Use 20.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "tune: WORLD_SIZE above 1; expected one process. Start it without torchrun."
        )
    if (args.simulate is not None) != (how == "simulated"):
        raise ConfigError(
            f"tune: --how {how} with --simulate {args.simulate}; expected --simulate K exactly "
            "with simulated. E.g. 4."
        )
    if args.budget is not None and (how != "charged" or not 0 < args.budget < float("inf")):
        raise ConfigError(
            f"tune: --budget {args.budget} with --how {how}; expected a positive epsilon, with "
            "charged. Drop or change it."
        )
    if how == "private-selection":
        if not isinstance(model, HeadConfig):
            raise ConfigError(
                f"tune: private-selection of {args.recipe}; expected a head. The number of "
                "trainings has to stay secret, and hours of training, with a line in the ledger "
                "for each step, would tell it. Use --how simulated, public or charged."
            )
        if args.resume or args.objective is not None or args.trials < 2:
            raise ConfigError(
                "tune: private-selection with --resume, --objective or one trial; expected none "
                "of them: it is one charge."
            )
        return OWN_HEAD
    if how == "charged" and args.test is None:
        raise ConfigError(
            "tune: charged without --test; expected public labelled images to score on, which "
            "costs nothing: losses and scores on private images are not covered by the charge. "
            "Give --test STORE, or use private-selection for a head."
        )
    own = isinstance(model, HeadConfig | ClassifierConfig)
    objective = args.objective or (LOSS if args.test is None else OWN_HEAD if own else "ridge")
    if objective == LOSS and (how == "charged" or isinstance(model, HeadConfig)):
        raise ConfigError(
            f"tune: loss as the objective of {how} trials of {args.recipe}; expected a score on "
            "--test STORE. Give one."
        )
    if objective != LOSS:
        checked_protocols([objective])
        if args.test is None:
            raise ConfigError(
                f"tune: --objective {objective} without --test; expected labelled images to "
                "score on. Give --test STORE."
            )
    return objective


def _check_stores(how: How, store: "Store", test: "Store | None") -> None:
    """Refuse stores whose visibility does not fit the way."""
    private = store.results_visibility == "private"
    if how == "public" and private:
        raise ConfigError(
            f"tune: --how public with {store.path}, whose results are private; expected public "
            "images like yours. Import them with --public, or use --how charged."
        )
    if how == "charged" and not private:
        raise ConfigError(
            f"tune: --how charged with {store.path}, which is public; expected private images. "
            "Use --how public: it is free."
        )
    if how in ("public", "charged") and test is not None and test.results_visibility == "private":
        raise ConfigError(
            f"tune: --test {test.path}, whose scores are private; expected public images, "
            "because choosing by private scores is a selection that is not charged. Import them "
            "with --public."
        )


def _finish(
    args: TuneArgs,
    asked: Mapping[str, Any],
    study: Study,
    trials: list[Trial],
    price: Price,
    store: "Store",
    folder: Path,
    private: bool,
) -> None:
    """Print the trials from best to worst, what they cost, and the commands that use the best
    one.
    """
    from dpvision.cli.tune_price import charged_text

    scored = [trial for trial in trials if trial.score is not None]
    scored.sort(key=lambda trial: trial.score or 0.0, reverse=study.maximize)
    lines = [f"{len(scored)} of {len(trials)} trials have a score ({study.objective}), best first:"]
    for trial in [*scored, *(trial for trial in trials if trial.score is None)]:
        settings = "  ".join(f"{name}={shown(value)}" for name, value in trial.settings.items())
        lines.append(
            f"  trial {trial.number:3d}  "
            f"{'failed' if trial.score is None else format(trial.score, '.5g'):>9}  {settings}"
        )
    commands = _commands(args, asked, study, scored[0], private) if scored else []
    found = "\n".join(
        [
            *lines,
            *(["To use the best:", *(f"  {command}" for command in commands)] if commands else []),
        ]
    )
    (folder / "trials.txt").write_text(found + "\n")
    cost, spent = charged_text(study, store, trials) if study.how == "charged" else ("", {})
    text = (
        private_scores(found, [str(folder / "trials.txt")], args.show_confidential)
        if private
        else found
    )
    result: dict[str, Any] = {
        "run": str(study.root),
        "how": study.how,
        "trials": len(trials),
        "prices": price.to_dict(),
        **spent,
    }
    if may_show(private, args.show_confidential or args.json):
        best = scored[0] if scored else None
        result |= {
            "best": best
            and {"trial": best.number, "score": best.score, "settings": dict(best.settings)},
            "commands": commands,
        }
    emit(result, args.json, "\n".join(filter(None, [text, cost])))


def _commands(
    args: TuneArgs, asked: Mapping[str, Any], study: Study, best: Trial, private: bool
) -> list[str]:
    """Return the commands that release the best trial, or repeat it on private images, with the
    declaration of how it was chosen.
    """
    if study.how == "charged":
        return [f"dpvision report {trial_folder(study.root, best.number)} --tuning charged"]
    adapts = isinstance(study.config.model, HeadConfig | ClassifierConfig)
    words = [
        "dpvision",
        "adapt" if adapts else "train",
        args.recipe,
        "--data",
        str(args.data) if private else "STORE",
    ]
    target = (
        "privacy.target_epsilon"
        if study.config.privacy.num_units is None
        else "privacy.target_unit_epsilon"
    )
    settings = {
        target if name == "epsilon" else name: value
        for name, value in asked.items()
        if name != "data.store"
    }
    for name, value in (settings | read_of(study.config, best.settings)).items():
        words += words_of(name, value)
    return [
        shlex.join(words),
        f"dpvision report RUN --tuning {'not_covered' if private else 'public'}",
    ]
