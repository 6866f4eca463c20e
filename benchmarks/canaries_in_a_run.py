"""Canaries in a user's own run: what the strongest attacker could show of them.

    python benchmarks/canaries_in_a_run.py [--quick] [--json FILE]

500 canaries by fair coins, each a coordinate of its own, which the attacker sees in every step:
more than the weights give. Lower bounds on epsilon, and how often noise x 0.5 is refused. Takes
five minutes of one core (--quick: one plan).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import row, write_result

from dpvision.audit.bound import log_ratio
from dpvision.audit.one_run import one_run_bound
from dpvision.config.resolve import resolve
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.recipes import get_recipe

CANARIES = 500
RECIPES = ("vip.micro", "dpcap.micro", "supervised.micro")
EPSILONS = (1.0, 2.0, 8.0)
FAULTY = 0.5


def scores(
    plan: DPPlan, inside_M: np.ndarray, factor: float, rng: np.random.Generator
) -> np.ndarray:
    """Return log-likelihood ratios of canaries over all steps, with noise x ``factor``."""
    score_M = np.zeros(len(inside_M))
    for step in range(plan.steps):
        drawn_M = inside_M & (rng.random(len(inside_M)) < plan.sample_rate)
        noise_M = factor * plan.noise.multiplier * rng.standard_normal(len(inside_M))
        score_M += log_ratio(drawn_M + noise_M, plan, step)
    return score_M


def shown(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of each plan."""
    rng, runs = np.random.default_rng(0), 2 if quick else 4
    for recipe in RECIPES[: 1 if quick else None]:
        for epsilon in EPSILONS[2 if quick else 0 :]:
            plan = draft_plan(resolve(get_recipe(recipe), {"epsilon": epsilon}).privacy)
            found: dict[str, list[float]] = {"epsilon_low": [], "epsilon_low_of_plan": []}
            refused = []
            for factor in (1.0, FAULTY):
                for _ in range(runs):
                    inside_M = rng.random(CANARIES) < 0.5
                    bound = one_run_bound(scores(plan, inside_M, factor, rng), inside_M, plan)
                    if factor == 1.0:
                        for name, values in found.items():
                            values.append(bound[name])
                    else:
                        low = max(bound["epsilon_low"], bound["epsilon_low_of_plan"])
                        refused.append(float(low > bound["epsilon"]))
            for metric, values in {**found, "refused": refused}.items():
                yield row(recipe, f"{epsilon:g}", metric, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    write_result(
        args.json, "canaries_in_a_run", [*shown(args.quick)], packages=("numpy", "scipy", "torch")
    )


if __name__ == "__main__":
    main()
