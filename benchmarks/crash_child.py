"""Run a ``dpvision`` command in a forked child, which is killed or gets a full disk at one place.

A fork starts with all imports done, so that every place lies in the command's own work. The child
counts its file operations (writes, syncs, renames, new files and folders) and appends what it
releases to a trace: the digest of each start's keys and the number of each step to which noise was
added.
"""

import builtins
import contextlib
import errno
import hashlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OPERATIONS = (
    "write", "pwrite", "fsync", "fdatasync", "replace", "rename", "mkdir", "sendfile"
)  # fmt: skip
TAKE_SPACE = ("write", "pwrite", "fsync", "fdatasync", "mkdir", "sendfile", "open")
_LIMIT_S = 300.0
_open, _write, _kill, _pid = builtins.open, os.write, os.kill, os.getpid


@dataclass(frozen=True)
class Stop:
    """Where a command is stopped, and how; at most one of ``cpu_s`` and ``operation`` is given."""

    signal: int | None = None
    """The signal to send; None for a disk that is full from ``operation`` on."""
    cpu_s: float | None = None
    operation: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    """As of ``subprocess``: negative for a signal."""
    text: str
    """Standard output and standard error."""
    cpu_s: float
    wall_s: float
    trace: list[dict[str, Any]] = field(repr=False)

    @property
    def operations(self) -> int:
        return max((e["operations"] for e in self.trace if "operations" in e), default=0)

    @property
    def stopped(self) -> bool:
        """Whether the child met the place of its ``Stop``."""
        return any("stopped" in entry for entry in self.trace)


def run_command(
    argv: Sequence[str],
    folder: Path,
    stop: Stop = Stop(),
    *,
    key: bytes | None = None,
    name: str = "",
) -> Outcome:
    """Run ``dpvision ARGV`` in ``folder``.

    Args:
        key: what both keys of a start are made from, so that two starts of equal steps have equal
            noise; if None, they are new.
        name: of this process among several in one folder.
    """
    out, log = folder / f".out{name}", folder / f".trace{name}"
    for file in (out, log):
        file.write_bytes(b"")
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(argv, folder, out, log, stop, key)
    clock, sent, cpu_s = (~child << 3) | 2, stop.cpu_s is None, 0.0
    while True:
        with contextlib.suppress(OSError):
            cpu_s = max(cpu_s, time.clock_gettime(clock))
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if not sent and cpu_s >= (stop.cpu_s or 0):
            assert stop.signal is not None
            _kill(child, stop.signal)
            with _open(log, "ab") as file:
                file.write(b'{"stopped": "time"}\n')
            sent = True
        if time.monotonic() - start > _LIMIT_S:
            _kill(child, signal.SIGKILL)
        time.sleep(0.02 if sent else 0.003)
    return Outcome(
        os.waitstatus_to_exitcode(status),
        out.read_text(errors="replace"),
        cpu_s,
        time.monotonic() - start,
        [json.loads(line) for line in log.read_text().splitlines()],
    )


def _be_child(
    argv: Sequence[str], folder: Path, out: Path, log: Path, stop: Stop, key: bytes | None
) -> None:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(folder)
        fd = os.open(out, os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout = _open(1, "w", closefd=False)
        sys.stderr = _open(2, "w", closefd=False)
        trace = os.open(log, os.O_WRONLY | os.O_APPEND)
        say = lambda entry: _write(trace, json.dumps(entry).encode() + b"\n")  # noqa: E731
        count = _count_operations(stop, say)
        trace_releases(say, key)
        from dpvision.cli import main

        try:
            status = main(argv)
        except SystemExit as error:
            code = error.code
            status = code if isinstance(code, int) else int(code is not None)
        say({"operations": len(count), "names": count})
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        with contextlib.suppress(OSError):
            _write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def trace_releases(say: Callable[[dict[str, Any]], object], key: bytes | None) -> None:
    """Note the keys of a start, and each step to which noise is added, before it is used."""
    from dpvision.adapt import release
    from dpvision.privacy import stream
    from dpvision.runs import run
    from dpvision.train import loop

    class Noted(stream.Key):
        __slots__ = ()

        def __init__(self) -> None:
            super().__init__()
            say({"key": hashlib.sha256(self.secret()).hexdigest()[:16]})
            if key is not None:
                self._hold(key)

    made = run.Secrets.__init__
    real = loop.privatize

    def init(self: Any, draw: Any = None, noise: Any = None) -> None:
        made(self, draw or Noted(), noise or Noted())

    def privatize(total: Any, plan: Any, step: int, *args: Any, **named: Any) -> Any:
        gradient = real(total, plan, step, *args, **named)
        digest = hashlib.sha256()
        for name in sorted(gradient.grads):
            digest.update(gradient.grads[name].cpu().numpy().tobytes())
        say({"release": step, "digest": digest.hexdigest()[:16]})
        return gradient

    run.Secrets.__init__ = init  # type: ignore[method-assign,assignment]
    loop.privatize = privatize
    release.privatize = privatize


def _count_operations(stop: Stop, say: Callable[[dict[str, Any]], object]) -> list[str]:
    """Count file operations, and stop the process at one of them; return their names so far."""
    names: list[str] = []

    def before(name: str) -> None:
        names.append(name)
        if stop.operation is None:
            return
        if len(names) == stop.operation:
            say({"stopped": name})
            if stop.signal is not None:
                _kill(_pid(), stop.signal)
        if stop.signal is None and len(names) >= stop.operation and name in TAKE_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if not (name == "write" and args[0] <= 2):  # the terminal is no disk
                before(name)
            return real(*args, **named)

        return call

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            try:
                before("write")
            except OSError:
                super().write(memoryview(data)[: len(data) // 2])  # the disk had that much
                raise
            return super().write(data)

    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+"):
            return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        before("open")
        raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        made: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return made
        text = io.TextIOWrapper(made, encoding, errors, newline, buffering == 1)
        text.mode = mode
        return text

    for name in _OPERATIONS:
        setattr(os, name, counted(name, getattr(os, name)))
    builtins.open = io.open = opened
    return names


def forked(function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns, a JSON value, computed in a child: threads that it starts
    would not survive the next fork.

    Raises:
        AssertionError: it raised that.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            value = {"value": function()}
        except AssertionError as error:
            value = {"error": str(error)}
        except BaseException:
            import traceback

            value = {"error": traceback.format_exc()}
        with _open(write, "w") as file:
            json.dump(value, file)
        os._exit(0)
    os.close(write)
    with _open(read) as file:
        found = json.load(file)
    os.waitpid(child, 0)
    if "error" in found:
        raise AssertionError(found["error"])
    return found["value"]
