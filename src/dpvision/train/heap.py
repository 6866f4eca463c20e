"""Memory freed by a step is kept for the next one.

The C library hands large blocks back to the system as soon as they are free, and the next step pays for fresh pages: a tenth of
a training step on a CPU, private or not. A training process needs the same memory again at once, so it may as well keep it.
"""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc refuses a larger one on 64-bit machines."""
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc not to return freed memory to the system; returns whether it was asked. Elsewhere nothing is done."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER_TRIM))
