"""What a processor can do for a run, memory that a process keeps, and sending tensors to a GPU
without waiting.
"""

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.environment import own_cores
from dpvision.errors import ConfigError, PrivacyError

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1
_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables by which oneDNN uses fewer instructions than a processor has."""
_PROCESSOR = (
    "vendor_id",
    "cpu family",
    "model",
    "stepping",
    "cache size",
    "flags",
    "CPU",
    "Features",
)
"""Lines of /proc/cpuinfo that say which processor it is, on x86 and ARM."""


def keep_freed_memory() -> bool:
    """Tell glibc not to return freed memory to the system. Returns whether it accepted; without
    glibc, False.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        # No block as a mapping of its own, which is unmapped when freed: the threshold for those is
        # at most 32 MiB, and a layer's attention scores can be larger.
        _MMAP_MAX: 0,
        _TRIM_THRESHOLD: _NEVER,
        # One arena for all threads: what one thread frees, another can use.
        _ARENA_MAX: 1,
    }
    return all([mallopt(parameter, value) for parameter, value in settings.items()])


def send(value: Tensor, device: torch.device) -> Tensor:
    """Return ``value`` on ``device``; the host does not wait for the copy, nor for what the device
    still computes.

    A copy to a GPU is asynchronous from pinned memory only. Elsewhere ``pin_memory`` raises, so
    nothing is pinned.
    """
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


@contextlib.contextmanager
def fixed_kernels() -> Iterator[None]:
    """Within the context, the settings and the shapes alone choose the kernels: neither time, nor
    load, nor an order of atomic additions.

    Raises:
        PrivacyError: the model uses an operation that has no deterministic form on this device.
    """
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    timed = torch.backends.cudnn.benchmark
    torch.set_num_threads(torch.get_num_threads())  # from here on MKL does not use fewer
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # True fills every new tensor
    torch.backends.cudnn.benchmark = False
    _set_deterministic(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise PrivacyError(
            f"bits: {str(error).splitlines()[0]} Expected an operation whose bits depend on its "
            "inputs only. Use another one in the model."
        ) from None
    finally:
        _set_deterministic(deterministic, warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = timed


def _set_deterministic(mode: bool, warn_only: bool = False) -> None:
    """Call ``torch.use_deterministic_algorithms``, which imports PyTorch's compiler for a setting
    of it, two seconds of every start; not where nothing has imported it, as ``torch.compile`` does.
    """
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def require_cuda() -> None:
    """Raise ConfigError, with the reason, if there is no CUDA device."""
    if torch.cuda.is_available():
        return
    reason = (
        f"torch {torch.__version__} is built without CUDA"
        if torch.version.cuda is None
        else f"torch {torch.__version__} finds no GPU with a driver for CUDA {torch.version.cuda} "
        "(see nvidia-smi)"
    )
    raise ConfigError(
        f"hardware: device='cuda'; expected a CUDA device: {reason}. Fix that, or use "
        "--hardware.device auto."
    )


def require_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError if a GPU or its driver does not compute in ``precision``, one of
    HardwareConfig's.
    """
    if (
        precision == "bfloat16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        name, (major, minor) = (
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
        )
        raise ConfigError(
            f"hardware: precision='bfloat16' on {name}, compute capability {major}.{minor}; "
            "expected a GPU of capability 8.0 or newer and a driver that supports it. Use "
            "--hardware.precision float16."
        )


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a CPU has instructions for products of bfloat16 (AVX512_BF16, as all x86
    processors with AMX have); False for other devices.
    """
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def kernels(device: str | torch.device) -> list[str]:
    """Return what decides by which kernels a device computes: equal lists give equal bits."""
    device = torch.device(device)
    if device.type == "cuda":
        return [torch.__version__, torch.cuda.get_device_name(device)]
    decides = [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        f"{torch.get_num_threads()} threads",
        *(f"{name}={os.environ.get(name)}" for name in _ISA),
        platform.machine(),
    ]
    with contextlib.suppress(OSError):
        one = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        decides += [line for line in one.splitlines() if line.startswith(_PROCESSOR)]
    return decides


def slow_precision(precision: str, device: torch.device) -> str | None:
    """Return a sentence if a device computes several times faster in another precision, or None.

    x86 CPUs without AVX-512 have no bfloat16 instructions; of others (``get_cpu_capability``
    "DEFAULT" or "SVE256") it is not known. GPUs with bfloat16 have units for matrix products that
    float32 does not use.
    """
    if (
        precision == "float32"
        and device.type == "cuda"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return (
            "--hardware.precision bfloat16 is several times faster on this GPU; the bound on a "
            "record's contribution is then measured, not proven (docs/clipping.md)."
        )
    if (
        precision != "bfloat16"
        or device.type != "cpu"
        or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "NO AVX")
    ):
        return None
    return (
        "This CPU has no bfloat16 instructions: --hardware.precision float32 is several times "
        "faster."
    )


def loader_threads(workers: int | None, device: torch.device) -> int:
    """Return the number of threads that read and decode images.

    Args:
        workers: HardwareConfig's; if None, from 2 to 16: this process's share of the cores, and on
            a CPU, which computes with the others, a quarter of it.
    """
    if workers is not None:
        return workers
    return min(16, max(2, own_cores() // (4 if device.type == "cpu" else 1)))


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor on the CPU to fill for ``send``: pinned where ``device`` is a GPU, so
    that ``send`` need not copy it to pinned memory first.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


_VECTOR, _LEAST_VECTORS = 4, 128
"""Of CUDA's sums (ATen/native/cuda/Reduce.cuh): numbers that are read at once, and the length of a
row from which they are.
"""


def adds_by_place(device: torch.device) -> bool:
    """Whether a sum over a long row depends on where it begins in memory: yes but for a CPU."""
    return device.type != "cpu"


def row_sums(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sums over the last dimension, whose bits do not depend on where a row begins in memory."""
    return padded_rows(value).sum(-1, dtype=dtype)


def padded_rows(value: Tensor) -> Tensor:
    """The tensor, off the CPU with zeros after each row of its last dimension where rows begin at
    different places of an aligned vector: a GPU's sum adds what lies before the first such vector
    last.
    """
    if not adds_by_place(value.device) or value.shape[-1] < _LEAST_VECTORS:
        return value
    steps = [value.stride(dim) for dim in range(value.ndim - 1) if value.shape[dim] > 1]
    if all(step % _VECTOR == 0 for step in (*steps, value.storage_offset())):
        return value
    return F.pad(value, (0, -value.shape[-1] % _VECTOR))
