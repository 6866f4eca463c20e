"""Tables behind the figures of ``dpvision plan --page``: what follows from a plan, and from plans
near it.

All epsilons are upper bounds for one record by privacy loss distributions, unless a column says
otherwise, and at most 1% larger than the stated figure (``coarse_epsilon``). ``accountants`` and
``tradeoff`` are for a unit (person) if units are declared.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dpvision.config.unit import Unit
from dpvision.errors import ConfigError
from dpvision.privacy import accountant
from dpvision.privacy.events import Event
from dpvision.privacy.plan import DPPlan, calibrate

NOISES = (0.7, 0.8, 0.9, 1.0, 1.125, 1.25, 1.5, 2.0, 3.0)
"""Noise multipliers of the grid, over the plan's."""
BATCHES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)
RECORDS = tuple(float(x) for x in 10 ** np.linspace(-2, 1, 13))
EPOCHS = (0.5, 1.0, 2.0, 4.0)
IMAGES_OF_A_PERSON = (1, 2, 4, 8, 16, 32)
FALSE_POSITIVE_RATES = tuple(float(x) for x in 10 ** np.linspace(-5, 0, 31))
_MOST_STEPS = 10_000_000
_PARTS = 16


@dataclass(frozen=True)
class Table:
    """Columns and rows of numbers; None where a setting has no value."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[float | None, ...], ...]

    def column(self, name: str) -> np.ndarray:
        """Values of a column, float64 (rows,), NaN for None."""
        i = self.columns.index(name)
        return np.array(
            [math.nan if row[i] is None else row[i] for row in self.rows], dtype=np.float64
        )

    def to_csv(self) -> bytes:
        """The table as a .csv file; None is an empty cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if value is None else value for value in row] for row in self.rows)
        return text.getvalue().encode()


def all_tables(plan: DPPlan) -> dict[str, Table]:
    """Every table of ``plan``, by name, in about ten seconds of one core.

    Raises:
        ConfigError: the plan has no guarantee, selects among runs, truncates its batches, or draws
            people.
    """
    if plan.unit.draws_people:
        raise ConfigError(
            "plan: tables of a plan with sampling_unit='person'; expected 'record', whose rate "
            "they vary. For people pass their number as --dataset-size and drop --sampling-unit "
            "and --num-units: epsilon is the same."
        )
    if plan.guarantee != "dp" or plan.selection is not None or plan.sampler.max_batch_size:
        raise ConfigError(
            f"plan: tables of a plan with guarantee={plan.guarantee}, sampling={plan.sampler.law}; "
            "expected guarantee=dp with poisson or full_batch. Use --sampling poisson (a "
            "truncated draw that is accepted costs at most 1% more), or the private recipe."
        )
    made = [table(plan) for table in _TABLES]
    return {table.name: table for table in made}


def coarse_epsilon(event: Event, delta: float) -> float:
    """``accountant.epsilon``, at most 1% larger: from epsilon 1 on a grid ten times coarser, which
    costs a tenth of the time.
    """
    interval = accountant.discretization_interval(event, delta)
    bound = accountant.epsilon(event, delta, 10 * interval)
    return bound if bound >= 1 else accountant.epsilon(event, delta, interval)


def grid(plan: DPPlan) -> Table:
    """Epsilon for every combination of noise multiplier, expected batch size and steps near the
    plan's, at its data set size and delta.
    """
    rows = []
    for batch in batches_near(plan):
        for noise in noises_near(plan):
            for steps in steps_near(plan):
                event = _event(plan, noise=noise, batch=batch, steps=steps)
                rows.append((noise, batch, steps, coarse_epsilon(event, plan.delta)))
    return Table(
        "grid", ("noise_multiplier", "expected_batch_size", "steps", "epsilon"), tuple(rows)
    )


def noises_near(plan: DPPlan) -> list[float]:
    """Noise multipliers of the grid, ascending; the plan's own among them."""
    return [
        float(f"{plan.noise.multiplier * factor:.4g}") if factor != 1 else plan.noise.multiplier
        for factor in NOISES
    ]


def batches_near(plan: DPPlan) -> list[float]:
    """Expected batch sizes of the grid, ascending, none above the number of records; the plan's own
    among them.
    """
    if not plan.sampler.random:
        return [plan.expected_batch_size]
    near = [
        _whole(plan.expected_batch_size * factor) if factor != 1 else plan.expected_batch_size
        for factor in BATCHES
    ]
    return [batch for batch in dict.fromkeys(near) if batch <= plan.dataset_size]


def steps_near(plan: DPPlan) -> list[int]:
    """Steps of the grid, ascending; the plan's own among them."""
    return sorted({max(1, round(plan.steps * factor)) for factor in STEPS})


def epsilon_by_records(plan: DPPlan) -> Table:
    """Epsilon against N at fixed batch, noise and steps (DP-Cap, figure 5), with N x delta kept."""
    rows = []
    for factor in RECORDS if plan.sampler.random else ():
        records = round(plan.dataset_size * factor)
        if records < plan.expected_batch_size:
            continue
        delta = plan.delta * plan.dataset_size / records
        if delta >= 1:
            continue
        event = _event(plan, records=records)
        rows.append(
            (records, delta, coarse_epsilon(event, delta), accountant.epsilon_rdp(event, delta))
        )
    return Table(
        "epsilon_by_records", ("dataset_size", "delta", "epsilon", "epsilon_rdp"), tuple(rows)
    )


def batch_by_epochs(plan: DPPlan) -> Table:
    """Steps and epochs that spend the plan's epsilon, by noise and batch (DP-Cap, figure 6); none
    where 10^7 steps would not.
    """
    rows = []
    for noise in (plan.noise.multiplier * factor for factor in (0.8, 1.0, 1.25)):
        for batch in batches_near(plan):
            steps = _affordable_steps(
                partial(_event, plan, noise=noise, batch=batch), _epsilon_of(plan), plan.delta
            )
            epochs = None if steps is None else steps * batch / plan.dataset_size
            rows.append((noise, batch, steps, epochs))
    return Table(
        "batch_by_epochs",
        ("noise_multiplier", "expected_batch_size", "steps", "epochs"),
        tuple(rows),
    )


def rdp_curves(plan: DPPlan) -> Table:
    """Renyi divergence by order and steps (ViP, figure 6)."""
    steps = sorted(
        {max(1, round(plan.steps * part)) for part in (0.001, 0.01, 0.1, 0.25, 0.5, 1.0)}
    )
    found = accountant.rdp_curve(_event(plan, steps=1))
    assert found is not None, "Gaussians, sampled or not, have Renyi divergences"
    kept = (found[0] >= 1.1) & (found[0] <= 256)
    rows = tuple(
        (float(order), *(float(divergence) * count for count in steps))
        for order, divergence in zip(found[0][kept], found[1][kept], strict=True)
    )
    return Table("rdp_curves", ("order", *(f"steps_{count}" for count in steps)), rows)


def epsilon_by_steps(plan: DPPlan) -> Table:
    """Epsilon over training, by PLD and by Renyi divergences."""
    steps = sorted(
        {max(1, round(plan.steps * (part / _PARTS) ** 1.5)) for part in range(1, _PARTS + 1)}
    )
    rows = []
    for count in steps:
        event = _event(plan, steps=count)
        rows.append(
            (count, coarse_epsilon(event, plan.delta), accountant.epsilon_rdp(event, plan.delta))
        )
    return Table("epsilon_by_steps", ("steps", "epsilon", "epsilon_rdp"), tuple(rows))


def compute_rows(plan: DPPlan) -> Table:
    """Noise that keeps the plan's epsilon at half, twice and four times the steps (DP-Cap, table
    13).

    "noise_ratio" is noise_multiplier / expected_batch_size over the plan's; "signal_ratio" is
    sqrt(steps) over that, the plan's being 1.
    """
    target, rows = _epsilon_of(plan), []
    for factor in EPOCHS:
        steps = max(1, round(plan.steps * factor))
        noise = plan.noise.multiplier
        if factor != 1:
            noise = calibrate(
                lambda sigma, steps=steps: _event(plan, noise=sigma, steps=steps),  # type: ignore[misc]
                target,
                plan.delta,
            )
        gradients = steps * plan.expected_batch_size
        ratio = noise / plan.noise.multiplier
        rows.append(
            (
                steps,
                gradients / plan.dataset_size,
                noise,
                ratio,
                math.sqrt(steps / plan.steps) / ratio,
                gradients,
            )
        )
    return Table(
        "compute_rows",
        ("steps", "epochs", "noise_multiplier", "noise_ratio", "signal_ratio", "sample_gradients"),
        tuple(rows),
    )


def accountants(plan: DPPlan) -> Table:
    """Delta by epsilon, from PLD and from Renyi divergences, which several records of a unit do not
    have under Poisson draws.
    """
    event, interval = _guaranteed(plan)
    epsilons = np.array([epsilon for epsilon, _ in accountant.privacy_profile(event)])
    deltas = accountant.deltas(event, epsilons, interval)
    curve = accountant.rdp_curve(event)
    renyi = (
        [None] * len(epsilons)
        if curve is None
        else accountant.deltas_rdp(*curve, epsilons).tolist()
    )
    rows = tuple(zip(epsilons.tolist(), deltas.tolist(), renyi, strict=True))
    return Table("accountants", ("epsilon", "delta", "delta_rdp"), rows)


def tradeoff(plan: DPPlan) -> Table:
    """Best true-positive rate of a membership attack at each false-positive rate."""
    event, interval = _guaranteed(plan)
    rows = tuple(
        (rate, accountant.attack_tpr(event, rate, interval)) for rate in FALSE_POSITIVE_RATES
    )
    return Table("tradeoff", ("false_positive_rate", "true_positive_rate"), rows)


def images_of_a_person(plan: DPPlan) -> Table:
    """Epsilon of a person with k images, each sampled independently, at the plan's noise and
    delta.
    """
    rows = []
    for k in IMAGES_OF_A_PERSON:
        if k <= plan.dataset_size:
            event = plan.sampler.event(plan.noise.multiplier, plan.steps, k)
            bound = (
                coarse_epsilon(event, plan.delta)
                if k == 1
                else accountant.unit_epsilon(event, plan.delta)
            )
            rows.append((k, bound))
    return Table("images_of_a_person", ("images", "epsilon"), tuple(rows))


_TABLES: Iterable[Callable[[DPPlan], Table]] = (
    grid,
    epsilon_by_records,
    batch_by_epochs,
    rdp_curves,
    epsilon_by_steps,
    compute_rows,
    accountants,
    tradeoff,
    images_of_a_person,
)


def _epsilon_of(plan: DPPlan) -> float:
    assert plan.epsilon is not None, "a plan with a guarantee has an epsilon"
    return plan.epsilon


def _guaranteed(plan: DPPlan) -> tuple[Event, float | None]:
    """Event of those whom the guarantee is for, as ``DPPlan.attack_tpr``, and the grid of its
    privacy loss; None for the default.
    """
    if plan.unit_epsilon is None or plan.unit.clipped == 1:
        return _event(plan), None
    return plan.event(plan.steps, "unit"), accountant.unit_interval(plan.unit_epsilon)


def _event(
    plan: DPPlan,
    *,
    noise: float | None = None,
    batch: float | None = None,
    steps: int | None = None,
    records: int | None = None,
) -> Event:
    """Event of the plan with some settings replaced."""
    n = records or plan.dataset_size
    size = min(batch or plan.expected_batch_size, n)
    sampler = replace(plan.sampler, unit=Unit(n), expected_batch_size=size)
    return sampler.event(noise or plan.noise.multiplier, steps or plan.steps)


def _affordable_steps(event_of: Callable[..., Event], target: float, delta: float) -> int | None:
    """Most steps whose epsilon is at most ``target``, to 1%; None if there are none, or more than
    10^7.
    """

    def affordable(steps: int) -> bool:
        return coarse_epsilon(event_of(steps=steps), delta) <= target

    curve = accountant.rdp_curve(event_of(steps=1))
    assert curve is not None, "Gaussians, sampled or not, have Renyi divergences"
    order, divergence = curve
    # By the conversion of Balle et al.: divergence <= epsilon - log(1 - 1/order) + log(order delta)
    # / (order - 1).
    room = target - np.log1p(-1 / order) + np.log(order * delta) / (order - 1)
    low = int(max(1, min(_MOST_STEPS, np.max(room / np.maximum(divergence, 1e-300)))))
    while low > 1 and not affordable(low):
        low //= 2
    if low == 1 and not affordable(1):
        return None
    high = 2 * low
    while affordable(high):
        low, high = high, 2 * high
        if low > _MOST_STEPS:
            return None
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return low


def _whole(batch: float) -> float:
    return float(max(1, round(batch)))
