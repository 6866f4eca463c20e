"""Keep memory freed by a step for the next one.

The C library returns large blocks to the system as soon as they are freed, and the next step has to
map new pages: a tenth of a training step on a CPU, private or not. A training process needs the
same memory again at once, so it can keep it.
"""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1


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
