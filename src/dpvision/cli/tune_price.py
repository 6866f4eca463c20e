"""What each way of ``dpvision tune`` costs, before anything runs, and what the charged one has
cost.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpvision.cli.output import shown, table
from dpvision.cli.tune_space import How
from dpvision.config import HeadConfig, RunConfig, with_settings
from dpvision.errors import DPVisionError
from dpvision.privacy.printed import up, up_delta

if TYPE_CHECKING:
    from dpvision.cli.tune_trials import Study, Trial
    from dpvision.data.store import Store
    from dpvision.privacy.account import RenyiFilter
    from dpvision.privacy.plan import DPPlan


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
    of_person: bool
    """Whether epsilons are a person's."""

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


def charged_refusal(plan: "DPPlan") -> str | None:
    """Return why trials of this plan cannot be charged one by one, or None if they can."""
    from dpvision.cli.tune_trials import charged_event
    from dpvision.privacy import accountant

    if plan.sampling == "truncated_poisson" or accountant.rdp_curve(charged_event(plan)) is None:
        return (
            "tune: these draws have no Renyi accounting (truncated batches, or several images "
            "of a person under Poisson draws); expected some for trials chosen one after the "
            "other. Use --privacy.sampling poisson, with people --privacy.sampling-unit person."
        )
    return None


def prices(
    config: RunConfig,
    plan: "DPPlan",
    trials: int,
    budget: float | None,
    candidates: tuple[str, ...],
    *,
    private: bool,
) -> Price:
    """Compute what ``trials`` trials cost in each way.

    Args:
        plan: of one trial.
        budget: epsilon that all trials may cost together; if None, what they cost.
        candidates: of a private selection; may be empty.
        private: whether results of the trials are private, by the store or by the test images.
    """
    from dpvision.cli.tune_trials import charged_event
    from dpvision.privacy.account import RenyiFilter, filter_bound

    made, fits, charged = None, 0, "not available: no Renyi accounting"
    one = plan.stated_epsilon or 0.0
    if charged_refusal(plan) is None:
        event = charged_event(plan)
        bound = filter_bound([event] * trials, plan.delta)
        one_by_filter = filter_bound([event], plan.delta)
        assert bound is not None and one_by_filter is not None
        one = one_by_filter[0]
        made = RenyiFilter.of(bound[0] if budget is None else min(budget, bound[0]), plan.delta)
        fits = trials if made.admits([event] * trials) else _most(made, event, trials)
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
            _statement(private),
        ),
        ("public", "refused: images are private" if private else free, "nothing", "public"),
        ("charged", charged, "losses; not the weights", "charged"),
        (
            "private-selection",
            _selection(config, plan, trials, candidates),
            "the number of runs, the losers",
            "private selection",
        ),
    )
    return Price(rows, made, fits, one, plan.num_units is not None)


def price_table(price: Price, how: How, trials: int) -> str:
    """Return the table of the four ways as text; the chosen one is marked."""
    rows = [(f"{'> ' if way == how else '  '}{way}", *rest) for way, *rest in price.rows]
    delta = "" if price.budget is None else f", at delta {up_delta(price.budget.delta)}"
    whose = ", epsilon of a person" if price.of_person else ""
    text = table(
        f"{trials} trials{delta}{whose}",
        ("way", "epsilon", "confidential", "statement's tuning"),
        rows,
    )
    if how == "charged" and price.budget is not None:
        text += (
            "\n"
            f"Renyi filter of order {price.budget.order:g}, fixed now: the next trial is refused "
            f"when all would cost more than epsilon {up(price.budget.epsilon)}. Other runs on "
            "the store add to it: `dpvision ledger STORE`."
        )
    return text


def charged_text(
    study: "Study", store: "Store", trials: Iterable["Trial"]
) -> tuple[str, dict[str, Any]]:
    """Return what the ledgers say that the trials have cost, as text and ready for JSON."""
    from dpvision.cli.tune_trials import charged_event
    from dpvision.privacy.account import filter_bound, store_account
    from dpvision.privacy.store_marks import StoreLedgers

    ids = {trial.run_id for trial in trials}
    ledgers = [
        found
        for run_id, found in StoreLedgers.of(store.path).read_all().items()
        if run_id in ids and found.steps
    ]
    bound = filter_bound([charged_event(found.plan) for found in ledgers], study.plan.delta)
    account = store_account(store.path)
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
    figures = {
        "epsilon": study.budget.epsilon,
        "charged": bound[0],
        "delta": study.plan.delta,
        "store_epsilon": account.epsilon_filter,
    }
    return text, figures


def _most(made: "RenyiFilter", event: Any, trials: int) -> int:
    """Largest number of equal events that a filter admits, below ``trials``."""
    return bisect.bisect_left(
        range(1, trials), True, key=lambda count: not made.admits([event] * count)
    )


def _statement(private: bool) -> str:
    return "not_covered" if private else "public"


def _selection(config: RunConfig, plan: "DPPlan", trials: int, candidates: tuple[str, ...]) -> str:
    """Price of a private selection: the same epsilon for more noise."""
    if not isinstance(config.model, HeadConfig):
        return "heads only: the number of runs must stay secret"
    if trials < 2:
        return "needs two trials or more"
    from dpvision.adapt.prepare import head_plan

    try:
        among = {"candidates": candidates or ("one_step", "prototypes")}
        model = with_settings(config.model, among | {"selection_runs": float(trials)})
        whole = head_plan(replace(config, model=model))
    except DPVisionError as error:
        return f"refused: {error}"
    return (
        f"{up(whole.stated_epsilon)} for all, with noise multiplier "
        f"{shown(whole.noise_multiplier)}, not {shown(plan.noise_multiplier)}"
    )
