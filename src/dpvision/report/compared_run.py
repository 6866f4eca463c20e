"""One run as a comparison sees it: settings, epsilon from its ledger, its losses and its scores, and whether these may be shown."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.checkpoint import find_checkpoint, list_checkpoints, read_manifest
from dpvision.config import HeadConfig, RunConfig
from dpvision.errors import CheckpointError, DataError
from dpvision.eval.score_file import read_scores
from dpvision.models import count_parameters
from dpvision.privacy.composition import parts_of, total_epsilon, unit_epsilon
from dpvision.privacy.ledger import LedgerContents, read_ledger
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.report import numbers
from dpvision.report.curves import size_text
from dpvision.runs.folder import read_run
from dpvision.runs.lineage import runs_on, shaped_in_confidence


@dataclass(frozen=True)
class ComparedRun:
    """What the page knows of one run."""

    name: str
    """Of its folder; with the folder above where two have the same."""
    config: RunConfig
    about: dict[str, Any]
    num_parameters: int
    """Of the whole model, the decoder included, as the papers count."""
    start: str
    """"warm start" or "random start"."""
    steps: int | None
    """Charged in the ledger; None where no ledger is at hand."""
    planned_epsilon: float | None
    """Of all planned steps, and of the runs before this one on the same store that its weights come from. This and the epsilons below are
    a person's where people are declared, else an image's."""
    epsilon: float | None
    """Of this run and of those before it on the same store that its weights come from, from the ledger; None without a guarantee or a
    ledger."""
    this_run_epsilon: float | None
    """Of this run alone."""
    step_N: np.ndarray
    loss_N: np.ndarray
    scores: tuple[dict[str, Any], ...]

    @property
    def is_head(self) -> bool:
        """A head on frozen features: it has no losses, and its start is its encoder."""
        return isinstance(self.config.model, HeadConfig)

    @property
    def gradient_N(self) -> np.ndarray:
        """Sample-gradients computed up to each step: expected, for the realised batch sizes are secret and do not differ by much."""
        return self.step_N * self.config.privacy.expected_batch_size * self.config.data.views

    @property
    def cost(self) -> str:
        """Epsilon as a reader looks for it in a legend."""
        if self.config.privacy.guarantee != "dp":
            return "simulated" if self.config.privacy.guarantee == "simulated" else "no guarantee"
        if self.epsilon is None or self.this_run_epsilon is None:
            return "ε unknown"
        person = "" if self.config.privacy.num_units is None else " per person"
        total = f"ε {numbers.round_up(self.epsilon, 2)}{person}"
        if self.epsilon == self.this_run_epsilon:
            return total
        return f"total {total} (this run {numbers.round_up(self.this_run_epsilon, 2)})"

    @property
    def planned_cost(self) -> str:
        """The epsilon that was asked for or follows from the settings, in two digits: runs of one plan have the same."""
        person = "" if self.config.privacy.num_units is None else " per person"
        return "no guarantee" if self.planned_epsilon is None else f"ε {self.planned_epsilon:.2g}{person}"

    @property
    def label(self) -> str:
        """Name, size and epsilon."""
        return f"{self.name}: {size_text(self.num_parameters)}, {self.cost}"


def made_of_public_images(root: Path) -> bool:
    """Whether a run's store is public, not cleared of private twins, and whatever shaped the weights it started from public or guaranteed.

    Raises:
        CheckpointError: there is no run, or its newest manifest cannot be read.
    """
    base, config, about = read_run(root)
    if about["results_visibility"] != "public":
        return False
    if not list_checkpoints(base):
        return config.init_from is None  # a lineage that is not written down yet is not known to be public
    return not shaped_in_confidence(read_manifest(find_checkpoint(base))["lineage"])


def read_compared(root: Path, name: str, *, public_scores_only: bool = False) -> ComparedRun:
    """What the page needs of one run.

    Args:
        name: as the page prints it.
        public_scores_only: leave scores on private images out.

    Raises:
        CheckpointError: there is no run, no loss has been logged, or a file cannot be read. PrivacyError: its ledger was altered.
    """
    base, config, about = read_run(root)
    step_N, loss_N = read_losses(root / "confidential" / "metrics.jsonl")
    if not isinstance(config.model, HeadConfig) and not np.isfinite(loss_N).any():
        raise CheckpointError(f"compare: {root} has no loss yet; expected confidential/metrics.jsonl with one. Wait for its first steps.")
    ledger = _ledger(base, config, about)
    folders = dict.fromkeys([base, root / "confidential"])
    scores = [entry for folder in folders for entry in read_scores(folder / "scores.json")]
    return ComparedRun(
        name=name,
        config=config,
        about=about,
        num_parameters=count_parameters(config.model),
        start="random start" if config.init_from is None and not isinstance(config.model, HeadConfig) else "warm start",
        steps=None if ledger is None else ledger.steps,
        planned_epsilon=_planned_epsilon(base, ledger),
        epsilon=_spent(ledger, alone=False),
        this_run_epsilon=_spent(ledger, alone=True),
        step_N=step_N,
        loss_N=loss_N,
        scores=tuple(s for s in scores if s["visibility"] == "public" or not public_scores_only),
    )


def read_losses(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of a metrics.jsonl, float64 (N,), ascending; NaN for a batch without records. Lines cut by a crash are left out."""
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
            found[int(entry["step"])] = float("nan") if entry["loss"] is None else float(entry["loss"])
        except (ValueError, KeyError, TypeError):
            continue
    steps = sorted(found)
    return np.array(steps, dtype=np.float64), np.array([found[step] for step in steps], dtype=np.float64)


def _spent(ledger: LedgerContents | None, *, alone: bool) -> float | None:
    if ledger is None or ledger.plan.guarantee != "dp":
        return None
    behind = () if alone else runs_on(ledger.lineage, ledger.store_id)
    return _epsilon([*behind, (ledger.plan, ledger.steps)])


def _planned_epsilon(base: Path, ledger: LedgerContents | None) -> float | None:
    try:
        plan = DPPlan.from_dict(json.loads((base / "plan.json").read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"compare: {base / 'plan.json'} cannot be read ({error}). Restore it as the run wrote it.") from None
    behind = () if ledger is None or plan.guarantee != "dp" else runs_on(ledger.lineage, ledger.store_id)
    return _epsilon([*behind, (plan, plan.steps)]) if plan.guarantee == "dp" else None


def _epsilon(runs: Sequence[tuple[DPPlan, int]]) -> float | None:
    """Of all runs together, for whom the last one's guarantee is; None where there is no accounting for people."""
    parts = parts_of(runs)
    return total_epsilon(parts)[0] if runs[-1][0].num_units is None else unit_epsilon(parts)


def _ledger(base: Path, config: RunConfig, about: dict[str, Any]) -> LedgerContents | None:
    """The truth beside the store where it is at hand, else the run folder's copy, else nothing."""
    try:
        ledgers = None if config.data.store is None else StoreLedgers.of(Path(config.data.store))
    except DataError:
        ledgers = None
    if ledgers is not None and ledgers.store_id == about["store_id"]:
        truth = ledgers.read_all().get(about["run_id"])
        if truth is not None:
            return truth
    copy = base / "ledger.jsonl"
    return read_ledger(copy) if copy.exists() else None
