"""Feature sets and releases for the tests of private heads."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import gradient_sum
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.config import PrivacyConfig
from dpvision.dp.clipped import ClippedSum
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.stream import Key

KEYS = bytes(range(32)), bytes(range(32, 64))


def clusters(
    count: int, width: int = 12, num_classes: int = 4, *, seed: int = 0, spread: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Features float32 (N, D) around one point for each class, and their labels; the points do not
    depend on the seed.
    """
    centres = np.random.default_rng(99).normal(size=(num_classes, width))
    rng = np.random.default_rng(seed)
    label = rng.integers(0, num_classes, count)
    return (centres[label] + spread * rng.normal(size=(count, width))).astype(np.float32), label


def multi_label(count: int, num_classes: int = 4, seed: int = 1) -> np.ndarray:
    """Zeros and ones (N, K), some rows without any one."""
    return (np.random.default_rng(seed).random((count, num_classes)) < 0.4).astype(np.uint8)


def stream_of(
    count: int = 60, *, multi: bool = False, seed: int = 0, num_classes: int = 4, **settings: object
) -> FeatureStream:
    x, label = clusters(count, num_classes=num_classes, seed=seed)
    return FeatureStream(
        x, multi_label(count, num_classes) if multi else label, num_classes, **settings
    )  # type: ignore[arg-type]


def joined(stream: FeatureStream, x_D: np.ndarray, label: object) -> FeatureStream:
    """``stream`` with one more record at its end."""
    settings = {
        "centre_D": stream.centre_D,
        "unit": stream.unit,
        "constant": stream.constant,
        "map_EE": stream.map_EE,
    }
    feature_ND = np.concatenate([stream.feature_ND, x_D.astype(stream.feature_ND.dtype)[None]])
    labels = np.concatenate([stream.label, np.asarray(label, dtype=stream.label.dtype)[None]])
    return FeatureStream(feature_ND, labels, stream.num_classes, **settings)  # type: ignore[arg-type]


def integer_rows(stream: FeatureStream) -> Tensor:
    """The rows that gradient steps see, float64 (N, E): the stream's, rounded."""
    parts = [torch.zeros(0, stream.width, dtype=torch.float64)]
    for block in IntegerStream(stream).blocks():
        q_BE = sum(digit_BE.double() * 256**d for d, digit_BE in enumerate(block.digit_BE))
        x_BE = q_BE * block.scale_B[:, None]
        extra = stream.width - x_BE.shape[1]
        parts.append(torch.cat([x_BE, x_BE.new_full((len(x_BE), extra), block.constant)], dim=1))
    return torch.cat(parts)


def gradient_of(
    stream: FeatureStream, weight_KE: Tensor, bias_K: Tensor, loss: str, plan: DPPlan
) -> ClippedSum:
    """The gradient's clipped sum over all records, on integers."""
    return gradient_sum(IntegerStream(stream).blocks(), weight_KE, bias_K, loss, plan)  # type: ignore[arg-type]


def no_noise(
    count: int, *, steps: int = 1, max_grad_norm: float | None = None, **settings: object
) -> DPPlan:
    """Plan without noise, hence without a guarantee: for comparison with oracles."""
    asked = {
        "expected_batch_size": count,
        "sampling": "full_batch",
        "guarantee": "none",
        **settings,
    }
    return make_plan(
        PrivacyConfig(dataset_size=count, steps=steps, max_grad_norm=max_grad_norm, **asked)
    )  # type: ignore[arg-type]


def releases_of(
    plan: DPPlan, keys: tuple[bytes, bytes] = KEYS, charge: Callable[[], int] | None = None
) -> Releases:
    counter = itertools.count()
    return Releases(
        plan.another_run(), charge or (lambda: next(counter)), *map(Key.for_tests, keys)
    )


def private(
    count: int,
    epsilon: float = 8.0,
    steps: int = 1,
    max_grad_norm: float = 1.0,
    keys: tuple[bytes, bytes] = KEYS,
) -> Releases:
    return releases_of(
        full_batch_plan(count, epsilon, steps=steps, max_grad_norm=max_grad_norm), keys
    )


def flat(total: ClippedSum) -> np.ndarray:
    """All numbers of a sum, one after another."""
    return np.concatenate([total.grads[name].numpy().ravel() for name in sorted(total.grads)])
