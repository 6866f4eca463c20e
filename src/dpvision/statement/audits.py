"""Audits of a run's plan (``dpvision audit RUN``) in its statement: measured, not made again. Of
the black box, what follows from its scores and coins is computed again.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.errors import CheckpointError, DPVisionError, PrivacyError
from dpvision.privacy.coin_guesses import FALSE_ALARM, guesses_tried, largest_bound
from dpvision.privacy.plan import DPPlan
from dpvision.strict_json import parse_json

FORMAT = "dpvision-audit-1"
ATTACK = ("auc", "tpr_at_fpr_0.001", "tpr_at_fpr_0.01")
"""Figures of an attack, and of the plan's limits."""
FILES = {"white-box": "audit.json", "black-box": "audit_black_box.json"}


def read_audits(root: Path, plan: DPPlan) -> list[dict[str, Any]]:
    """Return what a statement has of the run's audits, empty if there is no file of any.

    Raises:
        CheckpointError: a file cannot be read.
        PrivacyError: it is of another plan than ``plan``.
    """
    return [
        read_audit(root / file, kind, plan)
        for kind, file in FILES.items()
        if (root / file).exists()
    ]


def read_audit(path: Path, kind: str, plan: DPPlan) -> dict[str, Any]:
    """Return what a statement has of one kind of audit; raises as ``read_audits``."""
    again = f"`dpvision audit {path.parent} --{kind}`"
    try:
        if not path.is_file():
            raise ValueError("not a file")
        found = parse_json(path.read_bytes())
        audited = DPPlan.from_dict(found["plan"])
        if found["format"] != FORMAT or found["kind"] != kind:
            raise ValueError(f"format {found['format']!r}, kind {found['kind']!r}")
        if type(found["passed"]) is not bool or not isinstance(found["code_sha256"], str):
            raise ValueError(f"passed {found['passed']!r}, code_sha256 {found['code_sha256']!r}")
        other = not audited.same_mechanism(plan)
        entry = {
            "kind": kind,
            "passed": found["passed"],
            **(_white_box if kind == "white-box" else _black_box)(found, audited),
            "code_sha256": found["code_sha256"],
            **_earlier(found.get("earlier", [])),
        }
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        DPVisionError,
    ) as error:
        raise CheckpointError(
            f"audit: {path} cannot be read ({error!r}); expected a file of `dpvision audit`. "
            f"Write it again with {again}, or remove it."
        ) from None
    if other:
        raise PrivacyError(
            f"audit: {path} is of another plan than the run's; expected the run's. Write it again "
            f"with {again}, or remove it."
        )
    return entry


def _earlier(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many audits of this kind the file had the results of before, and how many of them
    failed; nothing if there are none.
    """
    if not all(type(one["passed"]) is bool for one in found):
        raise ValueError("earlier audits that neither passed nor failed")
    if not found:
        return {}
    return {"earlier": {"audits": len(found), "failed": sum(not one["passed"] for one in found)}}


def _white_box(found: dict[str, Any], plan: DPPlan) -> dict[str, Any]:
    mechanism, bound = found["mechanism"], found["bound"]
    checks = [mechanism[name] for name in ("noise", "shift", "parameter")]
    passed = bound["floor"] <= bound["epsilon_low"] <= bound["epsilon"] and all(
        one["low"] <= one["value"] <= one["high"] for one in [*checks, *bound["checks"].values()]
    )
    same = math.isclose(bound["epsilon"], plan.epsilon or 0.0, rel_tol=0.01)
    if found["passed"] != passed or not same:
        raise ValueError("figures that do not follow from the checks, or another epsilon")
    return {
        "noise": float(mechanism["noise"]["value"]),
        "shift": float(mechanism["shift"]["value"]),
        "epsilon_low": float(bound["epsilon_low"]),
        "confidence": float(bound["confidence"]),
        "scores": int(mechanism["scores"]) + int(bound["scores"]),
        "ranks": int(found["ranks"]),
    }


def _black_box(found: dict[str, Any], plan: DPPlan) -> dict[str, Any]:
    bound, executed = found["bound"], DPPlan.from_dict(found["executed"])
    score_M = np.array(found["score_of_canary"], dtype=np.float64)
    inside_M = np.array(found["canary_inside"])
    if not (inside_M.dtype == bool and score_M.shape == inside_M.shape == (bound["canaries"],)):
        raise ValueError("scores and coins of other canaries")
    same = (
        (executed.sampler.law, executed.steps, executed.noise, executed.clipping)
        == (plan.sampler.law, plan.steps, plan.noise, plan.clipping)
        and executed.delta == plan.delta
        and math.isclose(executed.sample_rate, plan.sample_rate, rel_tol=1e-9)
        and math.isclose(executed.epsilon or 0.0, plan.epsilon or 0.0, rel_tol=0.01)
    )
    tried = guesses_tried(score_M, inside_M, plan.delta)
    best = max(tried, key=lambda one: one["epsilon_low"])
    low, low_of_plan = (float(bound[name]) for name in ("epsilon_low", "epsilon_low_of_plan"))
    stated = {"guesses": bound["guesses"], "right": bound["right"]}
    if (
        not same
        or not math.isclose(low, best["epsilon_low"], rel_tol=1e-4, abs_tol=1e-4)
        or stated not in [{name: one[name] for name in stated} for one in tried]
        or found["passed"] != (max(low, low_of_plan) <= bound["epsilon"])
        or bound["epsilon"] != executed.epsilon
    ):
        raise ValueError("a run of another plan, or figures that do not follow from the scores")
    shadows = found.get("shadows", 0)
    if type(shadows) is not int or shadows < 0:
        raise ValueError(f"shadows {shadows!r}")
    figures = {
        of: {name: _share(found[of][name]) for name in ATTACK} for of in ("attack", "limits")
    }
    return {
        "canaries": len(score_M),
        **({"shadows": shadows} if shadows else {}),
        **stated,
        "epsilon_low": low,
        "epsilon_low_of_plan": low_of_plan,
        "epsilon_low_at_most": largest_bound(len(score_M), plan.delta),
        "confidence": 1 - FALSE_ALARM,
        **figures,
    }


def _share(value: Any) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{value!r}, not from 0 to 1")
    return float(value)
