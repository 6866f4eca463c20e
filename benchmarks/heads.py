"""Private heads on frozen features of public encoders: what each reaches, by epsilon, on images as
if they were private.

    python benchmarks/heads.py --data DIR --work DIR --encoder NAME=SPEC [...] [--own NAME=SET ...]
    [--parts A,B] [--sets A,B]
                               [--seeds N] [--quick] [--json FILE]

DIR of --data holds cifar10, mednist and pets_sample. SPEC is what ``dpvision adapt --encoder``
takes; --own names the set that an encoder was trained on, to which it is not adapted. Parts, in
this order:

    rules     scenes and digits: the presets of all heads, and what the rules of ``recommend_head``
              cost there
    tune      scenes and digits: the learning rate of many steps, for each optimizer, from the
              paper's grids (tables 6 and 7)
    heads     the real sets: every head at every epsilon (figure 1b), and in how many cells the
              recommendation is within a point of the best
    batches   CIFAR-10, ten epochs: batch sizes as the paper's parts of ImageNet, momentum against
              LAMB (tables 1 and 2)
    init      CIFAR-10: zero against LeCun's initialisation at several scales (table 4, figure 2c)

What is chosen (rates, thresholds) is chosen in the first two parts only and kept in
WORK/chosen.json. Accuracy in percent, mean over seeds of the noise, with the 95% interval of
Student's t over them; without noise there is one run. delta is 1 / (2 N), the clip norm 1, rows are
scaled to length 1 with a constant of 0.1 appended.
"""

import argparse
import functools
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result
from head_features import REAL, Features, Task
from scipy import stats

from dpvision.adapt.defaults import noise_of_a_mean, recommend_head
from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.heads.feature_covariance import feature_covariance
from dpvision.adapt.heads.least_squares import least_squares
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.heads.one_step import one_step
from dpvision.adapt.heads.prototypes import prototypes
from dpvision.adapt.release import Releases, SumOf, full_batch_plan
from dpvision.config import OptimConfig, PrivacyConfig
from dpvision.config.heads import HEADS, OneStep
from dpvision.dp.clip import ClippedSum
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.stream import Key

EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, math.inf)
STEPS = 10
"""Full batches of the optimizers whose rate is chosen on public tasks: the paper's ten epochs."""
COVARIANCE_STEPS = 8
LAMB_RATES = (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0)
MOMENTUM_RATES = (0.03, 0.06, 0.1, 0.4, 1.6, 6.4, 25.6, 102.4)
LAMB = OptimConfig(
    name="lamb",
    learning_rate=0.5,
    betas=(0.9, 0.999),
    eps=1e-12,
    weight_decay=0.0,
    schedule="linear",
)
OPTIMS = {
    "lamb": (LAMB, LAMB_RATES),
    "adam": (replace(LAMB, name="adamw"), LAMB_RATES),
    "momentum": (
        OptimConfig(
            name="sgd", learning_rate=1.0, momentum=0.9, weight_decay=0.0, schedule="cosine"
        ),
        MOMENTUM_RATES,
    ),
}
BATCH_PARTS = tuple(2**k / 1_281_167 for k in (17, 18, 19, 20))
SCALES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
Train = Callable[[FeatureStream, Releases], Head]


def heads(rates: dict[str, float]) -> dict[str, tuple[Train, int]]:
    """Every head by name, with its number of full-batch releases."""
    found: dict[str, tuple[Train, int]] = {
        "one_step": (one_step, 1),
        "least_squares": (least_squares, 1),
        "feature_covariance": (lambda s, r: feature_covariance(s, r).last, COVARIANCE_STEPS),
        "prototypes": (prototypes, 1),
        "many_steps": (lambda s, r: many_steps(s, r).last, HEADS["many_steps"].steps),
    }
    for name, rate in rates.items():
        found[f"many_steps, {name}"] = steps_of(replace(OPTIMS[name][0], learning_rate=rate)), STEPS
    return found


def steps_of(optim: OptimConfig, init_scale: float = 0.0) -> Train:
    """Gradient steps from LeCun's initialisation times ``init_scale``."""
    return lambda stream, releases: (
        many_steps(
            stream,
            releases,
            loss="sigmoid",
            bias=OneStep.own_bias,
            optim=optim,
            init="lecun",
            init_scale=init_scale,
        ).last
    )


@functools.lru_cache(maxsize=2)
def stream_of(task: Task) -> tuple[FeatureStream, dict[Any, ClippedSum]]:
    """The stream of a task, and the first sums of its heads."""
    return FeatureStream(task.train_ND, task.train_N, task.num_classes, unit=True, constant=0.1), {}


def plan_of(count: int, epsilon: float, steps: int, batch: float | None = None) -> DPPlan:
    """Full batches with the noise of epsilon, or Poisson draws of ``batch``; nothing private where
    epsilon is infinite.
    """
    if math.isinf(epsilon):
        drawn: Any = {"sampling": "full_batch"} if batch is None else {}
        open_plan = PrivacyConfig(
            dataset_size=count,
            expected_batch_size=batch or count,
            steps=steps,
            max_grad_norm=None,
            guarantee="none",
            **drawn,
        )
        return make_plan(open_plan)
    if batch is None:
        return full_batch_plan(count, epsilon, steps=steps)
    asked = PrivacyConfig(
        dataset_size=count,
        expected_batch_size=batch,
        steps=steps,
        max_grad_norm=1.0,
        target_epsilon=epsilon,
    )
    return make_plan(asked)


@dataclass
class Repeated(Releases):
    """Releases whose first sum, which no noise has shaped yet, is computed once for all seeds and
    epsilons; the noise is added anew.
    """

    first: dict[Any, ClippedSum] = field(default_factory=dict)
    name: str = ""

    def _sum(self, stream: FeatureStream, sum_of: SumOf, step: int) -> ClippedSum:
        if step or self.plan.sampler.random:
            return super()._sum(stream, sum_of, step)
        key = self.name, self.plan.max_grad_norm
        if key not in self.first:
            self.first[key] = super()._sum(stream, sum_of, step)
        return self.first[key]


def accuracies(task: Task, train: Train, plan: DPPlan, seeds: int, name: str = "") -> list[float]:
    """Test accuracy in percent of one head for each seed of its noise; of one, where there is no
    noise.

    Args:
        name: of what the head's first release is a sum of; "": it is computed each time.
    """
    stream, first = stream_of(task)
    found: list[float] = []
    for seed in range(seeds if plan.noise_std > 0 else 1):
        draw_key, noise_key = (
            Key.for_tests(hashlib.sha256(f"{seed} {use}".encode()).digest())
            for use in ("draw", "noise")
        )
        again = first if name else {}
        head = train(
            stream,
            Repeated(
                plan.another_run(),
                itertools.count().__next__,
                draw_key,
                noise_key,
                first=again,
                name=name,
            ),
        )
        found.append(100 * float((head.predict(task.test_MD) == task.test_M).float().mean()))
    return found


def line(
    case: str, variant: str, values: Sequence[float], metric: str = "accuracy_percent"
) -> dict[str, Any]:
    """Mean and 95% interval over the seeds."""
    mean, half = float(np.mean(values)), 0.0
    if len(values) > 1:
        half = float(
            stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
        )
    return {
        "case": case,
        "variant": variant,
        "metric": metric,
        "value": mean,
        "low": mean - half,
        "high": mean + half,
    }


def public_tasks(features: Features, encoders: Sequence[str], small: bool) -> dict[str, Task]:
    """What settings are chosen on."""
    found: dict[str, Task] = {}
    for encoder in encoders:
        digits = features.task(encoder, "digits")
        found |= {f"digits by {encoder}": digits, f"300 digits by {encoder}": digits.first(300)}
        for attribute in ("colour",) if small else ("shape", "colour", "both"):
            scenes = features.task(encoder, "scenes", attribute)
            found[f"scenes, {attribute}, by {encoder}"] = scenes
            if attribute == "colour":
                found[f"2000 scenes, colour, by {encoder}"] = scenes.first(2000)
    return found


def rules(features: Features, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The heads of the recommendation on public tasks, and what its rules cost there."""
    rows, cells = [], []
    for name, task in public_tasks(
        features, [e for e in features.encoders if e not in args.own], args.quick
    ).items():
        for epsilon in (0.1, 0.3, 1.0, 3.0, 8.0, math.inf):
            got = {h: measured(h, {}, task, epsilon, min(args.seeds, 3)) for h in heads({})}
            rows += [line(f"{name}, epsilon {epsilon:g}", h, values) for h, values in got.items()]
            cells.append((task, epsilon, {h: float(np.mean(values)) for h, values in got.items()}))
            show(
                f"{name} epsilon {epsilon:g} noise {noise_of(task, epsilon):.3g}", rows[-len(got) :]
            )
    return rows + judged("scenes and digits", cells)


def measured(
    head: str, rates: dict[str, float], task: Task, epsilon: float, seeds: int
) -> list[float]:
    """Accuracies of a head by its name."""
    train, steps = heads(rates)[head]
    first = "many_steps, tuned" if head.startswith("many_steps, ") else head
    return accuracies(task, train, plan_of(len(task.train_N), epsilon, steps), seeds, first)


def noise_of(task: Task, epsilon: float) -> float:
    return math.sqrt(2 * task.train_ND.shape[1]) * noise_of_a_mean(len(task.train_N), epsilon)


def judged(
    name: str, cells: Sequence[tuple[Task, float, dict[str, float]]]
) -> list[dict[str, Any]]:
    """How far the recommended head is from the best one: mean, worst, and the part of cells within
    a point.
    """
    lost = []
    for task, epsilon, got in cells:
        chosen = recommend_head(
            len(task.train_N), task.num_classes, epsilon, task.train_ND.shape[1]
        )[0]
        lost.append(max(got.values()) - got[chosen])
    within = 100 * float(np.mean(np.array(lost) <= 1))
    print(
        f"recommended head on {name}: {sum(x <= 1 for x in lost)} of {len(lost)} cells within "
        "one point",
        flush=True,
    )
    return [
        line(name, "recommended head", [within], "cells_within_a_point_percent"),
        line(name, "recommended head", [float(np.mean(lost))], "mean_points_lost"),
        line(name, "recommended head", [max(lost)], "most_points_lost"),
    ]


def tune(features: Features, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rate of each optimizer: best mean over public tasks, with and without privacy; no encoder
    has one of its own.
    """
    rows, chosen = [], {}
    encoder = next(e for e in features.encoders if e not in args.own)
    tasks = {
        name: task
        for name, task in public_tasks(features, [encoder], True).items()
        if name.startswith(("digits", "scenes"))
    }
    for optim, (_, grid) in OPTIMS.items():
        means = {}
        for rate in grid:
            got = []
            for name, task in tasks.items():
                for epsilon in (1.0, 8.0, math.inf):
                    values = measured(
                        f"many_steps, {optim}", {optim: rate}, task, epsilon, min(args.seeds, 2)
                    )
                    got.append(float(np.mean(values)))
                    rows.append(
                        line(
                            f"{name}, epsilon {epsilon:g}, rate {rate:g}",
                            f"many_steps, {optim}",
                            values,
                        )
                    )
            means[rate] = float(np.mean(got))
        chosen[optim] = max(means, key=lambda rate: means[rate])
        print(optim, {rate: round(mean, 1) for rate, mean in means.items()}, flush=True)
    chosen_file(args).write_text(json.dumps(chosen))
    return rows


def chosen_file(args: argparse.Namespace) -> Path:
    return args.work / "chosen.json"


def figure(features: Features, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Figure 1b: every head, set, encoder and epsilon."""
    rates, rows, cells = json.loads(chosen_file(args).read_text()), [], []
    for name, encoder in itertools.product(args.sets, features.encoders):
        if args.own.get(encoder) == name:
            continue
        task = features.task(encoder, name)
        start = time.monotonic()
        for epsilon in EPSILONS:
            got = {h: measured(h, rates, task, epsilon, args.seeds) for h in heads(rates)}
            rows += [
                line(f"{name} by {encoder}, epsilon {epsilon:g}", h, values)
                for h, values in got.items()
            ]
            cells.append((task, epsilon, {h: float(np.mean(values)) for h, values in got.items()}))
            show(
                f"{name} by {encoder}, epsilon {epsilon:g}, noise {noise_of(task, epsilon):.3g}",
                rows[-len(got) :],
            )
        print(f"{name} by {encoder}: {time.monotonic() - start:.0f} s", flush=True)
    return rows + judged("real sets", cells)


def batches(features: Features, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tables 1 and 2 in small: ten epochs of Poisson draws, epsilon 10 and without; each rate is
    the one that was best on scenes.
    """
    rows = []
    encoder = next(e for e in features.encoders if args.own.get(e) != "cifar10")
    scenes, task = (
        features.task(encoder, "scenes", "colour").first(10_000),
        features.task(encoder, "cifar10"),
    )
    for part, epsilon, optim in itertools.product(
        BATCH_PARTS, (math.inf, 10.0), ("momentum", "lamb")
    ):
        base, grid = OPTIMS[optim]
        base = replace(base, warmup_steps=max(1, round(0.25 / part)))

        def ten_epochs(on: Task, rate: float, seeds: int) -> list[float]:
            count = len(on.train_N)
            plan = plan_of(count, epsilon, round(10 / part), round(part * count))  # noqa: B023
            return accuracies(on, steps_of(replace(base, learning_rate=rate)), plan, seeds)  # noqa: B023

        best = max(grid[:: 3 if args.quick else 1], key=lambda rate: ten_epochs(scenes, rate, 1)[0])
        rows.append(
            line(
                f"cifar10 by {encoder}, batch {100 * part:.0f}%, epsilon {epsilon:g}",
                optim,
                ten_epochs(task, best, args.seeds),
            )
        )
        show(f"{rows[-1]['case']}, rate {best:g}", rows[-1:])
    return rows


def initialisation(features: Features, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Table 4 and figure 2c: LeCun's initialisation at several scales, one step of Adam and ten of
    LAMB, at the rates of the grid.
    """
    rows = []
    encoder = next(e for e in features.encoders if args.own.get(e) != "cifar10")
    task = features.task(encoder, "cifar10")
    for epsilon, (optim, steps) in itertools.product(
        (math.inf, 10.0, 1.0), (("adam", 1), ("lamb", STEPS))
    ):
        plan = plan_of(len(task.train_N), epsilon, steps)
        for scale in SCALES:
            means = {}
            for rate in (1e-4, 1e-3, 0.01, 0.1, 1.0):
                step = replace(
                    OPTIMS[optim][0],
                    learning_rate=rate,
                    schedule="constant" if steps == 1 else "linear",
                )
                values = accuracies(task, steps_of(step, scale), plan, min(args.seeds, 2))
                means[rate] = round(float(np.mean(values)), 1)
                rows.append(
                    line(
                        f"cifar10 by {encoder}, epsilon {epsilon:g}, {optim}, rate {rate:g}",
                        f"scale {scale:g}",
                        values,
                    )
                )
            print(
                f"epsilon {epsilon:g}, {steps} steps of {optim}, scale {scale:g}: {means}",
                flush=True,
            )
    return rows


def show(case: str, rows: Sequence[dict[str, Any]]) -> None:
    print(case, {r["variant"]: round(r["value"], 1) for r in rows}, flush=True)


PARTS = {"rules": rules, "tune": tune, "heads": figure, "batches": batches, "init": initialisation}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="features are kept here")
    parser.add_argument("--encoder", action="append", required=True, metavar="NAME=SPEC")
    parser.add_argument("--own", action="append", default=[], metavar="NAME=SET")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--sets", default=",".join(REAL))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, fewer public tasks, a third of the rates"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.seeds = 1 if args.quick else args.seeds
    args.own, args.sets = dict(pair.split("=", 1) for pair in args.own), args.sets.split(",")
    features = Features(args.work, args.data, dict(pair.split("=", 1) for pair in args.encoder))
    args.work.mkdir(parents=True, exist_ok=True)
    rows = [r for part in args.parts.split(",") for r in PARTS[part](features, args)]
    write_result(
        args.json, "heads", rows, packages=("torch", "numpy", "scikit-learn", "dp-accounting")
    )


if __name__ == "__main__":
    main()
