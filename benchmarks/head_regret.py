"""What --head auto loses against the best head of all, on the same features: sets x records x
epsilon.

    python benchmarks/head_regret.py --data DATA --work FEATURES --json
        benchmarks/results/2026-11-22-head_regret.json
    python benchmarks/head_regret.py --data DATA --work FEATURES --holdout
        # what thresholds are chosen by: the training split alone
    python benchmarks/head_regret.py --over RESULT.json [RESULT.json ...]
        # what the default encoder with --head auto loses

Features are computed once by ``--encoder`` (what ``open_encoder`` takes), with its default pooling
and the set's side in pixels unless ``--pooling`` and ``--image-size`` say otherwise, and kept under
``--work``: SET_train.npy (float16, N x D) with SET_train_y.npy, SET_test.npy with SET_test_y.npy;
files that are there are used. At most ``--most`` random images of the splits take part. The records
of a cell are a random part of the training split, the same for all heads; rows are treated as by
``dpvision adapt``, with ``--public-store`` if it is given; delta is 1 / (2 N). Accuracy in percent,
the mean over seeds of the noise. ``auto`` is ``recommend_head``, which sees public numbers only.

--over computes nothing anew: from results of this script and of small_data.py it takes what the
default encoder with auto loses against the best of all heads and encoders that they have, on the
same set, records and epsilon. The best of several uncertain figures is too high.

SET-rare has the classes of a set in frequencies that fall from 1 to 1/10, in both splits.
cifar10-attributes has several labels a record, the same for all records of a class
(``ATTRIBUTES``): its figures are the mean over attributes of average precision, in percent.
"""

import argparse
import functools
import hashlib
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import torch
from common import write_result
from PIL import Image
from sklearn.metrics import average_precision_score

from dpvision.adapt.defaults import (
    enough_steps,
    frequency_decay,
    frequency_scale,
    recommend_head,
    with_rate,
)
from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.heads.feature_covariance import feature_covariance
from dpvision.adapt.heads.least_squares import least_squares
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.heads.one_step import one_step
from dpvision.adapt.heads.prototypes import prototypes
from dpvision.adapt.public_statistics import public_statistics
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.config.heads import HEADS
from dpvision.data.open import open_store
from dpvision.devices import keep_freed_memory
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_file import texture_centre
from dpvision.encoders.feature_precision import in_precision
from dpvision.encoders.open import open_encoder
from dpvision.privacy.stream import Key

SETS = {"cifar10": 32, "eurosat": 64, "mednist": 64, "pets_sample": 128}
"""Side in pixels at which each set is seen, at most."""
DEFAULT = "patches+scattering"
"""The encoder of ``dpvision adapt`` where none is named."""
EPSILONS = (0.1, 0.5, 1.0, 3.0, 8.0)
SIZES = (300, 1500, 10_000)
MOST = 12_500, 2000
ROWS = 64
"""Images of a forward pass."""
RAREST = 0.1
ATTRIBUTES = {
    "animal": (2, 3, 4, 5, 6, 7), "vehicle": (0, 1, 8, 9), "flies": (0, 2), "swims": (6, 8),
    "wheels": (0, 1, 9), "hooves": (4, 7), "fur": (3, 5), "road": (1, 9),
}  # fmt: skip
"""Classes of CIFAR-10 that have each attribute: airplane, automobile, bird, cat, deer, dog, frog,
horse, ship, truck are 0 to 9.
"""
HELD_OUT = 0.2
"""Part of the training split that thresholds are chosen by."""
MANY = 2000
"""Records beyond which ``--seeds-many`` holds."""
WIDEST = 2048
"""Feature dimensions up to which the heads of covariances take part: one core inverts them by the
hundred.
"""
FITS: dict[str, Callable[[FeatureStream, Releases, bool], Head]] = {
    "one_step": lambda stream, releases, _: one_step(stream, releases),
    "prototypes": lambda stream, releases, _: prototypes(stream, releases),
    "many_steps": lambda stream, releases, bounded: steps_head(stream, releases, bounded=bounded),
    "least_squares": lambda stream, releases, _: least_squares(stream, releases),
    "feature_covariance": lambda stream, releases, _: feature_covariance(stream, releases).last,
}
"""Heads by name. The last argument: whether the rate of many_steps is bounded
(``rate.steps_rate``), as ``dpvision adapt`` decides it.
"""


def steps_head(stream: FeatureStream, releases: Releases, *, bounded: bool) -> Head:
    optim = with_rate(HEADS["many_steps"].optim, releases.plan, bounded=bounded)
    if stream.multi_label:
        return many_steps(
            stream, releases, optim=optim, loss="sigmoid", bias=-math.log(stream.num_classes - 1)
        ).last
    return many_steps(stream, releases, optim=optim).last


@dataclass(frozen=True, eq=False)
class Split:
    """Features float16 (N, D), memory-mapped, and labels."""

    x_ND: np.ndarray
    label_N: np.ndarray

    def taken(self, row_N: np.ndarray) -> "Split":
        return Split(np.asarray(self.x_ND[row_N]), self.label_N[row_N])


@dataclass(frozen=True)
class Seen:
    """What features are computed by."""

    encoder: str
    pooling: str | None
    image_size: int | None
    most: tuple[int, int]
    """Images of the training and of the test split."""
    public_store: Path | None = None
    """Whose images standardise the features."""
    precision: Literal["float32", "bfloat16"] = "float32"


@functools.cache
def encoder_of(seen: Seen, name: str) -> tuple[Encoder, torch.Tensor | None, torch.Tensor | None]:
    """The encoder for a set, and the centre and spread by which ``dpvision adapt`` standardises its
    features.
    """
    own = 32 if seen.encoder == "pixels" else SETS.get(name)
    opened = open_encoder(seen.encoder, image_size=seen.image_size or own)
    opened = in_precision(opened, seen.precision)
    side = opened.image_size
    pooling, x_BD = opened.named(torch.zeros(1, 3, side, side), seen.pooling)
    if seen.public_store is not None:
        public, device = open_store(seen.public_store), torch.device("cpu")
        hardware = {"batch_size": ROWS, "workers": 1, "device": device}
        return opened, *public_statistics(opened, pooling, x_BD.shape[1], public, **hardware)
    return opened, None if opened.standard_rows else texture_centre(opened, pooling), None


def features(work: Path, data: Path, seen: Seen, name: str, part: str) -> Split:
    """A set's split; of a derived set from the features of the set that it comes from."""
    base, _, kind = name.partition("-")
    split = plain_features(work, data, seen, base, part)
    if kind == "attributes":
        return Split(
            split.x_ND,
            np.stack(
                [np.isin(split.label_N, classes) for classes in ATTRIBUTES.values()], axis=1
            ).astype(np.int64),
        )
    if kind == "rare":
        num_classes = int(split.label_N.max()) + 1
        kept = np.random.default_rng(1).random(len(split.label_N)) < RAREST ** (
            split.label_N / (num_classes - 1)
        )
        return split.taken(np.flatnonzero(kept))
    return split


@torch.inference_mode()
def plain_features(work: Path, data: Path, seen: Seen, name: str, part: str) -> Split:
    """Features of one split, computed at their first use."""
    paths = work / f"{name}_{part}.npy", work / f"{name}_{part}_y.npy"
    if not all(path.exists() for path in paths):
        opened, *_ = encoder_of(seen, name)
        table = pq.read_table(data / name / f"{part}.parquet")
        most = seen.most[part == "test"]
        table = table.take(np.sort(np.random.default_rng(7).permutation(len(table))[:most]))
        keep_freed_memory()
        found, before = [], time.process_time()
        for start in range(0, len(table), ROWS):
            images = [
                Image.open(io.BytesIO(image["bytes"]))
                for image in table["image"][start : start + ROWS].to_pylist()
            ]
            x_BCHW = torch.from_numpy(np.stack([opened.preprocess(image) for image in images]))
            found.append(opened(x_BCHW, seen.pooling).numpy().astype(np.float16))
        spent = time.process_time() - before
        print(
            f"{name} {part}: {len(table)} images, {len(table) / spent:.0f} a CPU second", flush=True
        )
        work.mkdir(parents=True, exist_ok=True)
        np.save(paths[0], np.concatenate(found))
        np.save(paths[1], np.array(table["label"].to_pylist(), dtype=np.int64))
    return Split(np.load(paths[0], mmap_mode="r"), np.load(paths[1]).astype(np.int64))


def accuracy(head: Head, test: Split) -> float:
    parts = (
        head.scores(torch.from_numpy(test.x_ND[i : i + 250].astype(np.float32))).numpy()
        for i in range(0, len(test.label_N), 250)
    )
    score_NK = np.concatenate(list(parts))
    if test.label_N.ndim == 2:
        return 100 * float(average_precision_score(test.label_N, score_NK, average="macro"))
    return 100 * float((score_NK.argmax(axis=1) == test.label_N).mean())


def cell(
    train: Split,
    test: Split,
    num_classes: int,
    epsilon: float,
    seeds: int,
    opened: tuple[Any, Any, Any],
    heads: Sequence[str],
) -> dict[str, list[float]]:
    """Test accuracy of every head that can be, for each seed."""
    encoder, centre_D, spread_D = opened
    count, width = train.x_ND.shape
    found: dict[str, list[float]] = {}
    for name, fit in FITS.items():
        if name not in heads or (
            width > WIDEST and name in ("least_squares", "feature_covariance")
        ):
            continue
        several = train.label_N.ndim == 2
        if several and name == "feature_covariance":
            continue
        preset = HEADS[name]  # type: ignore[index]
        plan, bounded = (
            full_batch_plan(count, epsilon, steps=preset.steps),
            not encoder.standard_rows,
        )
        if name == "many_steps" and bounded:
            plan = full_batch_plan(count, epsilon, steps=enough_steps(plan, preset.optim.momentum))
        scaled = name == "many_steps" and encoder.order_D is not None
        scale_D = frequency_scale(encoder.order_D, frequency_decay(plan)) if scaled else None
        stream = FeatureStream(
            train.x_ND,
            train.label_N,
            num_classes,
            centre_D=centre_D,
            spread_D=spread_D,
            unit=True,
            scale_D=scale_D,
            constant=preset.constant,
        )
        for seed in range(seeds):
            keys = [
                Key.for_tests(hashlib.sha256(f"{seed} {use}".encode()).digest())
                for use in ("draw", "noise")
            ]
            head = fit(
                stream, Releases(plan.another_run(), itertools.count().__next__, *keys), bounded
            )
            found.setdefault(name, []).append(accuracy(head, test))
    return found


def line(
    case: str, variant: str, values: Sequence[float], metric: str = "accuracy_percent"
) -> dict[str, Any]:
    """Mean, smallest and largest over the seeds."""
    return {
        "case": case,
        "variant": variant,
        "metric": metric,
        "value": float(np.mean(values)),
        "low": float(min(values)),
        "high": float(max(values)),
    }


def of_set(name: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[float]]:
    """All cells of one set: accuracies, and what auto loses."""
    rng = np.random.default_rng(0)
    whole = features(args.work, args.data, args.seen, name, "train")
    order = rng.permutation(len(whole.label_N))
    num_classes = (
        whole.label_N.shape[1] if whole.label_N.ndim == 2 else int(whole.label_N.max()) + 1
    )
    if args.holdout:
        cut = round(HELD_OUT * len(order))
        test, order = whole.taken(np.sort(order[:cut][: args.most[1]])), order[cut:]
    else:
        other = features(args.work, args.data, args.seen, name, "test")
        test = other.taken(np.sort(rng.permutation(len(other.label_N))[: args.most[1]]))
    rows, losses = [], []
    for count in sorted({min(size, len(order)) for size in args.sizes}):
        train, start = whole.taken(np.sort(order[:count])), time.monotonic()
        for epsilon in args.epsilons:
            opened = encoder_of(args.seen, name.partition("-")[0])
            got = cell(
                train,
                test,
                num_classes,
                epsilon,
                args.seeds if count <= MANY else args.seeds_many,
                opened,
                args.heads.split(","),
            )
            chosen = recommend_head(count, num_classes, epsilon, train.x_ND.shape[1])[0]
            best = max(got, key=lambda head: float(np.mean(got[head])))
            losses.append(float(np.mean(got[best]) - np.mean(got[chosen])))
            case = f"{name}, {count} records, epsilon {epsilon:g}"
            rows += [line(case, head, values) for head, values in got.items()]
            rows.append(line(case, f"auto: {chosen}", [losses[-1]], "points_lost"))
            shown = {head: round(float(np.mean(values)), 1) for head, values in got.items()}
            print(f"{case}: {shown}, auto {chosen} loses {losses[-1]:.1f}", flush=True)
        print(f"[{time.monotonic() - start:.0f} s]", flush=True)
    return rows, losses


def over_encoders(paths: Sequence[Path], sets: Sequence[str]) -> list[dict[str, Any]]:
    """What the default encoder with ``auto`` loses against the best (encoder, head) of each cell,
    and over all cells.
    """
    default: dict[str, float] = {}
    cells: dict[str, dict[str, float]] = {}
    for path in paths:
        result = json.loads(path.read_text())
        auto: dict[str, str] = {}
        for one in result["rows"]:
            case, variant = one["case"], one["variant"]
            if result["benchmark"] == "head_regret":
                encoder, _, case = case.partition(": ")
                if variant.startswith("auto: "):
                    auto[case] = variant.removeprefix("auto: ")
                wanted, variant = one["metric"] == "accuracy_percent", f"{encoder}, {variant}"
            else:
                wanted, variant = one["metric"] == "accuracy", f"{variant}, auto"
            if wanted and not case.endswith("none") and case.split(",")[0] in sets:
                cells.setdefault(case, {})[variant] = one["value"]
        default |= {
            case: cells[case][f"{DEFAULT}, {head}"]
            for case, head in auto.items()
            if f"{DEFAULT}, {head}" in cells.get(case, {})
        }
    rows, losses = [], []
    for case, found in cells.items():
        got = default.get(case, found.get(f"{DEFAULT}, auto"))
        encoders = {variant.partition(", ")[0] for variant in found}
        if got is None or len(encoders) < 2:
            continue
        best = max(found, key=lambda variant: found[variant])
        losses.append(found[best] - got)
        rows.append(
            line(case, f"best of {len(encoders)} encoders: {best}", [losses[-1]], "points_lost")
        )
        print(f"{case}: {got:.1f} by default, {found[best]:.1f} by {best}, loses {losses[-1]:.1f}")
    return [*rows, *summary(losses)]


def summary(losses: Sequence[float]) -> list[dict[str, Any]]:
    """Over all cells."""
    return [
        line("all cells", "auto", [float(np.mean(losses))], "mean_points_lost"),
        line("all cells", "auto", [max(losses)], "most_points_lost"),
        line(
            "all cells",
            "auto",
            [100 * float(np.mean(np.array(losses) <= 1))],
            "cells_within_a_point_percent",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with SET/train.parquet and SET/test.parquet"
    )
    parser.add_argument("--work", type=Path, help="features are kept here")
    parser.add_argument(
        "--over",
        type=Path,
        nargs="+",
        metavar="RESULT",
        help="results to compare; nothing is computed anew",
    )
    parser.add_argument("--encoder", default=DEFAULT)
    parser.add_argument("--pooling")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--public-store", type=Path, help="whose images standardise the features")
    parser.add_argument(
        "--most",
        type=int,
        nargs=2,
        default=MOST,
        metavar=("TRAIN", "TEST"),
        help="images of the splits that take part, at most",
    )
    parser.add_argument("--heads", default=",".join(FITS), help="heads that take part")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--epsilons", default=",".join(map(str, EPSILONS)))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seeds-many", type=int, default=5, help="of cells with many records")
    parser.add_argument(
        "--holdout",
        action="store_true",
        help="score on a fifth of the training split, not on the test split",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, two epsilons, two sizes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.over:
        write_result(
            args.json,
            "head_regret",
            over_encoders(args.over, args.sets.split(",")),
            packages=("numpy",),
        )
        return
    if args.data is None or args.work is None:
        parser.error("--data and --work are needed, unless --over is given")
    if args.quick:
        args = argparse.Namespace(
            **vars(args) | {"seeds": 1, "seeds_many": 1, "sizes": "300,1500", "epsilons": "1,8"}
        )
    args = argparse.Namespace(
        **vars(args)
        | {
            "sizes": [int(s) for s in args.sizes.split(",")],
            "epsilons": [float(e) for e in args.epsilons.split(",")],
            "seen": Seen(
                args.encoder, args.pooling, args.image_size, tuple(args.most), args.public_store
            ),
        }
    )
    rows, losses = [], []
    for name in args.sets.split(","):
        more, lost = of_set(name, args)
        rows, losses = rows + more, losses + lost
    rows += summary(losses)
    encoder = args.encoder
    if args.pooling or args.image_size:
        opened, *_ = encoder_of(args.seen, args.sets.partition(",")[0])
        encoder = f"{opened.name}, {args.pooling or 'default'}, {opened.image_size} px"
    if args.public_store:
        encoder += f", standardised by {args.public_store.name}"
    rows = [replace_case(row, encoder) for row in rows]
    write_result(args.json, "head_regret", rows, packages=("torch", "numpy", "dp-accounting"))


def replace_case(row: dict[str, Any], encoder: str) -> dict[str, Any]:
    return row | {"case": f"{encoder}: {row['case']}"}


if __name__ == "__main__":
    main()
