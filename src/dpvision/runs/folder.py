"""The run folder: public files at its top level, everything that depends on private records under
``confidential/``.
"""

import contextlib
import fcntl
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dpvision.config import HeadConfig, RunConfig, from_dict, to_dict, with_settings
from dpvision.errors import CheckpointError, ConfigError, remedy_for
from dpvision.files import replacing, write_json
from dpvision.privacy.printed import size
from dpvision.strict_json import parse_json

if TYPE_CHECKING:
    from dpvision.checkpoint import Checkpoint

FORMAT = "dpvision-run-1"
STOPPED_FILE = "stopped.json"
STOPPED = 75
"""Exit status after SIGINT, SIGTERM or SIGUSR1: the run is saved and --resume continues it
(EX_TEMPFAIL of sysexits.h).
"""
_SHOWN = 8
_PATHS = "paths.json"
IN_LINEAGE = "named in the lineage"
"""In place of a public store's path."""
"""Under ``confidential/``: where the store is. A folder's name may tell what its images are, and
whose.
"""


@dataclass
class RunFolder:
    """An open run folder, locked against a second process until ``close``.

    ``base`` holds the run's files: the folder itself, or its ``confidential/`` if the run has no
    guarantee and its store is private (docs/privacy.md).
    """

    root: Path
    base: Path
    run_id: str
    _lock: IO[str]

    @property
    def confidential(self) -> Path:
        return self.root / "confidential"

    def checkpoints(self, *, timed: bool = False) -> Path:
        """Folder of the checkpoints; of those that a clock asked for under ``confidential/``,
        because steps take as long as their secret batches are large, and a checkpoint's name is its
        step.
        """
        return (self.confidential if timed else self.base) / "checkpoints"

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def mark_stopped(self) -> None:
        """Write stopped.json: the run was asked to stop, is saved, and waits for --resume. Job
        scripts look for it, since torchrun exits with 1 whatever the status of its processes.
        """
        write_json(self.root / STOPPED_FILE, {"exit_status": STOPPED})

    def clear_stopped(self) -> None:
        """Remove stopped.json, before the run goes on."""
        (self.root / STOPPED_FILE).unlink(missing_ok=True)

    def copy_ledger(self, source: Path) -> None:
        """Copy the ledger into the run folder (the authoritative one stays beside the store). Not
        when a clock asked for a checkpoint: its number of lines is that checkpoint's step.
        """
        with replacing(self.base / "ledger.jsonl") as partial:
            shutil.copyfile(source, partial)


def require_space(root: Path, num_bytes: int) -> None:
    """Refuse to start without room for checkpoints: a full disk after the last step would lose the
    whole run.

    Raises:
        CheckpointError: the disk of ``root`` has less than ``num_bytes`` free.
    """
    existing = next(path for path in (root, *root.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not free >= num_bytes:
        raise CheckpointError(
            f"run: {size(free)} free for {root}; expected {size(num_bytes)}, two "
            "checkpoints. Free space, or change --runs."
        )


def require_new(root: Path) -> None:
    """Raise CheckpointError if the folder holds a run already."""
    if run_base(root) is not None:
        raise CheckpointError(
            f"run: {root} holds a run already; expected a new name. Use --resume to continue it, "
            "or another --name."
        )


def create_run(
    root: Path, config: RunConfig, about: dict[str, Any], *, wholly_confidential: bool
) -> RunFolder:
    """Make and lock the folder of a new run, which is one after ``complete_run``.

    Args:
        about: store_id, store_visibility, results_visibility and guarantee; written to run.json
            with a random run_id.

    Raises:
        CheckpointError: the folder holds a run already, or is in use.
    """
    root.mkdir(parents=True, exist_ok=True)
    lock = _lock(root)
    try:
        require_new(root)
    except CheckpointError:
        lock.close()
        raise
    base = root / "confidential" if wholly_confidential else root
    (root / "confidential").mkdir(exist_ok=True)
    (root / "confidential").chmod(0o700)
    run_id = secrets.token_hex(8)
    paths = {"store": config.data.store, "public_store": _public_store(config)}
    write_json(root / "confidential" / _PATHS, paths)
    write_json(base / "run.json", {"format": FORMAT, "run_id": run_id, **about})
    return RunFolder(root, base, run_id, lock)


def complete_run(folder: RunFolder, config: RunConfig) -> None:
    """Write config.json, the last file of a new run: without it there is no run, so that a crash
    before leaves the name free, and every run has all that --resume reads.
    """
    write_json(folder.base / "config.json", public_settings(config))


def public_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings as they may leave: a plain dict, ready for JSON, without the paths of
    stores.
    """
    if _public_store(config) is not None:
        config = with_settings(config, {"model.public_store": IN_LINEAGE})
    return to_dict(replace(config, data=replace(config.data, store=None)))


def _public_store(config: RunConfig) -> str | None:
    """Return the path of the public images that standardise a head's features."""
    model = config.model
    return model.features.public_store if isinstance(model, HeadConfig) else None


def settings_of_checkpoint(checkpoint: "Checkpoint") -> RunConfig:
    """Return the settings that a checkpoint's weights were trained with; the store's path only if
    it lies in its run's folder.

    Raises:
        ConfigError: its manifest has other settings than those of a run.
    """
    return _settings(
        checkpoint.manifest["config"],
        checkpoint.path.absolute().parent.parent,
        f"{checkpoint.path}: config",
    )


def _settings(values: Any, base: Path, where: str) -> RunConfig:
    """Settings from ``public_settings``, with the paths of the stores if ``base``, the folder of
    the run's files, has them.
    """
    config = from_dict(RunConfig, values, where)
    if config.data.store is None:  # earlier versions kept it there
        for folder in (base, base / "confidential"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                paths = parse_json((folder / _PATHS).read_bytes())
                found = {"data.store": paths["store"]}
                if _public_store(config) is not None:
                    found["model.public_store"] = paths["public_store"]
                return with_settings(config, found)
    return config


def held_back(path: Path) -> bool:
    """Return whether weights lie in a checkpoint that the clock asked for, of a run whose results
    are private: its step depends on private batches, so what is computed from it is confidential.

    Args:
        path: a checkpoint folder, or a file in it; links are resolved.

    Raises:
        CheckpointError: the files of its run cannot be read.
    """
    path = path.resolve()
    for step in (path, *path.parents):
        checkpoints, root = step.parent, step.parent.parent.parent
        if step.name.startswith("step-") and checkpoints.parts[-2:] == (
            "confidential",
            "checkpoints",
        ):
            return run_base(root) is None or read_run(root)[2]["results_visibility"] != "public"
    return False


def require_confidential(
    out: Path, where: str, what: str, remedy: str = "", *, name: str = "out"
) -> None:
    """Refuse to write what depends on private records outside of a folder named ``confidential``.

    Args:
        where: the command, for the error.
        what: content of the file, for the error.
        remedy: another remedy, appended to the error.
        name: the option that gives the file.

    Raises:
        ConfigError: no folder of ``out`` is named ``confidential``, after ``..`` and links.
    """
    if "confidential" not in out.parent.resolve().parts:
        raise ConfigError(
            f"{where}: {name}={str(out)!r} would hold {what}; expected a folder called "
            f"confidential in its path. Use {out.parent / 'confidential' / out.name}{remedy}."
        )


def discard_run(folder: RunFolder, files: Iterable[str]) -> None:
    """Remove the folder of a run that could not start: its description, ``files``, and the folders
    if they are then empty.
    """
    (folder.confidential / _PATHS).unlink(missing_ok=True)
    for name in ("config.json", "run.json", *files):
        (folder.base / name).unlink(missing_ok=True)
    (folder.root / ".lock").unlink(missing_ok=True)
    for empty in (folder.confidential, folder.root):
        with contextlib.suppress(OSError):  # not empty: it has files of the user
            empty.rmdir()


def open_run(root: Path) -> RunFolder:
    """Lock an existing run folder.

    Raises:
        CheckpointError: there is no run, its files cannot be read, or it is in use.
    """
    base, _, about = read_run(root)
    return RunFolder(root, base, about["run_id"], _lock(root))


def read_run(root: Path) -> tuple[Path, RunConfig, dict[str, Any]]:
    """Return the folder of a run's files, its config and its run.json; takes no lock.

    Raises:
        CheckpointError: there is no run, or its files cannot be read.
    """
    base = run_base(root)
    if base is None or not (base / "run.json").exists():  # a model hub's folder has config.json
        raise CheckpointError(
            f"run: {root} holds no run; expected a run's folder, with config.json and run.json. "
            f"{_runs_in(root.parent)}"
        )
    try:
        about = parse_json((base / "run.json").read_bytes())
        if about["format"] != FORMAT or not about["run_id"]:
            raise ValueError("unknown format")
        for name in ("store_id", "store_visibility", "guarantee"):
            about[name]
        config = _settings(parse_json((base / "config.json").read_bytes()), base, "config.json")
        return base, config, about
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = remedy_for(error, "Restore run.json and config.json as the run wrote them.")
        raise CheckpointError(f"run: {base} cannot be read ({error!r}). {remedy}") from None


def run_base(root: Path) -> Path | None:
    """Return the folder of a run's files, or None if there is no run."""
    return next((b for b in (root, root / "confidential") if (b / "config.json").exists()), None)


def _runs_in(folder: Path) -> str:
    """Name the runs in a folder, for an error."""
    names = []
    with contextlib.suppress(OSError):
        bases = {path.name: run_base(path) for path in folder.iterdir()}
        names = sorted(n for n, base in bases.items() if base and (base / "run.json").exists())
    if not names:
        return (
            f"There is no run in {folder}: correct the path (with --resume: --runs and --name), or "
            "train one first."
        )
    return (
        f"The runs in {folder} are "
        f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}: give one of them "
        "(with --resume: --name)."
    )


OTHERS_WEIGHTS = ("timm:", "vip:", "mae:", "dpcap:")
"""Starts of ``RunConfig.init_from`` that name weights of others, not a run."""


def require_parent(init_from: str | None) -> None:
    """Refuse initial weights from a run that is not there.

    Raises:
        CheckpointError: names the command that makes it.
    """
    if init_from is None or Path(init_from).exists():
        return
    name = Path(init_from).name
    make = (
        f"Make it with `dpvision train {name}`"
        if name.startswith("synthetic.")
        else "Change --init-from"
    )
    raise CheckpointError(
        f"run: init_from={init_from!r} does not exist; expected the run that this one starts from. "
        f"{make}, or pass --init-from None for random weights."
    )


def _lock(root: Path) -> IO[str]:
    lock = open(root / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise CheckpointError(
            f"run: {root} is in use by another process. Wait for it, stop it, or choose another "
            "--name."
        ) from None
    return lock
