"""Defaults of the libraries under torch, set in the environment before they read it; a value that
the user sets stands.

MKL and cuBLAS: the bits of a product must depend on its operands and shapes only
(dp/reference_bits.py). By default MKL may use fewer threads under load, and the last bits of small
products depend on where in memory their operands lie. MKL_CBWR=AUTO keeps the instruction set.

OpenMP: the wheels of torch bring GNU's libgomp, whose threads keep their core busy for milliseconds
at the end of every parallel loop. Beside any other process that stops both. libgomp reads the
environment once, when torch is imported; a value set later has no effect.
"""

import os
import sys

PARENT = os.getppid()
"""The process that started this one, noted before the seconds of imports: under torchrun its agent,
whose end ends a run.
"""
_PRODUCTS = {"MKL_DYNAMIC": "FALSE", "MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Read at the first product; if another library made one before, ``clip.check_bits`` still finds
what that leaves open.
"""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables by which a user decides how threads wait: OpenMP's own, GNU's, and Intel's and
LLVM's.
"""


def own_cores() -> int:
    """Return the cores that this process may use: its share where torchrun started several."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def set_defaults() -> None:
    """Set what is not set, for this process and those that it starts."""
    for name, value in _PRODUCTS.items():
        os.environ.setdefault(name, value)
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
