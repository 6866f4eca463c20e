"""How OpenMP's threads wait for each other: a default for the environment, set before torch loads its runtime.

The wheels of torch bring GNU's libgomp, whose threads keep their core busy for milliseconds at the end of every parallel loop. Beside any
other process that stops both. libgomp reads the environment once, when torch is imported; a value set later has no effect.
"""

import os
import sys

_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables by which a user decides: OpenMP's own, GNU's, and Intel's and LLVM's."""


def set_wait_policy() -> None:
    """Set OMP_WAIT_POLICY=PASSIVE for this process and those that it starts, unless one of ``_SETTINGS`` is set or torch is imported."""
    if "torch" not in sys.modules and not any(name in os.environ for name in _SETTINGS):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
