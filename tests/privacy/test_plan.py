import dataclasses
import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvision.config import PrivacyConfig
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy import accountant
from dpvision.privacy.events import Gaussian, NonPrivate
from dpvision.privacy.plan import DPPlan, ask_selection, draft_plan, make_plan
from dpvision.privacy.planner import what_if

SMALL = PrivacyConfig(
    dataset_size=1000, expected_batch_size=100, steps=20, noise_multiplier=2.0, max_grad_norm=0.1
)


def test_a_plan_is_frozen_and_survives_json() -> None:
    plan = make_plan(SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.noise.multiplier = 0.1  # type: ignore[misc]
    assert DPPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_the_plan_names_the_public_divisor_and_the_noise() -> None:
    plan = make_plan(SMALL)
    assert plan.expected_batch_size == 100 and plan.sample_rate == 0.1
    assert plan.noise_std == pytest.approx(2.0 * 0.1)


def test_delta_defaults_to_half_of_one_over_n() -> None:
    assert make_plan(SMALL).delta == 1 / 2000


@pytest.mark.parametrize(("delta", "refused"), [(1.0e-4, False), (1.5e-4, False), (1.6e-4, True)])
def test_training_is_refused_when_n_times_delta_is_above_one_and_a_half(
    delta: float, refused: bool
) -> None:
    cfg = dataclasses.replace(SMALL, dataset_size=10_000, delta=delta)
    report = what_if(cfg)  # the planner computes it all the same, and says so
    assert report["n_times_delta"] == pytest.approx(10_000 * delta) and report["epsilon"] > 0
    assert (report["refused"] is not None) == refused
    if refused:
        with pytest.raises(PrivacyError, match="dataset_size x delta"):
            make_plan(cfg)
    else:
        assert make_plan(cfg).delta == delta


def test_unprotected_plans_are_not_refused_and_claim_nothing() -> None:
    none = make_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=100,
            steps=20,
            guarantee="none",
            max_grad_norm=None,
            delta=0.9,
        )
    )
    simulated = make_plan(dataclasses.replace(SMALL, guarantee="simulated"))
    assert none.noise_std == 0.0 and simulated.noise_std == pytest.approx(0.2)
    for plan in (none, simulated):
        assert plan.epsilon is None and plan.epsilon_rdp is None
        assert plan.spent(5).epsilon is None and plan.spent(5).epsilon_unamplified is None
        assert plan.event(5) == NonPrivate()
        report = what_if(dataclasses.replace(SMALL, guarantee="simulated"))
        assert report["epsilon"] is None and report["attack_tpr"] is None


def test_a_simulated_run_needs_its_noise_said() -> None:
    with pytest.raises(ConfigError, match="simulated"):
        make_plan(dataclasses.replace(SMALL, guarantee="simulated", noise_multiplier=None))


def test_spent_grows_with_the_executed_steps_up_to_the_planned_epsilon() -> None:
    plan = make_plan(SMALL)
    series = [plan.spent(steps) for steps in (0, 1, 5, 20)]
    epsilons = [s.epsilon for s in series]
    assert (
        epsilons[0] == 0.0 and series[0].epsilon_rdp == 0.0 and series[0].epsilon_unamplified == 0.0
    )
    assert all(a < b for a, b in pairwise(epsilons))  # type: ignore[operator]
    assert series[-1].epsilon == plan.epsilon and series[-1].epsilon_rdp == plan.epsilon_rdp
    assert series[-1].epsilon_unamplified > series[-1].epsilon  # type: ignore[operator]


def test_steps_beyond_the_plan_have_no_event() -> None:
    plan = make_plan(SMALL)
    for steps in (-1, 21):
        with pytest.raises(PrivacyError, match="expected 0 to 20"):
            plan.event(steps)


def test_full_batch_plan_is_exact() -> None:
    plan = make_plan(dataclasses.replace(SMALL, sampling="full_batch", expected_batch_size=1000))
    assert plan.event(16) == Gaussian(0.5)
    assert plan.spent(16).epsilon == plan.spent(16).epsilon_unamplified


def test_truncation_is_refused_where_it_costs_more_than_one_percent() -> None:
    cfg = dataclasses.replace(SMALL, sampling="truncated_poisson", max_batch_size=170)
    plan = make_plan(cfg)
    plain = make_plan(SMALL)
    assert plain.epsilon <= plan.epsilon <= 1.01 * plain.epsilon  # type: ignore[operator]
    assert plan.epsilon_rdp is None and plan.spent(20).epsilon_rdp is None
    with pytest.raises(PrivacyError, match="max_batch_size=110"):
        make_plan(dataclasses.replace(cfg, max_batch_size=110))
    with pytest.raises(PrivacyError, match="max_records_per_unit=2"):
        make_plan(dataclasses.replace(cfg, max_records_per_unit=2, num_units=600))


def test_a_person_of_several_records_is_dearer_than_a_record_but_not_more_than_group_privacy() -> (
    None
):
    plan = make_plan(dataclasses.replace(SMALL, max_records_per_unit=3, num_units=400, delta=5e-4))
    spent = plan.spent(20)
    assert plan.epsilon == make_plan(SMALL).epsilon and plan.unit_epsilon == spent.unit_epsilon
    assert make_plan(SMALL).spent(20).unit_epsilon is None
    # Group privacy, by the definition three times: (3 e, delta (1 + exp(e) + exp(2 e))) at the
    # record's (e, delta).
    tight = accountant.epsilon(plan.event(20), 1e-8)
    slack = 1e-8 * (1 + math.exp(tight) + math.exp(2 * tight))
    assert slack < plan.delta
    assert spent.epsilon < spent.unit_epsilon < 3 * tight  # type: ignore[operator]


def test_an_altered_plan_is_refused() -> None:
    values = make_plan(SMALL).to_dict()
    with pytest.raises(PrivacyError, match="sample_rate"):
        DPPlan.from_dict(values | {"sample_rate": 0.05})
    with pytest.raises(PrivacyError, match="epsilon"):
        DPPlan.from_dict(values | {"guarantee": "none"})
    with pytest.raises(ConfigError, match="divisor"):
        DPPlan.from_dict(values | {"divisor": 3})


def test_same_mechanism_ignores_last_digits_of_epsilon_only() -> None:
    plan = make_plan(SMALL)
    assert plan.same_mechanism(dataclasses.replace(plan, epsilon=plan.epsilon + 1e-9))  # type: ignore[operator]
    for change in (
        {"noise_multiplier": 2.1},
        {"steps": 21},
        {"delta": 1e-4},
        {"clipping": "automatic"},
        {"max_grad_norm": 0.2},
    ):
        assert not plan.same_mechanism(DPPlan.from_dict({**plan.to_dict(), **change}))


@pytest.mark.parametrize(
    ("batch", "target"),
    [(10.0, 0.3), pytest.param(100.0, 2.0, marks=pytest.mark.slow), (1000.0, 0.3), (1000.0, 15.0)],
)
def test_calibration_is_never_over_target_and_one_digit_less_noise_would_be(
    batch: float, target: float
) -> None:
    cfg = dataclasses.replace(
        SMALL, expected_batch_size=batch, noise_multiplier=None, target_epsilon=target
    )
    plan = make_plan(cfg)
    assert plan.epsilon <= target  # type: ignore[operator]
    digit = 10.0 ** (math.floor(math.log10(plan.noise.multiplier)) - 4)
    assert float(f"{plan.noise.multiplier:.4e}") == plan.noise.multiplier
    less = dataclasses.replace(
        cfg, target_epsilon=None, noise_multiplier=plan.noise.multiplier - digit
    )
    assert make_plan(less).epsilon > target  # type: ignore[operator]


@pytest.mark.slow
def test_calibration_finds_the_papers_noise() -> None:
    n = 233_804_767
    cfg = PrivacyConfig(
        dataset_size=n, expected_batch_size=1310720, steps=5708, delta=1 / n, target_epsilon=7.34
    )
    assert make_plan(cfg).noise.multiplier == pytest.approx(0.728, abs=2e-4)


def test_an_unreachable_target_says_what_can_be_reached() -> None:
    cfg = PrivacyConfig(
        dataset_size=10**6,
        expected_batch_size=10**6,
        steps=10**9,
        sampling="full_batch",
        target_epsilon=1e-4,
        delta=1e-9,
    )
    with pytest.raises(PrivacyError, match=r"target_epsilon=0.0001; expected at least 0\.\d+"):
        make_plan(cfg)


def test_a_generous_target_does_not_ask_for_less_than_the_least_noise() -> None:
    plan = draft_plan(dataclasses.replace(SMALL, noise_multiplier=None, target_epsilon=1e7))
    assert plan.noise.multiplier == 0.01 and plan.epsilon < 1e7  # type: ignore[operator]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    batch=st.floats(1, 1000),
    noise=st.floats(0.5, 50),
    steps=st.integers(1, 3000),
    delta=st.floats(1e-8, 1e-3),
)
def test_pld_is_below_rdp_and_below_no_amplification(
    batch: float, noise: float, steps: int, delta: float
) -> None:
    weak = {"allow_weak_guarantee": True}
    cfg = PrivacyConfig(
        dataset_size=1000,
        expected_batch_size=batch,
        noise_multiplier=noise,
        steps=steps,
        delta=delta,
        **weak,
    )
    spent = make_plan(cfg).spent(steps)
    assert spent.epsilon is not None and spent.epsilon_unamplified is not None
    assert spent.epsilon_rdp is None or spent.epsilon <= spent.epsilon_rdp + 1e-9
    assert (
        spent.epsilon <= spent.epsilon_unamplified * (1 + 1e-3) + 1e-4
    )  # the grid's pessimism; the right side is exact


OTHER_SETTINGS = {
    "guarantee": "none",
    "sampling": "full_batch",
    "sampling_unit": "person",
    "dataset_size": 1001,
    "num_units": 401,
    "max_records_per_unit": 2,
    "expected_batch_size": 101,
    "max_batch_size": 300,
    "max_grad_norm": 0.2,
    "clipping": "automatic",
    "steps": 21,
    "delta": 1e-4,
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_settings_of_another_plan_are_refused_each_by_its_name(name: str) -> None:
    cfg = dataclasses.replace(SMALL, num_units=1000, max_records_per_unit=1)
    plan = make_plan(cfg)
    plan.require_settings(cfg, "config.json")
    other = dataclasses.replace(cfg)
    object.__setattr__(other, name, OTHER_SETTINGS[name])  # without the rules between settings
    with pytest.raises(PrivacyError, match=rf"config.json: {name}=.*; expected"):
        plan.require_settings(other, "config.json")


def test_a_selections_steps_are_its_runs_and_all_else_is_compared() -> None:
    cfg = dataclasses.replace(SMALL, noise_multiplier=5.0)
    plan = make_plan(cfg, ask_selection(cfg))
    plan.require_settings(cfg, "config.json")
    with pytest.raises(PrivacyError, match=r"max_grad_norm=0\.2"):
        plan.require_settings(dataclasses.replace(cfg, max_grad_norm=0.2), "config.json")


@pytest.mark.parametrize("without", ["people", "accounting"])
def test_a_persons_target_needs_people_and_an_accounting_for_them(without: str) -> None:
    truncated = {"sampling": "truncated_poisson", "max_batch_size": 180, "num_units": 1000}
    more = {"max_records_per_unit": 1} | ({} if without == "people" else truncated)
    cfg = dataclasses.replace(SMALL, noise_multiplier=None, target_unit_epsilon=3.0, **more)
    with pytest.raises(ConfigError, match=r"target_unit_epsilon=3\.0 with num_units="):
        make_plan(cfg)


@pytest.mark.slow
def test_the_target_of_a_person_with_many_images_is_not_missed_by_a_coarse_grid() -> None:
    """The grid of the largest component alone would ask for more noise."""
    plan = make_plan(
        PrivacyConfig(
            dataset_size=1_000_000,
            expected_batch_size=1000,
            steps=100,
            num_units=31_250,
            max_records_per_unit=32,
            target_unit_epsilon=2.5,
        )
    )
    assert 2.499 < plan.unit_epsilon <= 2.5
