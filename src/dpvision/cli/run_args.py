"""What the commands that make a run have in common: options, the run's folder, what --resume keeps to, and words for what was spent."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from dpvision.config import RunConfig
from dpvision.errors import ConfigError
from dpvision.privacy.composition import Part, parts_of, total_epsilon
from dpvision.privacy.plan import DPPlan
from dpvision.train.folder import read_run, run_base


@dataclass(frozen=True)
class Where:
    name: str | None = None
    """Name of the run's folder; the recipe's name if left out."""
    runs: Path = Path("runs")
    """Folder that holds the runs."""

    def root(self, recipe: str) -> Path:
        """The run's folder."""
        return self.runs / (self.name or recipe)


@dataclass(frozen=True)
class RunArgs(Where):
    """The last options of such a command. It names this class before that of its own options: these come first in its help then."""

    resume: bool = False
    """Go on with an existing run: its own settings (only --hardware.* may change), new secret keys."""
    dry_run: bool = False
    """Make the plan and all checks, then stop: nothing is trained, nothing is charged."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print the result as JSON."""
    config: Annotated[RunConfig, tyro.conf.arg(name="")] = field(kw_only=True)

    def say(self, text: str) -> None:
        """Print what comes before the result, for people who want to read it."""
        if not self.json and not self.quiet:
            print(text, flush=True)


def saved_config(command: str, root: Path, recipe: str) -> RunConfig | None:
    """The settings that the run in ``root`` was started with; None where there is no run.

    Raises:
        ConfigError: it is of another recipe. CheckpointError: it cannot be read.
    """
    if run_base(root) is None:
        return None
    _, config, _ = read_run(root)
    if config.recipe != recipe:
        raise ConfigError(f"{command}: recipe={recipe!r}; expected {config.recipe!r}, the recipe of {root}. Correct one of them.")
    return config


def resumed_hardware(command: str, root: Path, asked: RunConfig, saved: RunConfig) -> dict[str, Any]:
    """The hardware settings of a run that goes on: all that may differ from those that it was started with.

    Raises:
        ConfigError: something else differs.
    """
    if replace(asked, hardware=saved.hardware) != saved:
        raise ConfigError(f"{command}: settings differ from those of {root}; expected only --hardware.* with --resume. Drop the others.")
    return {f.name: getattr(asked.hardware, f.name) for f in fields(asked.hardware)}


COMPOSED = {
    "pld": "composed, if all settings were fixed beforehand",
    "gaussian": "composed as Gaussians",
    "renyi": "composed by Renyi divergences",
    "filter": "by a Renyi filter, for settings chosen after seeing earlier results",
    "basic": "added up",
}
"""How the epsilons of several runs were put together, by ``composition.Method``."""


def spent(plan: DPPlan, steps: int, behind: tuple[Part, ...] = ()) -> tuple[dict[str, Any], str]:
    """What was executed has cost, with the runs ``behind`` its weights on the same store.

    Returns:
        epsilon and delta of all runs (both None without a guarantee, or before the first step), epsilon of this run alone as
        this_run_epsilon, for JSON; and the same in words.
    """
    if plan.guarantee != "dp" or not steps:
        return {"epsilon": None, "delta": None, "this_run_epsilon": None}, "no privacy guarantee"
    own = total_epsilon(parts_of([(plan, steps)]))[0]
    epsilon, delta, method = total_epsilon(parts_of([*behind, (plan, steps)]))
    said = f"epsilon {epsilon:.4g} at delta {delta:.3g}"
    if behind:
        said += f" for this run and {len(behind)} before it on this store, {COMPOSED[method]} (this run alone: epsilon {own:.4g})"
    return {"epsilon": epsilon, "delta": delta, "this_run_epsilon": own}, said


def lost_words(lost: int, unit: str) -> list[str]:
    """A line about charges without a result."""
    return [f"{lost} {unit} were charged and lost in a crash; they count in epsilon."] if lost else []
