"""Audits: the white-box audit of three recipes and three laws of the draws, of two ranks, and of
planted faults; with --black-box the black-box audit of a head, a captioner and an encoder.

    python benchmarks/audits.py [--quick] [--json FILE]
    python benchmarks/audits.py --black-box [--quick] [--json FILE]
    python benchmarks/audits.py --page FILE

The first form takes about six minutes of one core (--quick: one minute, one recipe) and prints
rows; so does the second, in about ten minutes; the third writes the tables of docs/audits.md from a
result. Each row's case is a mechanism or a fault; its metrics are the figures of the audit,
"passed" (1 or 0) and seconds.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import ROOT, row, write_result

from dpvision.audit import black_box, white_box
from dpvision.config import RunConfig
from dpvision.config.resolve import resolve
from dpvision.data.synthetic_store import write_scenes
from dpvision.dp import clip, noise
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.sampling import Poisson, draw_poisson
from dpvision.recipes import get_recipe

PAGE = ROOT / "docs" / "audits.md"
BEGIN, END = "<!-- {}: written by benchmarks/audits.py -->", "<!-- end of {} -->"
RECIPES = ("vip.micro", "dpcap.micro", "supervised.micro")
EPSILONS = (1.0, 2.0, 8.0)
CHECKS = (
    "noise",
    "shift",
    "parameter",
    "all_noise",
    "step_noise",
    "repeated_noise",
    "reused_noise",
    "all_shift",
    "draws",
    "batch_sizes",
    "record_draws",
)


def config_of(recipe: str, epsilon: float, **more: Any) -> RunConfig:
    """Return a recipe at delta 1e-5."""
    return resolve(get_recipe(recipe), {"epsilon": epsilon, "privacy.delta": 1e-5, **more})


def terms_of(change: Callable[[tuple[tuple[int, float], ...]], Any]) -> AbstractContextManager[Any]:
    """Change the terms of a step's noise."""
    terms = IndependentGaussian.terms
    return mock.patch.object(
        IndependentGaussian, "terms", lambda self, step: tuple(change(terms(self, step)))
    )


def terms_at(change: Callable[[int], tuple[int, float]]) -> AbstractContextManager[Any]:
    """Give a step the noise of another step, times a factor."""
    terms = IndependentGaussian.terms

    def changed(self: IndependentGaussian, step: int) -> Any:
        other, factor = change(step)
        return tuple((of, factor * std) for of, std in terms(self, other))

    return mock.patch.object(IndependentGaussian, "terms", changed)


def wrong_divisor() -> AbstractContextManager[Any]:
    init = noise._Release.__init__
    return mock.patch.object(
        noise._Release, "__init__", lambda self, std, divisor: init(self, std, 2 * divisor)
    )


def half_noise_in_vectors() -> AbstractContextManager[Any]:
    """Biases and gains of the network's width, 4% of all coordinates."""
    share = noise._Share

    def made(summed: Any, out: Any, terms: Any, first: int, stop: int) -> Any:
        factor = 0.5 if out.numel() == 16 else 1.0
        return share(summed, out, tuple((k, factor * std) for k, std in terms), first, stop)

    return mock.patch.object(noise, "_Share", made)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "noise x 0.7": lambda: terms_of(lambda terms: [(of, 0.7 * std) for of, std in terms]),
    "noise of each of two ranks": lambda: terms_of(
        lambda terms: [*terms, *((of + 10**6, std) for of, std in terms)]
    ),
    "noise x 0.1 in one step": lambda: terms_at(lambda step: (step, 0.1 if step == 7 else 1.0)),
    "each noise twice in a row": lambda: terms_at(lambda step: (step - step % 2, 1.0)),
    "noise of 12 steps before": lambda: terms_at(lambda step: (step % 12, 1.0)),
    "half the noise in biases": half_noise_in_vectors,
    "divisor x 2": wrong_divisor,
    "no clipping": lambda: mock.patch.object(
        clip, "clip_factors", lambda norm_B, *_, **__: torch.ones_like(norm_B)
    ),
    "batches of one size": lambda: mock.patch.object(
        Poisson, "draw", lambda self, num, rng: rng.subset(num, round(num * self.sample_rate))
    ),
    "sample rate x 1.2": lambda: mock.patch.object(
        Poisson, "draw", lambda self, num, rng: draw_poisson(num, 1.2 * self.sample_rate, rng)
    ),
}


def rows_of(
    case: str, variant: str, result: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Return the figures of an audit as rows."""
    checks, bound = {**result["mechanism"], **result["bound"]["checks"]}, result["bound"]
    found = {
        "passed": float(result["passed"]),
        "epsilon": bound["epsilon"],
        "epsilon_low": bound["epsilon_low"],
        "bound_passed": float(bound["passed"]),
        "scores": bound["scores"],
        "seconds": seconds,
        **{name: checks[name]["value"] for name in CHECKS if name in checks},
        **{f"{name}_passed": float(checks[name]["passed"]) for name in CHECKS if name in checks},
    }
    return [row(case, variant, metric, [value]) for metric, value in found.items()]


def audited(case: str, variant: str, config: RunConfig) -> Iterator[dict[str, Any]]:
    start = time.monotonic()
    result = white_box(config, lambda *_: None)
    yield from rows_of(case, variant, result, time.monotonic() - start)


def two_ranks(recipe: str, epsilon: float) -> Iterator[dict[str, Any]]:
    """Audit a recipe on two processes (gloo)."""
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "audit.json", time.monotonic()
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        asked = ["--recipe", recipe, "--white-box", "--epsilon", str(epsilon), "--out", str(out)]
        subprocess.run(
            [sys.executable, *ranks, "-m", "dpvision", "audit", *asked],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        result = json.loads(out.read_text())
        yield from rows_of(f"{recipe}, two ranks", f"{epsilon:g}", result, time.monotonic() - start)


def measured(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield all rows."""
    for recipe in RECIPES[: 1 if quick else None]:
        for epsilon in EPSILONS[2 if quick else 0 :]:
            yield from audited(recipe, f"{epsilon:g}", config_of(recipe, epsilon))
    if not quick:
        full = config_of(
            "vip.micro", 2.0, **{"privacy.sampling": "full_batch", "privacy.steps": 20}
        )
        yield from audited("vip.micro, full batches", "2", full)
        capped = {"privacy.sampling": "truncated_poisson", "privacy.max_batch_size": 5600}
        yield from audited("vip.micro, truncated draws", "2", config_of("vip.micro", 2.0, **capped))
        yield from two_ranks("vip.micro", 8.0)
    config = config_of("vip.micro", 8.0, **{"privacy.steps": 20})
    for fault, planted in list(FAULTS.items())[: 3 if quick else None]:
        with planted():
            yield from audited("fault", fault, config)


NO_NOISE = "1, noise x 0"
NETWORK: dict[str, Any] = {
    "privacy.dataset_size": 400,
    "privacy.expected_batch_size": 100,
    "privacy.steps": 150,
    "privacy.max_grad_norm": 1.0,
    "data.crop_scale": (1.0, 1.0),
    "data.horizontal_flip": False,
    "hardware.physical_batch_size": 100,
    "model.encoder.image_size": 16,
    "model.encoder.patch_size": 4,
    "model.encoder.depth": 2,
    "model.encoder.width": 64,
    "model.encoder.num_heads": 2,
    "optim.learning_rate": 3e-3,
    "optim.schedule": "constant",
    "optim.warmup_steps": 10,
    "optim.weight_decay": 0.0,
}
"""A small network of the recipe's kind whose 100 canaries are each drawn 38 times, without
augmentation: memorised, if anything is."""
ATTACKED = {
    "head": ("transfer.one_step", 500, {}),
    "classifier": ("transfer.micro", 100, NETWORK),
    "captioner": ("dpcap.micro", 100, NETWORK),
    "encoder": ("vip.micro", 100, NETWORK),
}
SCENES = "head, scenes"
"""2,000 public scenes with their colours as labels, each a canary."""


def attacked(
    case: str, recipe: str, canaries: int, settings: dict[str, Any], data: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of black-box audits at two epsilons, and at epsilon 1 without the noise."""
    for variant in ("1", "8", NO_NOISE):
        epsilon = float(variant.split(",")[0])
        config, start = config_of(recipe, epsilon, **settings), time.monotonic()
        factor = 1e-6 if variant == NO_NOISE else 1.0
        with terms_of(lambda terms, f=factor: [(of, f * std) for of, std in terms]):  # type: ignore[misc]
            result = black_box(config, None, canaries, data=data)
        bound = result["bound"]
        found = {
            **{name: bound[name] for name in OF_BOUND},
            **result["attack"],
            **{f"limit_of_{name}": value for name, value in result["limits"].items()},
            "passed": float(result["passed"]),
            "seconds": time.monotonic() - start,
        }
        for metric, value in found.items():
            yield row(f"black box, {case}", variant, metric, [value])


OF_BOUND = ("epsilon", "epsilon_low", "epsilon_low_of_plan", "canaries", "guesses", "right")


def black_boxes(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of all black-box audits."""
    for case, (recipe, canaries, settings) in list(ATTACKED.items())[: 1 if quick else None]:
        yield from attacked(case, recipe, canaries, settings, None)
    if not quick:
        with tempfile.TemporaryDirectory() as folder:
            store = write_scenes(Path(folder) / "scenes", 2000, 32, label="colour")
            yield from attacked(SCENES, "transfer.one_step", 20, {}, store.path)


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the tables of the page that the rows are of, by name."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for r in rows:
        found.setdefault((r["case"], r["variant"]), {})[r["metric"]] = r["value"]
    audits = ["| mechanism | epsilon | bound | scores | noise | shift | passed | seconds |",
              "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    faults = [
        "| fault | noise | shift | bound on epsilon 8 | refused by |",
        "|---|---|---|---|---|",
    ]
    boxes = [
        "| trained | epsilon | right guesses | bound | bound of the plan | AUC | allowed | "
        "TPR at 1% | allowed | TPR at 0.1% | allowed | passed | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (case, variant), f in found.items():
        if case.startswith("black box, "):
            pairs = [
                f"{f[name]:.3f} | {f[f'limit_of_{name}']:.3f}"
                for name in ("auc", "tpr_at_fpr_0.01", "tpr_at_fpr_0.001")
            ]
            boxes.append(
                f"| {case.removeprefix('black box, ')} | {variant} | {f['right']:.0f} of "
                f"{f['guesses']:.0f} | {f['epsilon_low']:.2f} | {f['epsilon_low_of_plan']:.2f} | "
                f"{' | '.join(pairs)} | {'yes' if f['passed'] else 'NO'} | {f['seconds']:.0f} |"
            )
        elif case == "fault":
            refused = [name.replace("_", " ") for name in CHECKS if f.get(f"{name}_passed") == 0]
            refused += ["bound"] if not f["bound_passed"] else []
            faults.append(
                f"| {variant} | {f['noise']:.2f} | {f['shift']:.2f} | {f['epsilon_low']:.2f} | "
                f"{', '.join(refused) or 'nothing'} |"
            )
        else:
            audits.append(
                f"| {case} | {variant} | {f['epsilon_low']:.2f} | {f['scores']:,.0f} | "
                f"{f['noise']:.3f} | {f['shift']:.3f} | {'yes' if f['passed'] else 'NO'} | "
                f"{f['seconds']:.0f} |"
            )
    made = {"audits": audits, "faults": faults, "black box": boxes}
    return {name: "\n".join(lines) for name, lines in made.items() if len(lines) > 2}


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """Return the audits that failed, and the planted faults that passed."""
    passed = {(r["case"], r["variant"]): r["value"] for r in rows if r["metric"] == "passed"}
    return [
        f"{case}, {variant}: {'passed' if value else 'FAILED'}"
        for (case, variant), value in passed.items()
        if bool(value) != (variant != NO_NOISE and (case != "fault" or variant == "none"))
        and (case, variant) != ("black box, encoder", NO_NOISE)  # not found in so short a run
    ]


def write_page(result: Path) -> None:
    """Write the tables into docs/audits.md."""
    text = PAGE.read_text()
    for name, table in tables(json.loads(result.read_text())["rows"]).items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--black-box", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page)
        return
    rows = []
    for made in (black_boxes if args.black_box else measured)(args.quick):
        rows.append(made)
        if made["metric"] == "seconds":
            print(f"{made['case']}, {made['variant']}: {made['value']:.0f} s", flush=True)
            if args.json is not None:  # what is measured so far
                with contextlib.redirect_stdout(None):
                    write_result(args.json, "audits", rows, packages=PACKAGES)
    write_result(args.json, "audits", rows, packages=PACKAGES)
    if found := wrong(rows):
        sys.exit("\n".join(["Not as expected (an audit fails by chance one time of 175):", *found]))


PACKAGES = ("torch", "numpy", "scipy", "dp-accounting")

if __name__ == "__main__":
    main()
