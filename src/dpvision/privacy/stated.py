"""The epsilons that a plan states: that of a unit, and the check that they are those of the plan's
own numbers.
"""

from typing import TYPE_CHECKING

from dpvision.config import PrivacyConfig
from dpvision.errors import PrivacyError
from dpvision.privacy import accountant, mechanism
from dpvision.privacy.selection import Selection

if TYPE_CHECKING:
    from dpvision.privacy.plan import DPPlan

_SAME = 1e-4
"""Relative difference allowed between an epsilon that an earlier version computed and that of this
one.
"""


def require_true(plan: "DPPlan") -> None:
    """Refuse a plan whose stated epsilons are not those of its noise, steps, sample rate and delta.

    Raises:
        PrivacyError: names the epsilon.
    """
    if plan.guarantee != "dp":
        return
    event = plan.event(plan.steps)
    # RDP first: it takes no time and memory, whatever the numbers are.
    _require_same("epsilon_rdp", plan.epsilon_rdp, accountant.epsilon_rdp(event, plan.delta))
    epsilon = accountant.epsilon(event, plan.delta, plan.value_discretization_interval)
    _require_same("epsilon", plan.epsilon, epsilon)
    of_unit = unit_epsilon(
        plan, plan.num_units, plan.selection, plan.steps, plan.noise_multiplier, plan.delta, epsilon
    )
    _require_same("unit_epsilon", plan.unit_epsilon, of_unit)


def _require_same(name: str, stated: float | None, true: float | None) -> None:
    if stated is None and true is None:
        return
    if stated is None or true is None or not abs(stated - true) <= _SAME * true:
        raise PrivacyError(
            f"plan: {name}={stated}, but its numbers give {true}; expected the same. Make a plan "
            "with make_plan to change noise, steps, sample rate or delta: dataclasses.replace "
            "leaves the epsilon as it was."
        )


def unit_epsilon(
    of: "PrivacyConfig | DPPlan",
    num_units: int | None,
    selection: Selection | None,
    steps: int,
    noise: float,
    delta: float,
    epsilon: float,
) -> float | None:
    """Epsilon of a unit, given the record's; None if no units are declared, or if there is no
    accounting for them (refused).
    """
    if num_units is None or of.clipped_per_unit == 1:
        return None if num_units is None else epsilon
    if of.sampling == "truncated_poisson" or (
        selection is not None and of.sampling != "full_batch"
    ):
        return None
    return accountant.unit_epsilon(
        mechanism.whole_event(of, selection, steps, noise, records=of.clipped_per_unit), delta
    )
