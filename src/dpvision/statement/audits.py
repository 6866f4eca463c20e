"""Audits of a run's plan (``dpvision audit RUN``) in its statement: measured, not recomputed."""

from pathlib import Path
from typing import Any

from dpvision.errors import CheckpointError, DPVisionError, PrivacyError
from dpvision.privacy.plan import DPPlan
from dpvision.strict_json import parse_json

FORMAT = "dpvision-audit-1"
FILES = {"white-box": "audit.json", "black-box": "audit_black_box.json"}


def read_audits(root: Path, plan: DPPlan) -> list[dict[str, Any]]:
    """Return what a statement has of the run's audits, empty if there is no file of any.

    Raises:
        CheckpointError: a file cannot be read.
        PrivacyError: it is of another plan than ``plan``.
    """
    return [
        _read(root, root / file, kind, plan)
        for kind, file in FILES.items()
        if (root / file).exists()
    ]


def _read(root: Path, path: Path, kind: str, plan: DPPlan) -> dict[str, Any]:
    again = f"`dpvision audit {root} --{kind}`"
    try:
        found = parse_json(path.read_bytes())
        audited = DPPlan.from_dict(found["plan"])
        entry = {
            "kind": {kind: kind}[found["kind"]],
            "passed": bool(found["passed"]),
            **(_white_box if kind == "white-box" else _black_box)(found),
            "code_sha256": str(found["code_sha256"]),
        }
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
    except (OSError, ValueError, KeyError, TypeError, DPVisionError) as error:
        raise CheckpointError(
            f"audit: {path} cannot be read ({error!r}); expected a file of `dpvision audit`. "
            f"Write it again with {again}, or remove it."
        ) from None
    if not audited.same_mechanism(plan):
        raise PrivacyError(
            f"audit: {path} is of another plan than the run's; expected the run's. Write it again "
            f"with {again}, or remove it."
        )
    return entry


def _white_box(found: dict[str, Any]) -> dict[str, Any]:
    mechanism, bound = found["mechanism"], found["bound"]
    return {
        "noise": float(mechanism["noise"]["value"]),
        "shift": float(mechanism["shift"]["value"]),
        "epsilon_low": float(bound["epsilon_low"]),
        "confidence": float(bound["confidence"]),
        "scores": int(mechanism["scores"]) + int(bound["scores"]),
        "ranks": int(found["ranks"]),
    }


def _black_box(found: dict[str, Any]) -> dict[str, Any]:
    bound = found["bound"]
    return {
        "canaries": int(bound["canaries"]),
        "guesses": int(bound["guesses"]),
        "right": int(bound["right"]),
        "epsilon_low": float(bound["epsilon_low"]),
        "epsilon_low_of_plan": float(bound["epsilon_low_of_plan"]),
        "confidence": float(bound["confidence"]),
        "attack": {name: float(value) for name, value in found["attack"].items()},
        "limits": {name: float(value) for name, value in found["limits"].items()},
    }
