"""One private step of a linear head on a million frozen features: seconds, records/s and memory,
beside others' ways to such a head.

    python benchmarks/one_step.py [--quick] [--variants A,B] [--records N] [--width D] [--classes K]
    [--dtype T] [--threads N]
                                  [--folder PATH] [--json FILE]

1,000,000 records x 1024 numbers x 1000 classes (--quick: 100,000 records), memory-mapped float16
(--dtype float32: 4 GB), written in blocks from a seed into a temporary folder, which is removed at
the end (--folder keeps it for the next run). Each variant runs in a process of its own, whose peak
memory is counted whole ("memory_mb": pages of the mapped file included while they are resident;
"private_mb" is what it holds at the end without them).

one_step: ``dpvision.adapt.heads.one_step.one_step``, from a head of zeros, full batch, epsilon 8.
one_step_dense: the clipped sum by matrix products, as any step after the first needs it.
non_private_eager: the gradient of the mean loss by autograd, block by block. sklearn: L-BFGS on a
twentieth of the records, until it converges or for 20 iterations. opacus: per-sample gradients of
the same head on a hundredth of the records, clip and noise by Opacus' optimizer. The last two are
also given for all records ("time_s_scaled"), as if their time were proportional.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import row, write_result

BLOCK = 10_000
VARIANTS = ("one_step", "one_step_dense", "non_private_eager", "sklearn", "opacus")
SHARE = {"sklearn": 0.05, "opacus": 0.01}
EPSILON = 8.0


def write_features(
    folder: Path, num_records: int, width: int, num_classes: int, dtype: str
) -> None:
    """Features around one point for each class, in blocks; a folder that has them already is left
    as it is.
    """
    done = folder / "done.json"
    asked = [num_records, width, num_classes, dtype]
    if done.exists() and json.loads(done.read_text()) == asked:
        return
    centres = np.random.default_rng(0).standard_normal((num_classes, width), dtype=np.float32)
    feature = np.lib.format.open_memmap(
        folder / "feature.npy", mode="w+", dtype=dtype, shape=(num_records, width)
    )
    label = np.random.default_rng(1).integers(0, num_classes, num_records)
    for start in range(0, num_records, BLOCK):
        part = slice(start, min(start + BLOCK, num_records))
        noise = np.random.default_rng([2, start]).standard_normal(
            (part.stop - start, width), dtype=np.float32
        )
        feature[part] = noise * 4 + centres[label[part]]
    feature.flush()
    np.save(folder / "label.npy", label)
    done.write_text(json.dumps(asked))


def measure(variant: str, folder: Path, num_classes: int) -> dict[str, float]:
    """Run one variant in this process."""
    import torch

    feature, label = np.load(folder / "feature.npy", mmap_mode="r"), np.load(folder / "label.npy")
    count = max(1, int(len(feature) * SHARE.get(variant, 1.0)))
    feature, label = feature[:count], label[:count]
    work = {
        "one_step": one_step,
        "one_step_dense": one_step_dense,
        "non_private_eager": non_private,
        "sklearn": sklearn_head,
        "opacus": opacus_head,
    }
    run = work[variant](feature, label, num_classes)
    # Imports and the first use of each kernel are not the step's; the time of reading the file is.
    start, cpu = time.perf_counter(), time.process_time()
    weight_KD = run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert torch.as_tensor(weight_KD).isfinite().all()
    status = Path("/proc/self/status").read_text() if Path("/proc/self/status").exists() else ""
    memory = {
        line.split(":")[0]: int(line.split()[1]) / 1024
        for line in status.splitlines()
        if line.startswith(("VmHWM", "RssAnon"))
    }
    return {
        "time_s": seconds,
        "cpu_s": cpu,
        "records": count,
        "memory_mb": memory.get("VmHWM", float("nan")),
        "private_mb": memory.get("RssAnon", float("nan")),
        "threads": torch.get_num_threads(),
    }


def _releases(num_records: int):
    from dpvision.adapt.release import Releases, full_batch_plan
    from dpvision.privacy.stream import new_key

    return Releases(full_batch_plan(num_records, EPSILON), lambda: 0, new_key(), new_key())


def one_step(feature, label, num_classes):
    from dpvision.adapt.feature_stream import FeatureStream
    from dpvision.adapt.heads.one_step import one_step

    stream = FeatureStream(feature, label, num_classes)
    return lambda: one_step(stream, _releases(len(label))).weight_KD


def one_step_dense(feature, label, num_classes):
    import torch

    from dpvision.adapt.feature_stream import FeatureStream
    from dpvision.adapt.gradient import gradient_sum
    from dpvision.adapt.integer_rows import IntegerStream
    from dpvision.privacy.stream import new_key

    stream, releases = (
        IntegerStream(FeatureStream(feature, label, num_classes)),
        _releases(len(label)),
    )
    weight, bias = (
        torch.full((num_classes, feature.shape[1]), 1e-3),
        torch.full((num_classes,), -10.0),
    )

    def once():
        again = replace(releases, noise_key=new_key())  # a key draws the noise of a step once
        return again.release(
            stream, lambda blocks: gradient_sum(blocks, weight, bias, "sigmoid", again.plan)
        )[1].grads["weight"]

    return once


def non_private(feature, label, num_classes):
    import torch
    from torch.nn import functional as F

    weight = torch.full((num_classes, feature.shape[1]), 1e-3, requires_grad=True)

    def run():
        total = torch.zeros_like(weight)
        for start in range(0, len(label), 16384):
            x = torch.from_numpy(np.array(feature[start : start + 16384], dtype=np.float32))
            y = F.one_hot(torch.from_numpy(label[start : start + 16384]), num_classes).float()
            loss = F.binary_cross_entropy_with_logits(
                x @ weight.T - 10.0, y, reduction="sum"
            ) / len(label)
            total += torch.autograd.grad(loss, weight)[0]
        return total

    return run


def sklearn_head(feature, label, num_classes):
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return (
                LogisticRegression(max_iter=20)
                .fit(np.array(feature, dtype=np.float32), label)
                .coef_
            )

    return run


def opacus_head(feature, label, num_classes):
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from torch.nn import functional as F

    head = torch.nn.Linear(feature.shape[1], num_classes)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.constant_(head.bias, -10.0)
    head.bias.requires_grad_(False)
    model = GradSampleModule(head)
    plan = _releases(len(label)).plan
    optimizer = DPOptimizer(
        torch.optim.Adam([head.weight], lr=1e-3),
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.max_grad_norm,
        expected_batch_size=len(label),
    )

    def run():
        # 128 gradients of a million numbers are 0.5 GB; Opacus holds them twice while it clips.
        for start in range(0, len(label), 128):
            optimizer.signal_skip_step(start + 128 < len(label))
            x = torch.from_numpy(np.array(feature[start : start + 128], dtype=np.float32))
            y = F.one_hot(torch.from_numpy(label[start : start + 128]), num_classes).float()
            F.binary_cross_entropy_with_logits(model(x), y, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
        return head.weight.detach()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--records", type=int)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.folder, args.classes)))
        return
    count = args.records or (100_000 if args.quick else 1_000_000)
    case = f"{count}x{args.width}x{args.classes}"
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_features(folder, count, args.width, args.classes, args.dtype)
        environment = os.environ | {
            "OMP_NUM_THREADS": str(args.threads),
            "OPENBLAS_NUM_THREADS": str(args.threads),
        }
        for variant in args.variants.split(","):
            command = [
                sys.executable,
                __file__,
                "--one",
                variant,
                "--folder",
                str(folder),
                "--classes",
                str(args.classes),
            ]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                print(
                    f"{variant}: left out "
                    f"({(done.stderr.strip().splitlines() or ['no message'])[-1]})"
                )
                continue
            got = json.loads(done.stdout.strip().splitlines()[-1])
            got["records_per_s"] = got["records"] / got["time_s"]
            if got["records"] < count:
                got["time_s_scaled"] = got["time_s"] * count / got["records"]
            rows += [
                row(case, variant, metric, [value])
                for metric, value in got.items()
                if value == value
            ]
    write_result(args.json, "one_step", rows, packages=["torch", "numpy", "scikit-learn"])


if __name__ == "__main__":
    main()
