"""Files that survive: a real SIGKILL at every stage leaves the old ones, and the disk is asked in
the order that a power cut needs.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpvision import files
from dpvision.errors import CheckpointError
from dpvision.files import (
    append,
    create,
    make_folders,
    new_folder,
    replacing,
    write_file,
    write_json,
)

KILLED = """
import os, signal, sys
from pathlib import Path
from dpvision import files

target, stage = Path(sys.argv[1]), sys.argv[2]
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if stage == "renaming":
    Path.replace = Path.rename = files._exchange = kill
if target.name == "file":
    with files.replacing(target) as partial:
        partial.write_bytes(b"new" * 1000)
        if stage == "writing":
            kill()
else:
    with files.new_folder(target, replace=True) as folder:
        (folder / "a").write_bytes(b"new")
        if stage == "writing":
            kill()
"""


@pytest.mark.parametrize("stage", ["writing", "renaming"])
@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_kill_before_the_rename_leaves_what_was_there(
    tmp_path: Path, name: str, stage: str
) -> None:
    target = tmp_path / name
    if name == "file":
        target.write_bytes(b"old")
    else:
        target.mkdir()
        (target / "a").write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), stage], timeout=900)
    assert done.returncode == -signal.SIGKILL
    assert (target if name == "file" else target / "a").read_bytes() == b"old"
    write_file(tmp_path / "next", b"x")
    assert (tmp_path / "next").read_bytes() == b"x"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, name of the file or folder) of every sync and rename; a sync of a file with its
    size.
    """
    found: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        found.append(
            ("sync", f"{path.name} {path.stat().st_size}" if path.is_file() else path.name)
        )
        fsync(fd)

    def renamed(one: str | Path, two: str | Path) -> None:
        found.append(("rename", Path(two).name))
        rename(one, two)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", renamed)
    return found


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    partial = f".k.partial-{os.getpid()}"
    write_file(tmp_path / "k", b"12345")
    assert calls == [("sync", f"{partial} 5"), ("rename", "k"), ("sync", tmp_path.name)]
    calls.clear()
    create(tmp_path / "new", b"123")
    assert calls == [("sync", "new 3"), ("sync", tmp_path.name)]
    calls.clear()
    make_folders(tmp_path / "a" / "b")
    assert calls == [("sync", tmp_path.name), ("sync", "a")]


def test_every_file_of_a_folder_is_on_the_disk_before_its_name(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    with new_folder(tmp_path / "k", mode=0o700) as folder:
        (folder / "below").mkdir()
        (folder / "one").write_bytes(b"1")
        (folder / "below" / "two").write_bytes(b"12")
    before, after = calls[: calls.index(("rename", "k"))], calls[calls.index(("rename", "k")) + 1 :]
    assert set(before) == {
        ("sync", "one 1"),
        ("sync", "two 2"),
        ("sync", "below"),
        ("sync", f".k.partial-{os.getpid()}"),
    }
    assert after == [("sync", tmp_path.name)] and (tmp_path / "k").stat().st_mode & 0o777 == 0o700


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill_folder(path: Path) -> None:
    with new_folder(path, replace=True) as folder:
        (folder / "a").write_bytes(b"new")


def _replace(path: Path) -> None:
    with replacing(path) as partial:
        partial.write_bytes(b"new")


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (_replace, OSError),
        (lambda p: write_json(p, {}), CheckpointError),
        (_fill_folder, OSError),
        (lambda p: create(p, b"new"), OSError),
    ],
)
def test_a_disk_that_refuses_leaves_what_was_there_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], None],
    error: type[Exception],
) -> None:
    (tmp_path / "other").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(error, match="No space left on device"):
        write(tmp_path / "k")
    assert [p.name for p in tmp_path.iterdir()] == ["other"]
    if write is _replace:
        with pytest.raises(error):
            write(tmp_path / "other")
        assert (tmp_path / "other").read_bytes() == b"old"


def test_a_failing_block_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "k") as partial:
        partial.write_bytes(b"new")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "f"):
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["k"] and (tmp_path / "k").read_bytes() == b"old"


def test_what_must_be_new_is_not_replaced(tmp_path: Path) -> None:
    create(tmp_path / "k", b"old")
    with pytest.raises(FileExistsError):
        create(tmp_path / "k", b"new")
    assert (tmp_path / "k").read_bytes() == b"old"
    _fill_folder(tmp_path / "f")
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "f") as folder:
        (folder / "a").write_bytes(b"newer")
    assert (tmp_path / "f" / "a").read_bytes() == b"new"


def test_all_bytes_are_appended_where_the_system_takes_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, synced = os.write, []
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:3])))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with (tmp_path / "k").open("ab") as file:
        append(file.fileno(), b"0123456789")
    assert (tmp_path / "k").read_bytes() == b"0123456789" and synced == [10]


def test_a_kill_while_a_folder_is_replaced_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each rename; the next folder beside it removes what a kill left."""
    rename = Path.rename
    for number in range(1, 4):
        folder, renames = tmp_path / str(number) / "k", []
        with new_folder(folder) as partial:
            (partial / "a").write_text("old")

        def killed(self: Path, to: Path, number: int = number, renames: list = renames) -> Path:
            renames.append(to)
            if len(renames) >= number:
                raise KeyboardInterrupt
            return rename(self, to)

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(Path, "rename", killed)
            with new_folder(folder, replace=True) as partial:
                (partial / "a").write_text("new")
        with new_folder(folder.parent / "other"):
            pass
        assert (folder / "a").read_text() in ("old", "new")
        assert sorted(path.name for path in folder.parent.iterdir()) == ["k", "other"]


def test_nothing_else_renames_or_syncs() -> None:
    """One module for all of it; the feature cache has its own order of data, count and name."""
    source, own = Path(files.__file__).parent, {"files.py", "feature_cache.py"}
    words = ("os.fsync", "os.fdatasync", ".replace(path", "os.rename", "os.replace", ".rename(")
    found = {
        p.name
        for p in source.rglob("*.py")
        if p.name not in own and any(word in p.read_text() for word in words)
    }
    assert not found
