"""Output of ``dpvision plan --simulate``."""

from typing import Any

from dpvision.cli.output import pairs, shown
from dpvision.config import PrivacyConfig
from dpvision.privacy.plan import draft_plan
from dpvision.privacy.planner import NO_GUARANTEE, images_per_step, simulated, what_if
from dpvision.privacy.printed import up, up_delta


def simulation(
    recipe: str | None, full: PrivacyConfig, factor: float, typed: dict[str, Any]
) -> tuple[PrivacyConfig, dict[str, Any], str]:
    """Return the simulation's settings, what follows from them ready for JSON, and the text.

    Args:
        typed: privacy settings of the command line, for the command to paste.

    Raises:
        ConfigError: as ``simulated``.
    """
    small, plan = simulated(full, factor), draft_plan(full)
    found = what_if(small)
    found["simulates"] = {
        "factor": factor,
        "expected_batch_size": plan.expected_batch_size,
        "noise_multiplier": plan.noise.multiplier,
        "steps": plan.steps,
        "epsilon": plan.stated_epsilon,
        "delta": plan.delta,
    }
    assert plan.stated_epsilon is not None, "a private plan has an epsilon"
    text = [
        f"{NO_GUARANTEE} of a run at epsilon {up(plan.stated_epsilon)}, delta "
        f"{up_delta(plan.delta)}",
        pairs(
            {
                "expected batch size": f"{shown(small.expected_batch_size)} in place of "
                f"{shown(plan.expected_batch_size)}",
                "noise multiplier": f"{shown(small.noise_multiplier)} in place of "
                f"{shown(plan.noise.multiplier)}",
                "noise / batch, in both": plan.noise.multiplier / plan.expected_batch_size,
                "steps, in both": plan.steps,
                "sample-gradients": f"{shown(found['sample_gradients'])} in place of "
                f"{shown(plan.steps * images_per_step(plan))}",
            }
        ),
        "It predicts the full run's losses; learning rate and schedule stay as they are. On a "
        "private store its weights, losses and",
        "scores are confidential, and choosing settings by them is a selection that no "
        "guarantee covers.",
    ]
    if recipe is not None:
        settings = "".join(
            f" --privacy.{name.replace('_', '-')} {value}" for name, value in typed.items()
        )
        text.append(f"  dpvision train {recipe} --simulate {factor:g} --data STORE{settings}")
    return small, found, "\n".join(text)
