"""Pickles from elsewhere: what is in them comes back as tensors, what they would do does not
happen.
"""

import argparse
import hashlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dpvision.encoders import unpickle, unpickle_worker
from dpvision.encoders.unpickle import load_pickle_safely
from dpvision.encoders.weights_file import open_weights
from dpvision.errors import CheckpointError


def _published(path: Path, **options) -> dict[str, torch.Tensor]:
    """A checkpoint as training scripts leave them; returns the tensors that should come out."""
    generator = torch.Generator().manual_seed(0)
    turned = torch.randn(3, 4, generator=generator).t()
    model = {
        "turned.weight": turned,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "tied": turned,
        "steps": torch.tensor(7),
    }
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    rest = {
        "optimizer": optimizer,
        "args": argparse.Namespace(lr=0.1, names=["a"]),
        "epoch": 3,
        "best": None,
    }
    torch.save({"model": model, **rest}, path, **options)
    return {f"model.{name}": tensor for name, tensor in model.items()}


class _Calls:
    """Pickled, it asks for a call when it is opened."""

    def __init__(self, function, *args) -> None:
        self.asked = function, args

    def __reduce__(self):
        return self.asked


def _with_program(path: Path, program: bytes) -> None:
    """A file of torch.save whose pickle is ``program``."""
    torch.save({"a": torch.ones(3)}, path.with_suffix(".plain"))
    with zipfile.ZipFile(path.with_suffix(".plain")) as plain, zipfile.ZipFile(path, "w") as made:
        for member in plain.infolist():
            made.writestr(
                member.filename,
                program if member.filename.endswith("data.pkl") else plain.read(member),
            )


def _archive_bomb(path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 22)}, path.with_suffix(".plain"))
    with (
        zipfile.ZipFile(path.with_suffix(".plain")) as plain,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for member in plain.infolist():
            bomb.writestr(member.filename, plain.read(member))


def _endless(path: Path) -> None:
    """A pair of the same pair, seventy times, as the key of a dictionary: its hash visits 2^70
    leaves.
    """
    _with_program(path, b"\x80\x02}K\x01\x85" + b"q\x00h\x00\x86" * 70 + b"K\x01s.")


def test_what_a_published_checkpoint_holds_comes_back_and_is_kept_under_its_digest(
    tmp_path, monkeypatch
):
    path = tmp_path / "new.pth"
    expected = _published(path)
    first = load_pickle_safely(path)
    assert first.keys() == expected.keys()
    for name, tensor in expected.items():
        assert first[name].dtype == tensor.dtype and torch.equal(first[name], tensor), name
    with unpickle.safe_open(tmp_path / "new.pth.safetensors", "pt") as kept:
        assert kept.metadata() == {
            "sha256_of_pickle": hashlib.sha256(path.read_bytes()).hexdigest()
        }
    with monkeypatch.context() as patch:
        patch.setattr(unpickle, "_convert", lambda *_: pytest.fail("opened the pickle again"))
        assert load_pickle_safely(path).keys() == expected.keys()
    # torch's older format, under the same name: what was kept is of another pickle now
    torch.save(
        {"other": torch.arange(3), "shown": torch.nn.Parameter(torch.ones(2))},
        path,
        _use_new_zipfile_serialization=False,
    )
    again = load_pickle_safely(path)
    assert {name: tensor.tolist() for name, tensor in again.items()} == {
        "other": [0, 1, 2],
        "shown": [1, 1],
    }


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (_Calls(os.system, "touch {}"), "system"),
        (_Calls(eval, "open({!r}, 'w')"), "eval"),
        (_Calls(getattr, _Calls(__import__, "os"), "mkdir"), "getattr"),
    ],
    ids=["system", "eval", "chain"],
)
@pytest.mark.parametrize("in_zip", [True, False], ids=["zip", "legacy"])
def test_a_pickle_that_calls_something_is_refused_by_name_and_does_nothing(
    tmp_path, call, named, in_zip
):
    function, args = call.asked
    planted = _Calls(
        function, *(a.format(str(tmp_path / "harm")) if isinstance(a, str) else a for a in args)
    )
    path = tmp_path / "evil.pth"
    torch.save(
        {"model": {"a": torch.ones(3)}, "args": planted},
        path,
        _use_new_zipfile_serialization=in_zip,
    )
    with pytest.raises(CheckpointError, match=named):
        load_pickle_safely(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil.pth"]


def test_a_pickle_with_an_archive_behind_it_is_read_as_torch_would_read_it(tmp_path):
    torch.save(
        _Calls(os.system, "true"), tmp_path / "pickle.pth", _use_new_zipfile_serialization=False
    )
    torch.save({"a": torch.ones(3)}, tmp_path / "archive.pth")
    (tmp_path / "both.pth").write_bytes(
        (tmp_path / "pickle.pth").read_bytes() + (tmp_path / "archive.pth").read_bytes()
    )
    assert zipfile.is_zipfile(tmp_path / "both.pth")
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        load_pickle_safely(tmp_path / "both.pth")


def test_the_planted_calls_would_have_done_harm(tmp_path):
    """Python's own unpickler does run them: the refusals above are not about harmless files."""
    pickle.loads(pickle.dumps(_Calls(eval, f"open({str(tmp_path / 'harm')!r}, 'w').close()")))
    assert (tmp_path / "harm").exists()


def test_an_archive_that_unpacks_to_more_than_itself_is_refused(tmp_path):
    _archive_bomb(tmp_path / "bomb.pth")
    assert (tmp_path / "bomb.pth").stat().st_size < 100_000
    with pytest.raises(CheckpointError, match=r"unpacks to 16\d+ bytes"):
        load_pickle_safely(tmp_path / "bomb.pth")


@pytest.mark.slow
def test_tensors_without_bytes_behind_their_numbers_are_refused(tmp_path):
    torch.save({"huge": torch.ones(1).expand(10**12)}, tmp_path / "huge.pth")
    with pytest.raises(CheckpointError, match="'huge' needs more than its storage"):
        load_pickle_safely(tmp_path / "huge.pth")


@pytest.mark.slow
def test_a_pickle_that_wants_memory_is_stopped(tmp_path):
    # an allowed name, asked for four gigabytes out of a file of a kilobyte
    torch.save({"big": _Calls(torch.UntypedStorage, 1 << 32)}, tmp_path / "big.pth")
    with pytest.raises(CheckpointError, match="allocate"):
        load_pickle_safely(tmp_path / "big.pth")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "num_bytes"),
    [
        (_archive_bomb, 1 << 24),
        (lambda path: torch.save({"a": torch.ones(1).expand(10**12)}, path), 4 * 10**12),
        (lambda path: torch.save({"a": _Calls(torch.UntypedStorage, 1 << 31)}, path), 1 << 31),
        (lambda path: torch.save({"a": _Calls(bytearray, 1 << 26)}, path), 1 << 26),
    ],
    ids=["archive", "expanded", "storage", "bytearray"],
)
def test_torchs_loader_alone_takes_what_is_refused_here(tmp_path, write, num_bytes):
    """Why the process of its own stays. If torch refuses these one day, read ``unpickle`` again."""
    write(tmp_path / "file.pth")
    assert (tmp_path / "file.pth").stat().st_size < 30_000
    taken = torch.load(tmp_path / "file.pth", map_location="cpu", weights_only=True)["a"]
    held = taken.numel() * taken.element_size() if isinstance(taken, torch.Tensor) else len(taken)
    assert held == num_bytes
    with pytest.raises(CheckpointError, match="was refused"):
        load_pickle_safely(tmp_path / "file.pth")


@pytest.mark.slow
def test_torchs_loader_alone_does_not_end_where_this_one_does(tmp_path):
    _endless(tmp_path / "endless.pth")
    program = (
        "import resource, sys, torch\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 3,) * 2)\n"
        "torch.load(sys.argv[1], weights_only=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "endless.pth"], capture_output=True, check=False
    )
    assert done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)


@pytest.mark.parametrize(
    "name", ["posix system", "builtins bytearray", "torch.hub load", "torch load", "os path.join"]
)
def test_only_names_that_tensors_need_pass(name):
    assert not unpickle_worker._ALLOWED.fullmatch(name)


def test_names_that_come_by_another_way_are_refused(tmp_path):
    _with_program(tmp_path / "new.pth", pickle.dumps(os.system, protocol=4))
    with pytest.raises(CheckpointError, match="STACK_GLOBAL"):
        load_pickle_safely(tmp_path / "new.pth")


def test_a_pickle_that_never_ends_is_stopped(tmp_path, monkeypatch):
    _endless(tmp_path / "endless.pth")
    monkeypatch.setattr(unpickle, "TIME_S", 1)
    with pytest.raises(CheckpointError, match="ended by signal"):
        load_pickle_safely(tmp_path / "endless.pth")
    assert not (tmp_path / "endless.pth.safetensors").exists()


@pytest.mark.parametrize("content", ["truncated", "text", "nothing", "no tensors"])
def test_what_is_no_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "file.pth"
    _published(path)
    if content == "no tensors":
        torch.save({"epoch": 3}, path)
    else:
        path.write_bytes(
            {"truncated": path.read_bytes()[:700], "text": b"<!DOCTYPE html>", "nothing": b""}[
                content
            ]
        )
    with pytest.raises(CheckpointError, match="was refused"):
        load_pickle_safely(path)


def test_a_missing_file_and_a_foreign_copy_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        load_pickle_safely(tmp_path / "none.pth")
    _published(tmp_path / "a.pth")
    save_file({"own": torch.ones(2)}, tmp_path / "a.pth.safetensors")
    with pytest.raises(CheckpointError, match="not made from a pickle"):
        load_pickle_safely(tmp_path / "a.pth")
    assert list(open_weights(tmp_path / "a.pth.safetensors", {}).tensors) == ["own"]
    (tmp_path / "b.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="expected a safetensors file"):
        open_weights(tmp_path / "b.safetensors", {})


def test_the_process_sees_no_environment_and_where_linux_lets_it_no_network(tmp_path):
    """The worker's own first steps, run alone, and then a call to a server of this test."""
    server = socket.create_server(("127.0.0.1", 0))
    answered = []
    threading.Thread(target=lambda: answered.append(server.accept()), daemon=True).start()
    worker = unpickle_worker.__file__
    program = (
        f"import os, runpy, socket, ctypes; w = runpy.run_path({worker!r}); "
        "w['_leave_the_network']()\n"
        "try:\n"
        f" socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2); "
        "print('reached')\n"
        "except OSError: print('cut off')"
    )
    allowed = (
        subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True, check=False)
        if os.name == "posix"
        else None
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    if allowed is None or allowed.returncode != 0:
        pytest.skip("this system lets no process leave the network")
    assert done.stdout.strip() == "cut off" and not answered
