"""TAN simulation: what is divided, what is kept, what is refused, and that every output says it
guarantees nothing.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.errors import ConfigError
from dpvision.plan.cost import step_cost
from dpvision.privacy.plan import draft_plan
from dpvision.privacy.planner import simulated
from dpvision.recipes import get_recipe

FULL = PrivacyConfig(
    dataset_size=20_000, expected_batch_size=400, steps=30, target_epsilon=8.0, max_grad_norm=0.1
)


def test_the_noise_on_the_mean_gradient_stays_and_the_compute_is_a_kth() -> None:
    full, small = draft_plan(FULL), draft_plan(simulated(FULL, 8))
    assert small.noise_std / small.expected_batch_size == pytest.approx(
        full.noise_std / full.expected_batch_size
    )
    assert small.expected_batch_size * 8 == full.expected_batch_size and small.steps == full.steps
    assert small.max_grad_norm == full.max_grad_norm and small.dataset_size == full.dataset_size
    assert small.guarantee == "simulated" and small.epsilon is None


def test_the_recipes_of_table_13_are_simulations_by_this_rule() -> None:
    for name in ("base", "base_64_epochs", "base_128_epochs"):
        full, small = (
            get_recipe(f"dpcap.{name}").privacy,
            get_recipe(f"dpcap.{name.replace('base', 'base_tan', 1)}").privacy,
        )
        again = simulated(full, 32)
        assert (again.expected_batch_size, again.steps, again.guarantee) == (
            small.expected_batch_size,
            small.steps,
            small.guarantee,
        )
        assert again.noise_multiplier == pytest.approx(small.noise_multiplier)


@pytest.mark.slow
def test_full_batches_and_truncated_ones_are_simulated_by_poisson_draws() -> None:
    whole = replace(FULL, expected_batch_size=20_000, sampling="full_batch")
    assert (
        simulated(whole, 10).sampling == "poisson"
        and simulated(whole, 10).expected_batch_size == 2_000
    )
    capped = replace(FULL, sampling="truncated_poisson", max_batch_size=600)
    assert simulated(capped, 10).max_batch_size is None


@pytest.mark.parametrize(
    ("changes", "factor", "said"),
    [
        ({}, 1, "expected a number above 1"),
        ({}, float("nan"), "expected a number above 1"),
        ({}, 401, "Use at most 400"),
        ({"guarantee": "none", "target_epsilon": None}, 4, "expected a private run"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes: dict, factor: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulated(replace(FULL, **changes), factor)


def test_the_planners_output_says_that_nothing_is_guaranteed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "vip.micro", "--simulate", "10"]) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("NO PRIVACY GUARANTEE")
        and "dpvision train vip.micro --simulate 10 --data STORE" in text
    )
    assert main(["plan", "vip.micro", "--simulate", "10", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["guarantee"] == "simulated"
        and told["epsilon"] is None
        and told["simulates"]["epsilon"] <= 8
    )
    assert main(["plan", "vip.micro", "--simulate", "10", "--gpus", "1", "--json"]) == 0
    simulated_cost, full_cost = (
        json.loads(capsys.readouterr().out)["cost"],
        step_cost(get_recipe("vip.micro"), 1, None),
    )
    assert simulated_cost["compute_s"] == pytest.approx(full_cost.compute_s / 10)
    assert main(["plan", "vip.micro", "--simulate", "10", "--page", "plan.html"]) == 2
    assert main(["train", "vip.micro", "--simulate", "10", "--resume"]) == 2
    assert "Drop --simulate" in capsys.readouterr().err


def test_where_people_are_drawn_both_counts_are_of_images(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before: the full run's count was of people, so that a simulation seemed to save nothing."""
    line = [
        "plan",
        "--dataset-size",
        "20000",
        "--num-units",
        "5000",
        "--max-records-per-unit",
        "4",
        "--sampling-unit",
        "person",
    ]
    assert (
        main(
            [
                *line,
                "--expected-batch-size",
                "1024",
                "--steps",
                "100",
                "--target-unit-epsilon",
                "8",
                "--simulate",
                "4",
            ]
        )
        == 0
    )
    assert "102,400 in place of 409,600" in capsys.readouterr().out


@pytest.mark.slow
def test_training_executes_the_simulation_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "scenes", "scenes", "--num", "60", "--size-px", "32"]) == 0
    line = [
        "train",
        "vip.micro_random_start",
        "--data",
        "scenes",
        "--privacy.dataset-size",
        "60",
        "--privacy.expected-batch-size",
        "12",
    ]
    line += [
        "--privacy.delta",
        "1e-3",
        "--privacy.steps",
        "2",
        "--optim.warmup-steps",
        "1",
        "--hardware.workers",
        "1",
        "--simulate",
        "3",
    ]
    capsys.readouterr()
    assert main(line) == 0
    assert "NO PRIVACY GUARANTEE (guarantee='simulated')" in capsys.readouterr().out
    ran = json.loads(
        (tmp_path / "runs/vip.micro_random_start/confidential/config.json").read_text()
    )["privacy"]
    assert (ran["guarantee"], ran["expected_batch_size"], ran["steps"], ran["target_epsilon"]) == (
        "simulated",
        4.0,
        2,
        None,
    )
    assert main(["report", "runs/vip.micro_random_start"]) == 2
    assert "expected" in capsys.readouterr().err
