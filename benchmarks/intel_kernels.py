"""MKL's kernels for Intel processors, on another processor with AVX-512.

MKL asks the processor for its maker, and takes kernels for AVX-512 only on Intel's; on others those
for AVX2. The kernels differ in what is slow: narrow products of rows that begin a multiple of 2 KB
apart took twice as long (docs/log/2026-11-28-gram-panels-avx512.md). So figures for both kinds can
come from one machine; the times are still not those of an Intel processor.
"""

import ctypes
from pathlib import Path

import torch
from common import cpu_name

_AVX512 = 7
"""What MKL calls the kind of processor (``mkl_serv_cpu_detect``)."""
_LOAD = b"\x8b\x05"
"""x86-64: load the number at a distance, the next four bytes, from the next instruction."""


def take_intel_kernels() -> str:
    """Make MKL take this processor for Intel's, before the first product of the process; return
    the device's name for results.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    for name in ("mkl_serv_intel_cpu_true", "mkl_serv_intel_cpu"):
        if not hasattr(library, name):
            raise SystemExit("intel_kernels: this PyTorch has no MKL; leave the option out")
        # Each begins by loading the answer that it has kept, -1 before the first question.
        begin = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert begin is not None
        code = ctypes.string_at(begin, 6)
        if code[:2] != _LOAD:
            raise SystemExit(f"intel_kernels: {name} is not as in MKL 2024.2; leave the option out")
        distance = int.from_bytes(code[2:], "little", signed=True)
        kept = ctypes.c_int.from_address(begin + 6 + distance)
        if kept.value != -1:
            raise SystemExit("intel_kernels: MKL has been used before; take its kernels first")
        kept.value = 1
    if (kind := library.mkl_serv_cpu_detect()) != _AVX512:
        raise SystemExit(f"intel_kernels: MKL takes kernels of kind {kind} here; needs AVX-512")
    return f"{cpu_name()}, MKL's kernels for Intel"
