"""``dpvision tune``: choose settings by several runs, in one of four ways whose price is printed
first.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
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
from dpvision.cli.output import RecipeName, emit, may_show, private_scores, shown, table
from dpvision.cli.run_args import RunArgs
from dpvision.cli.typed import parse_first, parse_run, words_of
from dpvision.config import ClassifierConfig, HeadConfig, RunConfig
from dpvision.config.resolve import read_of, resolve
from dpvision.errors import ConfigError, RunStopped
from dpvision.privacy.printed import up, up_delta
from dpvision.recipes import get_recipe
from dpvision.runs.folder import STOPPED
from dpvision.runs.spent import charge_words
from dpvision.tune import Found, Question, Study, Trial, plan_study, search
from dpvision.tune.study import charged_event, plan_of, run_ids, trial_folder

if TYPE_CHECKING:
    from dpvision.eval.score import Score

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


@dataclass(frozen=True)
class TuneArgs(RunArgs, Question, _What):
    """Arguments of `dpvision tune`."""

    test: Annotated[Path | None, tyro.conf.arg(metavar="STORE")] = None
    """Labelled store of other images to score trials on; public, unless trials are simulated. If
    omitted, trials are compared by loss.
    """
    simulate: Annotated[float | None, tyro.conf.arg(metavar="K")] = None
    """Divides batch and noise of simulated trials."""
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
    study = args.root(recipe) / "confidential" / "study.json"
    if args.resume_or_start and study.exists():
        args = replace(args, resume=True)
    tune(args, resolve(default, asked), asked)


def tune(args: TuneArgs, config: RunConfig, asked: Mapping[str, Any]) -> None:
    """Print the prices, run the trials, and print what they found.

    Args:
        asked: the settings of ``config`` that were asked for, by dotted name.
    """
    root = args.root(args.recipe)
    study = plan_study(args, config, root, resume=args.resume, dry_run=args.dry_run)
    head, selects = isinstance(config.model, HeadConfig), args.how == "private-selection"
    if head and not selects:
        asked = {**asked, "privacy.steps": study.config.privacy.steps}
    text, charge = _price_table(study), None
    if args.how == "charged":
        runs, ids = max(1, study.price.fits), run_ids(root)
        charge, charged = charge_words(study.store, study.plan, runs=runs, chosen=True, besides=ids)
        text += (
            f"\n{charged}\nStatements cover the choice by a cap set before the first run only: "
            f"dpvision ledger {study.store.path} --set-cap EPSILON --cap-delta DELTA, with that "
            "total."
        )
    elif selects:
        charge, charged = charge_words(study.store, plan_of(study.config))
        text += f"\n{charged}" if args.dry_run else ""
    if args.dry_run:
        result = {
            "dry_run": True,
            "how": args.how,
            "trials": args.trials,
            "prices": study.price.to_dict(),
            "store_total": charge,
        }
        emit(result, args.json, f"{text}\nDry run: nothing was trained or charged.")
        return
    args.say(text)
    if args.how in ("charged", "private-selection") and head:
        require_budget("tune", study.plan, asked)
    if args.how == "charged" and study.price.fits == 0:
        raise ConfigError(
            f"tune: --budget {args.budget}; expected at least {up(study.price.one)}, the price of "
            "one trial. Give more."
        )
    if selects:
        from dpvision.adapt.prepare import prepare

        shared = {f.name for f in fields(AdaptArgs)} & {f.name for f in fields(TuneArgs)}
        options = AdaptArgs(**{name: getattr(args, name) for name in shared})
        adapt_new(options, prepare(study.config), asked)
        return
    shows = may_show(study.confidential, args.show_confidential)

    def say(line: str, detail: str) -> None:
        if not args.quiet:
            print(line + (detail if shows else ""), file=sys.stderr, flush=True)

    try:
        found = search(study, say, resume=args.resume, quiet=args.quiet)
    except RunStopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(STOPPED)
    _finish(args, asked, study, found)
    if found.refused is not None:
        raise found.refused
    if found.best is None:
        raise ConfigError(
            "tune: every trial failed; expected one with a score. The reasons are above."
        )


def _price_table(study: Study) -> str:
    """Return the table of the four ways as text; the chosen one is marked."""
    price, plan = study.price, study.plan
    rows = [
        (f"{'> ' if way == study.asked.how else '  '}{way}", *rest) for way, *rest in price.rows
    ]
    delta = "" if price.budget is None else f", at delta {up_delta(price.budget.delta)}"
    whose = ", epsilon of a person" if plan.unit.num_people is not None else ""
    text = table(
        f"{study.asked.trials} trials{delta}{whose}",
        ("way", "epsilon", "confidential", "statement's tuning"),
        rows,
    )
    if study.budget is not None:
        text += (
            "\n"
            f"Renyi filter of order {study.budget.order:g}, fixed now: the next trial is refused "
            f"when all would cost more than epsilon {up(study.budget.epsilon)}. Other runs on "
            "the store add to it: `dpvision ledger STORE`."
        )
    return text


def _finish(args: TuneArgs, asked: Mapping[str, Any], study: Study, found: Found) -> None:
    """Print the trials from best to worst, what they cost, and the commands that use the best
    one.
    """
    best, scored = found.best, sum(trial.score is not None for trial in found.trials)
    lines = [
        f"{scored} of {len(found.trials)} trials have a score ({study.objective}), best first:"
    ]
    for trial in found.trials:
        settings = "  ".join(f"{name}={shown(value)}" for name, value in trial.settings.items())
        score, kept = "failed" if trial.score is None else f"{trial.score:.5g}", _kept(study, trial)
        interval = "" if kept is None else f"{kept.low:.3g} to {kept.high:.3g}"
        lines.append(f"  trial {trial.number:3d}  {score:>9}  {interval:<14}  {settings}")
    if best is not None and (kept := _kept(study, best)) is not None:
        lines.append(f"  95% intervals; chance {kept.chance:.3g}.")
        if kept.low <= kept.chance:
            lines.append("The best trial is at chance: the order of the trials says nothing.")
    commands = [] if best is None else _commands(args, asked, study, best)
    if commands:
        lines += ["To use the best:", *(f"  {command}" for command in commands)]
    text, file = "\n".join(lines), study.root / "confidential" / "trials.txt"
    file.write_text(text + "\n")
    if study.confidential:
        text = private_scores(text, [str(file)], args.show_confidential)
    result: dict[str, Any] = {
        "run": str(study.root),
        "how": args.how,
        "trials": len(found.trials),
        "prices": study.price.to_dict(),
    }
    if study.budget is not None:
        cost, figures = _charged(study, found)
        text, result = f"{text}\n{cost}", result | figures
    if may_show(study.confidential, args.show_confidential or args.json):
        result["best"] = best and {
            "trial": best.number,
            "score": best.score,
            "settings": dict(best.settings),
        }
        result["commands"] = commands
    emit(result, args.json, text)


def _kept(study: Study, trial: Trial) -> "Score | None":
    """Return a trial's score with its interval; None if it failed, is a loss, or is not there."""
    from dpvision.eval.score import Score, is_of_the_run
    from dpvision.eval.score_file import read_scores

    folder = trial_folder(study.root, trial.number)
    files = (folder / "scores.json", folder / "confidential" / "scores.json")
    found = [Score.from_dict(one) for file in files for one in read_scores(file)]
    return next((s for s in found if is_of_the_run(s.name) and s.value == trial.score), None)


def _charged(study: Study, found: Found) -> tuple[str, dict[str, Any]]:
    """Return what the ledgers say that the trials have cost, as text and ready for JSON."""
    from dpvision.privacy.account import filter_bound, store_account
    from dpvision.privacy.store_marks import StoreLedgers

    ids = {trial.run_id for trial in found.trials}
    ledgers = [
        ledger
        for run_id, ledger in StoreLedgers.of(study.store.path).read_all().items()
        if run_id in ids and ledger.steps
    ]
    bound = filter_bound([charged_event(ledger.plan) for ledger in ledgers], study.plan.delta)
    account = store_account(study.store.path)
    assert bound is not None and study.budget is not None
    total = (
        "unknown"
        if account.epsilon_filter is None
        else f"{up(account.epsilon_filter)} at delta {up_delta(account.delta)}"
    )
    text = (
        f"These trials and the choice among them: epsilon {up(study.budget.epsilon)} at delta "
        f"{up_delta(study.plan.delta)}, the budget fixed beforehand; the ledgers of "
        f"{len(ledgers)} trials hold {up(bound[0])}. The epsilon of a single trial does not "
        "cover the choice.\n"
        f"All {len(account.runs)} runs on the store: epsilon "
        f"{total}{'' if account.unit_epsilon is None or account.draws_people else ' for an image'}."
    )
    return text, {
        "epsilon": study.budget.epsilon,
        "charged": bound[0],
        "delta": study.plan.delta,
        "store_epsilon": account.epsilon_filter,
    }


def _commands(args: TuneArgs, asked: Mapping[str, Any], study: Study, best: Trial) -> list[str]:
    """Return the commands that release the best trial, or repeat it on private images, with the
    declaration of how it was chosen.
    """
    if args.how == "charged":
        return [f"dpvision report {trial_folder(study.root, best.number)} --tuning charged"]
    adapts = isinstance(study.config.model, HeadConfig | ClassifierConfig)
    words = [
        "dpvision",
        "adapt" if adapts else "train",
        args.recipe,
        "--data",
        str(study.config.data.store) if study.confidential else "STORE",
    ]
    target = f"privacy.{study.config.privacy.unit.target}"
    settings = {
        target if name == "epsilon" else name: value
        for name, value in asked.items()
        if name != "data.store"
    }
    for name, value in (settings | read_of(study.config, best.settings)).items():
        words += words_of(name, value)
    return [
        shlex.join(words),
        f"dpvision report RUN --tuning {'not_covered' if study.confidential else 'public'}",
    ]
