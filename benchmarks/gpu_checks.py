"""Checks of ``gpu_acceptance.py``: what must be right on an accelerator before anything is timed. They run on a CPU too.

    python benchmarks/gpu_checks.py NAME [--device cpu|cuda] [--json FILE]

A check is a function of the device that returns ``Check`` lines; each compares with the CPU, with float64, or with vmap.
"""

import argparse
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import row, write_result
from scipy import stats
from torch import Tensor, nn

from dpvision.config import PrivacyConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.dp.clipped import ClippedSum
from dpvision.dp.compiled import compile_blocks
from dpvision.dp.noise import grid_of, privatize
from dpvision.dp.normals import box_muller, key_words, normals
from dpvision.dp.scale import public_loss_scale
from dpvision.dp.seal import seal
from dpvision.models import make_model
from dpvision.privacy.plan import make_plan
from dpvision.privacy.stream import Key, Keystream
from dpvision.recipes import RECIPES
from dpvision.train.feed import to_device
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.step import autocast

SMALL = ("vip.micro_random_start", "dpcap.micro_random_start")
RAW, STEP_KEY = bytes(range(32)), StepKey(0, 0)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest relative difference of one pass from vmap in the same precision."""
C = 1.0
PARTNERS = 7
"""Other records of the batch in which an adversarial record's contribution is measured."""


@dataclass(frozen=True)
class Check:
    """One claim, its figure and the bound that the figure must not exceed."""

    claim: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound  # NaN fails


def gradients(device: torch.device) -> list[Check]:
    """One pass against vmap in each precision, compiled against eager, and this device against a CPU in float64."""
    checks = []
    for name in SMALL:
        config, model, batch = _subject(name, device, 6)
        loss_fn = loss_function(config)
        for precision, allowed in TOLERANCE.items():
            with autocast(precision, device):
                scale = (
                    public_loss_scale(loss_fn, model, to_device(example_batch(config), device), STEP_KEY) if precision == "float16" else 1.0
                )
                ours, oracle = (
                    clipped_sum(loss_fn, model, batch, STEP_KEY, max_grad_norm=1e9, method=method, loss_scale=scale)
                    for method in ("one_pass", "vmap")
                )
            checks.append(Check(f"{name}, {precision}: one pass from vmap", _relative(ours.grads, oracle.grads), allowed))
            checks.append(Check(f"{name}, {precision}: norms from vmap", _relative({"": ours.norms_B}, {"": oracle.norms_B}), allowed))
        exact = clipped_sum(
            loss_fn, make_model(config.model, seed=0).double(), _as(batch, torch.float64), STEP_KEY, max_grad_norm=1e9, method="vmap"
        )
        eager = clipped_sum(loss_fn, model, batch, STEP_KEY, max_grad_norm=1e9)
        checks.append(Check(f"{name}: float32 here from float64 on a CPU", _relative(eager.grads, exact.grads), 1e-4))
        blocks = compile_blocks(model, 6)
        compiled = clipped_sum(loss_fn, model, batch, STEP_KEY, max_grad_norm=1e9, blocks=blocks)
        checks.append(Check(f"{name}: compiled from eager", _relative(compiled.grads, eager.grads), TOLERANCE["float32"]))
    return checks


def contributions(device: torch.device) -> list[Check]:
    """Adversarial records: a contribution, the difference of two computed sums, is at most C in every precision."""
    checks = []
    for name in SMALL:
        config, model, batch = _subject(name, device, PARTNERS + 1)
        loss_fn, num_tokens = loss_function(config), getattr(config.model, "num_tokens", 0)
        for weights, factor in (("first weights", 1.0), ("weights times 8", 8.0)):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(factor)
            for precision in TOLERANCE:
                with autocast(precision, device):
                    found = [
                        _contribution(loss_fn, model, _with_record(batch, pixels, tokens))
                        for pixels, tokens in _adversarial(batch, num_tokens)
                    ]
                checks.append(Check(f"{name}, {weights}, {precision}: largest contribution in C", max(found), C))
    return checks


def noise(device: torch.device) -> list[Check]:
    """The cipher's words bit for bit, its normals within 4 ulp, releases on the CPU's grid points, and the law of a large draw."""
    num = 2**20
    word_W = np.empty(num, dtype="<i8")
    key = Key.for_tests(RAW)
    Keystream(key, 5).fill(word_W)
    if device.type == "cuda":
        from dpvision.dp.chacha_triton import chacha_words

        made = chacha_words(key_words([key])[0].to(device), 5, num // 8)
    else:
        made = torch.from_numpy(word_W.copy())
    ours, theirs = normals(key, 40, 40 + num), box_muller(made).cpu().numpy()
    total = _sum({"a": torch.randn(1000, 1001), "b": torch.randn(7)})
    asked = PrivacyConfig(
        dataset_size=10**6, expected_batch_size=64, steps=10, noise_multiplier=1.0, guarantee="simulated", max_grad_norm=C
    )
    plan = make_plan(asked)
    cpu = privatize(total, plan, 1, key, dtype=torch.float64).grads
    moved = _sum({n: v.to(device) for n, v in total.grads.items()})
    here = privatize(moved, plan, 1, Key.for_tests(RAW), dtype=torch.float64).grads
    steps = np.concatenate([((here[n].cpu() - cpu[n]).numpy() * plan.expected_batch_size / grid_of(plan.noise_std)).ravel() for n in cpu])
    drawn = privatize(_sum({"a": torch.zeros(2**22, device=device)}), plan, 2, key, dtype=torch.float64).grads["a"].cpu().numpy()
    law = stats.kstest(drawn * plan.expected_batch_size / plan.noise_std, "norm")
    return [
        Check("words that differ from the CPU's", float((made.cpu().numpy() != word_W).sum()), 0),
        Check("normals: largest difference from the CPU's, ulp", float((np.abs(ours - theirs) / np.spacing(np.abs(ours))).max()), 4),
        Check("release: largest difference from the CPU's, grid points", float(np.abs(steps).max()), 1.01),
        Check("release: share of coordinates at another grid point", float((np.abs(steps) > 0.5).mean()), 1e-4),
        Check("law of 4 M normals: 1 - p of Kolmogorov-Smirnov", 1 - float(law.pvalue), 1 - 1e-6),
    ]


def totals(device: torch.device) -> list[Check]:
    """Totals over physical batches are float64 on the device: 4,096 parts whose float32 total would be off by far more."""
    parts = [_sum({"a": torch.full((8,), 1 + 2.0**-20 * i, device=device)}) for i in range(4096)]
    exact = sum(1 + 2.0**-20 * i for i in range(4096))
    total = ClippedSum.add_up(_Named(torch.zeros(8, device=device)), C, iter(parts)).grads["a"]
    return [
        Check("total of 4,096 parts: error in C", float((total.cpu() - exact).abs().max()), 1e-9),
        Check("totals that are not float64", float(total.dtype != torch.float64), 0),
    ]


def end_to_end(device: torch.device) -> list[Check]:
    """Train, stop, resume, evaluate, adapt, caption, report and verify in small, as commands; the figure is the exit status."""
    hardware = ["--hardware.device", device.type, "--hardware.physical-batch-size", "64"]
    privacy = ["--privacy.dataset-size", "600", "--privacy.expected-batch-size", "100", "--privacy.target-epsilon", "8"]
    checks = []
    with tempfile.TemporaryDirectory() as folder:

        def run(claim: str, *words: str, expected: int = 0) -> None:
            found = _status(folder, words, stop_after_s=None if expected == 0 else 1.0)
            checks.append(Check(f"{claim}: exit status less {expected}", abs(found - expected), 0))

        run("import scenes", "data", "scenes", "stores/private", "--num", "600", "--size-px", "32")
        run("import public scenes", "data", "scenes", "stores/public", "--num", "200", "--size-px", "32", "--first", "600", "--public")
        run("tokenizer", "data", "tokenizer", "words.json", "--scenes", "2000", "--vocab-size", "440")
        for recipe, name in (("vip.micro_random_start", "mae"), ("dpcap.micro_random_start", "cap")):
            train = [
                "train",
                recipe,
                "--data",
                "stores/private",
                *privacy,
                "--privacy.steps",
                "60",
                "--optim.warmup-steps",
                "5",
                *hardware,
                "--name",
                name,
            ]
            train += ["--data.tokenizer", "words.json"] if name == "cap" else []
            run(f"{name}: stopped", *train, expected=_STOPPED)
            run(f"{name}: resumed", "train", recipe, "--name", name, "--resume")
            if name == "mae":
                run("evaluate", "evaluate", "runs/mae", "--train", "stores/public", "--protocols", "knn")
            else:
                run("caption", "caption", "runs/cap", "stores/public")
            run(f"{name}: report", "report", f"runs/{name}")
            run(f"{name}: verify", "verify", f"runs/{name}/statement.json", "--run", f"runs/{name}", "--store", "stores/private")
        data = ["--data", "stores/private", "--test", "stores/public", "--num-classes", "8", "--dataset-size", "600"]
        run("adapt", "adapt", *data, "--epsilon", "4", "--encoder", "runs/mae", "--name", "head", "--hardware.device", device.type)
    return checks


CHECKS: dict[str, Callable[[torch.device], list[Check]]] = {
    "gradients": gradients,
    "contributions": contributions,
    "noise": noise,
    "totals": totals,
    "end_to_end": end_to_end,
}


_STOPPED = 75
"""Exit status of a run that was told to stop and can be resumed."""


def _ledger_lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in Path(folder, "stores", "LEDGERS").rglob("*.jsonl"))


def _status(folder: str, words: Sequence[str], *, stop_after_s: float | None) -> int:
    """Exit status of a command; with a time, it is told to stop that long after its first charged step."""
    before = _ledger_lines(folder)
    with open(Path(folder, "errors.txt"), "w+") as errors:
        process = subprocess.Popen([sys.executable, "-m", "dpvision", *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        if stop_after_s is not None:
            while process.poll() is None and _ledger_lines(folder) < before + 2:  # the header and a step
                time.sleep(0.1)
            time.sleep(stop_after_s)
            process.send_signal(signal.SIGTERM)
        status = process.wait()
        if status not in (0, _STOPPED):
            errors.seek(0)
            print(" ".join(words), errors.read()[-2000:], sep="\n", file=sys.stderr)
    return status


class _Named(nn.Module):
    """A module whose one parameter is ``a``."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(value)


def _subject(name: str, device: torch.device, num_records: int):
    config = RECIPES[name]()
    batch = to_device(example_batch(config, num_records), device)
    return config, make_model(config.model, seed=0).to(device), batch


def _sum(grads: dict[str, Tensor]) -> ClippedSum:
    return seal(ClippedSum(grads, 1, torch.ones(1), torch.ones(1), C))


def _as(batch: Batch, dtype: torch.dtype) -> Batch:
    return Batch._make(None if t is None else t.cpu().to(dtype) if t.is_floating_point() else t.cpu() for t in batch)


def _relative(ours: dict[str, Tensor], oracle: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of the oracle, in float64 on the CPU."""
    difference, size = 0.0, 0.0
    for name, value in oracle.items():
        exact = value.detach().cpu().double()
        difference += float((ours[name].detach().cpu().double() - exact).square().sum())
        size += float(exact.square().sum())
    return (difference / size) ** 0.5


def _adversarial(batch: Batch, num_tokens: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Pixels and tokens of records that are far from natural ones."""
    like = batch.image_BVCHW[0]
    side = like.shape[-1]
    check = (torch.arange(side, device=like.device)[:, None] + torch.arange(side, device=like.device)) % 2 * 2.0 - 1
    generator = torch.Generator(like.device).manual_seed(1)
    noise = torch.randn(like.shape, generator=generator, device=like.device)
    tokens = [None] if batch.token_BVL is None else [torch.full_like(batch.token_BVL[0], 5), batch.token_BVL[0] * 0 + 3]
    for pixels in (0 * like, like * 0 + 1e3, check.expand_as(like) * 30, noise * 100, noise * 1e-6, like * 0 - 1e-30):
        for token in tokens:
            yield pixels.contiguous(), token


def _with_record(batch: Batch, pixels: Tensor, tokens: Tensor | None) -> Batch:
    """The batch with its last record replaced."""
    image = batch.image_BVCHW.clone()
    image[-1] = pixels
    token = batch.token_BVL
    if token is not None and tokens is not None:
        token = token.clone()
        token[-1] = tokens
    return batch._replace(image_BVCHW=image, token_BVL=token)


def _contribution(loss_fn, model: nn.Module, batch: Batch) -> float:
    """|sum with the last record - sum without it| in units of C, from the computed sums, in float64."""
    valid = batch.valid_B.clone()
    valid[-1] = False
    sums = [clipped_sum(loss_fn, model, b, STEP_KEY, max_grad_norm=C).grads for b in (batch, batch._replace(valid_B=valid))]
    return float(sum((sums[0][n].double() - sums[1][n].double()).square().sum() for n in sums[0])) ** 0.5 / C


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(CHECKS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    checks, rows = CHECKS[args.name](torch.device(args.device)), []
    for check in checks:
        value = check.value if math.isfinite(check.value) else 1e300  # JSON has no NaN, which is wrong all the same
        rows += [row(check.claim, args.name, "value", [value]), row(check.claim, args.name, "bound", [check.bound])]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    write_result(args.json, "gpu_checks", rows, packages=("torch", "numpy"), device=device)
    sys.exit(int(not all(check.ok for check in checks)))


if __name__ == "__main__":
    main()
