"""Laws of all heads: more epsilon is less noise, a record moves a release by at most C, and neither
order, blocks nor processes matter.
"""

import itertools
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from feature_sets import clusters, flat, gradient_of, joined, private, releases_of, stream_of
from made import key

from dpvision.adapt import feature_stream as stream_module
from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.gradient import sum_at_zero
from dpvision.adapt.heads.feature_covariance import feature_covariance
from dpvision.adapt.heads.least_squares import least_squares
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.heads.one_step import one_step
from dpvision.adapt.heads.prototypes import prototype_sum, prototypes
from dpvision.adapt.moments import moment_sum
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.dp.clip import ClippedSum
from dpvision.dp.noise import privatize

HEADS: dict[str, Callable[[FeatureStream, Releases], Head]] = {
    "one_step": lambda stream, releases: one_step(
        stream, replace(releases, plan=full_batch_plan(releases.plan.dataset_size, 4.0))
    ),
    "many_steps": lambda stream, releases: many_steps(stream, releases).last,
    "least_squares": least_squares,
    "feature_covariance": lambda stream, releases: feature_covariance(stream, releases).last,
    "prototypes": prototypes,
}
X = torch.from_numpy(clusters(2000, seed=8)[0])


def sums(stream: FeatureStream) -> dict[str, ClippedSum]:
    """What each head releases of these records, under C = 1."""
    plan = full_batch_plan(stream.num_records, 8.0)
    bias_K, width, classes = (
        torch.full((stream.num_classes,), -1.0),
        stream.width,
        stream.num_classes,
    )
    weight_KE = torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    return {
        "at zero": sum_at_zero(stream.blocks(), width, bias_K, "sigmoid", plan),
        "gradient": gradient_of(stream, weight_KE, bias_K, "softmax", plan),
        "moments": moment_sum(stream.blocks(), width, classes, 1.0, 0.6, plan),
        "prototypes": prototype_sum(stream.blocks(), width, classes, 1.0, 0.3, plan),
    }


def without(stream: FeatureStream, row: int) -> FeatureStream:
    keep = np.arange(stream.num_records) != row
    return replace(stream, feature_ND=stream.feature_ND[keep], label=stream.label[keep])


def test_more_epsilon_is_less_noise_and_more_releases_are_more() -> None:
    epsilons = np.geomspace(0.01, 20, 25)
    for steps, count in itertools.product((1, 7), (100, 1_000_000)):
        noise = [full_batch_plan(count, e, steps=steps).noise_std for e in epsilons]
        assert all(a > b for a, b in itertools.pairwise(noise))
    by_steps = [full_batch_plan(1000, 1.0, steps=steps).noise_std for steps in (1, 2, 5, 20, 100)]
    assert by_steps == sorted(by_steps) and len(set(by_steps)) == 5


def test_a_release_at_more_epsilon_is_nearer_to_the_sum() -> None:
    """The same key is the same draw at another scale, so this holds draw by draw and not on average
    only.
    """
    stream = stream_of(300, unit=True)
    total = sums(stream)["moments"]
    gaps = []
    for epsilon in (0.1, 0.25, 0.5, 1, 2, 4, 8, 10):
        plan = full_batch_plan(300, epsilon)
        released = privatize(
            total, plan.another_run(), 0, key(bytes(32)), dtype=torch.float64
        ).grads["moment"]
        gaps.append(float((released - total.grads["moment"] / 300).norm()))
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 10 * gaps[-1] > 0


@pytest.mark.parametrize("width", [12, 77, 1024])
def test_a_record_more_or_less_moves_every_release_by_at_most_c(width: int) -> None:
    """Under one noise key the noise cancels, so that what is left between the two releases is the
    record's own part.
    """
    x, label = clusters(40, width=width)
    stream = FeatureStream(x, label, 4, unit=True, constant=0.1)
    others = [
        joined(stream, 100 * np.ones(width), 3),
        *(without(stream, row) for row in (0, 17, 39)),
    ]
    plan = full_batch_plan(41, 4.0)
    before = {
        name: privatize(total, plan.another_run(), 0, key(bytes(32)), dtype=torch.float64).grads
        for name, total in sums(stream).items()
    }
    largest = dict.fromkeys(before, 0.0)
    for other in others:
        for name, total in sums(other).items():
            after = privatize(
                total, plan.another_run(), 0, key(bytes(32)), dtype=torch.float64
            ).grads
            square = sum(
                float((after[part] - value).square().sum()) for part, value in before[name].items()
            )
            moved = math.sqrt(square) * plan.expected_batch_size
            assert moved <= 1 + 1e-5, name
            largest[name] = max(largest[name], moved)
    assert min(largest[name] for name in ("gradient", "moments", "prototypes")) > 0.95, (
        "a missing clip would not be seen"
    )


@pytest.mark.parametrize("width", [16, 77, 1024])
def test_one_wide_record_alone_is_within_c_to_the_last_bit(width: int) -> None:
    """Lengths are added up in float32 pieces: whatever is lost there, the margin of the clip has to
    cover.
    """
    rng = np.random.default_rng(width)
    empty = FeatureStream(np.zeros((0, width), dtype=np.float32), np.zeros(0, dtype=np.int64), 4)
    largest = 0.0
    for trial in range(60):
        # Numbers just below the half of a unit in the last place of a sum of squares are what
        # rounding loses most of.
        x = (
            rng.normal(size=width)
            if trial % 2
            else np.where(np.arange(width) % 16 == 0, 1.0, rng.uniform(1.5e-4, 2.4e-4))
        )
        for name, total in sums(joined(empty, x * 10.0 ** rng.uniform(0.5, 12), trial % 4)).items():
            length = float(np.linalg.norm(flat(total)))
            assert length <= 1, name
            largest = max(largest, length)
    assert largest > 1 - 1e-5


def test_lengths_of_rows_are_within_six_units_of_float32() -> None:
    rng, worst = np.random.default_rng(0), 0.0
    for width, scale in itertools.product((1, 15, 16, 17, 513, 1040), (1e-10, 1.0, 1e14)):
        x_BE = torch.from_numpy(
            (rng.standard_t(2, size=(500, width)) * scale / 100).astype(np.float32)
        )
        exact_B = torch.linalg.vector_norm(x_BE, dim=1, dtype=torch.float64)
        worst = max(worst, float((stream_module._norms(x_BE) / exact_B - 1).abs().max()))
    assert 0 < worst < 6 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", HEADS)
def test_neither_the_order_of_records_nor_the_size_of_blocks_changes_a_prediction(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(300, unit=True, constant=0.5)
    order = np.random.default_rng(1).permutation(300)
    shuffled = replace(stream, feature_ND=stream.feature_ND[order], label=stream.label[order])
    head, other = (HEADS[name](s, private(300, 4.0, steps=4)) for s in (stream, shuffled))
    monkeypatch.setattr(stream_module, "_BLOCK_BYTES", 4 * 13 * 7)
    blocked = HEADS[name](stream, private(300, 4.0, steps=4))
    for again in (other, blocked):
        torch.testing.assert_close(
            again.weight_KD,
            head.weight_KD,
            rtol=1e-3,
            atol=1e-4 * float(head.weight_KD.abs().max()),
        )
        assert torch.equal(again.predict(X), head.predict(X))
    assert len(head.predict(X).unique()) == 4


RANK_SCRIPT = """
import itertools, sys
import torch
from feature_sets import KEYS, stream_of
from test_laws import HEADS
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.privacy.stream import Key
from dpvision.train.distributed import join, leave

group = join("cpu")
assert group.world_size == 2
heads = {}
for name, train in HEADS.items():
    counter = itertools.count()
    releases = Releases(full_batch_plan(301, 4.0, steps=4), lambda: next(counter),
                        *map(Key.for_tests, KEYS), group=group)
    heads[name] = train(stream_of(301, unit=True), releases).weight_KD
torch.save(heads, f"{sys.argv[1]}/{group.rank}.pt")
leave()
"""


def test_two_real_processes_release_what_one_does(tmp_path: Path) -> None:
    """Each sums its slice, the noise is added to the total once: both have one process's heads, and
    each other's bit for bit.
    """
    (tmp_path / "script.py").write_text(RANK_SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = os.pathsep.join(
        [
            str(Path(__file__).parent),
            str(Path(__file__).parents[1] / "oracles"),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": here,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=common | {"RANK": str(rank)}
        )
        for rank in range(2)
    ]
    for process in ranks:
        assert process.wait(timeout=900) == 0, process.communicate()[1][-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, train in HEADS.items():
        alone = train(
            stream_of(301, unit=True), releases_of(full_batch_plan(301, 4.0, steps=4))
        ).weight_KD
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(
            first[name], alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()), msg=name
        )
