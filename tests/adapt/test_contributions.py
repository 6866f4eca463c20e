"""What each head releases: equal to the slow way, at most C for each record, exactly zero for a
broken one.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from feature_sets import flat, gradient_of, integer_rows, joined, multi_label, no_noise, stream_of
from torch import nn
from torch.nn import functional as F

from dpvision.adapt import feature_stream as stream_module
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import Loss, gradient_sum, sum_at_zero
from dpvision.adapt.heads.prototypes import prototype_sum
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.moments import moment_of, moment_sum
from dpvision.adapt.release import full_batch_plan
from dpvision.config import PrivacyConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.errors import DataError, PrivacyError
from dpvision.privacy.plan import DPPlan, make_plan

C = 0.7
PLAN = full_batch_plan(100, 8.0, max_grad_norm=C)
WEIGHT = torch.randn(4, 13, generator=torch.Generator().manual_seed(3))
BIAS = torch.linspace(-2, 1, 4)


SUMS: dict[str, Callable[[FeatureStream, DPPlan], ClippedSum]] = {
    "sigmoid": lambda stream, plan: gradient_of(
        stream, WEIGHT[:, : stream.width], BIAS, "sigmoid", plan
    ),
    "softmax": lambda stream, plan: gradient_of(
        stream, WEIGHT[:, : stream.width], BIAS, "softmax", plan
    ),
    "sigmoid at zero": lambda stream, plan: sum_at_zero(
        stream.blocks(), stream.width, BIAS, "sigmoid", plan
    ),
    "softmax at zero": lambda stream, plan: sum_at_zero(
        stream.blocks(), stream.width, BIAS, "softmax", plan
    ),
    "moments": lambda stream, plan: moment_sum(stream.blocks(), stream.width, 4, 1.5, 0.6, plan),
    "covariance": lambda stream, plan: moment_sum(stream.blocks(), stream.width, 4, 1.5, 0.0, plan),
    "prototypes": lambda stream, plan: prototype_sum(
        stream.blocks(), stream.width, 4, 1.5, 0.3, plan
    ),
}


def total_of(stream: FeatureStream, name: str, plan: DPPlan = PLAN) -> np.ndarray:
    return flat(SUMS[name](stream, plan))


@pytest.mark.parametrize("at_zero", [False, True])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid", "several labels"])
def test_the_closed_form_is_the_clipped_sum_of_autograd(loss: str, at_zero: bool) -> None:
    """The oracle is ``clipped_sum`` by vmap over grad, which knows nothing of outer products."""
    stream = stream_of(multi=loss == "several labels", constant=1.0)
    weight = WEIGHT * (0 if at_zero else 1)
    model = nn.Linear(13, 4).double()
    with torch.no_grad():
        model.weight.copy_(weight)
        model.bias.copy_(BIAS).requires_grad_(False)
    x_BE = (
        torch.cat([torch.from_numpy(stream.feature_ND).double(), torch.ones(60, 1).double()], dim=1)
        if at_zero
        else integer_rows(stream)
    )
    label = torch.from_numpy(stream.label)

    def losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
        logit_BK, target = model(batch.image_BVCHW), label[batch.record_id_B]
        if loss == "softmax":
            return F.cross_entropy(logit_BK, target, reduction="none")
        target_BK = torch.eye(4)[target] if loss == "sigmoid" else target
        return F.binary_cross_entropy_with_logits(
            logit_BK, target_BK.double(), reduction="none"
        ).sum(1)

    batch = Batch(torch.arange(60), torch.ones(60, dtype=torch.bool), x_BE, None, None)
    slow = clipped_sum(
        losses,
        model,
        batch,
        StepKey(0, 0),
        max_grad_norm=5.0,
        method="vmap",
        check_separability=False,
    )
    plan = full_batch_plan(60, 8.0, max_grad_norm=5.0)
    kind: Loss = "softmax" if loss == "softmax" else "sigmoid"
    fast = (
        sum_at_zero(stream.blocks(), 13, BIAS, kind, plan)
        if at_zero
        else gradient_of(stream, weight, BIAS, kind, plan)
    )
    assert 0 < (slow.norms_B > 5.0).sum() < 60
    torch.testing.assert_close(fast.grads["weight"], slow.grads["weight"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.norms_B, slow.norms_B, rtol=1e-5, atol=1e-5)


def test_the_moments_are_those_of_the_records() -> None:
    stream = stream_of(unit=True)
    total = moment_sum(stream.blocks(), 12, 4, 1.0, 0.6, PLAN)
    x = stream.feature_ND / np.linalg.norm(stream.feature_ND, axis=1, keepdims=True)
    np.testing.assert_allclose(
        moment_of(total.grads["moment"], 1.0, 0.6, PLAN).numpy(), x.T @ x, rtol=1e-4, atol=1e-4
    )
    # A triangle has the length of its matrix, and each record's contribution exactly the length C:
    # nothing is wasted.
    np.testing.assert_allclose(total.norms_B.numpy(), C, rtol=1e-5)


ADVERSARIES = [
    lambda rng: rng.normal(size=12),
    lambda rng: 1e4 * rng.normal(size=12),
    lambda rng: 1e12 * rng.normal(size=12),
    lambda rng: 1e-30 * rng.normal(size=12),
    lambda rng: np.eye(12)[3] * 1e6,
    lambda rng: np.full(12, -3e37),
]


@pytest.mark.parametrize("stream_kind", ["plain", "unit", "several labels"])
@pytest.mark.parametrize("name", SUMS)
def test_one_record_moves_the_sum_by_at_most_c(name: str, stream_kind: str) -> None:
    if name.startswith("softmax") and stream_kind == "several labels":
        pytest.skip("softmax is for one label each")
    rng = np.random.default_rng(0)
    multi = stream_kind == "several labels"
    stream = stream_of(multi=multi, unit=stream_kind == "unit", constant=1.0)
    before, largest = total_of(stream, name), 0.0
    for make in ADVERSARIES:
        for label in multi_label(4) | np.eye(4, dtype=np.uint8) if multi else range(4):
            moved = float(np.linalg.norm(total_of(joined(stream, make(rng), label), name) - before))
            # The sum itself is rounded: its in-block products are float32.
            assert moved <= C + 3e-5
            largest = max(largest, moved)
    assert largest > 0.5 * C, "no adversary came near C: the test would not see a missing clip"


@pytest.mark.parametrize("name", SUMS)
def test_the_contribution_of_one_record_alone_is_within_c_to_the_last_bit(name: str) -> None:
    rng = np.random.default_rng(1)
    empty = stream_of(0, constant=1.0)
    for _ in range(200):
        record = joined(empty, rng.normal(size=12) * 10.0 ** rng.uniform(-3, 14), rng.integers(4))
        length = float(np.linalg.norm(total_of(record, name)))
        assert length <= C
    assert length > 0.3 * C


@pytest.mark.parametrize("rule", ["hard", "automatic"])
@pytest.mark.parametrize("name", SUMS)
def test_the_plans_rule_of_clipping_is_kept(name: str, rule: str) -> None:
    """min(1, C / n) n or C n / (n + 0.01) for a record of norm n."""
    plan = make_plan(
        PrivacyConfig(
            dataset_size=9,
            expected_batch_size=9,
            steps=1,
            noise_multiplier=1.0,
            max_grad_norm=1e3,
            sampling="full_batch",
            clipping=rule,
        )  # type: ignore[arg-type]
    )
    record = joined(stream_of(0), np.full(12, 0.01), 2)
    length = float(np.linalg.norm(total_of(record, name, plan)))
    n = float(SUMS[name](record, plan).norms_B[0])
    assert 0 < n < 1e3
    assert length == pytest.approx(n if rule == "hard" else 1e3 * n / (n + 0.01), rel=1e-4)


@pytest.mark.parametrize("name", SUMS)
def test_a_broken_record_contributes_exactly_zero(name: str) -> None:
    for unit in (False, True):
        stream = stream_of(unit=unit, constant=1.0)
        before = total_of(stream, name)
        for x, label in [
            (np.full(12, np.nan), 1),
            (np.where(np.arange(12) == 4, np.inf, 0.5), 1),
            (np.where(np.arange(12) == 4, -np.inf, 0.5), 1),
            (np.full(12, 3e38), 1),  # its square overflows
            (np.ones(12), -1),
            (np.ones(12), 4),
            (np.ones(12), 2**62),
        ]:
            assert np.array_equal(total_of(joined(stream, x, label), name), before), (x, label)


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid at zero", "moments", "prototypes"])
def test_a_target_that_is_not_zero_or_one_contributes_exactly_zero(name: str) -> None:
    stream = stream_of(multi=True)
    stream = FeatureStream(stream.feature_ND, stream.label.astype(np.float32), 4)
    before = total_of(stream, name)
    for target in (
        [0, 1, 0.5, 0],
        [0, np.nan, 0, 1],
        [0, np.inf, 0, 0],
        [2, 0, 0, 0],
        [-1, 0, 0, 0],
    ):
        assert np.array_equal(total_of(joined(stream, np.ones(12), target), name), before), target


def test_logits_that_overflow_contribute_zero() -> None:
    stream = stream_of()
    record = joined(stream, np.full(12, 1e14), 0)
    huge = torch.full((4, 12), 1e30)
    for weight in (huge, torch.full((4, 12), float("inf")), torch.full((4, 12), float("nan"))):
        assert np.isfinite(flat(gradient_of(record, weight, BIAS, "softmax", PLAN))).all()


@pytest.mark.parametrize("name", SUMS)
def test_blocks_and_files_change_nothing(
    name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(unit=True, constant=0.5)
    whole = total_of(stream, name)
    half = stream.feature_ND.astype(np.float16)
    np.save(f"{tmp_path}/x.npy", half)
    mapped = FeatureStream(
        np.load(f"{tmp_path}/x.npy", mmap_mode="r"), stream.label, 4, unit=True, constant=0.5
    )
    monkeypatch.setattr(stream_module, "_BLOCK_BYTES", 4 * 13 * 7)
    assert [len(block.x_BE) for block in stream.blocks()] == [7] * 8 + [4]
    np.testing.assert_allclose(total_of(stream, name), whole, rtol=1e-4, atol=1e-5)
    same = FeatureStream(half.astype(np.float32), stream.label, 4, unit=True, constant=0.5)
    assert np.array_equal(total_of(mapped, name), total_of(same, name))


def test_only_the_drawn_rows_are_read() -> None:
    stream = stream_of()
    rows = np.array([3, 4, 50])
    some = FeatureStream(stream.feature_ND[rows], stream.label[rows], 4)
    drawn, none = (
        flat(gradient_sum(IntegerStream(stream).blocks(r), WEIGHT[:, :12], BIAS, "softmax", PLAN))
        for r in (rows, rows[:0])
    )
    assert np.array_equal(drawn, total_of(some, "softmax"))
    assert not none.any()


def test_without_a_clip_norm_the_sum_is_the_plain_one() -> None:
    stream = stream_of()
    far = joined(stream, np.full(12, 100.0), 0)
    moved = total_of(far, "sigmoid", no_noise(61)) - total_of(stream, "sigmoid", no_noise(60))
    assert np.linalg.norm(moved) > 100


@pytest.mark.parametrize(
    ("x", "label", "num_classes", "match"),
    [
        (np.zeros((3, 2)), np.zeros(3, dtype=int), 2, "float64"),
        (np.zeros((3, 2), dtype=np.float32), np.zeros(4, dtype=int), 2, "3 records"),
        (np.zeros((3, 2), dtype=np.float32), np.zeros(3), 2, "float64"),
        (np.zeros((3, 2), dtype=np.float32), np.zeros((3, 5), dtype=int), 2, "num_classes=2"),
        (np.zeros((3, 2), dtype=np.float32), np.zeros(3, dtype=int), 1, "two classes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    x: np.ndarray, label: np.ndarray, num_classes: int, match: str
) -> None:
    with pytest.raises(DataError, match=match):
        FeatureStream(x, label, num_classes)


def test_reduced_precision_of_products_is_refused() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(PrivacyError, match="highest"):
            total_of(stream_of(), "sigmoid")
    finally:
        torch.set_float32_matmul_precision("highest")
