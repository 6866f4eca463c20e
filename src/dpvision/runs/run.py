"""One start of a run: its folder, its ledger, the lineage of its weights, its keys and its
checkpoints; how it stops on a signal; and its epsilon for display.
"""

import contextlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from torch import Tensor

from dpvision.checkpoint import (
    Checkpoint,
    keep_newest,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from dpvision.code_digest import code_digest
from dpvision.config import ClassifierConfig, HeadConfig, RunConfig
from dpvision.data.store import Store
from dpvision.errors import CheckpointError, ConfigError, DataError, DPVisionError, PrivacyError
from dpvision.files import write_file, write_json
from dpvision.privacy.composition import Part, parts_of, total_epsilon, unit_epsilon
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import up
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.privacy.stream import Key, new_key
from dpvision.runs.folder import (
    RunFolder,
    complete_run,
    create_run,
    discard_run,
    open_run,
    public_settings,
    read_run,
    require_space,
)
from dpvision.runs.lineage import own_entry, remember_weights, runs_on
from dpvision.strict_json import parse_json
from dpvision.weights import Lineage

_PLAN = "plan.json"
_SOURCES = Path(__file__).parents[1]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Secrets:
    """Keys of one start, from the operating system's entropy: never written, logged, restored or
    used for another. Tests inject them.
    """

    draw: Key = field(default_factory=new_key, repr=False)
    noise: Key = field(default_factory=new_key, repr=False)


@dataclass
class Run:
    """The open folder and ledger of one start of a run, in one process; made by ``new_run`` and
    ``Stopped.resumed``.
    """

    config: RunConfig
    plan: DPPlan
    store: Store
    lineage: Lineage
    """Lineage of the weights that the run starts from."""
    folder: RunFolder
    ledger: Ledger

    @property
    def behind(self) -> tuple[Part, ...]:
        """tuple: plans and steps of the private runs on this store that the weights come from."""
        return runs_on(self.lineage, self.store.store_id)

    def save(self, tensors: dict[str, Tensor], **about: Any) -> Path:
        """Write a checkpoint, and return its folder; arguments and errors as for ``checkpoint``."""
        return self.checkpoint(tensors, **about)()

    def checkpoint(
        self,
        tensors: dict[str, Tensor],
        *,
        updates: int,
        ema: dict[str, Tensor] | None = None,
        optimizer: dict[str, Tensor] | None = None,
        start: Iterable[str] = (),
        config: RunConfig | None = None,
        files: Mapping[str, bytes] | None = None,
        timed: bool = False,
        **more: Any,
    ) -> Callable[[], Path]:
        """Return the function that writes a checkpoint of the steps charged until now: it records
        digests of the weights if there is no guarantee, writes them, removes older checkpoints, and
        copies the ledger into the run folder. It may run in a thread while the run goes on.

        Args:
            tensors: the model's tensors; copies if the run goes on before they are written.
            updates: number of steps whose update is in them.
            start: digests (``weights.contents``) of the weights that a run without a guarantee
                started from.
            config: the config that a private selection chose; if None, the run's.
            files: further files of the checkpoint, by name.
            timed: a clock asked for it, not the plan's end nor a signal: it is for resuming only,
                and lies under ``confidential/``.
            more: further fields of the manifest.

        Returns:
            The function. It returns the checkpoint's folder, and raises CheckpointError if it
            cannot be written; earlier ones are untouched.
        """
        steps, run_id = self.ledger.steps, self.folder.run_id
        manifest = {
            "run_id": run_id,
            "ledger_steps": steps,
            "updates": updates,
            "config": public_settings(config or self.config),
            "plan": self.plan.to_dict(),
            "ledger_digest": self.ledger.digest,
            "lineage": [
                *self.lineage,
                own_entry(self.plan, self.store, run_id, steps, self.lineage),
            ],
            # Declared or public; the classifier's scores are in this order.
            **(
                {"class_names": self.store.label_names}
                if isinstance(self.config.model, ClassifierConfig | HeadConfig)
                else {}
            ),
            # Declared: files that are read for prediction have the same range.
            **({} if self.store.window is None else {"window": list(self.store.window)}),
            **more,
            "versions": code_versions(),
        }
        path = self.folder.checkpoints(timed=timed) / f"step-{steps:08d}"

        def write() -> Path:
            if self.plan.guarantee != "dp":
                made = [*tensors.values(), *(ema or {}).values()]
                remember_weights(self.store, run_id, made, start)
            save_checkpoint(
                path, manifest, tensors, ema=ema, optimizer=optimizer, files=dict(files or {})
            )
            keep_newest(self.folder.base, self.config.hardware.keep_checkpoints)
            if not timed:
                self.folder.copy_ledger(self.ledger.path)
            return path

        return write


@contextlib.contextmanager
def new_run(
    root: Path,
    config: RunConfig,
    plan: DPPlan,
    store: Store,
    lineage: Lineage,
    *,
    num_bytes: int,
    secluded: bool,
    files: Mapping[str, Any] | None = None,
    total: float | None = None,
) -> Iterator[Run]:
    """Open a new run in folder ``root`` for the duration of the block; a refused run leaves nothing
    behind.

    Args:
        lineage: lineage of the weights that it starts from.
        num_bytes: required free space.
        secluded: those weights were trained on private records without a guarantee, so what is made
            from them is private too.
        files: further objects to write as JSON, by name.
        total: as for ``Ledger.open``.

    Raises:
        CheckpointError: the folder holds a run, or its disk is full. PrivacyError: the ledger
            refuses the plan. ConfigError: the versions of the code cannot be read
            (``code_versions``).
    """
    code_versions()  # else the first checkpoint fails, after its steps were charged
    require_space(root, num_bytes)
    about = {
        "store_id": store.store_id,
        "store_visibility": store.visibility,
        "results_visibility": store.results_visibility,
        "guarantee": plan.guarantee,
    }
    private = store.visibility == "private" or secluded
    folder = create_run(root, config, about, wholly_confidential=plan.guarantee != "dp" and private)
    described = {_PLAN: plan.to_dict(), **(files or {})}
    with contextlib.ExitStack() as stack:
        stack.callback(folder.close)
        try:
            for name, value in described.items():
                write_json(folder.base / name, value)
            ledger = stack.enter_context(
                Ledger.open(
                    store.path, folder.run_id, plan, resume=False, lineage=lineage, total=total
                )
            )
            write_file(StoreLedgers.of(store.path).name_path(folder.run_id), str(root).encode())
            complete_run(folder, config)
        except DPVisionError:
            discard_run(
                folder, described
            )  # refused, by the owner's cap for example: the name stays free
            raise
        yield Run(config, plan, store, lineage, folder, ledger)


@dataclass(frozen=True)
class Stopped:
    """A stopped run, read without a lock by every process that will resume it."""

    root: Path
    base: Path
    config: RunConfig
    plan: DPPlan
    store_id: str
    checkpoint: Checkpoint | None
    """The newest checkpoint; None if the run stopped before its first."""

    @classmethod
    def read(cls, root: Path, hardware: dict[str, Any] | None = None) -> Self:
        """Read the run in folder ``root``.

        Args:
            hardware: HardwareConfig fields to change, the only settings that a resumed run may
                change.

        Raises:
            CheckpointError: there is no run, its files cannot be read, or its checkpoint is of
                another run.
            PrivacyError: its settings are not those of its plan.
        """
        base, config, about = read_run(root)
        config = replace(config, hardware=replace(config.hardware, **(hardware or {})))
        checkpoint = load_checkpoint(base) if list_checkpoints(base) else None
        if checkpoint is not None and checkpoint.manifest["run_id"] != about["run_id"]:
            raise CheckpointError(
                f"checkpoint: {checkpoint.path} is of another run; expected one of this run. "
                "Remove it."
            )
        values = read_object(base / _PLAN)
        try:
            plan = DPPlan.from_dict(values)
        except ValueError as error:
            raise CheckpointError(
                f"run: {base / _PLAN} cannot be read ({error}). Restore it as the run wrote it."
            ) from None
        plan.require_settings(config.privacy, base / "config.json")
        plan.require_true()
        return cls(root, base, config, plan, about["store_id"], checkpoint)

    def require_store(self, store: Store) -> None:
        """Raise DataError if ``store`` is not the run's."""
        if store.store_id != self.store_id:
            raise DataError(
                f"store: {store.path} is not the store of this run. Restore the original, or "
                "start a new run."
            )

    @contextlib.contextmanager
    def resumed(self, store: Store, lineage: Lineage, *, num_bytes: int) -> Iterator[Run]:
        """Open the run again for the duration of the block, at the ledger's step count.

        Args:
            lineage: lineage of the weights that it started from; must match the ledger.
            num_bytes: required free space.

        Raises:
            CheckpointError: the run is in use, or its disk is full. PrivacyError: the ledger is not
                the run's, or older than its checkpoint. ConfigError: as ``new_run``.
        """
        code_versions()
        require_space(self.root, num_bytes)
        with contextlib.ExitStack() as stack:
            folder = open_run(self.root)
            stack.callback(folder.close)
            ledger = stack.enter_context(
                Ledger.open(store.path, folder.run_id, self.plan, resume=True, lineage=lineage)
            )
            saved = 0 if self.checkpoint is None else self.checkpoint.manifest["ledger_steps"]
            taken = None if self.checkpoint is None else self.checkpoint.path
            made = list_checkpoints(self.base)
            if (newest := made[-1] if made else None) != taken:
                raise CheckpointError(
                    f"checkpoint: another process went on with {self.root} while this one read it, "
                    f"and the newest checkpoint is now {newest}; expected {taken}. Give the same "
                    "command again."
                )
            if saved > ledger.steps:
                raise PrivacyError(
                    f"ledger: {ledger.steps} steps, yet a checkpoint was written after {saved}; "
                    "expected the newer ledger. Restore the LEDGERS folder that belongs to this "
                    "store."
                )
            if ledger.steps == self.plan.steps:
                # Nothing may be left to save, and the last line may have come after the last copy.
                folder.copy_ledger(ledger.path)
            yield Run(self.config, ledger.plan, store, lineage, folder, ledger)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that the run wrote; raises CheckpointError if it cannot be read."""
    try:
        found = parse_json(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"run: {path} cannot be read ({error}). Restore it as the run wrote it."
        ) from None


class EpsilonMeter:
    """Epsilon of a run that was charged some steps, for display: that of its whole plan from the
    first step on (``plan.stated_steps``).

    Args:
        behind: the private runs on the same store that the weights come from.
    """

    def __init__(self, plan: DPPlan, behind: tuple[Part, ...] = ()) -> None:
        self._plan, self._behind = plan, behind
        self._known: dict[tuple[bool, int], tuple[float, float | None]] = {}

    def at_most(self, steps: int) -> float | None:
        """Epsilon that is stated after ``steps`` steps, with all runs behind the weights; None for
        a plan without a guarantee.
        """
        return self._bound(steps)[0]

    def this_run_at_most(self, steps: int) -> float | None:
        """The same for this run alone."""
        return self._bound(steps, alone=True)[0]

    def unit_at_most(self, steps: int) -> float | None:
        """As ``at_most``, for a unit (person); None if no units are declared."""
        return self._bound(steps)[1]

    def entry(self, steps: int) -> dict[str, int | float | None]:
        """Public log entry for ``steps`` steps."""
        line: dict[str, int | float | None] = {
            "step": steps,
            "epsilon_at_most": self.at_most(steps),
        }
        line |= (
            {"unit_epsilon_at_most": self.unit_at_most(steps)} if self._plan.unit.is_person else {}
        )
        return line | ({"this_run_at_most": self.this_run_at_most(steps)} if self._behind else {})

    def text(self, steps: int) -> str:
        """The same as text, with a person's epsilon first if people are declared."""
        if self._plan.guarantee != "dp":
            return "no guarantee"
        said = f"epsilon <= {up(self.at_most(steps), 2)}"
        if (unit := self.unit_at_most(steps)) is not None:
            image = (
                ""
                if self._plan.unit.draws_people
                else f" ({up(self.at_most(steps), 2)} for an image)"
            )
            said = f"epsilon <= {up(unit, 2)} for a person{image}"
        return said + (
            f" with the runs before (this run {up(self.this_run_at_most(steps), 2)})"
            if self._behind
            else ""
        )

    def _bound(self, steps: int, *, alone: bool = False) -> tuple[float | None, float | None]:
        if self._plan.guarantee != "dp":
            return None, None
        stated = self._plan.stated_steps(steps)
        if (alone, stated) not in self._known:
            parts = parts_of([*(() if alone else self._behind), (self._plan, stated)])
            self._known[alone, stated] = total_epsilon(parts)[0], unit_epsilon(parts)
        return self._known[alone, stated]


class StopRequest:
    """A context in which SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP only set ``asked``: the work
    in progress is finished and saved. A SIGHUP that is ignored (nohup) stays so. Does nothing
    outside of the main thread.

    A second SIGINT raises KeyboardInterrupt in the block, but not under torchrun, which passes on
    to its processes what they may have received themselves. Charged steps count whether or not they
    are saved, so the number of lost ones is printed to standard error.

    Args:
        doing: the work that is finished first, for the message on standard error.
        lost: returns the number of steps charged and not saved; 0 on ranks without a ledger.
    """

    def __init__(self, doing: str, lost: Callable[[], int]) -> None:
        self._doing, self._lost = doing, lost
        self.since: float | None = None
        """When the first signal arrived, by ``time.monotonic``."""
        self._interrupted = False
        self._again = "TORCHELASTIC_RUN_ID" not in os.environ
        self._before: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        """bool: whether a signal arrived."""
        return self.since is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            handled = [n for n in _SIGNALS if not (ignored and n == signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._ask) for number in handled}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is not None and issubclass(kind, KeyboardInterrupt) and (lost := self._lost()):
            print(
                "\n"
                f"Stopped at once: {lost} charged steps were not saved and are lost. They count "
                "in epsilon.",
                file=sys.stderr,
            )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        may_end = number == signal.SIGINT and self._again
        if may_end and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= may_end
        self.since = self.since or time.monotonic()
        again = "; Ctrl-C again stops at once and loses what is not saved" if may_end else ""
        with contextlib.suppress(OSError):  # a closed pipe must not end the work in progress
            os.write(2, f"\n{self._doing}{again}\n".encode())


@cache
def code_versions() -> dict[str, str]:
    """Return versions for the manifest and the statement; all of them public. Runs read them before
    the first charge.

    Raises:
        ConfigError: a package can be imported, but is not installed, so its version is unknown.
    """
    found = {}
    for name in ("dpvision", "torch", "numpy", "dp-accounting"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            install = (
                f"pip install {_SOURCES.parents[1]}"
                if name == "dpvision"
                else f"pip install {name}"
            )
            raise ConfigError(
                f"versions: {name} is found by its path alone (PYTHONPATH, say); expected an "
                "installed package, whose version the checkpoints and the statement name. Run "
                f"{install}."
            ) from None
    return {**found, "python": platform.python_version(), "code_sha256": code_digest(_SOURCES)}
