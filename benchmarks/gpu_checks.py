"""Checks of ``gpu_acceptance.py``: what must be right on an accelerator before anything is timed.
They run on a CPU too.

    python benchmarks/gpu_checks.py NAME [--device cpu|cuda] [--json FILE]

A check is a function of the device that yields ``Check`` lines; each compares with the CPU, with
float64, with vmap, or with a standard.
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
from typing import Any

import numpy as np
import torch
from common import row, write_result
from scipy import stats
from torch import Tensor, nn

from dpvision.config import PrivacyConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import check_bits, clipped_sum, public_loss_scale
from dpvision.dp.clipped import ClippedSum, seal
from dpvision.dp.compiled import compile_blocks
from dpvision.dp.noise import grid_of, privatize
from dpvision.dp.normals import box_muller, key_words, normals, second_uniforms, smallest_words
from dpvision.errors import PrivacyError
from dpvision.models import make_model
from dpvision.privacy.plan import make_plan
from dpvision.privacy.stream import WORDS_PER_BLOCK, Key, Keystream
from dpvision.recipes import RECIPES
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.step import autocast, to_device

SMALL = ("vip.micro_random_start", "dpcap.micro_random_start")
RAW, STEP_KEY = bytes(range(32)), StepKey(0, 0)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest relative difference of one pass from vmap in the same precision."""
C = 1.0
RFC_8439 = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
)
"""Key, counter and nonce zero."""
PARTNERS = 7
"""Other records of the batch in which an adversarial record's contribution is measured."""


@dataclass(frozen=True)
class Check:
    """One claim, its figure and the bound that the figure must not exceed."""

    claim: str
    value: float
    bound: float | None
    """None: a figure worth knowing, which proves nothing wrong."""

    @property
    def ok(self) -> bool:
        return self.bound is None or self.value <= self.bound  # NaN fails

    def rows(self, name: str) -> list[dict[str, Any]]:
        value = (
            self.value if math.isfinite(self.value) else 1e300
        )  # JSON has no NaN, which is wrong all the same
        if self.bound is None:
            return [row(self.claim, name, "note", [value])]
        return [
            row(self.claim, name, "value", [value]),
            row(self.claim, name, "bound", [self.bound]),
        ]


Checks = Iterator[Check]


def gradients(device: torch.device) -> Checks:
    """One pass against vmap in each precision, compiled against eager, and this device against a
    CPU in float64.
    """
    for name in SMALL:
        config, model, batch = _subject(name, device, 6)
        loss_fn = loss_function(config)
        for precision, allowed in TOLERANCE.items():
            with autocast(precision, device):
                scale = (
                    public_loss_scale(
                        loss_fn, model, to_device(example_batch(config), device), STEP_KEY
                    )
                    if precision == "float16"
                    else 1.0
                )
                ours, oracle = (
                    clipped_sum(
                        loss_fn,
                        model,
                        batch,
                        STEP_KEY,
                        max_grad_norm=1e9,
                        method=method,
                        loss_scale=scale,
                    )
                    for method in ("one_pass", "vmap")
                )
            yield Check(
                f"{name}, {precision}: one pass from vmap",
                _relative(ours.grads, oracle.grads),
                allowed,
            )
            yield Check(
                f"{name}, {precision}: norms from vmap",
                _relative({"": ours.norms_B}, {"": oracle.norms_B}),
                allowed,
            )
        exact = clipped_sum(
            loss_fn,
            make_model(config.model, seed=0).double(),
            _as(batch, torch.float64),
            STEP_KEY,
            max_grad_norm=1e9,
            method="vmap",
        )
        eager = clipped_sum(loss_fn, model, batch, STEP_KEY, max_grad_norm=1e9)
        yield Check(
            f"{name}: float32 here from float64 on a CPU", _relative(eager.grads, exact.grads), 1e-4
        )
        blocks = compile_blocks(model, 6)
        compiled = clipped_sum(loss_fn, model, batch, STEP_KEY, max_grad_norm=1e9, blocks=blocks)
        yield Check(
            f"{name}: compiled from eager",
            _relative(compiled.grads, eager.grads),
            TOLERANCE["float32"],
        )


def contributions(device: torch.device) -> Checks:
    """Adversarial records: a contribution, the difference of two computed sums, is at most C in
    every precision.
    """
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
                yield Check(
                    f"{name}, {weights}, {precision}: largest contribution in C", max(found), C
                )


def noise(device: torch.device) -> Checks:
    """The cipher's published answer and the CPU's words bit for bit, normals within 4 ulp, the
    CPU's grid points, and the law of a draw.
    """
    zero_key = _words(Key.for_tests(bytes(32)), 0, 8, device).view(np.uint8)[:64].tobytes()
    yield Check(
        "bytes that differ from RFC 8439, appendix A.1, vector 1",
        sum(a != b for a, b in zip(zero_key, RFC_8439, strict=True)),
        0,
    )
    num = 2**20
    word_W = np.empty(num, dtype="<i8")
    key = Key.for_tests(RAW)
    Keystream(key, 5).fill(word_W)
    made = _words(key, 5, num, device)
    yield Check("words that differ from the CPU's", float((made != word_W).sum()), 0)
    there = torch.from_numpy(made).to(device)
    found_K2 = smallest_words(there)
    second = (found_K2[:, 0], second_uniforms(found_K2.cpu(), key, 20).to(device))
    ours = box_muller(there, second=second).cpu().numpy()
    theirs = normals(key, 40, 40 + num)
    yield Check(
        "normals: largest difference from the CPU's, ulp",
        float((np.abs(ours - theirs) / np.spacing(np.abs(theirs))).max()),
        4,
    )
    total = _sum({"a": torch.randn(1000, 1001), "b": torch.randn(7)})
    asked = PrivacyConfig(
        dataset_size=10**6,
        expected_batch_size=64,
        steps=10,
        noise_multiplier=1.0,
        guarantee="simulated",
        max_grad_norm=C,
    )
    plan = make_plan(asked)
    cpu = privatize(total, plan, 1, key, dtype=torch.float64).grads
    moved = _sum({n: v.to(device) for n, v in total.grads.items()})
    here = privatize(moved, plan, 1, Key.for_tests(RAW), dtype=torch.float64).grads
    steps = np.concatenate(
        [
            (
                (here[n].cpu() - cpu[n]).numpy()
                * plan.expected_batch_size
                / grid_of(plan.noise_std)
            ).ravel()
            for n in cpu
        ]
    )
    yield Check(
        "release: largest difference from the CPU's, grid points", float(np.abs(steps).max()), 1.01
    )
    yield Check(
        "release: share of coordinates at another grid point",
        float((np.abs(steps) > 0.5).mean()),
        1e-4,
    )
    drawn = (
        privatize(_sum({"a": torch.zeros(2**22, device=device)}), plan, 2, key, dtype=torch.float64)
        .grads["a"]
        .cpu()
        .numpy()
    )
    law = stats.kstest(drawn * plan.expected_batch_size / plan.noise_std, "norm")
    yield Check("law of 4 M normals: 1 - p of Kolmogorov-Smirnov", 1 - float(law.pvalue), 1 - 1e-6)


def _words(key: Key, block: int, num: int, device: torch.device) -> np.ndarray:
    """Words of the cipher as ``device`` makes them, int64 on the host."""
    if device.type == "cuda":
        from dpvision.dp.chacha_triton import chacha_words

        return (
            chacha_words(key_words([key])[0].to(device), block, num // WORDS_PER_BLOCK)
            .cpu()
            .numpy()
        )
    word_W = np.empty(num, dtype="<i8")
    Keystream(key, block).fill(word_W)
    return word_W


def totals(device: torch.device) -> Checks:
    """Totals over physical batches are float64 on the device: 4,096 parts whose float32 total would
    be off by far more.
    """
    parts = [_sum({"a": torch.full((8,), 1 + 2.0**-20 * i, device=device)}) for i in range(4096)]
    exact = sum(1 + 2.0**-20 * i for i in range(4096))
    total = ClippedSum.add_up(_Named(torch.zeros(8, device=device)), C, iter(parts)).grads["a"]
    yield Check("total of 4,096 parts: error in C", float((total.cpu() - exact).abs().max()), 1e-9)
    yield Check("totals that are not float64", float(total.dtype != torch.float64), 0)


def bits(device: torch.device) -> Checks:
    """A record's reference bits (``dp.reference_bits``): in passes of M rows no bit depends on
    place or company.

    The smaller numbers of rows that are not admitted are counted: such passes are padded.
    """
    on_gpu = device.type == "cuda"
    for name in (*SMALL, *(("vip.base", "dpcap.base") if on_gpu else ())):
        rows = 64 if on_gpu else 16
        config, model, public = _subject(name, device, rows)
        sizes = (8, 12, 16, 24, 32, 48, 63) if on_gpu else range(8, rows)
        for precision in TOLERANCE:
            admitted, refused = (rows,), ""
            try:
                with autocast(precision, device):
                    admitted = check_bits(
                        loss_function(config), model, public, STEP_KEY, sizes, max_grad_norm=C
                    )
            except PrivacyError as error:
                refused = f" ({str(error)[:120]})"
            yield Check(
                f"{name}, {precision}: a pass of {rows} rows is refused{refused}",
                float(bool(refused)),
                0,
            )
            yield Check(
                f"{name}, {precision}: of {len(sizes)} smaller numbers of rows, not admitted",
                len(sizes) + 1 - len(admitted),
                None,
            )


def end_to_end(device: torch.device) -> Checks:
    """Train, stop, resume, evaluate, adapt, caption, report and verify in small, as commands; the
    figure is the exit status.
    """
    hardware = ["--hardware.device", device.type, "--hardware.physical-batch-size", "64"]
    privacy = [
        "--privacy.dataset-size",
        "600",
        "--privacy.expected-batch-size",
        "100",
        "--privacy.target-epsilon",
        "8",
    ]
    privacy += [
        "--privacy.steps",
        "60",
        "--optim.warmup-steps",
        "5",
    ]
    with tempfile.TemporaryDirectory() as folder:

        def run(claim: str, *words: str, expected: int = 0) -> Check:
            found = _status(folder, words, stop_after_s=None if expected == 0 else 0.5)
            return Check(f"{claim}: exit status less {expected}", abs(found - expected), 0)

        yield run(
            "import scenes", "data", "scenes", "stores/private", "--num", "600", "--size-px", "32"
        )
        yield run(
            "import public scenes",
            "data",
            "scenes",
            "stores/public",
            "--num",
            "200",
            "--size-px",
            "32",
            "--first",
            "600",
            "--public",
        )
        yield run(
            "tokenizer",
            "data",
            "tokenizer",
            "words.json",
            "--scenes",
            "2000",
            "--vocab-size",
            "440",
        )
        for recipe, name in (
            ("vip.micro_random_start", "mae"),
            ("dpcap.micro_random_start", "cap"),
        ):
            words = ["--data.tokenizer", "words.json"] if name == "cap" else []
            train = [
                "train",
                recipe,
                "--data",
                "stores/private",
                *privacy,
                *hardware,
                "--name",
                name,
                *words,
            ]
            yield run(f"{name}: stopped", *train, expected=_STOPPED)
            yield run(f"{name}: resumed", "train", recipe, "--name", name, "--resume")
            if name == "mae":
                yield run(
                    "evaluate",
                    "evaluate",
                    "runs/mae",
                    "--train",
                    "stores/public",
                    "--protocols",
                    "knn",
                )
            else:
                yield run("caption", "caption", "runs/cap", "stores/public")
            yield run(f"{name}: report", "report", f"runs/{name}")
            yield run(
                f"{name}: verify",
                "verify",
                f"runs/{name}/statement.json",
                "--run",
                f"runs/{name}",
                "--store",
                "stores/private",
            )
        data = [
            "--data",
            "stores/private",
            "--test",
            "stores/public",
            "--num-classes",
            "8",
            "--dataset-size",
            "600",
        ]
        yield run(
            "adapt",
            "adapt",
            *data,
            "--epsilon",
            "4",
            "--encoder",
            "runs/mae",
            "--name",
            "head",
            "--hardware.device",
            device.type,
        )


CHECKS: dict[str, Callable[[torch.device], Checks]] = {
    "noise": noise,
    "totals": totals,
    "gradients": gradients,
    "bits": bits,
    "contributions": contributions,
    "end_to_end": end_to_end,
}


def as_part(
    checks: Callable[[torch.device], Checks], name: str
) -> Callable[[torch.device, float], Iterator[dict[str, Any]]]:
    """Checks as a part of gpu_parts.py."""

    def run(device: torch.device, budget_s: float) -> Iterator[dict[str, Any]]:
        for check in checks(device):
            yield from check.rows(name)

    return run


_STOPPED = 75
"""Exit status of a run that was told to stop and can be resumed."""


def _ledger_lines(folder: str) -> int:
    return sum(
        len(path.read_text().splitlines())
        for path in Path(folder, "stores", "LEDGERS").rglob("*.jsonl")
    )


def _status(folder: str, words: Sequence[str], *, stop_after_s: float | None) -> int:
    """Exit status of a command; with a time, it is told to stop that long after its first charged
    step.
    """
    before = _ledger_lines(folder)
    with open(Path(folder, "errors.txt"), "w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "dpvision", *words],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        if stop_after_s is not None:
            while (
                process.poll() is None and _ledger_lines(folder) < before + 2
            ):  # the header and a step
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
    return Batch._make(
        None if t is None else t.cpu().to(dtype) if t.is_floating_point() else t.cpu()
        for t in batch
    )


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
    check = (
        torch.arange(side, device=like.device)[:, None] + torch.arange(side, device=like.device)
    ) % 2 * 2.0 - 1
    generator = torch.Generator(like.device).manual_seed(1)
    noise = torch.randn(like.shape, generator=generator, device=like.device)
    tokens = (
        [None]
        if batch.token_BVL is None
        else [torch.full_like(batch.token_BVL[0], 5), batch.token_BVL[0] * 0 + 3]
    )
    for pixels in (
        0 * like,
        like * 0 + 1e3,
        check.expand_as(like) * 30,
        noise * 100,
        noise * 1e-6,
        like * 0 - 1e-30,
    ):
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
    """|sum with the last record - sum without it| in units of C, from the computed sums, in
    float64.
    """
    valid = batch.valid_B.clone()
    valid[-1] = False
    sums = [
        clipped_sum(loss_fn, model, b, STEP_KEY, max_grad_norm=C).grads
        for b in (batch, batch._replace(valid_B=valid))
    ]
    return (
        float(sum((sums[0][n].double() - sums[1][n].double()).square().sum() for n in sums[0]))
        ** 0.5
        / C
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(CHECKS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    checks = []
    for check in CHECKS[args.name](torch.device(args.device)):
        bound = "" if check.bound is None else f", at most {check.bound:g}"
        verdict = "ok   " if check.ok else "WRONG"
        print(f"{verdict} {check.claim}: {check.value:.4g}{bound}", file=sys.stderr, flush=True)
        checks.append(check)
    rows = [line for check in checks for line in check.rows(args.name)]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    write_result(args.json, "gpu_checks", rows, packages=("torch", "numpy"), device=device)
    sys.exit(int(not all(check.ok for check in checks)))


if __name__ == "__main__":
    main()
