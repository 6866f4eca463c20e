"""Shared by the commands that make a run: options, the run's folder, and checks of --resume."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpvision.cli.paths import check_store
from dpvision.config import RunConfig
from dpvision.config.plain import setting
from dpvision.config.resolve import applied
from dpvision.errors import ConfigError
from dpvision.runs.spent import spent

if TYPE_CHECKING:
    from dpvision.data.store import Store
    from dpvision.privacy.composition import Part
    from dpvision.privacy.plan import DPPlan
    from dpvision.weights import Lineage


@dataclass(frozen=True)
class RunArgs:
    """Options shown last in a command's help. A command lists this base class before its own
    options, so that those come first.
    """

    name: str | None = None
    """Name of the run's folder; if omitted, the recipe's name."""
    runs: Path = Path("runs")
    """Folder that holds the runs."""
    resume: bool = False
    """Continue an existing run with its own settings (only --hardware.* may change) and new secret
    keys.
    """
    resume_or_start: bool = False
    """Continue the run if there is one, else start it: one command for a job that may be preempted.
    """
    dry_run: bool = False
    """Print the plan, run all checks and stop: nothing is trained, nothing is charged."""
    quiet: bool = False
    """Print no progress."""
    show_confidential: bool = False
    """Print what depends on private images (loss, throughput, scores) even if the output is not a
    terminal, such as a job's log.
    """
    json: bool = False
    """Print the result as JSON."""

    def root(self, recipe: str) -> Path:
        """The run's folder.

        Raises:
            ConfigError: the name is not one of a folder in ``runs``.
        """
        if self.name is not None and (self.name == ".." or Path(self.name).name != self.name):
            raise ConfigError(
                f"run: name={self.name!r}; expected the name of one folder. Give the folder that "
                "it is to be in as --runs."
            )
        return self.runs / (self.name or recipe)

    def say(self, text: str) -> None:
        """Print text before the result, unless --json or --quiet is given."""
        if not self.json and not self.quiet:
            print(text, flush=True)


def goes_on(args: RunArgs, recipe: str) -> bool:
    """Return whether a run goes on: with --resume, and with --resume-or-start if there is one."""
    from dpvision.runs.folder import run_base

    return args.resume or (args.resume_or_start and run_base(args.root(recipe)) is not None)


def saved_config(command: str, root: Path, recipe: str) -> RunConfig:
    """Return the settings that the run in ``root`` was started with.

    Raises:
        ConfigError: the run is of another recipe.
        CheckpointError: there is no run, or it cannot be read.
    """
    from dpvision.runs.folder import read_run

    _, config, _ = read_run(root)
    if config.recipe != recipe:
        raise ConfigError(
            f"{command}: recipe={recipe!r}; expected {config.recipe!r}, the recipe of {root}. "
            f"Use `dpvision {command} {config.recipe}`, or another --name."
        )
    return config


def check_places(root: Path, config: RunConfig, *, dry_run: bool) -> None:
    """Refuse a new run whose name is taken, whose store is none, or whose warm start is missing,
    before slow imports.

    Raises:
        CheckpointError: a run with this name exists, or the run that this one starts from does not.
        DataError: there is no store.
    """
    from dpvision.runs.folder import OTHERS_WEIGHTS, require_new, require_parent

    if not dry_run:
        require_new(root)
    if config.data.store is None:
        return  # refused later, with what is missing
    check_store(Path(config.data.store))
    if config.init_from is not None and not config.init_from.startswith(OTHERS_WEIGHTS):
        require_parent(config.init_from)


def resumed_hardware(
    command: str, root: Path, asked: Mapping[str, Any], saved: RunConfig
) -> dict[str, Any]:
    """Return the hardware settings of a resumed run, the only ones that may differ from its
    original settings.

    Args:
        asked: settings asked for, as for ``config.resolve``.

    Raises:
        ConfigError: another setting differs.
    """
    config = applied(saved, asked)
    if replace(config, hardware=saved.hardware) != saved:
        names = [name for name in asked if setting(config, name) != setting(saved, name)]
        raise ConfigError(
            f"{command}: {', '.join(names) or 'settings'} differ from those of {root}; expected "
            "only --hardware.* with --resume, and the run's own with --resume-or-start. Drop the "
            "others, or choose another --name."
        )
    return {f.name: getattr(config.hardware, f.name) for f in fields(config.hardware)}


def dry_run(
    plan: "DPPlan", store: "Store", lineage: "Lineage", charge: dict[str, Any]
) -> dict[str, Any]:
    """Return a plan and what a run of it would spend, ready for JSON.

    Args:
        charge: from ``charge_words``.
    """
    from dpvision.runs.lineage import runs_on

    return {
        "dry_run": True,
        **plan.to_dict(),
        "store_visibility": store.visibility,
        "total": spent(plan, plan.steps, runs_on(lineage, store.store_id))[0],
        "store_total": charge,
    }


def executed(
    root: Path,
    plan: "DPPlan",
    steps: int,
    behind: "tuple[Part, ...]",
    complete: bool,
    noun: str = "steps",
) -> tuple[dict[str, Any], str]:
    """Return what a run executed and spent, ready for JSON and as a line."""
    cost, said = spent(plan, steps, behind)
    result = {"run": str(root), "complete": complete, "steps": steps, **cost}
    ended = f"{'Finished' if complete else 'Stopped'} after {steps} of {plan.steps} {noun}"
    return result | {"guarantee": plan.guarantee}, f"{ended}: {said}. Run folder: {root}"


def announce(text: str) -> None:
    """Print to standard error, even with --json and --quiet: what a user must know is not progress
    output.
    """
    print(text, file=sys.stderr, flush=True)
