"""The cost model against what was measured here, what was published, and laws that any cost
keeps.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.errors import ConfigError
from dpvision.models import make_model
from dpvision.plan.cost import step_cost
from dpvision.plan.device_table import DEVICES, find_device
from dpvision.plan.parameters import count_parameters
from dpvision.plan.work import CLIPPING, work_of
from dpvision.recipes import get_recipe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def clipping_rows() -> list[tuple[str, int, int, float, float]]:
    """(recipe, physical batch, threads, seconds, peak MB) of one-pass steps on the processor."""
    found = []
    for path in sorted(RESULTS.glob("*clipping*.json")):
        result = json.loads(path.read_text())
        assert "EPYC" in result["device"]
        value = {(r["case"], r["variant"], r["metric"]): r["value"] for r in result["rows"]}
        for case in dict.fromkeys(r["case"] for r in result["rows"]):
            if (case, "one_pass_eager", "time_s") in value:
                kind, size = case.split("_")
                settings = [
                    int(value[case, "setting", name]) for name in ("physical_batch", "threads")
                ]
                measured = [value[case, "one_pass_eager", name] for name in ("time_s", "memory_mb")]
                found.append(
                    (f"{'vip' if kind == 'mae' else 'dpcap'}.{size}", *settings, *measured)
                )
    return found  # type: ignore[return-value]


def test_steps_on_the_processor_take_what_is_predicted_within_a_sixth() -> None:
    errors = []
    for recipe, batch, threads, seconds, _ in clipping_rows():
        work = work_of(get_recipe(recipe).model)
        assert work is not None
        errors.append(
            batch * 3 * work.forward_flops * CLIPPING / (threads * DEVICES["cpu"].flops) / seconds
            - 1
        )
    print(f"{len(errors)} steps, errors {min(errors):+.0%} to {max(errors):+.0%}")
    assert len(errors) >= 14 and max(map(abs, errors)) < 1 / 6


def test_memory_on_the_processor_is_what_is_predicted_within_a_tenth() -> None:
    errors = []
    for recipe, batch, _, _, megabytes in clipping_rows():
        config = get_recipe(recipe)
        work, weights = work_of(config.model), 4 * count_parameters(config.model)
        assert work is not None
        errors.append((weights + max(weights, batch * work.activation_bytes)) / 1e6 / megabytes - 1)
    assert max(map(abs, errors)) < 0.1, errors


@pytest.mark.parametrize(
    ("recipe", "milliseconds"), [("vip.micro", 2.51), ("dpcap.micro", 2899 / 1300)]
)
def test_whole_steps_of_small_recipes_take_what_is_predicted_within_a_third(
    recipe: str, milliseconds: float
) -> None:
    # benchmarks/results/2026-11-22-step_cost.json, and docs/log, 2026-11-22.
    cost = step_cost(get_recipe(recipe), 1, "cpu")
    assert 1e3 * cost.step_s / get_recipe(recipe).privacy.expected_batch_size == pytest.approx(
        milliseconds, rel=1 / 3
    )
    assert cost.measured


@pytest.mark.parametrize(("recipe", "days"), [("dpcap.base", 5), ("dpcap.large", 13)])
def test_dp_caps_days_are_predicted_within_a_quarter(recipe: str, days: float) -> None:
    # Appendix A.2 and section 4.3 of the paper: 32 epochs on 128 V100, ghost norms in mixed
    # precision.
    assert step_cost(get_recipe(recipe), 128, "V100").hours / 24 == pytest.approx(days, rel=0.25)


def test_flops_are_those_that_torch_counts() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from dpvision.data.batch import Batch
    from dpvision.data.keys import StepKey
    from dpvision.train.objectives import mae_losses

    config = get_recipe("vip.micro").model
    batch = Batch(
        torch.arange(4), torch.ones(4, dtype=torch.bool), torch.zeros(4, 1, 3, 32, 32), None, None
    )
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        mae_losses(make_model(config, seed=0), batch, StepKey(0, 0))
    work = work_of(config)
    assert work is not None and counter.get_total_flops() / 4 == pytest.approx(
        work.forward_flops, rel=0.1
    )


def test_more_devices_take_less_time_and_never_less_than_their_share() -> None:
    recipe = get_recipe("vip.base")
    hours = [step_cost(recipe, gpus, "h100").hours for gpus in (1, 8, 64, 256)]
    assert hours == sorted(hours, reverse=True)
    assert all(
        gpus * after >= hours[0] for gpus, after in zip((8, 64, 256), hours[1:], strict=True)
    )


def test_k_images_of_each_person_cost_k_times_the_passes() -> None:
    recipe = get_recipe("vip.micro")

    def compute(k: int) -> float:
        people = replace(
            recipe.privacy, num_units=10_000, sampling_unit="person", max_records_per_unit=k
        )
        return step_cost(replace(recipe, privacy=people), 1, "cpu").compute_s

    assert compute(3) == pytest.approx(3 * compute(1)) and compute(1) == pytest.approx(
        step_cost(recipe, 1, "cpu").compute_s
    )


def test_memory_grows_with_the_physical_batch_and_not_with_the_logical_one() -> None:
    recipe = get_recipe("vip.base")

    def memory(physical: int, batch: float = 98_304) -> float:
        changed = replace(
            recipe,
            hardware=replace(recipe.hardware, physical_batch_size=physical),
            privacy=replace(recipe.privacy, expected_batch_size=batch),
        )
        return step_cost(changed, 8, None).memory_gb

    assert memory(64) < memory(512) and memory(512) == memory(512, 1_000_000)


def test_unknown_devices_and_networks_are_errors_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="Name the nearest one"):
        find_device("tpu")
    with pytest.raises(ConfigError, match="dpvision doctor"):
        step_cost(get_recipe("supervised.micro"), 1, None)
    with pytest.raises(ConfigError, match="gpus=0"):
        step_cost(get_recipe("vip.base"), 0, None)


def test_the_command_prints_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "vip.micro", "--gpus", "8", "--device", "H200", "--hours", "1e-9", "--json"])
        == 0
    )
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["device"] == "h200" and cost["gpus"] == 8 and not cost["measured"]
    assert main(["plan", "vip.micro", "--gpus", "8", "--device", "H200", "--hours", "1e-9"]) == 0
    text = capsys.readouterr().out
    assert "arithmetic, not measured" in text and "hours are needed" in text
