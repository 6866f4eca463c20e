"""What can this data set afford? Noise, batch, steps, cost and expected signal, before a GPU starts."""

import math
from typing import Any

from dp_accounting import gaussian_mechanism

from dpvision.config import PrivacyConfig
from dpvision.privacy import accountant
from dpvision.privacy.plan import DPPlan, draft_plan, refusal

ATTACK_FPRS = (0.001, 0.01)
PRETRAINING_PAYS_FROM = 1_000_000
"""Records below which private pre-training is not known to beat features that cost nothing (docs/features_free.md, docs/log.md)."""
LARGE_RHO_STAR = 0.1
"""A common direction this strong, in clip norms, is rare among the gradients of images: weaker ones drown."""


def what_if(cfg: PrivacyConfig, *, num_parameters: int | None = None) -> dict[str, Any]:
    """Everything that follows from a privacy config, also where training with it would be refused ("refused" says why).

    Args:
        cfg: as for ``make_plan``, whose plan this describes.
        num_parameters: trained parameters d of the model, for the signal figures; None leaves them out.

    Returns:
        A dict ready for JSON: the settings; epsilon (PLD) and its companions, None without a guarantee; n_times_delta;
        "sample_gradients" = steps x expected_batch_size; "noise_batch_ratio" = noise_multiplier / expected_batch_size, the noise
        on the mean gradient in units of max_grad_norm; "signal" (see ``signal``); "advice" (see ``advice``); "privacy_profile" of a record,
        and "attack_tpr" on those whom the guarantee is for: units where they are declared.

    Raises:
        PrivacyError: the target cannot be reached, or delta is below what the accountant resolves.
        ConfigError: a simulated run without noise_multiplier or max_grad_norm.
    """
    plan = draft_plan(cfg)
    spent = plan.spent(plan.steps)
    event = plan.event(plan.steps)
    private = plan.guarantee == "dp"
    strength = signal(plan, num_parameters)
    return {
        "guarantee": plan.guarantee,
        "sampling": plan.sampling,
        "dataset_size": plan.dataset_size,
        "expected_batch_size": plan.expected_batch_size,
        "max_batch_size": plan.max_batch_size,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "delta": plan.delta,
        "n_times_delta": plan.population * plan.delta,
        "epsilon": spent.epsilon,
        "epsilon_rdp": spent.epsilon_rdp,
        "epsilon_unamplified": spent.epsilon_unamplified,
        "max_records_per_unit": plan.max_records_per_unit,
        "num_units": plan.num_units,
        "unit_epsilon": spent.unit_epsilon,
        "value_discretization_interval": plan.value_discretization_interval,
        "sample_gradients": plan.steps * plan.expected_batch_size,
        "noise_batch_ratio": plan.noise_multiplier / plan.expected_batch_size,
        "signal": strength,
        "advice": advice(plan, strength) if private else None,
        "privacy_profile": accountant.privacy_profile(event) if private else None,
        "attack_tpr": {str(f): plan.attack_tpr(plan.steps, f) for f in ATTACK_FPRS} if private else None,
        "refused": refusal(plan, allow_weak=cfg.allow_weak_guarantee),
    }


def advice(plan: DPPlan, strength: dict[str, float] | None) -> str | None:
    """An honest word where private pre-training is unlikely to pay: too few records, or a signal below the noise; else None.

    Args:
        strength: as ``signal`` gives it; without rho_star only the number of records counts.
    """
    reasons = []
    if plan.dataset_size < PRETRAINING_PAYS_FROM:
        reasons.append(f"{plan.dataset_size:,} records are few")
    if strength and (rho := strength.get("rho_star_planned")) is not None and rho >= LARGE_RHO_STAR:
        reasons.append(f"a direction must be {rho:.2f} clip norms strong to be found in the noise")
    if not reasons:
        return None
    return (
        f"Honestly: {', and '.join(reasons)}. At this size private pre-training is not known to beat features that cost no budget: compare "
        "with `dpvision evaluate patches+scattering`, and spend epsilon on a head."
    )


def signal(plan: DPPlan, num_parameters: int | None) -> dict[str, float] | None:
    """How strong a common direction of the gradients must be to be found in the noise (a heuristic, not a promise).

    A direction that lasts a fifth of the steps is recoverable when the mean clipped gradient has a norm, in units of the clip
    norm, above about rho* = sqrt(5 d) / s for d trained parameters. "planned" s is sqrt(steps) x expected_batch_size /
    noise_multiplier; no batch and no number of steps brings it above "limit" = dataset_size x mu, with mu the Gaussian
    privacy parameter of (epsilon, delta).

    Returns:
        signal_planned, signal_limit and, where num_parameters is given, rho_star (at the limit) and rho_star_planned;
        None without noise or without a guarantee.
    """
    if plan.epsilon is None or plan.epsilon <= 0:
        return None
    planned = math.sqrt(plan.steps) * plan.expected_batch_size / plan.noise_multiplier
    limit = plan.dataset_size / float(gaussian_mechanism.get_sigma_gaussian(plan.epsilon, plan.delta))
    figures = {"signal_planned": planned, "signal_limit": limit}
    if num_parameters is not None:
        figures["num_parameters"] = num_parameters
        figures["rho_star"] = math.sqrt(5 * num_parameters) / limit
        figures["rho_star_planned"] = math.sqrt(5 * num_parameters) / planned
    return figures
