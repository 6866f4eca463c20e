"""Results of a run's audits: each is made once, and none of several is chosen.

An audit refuses a correct mechanism with a small probability, and a wrong one not always. So a
result that is there is not made again, unless that is asked for; then the file keeps all results.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpvision.audit.black_box import forget, in_progress
from dpvision.errors import CheckpointError, DPVisionError
from dpvision.files import write_json
from dpvision.privacy.plan import DPPlan
from dpvision.runs.run import code_versions
from dpvision.statement.audits import read_audit
from dpvision.strict_json import parse_json

KEEP = "audit_black_box"
"""Folder, in the run's, of a black box that was stopped."""


def result_of(path: Path, kind: str, plan: DPPlan) -> dict[str, Any] | None:
    """Return the result of an audit of ``plan`` in a file; None if there is none, or another
    plan's, which the next one replaces.
    """
    with contextlib.suppress(OSError, DPVisionError):
        read_audit(path, kind, plan)
        return parse_json(path.read_bytes())
    return None


def made_before(
    run: Path, path: Path, kind: str, plan: DPPlan, settings: dict[str, int]
) -> dict[str, Any] | None:
    """Return the result of an audit that is not to be made again: of the plan, by this code, with
    these ``settings`` ("canaries" and "shadows" of the black box, "ranks" of the white one), and no
    other was begun since.
    """
    found = result_of(path, kind, plan)
    if found is None or found["code_sha256"] != code_versions()["code_sha256"]:
        return None
    if kind == "white-box":
        return found if found["ranks"] == settings["ranks"] else None
    begun = in_progress(run / KEEP)
    same = found["bound"]["canaries"] == settings["canaries"]
    same = same and found.get("shadows") == settings["shadows"]
    return found if begun is None and same else None


def forget_written(run: Path, path: Path, plan: DPPlan) -> None:
    """Remove the folder of a black box whose result is written: a crash came between the two."""
    found, begun = result_of(path, "black-box", plan), in_progress(run / KEEP)
    if found is not None and begun is not None and begun == found.get("audit_id"):
        forget(run / KEEP)


def write_result(path: Path, kind: str, plan: DPPlan | None, result: dict[str, Any]) -> None:
    """Write a result over the last one, with what earlier ones of the plan had.

    Args:
        plan: of the run; if None, of a recipe's audit, which keeps nothing.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    last = None if plan is None else result_of(path, kind, plan)
    if last is not None:
        result["earlier"] = [*last.get("earlier", []), _short(last)]
    write_json(path, result)


def _short(result: dict[str, Any]) -> dict[str, Any]:
    bound = result["bound"]
    return {
        "passed": result["passed"],
        **{name: bound[name] for name in ("epsilon_low", "canaries", "right") if name in bound},
        **{name: result[name] for name in ("shadows",) if name in result},
        "code_sha256": result["code_sha256"],
    }


@contextlib.contextmanager
def one_audit(run: Path) -> Iterator[None]:
    """Hold a run's folder against a second audit.

    Raises:
        CheckpointError: it is being audited.
    """
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"audit: {run} is audited by another process; expected one at a time. Wait for "
                "it, or stop it: what it has done is kept."
            ) from None
        for left in run.glob(f".{KEEP}.partial-*"):  # of an audit that was killed at its end
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)
