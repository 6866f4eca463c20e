"""A rank of ``preemption.py``: ``dpvision`` with known keys, slow passes and a trace.

    torchrun ... job_child.py train ...

Environment: JOB_FOLDER gets pid-RANK and, of rank 0, trace-JOB_NUMBER.jsonl (the keys of the start,
each release, each charge); JOB_PASS_S, seconds added to each pass; JOB_SKIP, numbers of
steps that are charged and not computed, as the oracle of a run that lost them.

The gates before a run, which write nothing, are left out, for time.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crash_child import trace_releases

from dpvision.cli import main
from dpvision.privacy.ledger import Ledger
from dpvision.train import loop, start, step
from dpvision.train.loop import Session

KEY = bytes(range(32))


def prepare() -> None:
    """Replace the parts that are traced, slowed or skipped."""
    folder, rank = Path(os.environ["JOB_FOLDER"]), os.environ["RANK"]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    name = f"trace-{os.environ['JOB_NUMBER']}.jsonl"
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(entry: dict[str, Any]) -> None:
        if rank == "0":
            os.write(file, json.dumps(entry).encode() + b"\n")

    trace_releases(say, KEY)
    start.check_gates = start.check_reference_bits = lambda *_, **__: None
    read, pause = step.physical_batches, float(os.environ.get("JOB_PASS_S", "0"))
    append, next_step = Ledger.append, loop._charge
    skipped = json.loads(os.environ.get("JOB_SKIP", "[]"))

    def slow(*args: Any, **named: Any) -> Iterator[Any]:
        for batch in read(*args, **named):
            time.sleep(pause)
            yield batch

    def skip(session: Session) -> int | None:
        while session.run is not None and session.run.ledger.steps in skipped:
            append(session.run.ledger)
        return next_step(session)

    def charge(ledger: Ledger) -> int:
        charged = append(ledger)
        say({"charged": charged})
        return charged

    step.physical_batches = slow
    loop._charge = skip
    Ledger.append = charge  # type: ignore[method-assign]


if __name__ == "__main__":
    prepare()
    sys.exit(main())
