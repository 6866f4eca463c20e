"""The law of the noise in the releases of heads, by what they release, sampling and ranks.

The releases are those of ``dpvision adapt``; the noise is a release minus the sum that NumPy
computes record by record.

Legend: T steps, N records, D feature dimension, K classes, P numbers of a release.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import gradient_sum, sum_at_zero
from dpvision.adapt.heads.prototypes import prototype_sum
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.moments import moment_sum
from dpvision.adapt.release import Releases
from dpvision.dp.clipped import ClippedSum
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.runs.run import Secrets
from dpvision.train.distributed import Group, all_reduce_vector
from dpvision.train.loop import shared_secrets

from ..mutants.ranks import Ranks
from .laws import LAWS, broken_noise_laws, privacy

ALONE = Group(0, 1, torch.device("cpu"))
STEPS, N, K, SHARE = 16, 32, 20, 0.3
"""SHARE: of the cross moments in a contribution, or the length of a prototype's count."""
WIDTH = {"gradient": 150, "at zero": 150, "moments": 60, "prototypes": 150}
"""D: 48,000 numbers or more in all steps."""
SumOf = Callable[..., ClippedSum]


def records(head: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of length 1, float32 (N, D); labels (N,); a weight, float32 (K, D)."""
    rng = np.random.default_rng(0)
    x_ND = rng.normal(size=(N, WIDTH[head]))
    x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True)
    weight_KD = 0.0 if head == "at zero" else rng.normal(size=(K, WIDTH[head]))
    return (
        x_ND.astype(np.float32),
        rng.integers(0, K, N),
        np.broadcast_to(weight_KD, (K, WIDTH[head])).astype(np.float32),
    )


def clipped(head: str, max_grad_norm: float) -> np.ndarray:
    """What each record adds to a release, float64 (N, P), by the equations of docs/heads.md."""
    x_ND, label, weight_KD = records(head)
    found = []
    for x_D, y in zip(x_ND.astype(np.float64), label, strict=True):
        one_K = np.eye(K)[y]
        if head == "moments":
            row, column = np.triu_indices(len(x_D))
            own = np.outer(x_D, x_D)[row, column] * np.where(row == column, 1, math.sqrt(2))
            cross = np.outer(one_K, x_D).ravel()
            parts = [math.sqrt(1 - SHARE) * own, math.sqrt(SHARE) * cross]
            g_P = max_grad_norm * np.concatenate(parts)
        elif head == "prototypes":
            row_P = np.concatenate([np.outer(one_K, x_D).ravel(), SHARE * one_K])
            g_P = max_grad_norm * row_P / math.hypot(1, SHARE)
        else:
            p_K = np.exp(weight_KD @ x_D)
            g_P = np.outer(p_K / p_K.sum() - one_K, x_D).ravel()
        found.append(g_P * min(1.0, max_grad_norm / np.linalg.norm(g_P)))
    return np.stack(found)


def sum_of(head: str, plan: DPPlan) -> SumOf:
    weight, bias = torch.from_numpy(records(head)[2]), torch.zeros(K)
    return {
        "gradient": lambda blocks: gradient_sum(blocks, weight, bias, "softmax", plan),
        "at zero": lambda blocks: sum_at_zero(blocks, WIDTH[head], bias, "softmax", plan),
        "moments": lambda blocks: moment_sum(blocks, WIDTH[head], K, 1.0, SHARE, plan),
        "prototypes": lambda blocks: prototype_sum(blocks, WIDTH[head], K, 1.0, SHARE, plan),
    }[head]


NAMES = {"moments": ["moment", "cross"], "prototypes": ["sum", "count"]}


def noise_of_head(head: str, law: str, group: Group = ALONE) -> tuple[np.ndarray, list[slice]]:
    """Noise of each step in units of the plan's standard deviation (T, P), and the parts of P; so
    small a noise that a wrong sum would show.
    """
    plan = draft_plan(privacy(law, STEPS, dataset_size=N, noise_multiplier=0.002))
    secrets, counter = shared_secrets(Secrets(), group), itertools.count()
    releases = Releases(plan, lambda: next(counter), secrets.draw, secrets.noise, group)
    x_ND, label, _ = records(head)
    stream = FeatureStream(x_ND, label, K)
    made, drawn_N = sum_of(head, plan), torch.zeros(0)

    def watched(blocks: object) -> ClippedSum:
        nonlocal drawn_N
        total = made(blocks)
        drawn_N = torch.zeros(N, dtype=torch.float64)
        drawn_N[total.record_id_B.tolist()] = 1.0
        return total

    clipped_NP, noise = clipped(head, plan.max_grad_norm), []
    for step in range(STEPS):
        read = IntegerStream(stream) if head == "gradient" else stream
        _, released = releases.release(read, watched)
        parts = [released.grads[name].numpy() for name in NAMES.get(head, ["weight"])]
        known_P = all_reduce_vector(drawn_N, group).numpy() @ clipped_NP
        released_P = np.concatenate([part.ravel() for part in parts])
        noise.append(released_P * plan.expected_batch_size - known_P)
        noise[-1] /= plan.noise.std(step)
    ends = np.cumsum([0, *(part.size for part in parts)]).tolist()
    return np.stack(noise), [slice(a, b) for a, b in itertools.pairwise(ends)]


CASES = [(head, law) for head in WIDTH for law in LAWS]


@pytest.mark.parametrize(("head", "law"), CASES)
def test_noise_in_a_heads_release_is_normal_of_the_plans_scale_and_never_repeats(
    head: str, law: str
) -> None:
    assert broken_noise_laws(*noise_of_head(head, law)) == []


@pytest.mark.parametrize(("head", "law"), CASES)
def test_two_ranks_release_a_heads_noise_once_by_the_same_law(head: str, law: str) -> None:
    (first, parts), (second, _) = Ranks(2).run(lambda group: noise_of_head(head, law, group))
    assert np.array_equal(first, second)
    assert broken_noise_laws(first, parts) == []
