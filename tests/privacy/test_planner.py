import dataclasses
import json
import math

import pytest

from dpvision.config import PrivacyConfig
from dpvision.privacy.plan import make_plan
from dpvision.privacy.planner import what_if
from dpvision.privacy.second_accountant import epsilon, release

VIP_2M = PrivacyConfig(
    dataset_size=2338047,
    expected_batch_size=98304,
    noise_multiplier=2.5,
    steps=6000,
    max_grad_norm=0.1,
)


def test_what_if_says_what_the_plan_says_and_fits_in_json() -> None:
    report = what_if(VIP_2M)
    plan = make_plan(VIP_2M)
    for name in (
        "epsilon",
        "epsilon_rdp",
        "delta",
        "noise_multiplier",
        "steps",
        "sample_rate",
        "expected_batch_size",
    ):
        assert report[name] == getattr(plan.form(), name)
    assert report["sample_gradients"] == 6000 * 98304
    assert report["noise_batch_ratio"] == 2.5 / 98304
    assert report["n_times_delta"] == pytest.approx(0.5)
    assert 0.001 < report["attack_tpr"]["0.001"] < report["attack_tpr"]["0.01"] < 1
    assert json.loads(json.dumps(report, allow_nan=False))["refused"] is None


def test_signal_figures_are_those_of_the_papers_points() -> None:
    # ViP-Base on 2 million images, encoder and decoder together about 99 M parameters: 8e-3
    # (design/experiments.md).
    figures = what_if(VIP_2M, num_parameters=99_000_000)["signal"]
    assert figures["rho_star_planned"] == pytest.approx(8e-3, rel=0.1)
    assert figures["rho_star"] <= figures["rho_star_planned"]


def test_signal_limit_is_reached_by_full_batches() -> None:
    full = PrivacyConfig(
        dataset_size=60000,
        expected_batch_size=60000,
        sampling="full_batch",
        target_epsilon=8.0,
        steps=100,
        delta=1e-5,
    )
    figures = what_if(full)["signal"]
    assert figures["signal_planned"] == pytest.approx(figures["signal_limit"], rel=1e-3)
    # "N = 60,000 gives 1.0e5 at eps 8, 3.0e4 at eps 2, 1.6e4 at eps 1" (design/experiments.md)
    for target, expected in ((8.0, 1.0e5), (2.0, 3.0e4), (1.0, 1.6e4)):
        limit = what_if(dataclasses.replace(full, target_epsilon=target, delta=None))["signal"][
            "signal_limit"
        ]
        assert limit == pytest.approx(expected, rel=0.06)
    assert "rho_star" not in figures


def test_no_signal_figure_without_noise() -> None:
    report = what_if(
        PrivacyConfig(dataset_size=100, expected_batch_size=10, steps=5, guarantee="none")
    )
    assert (
        report["signal"] is None
        and report["epsilon"] is None
        and report["noise_batch_ratio"] == 0.0
    )
    assert not any(isinstance(v, float) and not math.isfinite(v) for v in report.values())


def test_few_records_and_weak_signals_get_an_honest_word() -> None:
    small = what_if(
        PrivacyConfig(
            dataset_size=50_000, expected_batch_size=5000, steps=200, noise_multiplier=1.13
        )
    )
    assert "50,000 records are few" in small["advice"] and "patches+scattering" in small["advice"]
    paper = PrivacyConfig(
        dataset_size=233_804_767, expected_batch_size=98304, steps=6100, noise_multiplier=0.48
    )
    assert what_if(paper, num_parameters=99_000_000)["advice"] is None
    drowned = what_if(
        PrivacyConfig(
            dataset_size=2_000_000, expected_batch_size=2000, steps=10, noise_multiplier=2.0
        ),
        num_parameters=10**9,
    )
    assert "noise" in drowned["advice"] and "few" not in drowned["advice"]
    free = PrivacyConfig(dataset_size=50_000, expected_batch_size=5000, steps=200, guarantee="none")
    assert what_if(free)["advice"] is None


def test_drawing_people_needs_no_more_noise_than_drawing_images_for_the_same_epsilon() -> None:
    grouped = PrivacyConfig(
        dataset_size=80_000,
        num_units=20_000,
        max_records_per_unit=4,
        expected_batch_size=1000,
        steps=50,
        noise_multiplier=1.2,
    )
    found = what_if(grouped)
    images, one, more_images, fewer_people = found["draws"]
    assert (
        images["noise_multiplier"] == 1.2
        and images["images_per_step"]
        == one["images_per_step"]
        == fewer_people["images_per_step"]
        == 1000
    )
    assert one["noise_multiplier"] < 1.2 and more_images["images_per_step"] == 4000
    assert (
        one["noise_batch_ratio"]
        == more_images["noise_batch_ratio"]
        < images["noise_batch_ratio"]
        < fewer_people["noise_batch_ratio"]
    )
    for row, rate in ((one, 1000 / 20_000), (fewer_people, 250 / 20_000)):
        spent = epsilon([release(rate, row["noise_multiplier"], 50)], found["delta"])
        assert 0.98 * found["unit_epsilon"] < spent <= found["unit_epsilon"] * 1.001, (
            "by the second accountant"
        )


def test_only_drawn_images_of_declared_people_are_compared() -> None:
    assert (
        what_if(dataclasses.replace(VIP_2M, num_units=10**6, sampling_unit="person"))["draws"]
        is None
    )
    assert (
        what_if(PrivacyConfig(dataset_size=100, expected_batch_size=10, steps=5, guarantee="none"))[
            "draws"
        ]
        is None
    )
    full = PrivacyConfig(
        dataset_size=600,
        num_units=300,
        max_records_per_unit=2,
        expected_batch_size=600,
        sampling="full_batch",
        steps=1,
        noise_multiplier=9.0,
    )
    assert what_if(full)["draws"] is None
