"""Canaries in a user's own run: what the strongest attacker could show of them, and what they cost.

    python benchmarks/canaries_in_a_run.py [--quick] [--json FILE]

"shown": 500 canaries, each a coordinate of its own, which the attacker sees in each step (that is
more than the weights give): lower bounds on epsilon, and how often noise x 0.5 is refused. "cost":
accuracy on test scenes of a private head on N scenes, without canaries and with 500 of them, half
of them in the data. Takes six minutes of one core (--quick: one plan, one head).
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import row, write_result

from dpvision.adapt.prepare import prepare
from dpvision.adapt.session import feature_stream
from dpvision.audit.bound import log_ratio
from dpvision.audit.canary_images import canary_rows, write_canaries
from dpvision.audit.lira import fair_coins, trained_head
from dpvision.audit.one_run import one_run_bound
from dpvision.config.resolve import resolve
from dpvision.data.open import open_store
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.recipes import get_recipe
from dpvision.runs.run import Secrets

CANARIES = 500
RECIPES = ("vip.micro", "dpcap.micro", "supervised.micro")
EPSILONS = (1.0, 2.0, 8.0)
FAULTY = 0.5
SIZES = (500, 2000)
TEST = 2000


def scores(plan: DPPlan, inside_M: np.ndarray, factor: float, rng: np.random.Generator):
    """Return log-likelihood ratios of canaries over all steps, with noise x ``factor``."""
    score_M = np.zeros(len(inside_M))
    for step in range(plan.steps):
        drawn_M = inside_M & (rng.random(len(inside_M)) < plan.sample_rate)
        noise_M = factor * plan.noise.multiplier * rng.standard_normal(len(inside_M))
        score_M += log_ratio(drawn_M + noise_M, plan, step)
    return score_M


def shown(quick: bool) -> Iterator[dict[str, Any]]:
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
            print(recipe, epsilon, {k: np.mean(v) for k, v in found.items()}, np.mean(refused))
            for metric, values in {**found, "refused": refused}.items():
                yield row(f"shown, {recipe}", f"{epsilon:g}", metric, values)


def accuracy(folder: Path, num: int, canaries: int, epsilon: float, runs: int) -> list[float]:
    """Return accuracies of heads on ``TEST`` scenes that are in none of them."""
    config = resolve(get_recipe("transfer.one_step"), {"epsilon": epsilon})
    config = replace(config, model=replace(config.model, num_classes=10))
    path = folder / f"{num}-{canaries}"
    if not path.exists():
        write_canaries(path, config, max(canaries, 20), num + TEST)
    store = open_store(path)
    data = replace(config.data, store=str(path), images="store")
    size = {"dataset_size": num + canaries, "expected_batch_size": float(num + canaries)}
    whole = {"dataset_size": store.num_records, "expected_batch_size": float(store.num_records)}
    privacy = replace(config.privacy, **size, delta=1e-5)
    made = prepare(replace(config, data=data, privacy=replace(config.privacy, **whole, delta=1e-5)))
    stream = feature_stream(made)
    asked = replace(config, data=data, privacy=privacy)
    planned = replace(made, plan=replace_plan(made.plan, asked.privacy))
    own = canary_rows(store)
    scenes = np.setdiff1d(np.arange(store.num_records), own)
    train, test = scenes[:num], scenes[num:]
    found = []
    for _ in range(runs):
        inside = own[fair_coins(len(own))] if canaries else own[:0]
        rows = np.sort(np.concatenate([train, inside]))
        head = trained_head(planned, stream, rows, Secrets())
        score = head.scores(torch.from_numpy(np.array(stream.feature_ND[test])).float())
        found.append(float(np.mean(score.argmax(1).numpy() == np.array(stream.label)[test])))
    return found


def replace_plan(plan: DPPlan, privacy: Any) -> DPPlan:
    """Return the plan of the same settings on as many records as ``privacy`` declares."""
    sized = replace(
        privacy, steps=plan.steps, max_grad_norm=plan.max_grad_norm, noise_multiplier=None
    )
    return draft_plan(sized)


def cost(quick: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for num in SIZES[: 1 if quick else None]:
            for epsilon in (1.0, 8.0):
                for canaries in (0, CANARIES):
                    found = accuracy(Path(folder), num, canaries, epsilon, 3 if quick else 10)
                    print(num, epsilon, canaries, np.mean(found))
                    case = f"cost, head, {num} scenes, epsilon {epsilon:g}"
                    yield row(case, f"{canaries} canaries", "accuracy", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [*cost(args.quick), *shown(args.quick)]
    write_result(args.json, "canaries_in_a_run", rows, packages=("torch", "numpy", "scipy"))


if __name__ == "__main__":
    main()
