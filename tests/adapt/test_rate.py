"""The rule for the rate of ``many_steps``: public numbers in, the noise it promises out."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from feature_sets import no_noise, releases_of

from dpvision.adapt.defaults import (
    FINAL_NOISE,
    HALVING,
    LONGEST,
    MOST_STEPS,
    enough_steps,
    final_noise,
    stable_rate,
    steps_rate,
    with_rate,
)
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.prepare import prepare
from dpvision.adapt.release import full_batch_plan
from dpvision.adapt.session import adapt, new_head_session
from dpvision.checkpoint import load_checkpoint
from dpvision.cli.head_text import head_text
from dpvision.config import HeadConfig, PrivacyConfig
from dpvision.config.heads import ManySteps
from dpvision.data.store import Store
from dpvision.errors import ConfigError
from dpvision.privacy.plan import make_plan

from .runs_of_heads import head_config, write_digits


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.1])
@pytest.mark.parametrize("steps", [30, 200])
def test_the_weights_end_with_the_noise_that_the_rule_says(
    steps: int, max_grad_norm: float
) -> None:
    """Of no records, the head is noise alone. Momentum has yet to pass on the last steps' noise: a
    tenth at 200 steps, more at 30.
    """
    plan = full_batch_plan(20_000, 1.0, steps=steps, max_grad_norm=max_grad_norm)
    nothing = FeatureStream(
        np.zeros((0, 300), dtype=np.float32), np.zeros(0, dtype=np.int64), 20, unit=True
    )
    optim = with_rate(ManySteps.optim, plan, bounded=False)
    found = float(many_steps(nothing, releases_of(plan), optim=optim).last.weight_KD.std())
    promised = final_noise(plan, optim)
    share = 1 - ManySteps.optim.momentum ** np.arange(1, steps + 1)
    assert found == pytest.approx(promised * math.sqrt(np.mean(share**2)), rel=0.03)
    s = plan.noise_std / 20_000 / math.sqrt(steps)
    assert promised == pytest.approx(FINAL_NOISE / (1 + (HALVING * s) ** 2), rel=1e-9)


def test_the_way_depends_on_the_budget_and_not_on_how_it_is_cut() -> None:
    """T r / (1 - m) is the same for all steps and momenta, longer with more budget and with more
    records, and bounded.
    """
    ways = [
        steps_rate(full_batch_plan(5000, 2.0, steps=steps), momentum, bounded=False)
        * steps
        / (1 - momentum)
        for steps in (1, 10, 60)
        for momentum in (0.0, 0.9)
    ]
    assert ways == pytest.approx([ways[0]] * 6, rel=1e-9)
    by_epsilon = [
        steps_rate(full_batch_plan(5000, e, steps=60), 0.9, bounded=False)
        for e in (0.01, 0.1, 1, 3, 10, 20)
    ]
    by_count = [
        steps_rate(full_batch_plan(n, 1.0, steps=60), 0.9, bounded=False)
        for n in (10, 300, 5000, 10**6, 10**9)
    ]
    assert by_epsilon == sorted(by_epsilon) and by_count == sorted(by_count)
    assert (
        by_count[-1]
        == pytest.approx(0.1 * LONGEST / 60)
        == steps_rate(no_noise(10, steps=60), 0.9, bounded=False)
    )


def test_the_rule_takes_poisson_batches() -> None:
    """The noise in the mean of all steps' gradients, whatever the sampling."""
    asked = PrivacyConfig(
        dataset_size=10_000,
        expected_batch_size=500,
        steps=100,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    plan = make_plan(asked)
    s = 1.0 / 500 / 10
    assert steps_rate(plan, 0.9) * 100 / 0.1 * s == pytest.approx(
        FINAL_NOISE / (1 + (HALVING * s) ** 2)
    )


def loss_after(steps: int, rate: float, share: float) -> float:
    """Mean loss of the head after noiseless steps on the worst rows there are, all the same;
    ``share`` of them have the second class.
    """
    x_ND, label = (
        np.ones((100, 1), dtype=np.float32),
        (np.arange(100) < 100 * share).astype(np.int64),
    )
    stream = FeatureStream(x_ND, label, 2)
    head = many_steps(
        stream,
        releases_of(no_noise(100, steps=steps)),
        optim=replace(ManySteps.optim, learning_rate=rate),
    ).last
    return float(
        torch.nn.functional.cross_entropy(
            torch.from_numpy(x_ND) @ head.weight_KD.T, torch.from_numpy(label)
        )
    )


@pytest.mark.parametrize(
    "share", [0.1, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.4, 0.25))]
)
def test_at_the_bound_on_the_rate_the_loss_comes_to_rest(share: float) -> None:
    """Near the labels' entropy: clipping moves it."""
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    ends = [loss_after(steps, stable_rate(0.9), share) for steps in (400, 401, 420)]
    assert max(ends) - min(ends) < 1e-4 and max(ends) < entropy + 0.005


def test_beyond_the_limit_of_the_rate_the_loss_swings() -> None:
    """Above 2 (1 + m) / (2 p (1 - p)), where p is the share of the second class."""
    limit = 2 * 1.9 / (2 * 0.4 * 0.6)
    swings = [loss_after(steps, 1.1 * limit, 0.4) for steps in (400, 401, 420)]
    assert max(swings) - min(swings) > 0.005 and stable_rate(0.9) < 0.6 * limit


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("records", [300, 20_000, 10**7])
def test_more_steps_keep_the_way_where_the_rate_is_bounded(records: int, epsilon: float) -> None:
    plan = full_batch_plan(records, epsilon, steps=60)
    steps = enough_steps(plan, 0.9)
    longer = full_batch_plan(records, epsilon, steps=steps)
    way = steps_rate(plan, 0.9, bounded=False) * 60
    assert 60 <= steps <= MOST_STEPS and steps_rate(longer, 0.9) <= stable_rate(0.9)
    assert steps == 60 or steps_rate(
        full_batch_plan(records, epsilon, steps=steps - 1), 0.9
    ) == stable_rate(0.9)
    kept = steps_rate(longer, 0.9) * steps
    assert kept == pytest.approx(way, rel=1e-6) if steps < MOST_STEPS else kept <= way * (1 + 1e-6)


def test_only_what_the_rule_is_for_may_go_without_a_rate() -> None:
    plan = full_batch_plan(5000, 2.0, steps=60)
    assert with_rate(replace(ManySteps.optim, learning_rate=3.0), plan).rate == 3.0
    with pytest.raises(ConfigError, match="learning_rate=None with name='lamb'"):
        with_rate(replace(ManySteps.optim, name="lamb"), plan)
    with pytest.raises(ConfigError, match="learning_rate=None"):
        _ = ManySteps.optim.rate


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("store") / "digits", 0, 500)


def test_a_runs_config_manifest_and_plan_text_have_the_rate_in_figures(
    digits: Store, tmp_path: Path
) -> None:
    config = head_config(digits, "many_steps")
    made = prepare(config)
    rate = steps_rate(made.plan, 0.9)
    assert config.optim.learning_rate is None and made.config.optim.rate == rate
    assert (
        f"60 at learning rate {rate:.4g}, momentum 0.9: noise of "
        f"{final_noise(made.plan, made.config.optim):.2g}" in head_text(made)
    )
    with new_head_session(made, tmp_path / "run") as session:
        adapt(session)
    assert load_checkpoint(tmp_path / "run").manifest["config"]["optim"]["learning_rate"] == rate
    typed = prepare(replace(config, optim=replace(config.optim, learning_rate=0.25)))
    assert typed.config.optim.rate == 0.25 and "learning rate 0.25" in head_text(typed)


def test_several_labels_begin_at_one_expected_label(digits: Store) -> None:
    model = head_config(digits, "many_steps").model
    assert isinstance(model, HeadConfig)
    one = model.settled().settings
    assert isinstance(one, ManySteps) and one.loss == "softmax" and one.bias == 0
    several = replace(model, multi_label=True).settled().settings
    assert isinstance(several, ManySteps)
    assert several.loss == "sigmoid" and several.bias is not None
    assert 10 * torch.tensor(several.bias).sigmoid() == pytest.approx(1.0)
