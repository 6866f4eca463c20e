"""The trials of a study: ordinary runs, chosen by Optuna, scored, and counted before they start.

The journal on disk has each trial before its run is made, and the run's id before the first charge,
so that a crash loses no count.
"""

import itertools
import json
import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dpvision.config import HeadConfig, RunConfig
from dpvision.config.resolve import read_of, resolve
from dpvision.environment import own_cores
from dpvision.errors import CheckpointError, ConfigError, DPVisionError, PrivacyError, RunStopped
from dpvision.privacy.printed import up
from dpvision.tune.space import Range, Settings, Space
from dpvision.tune.study import (
    LOSS,
    OWN_HEAD,
    Study,
    charged_event,
    plan_of,
    study_folder,
    trial_folder,
)

_SMALL = 100
"""Combinations of lists, up to which none is drawn again before all were."""
_RANDOM_TRIALS = 10
"""Optuna's default: TPE learns from these."""


@dataclass(frozen=True)
class Trial:
    """A finished trial; without a score it failed."""

    number: int
    settings: Settings
    score: float | None
    run_id: str | None
    """Of its run, whose ledger counts even if the run folder is gone; None if the trial failed
    before it had a run.
    """


@dataclass(frozen=True)
class Found:
    """What a search found."""

    trials: list[Trial]
    """All finished trials, the best first; those without a score come last."""
    refused: PrivacyError | None
    """The refusal that ended the search: of a trial that has no run and was charged nothing, by the
    owner's cap for example. A resumed study tries that trial again.
    """

    @property
    def best(self) -> Trial | None:
        """None if every trial failed."""
        return self.trials[0] if self.trials and self.trials[0].score is not None else None


def search(
    study: Study,
    say: Callable[[str, str], None] = lambda line, detail: None,
    *,
    resume: bool = False,
    quiet: bool = True,
) -> Found:
    """Run the trials that are left.

    Args:
        say: called with a line, and with what follows from results, which may be private.
        resume: whether the study in its folder goes on.
        quiet: whether trials print no progress of their own.

    Raises:
        RunStopped: by a signal; the study can be resumed.
        PrivacyError: a trial that has a run is refused.
        CheckpointError: the folder is taken, in use, or holds no study to resume; or the journal
            lacks trials that have run folders.
        ConfigError: the resumed study asked for something else.
    """
    with study_folder(study, resume=resume) as folder:
        trials, refused = _search(study, folder / "study.journal", say, quiet=quiet)
    ranked = sorted(
        trials,
        key=lambda trial: (
            trial.score is None,
            (trial.score or 0.0) * (-1 if study.maximize else 1),
        ),
    )
    return Found(ranked, refused)


def _search(
    study: Study, journal: Path, say: Callable[[str, str], None], *, quiet: bool
) -> tuple[list[Trial], PrivacyError | None]:
    """Return the finished trials, and what ended the search before the last one."""
    import optuna
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import PartialFixedSampler
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _drop_torn_line(journal)
    Path(f"{journal}.lock").unlink(
        missing_ok=True
    )  # of a process that was killed: the study's own lock is ours
    storage = JournalStorage(JournalFileBackend(str(journal)))
    found = optuna.create_study(
        storage=storage,
        study_name="tune",
        direction="maximize" if study.maximize else "minimize",
        load_if_exists=True,
    )
    tpe = optuna.samplers.TPESampler(
        n_startup_trials=_RANDOM_TRIALS, seed=study.config.seed + len(found.trials)
    )
    distributions = _distributions(study.space)

    runs = [path.name for path in study.root.iterdir() if re.fullmatch(r"trial-[0-9]+", path.name)]
    lost = [name for name in runs if int(name.removeprefix("trial-")) >= len(found.trials)]
    if lost:
        raise CheckpointError(
            f"tune: {journal} does not count {', '.join(lost)}; expected every run folder. "
            "Restore it, or start a new study."
        )

    def finish(number: int, settings: Settings, *, resume: bool = False) -> PrivacyError | None:
        name = trial_folder(study.root, number).name
        try:
            value = _run_trial(
                study,
                number,
                settings,
                found.user_attrs.get(name),
                partial(found.set_user_attr, name),
                quiet=quiet,
            )
        except DPVisionError as error:
            if isinstance(error, PrivacyError) and name not in found.user_attrs:
                say(
                    f"Trial {number} was refused before it was charged. The search ends here; "
                    "--resume tries it again.",
                    "",
                )
                return error
            found.tell(number, state=TrialState.FAIL)
            if isinstance(error, PrivacyError) and not resume:  # the next one would be refused, too
                raise
            say(
                f"Trial {number} of {study.asked.trials} ended.", f" It failed, and counts: {error}"
            )
            return None
        found.tell(number, value)
        say(f"Trial {number} of {study.asked.trials} ended.", f" Score: {value:.5g}")
        return None

    refused = None
    for one in found.get_trials(states=(TrialState.RUNNING,)):
        if one.params.keys() == distributions.keys():
            refused = finish(one.number, one.params, resume=True) or refused
        else:  # killed before it had its settings
            found.tell(one.number, state=TrialState.FAIL)
    while refused is None and (begun := len(found.trials)) < study.asked.trials:
        if study.budget is not None and not study.budget.admits(
            [charged_event(study.plan)] * (begun + 1)
        ):
            say(
                f"Refused: trial {begun} would exceed the budget of epsilon "
                f"{up(study.budget.epsilon)}. The search ends here.",
                "",
            )
            break
        untried = _untried(study, [one.params for one in found.trials])
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            found.sampler = PartialFixedSampler(untried, tpe)
        asked = found.ask(distributions)
        refused = finish(asked.number, asked.params)
    finished = found.get_trials(states=(TrialState.COMPLETE, TrialState.FAIL))
    ids = {
        one.number: found.user_attrs.get(trial_folder(study.root, one.number).name)
        for one in finished
    }
    return [Trial(one.number, one.params, one.value, ids[one.number]) for one in finished], refused


def _untried(study: Study, begun: Sequence[Settings]) -> dict[str, Any]:
    """Draw a combination that no trial had, from a small space of lists. Empty, so that the sampler
    chooses, where there is none, and after the random trials if --trials do not reach them all.
    """
    lists = [values for values in study.space.values() if not isinstance(values, Range)]
    count = math.prod(map(len, lists))
    if len(lists) < len(study.space) or count > _SMALL:
        return {}
    if len(begun) >= _RANDOM_TRIALS and count > study.asked.trials:
        return {}

    def read(settings: Settings) -> str:
        return repr(sorted(read_of(study.config, settings).items()))

    tried = set(map(read, begun))
    every = [dict(zip(study.space, one, strict=True)) for one in itertools.product(*lists)]
    left = [one for one in every if read(one) not in tried]
    return random.Random(study.config.seed + len(begun)).choice(left) if left else {}


def trial_config(study: Study, settings: Settings) -> RunConfig:
    """Return a trial's config.

    Raises:
        ConfigError: the settings contradict each other.
        PrivacyError: they change the price.
    """
    config = resolve(study.config, read_of(study.config, settings))
    if study.asked.simulate is not None:
        from dpvision.privacy.planner import simulated

        return replace(config, privacy=simulated(config.privacy, study.asked.simulate))
    if study.asked.how == "charged":
        plan = plan_of(config)
        noise = plan.noise.clipped_to(study.plan.max_grad_norm)
        if not replace(plan, noise=noise, clipping=study.plan.clipping).same_mechanism(study.plan):
            raise PrivacyError(
                f"tune: {dict(settings)} changes the plan of a trial; expected the one that was "
                "priced. Leave it out of --space."
            )
    return config


def _run_trial(
    study: Study,
    number: int,
    settings: Settings,
    run_id: str | None,
    keep: Callable[[str], None],
    *,
    quiet: bool,
) -> float:
    """Run or go on with one trial, and return its score.

    Args:
        run_id: of the trial's run; None if it has none yet. A trial has one run, because the budget
            counts one for each trial.
        keep: called with the run's id before anything is charged.
    """
    from dpvision.runs.folder import read_run, run_base

    folder = trial_folder(study.root, number)
    config = trial_config(study, settings)
    started = run_base(folder) is not None
    if run_id is not None and not (started and read_run(folder)[2]["run_id"] == run_id):
        raise CheckpointError(
            f"tune: {folder} no longer holds run {run_id}; expected it until the study ends. Its "
            "ledger still counts."
        )
    make = _fit_head if isinstance(config.model, HeadConfig) else _fit_network
    if not make(config, folder, resume=started, quiet=quiet, keep=keep):
        raise RunStopped("Stopped; the trial is saved. Continue with --resume.")
    if run_base(folder) != folder and not study.confidential:
        raise PrivacyError(
            f"tune: {folder} is confidential, because its weights come from private images "
            "without a guarantee; expected public results. Start from other weights."
        )
    return last_loss(folder) if study.objective == LOSS else _score(study, folder)


def _fit_network(
    config: RunConfig, folder: Path, *, resume: bool, quiet: bool, keep: Callable[[str], None]
) -> bool:
    from dpvision.encoders.starting_weights import open_parent
    from dpvision.train.loop import fit
    from dpvision.train.start import new_session, resumed_session

    with (
        resumed_session(folder, None, open_parent)
        if resume
        else new_session(config, folder, open_parent) as session
    ):
        assert session.run is not None, "one process"
        keep(session.run.folder.run_id)
        return fit(session, quiet=quiet)


def _fit_head(
    config: RunConfig, folder: Path, *, resume: bool, quiet: bool, keep: Callable[[str], None]
) -> bool:
    from dpvision.adapt.session import adapt, new_head_session, resumed_head_session

    with resumed_head_session(folder) if resume else new_head_session(config, folder) as session:
        keep(session.run.folder.run_id)
        if not session.finished:
            adapt(session)
        return session.run.ledger.steps == session.plan.steps or session.finished


def last_loss(folder: Path) -> float:
    """Return the mean training loss of the last tenth of a run's steps; confidential where the
    store is private.

    Raises:
        ConfigError: it is not finite.
    """
    lines = (folder / "confidential" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines[-max(1, len(lines) // 10) :]]
    known = [loss for loss in losses if loss is not None]
    mean = math.fsum(known) / len(known) if known else math.nan
    if not math.isfinite(mean):
        raise ConfigError(
            "tune: the loss is not finite at the end; expected a number. Lower the largest "
            "learning rate of --space."
        )
    return mean


def _score(study: Study, folder: Path) -> float:
    """Score a trial on the test store, write its scores as ``dpvision evaluate`` does, and return
    the first of the network's own.

    Raises:
        PrivacyError: the score is private where trials must have public ones.
    """
    from dpvision.data.open import open_store
    from dpvision.eval.probes.own_head import score_own_head
    from dpvision.eval.probes.protocols import make_protocols
    from dpvision.eval.probes.suite import evaluate
    from dpvision.eval.score import is_of_the_run
    from dpvision.eval.score_file import NOTHING_FITTED, note_scored, write_scores

    assert study.asked.test is not None
    store, workers = open_store(study.asked.test), study.config.hardware.workers or own_cores()
    note_scored(folder, store)
    if study.objective == OWN_HEAD:
        scores, fitted = score_own_head(folder, store, workers=workers), NOTHING_FITTED
    else:
        protocols = make_protocols((study.objective,))
        scores, fitted = (
            evaluate(folder, store, protocols=protocols, against=(), workers=workers),
            study.asked.test.name,
        )
    value = next(score for score in scores if is_of_the_run(score.name))
    if study.asked.how in ("public", "charged") and value.visibility != "public":
        raise PrivacyError(
            "tune: the score of a trial is private; expected a public one, which costs nothing. "
            "Use public test images."
        )
    write_scores(folder, scores, train_data=fitted, test_data=study.asked.test.name)
    return value.value


def _distributions(space: Space) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def of(values: Range | tuple[Any, ...]) -> Any:
        if not isinstance(values, Range):
            return CategoricalDistribution(values)
        if values.whole:
            return IntDistribution(int(values.low), int(values.high), log=values.log)
        return FloatDistribution(values.low, values.high, log=values.log)

    return {name: of(values) for name, values in space.items()}


def _drop_torn_line(journal: Path) -> None:
    """Remove an unfinished last line, which a crash left before anything of it was executed."""
    if journal.exists() and (data := journal.read_bytes()) and not data.endswith(b"\n"):
        from dpvision.files import write_file

        write_file(journal, data[: data.rfind(b"\n") + 1])
