"""Attacks on the sums of private heads: hostile rows, and clipping norms at which float32 rounds a
contribution beyond its bound.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.gradient import gradient_sum, sum_at_zero
from dpvision.adapt.heads.prototypes import prototype_sum
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.moments import moment_sum
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.adapt.select import Candidate, select_head
from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, ask_selection, make_plan

Rule = Literal["hard", "automatic"]

FULL = PrivacyConfig(
    dataset_size=100, expected_batch_size=100, steps=1, noise_multiplier=4.0, sampling="full_batch"
)
OUTSIDE = [1e-30, 2.2e-45, 0.999e-12, 1.001e12, 1e30, 1e40, math.inf, math.nan, -1.0]


# Clipping norms


@pytest.mark.parametrize("norm", OUTSIDE)
def test_no_plan_has_a_clipping_norm_whose_bound_fails(norm: float) -> None:
    """Before: a head at 2.2e-45 printed "Private: epsilon 1", and a record moved its sum by 1.56 C;
    at 1e40 by 2.86 C.
    """
    with pytest.raises(
        ConfigError, match=r"max_grad_norm=.*; expected between 1e-12 and 1e\+12. Use 0.1 to 1."
    ):
        make_plan(dataclasses.replace(FULL, max_grad_norm=norm))
    with pytest.raises(ConfigError, match="max_grad_norm"):
        full_batch_plan(100, 1.0, max_grad_norm=norm)
    for guarantee in ("none", "simulated"):
        with pytest.raises(ConfigError, match="max_grad_norm"):
            dataclasses.replace(FULL, guarantee=guarantee, noise_multiplier=0.0, max_grad_norm=norm)
    with pytest.raises((PrivacyError, TypeError)):
        dataclasses.replace(make_plan(FULL), noise=IndependentGaussian(4.0, norm))
    with pytest.raises(PrivacyError, match="max_grad_norm"):
        DPPlan.from_dict({**make_plan(FULL).to_dict(), "max_grad_norm": norm})


@pytest.mark.parametrize("norm", OUTSIDE)
def test_clipped_sum_refuses_the_same_norms_of_its_own(norm: float) -> None:
    batch = Batch(torch.arange(2), torch.ones(2, dtype=torch.bool), torch.ones(2, 3), None, None)

    def losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
        return model(batch.image_BVCHW).square().sum(1)

    with pytest.raises(ConfigError, match="max_grad_norm"):
        clipped_sum(losses, nn.Linear(3, 2), batch, StepKey(0, 0), max_grad_norm=norm)


def test_a_candidate_of_a_selection_with_such_a_norm_is_refused_before_the_charge() -> None:
    cfg = dataclasses.replace(FULL, noise_multiplier=None, target_epsilon=4.0)
    plan = make_plan(cfg, ask_selection(cfg))
    stream = FeatureStream(np.ones((10, 4), dtype=np.float32), np.zeros(10, dtype=np.int64), 2)

    def zero(stream: FeatureStream, releases: Releases) -> Head:
        return Head(torch.zeros(2, 4), torch.zeros(2))

    def charge() -> int:
        raise AssertionError("charged")

    with pytest.raises((PrivacyError, ConfigError), match="max_grad_norm"):
        select_head(
            stream,
            [Candidate("a", zero), Candidate("b", zero, max_grad_norm=2.2e-45)],
            plan,
            charge,
        )


@pytest.mark.parametrize("command", ["train", "adapt"])
def test_the_commands_refuse_it_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["vip.micro"] if command == "train" else ["--encoder", "hog"]
    assert main([command, *what, "--data", "nowhere", "--privacy.max-grad-norm", "2.2e-45"]) == 2
    assert (
        "max_grad_norm=2.2e-45; expected between 1e-12 and 1e+12. Use 0.1 to 1."
        in capsys.readouterr().err
    )


# Hostile rows


def hostile(kind: str, count: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Features float32 (N, D) with five values that are not finite, huge or zero, at random
    places.
    """
    x = rng.normal(size=(count, width)).astype(np.float32)
    match kind:
        case "lengths":
            x *= np.float32(10) ** rng.integers(-44, 38, (count, 1)).astype(np.float32)
        case "values":
            x *= np.float32(10) ** rng.integers(-30, 30, (count, width)).astype(np.float32)
        case "denormal":
            x = (x * np.float32(1e-41)).astype(np.float32)
        case "equal":
            x = np.tile(x[:1], (count, 1))
        case "spike":
            x[:] = 1e-5
            x[np.arange(count), rng.integers(0, width, count)] = 1.0
        case "edge":  # a step beyond a number that rounds
            x[:] = np.nextafter(np.float32(0.5 / math.sqrt(width)), np.float32(1))
    for value in (np.nan, np.inf, -np.inf, 3e38, 0.0):
        x[rng.integers(0, count), rng.integers(0, width)] = value
    return x


def sums(
    stream: FeatureStream, plan: DPPlan, weight_KE: torch.Tensor, multi: bool
) -> dict[str, ClippedSum]:
    """Sums of every head on these records."""
    num_classes, width = weight_KE.shape
    bias_K = torch.zeros(num_classes)
    loss: Literal["sigmoid", "softmax"] = "sigmoid" if multi else "softmax"
    found = {
        "zero": sum_at_zero(stream.blocks(), width, bias_K, loss, plan),
        "sigmoid at zero": sum_at_zero(stream.blocks(), width, bias_K - 10, "sigmoid", plan),
        "gradient": gradient_sum(IntegerStream(stream).blocks(), weight_KE, bias_K, loss, plan),
    }
    if stream.longest_row is not None:
        bound = stream.longest_row
        found["moments"] = moment_sum(stream.blocks(), width, num_classes, bound, 0.7, plan)
        found["covariance"] = moment_sum(stream.blocks(), width, num_classes, bound, 0.0, plan)
        found["prototypes"] = prototype_sum(stream.blocks(), width, num_classes, bound, 0.3, plan)
    return found


def distance(a: ClippedSum, b: ClippedSum) -> float:
    return math.sqrt(
        math.fsum(float((a.grads[name] - b.grads[name]).square().sum()) for name in a.grads)
    )


@pytest.mark.parametrize("rule", ["hard", "automatic"])
@pytest.mark.parametrize("norm", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_a_record_moves_no_heads_sum_by_more_than_the_clipping_norm(
    norm: float, rule: Rule
) -> None:
    """To the ends of the range of clipping norms, among rows made to break the sums; a float64 sum
    of 24 rows rounds by 24 ulps at most.
    """
    plan = make_plan(dataclasses.replace(FULL, max_grad_norm=norm, clipping=rule))
    rng = np.random.default_rng(0)
    largest: dict[str, float] = {}
    for kind in ("plain", "lengths", "values", "denormal", "equal", "spike", "edge"):
        for width, num_classes, constant, unit, multi in (
            (7, 3, 0.0, True, False),
            (33, 2, 0.1, False, True),
            (64, 5, 1.0, True, True),
        ):
            x_ND = hostile(kind, 24, width, rng)
            label = (
                (rng.random((24, num_classes)) < 0.5).astype(np.uint8)
                if multi
                else rng.integers(-1, num_classes + 1, 24)
            )
            stream = FeatureStream(x_ND, label, num_classes, unit=unit, constant=constant)
            weight_KE = torch.tensor(
                rng.normal(size=(num_classes, stream.width)) * 10.0 ** rng.integers(-3, 4)
            ).float()
            whole = sums(stream, plan, weight_KE, multi)
            for row in rng.choice(24, 2, replace=False):
                less = FeatureStream(
                    np.delete(x_ND, row, 0),
                    np.delete(label, row, 0),
                    num_classes,
                    unit=unit,
                    constant=constant,
                )
                for name, part in sums(less, plan, weight_KE, multi).items():
                    moved = distance(whole[name], part) / norm
                    assert moved <= 1 + 24 * 2**-52, (name, kind)
                    largest[name] = max(largest.get(name, 0.0), moved)
    if norm <= 1e-3 and rule == "hard":
        assert min(largest.values()) > 0.9, "some sum came near its bound"
