"""A second opinion on stated epsilons: ours beside our second accountant's and Microsoft's
prv-accountant's (Gopi, Lee, Wutschitz, arXiv 2106.02848), which share no code with it.

    python benchmarks/second_opinion.py [--quick] [--json FILE]
    python benchmarks/second_opinion.py --page FILE

The first form compares 500 random settings of epsilon 0.1 to 20 and delta at least 1e-10, and 100
outside of that (--quick: 20 and 5), in about half an hour of one core, and goes on with a FILE that
has some of them, and exits with 1 if one is refuted; the second writes the table of docs/audits.md.
A case is a setting; its metrics are its epsilons.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, row, write_result
from prv_accountant import PRVAccountant
from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

from dpvision.config.unit import Unit
from dpvision.privacy import accountant, second_accountant
from dpvision.privacy.events import Composed
from dpvision.privacy.sampling import Poisson

PAGE = ROOT / "docs" / "audits.md"
BEGIN, END = (
    "<!-- second opinion: written by benchmarks/second_opinion.py -->",
    "<!-- end of second opinion -->",
)
INSIDE, OUTSIDE = "epsilon 0.1 to 20, delta from 1e-10", "outside"
PACKAGES = ("numpy", "scipy", "dp-accounting", "prv-accountant")
Runs = tuple[tuple[float, float, int], ...]
"""One or two runs on one store: noise multiplier, sample rate, steps."""


@dataclass(frozen=True)
class Opinions:
    """Epsilons of one setting."""

    stated: float
    second: float
    low: float
    """prv-accountant's lower bound, estimate and upper bound."""
    middle: float
    high: float

    def agree(self, tolerance: float = 0.01) -> bool:
        """Whether the three are within ``tolerance``, relative, and none is below the lower
        bound.
        """
        ours = (self.stated, self.second)
        return all(abs(e / self.middle - 1) <= tolerance and e >= self.low for e in ours)


def stated(runs: Runs, delta: float) -> float:
    """Return the epsilon that a statement would have."""
    events = [Poisson(Unit(1), rate).event(noise, steps) for noise, rate, steps in runs]
    event = events[0] if len(events) == 1 else Composed(tuple(events))
    return accountant.epsilon(event, delta)


def opinions(runs: Runs, delta: float, error: float = 0.005) -> Opinions:
    """Return all accountants' epsilons; ``error`` is prv-accountant's, in epsilons."""
    ours = stated(runs, delta)
    second = second_accountant.epsilon(
        [second_accountant.release(rate, noise, steps) for noise, rate, steps in runs], delta
    )
    steps = [run[2] for run in runs]
    theirs = PRVAccountant(
        [
            PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=rate)
            for noise, rate, _ in runs
        ],
        eps_error=error * ours,
        delta_error=delta / 1000,
        max_self_compositions=steps,
    )
    return Opinions(ours, second, *theirs.compute_epsilon(delta, steps))


def settings(count: int, seed: int, inside: bool = True) -> Iterator[tuple[Runs, float]]:
    """Yield random settings: a run, or in a fifth of them two, and delta. Inside: of epsilon 0.1 to
    20 and delta at least 1e-10; else of epsilon 0.01 to 0.1 or 20 to 200, or delta 1e-12 to 1e-10.
    """
    rng, found = np.random.default_rng(seed), 0
    while found < count:
        runs = tuple(
            (
                float(10 ** rng.uniform(-0.4, 1.2)),
                float(10 ** rng.uniform(-4.5, -0.1)),
                round(float(10 ** rng.uniform(0, 3.8))),
            )
            for _ in range(1 + (rng.random() < 0.2))
        )
        small = not inside and rng.random() < 0.3
        delta = float(10 ** (rng.uniform(-12, -10) if small else rng.uniform(-10, -3)))
        epsilon = stated(runs, delta)
        usual = 0.1 <= epsilon <= 20
        if usual if inside or small else 0.01 <= epsilon <= 200 and not usual:
            found += 1
            yield runs, delta


def sampled_delta(
    runs: Runs, epsilon: float, *, num: int = 200_000, seed: int = 0
) -> tuple[float, float]:
    """Delta at ``epsilon`` and its standard error, by sampling, without any accountant:

        delta = E_P [(1 - exp(epsilon - L))+],   L the sum over steps of log(P(x) / Q(x))

    for P = (1 - q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2), and for both exchanged, whichever is
    larger. Steps are drawn with weights exp(t L), t so that sums come to about ``epsilon``, and
    weighed back. The privacy loss of a step is taken on a grid of 400,001 outcomes.
    """
    rng, found = np.random.default_rng(seed), []
    for sign in (1, -1):
        steps = []
        for noise, rate, count in runs:
            x = np.linspace(-14 * noise, 14 * noise + 1, 400_001)
            loss = np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))
            log_p = -(x**2) / (2 * noise**2) + (loss if sign == 1 else 0.0)
            log_p -= np.log(np.exp(log_p).sum())
            steps.append((sign * loss, log_p, count))

        def tilted(t: float, steps: Any = steps) -> tuple[list[np.ndarray], float, float]:
            """Weights of each run's outcomes; mean and log-normaliser of the sum of losses."""
            weights, mean, normaliser = [], 0.0, 0.0
            for loss, log_p, count in steps:
                exponent = log_p + t * loss
                weight = np.exp(exponent - exponent.max())
                normaliser += count * (np.log(weight.sum()) + exponent.max())
                weight /= weight.sum()
                mean += count * float(weight @ loss)
                weights.append(weight)
            return weights, mean, normaliser

        low, high = 0.0, 500.0
        for _ in range(60):
            t = (low + high) / 2
            low, high = (t, high) if tilted(t)[1] < epsilon else (low, t)
        weights, _, normaliser = tilted(t)
        total = np.zeros(num)
        for (loss, _, count), weight in zip(steps, weights, strict=True):
            cumulative = np.cumsum(weight)
            for _ in range(count):
                total += np.interp(rng.random(num) * cumulative[-1], cumulative, loss)
        value = np.exp(normaliser - t * total) * np.clip(-np.expm1(epsilon - total), 0, None)
        found.append((float(value.mean()), float(value.std() / num**0.5)))
    return max(found)


def decided(runs: Runs, delta: float, epsilon: float) -> list[float]:
    """``sampled_delta`` over ``delta``, with a standard error less and more."""
    mean, error = sampled_delta(runs, epsilon)
    return [(mean - error) / delta, mean / delta, (mean + error) / delta]


def measured(quick: bool, done: dict[str, dict[str, float]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each setting that are not ``done``."""
    for inside, count in ((True, 20 if quick else 500), (False, 5 if quick else 100)):
        for runs, delta in settings(count, seed=45, inside=inside):
            case = "; ".join(f"noise {n:.4g}, rate {q:.4g}, {t} steps" for n, q, t in runs)
            case = f"{case}; delta {delta:.3g}"
            group = INSIDE if inside else OUTSIDE
            if case in done:
                if done[case].get("stated", 1.0) < done[case].get("low", 0.0) and (
                    "delta_sampled" not in done[case]
                ):
                    made = decided(runs, delta, done[case]["stated"])
                    yield [row(case, group, "delta_sampled", made)]
                continue
            try:
                found = opinions(runs, delta, 0.005 if inside else 0.05)
            except (RuntimeError, ValueError) as error:  # where the reference's grid is too coarse
                print(case, error, flush=True)
                yield [row(case, group, "refused", [1.0])]
                continue
            print(case, found, flush=True)
            rows = [row(case, group, metric, [value]) for metric, value in vars(found).items()]
            if found.stated < found.low:
                rows.append(row(case, group, "delta_sampled", decided(runs, delta, found.stated)))
            yield rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return one line for each group of settings."""
    groups: dict[str, dict[str, dict[str, float]]] = {INSIDE: {}, OUTSIDE: {}}
    for r in rows:
        groups[r["variant"]].setdefault(r["case"], {})[r["metric"]] = r["value"]
    lines = [
        "| settings | compared | refused by prv | stated / prv | second / prv | below its bound "
        "| there, delta at the stated epsilon by sampling / delta |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cases in groups.items():
        names = [field.name for field in fields(Opinions)]
        made = [Opinions(*map(v.get, names)) for v in cases.values() if "stated" in v]
        if not made:
            continue
        ratios = [[getattr(o, ours) / o.middle for o in made] for ours in ("stated", "second")]
        spread = " | ".join(f"{min(r):.4f} to {max(r):.4f}" for r in ratios)
        below = sum(o.stated < o.low for o in made)
        sampled = ", ".join(
            f"{r['value']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"
            for r in rows
            if r["metric"] == "delta_sampled" and r["variant"] == name
        )
        refused = len(cases) - len(made)
        lines.append(f"| {name} | {len(made)} | {refused} | {spread} | {below} | {sampled} |")
    return "\n".join(lines)


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """Return the settings whose stated epsilon differs from an accountant's by more than 1% inside,
    or lies below the reference's lower bound; not those where sampling shows that it holds. One
    more line if the reference refused half of the settings.
    """
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for r in rows:
        found.setdefault((r["variant"], r["case"]), {})[r["metric"]] = r
    compared = {key: f for key, f in found.items() if "stated" in f}
    names = ["nearly all"] if len(compared) < len(found) / 2 or not compared else []
    for (group, case), f in compared.items():
        stated = f["stated"]["value"]
        second, middle = (abs(stated / f[name]["value"] - 1) for name in ("second", "middle"))
        holds = stated >= f["low"]["value"] and (group != INSIDE or middle <= 0.01)
        if "delta_sampled" in f:  # the mean, with a standard error less and more
            low, mean, high = (f["delta_sampled"][name] for name in ("low", "value", "high"))
            holds = high - low < 0.05 and mean - 1.5 * (high - low) <= 1
        if not (holds and (group != INSIDE or second <= 0.01)):
            names.append(case)
    return names


def write_page(result: Path) -> None:
    """Write the table into docs/audits.md."""
    before, rest = PAGE.read_text().split(BEGIN)
    made = table(json.loads(result.read_text())["rows"])
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page)
        return
    rows = []
    if args.json is not None and args.json.exists():
        rows = json.loads(args.json.read_text())["rows"]
    done: dict[str, dict[str, float]] = {}
    for r in rows:
        done.setdefault(r["case"], {})[r["metric"]] = r["value"]
    for number, made in enumerate(measured(args.quick, done)):
        rows += made
        if number % 10 == 0 and args.json is not None:
            with contextlib.redirect_stdout(None):
                write_result(args.json, "second_opinion", rows, packages=PACKAGES)
    write_result(args.json, "second_opinion", rows, packages=PACKAGES)
    if names := wrong(rows):
        sys.exit("\n".join(["Stated epsilons that the second opinion refutes:", *names]))


if __name__ == "__main__":
    main()
