"""The audit of a run's plan (``dpvision audit RUN``) in its statement: measured, not recomputed."""

from pathlib import Path
from typing import Any

from dpvision.errors import CheckpointError, DPVisionError, PrivacyError
from dpvision.privacy.plan import DPPlan
from dpvision.strict_json import parse_json

FORMAT = "dpvision-audit-1"
FILE = "audit.json"


def read_audits(root: Path, plan: DPPlan) -> list[dict[str, Any]]:
    """Return what a statement has of RUN/audit.json, empty if there is no such file.

    Raises:
        CheckpointError: the file cannot be read.
        PrivacyError: it is of another plan than ``plan``.
    """
    path = root / FILE
    if not path.exists():
        return []
    try:
        found = parse_json(path.read_bytes())
        audited = DPPlan.from_dict(found["plan"])
        mechanism, bound = found["mechanism"], found["bound"]
        entry = {
            "kind": {"white-box": "white-box"}[found["kind"]],
            "passed": bool(found["passed"]),
            "noise": float(mechanism["noise"]["value"]),
            "shift": float(mechanism["shift"]["value"]),
            "epsilon_low": float(bound["epsilon_low"]),
            "confidence": float(bound["confidence"]),
            "scores": int(mechanism["scores"]) + int(bound["scores"]),
            "ranks": int(found["ranks"]),
            "code_sha256": str(found["code_sha256"]),
        }
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
    except (OSError, ValueError, KeyError, TypeError, DPVisionError) as error:
        raise CheckpointError(
            f"audit: {path} cannot be read ({error!r}); expected a file of `dpvision audit`. "
            f"Write it again with `dpvision audit {root} --white-box`, or remove it."
        ) from None
    if not audited.same_mechanism(plan):
        raise PrivacyError(
            f"audit: {path} is of another plan than the run's; expected the run's. Write it again "
            f"with `dpvision audit {root} --white-box`, or remove it."
        )
    return [entry]
