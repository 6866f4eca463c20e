"""The data of one run for a comparison: settings, epsilon from its ledger, losses and scores, and
whether they may be shown.
"""

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
from dpvision.privacy.printed import up
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.report.curves import size_text
from dpvision.runs.folder import read_run
from dpvision.runs.lineage import private_stores, runs_on, shaped_in_confidence
from dpvision.strict_json import parse_json


@dataclass(frozen=True)
class ComparedRun:
    """The data of one run on the page."""

    name: str
    """Name of its folder, with the parent folder if two runs have the same name."""
    config: RunConfig
    about: dict[str, Any]
    num_parameters: int
    """Of the whole model including the decoder, as in the papers."""
    start: str
    """"warm start" or "random start"."""
    steps: int | None
    """Steps charged in the ledger, or None without a ledger."""
    planned_epsilon: float | None
    """Epsilon of all planned steps together with the earlier runs on the same store behind the
    weights. This and the epsilons below are per person if people are declared, otherwise per image.
    """
    epsilon: float | None
    """The stated epsilon (``composition.parts_of``) together with the earlier runs on the same
    store behind the weights; None without a guarantee or a ledger.
    """
    this_run_epsilon: float | None
    """Epsilon of this run alone."""
    kept_epsilon: float | None
    """Of a run without a guarantee on a public store: the largest epsilon of earlier runs on a
    private store, which its weights keep.
    """
    step_N: np.ndarray
    loss_N: np.ndarray
    scores: tuple[dict[str, Any], ...]

    @property
    def is_head(self) -> bool:
        """Whether the run is a head on frozen features, which has no losses and starts from its
        encoder.
        """
        return isinstance(self.config.model, HeadConfig)

    @property
    def gradient_N(self) -> np.ndarray:
        """Expected number of sample-gradients up to each step, float64 (N,). Realised batch sizes
        are secret.
        """
        return self.step_N * self.config.privacy.expected_batch_size * self.config.views

    @property
    def cost(self) -> str:
        """The stated epsilon, as text for legends."""
        if self.config.privacy.guarantee != "dp":
            own = "simulated" if self.config.privacy.guarantee == "simulated" else "no guarantee"
            return (
                own
                if self.kept_epsilon is None
                else f"{own}; earlier runs ε {up(self.kept_epsilon, 2)}"
            )
        if self.epsilon is None or self.this_run_epsilon is None:
            return "ε unknown"
        person = "" if self.config.privacy.num_units is None else " per person"
        total = f"ε {up(self.epsilon, 2)}{person}"
        if self.epsilon == self.this_run_epsilon:
            return total
        return f"total {total} (this run {up(self.this_run_epsilon, 2)})"

    @property
    def planned_cost(self) -> str:
        """Planned epsilon as text with one decimal; equal for runs with the same plan."""
        person = "" if self.config.privacy.num_units is None else " per person"
        return (
            self.cost
            if self.planned_epsilon is None
            else f"ε {up(self.planned_epsilon, 1)}{person}"
        )

    @property
    def label(self) -> str:
        """Name, size and epsilon, as text."""
        return f"{self.name}: {size_text(self.num_parameters)}, {self.cost}"


def made_of_public_images(root: Path) -> bool:
    """Return whether a run's store is public and was not cleared of private twins, and its parents
    are public or have a guarantee.

    Raises:
        CheckpointError: there is no run, or its newest manifest cannot be read.
    """
    base, config, about = read_run(root)
    if about["results_visibility"] != "public":
        return False
    if not list_checkpoints(base):
        return config.init_from is None  # without a checkpoint the parent's lineage is unknown
    return not shaped_in_confidence(read_manifest(find_checkpoint(base))["lineage"])


def read_compared(root: Path, name: str, *, public_scores_only: bool = False) -> ComparedRun:
    """Read the data of one run for the page.

    Args:
        name: the run's name on the page.
        public_scores_only: whether to leave out scores on private images.

    Raises:
        CheckpointError: there is no run, no loss has been logged, or a file cannot be read.
        PrivacyError: its ledger was altered.
    """
    base, config, about = read_run(root)
    step_N, loss_N = read_losses(root / "confidential" / "metrics.jsonl")
    if not isinstance(config.model, HeadConfig) and not np.isfinite(loss_N).any():
        raise CheckpointError(
            f"compare: {root} has no loss yet; expected confidential/metrics.jsonl with one. "
            "Wait for its first steps."
        )
    ledger = _ledger(base, config, about)
    folders = dict.fromkeys([base, root / "confidential"])
    scores = [entry for folder in folders for entry in read_scores(folder / "scores.json")]
    return ComparedRun(
        name=name,
        config=config,
        about=about,
        num_parameters=count_parameters(config.model),
        start="random start"
        if config.init_from is None and not isinstance(config.model, HeadConfig)
        else "warm start",
        steps=None if ledger is None else ledger.steps,
        planned_epsilon=_planned_epsilon(base, ledger),
        epsilon=_spent(ledger, alone=False),
        this_run_epsilon=_spent(ledger, alone=True),
        kept_epsilon=_kept(ledger, about),
        step_N=step_N,
        loss_N=loss_N,
        scores=tuple(s for s in scores if s["visibility"] == "public" or not public_scores_only),
    )


def read_losses(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read steps (ascending) and losses from a metrics.jsonl, float64 (N,). The loss of an empty
    batch is NaN; torn lines are skipped.
    """
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
            found[int(entry["step"])] = (
                float("nan") if entry["loss"] is None else float(entry["loss"])
            )
        except (ValueError, KeyError, TypeError):
            continue
    steps = sorted(found)
    return np.array(steps, dtype=np.float64), np.array(
        [found[step] for step in steps], dtype=np.float64
    )


def _spent(ledger: LedgerContents | None, *, alone: bool) -> float | None:
    if ledger is None or ledger.plan.guarantee != "dp":
        return None
    behind = () if alone else runs_on(ledger.lineage, ledger.store_id)
    return _epsilon([*behind, (ledger.plan, ledger.steps)])


def _kept(ledger: LedgerContents | None, about: dict[str, Any]) -> float | None:
    if (
        ledger is None
        or ledger.plan.guarantee == "dp"
        or about["store_visibility"] != "public"
        or shaped_in_confidence(ledger.lineage)
    ):
        return None
    parts = [runs_on(ledger.lineage, store_id) for store_id in private_stores(ledger.lineage)]
    found = [_epsilon(runs) for runs in parts if runs]
    return max((epsilon for epsilon in found if epsilon is not None), default=None)


def _planned_epsilon(base: Path, ledger: LedgerContents | None) -> float | None:
    try:
        plan = DPPlan.from_dict(parse_json((base / "plan.json").read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"compare: {base / 'plan.json'} cannot be read ({error}). Restore it as the run "
            "wrote it."
        ) from None
    behind = (
        () if ledger is None or plan.guarantee != "dp" else runs_on(ledger.lineage, ledger.store_id)
    )
    return _epsilon([*behind, (plan, plan.steps)]) if plan.guarantee == "dp" else None


def _epsilon(runs: Sequence[tuple[DPPlan, int]]) -> float | None:
    """Return the total epsilon per person if the last run declares people, otherwise per record;
    None if it cannot be computed.
    """
    parts = parts_of(runs)
    return total_epsilon(parts)[0] if runs[-1][0].num_units is None else unit_epsilon(parts)


def _ledger(base: Path, config: RunConfig, about: dict[str, Any]) -> LedgerContents | None:
    """Return the store's ledger of the run if it can be read, else the run folder's copy, else
    None.
    """
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
