"""Privately trained encoders against features that cost no privacy, alone and joined with them,
under private heads.

    python benchmarks/encoders_small_data.py --data DATA --work DIR --encoder vip=RUN --encoder
    dpcap=RUN [--json FILE]

RUN is what ``open_encoder`` takes, say the folder of a run of vip.micro. DATA and DIR are those of
``small_data.py``, whose stores and free features are used where they are there. delta is 1e-5 on
CIFAR-10 and 1 / (2 N) elsewhere, as there.

An encoder's quadrants (pooling 2x2) are treated as patches are: whitened by textures, low
frequencies first, length 1. "joined" rows are (free, w x quadrants) / sqrt(1 + w^2). Heads are many
steps. On 22,000 dimensions several encoders, epsilons and seeds take hours by the mechanism itself,
so they are simulated on the Gram matrix of ``--images`` training images: the same loss, clipping,
rate and steps, with noise as of the whole set from an ordinary generator, the same for all ways.
This guarantees nothing. ``gain`` is the difference from the free features.

Epsilon is the head's alone. ``total epsilon`` adds, by composition, that of an encoder
``--trained-on`` the set's training images. Values are medians over seeds, with the lowest and the
highest.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import row, write_result
from head_regret import Split
from small_data import SETS, store_of
from torch import Tensor

from dpvision.adapt.defaults import mean_noise, steps_rate
from dpvision.adapt.release import full_batch_plan
from dpvision.config import PrivacyConfig
from dpvision.config.heads import HEADS
from dpvision.data.open import open_store
from dpvision.encoders.feature_file import feature_array
from dpvision.encoders.identity import check_alone
from dpvision.encoders.open import open_encoder
from dpvision.encoders.whitening import Whitening, cell_frequencies, fit_whitening
from dpvision.privacy.composition import parts_of, total_epsilon
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.runs.lineage import private_stores, runs_on
from dpvision.synthetic.textures import textures

Way = tuple[float, np.ndarray | None, float, int]
FREE = "patches+scattering"
TEXTURES, FLOOR, ENERGY = 2000, 0.2, (4.0, 2.0, 1.0)
"""As of the patches' whitening, but for the number of textures, since quadrants have fewer
channels.
"""
STEPS, MOMENTUM, CONSTANT = (
    HEADS["many_steps"].steps,
    HEADS["many_steps"].optim.momentum,
    HEADS["many_steps"].constant,
)


def plan_of(name: str, epsilon: float, steps: int) -> DPPlan:
    """The plan of a head on a whole set; without a guarantee where epsilon is infinite."""
    count = SETS[name][0]
    if math.isinf(epsilon):
        asked = PrivacyConfig(
            dataset_size=count,
            expected_batch_size=count,
            steps=steps,
            sampling="full_batch",
            guarantee="none",
        )
        return make_plan(replace(asked, max_grad_norm=None))
    return full_batch_plan(count, epsilon, steps=steps, delta=1e-5 if name == "cifar10" else None)


def features(args: argparse.Namespace, spec: str, name: str, part: str, row_N: np.ndarray) -> Split:
    """Features and labels of some rows of a split's store; the free ones of all rows are kept
    beside it.
    """
    store, encoder = open_store(store_of(args.data, args.work, name, part)), open_encoder(spec)
    all_N = store.eligible_rows(1, 0)
    pooling, width = check_alone(encoder, None if spec == FREE else "2x2", "cpu")
    if spec == FREE:
        x_ND = np.asarray(feature_array(encoder, pooling, width, store, all_N, workers=1)[row_N])
    else:
        x_ND = feature_array(encoder, pooling, width, store, all_N[row_N], keep=False, workers=1)
    return Split(x_ND, store.labels[all_N[row_N]])


@torch.inference_mode()
def whitening_of(spec: str) -> Whitening:
    """The public whitening of an encoder's quadrants, from procedural textures."""
    encoder = open_encoder(spec)
    mean, std = (torch.tensor(v)[:, None, None] for v in (encoder.mean, encoder.std))
    parts = [
        textures(torch.arange(i, i + 250), encoder.image_size).float() / 255
        for i in range(0, TEXTURES, 250)
    ]
    f_ND = torch.cat([encoder((part - mean) / std, "2x2") for part in parts])
    return fit_whitening(cells(f_ND), FLOOR, cells_QQ=cell_frequencies(2, 2, ENERGY))


def cells(f_ND: Tensor) -> Tensor:
    """(N, 4 C) quadrant by quadrant -> (N, C, 4)."""
    return f_ND.unflatten(1, (4, -1)).transpose(1, 2)


def whitened(whitening: Whitening, split: Split) -> np.ndarray:
    """Rows of length 1, float32."""
    return torch.cat(
        [
            whitening(cells(torch.from_numpy(np.asarray(p, np.float32))))
            for p in np.array_split(split.x_ND, 50)
        ]
    ).numpy()


class Simulation:
    """Full-batch gradient steps of several heads at once, in the space of the rows' scores.

    Legend: M rows, the N of training first; J heads (ways x epsilons x seeds) side by side; K
    classes.
    """

    def __init__(
        self,
        name: str,
        free_ME: np.ndarray,
        label_M: np.ndarray,
        num_train: int,
        args: argparse.Namespace,
    ) -> None:
        self.name, self.num_train, self.num_classes = name, num_train, SETS[name][1]
        self.label_M, self.seeds = torch.from_numpy(label_M), range(args.seeds)
        self.plans = {epsilon: plan_of(name, epsilon, STEPS) for epsilon in args.epsilons}
        free_NE = torch.from_numpy(np.asarray(free_ME[:num_train], np.float32))
        blocks: list[Tensor] = []
        noise: list[list[Tensor]] = [[] for _ in self.seeds]
        draws = [self._draw(seed, 0, free_NE.shape[1]) for seed in self.seeds]
        for part in np.array_split(free_ME, max(1, len(free_ME) // 500)):
            x_BE = torch.from_numpy(np.asarray(part, np.float32))
            blocks.append(x_BE @ free_NE.T)
            for seed in self.seeds:
                noise[seed].append(x_BE @ draws[seed])
        self.gram_MN, self.noise = torch.cat(blocks), [torch.cat(parts) for parts in noise]

    def _draw(self, seed: int, which: int, width: int) -> Tensor:
        """Standard noise of all steps: (E, steps x K)."""
        generator = torch.Generator().manual_seed(1000 * which + seed)
        return torch.randn(width, STEPS * self.num_classes, generator=generator)

    def run(self, ways: dict[str, Way]) -> dict[tuple[str, float], list[float]]:
        """Accuracy in percent on the rows that are not trained on, by way and epsilon, for each
        seed.

        Args:
            ways: by name: how the free rows are scaled, an encoder's whitened rows (M, D), how
                these are scaled, and its number.
        """
        heads = [
            (way, epsilon, seed)
            for way in ways
            for epsilon in self.plans
            for seed in (self.seeds if math.isfinite(epsilon) else (0,))
        ]
        width, count = self.num_classes, self.num_train
        rows = {
            number: torch.from_numpy(x_MD)
            for _, x_MD, _, number in ways.values()
            if x_MD is not None
        }
        noise = {
            number: [x_MD @ self._draw(seed, number, x_MD.shape[1]) for seed in self.seeds]
            for number, x_MD in rows.items()
        }
        constant = [self._draw(seed, 999, 1) for seed in self.seeds]
        score_MJ = torch.zeros(len(self.label_M), width * len(heads))
        speed_MJ = torch.zeros_like(score_MJ)
        target_NK = torch.nn.functional.one_hot(self.label_M[:count], width).float()
        norm_N = (self.gram_MN.diagonal() + CONSTANT**2).sqrt()
        for step in range(STEPS):
            now = slice(step * width, (step + 1) * width)
            residual_NJ = torch.empty(count, width * len(heads))
            for j, (_, epsilon, _) in enumerate(heads):
                at = slice(j * width, (j + 1) * width)
                residual_NK = score_MJ[:count, at].softmax(dim=1) - target_NK
                if (clip := self.plans[epsilon].max_grad_norm) is not None:
                    residual_NK *= (
                        clip / (norm_N * torch.linalg.vector_norm(residual_NK, dim=1))
                    ).clamp(max=1)[:, None]
                residual_NJ[:, at] = residual_NK / count
            moved_MJ = self.gram_MN @ residual_NJ
            for j, (way, epsilon, seed) in enumerate(heads):
                at = slice(j * width, (j + 1) * width)
                std = mean_noise(self.plans[epsilon]) * math.sqrt(STEPS)
                rate = steps_rate(
                    self.plans[epsilon], MOMENTUM, bounded=False
                )  # the free rows' own; all rows here are whitened
                free, _, other, number = ways[way]
                # A row is (free x, other x', constant), so a score moves by the sum of what its
                # parts say.
                moved_MK = free**2 * moved_MJ[:, at] + free * std * self.noise[seed][:, now]
                if number:
                    product_DK = rows[number][:count].T @ residual_NJ[:, at]
                    moved_MK += (
                        other**2 * (rows[number] @ product_DK)
                        + other * std * noise[number][seed][:, now]
                    )
                moved_MK += (
                    CONSTANT**2 * residual_NJ[:, at].sum(dim=0)
                    + CONSTANT * std * constant[seed][:, now]
                )
                speed_MJ[:, at] = MOMENTUM * speed_MJ[:, at] + moved_MK
                score_MJ[:, at] -= rate * speed_MJ[:, at]
        found: dict[tuple[str, float], list[float]] = {}
        for j, (way, epsilon, _) in enumerate(heads):
            guess_T = score_MJ[count:, j * width : (j + 1) * width].argmax(dim=1)
            found.setdefault((way, epsilon), []).append(
                100 * float((guess_T == self.label_M[count:]).float().mean())
            )
        return found


def totals(name: str, label: str, spec: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Epsilon of an encoder that was trained on the set's training images and of a head
    together.
    """
    rows, lineage = [], open_encoder(spec).lineage
    behind = [part for store_id in private_stores(lineage) for part in runs_on(lineage, store_id)]
    for epsilon in filter(math.isfinite, args.epsilons):
        total, _, _ = total_epsilon(
            parts_of([*behind, (plan_of(name, epsilon, STEPS), STEPS)]), fixed=True
        )
        rows.append(
            row(f"{name}, epsilon {epsilon:g}", f"{label} and head", "total epsilon", [total])
        )
    return rows


def of_set(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one set."""
    rng, rows = np.random.default_rng(0), []
    there = {
        part: len(open_store(store_of(args.data, args.work, name, part)).eligible_rows(1, 0))
        for part in ("train", "test")
    }
    fit_N, score_T = (
        np.sort(rng.permutation(there[part])[:most])
        for part, most in (("train", args.images), ("test", args.tested))
    )

    def both(spec: str) -> tuple[Split, Split]:
        return features(args, spec, name, "train", fit_N), features(
            args, spec, name, "test", score_T
        )

    free = both(FREE)
    ways: dict[str, Way] = {FREE: (1.0, None, 0.0, 0)}
    for number, (label, spec) in enumerate(args.encoders.items(), start=1):
        whitening = whitening_of(spec)
        x_MD = np.concatenate([whitened(whitening, split) for split in both(spec)])
        ways[f"{label} alone"] = (0.0, x_MD, 1.0, number)
        for weight in args.weights:
            length = math.sqrt(1 + weight**2)
            ways[f"{FREE} + {weight:g} x {label}"] = (1 / length, x_MD, weight / length, number)
        if f"{label}={name}" in args.trained_on:
            rows += totals(name, label, spec, args)
    label_M = np.concatenate([split.label_N for split in free])
    found = Simulation(
        name, np.concatenate([split.x_ND for split in free]), label_M, len(fit_N), args
    ).run(ways)
    for (way, epsilon), values in found.items():
        case = f"{name}, {len(fit_N)} images, noise of {SETS[name][0]}, epsilon {epsilon:g}"
        rows.append(row(case, way, "accuracy_percent", values))
        if way != FREE:
            rows.append(
                row(
                    case,
                    way,
                    "gain",
                    [a - b for a, b in zip(values, found[FREE, epsilon], strict=True)],
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--encoder", action="append", default=[], metavar="LABEL=SPEC", help="may be repeated"
    )
    parser.add_argument(
        "--trained-on",
        action="append",
        default=[],
        metavar="LABEL=SET",
        help="its private images are SET's training images",
    )
    parser.add_argument("--sets", default="cifar10,eurosat")
    parser.add_argument("--epsilons", default="1,3,8,none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--weights", default="0.3,0.7", help="of an encoder's rows beside the free ones"
    )
    parser.add_argument(
        "--images", type=int, default=5000, help="training images of the simulation"
    )
    parser.add_argument(
        "--tested", type=int, default=5000, help="test images of the simulation, at most"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.encoders = dict(one.split("=", 1) for one in args.encoder)
    args.epsilons = [math.inf if e == "none" else float(e) for e in args.epsilons.split(",")]
    args.weights = [float(w) for w in args.weights.split(",")]
    rows = [r for name in args.sets.split(",") for r in of_set(name, args)]
    write_result(
        args.json, "encoders_small_data", rows, packages=("torch", "numpy", "dp-accounting")
    )


if __name__ == "__main__":
    main()
