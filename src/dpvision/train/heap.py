"""Keep memory freed by a step for the next one.

The C library returns large blocks to the system as soon as they are freed, and the next step has to map new pages: a tenth of a training
step on a CPU, private or not. A training process needs the same memory again at once, so it can keep it.
"""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc refuses a larger one on 64-bit machines."""
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc not to return freed memory to the system. Returns whether it accepted; without glibc, False."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER_TRIM))
