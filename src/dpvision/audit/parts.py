"""The parts of an audit of a run or a recipe, white box and black box: what is refused, what was
made before, and what is made and written.

    parts = Parts(*finished_run(Path("runs/first")), run=Path("runs/first"))
    parts.check(["white-box"])
    result = parts.made_before("white-box") or parts.make("white-box", lambda *_: None)
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpvision.audit.acceptance import Say
from dpvision.audit.black_box import (
    black_box,
    check_settings,
    forget,
    num_canaries,
    num_shadows,
)
from dpvision.audit.results import KEEP, forget_written, made_before, one_audit, write_result
from dpvision.audit.white_box import white_box
from dpvision.config import RunConfig
from dpvision.errors import ConfigError
from dpvision.privacy.plan import DPPlan
from dpvision.runs.folder import run_base
from dpvision.statement.audits import FILES


@dataclass(frozen=True)
class Parts:
    """What is audited, and how. A kind is "white-box" or "black-box"."""

    config: RunConfig
    plan: DPPlan | None = None
    """Of the finished run; None for a recipe."""
    run: Path | None = None
    """Folder of the finished run, where results are kept; None for a recipe."""
    canaries: int | None = None
    """If None, 500, or as many as the plan's delta allows."""
    shadows: int | None = None
    data: Path | None = None
    out: Path | None = None
    """File of the result; None for the run's folder, or the current one."""
    again: bool = False
    """Whether a part is made again where there is a result."""

    def __post_init__(self) -> None:
        if self.run is not None and self.out is not None:
            raise ConfigError(
                f"audit: out={self.out} with the run {self.run}; expected none: a run's results "
                "are kept in its folder, all of them. Drop --out; copy the file afterwards."
            )

    @property
    def is_main(self) -> bool:
        """Whether this process writes the results: rank 0."""
        return int(os.environ.get("RANK", "0")) == 0

    @property
    def num_canaries(self) -> int:
        return num_canaries(self.config, self.plan, self.canaries)

    @property
    def num_shadows(self) -> int:
        return num_shadows(self.config, self.shadows)

    def file(self, kind: str) -> Path:
        """File of a kind's result."""
        return self.out or (self.run or Path()) / FILES[kind]

    def check(self, kinds: list[str], minutes: float | None = None) -> None:
        """Raises ConfigError: a part cannot be made, its result cannot be written or would be taken
        for a run's, or torchrun started what one process does.
        """
        if self.out is not None and len(kinds) > 1:
            raise ConfigError(
                f"audit: out={self.out} with two kinds of audit; expected one. Add --white-box or "
                "--black-box."
            )
        if self.shadows is not None and "black-box" not in kinds:
            raise ConfigError(
                f"audit: shadows={self.shadows} with the white box alone, which has none; expected "
                "the black box. Drop --shadows, or add --black-box."
            )
        world_size = os.environ.get("WORLD_SIZE", "1")
        if int(world_size) > 1 and "black-box" in kinds:
            raise ConfigError(
                f"audit: WORLD_SIZE={world_size} with the black box, which is a run of its own in "
                "one process; expected 1. Add --white-box, which audits the ranks together, or "
                "start it without torchrun."
            )
        if int(world_size) > 1 and minutes is not None:
            raise ConfigError(
                f"audit: WORLD_SIZE={world_size} with minutes={minutes}; expected one process, "
                "whose clock decides. Drop --minutes, or start it without torchrun."
            )
        for path in map(self.file, kinds):
            if self.run is None and run_base(path.parent) is not None:
                raise ConfigError(
                    f"audit: {path} lies in the folder of a run, which is not what is audited; "
                    "expected another folder. Add --out, or audit the run."
                )
            if path.is_dir() or not path.parent.is_dir():
                raise ConfigError(
                    f"audit: out={path}; expected a file in a folder that exists. Make the folder, "
                    "or name a file."
                )
        if "black-box" in kinds:
            check_settings(self.config, self.plan, self.num_canaries, self.data, self.num_shadows)

    def made_before(self, kind: str) -> dict[str, Any] | None:
        """Return the result that is there already; None if it is to be made."""
        if self.run is None or self.plan is None:
            return None
        with self._alone():
            if self.is_main:
                forget_written(self.run, self.file("black-box"), self.plan)
            if self.again or self.data is not None:
                return None
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            settings = {"canaries": self.num_canaries, "shadows": self.num_shadows, "ranks": ranks}
            return made_before(self.run, self.file(kind), kind, self.plan, settings)

    def make(self, kind: str, say: Say) -> dict[str, Any]:
        """Make a part and write its result. Raises as ``white_box``, ``black_box`` and
        ``one_audit``.
        """
        keep = None if self.run is None else self.run / KEEP
        with self._alone():
            if kind == "white-box":
                result = white_box(self.config, say, self.plan)
            else:
                result = black_box(
                    self.config,
                    self.plan,
                    self.num_canaries,
                    data=self.data,
                    shadows=self.shadows,
                    say=say,
                    keep=keep,
                )
            if self.is_main:
                write_result(self.file(kind), kind, self.plan, result)
                if kind == "black-box" and keep is not None:
                    forget(keep)
        return result

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Hold the run's folder against other audits of it."""
        if self.run is None or not self.is_main:
            return contextlib.nullcontext()
        return one_audit(self.run)
