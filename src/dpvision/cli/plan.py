"""``dpvision plan``: what can this data set afford?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import tyro

from dpvision.cli.output import emit, pairs, parse
from dpvision.cli.recipe import get_recipe
from dpvision.config import PrivacyConfig
from dpvision.errors import ConfigError
from dpvision.privacy.planner import what_if


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(plan, "plan", argv)


def plan(
    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    steps: int | None = None,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    delta: float | None = None,
    sampling: Literal["poisson", "truncated_poisson", "full_batch"] | None = None,
    max_batch_size: int | None = None,
    max_records_per_unit: int | None = None,
    num_parameters: int | None = None,
    json: bool = False,
) -> None:
    """What a data set can afford, before any compute is spent.

    Give the noise and read epsilon, or give --target-epsilon and read the noise. With the name of a recipe, what is left out
    comes from it. `plan` computes anything; "refused" says whether training with it would be.

      dpvision plan --dataset-size 50000 --expected-batch-size 5000 --steps 300 --target-epsilon 8
      dpvision plan vip.base
      dpvision plan vip.micro --target-epsilon 2

    Args:
        recipe: Name of a recipe to start from.
        dataset_size: N, the declared public number of records.
        expected_batch_size: Mean size of a logical batch; the sample rate is this over N.
        steps: Number of logical steps.
        noise_multiplier: Noise standard deviation over the clip norm.
        target_epsilon: Find the smallest noise that keeps epsilon (PLD) at or below this.
        delta: Left out: 1 / (2 N).
        sampling: How a logical batch is drawn (left out: poisson).
        max_batch_size: Cap of a truncated Poisson batch.
        max_records_per_unit: Records of one person at most; epsilon for the person is then given too.
        num_parameters: Trained parameters, for the signal figures.
        json: Print JSON.
    """
    if recipe is not None and num_parameters is None:
        from dpvision.models import count_parameters

        num_parameters = count_parameters(get_recipe(recipe).model) or None  # a head's depend on its encoder
    result = what_if(_config(recipe, locals()), num_parameters=num_parameters)
    emit(result, json, _text(result))


_NAMES = ("dataset_size", "expected_batch_size", "steps", "delta", "sampling", "max_batch_size", "max_records_per_unit")


def _config(recipe: str | None, given: dict[str, Any]) -> PrivacyConfig:
    changes = {name: given[name] for name in _NAMES if given[name] is not None}
    noise, target = given["noise_multiplier"], given["target_epsilon"]
    if noise is not None or target is not None:
        changes |= {"noise_multiplier": noise, "target_epsilon": target}
    if recipe is not None:
        return replace(get_recipe(recipe).privacy, **changes)
    missing = [f"--{name.replace('_', '-')}" for name in ("dataset_size", "expected_batch_size", "steps") if name not in changes]
    if noise is None and target is None:
        missing.append("--noise-multiplier or --target-epsilon")
    if missing:
        raise ConfigError(f"plan: {', '.join(missing)} not given; expected them, or the name of a recipe. See dpvision plan --help.")
    return PrivacyConfig(**changes)


def _text(r: dict[str, Any]) -> str:
    if r["epsilon"] is None:
        return f"NO PRIVACY GUARANTEE (guarantee={r['guarantee']!r})\n" + pairs({"sample-gradients": r["sample_gradients"]})
    tpr = r["attack_tpr"]
    lines = [
        f"epsilon {r['epsilon']:.4g} at delta {r['delta']:.3g} after {r['steps']:,} steps",
        pairs(
            {
                "epsilon (RDP, as the papers)": r["epsilon_rdp"],
                "epsilon without sampling": r["epsilon_unamplified"],
                "epsilon for a person": r["unit_epsilon"],
                "best attack": f"{tpr['0.01']:.1%} true positives at 1% false ones, {tpr['0.001']:.1%} at 0.1%",
                "N x delta": r["n_times_delta"],
                "noise multiplier": r["noise_multiplier"],
                "sampling": r["sampling"],
                "sample rate": r["sample_rate"],
                "expected batch size": r["expected_batch_size"],
                "sample-gradients": r["sample_gradients"],
                "noise / batch": r["noise_batch_ratio"],
            }
        ),
    ]
    if r["signal"]:
        lines.append("signal (a heuristic: docs/privacy.md)")
        lines.append(pairs({name.replace("_", " "): value for name, value in r["signal"].items()}))
    if r["advice"]:
        lines.append(r["advice"])
    if r["refused"]:
        lines.append(f"Training with this plan would be refused: {r['refused']}")
    return "\n".join(lines)
