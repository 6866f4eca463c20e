"""Shared by the commands that make a run: options, the run's folder, checks of --resume, and text
about the epsilon spent.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpvision.cli.paths import check_store
from dpvision.config import RunConfig
from dpvision.config.resolve import applied
from dpvision.errors import ConfigError
from dpvision.privacy.printed import up, up_delta

if TYPE_CHECKING:
    from dpvision.data.store import Store
    from dpvision.privacy.composition import Part
    from dpvision.privacy.plan import DPPlan


@dataclass(frozen=True)
class Where:
    name: str | None = None
    """Name of the run's folder; if omitted, the recipe's name."""
    runs: Path = Path("runs")
    """Folder that holds the runs."""

    def root(self, recipe: str) -> Path:
        """The run's folder."""
        return self.runs / (self.name or recipe)


@dataclass(frozen=True)
class RunArgs(Where):
    """Options shown last in a command's help. A command lists this base class before its own
    options, so that those come first.
    """

    resume: bool = False
    """Continue an existing run with its own settings (only --hardware.* may change) and new secret
    keys.
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

    def say(self, text: str) -> None:
        """Print text before the result, unless --json or --quiet is given."""
        if not self.json and not self.quiet:
            print(text, flush=True)


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
    from dpvision.runs.folder import require_new, require_parent

    if not dry_run:
        require_new(root)
    if config.data.store is None:
        return  # refused later, with what is missing
    check_store(Path(config.data.store))
    if config.init_from is not None and not config.init_from.startswith("timm:"):
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
        raise ConfigError(
            f"{command}: settings differ from those of {root}; expected only --hardware.* with "
            "--resume. Drop the others."
        )
    return {f.name: getattr(config.hardware, f.name) for f in fields(config.hardware)}


STOPPED = 75
"""Exit status after SIGINT, SIGTERM or SIGUSR1: the run is saved and --resume continues it
(EX_TEMPFAIL of sysexits.h).
"""
COMPOSED = {
    "pld": "composed, if all settings were fixed beforehand",
    "gaussian": "composed as Gaussians",
    "renyi": "composed by Renyi divergences",
    "filter": "by a Renyi filter, for settings chosen after seeing earlier results",
    "basic": "added up",
}
"""How the epsilons of several runs were combined, by ``composition.Method``."""


def guarantee_words(
    plan: "DPPlan", epsilon: float, unit_epsilon: float | None, delta: float
) -> str:
    """Return the guarantee as one line: per image, and per person if people are declared."""
    said, k = plan.unit.stated(epsilon, unit_epsilon), plan.max_records_per_unit
    if not said.of_person:
        whom = "" if plan.num_units is None else " for a single image, unknown for a person,"
        return f"epsilon {up(said.epsilon)}{whom} at delta {up_delta(delta)}"
    images = (
        f"at most {k} images"
        if k > 1
        else "one image"
        if plan.sampling_unit == "person"
        else "one image of each"
    )
    step = " in a step" if plan.sampling_unit == "person" else ""
    beside = "" if said.of_image is None else f", {up(said.of_image)} for a single image,"
    return (
        f"epsilon {up(said.epsilon)} for a person ({images}{step}){beside} at delta "
        f"{up_delta(delta)}"
    )


def spent(
    plan: "DPPlan", steps: int, behind: "tuple[Part, ...]" = ()
) -> tuple[dict[str, Any], str]:
    """Return the privacy cost of a run that was charged ``steps`` steps (``plan.stated_steps``: all
    planned ones), together with the runs ``behind`` the weights on the same store.

    Returns:
        A dict for JSON and a line of text. The dict has epsilon, unit_epsilon (None without
        declared units) and delta of all runs, and this_run_epsilon; all are None without a
        guarantee or before the first step.
    """
    from dpvision.privacy.composition import parts_of, total_epsilon, unit_epsilon

    if plan.guarantee != "dp" or not steps:
        return {
            "epsilon": None,
            "unit_epsilon": None,
            "delta": None,
            "this_run_epsilon": None,
        }, "no privacy guarantee"
    alone, parts = parts_of([(plan, steps)]), parts_of([*behind, (plan, steps)])
    own = total_epsilon(alone)[0]
    epsilon, delta, method = total_epsilon(parts)
    unit = unit_epsilon(parts)
    said = guarantee_words(plan, epsilon, unit, delta)
    if steps < plan.steps:
        said += f" for all {plan.steps} planned"
    if behind:
        said += (
            f" for this run and {len(behind)} before it on this store, {COMPOSED[method]} (this "
            "run alone: "
        )
        said += f"{guarantee_words(plan, own, unit_epsilon(alone), plan.delta)})"
    return {"epsilon": epsilon, "unit_epsilon": unit, "delta": delta, "this_run_epsilon": own}, said


def charge_words(
    store: "Store",
    plan: "DPPlan",
    *,
    runs: int = 1,
    chosen: bool = False,
    besides: Collection[str] = (),
) -> tuple[dict[str, Any], str]:
    """Return what ``store`` was charged before ``runs`` runs of ``plan`` and in total with them,
    ready for JSON and as text.

    Runs without a guarantee on public images cost nothing, and have no text. Arguments are those of
    ``account.charge_of``.
    """
    from dpvision.privacy.account import charge_of

    charge = charge_of(store.path, plan, runs=runs, chosen=chosen, besides=besides)
    if plan.guarantee != "dp" and store.visibility == "public":
        return asdict(charge), ""
    whose = " for a person" if charge.of_person else ""
    how = " by a Renyi filter" if chosen else ""
    before = (
        "nothing" if not charge.runs else "no total holds, because a run was without a guarantee"
    )
    if charge.runs and charge.before is not None:
        before = (
            f"epsilon {up(charge.before)}{whose}{how} by {charge.runs} "
            f"run{'s' if charge.runs > 1 else ''}"
        )
    after = (
        "no total holds"
        if charge.after is None
        else f"epsilon {up(charge.after)}{whose}{how} at delta {up_delta(charge.delta)}"
    )
    what = "this run" if runs == 1 else f"all {runs} runs"
    return asdict(charge), f"Charged to this store before: {before}. In total with {what}: {after}."


def lost_words(lost: int, noun: str) -> list[str]:
    """Return a line about charged steps without a result, if there are any."""
    if not lost:
        return []
    return [f"{lost} {noun} were charged and lost; they count in epsilon."]


def resume_words(
    plan: "DPPlan", charged: int, in_weights: int, saved: bool, noun: str = "steps"
) -> str:
    """Return text about the steps that a resumed run has spent, lost and left.

    Args:
        charged: steps in the ledger.
        in_weights: charged steps whose result is in the newest checkpoint.
        saved: whether there is a checkpoint.
    """
    lines = [
        f"Resuming: {charged} of {plan.steps} {noun} charged ({spent(plan, charged)[1]}), "
        f"{plan.steps - charged} left."
    ]
    lines += lost_words(charged - in_weights, noun)
    if not saved and charged:
        lines.append(
            f"There is no checkpoint: the run restarts from the initial weights, with {charged} "
            f"charged {noun} lost."
        )
    return "\n".join(lines)


def announce(text: str) -> None:
    """Print to standard error, even with --json and --quiet: what a user must know is not progress
    output.
    """
    print(text, file=sys.stderr, flush=True)
