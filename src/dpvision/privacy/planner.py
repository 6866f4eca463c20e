"""What can this data set afford? Noise, batch, steps, cost and expected signal, before a GPU
starts.
"""

import math
from dataclasses import replace
from typing import Any

from dpvision.config import PrivacyConfig
from dpvision.errors import ConfigError
from dpvision.privacy import accountant, gaussian
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.privacy.printed import count
from dpvision.privacy.refusal import refusal

NO_GUARANTEE = "NO PRIVACY GUARANTEE: a TAN simulation"
ATTACK_FPRS = (0.001, 0.01)
PRETRAINING_PAYS_FROM = 1_000_000
"""Records below which private pre-training is not known to beat features that cost nothing
(docs/features_free.md, docs/log).
"""
LARGE_RHO_STAR = 0.1
"""A common direction this strong, in clip norms, is rare among the gradients of images: weaker ones
drown.
"""


def what_if(
    cfg: PrivacyConfig, *, num_parameters: int | None = None, of_head: bool = False
) -> dict[str, Any]:
    """Everything that follows from a privacy config, also where training with it would be refused
    ("refused" says why).

    Args:
        cfg: as for ``make_plan``, whose plan this describes.
        num_parameters: trained parameters d of the model, for the signal figures; None leaves them
            out.
        of_head: whether a head is trained: the images of a drawn person give one gradient.

    Returns:
        A dict ready for JSON: the settings; epsilon (PLD) and its companions, None without a
        guarantee; n_times_delta; "sample_gradients" = steps x images in a step; "noise_batch_ratio"
        = noise_multiplier / expected_batch_size, the noise on the mean gradient in units of
        max_grad_norm; "draws" (see ``compare_draws``); "signal" (see ``signal``); "advice" (see
        ``advice``); "privacy_profile" of a record, and "attack_tpr" on those whom the guarantee is
        for: units where they are declared.

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
        "sampling": plan.sampler.law,
        "dataset_size": plan.dataset_size,
        "expected_batch_size": plan.expected_batch_size,
        "max_batch_size": plan.sampler.max_batch_size,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise.multiplier,
        "steps": plan.steps,
        "delta": plan.delta,
        "n_times_delta": plan.unit.population * plan.delta,
        "epsilon": spent.epsilon,
        "epsilon_rdp": spent.epsilon_rdp,
        "epsilon_unamplified": spent.epsilon_unamplified,
        "max_records_per_unit": plan.unit.max_records,
        "num_units": plan.unit.num_people,
        "sampling_unit": plan.unit.drawn,
        "unit_epsilon": spent.unit_epsilon,
        "draws": compare_draws(cfg, plan),
        "value_discretization_interval": plan.value_discretization_interval,
        "sample_gradients": plan.steps
        * (plan.expected_batch_size if of_head else images_per_step(plan)),
        "noise_batch_ratio": plan.noise.multiplier / plan.expected_batch_size,
        "signal": strength,
        "advice": advice(plan, strength) if private else None,
        "privacy_profile": accountant.privacy_profile(event) if private else None,
        "attack_tpr": {str(f): plan.attack_tpr(plan.steps, f) for f in ATTACK_FPRS}
        if private
        else None,
        "refused": refusal(plan, cfg),
    }


def compare_draws(cfg: PrivacyConfig, plan: DPPlan) -> list[dict[str, Any]] | None:
    """Compare drawing images, with the group bound for a person, to drawing people: at the same
    epsilon of a person and as many steps.

    Args:
        plan: ``draft_plan(cfg)``.

    Returns:
        A row for ``plan``, then rows for people with one image in a step, and with k images for as
        many people and as many images: images in a step, noise_multiplier, and noise_batch_ratio,
        the noise on the mean gradient. None unless ``plan`` draws images of declared people by
        Poisson sampling under a guarantee.
    """
    epsilon, people = plan.unit_epsilon, plan.unit.num_people
    if epsilon is None or people is None or plan.sampler.law != "poisson" or plan.unit.draws_people:
        return None
    k, batch = plan.unit.max_records, min(plan.expected_batch_size, float(people))
    rows = [_row(f"images, {k} of a person at most" if k > 1 else "images, one of a person", plan)]
    for images, drawn in dict.fromkeys([(1, batch), (k, batch), (k, batch / k)]):
        asked = replace(
            cfg,
            sampling_unit="person",
            expected_batch_size=drawn,
            max_records_per_unit=images,
            noise_multiplier=None,
            target_epsilon=None,
            target_unit_epsilon=epsilon,
        )
        rows.append(_row(f"people, {count(images, 'image')} of each", draft_plan(asked)))
    return rows


def _row(way: str, plan: DPPlan) -> dict[str, Any]:
    return {
        "draws": way,
        "images_per_step": images_per_step(plan),
        "noise_multiplier": plan.noise.multiplier,
        "noise_batch_ratio": plan.noise.multiplier / plan.expected_batch_size,
    }


def images_per_step(plan: DPPlan) -> float:
    """Expected number of images in a step, at most: where people are drawn, max_records_per_unit of
    each.
    """
    return plan.expected_batch_size * (plan.unit.images_per_draw)


def advice(plan: DPPlan, strength: dict[str, float] | None) -> str | None:
    """An honest word where private pre-training is unlikely to pay: too few records, or a signal
    below the noise; else None.

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
        f"Honestly: {', and '.join(reasons)}. At this size private pre-training is not known to "
        "beat features that cost no budget: compare with `dpvision evaluate "
        "patches+scattering`, and spend epsilon on a head."
    )


def signal(plan: DPPlan, num_parameters: int | None) -> dict[str, float] | None:
    """How strong a common direction of the gradients must be to be found in the noise (a heuristic,
    not a promise).

    A direction that lasts a fifth of the steps is recoverable when the mean clipped gradient has a
    norm, in units of the clip norm, above about rho* = sqrt(5 d) / s for d trained parameters.
    "planned" s is sqrt(steps) x expected_batch_size / noise_multiplier; no batch and no number of
    steps brings it above "limit" = sampled_from x mu, with mu the Gaussian privacy parameter of
    (epsilon, delta).

    Returns:
        signal_planned, signal_limit and, where num_parameters is given, rho_star (at the limit) and
        rho_star_planned; None without noise or without a guarantee.
    """
    if plan.epsilon is None or plan.epsilon <= 0:
        return None
    planned = math.sqrt(plan.steps) * plan.expected_batch_size / plan.noise.multiplier
    limit = plan.unit.sampled_from / gaussian.noise_for(plan.epsilon, plan.delta)
    figures = {"signal_planned": planned, "signal_limit": limit}
    if num_parameters is not None:
        figures["num_parameters"] = num_parameters
        figures["rho_star"] = math.sqrt(5 * num_parameters) / limit
        figures["rho_star_planned"] = math.sqrt(5 * num_parameters) / planned
    return figures


def simulated(cfg: PrivacyConfig, factor: float) -> PrivacyConfig:
    """Settings of the simulation of a private run at a fraction of its compute: TAN (Sander, Stock
    and Sablayrolles, arXiv 2210.03403).

    Batch and noise divided by one factor leave the noise on the mean gradient, in clipping norms,
    as it is. At equal steps and learning rate the small run then follows the loss curve of the full
    one, as far as the choice of images adds less randomness than the noise. It guarantees nothing:
    its noise is that much too small.

    Args:
        cfg: the private run; a target is calibrated first.
        factor: more than 1; divides the expected batch size and the noise multiplier.

    Returns:
        guarantee "simulated", Poisson batches (also where the full run takes every image in every
        step), equal steps and clipping norm.

    Raises:
        ConfigError: the run has no guarantee to simulate, the factor is out of range, or less than
            one image a step would be left.
        PrivacyError: the target cannot be reached.
    """
    if cfg.guarantee != "dp":
        raise ConfigError(
            f"simulate: guarantee={cfg.guarantee}; expected a private run to simulate. Name its "
            "recipe, or drop --simulate."
        )
    if not 1 < factor < math.inf:
        raise ConfigError(
            f"simulate: factor={factor}; expected a number above 1, which divides batch and "
            "noise. E.g. --simulate 32."
        )
    batch = cfg.expected_batch_size / factor
    if not batch >= 1:
        raise ConfigError(
            f"simulate: factor={factor:g} leaves {batch:.3g} images a step; expected 1 or more. "
            f"Use at most {cfg.expected_batch_size:g}."
        )
    return replace(
        cfg,
        guarantee="simulated",
        sampling="poisson",
        max_batch_size=None,
        expected_batch_size=batch,
        target_epsilon=None,
        target_unit_epsilon=None,
        noise_multiplier=draft_plan(cfg).noise.multiplier / factor,
    )
