"""Script that ``unpickle.py`` runs in a separate process: reads a pickle of tensors on standard
input and writes safetensors.

It is started with ``python -I -S``, without environment, in an empty folder, and drops network
access if Linux allows it. It first scans the pickle's opcodes without executing them and refuses
every name that tensors do not need. Then it limits its memory, CPU time and output size, and calls
``torch.load(weights_only=True)``. It imports nothing of dpvision.
"""

import contextlib
import ctypes
import json
import os
import pickletools
import re
import resource
import sys
import zipfile
from typing import Any

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # linux/sched.h
_MARGIN_BYTES = 1 << 30
_WRAPPERS_DEEP = 8
_REFUSED = 3
_LEGACY_PICKLES = 5  # magic number, protocol, system, object, keys of storages; then bytes
_ALLOWED = re.compile(
    r"collections OrderedDict|argparse Namespace|torch Size|torch device"
    r"|torch\.nn\.parameter Parameter"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch (\w+Storage)|torch\.storage (TypedStorage|UntypedStorage|_LegacyStorage)"
    r"|torch (bool|b?float\d+|float8_\w+|double|half|u?int\d+|long|short|complex\d+)"
)
_INDIRECT = (
    "STACK_GLOBAL",
    "INST",
    "OBJ",
    "NEWOBJ_EX",
    "EXT1",
    "EXT2",
    "EXT4",
)  # opcodes for names and objects that torch.save does not use


class Refused(Exception):
    """The file is refused; the text is the reason."""


class Inert:
    """Replacement for ``argparse.Namespace`` that discards its state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def main(settings: dict[str, Any]) -> None:
    """Read the pickle from file descriptor 0 and write safetensors to ``settings["out"]``."""
    _leave_the_network()
    size = os.fstat(0).st_size
    with open(0, "rb", closefd=False) as file:
        _check_names(file, size)
    sys.path += settings["path"]
    import torch  # before the limits: its own libraries need address space
    from safetensors.torch import save

    torch.set_num_threads(1)
    _limit(size, settings["seconds"])
    with open(0, "rb", closefd=False) as file:
        file.seek(0)
        try:
            with torch.serialization.safe_globals([(Inert, "argparse.Namespace")]):
                loaded = torch.load(file, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from None
    tensors: dict[str, Any] = {}
    _collect(loaded, "", tensors, 0, torch)
    if not tensors:
        raise Refused("no tensors under names")
    if sum(t.numel() * t.element_size() for t in tensors.values()) > 2 * size:
        raise Refused("its tensors are larger than the file")
    blob = save(
        {name: t.detach().contiguous().clone() for name, t in tensors.items()},
        metadata=settings["note"],
    )
    with open(settings["out"], "wb", closefd=False) as out:
        out.write(blob)


def _leave_the_network() -> None:
    # A user namespace too, so that it works without root; the process must still be
    # single-threaded. On other systems, or if it is forbidden, continue without it: the loader
    # opens no connections, and this is only defence in depth.
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NET)


def _limit(size: int, seconds: int) -> None:
    def no_more_than(what: int, limit: int) -> None:
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses limits on address space
            resource.setrlimit(what, (limit, limit))

    used = resource.getrusage(resource.RUSAGE_SELF)
    no_more_than(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
    no_more_than(resource.RLIMIT_FSIZE, 2 * size + (1 << 24))
    no_more_than(resource.RLIMIT_CORE, 0)
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            here = int(file.read().split()[0]) * resource.getpagesize()
        # the file's tensors, a contiguous copy, the bytes to be written and the reader's own
        # buffers
        no_more_than(resource.RLIMIT_AS, here + 5 * size + _MARGIN_BYTES)


def _check_names(file: Any, size: int) -> None:
    """Check that every pickle names only what tensors need, and that an archive is not compressed
    (torch.save only stores).
    """
    magic = file.read(4)
    file.seek(0)
    if magic != b"PK\x03\x04":  # torch's own test: a pickle with an archive behind it is a pickle
        for number in range(_LEGACY_PICKLES):
            try:
                _check_pickle(file)
            except Refused:
                raise
            except Exception as error:
                if number == 0:
                    raise Refused(f"it is neither an archive nor a pickle ({error})") from None
                raise Refused(f"its pickle is truncated or damaged ({error})") from None
        return
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        if unpacked > size:
            raise Refused(f"it unpacks to {unpacked} bytes, more than its own {size}")
        for member in members:
            if member.filename.endswith(".pkl"):
                with archive.open(member) as inner:
                    _check_pickle(inner)


def _check_pickle(file: Any) -> None:
    for code, argument, _ in pickletools.genops(file):
        if code.name in _INDIRECT:
            raise Refused(f"its pickle uses {code.name}, which torch.save does not")
        if code.name == "GLOBAL" and not _ALLOWED.fullmatch(str(argument)):
            raise Refused(
                f"its pickle names {str(argument).replace(' ', '.')}, which no tensor needs"
            )


def _collect(value: Any, name: str, found: dict[str, Any], depth: int, torch: Any) -> None:
    """Collect dense tensors from nested dictionaries with string keys; ignore everything else."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise Refused(f"tensor {name!r} is sparse, quantised or without data")
        held = value.untyped_storage().nbytes()
        if value.numel() * value.element_size() > held:
            raise Refused(f"tensor {name!r} needs more than its storage of {held} bytes")
        found[name] = value
    elif isinstance(value, dict) and depth < _WRAPPERS_DEEP:
        for key, inner in value.items():
            if type(key) is str:
                _collect(inner, f"{name}.{key}" if name else key, found, depth + 1, torch)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Refused as error:
        print(str(error)[:2000])
        sys.exit(_REFUSED)
    except (MemoryError, OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        print(
            "it is damaged, or needs more memory or space than its size explains "
            f"({type(error).__name__}: {error})"[:2000]
        )
        sys.exit(_REFUSED)
