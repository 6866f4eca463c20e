"""A study: what is varied and how, checked and priced before anything runs.

RUNS/NAME/trial-NNN is a trial's run. RUNS/NAME/confidential holds the study: study.json (what was
asked), study.journal (Optuna's; it has times) and trials.txt.
"""

import bisect
import contextlib
import fcntl
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpvision.config import ClassifierConfig, HeadConfig, RunConfig, to_dict, with_settings
from dpvision.config.resolve import candidate_name
from dpvision.errors import CheckpointError, ConfigError, DPVisionError
from dpvision.eval.probes.settings import checked_protocols
from dpvision.privacy.printed import up
from dpvision.strict_json import parse_json
from dpvision.tune.space import How, Space, grid, parse_space

if TYPE_CHECKING:
    from dpvision.data.store import Store
    from dpvision.privacy.account import RenyiFilter
    from dpvision.privacy.plan import DPPlan

FORMAT = "dpvision-tune-2"
LOSS = "loss"
OWN_HEAD = "own_head"
_MOST_CANDIDATES = 100


@dataclass(frozen=True)
class Question:
    """What is to be tuned, and in which way."""

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
    test: Path | None = None
    """Labelled store of other images to score trials on; public, unless trials are simulated. If
    omitted, trials are compared by loss.
    """
    objective: str | None = None
    """own_head, a protocol of `dpvision evaluate` (knn, ridge, ...), or loss. If omitted, own_head
    for classifiers, ridge for other networks, loss without --test.
    """
    simulate: float | None = None
    """Divides batch and noise of simulated trials."""


@dataclass(frozen=True)
class Price:
    """What the trials cost in each way."""

    rows: tuple[tuple[str, str, str, str], ...]
    """Way, epsilon, what stays confidential, the statement's tuning."""
    budget: "RenyiFilter | None"
    """Of the charged way: the one asked for, or the smallest that admits all trials; None if it is
    refused.
    """
    fits: int
    """Number of trials that the budget admits, at most those asked for."""
    one: float
    """Epsilon of a single trial."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON."""
        names = ("epsilon", "confidential", "statement")
        ways: dict[str, Any] = {
            way: dict(zip(names, rest, strict=True)) for way, *rest in self.rows
        }
        if self.budget is not None:
            ways["charged"] |= {
                "budget": self.budget.epsilon,
                "delta": self.budget.delta,
                "order": self.budget.order,
                "fits": self.fits,
            }
        return ways


@dataclass(frozen=True)
class Study:
    """What is searched, and how."""

    root: Path
    asked: Question
    config: RunConfig
    """Of every trial, up to the settings that vary; of a private selection, of all its runs."""
    space: Space
    objective: str
    plan: "DPPlan"
    """Of every trial under a guarantee, up to the clipping."""
    store: "Store"
    price: Price
    private: bool
    """Whether results of the trials are private, by the store or by the test images."""

    @property
    def maximize(self) -> bool:
        return self.objective != LOSS

    @property
    def budget(self) -> "RenyiFilter | None":
        """Of the charged way."""
        return self.price.budget if self.asked.how == "charged" else None

    @property
    def confidential(self) -> bool:
        """Whether the trials' results are confidential: those of simulations on private images."""
        return self.private and self.asked.how == "simulated"

    def question(self) -> dict[str, Any]:
        """What a resumed study must ask again, ready for JSON."""
        return {
            "format": FORMAT,
            "how": self.asked.how,
            "space": sorted(self.asked.space),
            "trials": self.asked.trials,
            "budget": self.asked.budget,
            "objective": self.objective,
            "test": str(self.asked.test),
            "simulate": self.asked.simulate,
            "config": {
                name: value for name, value in to_dict(self.config).items() if name != "hardware"
            },
        }


def plan_study(
    asked: Question, config: RunConfig, root: Path, *, resume: bool = False, dry_run: bool = False
) -> Study:
    """Check and price a study. Nothing runs and nothing is charged.

    Args:
        config: of the recipe to tune, with its store.
        root: the study's folder.
        resume: whether the study in ``root`` goes on.
        dry_run: only the price is wanted: ``root`` may be taken.

    Raises:
        ConfigError: the question contradicts itself, the recipe or the stores, or Optuna is
            missing.
        CheckpointError: ``root`` is taken, or holds no study to resume.
        DataError: there is no store, or, of the charged way, its counts are not those declared.
    """
    objective, how = _objective(asked, config, resume), asked.how
    assert how is not None and config.data.store is not None, "checked"
    space = parse_space(asked.space, config, how)
    selects = how == "private-selection"
    candidates = (
        tuple(candidate_name(one) for one in grid(space, _MOST_CANDIDATES)) if selects else ()
    )
    views = [name for name in space if name.startswith(("data.", "model."))]
    if objective == LOSS and views:
        raise ConfigError(
            f"tune: {views[0]} with --objective loss; expected settings that leave the loss "
            "comparable. Give --test STORE."
        )
    _check_places(asked, config, root, resume=resume, dry_run=dry_run)
    from dpvision.data.open import open_store
    from dpvision.privacy.planner import simulated

    store = open_store(config.data.store)
    test = None if asked.test is None else open_store(asked.test)
    _check_stores(how, store, test)
    private = "private" in {one.results_visibility for one in (store, test) if one is not None}
    if isinstance(config.model, HeadConfig) and not selects:
        if (public := config.model.features.public_store) is not None:
            from dpvision.adapt.public_statistics import open_public, require_apart

            require_apart(open_public(public, store), store)  # as each trial does
        from dpvision.adapt.prepare import with_planned_steps

        # The same number in all trials, whose price it determines, and in the command that uses the
        # best one.
        config = with_planned_steps(config)
    if asked.simulate is not None:
        simulated(config.privacy, asked.simulate)  # raises with the reason
    plan = plan_of(config)
    if how == "charged":
        if reason := _charged_refusal(plan):
            raise ConfigError(reason)
        from dpvision.runs.store_checks import check_store, rows_to_draw

        check_store(plan, store, rows_to_draw(store, plan.unit, config.seed))  # as each trial does
    price = _price(asked, config, plan, candidates, private=private)
    if selects:
        assert isinstance(config.model, HeadConfig), "checked"
        config = selecting(config, candidates, asked.trials)
    return Study(root, asked, config, space, objective, plan, store, price, private)


def selecting(config: RunConfig, candidates: tuple[str, ...], trials: int) -> RunConfig:
    """Return the config of a private selection among heads, ``trials`` runs in the mean."""
    assert isinstance(config.model, HeadConfig)
    chosen = {"candidates": candidates, "selection_runs": float(trials)}
    model = with_settings(config.model, chosen)
    return replace(config, model=model)


def plan_of(config: RunConfig) -> "DPPlan":
    """Return the plan that a run with this config executes; raises as ``make_plan``."""
    if isinstance(config.model, HeadConfig):
        from dpvision.adapt.prepare import head_plan

        return head_plan(config)
    from dpvision.privacy.plan import make_plan

    return make_plan(config.privacy)


def charged_event(plan: "DPPlan") -> Any:
    """Return the event of a plan's steps for what its stated epsilon is for: a record, or a person.
    A trial that began counts whole.
    """
    from dpvision.privacy.account import unit_view

    return plan.event(plan.steps, unit_view([(plan, plan.steps)]) or "record")


def trial_folder(root: Path, number: int) -> Path:
    """Return the run folder of a trial."""
    return root / f"trial-{number:03d}"


def run_ids(root: Path) -> set[str]:
    """Return the ids of a study's runs."""
    return {parse_json(path.read_bytes())["run_id"] for path in root.glob("trial-*/run.json")}


@contextlib.contextmanager
def study_folder(study: Study, *, resume: bool) -> Iterator[Path]:
    """Make or reopen a study's confidential folder, locked for the duration of the block.

    Raises:
        CheckpointError: the folder is taken, holds no study, or is in use.
        ConfigError: the resumed study asked for something else.
    """
    root = study.root
    folder, file = root / "confidential", root / "confidential" / "study.json"
    _check_folder(root, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"tune: {root} is in use by another process. Wait for it, or choose another --name."
            ) from None
        from dpvision.files import write_json
        from dpvision.privacy.marks import read_json

        asked = study.question()
        if resume:
            saved = read_json(file)
            other = [name for name in asked if saved.get(name) != asked[name]]
            if other:
                raise ConfigError(
                    f"tune: {', '.join(other)} differ from those of {root}; expected the same "
                    "command with --resume, because the price was printed for it. Repeat it as "
                    "it was, or choose another --name."
                )
        else:
            write_json(file, asked)
        yield folder


def _objective(asked: Question, config: RunConfig, resume: bool) -> str:
    """Refuse what needs no data to be refused, and return the objective."""
    how, model, privacy = asked.how, config.model, config.privacy
    if how is None:
        raise ConfigError(
            "tune: no --how; expected simulated, public, charged or private-selection. "
            "docs/tuning.md compares them."
        )
    if config.data.store is None:
        raise ConfigError(
            "tune: no --data; expected a store made by `dpvision data import`. Give --data STORE."
        )
    if privacy.guarantee != "dp":
        raise ConfigError(
            f"tune: guarantee={privacy.guarantee}; expected a private recipe to tune. Name one."
        )
    if isinstance(model, HeadConfig) and (model.head == "auto" or model.choice.candidates):
        raise ConfigError(
            f"tune: {config.recipe} chooses its head; expected one head. Name it, e.g. "
            "transfer.many_steps."
        )
    if not 1 <= asked.trials <= 10_000:
        raise ConfigError(f"tune: --trials {asked.trials}; expected 1 to 10000. Use 20.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "tune: WORLD_SIZE above 1; expected one process. Start it without torchrun."
        )
    if (asked.simulate is not None) != (how == "simulated"):
        raise ConfigError(
            f"tune: --how {how} with --simulate {asked.simulate}; expected --simulate K exactly "
            "with simulated. E.g. 4."
        )
    if asked.budget is not None and (how != "charged" or not 0 < asked.budget < float("inf")):
        raise ConfigError(
            f"tune: --budget {asked.budget} with --how {how}; expected a positive epsilon, with "
            "charged. Drop or change it."
        )
    if how == "private-selection":
        if not isinstance(model, HeadConfig):
            raise ConfigError(
                f"tune: private-selection of {config.recipe}; expected a head. The number of "
                "trainings has to stay secret, and hours of training, with a line in the ledger "
                "for each step, would tell it. Use --how simulated, public or charged."
            )
        if resume or asked.objective is not None or asked.trials < 2:
            raise ConfigError(
                "tune: private-selection with --resume, --objective or one trial; expected none "
                "of them: it is one charge."
            )
        return OWN_HEAD
    if how == "charged" and asked.test is None:
        raise ConfigError(
            "tune: charged without --test; expected public labelled images to score on, which "
            "costs nothing: losses and scores on private images are not covered by the charge. "
            "Give --test STORE, or use private-selection for a head."
        )
    own = isinstance(model, HeadConfig | ClassifierConfig)
    objective = asked.objective or (LOSS if asked.test is None else OWN_HEAD if own else "ridge")
    if objective == LOSS and (how == "charged" or isinstance(model, HeadConfig)):
        raise ConfigError(
            f"tune: loss as the objective of {how} trials of {config.recipe}; expected a score on "
            "--test STORE. Give one."
        )
    if objective != LOSS:
        checked_protocols([objective])
        if asked.test is None:
            raise ConfigError(
                f"tune: --objective {objective} without --test; expected labelled images to "
                "score on. Give --test STORE."
            )
    return objective


def _check_places(
    asked: Question, config: RunConfig, root: Path, *, resume: bool, dry_run: bool
) -> None:
    """Refuse a folder that is taken, places without a store, and a search without Optuna, before
    slow imports.
    """
    from dpvision.data.no_store import check_is_store
    from dpvision.runs.folder import require_new

    selects = asked.how == "private-selection"
    if selects and not dry_run:
        require_new(root)
    for place in (config.data.store, asked.test):
        if place is not None:
            check_is_store(Path(place))
    if selects or dry_run:
        return
    _check_folder(root, resume=resume)
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "tune: optuna is not installed; expected it for the search. uv pip install "
            "'optuna>=5,<6' (extra `tune`)."
        )


def _check_folder(root: Path, *, resume: bool) -> None:
    """Refuse a new study in a folder that is taken, and a resumed one in a folder without a
    study.
    """
    found = (root / "confidential" / "study.json").exists()
    if resume and not found:
        raise CheckpointError(
            f"tune: {root} holds no study; expected one with --resume. Drop --resume, or correct "
            "--name and --runs."
        )
    if not resume and root.exists() and any(root.iterdir()):
        raise CheckpointError(
            f"tune: {root} is taken; expected a new name. Use --resume to continue a study, or "
            "another --name."
        )


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


def _charged_refusal(plan: "DPPlan") -> str | None:
    """Return why trials of this plan cannot be charged one by one, or None if they can."""
    if charged_event(plan).divergences() is None:
        return (
            "tune: these draws have no Renyi accounting (truncated batches, or several images "
            "of a person under Poisson draws); expected some for trials chosen one after the "
            "other. Use --privacy.sampling poisson, with people --privacy.sampling-unit person."
        )
    return None


def _price(
    asked: Question,
    config: RunConfig,
    plan: "DPPlan",
    candidates: tuple[str, ...],
    *,
    private: bool,
) -> Price:
    """Compute what the trials cost in each way."""
    from dpvision.privacy.account import RenyiFilter, filter_bound

    trials = asked.trials
    made, fits, charged = None, 0, "not available: no Renyi accounting"
    one = plan.stated_epsilon or 0.0
    if _charged_refusal(plan) is None:
        event = charged_event(plan)
        bound = filter_bound([event] * trials, plan.delta)
        one_by_filter = filter_bound([event], plan.delta)
        assert bound is not None and one_by_filter is not None
        one, smallest = one_by_filter[0], bound[0]
        made = RenyiFilter.of(
            smallest if asked.budget is None else min(asked.budget, smallest), plan.delta
        )
        admits = made.admits
        # The largest number of equal events that the filter admits, at most those asked for.
        fits = bisect.bisect_left(
            range(1, trials + 1), True, key=lambda count: not admits([event] * count)
        )
        charged = (
            f"{up(made.epsilon)} for {fits} of {trials} trials, {up(plan.stated_epsilon)} each "
            "alone"
        )
    free = "0 on your private images"
    rows = (
        (
            "simulated",
            "no bound: nothing covers it" if private else free,
            "everything" if private else "nothing",
            "not_covered" if private else "public",
        ),
        ("public", "refused: images are private" if private else free, "nothing", "public"),
        ("charged", charged, "losses; not the weights", "charged"),
        (
            "private-selection",
            _price_of_selection(config, plan, trials, candidates),
            "the number of runs, the losers",
            "private selection",
        ),
    )
    return Price(rows, made, fits, one)


def _price_of_selection(
    config: RunConfig, plan: "DPPlan", trials: int, candidates: tuple[str, ...]
) -> str:
    """Return the price of a private selection: the same epsilon for more noise."""
    if not isinstance(config.model, HeadConfig):
        return "heads only: the number of runs must stay secret"
    if trials < 2:
        return "needs two trials or more"
    try:
        whole = plan_of(selecting(config, candidates or ("one_step", "prototypes"), trials))
    except DPVisionError as error:
        return f"refused: {error}"
    return (
        f"{up(whole.stated_epsilon)} for all, with noise multiplier "
        f"{whole.noise.multiplier:.4g}, not {plan.noise.multiplier:.4g}"
    )
