"""``dpvision train``: train a recipe on a store."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dpvision.cli.output import RecipeName, emit, pairs
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
from dpvision.cli.typed import joined, parse_first, parse_run
from dpvision.config import HeadConfig, RunConfig
from dpvision.config.resolve import resolve
from dpvision.config.unit import Unit
from dpvision.errors import ConfigError, DataError
from dpvision.privacy.printed import up
from dpvision.recipes import get_recipe, recipe_lines
from dpvision.runs.folder import STOPPED
from dpvision.runs.spent import charge_words, guarantee_words, lost_words, resume_words, spent

if TYPE_CHECKING:
    from dpvision.data.store import Store
    from dpvision.privacy.plan import DPPlan
    from dpvision.train.loop import Session
    from dpvision.weights import Lineage

_SLOW_TO_CHECK = 20_000_000
"""Parameters from which the gates before a run are announced, since they take more than seconds."""
_DOC = """Train a recipe on a store, privately unless the recipe is non-private.

The plan (noise, steps, epsilon) is printed before any compute is spent, and the ledger next to the
store is charged before each step. Any setting of the recipe can be overridden:
--privacy.target-epsilon 4, --optim.learning-rate 1e-3.

  dpvision data import IMAGES stores/mine
      # folders named by class need --classes FILE
  dpvision train synthetic.vip_micro
      # the warm start, on procedural textures: public, costs no privacy
  dpvision train vip.micro --data stores/mine --dry-run
  dpvision train vip.micro --data stores/mine --name first
  dpvision train vip.micro --data stores/mine --non-private
      # without noise and clipping, for comparison; confidential
  dpvision train vip.micro --data stores/mine --simulate 8
      # predict its losses at an eighth of the compute; no guarantee
  dpvision train vip.micro --name first --resume
      # after a stop (Ctrl-C, SIGTERM, SIGUSR1; exit status 75) or a crash
  dpvision train vip.micro --data stores/mine --name first --resume-or-start
      # one line for a job that may be preempted (docs/jobs.md)
  torchrun --nproc-per-node 8 -m dpvision train vip.base --data STORE"""


@dataclass(frozen=True)
class _What:
    recipe: RecipeName = ""
    """Name of a recipe (dpvision train --help lists them)."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="STORE")] = None
    """Store made by `dpvision data import`; synthetic.* recipes need none."""
    simulate: Annotated[float | None, tyro.conf.arg(metavar="K")] = None
    """Simulate the private run with a K-th of its batch and of its noise, at equal steps (TAN).
    Guarantees nothing; confidential.
    """


@dataclass(frozen=True)
class TrainArgs(RunArgs, _What):
    """Arguments of `dpvision train`."""

    non_private: bool = False
    """Train without noise and clipping, for comparison: short for --privacy.guarantee none.
    Confidential if the images are private.
    """


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    first, _, asks = parse_first(TrainArgs(), get_recipe("vip.micro"), argv)
    recipe = first.recipe
    if not recipe:
        print(f"usage: dpvision train RECIPE [--data STORE] [options]\n\n{_DOC}")
        print("\nrecipes (`dpvision train RECIPE --help` shows all settings):")
        print("\n".join(recipe_lines()))
        if not asks:
            raise ConfigError(
                "train: no recipe; expected one, also with --resume. Give the one of the list "
                "above that the run has."
            )
        return
    first = replace(first, resume=goes_on(first, recipe))
    if first.resume and first.simulate is not None:
        raise ConfigError(
            f"train: --simulate {first.simulate:g} with --resume; expected one of them. Drop "
            "--simulate."
        )
    saved = saved_config("train", first.root(recipe), recipe) if first.resume else None
    default = saved or get_recipe(recipe)  # a run to resume that is not there is refused later
    args, typed = parse_run(TrainArgs(recipe=recipe), default, argv, "train", _DOC)
    args = replace(args, resume=first.resume)
    short = {"data.store": args.data, "privacy.guarantee": "none" if args.non_private else None}
    train(args, default, joined(typed, short))


def train(args: TrainArgs, default: RunConfig, asked: Mapping[str, Any]) -> None:
    """Make or resume the run, train, and print what it guarantees.

    Args:
        default: settings of the recipe; with --resume of the run.
        asked: settings asked for, by dotted name.
    """
    if isinstance(default.model, HeadConfig):
        raise ConfigError(
            f"train: {args.recipe} is a head on frozen features; expected a network to train. "
            f"Use `dpvision adapt {args.recipe} --data STORE --encoder ENCODER --num-classes K "
            "--dataset-size N --epsilon E`."
        )
    root = args.root(args.recipe)
    config = default if args.resume else resolve(default, asked)
    if args.simulate is not None:
        from dpvision.privacy.planner import simulated

        config = replace(config, privacy=simulated(config.privacy, args.simulate))
    if not args.resume:
        if config.data.store is None and config.data.images == "textures":
            config = replace(
                config,
                data=replace(config.data, store=str(_texture_store(config.privacy.dataset_size))),
            )
        check_places(root, config, dry_run=args.dry_run)
    from dpvision.devices import slow_precision
    from dpvision.encoders.starting_weights import open_parent
    from dpvision.models import count_parameters
    from dpvision.runs.folder import read_run
    from dpvision.train.distributed import together
    from dpvision.train.loop import fit
    from dpvision.train.start import check_run, new_session, resumed_session

    main_process = int(os.environ.get("RANK", "0")) == 0
    if args.resume:
        config = read_run(root)[1]
        opened = resumed_session(root, resumed_hardware("train", root, asked, config), open_parent)
    else:
        opened = new_session(config, root, open_parent)
    if (
        main_process
        and config.privacy.guarantee == "dp"
        and (num := count_parameters(config.model)) >= _SLOW_TO_CHECK
    ):
        size = f"{num / 1e6:.0f} million parameters"
        args.say(
            f"Checking the network ({size}) on public records, in float64: a minute of one core "
            "for 100 million."
        )
    if args.dry_run:
        plan, store, num_records, lineage = check_run(config, open_parent)
        if main_process:
            own = [read_run(root)[2]["run_id"]] if args.resume else []
            charge, charged = charge_words(store, plan, besides=own)
            result = dry_run(plan, store, lineage, charge)
            result["operator_only"] = {"num_records": num_records}
            lines = [
                plan_text(config, plan, store, lineage),
                charged,
                "Dry run: every check passed, nothing was trained or charged.",
            ]
            emit(result, args.json, "\n".join(filter(None, lines)))
        return
    with opened as session:
        if main_process:
            assert session.run is not None, "of the main process"
            charged = charge_words(
                session.store, session.plan, besides=[session.run.folder.run_id]
            )[1]
            args.say(
                f"{plan_text(session.config, session.plan, session.store, session.lineage)}\n"
                f"{charged}".rstrip()
            )
            if (
                warning := slow_precision(session.config.hardware.precision, session.group.device)
            ) is not None:
                announce(warning)
        if args.resume and session.run is not None:
            announce(
                resume_words(
                    session.plan,
                    session.run.ledger.steps,
                    session.updates,
                    session.saved_steps is not None,
                )
            )
        complete = fit(session, quiet=args.quiet, show_confidential=args.show_confidential)
        # torchrun ends the others as soon as one exits with 75: not before rank 0 has printed.
        with together(session.group):
            if session.run is not None:
                _finish(session, root, complete, args.json)
    if not complete:
        sys.exit(STOPPED)


def _texture_store(num: int) -> Path:
    """Return the folder of a store of ``num`` textures (a description of a few hundred bytes), and
    make it if it does not exist.
    """
    from dpvision.data.texture_store import write_texture_store

    folder = Path("stores") / f"textures-{num}"
    if not folder.exists():
        with contextlib.suppress(DataError):  # another rank may be first
            write_texture_store(folder, num)
    return folder


def _finish(session: "Session", root: Path, complete: bool, as_json: bool) -> None:
    from dpvision.cli.next_steps import after_run
    from dpvision.runs.lineage import runs_on

    assert session.run is not None
    steps, behind = session.run.ledger.steps, runs_on(session.lineage, session.store.store_id)
    result, said = executed(root, session.plan, steps, behind, complete)
    result["updates"] = session.updates
    lines = [said, *lost_words(steps - session.updates, "steps")]
    if not complete:
        lines.append("Saved. Continue with --resume.")
    if complete:
        lines += after_run(
            root, session.store, session.config, released=session.run.folder.base == root
        )
    emit(result, as_json, "\n".join(lines))


def plan_text(config: RunConfig, plan: "DPPlan", store: "Store", lineage: "Lineage") -> str:
    """Return the plan as text: its guarantee, the total with earlier runs behind the weights, and
    the main settings.
    """
    from dpvision.privacy.refusal import weakness
    from dpvision.runs.lineage import runs_on

    if plan.guarantee == "dp":
        when = "one step" if plan.steps == 1 else f"all {plan.steps} steps"
        assert plan.epsilon is not None, "a plan with a guarantee has an epsilon"
        strength = (
            "Private"
            if weakness(plan) is None
            else "WEAK GUARANTEE, allowed by --privacy.allow-weak-guarantee"
        )
        head = (
            f"{strength}: {guarantee_words(plan, plan.epsilon, plan.unit_epsilon, plan.delta)} "
            f"after {when}"
        )
        if plan.epsilon_rdp is not None:
            head += f" (RDP {up(plan.epsilon_rdp)})"
    else:
        head = f"NO PRIVACY GUARANTEE (guarantee={plan.guarantee!r})"
        if store.visibility == "public" and (kept := _kept(store, lineage)):
            head += f" for these images; kept from earlier runs: {kept}"
    if plan.guarantee == "dp" and (behind := runs_on(lineage, store.store_id)):
        head += (
            ", this run alone\n"
            f"Total of these weights on this store: {spent(plan, plan.steps, behind)[1]}"
        )
    if plan.guarantee == "dp" and (kept := _kept(store, lineage)):
        head += f"\nThe weights that it starts from: {kept}"
    unit, of_head = plan.unit, config.model.kind == "head"
    several = 1 if of_head else unit.images_per_draw
    return (
        head
        + "\n"
        + pairs(
            {
                "recipe": config.recipe,
                "store": f"{store.store_id[:8]}, {store.visibility}",
                "declared records": plan.dataset_size,
                "declared people": unit.num_people,
                **_images_of_a_person(unit, of_head),
                "sampling": plan.sampler.law + (", of people" if unit.draws_people else ""),
                "expected batch size": plan.expected_batch_size,
                "steps": plan.steps,
                "sample-gradients": round(plan.steps * plan.expected_batch_size) * several,
                "noise multiplier": plan.noise.multiplier,
                "clip norm": plan.max_grad_norm if plan.max_grad_norm is not None else "none",
            }
        )
    )


def _kept(store: "Store", lineage: "Lineage") -> str:
    """Return the guarantees that weights keep from private runs behind them on other stores; none
    if public images that shaped them were chosen in confidence.
    """
    from dpvision.runs.lineage import shaped_in_confidence
    from dpvision.statement.guarantee import other_stores
    from dpvision.statement.history_phrases import kept

    if shaped_in_confidence(lineage):
        return ""
    return kept(other_stores(list(lineage), store.store_id, fixed=False))


def _images_of_a_person(unit: Unit, of_head: bool) -> dict[str, object]:
    """Return how many images of a person are used, where people are declared."""
    k = unit.max_records
    if not unit.is_person:
        return {}
    if not unit.draws_people:
        return {"images per person, at most": k}
    if not of_head:
        return {"images per person in a step": k}
    mean = f"the mean of the features of at most {k} images of one class"
    row = "the features of one image" if k == 1 else mean
    return {"a person's row": f"{row}, the same in every release; others take no part"}
