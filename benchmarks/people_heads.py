"""A person as one row of features, or as k records under a group bound: accuracy of heads at the
same epsilon of a person.

    python benchmarks/people_heads.py --data DATA --work FEATURES --json
    benchmarks/results/2026-11-23-people_heads.json

Images of a public set (features by ``--encoder``, kept as head_regret.py keeps them) are given to
people who do not exist, 1 to ``MOST`` images each, in four ways: alike (one class, the images
nearest to the person's first), one class (at random within it), equally many (the same, ``MOST``
each), any class (at random). "record, k" takes at most k images of each person under the group
bound; "person, k" makes the mean of at most k of one class a row. Test accuracy in percent, mean,
smallest and largest over seeds, which change people, choice of images and noise; delta is 1 / (2
P).
"""

import argparse
import hashlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from common import write_result
from head_regret import FITS, Split, accuracy, encoder_of, line, plain_features

from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.person_rows import PersonFeatures, PersonImages
from dpvision.adapt.release import Releases
from dpvision.config import PrivacyConfig
from dpvision.config.heads import HEADS
from dpvision.privacy import gaussian
from dpvision.privacy.plan import default_delta, make_plan
from dpvision.privacy.stream import Key

MOST = 8
"""Images of a person, at most; every number from 1 on is equally likely."""
WAYS = ("alike", "one class", "equally many", "any class")
DRAWN = (
    ("record", 1),
    ("record", 2),
    ("record", 4),
    ("record", MOST),
    ("person", 1),
    ("person", MOST),
)


def persons(train: Split, count: int, way: str, rng: np.random.Generator) -> np.ndarray:
    """The person of each image, -1 for images of none."""
    person_N = np.full(len(train.label_N), -1)
    x_ND = np.asarray(train.x_ND, dtype=np.float32)
    x_ND = x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-9)
    for p, size in enumerate(
        np.full(count, MOST) if way == "equally many" else rng.integers(1, MOST + 1, count)
    ):
        free_N = np.flatnonzero(person_N < 0)
        first = rng.choice(free_N)
        if way != "any class":
            free_N = free_N[train.label_N[free_N] == train.label_N[first]]
        others = free_N[free_N != first]
        near = (
            np.argsort(-(x_ND[others] @ x_ND[first]))
            if way == "alike"
            else rng.permutation(len(others))
        )
        person_N[np.append(first, others[near[: size - 1]])] = p
    return person_N


def fitted(
    train: Split,
    test: Split,
    person_N: np.ndarray,
    head: str,
    drawn: tuple[str, int],
    epsilon: float,
    seed: int,
    centre_D,
    bounded: bool,
) -> float:
    """Accuracy of one head; ``bounded`` as in ``head_regret.FITS``."""
    (unit, k), preset, people = drawn, HEADS[head], int(person_N.max()) + 1  # type: ignore[index]
    index = np.zeros(len(person_N), dtype=[("id", "i8"), ("unit", "i8"), ("label", "i4")])
    index["id"], index["unit"] = np.arange(len(index)), person_N
    index["label"] = (
        train.label_N if unit == "person" else 0
    )  # a record has its own label: any k of a person's images
    chosen = PersonImages.chosen(SimpleNamespace(index=index), k, seed)  # type: ignore[arg-type]
    x_MD, label_M = train.x_ND[chosen.row_M], train.label_N[chosen.row_M]
    rows, label = (
        (PersonFeatures(x_MD, chosen), train.label_N[chosen.label_row_P])
        if unit == "person"
        else (x_MD, label_M)
    )
    count = len(index) if unit == "person" else len(rows)
    cfg = PrivacyConfig(
        dataset_size=count,
        num_units=people,
        max_records_per_unit=k,
        sampling_unit=unit,
        sampling="full_batch",
        steps=preset.steps,  # type: ignore[arg-type]
        expected_batch_size=len(label),
        noise_multiplier=1.0,
    )
    noise = cfg.clipped_per_unit * gaussian.full_batch_noise(
        epsilon, default_delta(people), preset.steps
    )
    plan = make_plan(PrivacyConfig(**{**vars(cfg), "noise_multiplier": noise}))
    assert plan.unit_epsilon is not None and abs(plan.unit_epsilon / epsilon - 1) < 1e-3
    stream = FeatureStream(
        rows,
        label,
        int(train.label_N.max()) + 1,
        centre_D=centre_D,
        unit=True,
        constant=preset.constant,
    )
    keys = [
        Key.for_tests(hashlib.sha256(f"{seed} {use}".encode()).digest())
        for use in ("draw", "noise")
    ]
    return accuracy(
        FITS[head](
            stream, Releases(plan.another_run(), itertools.count().__next__, *keys), bounded
        ),
        test,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with SET/train.parquet and SET/test.parquet",
    )
    parser.add_argument("--work", type=Path, required=True, help="features are kept here")
    parser.add_argument("--encoder", default="hog")
    parser.add_argument("--sets", default="eurosat")
    parser.add_argument("--people", type=int, default=600)
    parser.add_argument("--epsilons", type=float, nargs="+", default=(1.0,))
    parser.add_argument("--heads", default="many_steps,prototypes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.sets.split(","):
        train, test = (
            plain_features(args.work, args.data, args.encoder, name, part)
            for part in ("train", "test")
        )
        train, (encoder, centre_D) = (
            train.taken(np.arange(len(train.label_N))),
            encoder_of(args.encoder, name),
        )
        bounded = not encoder.standard_rows
        for way in WAYS:
            of_seed = [
                persons(train, args.people, way, np.random.default_rng(seed))
                for seed in range(args.seeds)
            ]
            own = [train.taken(np.flatnonzero(person_N >= 0)) for person_N in of_seed]
            for head, epsilon in itertools.product(args.heads.split(","), args.epsilons):
                for drawn in DRAWN:
                    found = [
                        fitted(
                            own[s],
                            test,
                            of_seed[s][of_seed[s] >= 0],
                            head,
                            drawn,
                            epsilon,
                            s,
                            centre_D,
                            bounded,
                        )
                        for s in range(args.seeds)
                    ]
                    rows.append(
                        line(
                            f"{name}, {way}, {head}, epsilon {epsilon:g}",
                            f"{drawn[0]}, {drawn[1]}",
                            found,
                        )
                    )
                print(
                    rows[-1]["case"],
                    {r["variant"]: round(r["value"], 1) for r in rows[-len(DRAWN) :]},
                    flush=True,
                )
    write_result(args.json, "people_heads", rows, packages=["numpy", "torch"])


if __name__ == "__main__":
    main()
