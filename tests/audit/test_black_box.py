"""The black-box audit: who is in the data, what the run is charged, what a broken run shows; and
the likelihood ratios against a normal law that is known.
"""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from dpvision.audit.black_box import black_box, check_settings, figures, limits, num_canaries
from dpvision.audit.canary_images import canary_rows, write_canaries
from dpvision.audit.lira import Scored, attack, fair_coins, label_scores, likelihood_ratios
from dpvision.cli.audit import run as command
from dpvision.config import RunConfig
from dpvision.config.resolve import resolve
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import ConfigError
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.recipes import get_recipe

module = importlib.import_module("dpvision.audit.black_box")  # the package exports the function

pytestmark = pytest.mark.usefixtures("gates_once")


def head(name: str = "one_step", **asked: object) -> RunConfig:
    return resolve(get_recipe(f"transfer.{name}"), {"model.encoder.spec": "pixels", **asked})


def noise(factor: float):
    terms = IndependentGaussian.terms
    return mock.patch.object(
        IndependentGaussian,
        "terms",
        lambda self, step: tuple((of, factor * std) for of, std in terms(self, step)),
    )


def test_of_a_head_without_noise_the_bound_exceeds_epsilon() -> None:
    with noise(1e-6):
        broken = black_box(head(epsilon=0.5), None, 200, shadows=8)
    assert broken["bound"]["epsilon_low"] > 1 > broken["bound"]["epsilon"]
    assert not broken["passed"] and broken["attack"]["auc"] > broken["limits"]["auc"] + 0.1
    assert len(broken["score_of_canary"]) == 200 == len(broken["canary_inside"])


def test_a_head_as_planned_passes() -> None:
    found = black_box(head(epsilon=0.5), None, 60)
    assert found["passed"] and found["bound"]["epsilon"] == pytest.approx(0.5, abs=1e-3)
    assert found["executed"]["dataset_size"] == 240


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The loop does nothing but note its session, and lowers the loss of all records alike."""
    seen: dict = {}

    def fit(session, *, quiet: bool, enough) -> bool:
        seen["session"], seen["rows"] = session, session.rows.copy()
        return True

    monkeypatch.setattr(module, "fit", fit)
    return seen


def test_canaries_count_as_records_and_those_outside_cannot_be_drawn(
    config: RunConfig, plan: DPPlan, trained: dict
) -> None:
    found = black_box(config, plan, 40)
    session, executed = trained["session"], DPPlan.from_dict(found["executed"])
    assert executed.dataset_size == session.store.num_records == 160
    assert executed.sample_rate == pytest.approx(plan.sample_rate)
    assert executed.noise.multiplier == plan.noise.multiplier and executed.steps == plan.steps
    assert executed.epsilon == pytest.approx(plan.epsilon, rel=1e-6)
    assert DPPlan.from_dict(found["plan"]).same_mechanism(plan)
    outside = 40 - found["bound"]["inside"]
    assert len(trained["rows"]) == 160 - outside
    assert len(np.unique(session.store.index["id"])) == 160
    # Weights that do not move say nothing of the coins.
    assert found["score_of_canary"] == [0.0] * 40


@pytest.mark.slow
def test_of_a_network_without_noise_shadow_models_show_more_than_the_plan_allows() -> None:
    small = {
        "epsilon": 0.5,
        "privacy.dataset_size": 240,
        "privacy.expected_batch_size": 60,
        "privacy.steps": 100,
        "optim.learning_rate": 3e-3,
        "optim.schedule": "constant",
        "model.encoder.image_size": 16,
        "data.crop_scale": (1.0, 1.0),
        "hardware.physical_batch_size": 60,
    }
    config = resolve(get_recipe("transfer.micro"), small)
    with noise(1e-6):
        broken = black_box(config, None, 60, shadows=8)
    assert broken["attack"]["auc"] > broken["limits"]["auc"] + 0.1 and not broken["passed"]
    assert broken["shadows"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["vip.micro", "dpcap.micro", "supervised.micro"])
def test_every_kind_of_network_is_audited(recipe: str) -> None:
    asked = {"privacy.steps": 3, "hardware.physical_batch_size": 16}
    found = black_box(resolve(get_recipe(recipe), asked), None, 20)
    assert found["passed"] and np.isfinite(found["score_of_canary"]).all()
    assert np.std(found["score_of_canary"]) > 0


def test_captions_and_labels_of_the_store_fit_the_model(tmp_path: Path) -> None:
    config = head(**{"model.num_classes": 3})
    store = write_canaries(tmp_path / "store", config, 30, 20)
    rows = canary_rows(store)
    assert store.num_records == 50 and len(rows) == 30 and store.visibility == "public"
    assert set(store.labels[rows].tolist()) == {0, 1, 2}
    assert all(4 <= len(store.captions(row)[0].split()) <= 8 for row in rows)
    several = replace(config, model=replace(config.model, multi_label=True))
    assert write_canaries(tmp_path / "several", several, 20, 20).multi_label


def test_coins_are_fair_and_new_each_time() -> None:
    coins = np.array([fair_coins(1000) for _ in range(20)])
    low, high = stats.binom.ppf([5e-5, 1 - 5e-5], coins.size, 0.5)
    assert low <= coins.sum() <= high
    agreeing = (coins[:-1] == coins[1:]).mean()
    assert abs(agreeing - 0.5) < 4 * 0.5 / math.sqrt(19_000)


def test_likelihood_ratios_are_those_of_the_law_that_made_the_scores() -> None:
    """With many shadow models the ratio is (in - out) (2 score - in - out) / (2 variance)."""
    rng, num, shadows = np.random.default_rng(0), 50, 4000
    out_N, gap_N = rng.normal(0, 3, num), rng.uniform(0, 2, num)
    inside_SN = rng.random((shadows, num)) < 0.5
    score_SN = out_N + gap_N * inside_SN + 0.7 * rng.standard_normal((shadows, num))
    score_N = out_N + rng.standard_normal(num)
    want = gap_N * (2 * (score_N - out_N) - gap_N) / (2 * 0.49)
    got = likelihood_ratios(score_N, score_SN, inside_SN)
    assert np.abs(got - want).max() < 0.5 and np.corrcoef(got, want)[0, 1] > 0.999
    assert not likelihood_ratios(score_N, score_SN, np.ones_like(inside_SN)).any()


def test_a_large_delta_leaves_room_for_fewer_canaries(config: RunConfig) -> None:
    """Records x delta is at most 1.5: with 500 canaries the plan was refused after all was made."""
    small = replace(config, privacy=replace(config.privacy, delta=1e-3))
    assert num_canaries(small, None, None) == 375 and num_canaries(config, None, None) == 500
    check_settings(small, None, 375, None, 0)
    with pytest.raises(ConfigError, match=r"canaries=376.*at most 375.*Use --canaries 375"):
        check_settings(small, None, 376, None, 0)


def test_canaries_that_all_or_no_shadow_models_have_are_guessed_as_well_as_others() -> None:
    """With four shadow models one canary in eight; their missing mean is the other one and the mean
    difference of the others.
    """
    rng, num, gap = np.random.default_rng(0), 4000, 6.0
    inside_SN = rng.random((5, num)) < 0.5
    score_SN = rng.normal(0, 20, num) + gap * inside_SN + rng.standard_normal((5, num))
    ratio_N = likelihood_ratios(score_SN[0], score_SN[1:], inside_SN[1:])
    found = figures(ratio_N, inside_SN[0])
    assert found["auc"] > 0.99 and found["tpr_at_fpr_0.01"] > 0.95
    one_sided = np.isin(inside_SN[1:].sum(0), (0, 4))
    assert (
        one_sided.sum() > 400 and figures(ratio_N[one_sided], inside_SN[0][one_sided])["auc"] > 0.98
    )


@pytest.mark.parametrize("lost", [math.nan, -math.inf, math.inf])
def test_a_shadow_model_that_diverged_is_left_out(lost: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    easy_M = rng.normal(0, 20, 500)

    def train(number: int, folder: Path) -> Scored:
        inside_M = rng.random(500) < 0.5
        score_M = easy_M + 6 * inside_M + rng.standard_normal(500)
        return Scored(np.full(500, lost) if number == 7 else score_M, inside_M)

    found = attack(train, 500, 16, tmp_path)
    assert figures(found.score_M, found.inside_M)["tpr_at_fpr_0.01"] > 0.95
    assert np.isnan(Scored.read(tmp_path / "model-07.json", 500).score_M).all() or math.isinf(lost)


def test_shadow_models_find_what_is_hidden_by_the_differences_of_canaries(tmp_path: Path) -> None:
    """Scores differ more between canaries than by what training does to one. The area is that of
    two normal laws whose means are known, if there are many shadow models.
    """
    rng, num, gap = np.random.default_rng(0), 4000, 1.5
    easy_M = rng.normal(0, 20, num)

    def train(number: int, folder: Path) -> Scored:
        inside_M = rng.random(num) < 0.5
        return Scored(easy_M + gap * inside_M + rng.standard_normal(num), inside_M, 1)

    for shadows in (0, 64):
        (tmp_path / str(shadows)).mkdir()
    alone, known = (attack(train, num, shadows, tmp_path / str(shadows)) for shadows in (0, 64))
    assert (alone.without_update, known.without_update) == (1, 65)
    area = stats.norm.cdf(gap / math.sqrt(2))  # 0.856
    assert abs(figures(alone.score_M, alone.inside_M)["auc"] - 0.5) < 0.06
    assert area - 0.03 < figures(known.score_M, known.inside_M)["auc"] < area + 0.02


def test_scores_that_are_not_finite_are_the_largest_or_say_nothing(tmp_path: Path) -> None:
    score_M = np.array([math.nan, math.inf, -math.inf, *[1e300] * 17])

    def train(number: int, folder: Path) -> Scored:
        return Scored(score_M, fair_coins(20))

    for shadows in (0, 4):
        (tmp_path / str(shadows)).mkdir()
        found = attack(train, 20, shadows, tmp_path / str(shadows))
        assert np.isfinite(found.score_M).all()
    assert attack(train, 20, 0, tmp_path / "0").score_M[:4].tolist() == [0.0, 1e100, -1e100, 1e100]


def test_label_scores_are_the_log_odds_of_the_own_label() -> None:
    rng = np.random.default_rng(1)
    score = torch.from_numpy(rng.normal(size=(6, 4)).astype(np.float32))
    label = np.array([0, 1, 2, 3, 0, 1])
    made = mock.Mock(scores=lambda x: x)
    stream = mock.Mock(feature_ND=score.numpy(), label=label, multi_label=False)
    p = score.double().softmax(1).numpy()[np.arange(6), label]
    np.testing.assert_allclose(label_scores(made, stream), np.log(p) - np.log1p(-p), rtol=1e-6)


def test_rates_at_low_false_positives() -> None:
    score = np.concatenate([np.arange(1000.0), 990.5 + np.zeros(10), np.full(10, 2000.0)])
    inside = np.arange(1020) >= 1000
    found = figures(score, inside)
    assert found["tpr_at_fpr_0.01"] == 1.0  # 9 of 1,000 are above 990.5
    assert found["tpr_at_fpr_0.001"] == 0.5
    assert found["auc"] == pytest.approx((10 * 1.0 + 10 * 0.991) / 20)


def test_limits_are_the_statements(plan: DPPlan) -> None:
    allowed = limits(plan)
    assert allowed["tpr_at_fpr_0.01"] == pytest.approx(plan.attack_tpr(plan.steps, 0.01), rel=1e-3)
    assert 0.5 < allowed["auc"] < 1 and allowed["tpr_at_fpr_0.001"] < allowed["tpr_at_fpr_0.01"]


def test_a_public_stores_records_are_the_canaries_and_a_private_store_is_refused(
    tmp_path: Path,
) -> None:
    store = write_scenes(tmp_path / "public", 80, 16, label="colour")
    found = black_box(head(), None, 20, data=store.path)
    assert found["bound"]["canaries"] == store.num_records
    write_scenes(tmp_path / "private", 40, 16, label="colour", public=False)
    with pytest.raises(ConfigError, match="is private; expected a store imported with --public"):
        black_box(head(), None, 20, data=tmp_path / "private")


def test_what_cannot_be_audited_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="canaries=19; expected at least 20"):
        black_box(config, None, 19)
    with pytest.raises(ConfigError, match="a network; expected none"):
        black_box(config, None, 20, data=tmp_path)
    none = replace(config.privacy, guarantee="none", target_epsilon=None, max_grad_norm=None)
    with pytest.raises(ConfigError, match="guarantee=none; expected dp"):
        black_box(replace(config, privacy=none), None, 20)
    chosen = replace(head().model.choice, candidates=("one_step", "prototypes"))
    several = replace(head(), model=replace(head().model, choice=chosen))
    with pytest.raises(ConfigError, match="private selection; expected one head"):
        black_box(several, None, 20)


def test_the_command_writes_the_result_and_fails_where_the_audit_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--recipe", "transfer.one_step", "--canaries", "40", "--shadows", "4"]
    command(asked)
    out = capsys.readouterr().out
    assert "likelihood ratios, by 4 shadow models" in " ".join(out.split())
    assert "40 canaries" in out and "audit_black_box.json" in out and "Passed" in out
    result = json.loads((tmp_path / "audit_black_box.json").read_text())
    assert result["kind"] == "black-box" and result["bound"]["canaries"] == 40
    with noise(1e-6), pytest.raises(SystemExit) as stopped:
        command([*asked, "--epsilon", "0.05", "--black-box", "--out", "other.json"])
    assert stopped.value.code == 1 and "FAILED" in capsys.readouterr().out


def test_a_plan_on_fewer_records_has_the_plans_epsilon(config: RunConfig) -> None:
    asked = replace(config.privacy, sampling="full_batch", expected_batch_size=2000.0)
    plan = draft_plan(asked)
    made = draft_plan(module._privacy(asked, plan, 1600))
    assert made.epsilon == plan.epsilon and made.dataset_size == made.expected_batch_size == 1600
