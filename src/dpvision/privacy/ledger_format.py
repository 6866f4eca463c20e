"""The ledger file: JSON lines, each holding the SHA-256 of the raw bytes of the line before it.

Every line is determined by what came before (no clock, no free text), so that a reader can rebuild
and compare it: a changed byte is found even in the last line. Keys are sorted, without spaces.

    header          format, run_id, store_id, plan, lineage: what the run is bound to; written
                    together with start, by rename
    start, resume   one for each start of the run
    step            step, from 0: this step is charged
    recovery        steps: the line before was torn; with it, that many steps count as charged

Every line also has ``kind`` and ``prev``, the hex SHA-256 of the previous line's raw bytes without
its newline ("" in the header). The bytes of a torn line are not part of the chain.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dpvision.errors import ConfigError, PrivacyError, remedy_for
from dpvision.privacy.marks import Mark
from dpvision.privacy.plan import DPPlan
from dpvision.strict_json import parse_json

FORMAT = "dpvision-ledger-1"


class Line(NamedTuple):
    """What a ledger says up to and including a line."""

    steps: int
    restarts: int


@dataclass(frozen=True)
class LedgerContents:
    """A ledger whose hash chain and counts have been verified."""

    path: Path
    run_id: str
    store_id: str
    plan: DPPlan
    steps: int
    """Steps charged, a torn last line included."""
    restarts: int
    """Starts of the run after the first."""
    digest: str
    """SHA-256 of the last line's raw bytes, which commits to the whole file."""
    lineage: list[dict[str, Any]] = field(repr=False)
    """Lineage of the weights that the run started from, which its checkpoints must repeat; empty
    for random weights.
    """
    torn: bytes
    """Raw bytes after the last newline: a line whose writing was interrupted; empty normally."""
    header: str
    """SHA-256 of the first line: run, store and plan."""
    heads: dict[str, Line] = field(repr=False)
    """Digest of each line of the chain -> what is charged up to it. Torn lines, sealed or not, are
    excluded: they may hold any bytes, even another ledger's line.
    """

    @property
    def mark(self) -> Mark:
        """Mark: the mark of the ledger's current state, at its last whole line."""
        last = next(reversed(self.heads))
        return Mark(self.heads[last].steps, last, self.header)

    def at(self, line: str) -> Line | None:
        """Return what is charged up to the line with this digest, which may be the last one, torn;
        None if there is no such line.
        """
        return Line(self.steps, self.restarts) if line == self.digest else self.heads.get(line)

    def continues(self, older: "LedgerContents") -> bool:
        """Return whether ``older`` is an earlier state of this ledger, or the same."""
        if older.header != self.header:
            return False
        return older.digest == self.digest or self.has(older.mark)

    def has(self, mark: Mark) -> bool:
        """Return whether a whole line is the one that a mark is of, after as many steps: a line
        that a crash tore is in no mark.
        """
        found = self.heads.get(mark.digest)
        return found is not None and found.steps == mark.steps


def encode(line: dict[str, Any]) -> bytes:
    """Canonical bytes of a line, without the newline."""
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(raw: bytes) -> str:
    """Hex SHA-256 of a line's raw bytes, without the newline."""
    return hashlib.sha256(raw).hexdigest()


def header_line(
    run_id: str, store_id: str, plan: DPPlan, lineage: list[dict[str, Any]]
) -> dict[str, Any]:
    """First line: binds the run to its store, plan and lineage."""
    return {
        "format": FORMAT,
        "kind": "header",
        "lineage": lineage,
        "plan": plan.to_dict(),
        "prev": "",
        "run_id": run_id,
        "store_id": store_id,
    }


def start_line(prev: str, *, resume: bool) -> dict[str, Any]:
    """Line of each start of the run."""
    return {"kind": "resume" if resume else "start", "prev": prev}


def step_line(prev: str, step: int) -> dict[str, Any]:
    """Charges ``step``, counted from 0, before it is executed."""
    return {"kind": "step", "prev": prev, "step": step}


def recovery_line(prev: str, steps: int) -> dict[str, Any]:
    """Seals a torn line, whose digest is ``prev``: from here on ``steps`` steps count as
    charged.
    """
    return {"kind": "recovery", "prev": prev, "steps": steps}


def charge_torn(steps: int, plan: DPPlan) -> int:
    """Steps after a torn line: it may have been a step that was executed, so it counts; a step
    beyond the plan is never begun.
    """
    return min(steps + 1, plan.steps)


def read_ledger(path: Path) -> LedgerContents:
    """Read and verify a ledger, without opening it for writing.

    Raises:
        PrivacyError: the file was altered, is not a ledger, or is missing.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        remedy = remedy_for(error, "Restore it from a copy.")
        raise PrivacyError(
            f"ledger: {path}: {error.strerror}; expected a readable ledger. {remedy}"
        ) from None
    *lines, torn = data.split(b"\n")
    header = _parse(lines[0]) if lines else None
    if header is None or header.get("kind") != "header" or header.get("format") != FORMAT:
        raise _altered(path, 1)
    try:
        plan = DPPlan.from_dict(header.get("plan"))
        run_id, store_id, lineage = (
            str(header["run_id"]),
            str(header["store_id"]),
            list(header["lineage"]),
        )
    except (ConfigError, PrivacyError, KeyError, TypeError) as error:
        raise PrivacyError(
            f"ledger: {path}, line 1: {error} Restore the ledger, or read it with the version "
            "that wrote it."
        ) from None
    if lines[0] != encode(header_line(run_id, store_id, plan, lineage)) or lines[1:2] != [
        encode(start_line(digest(lines[0]), resume=False))
    ]:
        raise _altered(path, 1)

    heads = {digest(lines[0]): Line(0, 0), digest(lines[1]): Line(0, 0)}
    steps = restarts = 0
    prev = digest(lines[1])
    number = 2
    while number < len(lines):
        raw = lines[number]
        sealed = charge_torn(steps, plan)
        if raw == encode(step_line(prev, steps)) and steps < plan.steps:
            after, restart = steps + 1, 0
        elif raw == encode(start_line(prev, resume=True)):
            after, restart = steps, 1
        else:
            after, restart = -1, 0
        # A line that was torn and sealed may hold anything, a whole line included: the seal says
        # what it counts for.
        if lines[number + 1 : number + 2] == [encode(recovery_line(digest(raw), sealed))]:
            steps, prev = sealed, digest(lines[number + 1])
            heads[prev] = Line(steps, restarts)
            number += 2
            continue
        if after < 0:
            raise _altered(path, number + 1)
        steps, restarts, prev = after, restarts + restart, digest(raw)
        heads[prev] = Line(steps, restarts)
        number += 1
    if torn:
        steps, prev = charge_torn(steps, plan), digest(torn)
    return LedgerContents(
        Path(path),
        run_id,
        store_id,
        plan,
        steps,
        restarts,
        prev,
        lineage,
        torn,
        digest(lines[0]),
        heads,
    )


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _altered(path: Path, number: int) -> PrivacyError:
    return PrivacyError(
        f"ledger: {path}, line {number}: not what the lines before it determine; expected an "
        "unbroken hash chain. The file was altered or damaged: restore it from the newest copy "
        "in the run folder."
    )
