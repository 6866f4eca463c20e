"""Which functions of dpvision does one call enter, in which order?

    python scripts/call_path.py --setup "from dpvision.eval.probes.suite import evaluate; ..."
    "evaluate(run, train, test, workers=1)"

A stop is a function of dpvision that the call enters for the first time, in whichever thread;
lambdas, comprehensions and generated functions (a dataclass's ``__init__``) do not count. A climb
is a stop in a package that stands later in the order of imports than the stop before it: a reader
of the path goes back up. --setup is not traced.
"""

import argparse
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

# The order of imports (tests/test_imports.py), the lowest first; later packages may import earlier
# ones.
ORDER = (
    "errors",
    "files",
    "mixing",
    "openmp",
    "precision",
    "config",
    "weights",
    "privacy",
    "models",
    "synthetic",
    "checkpoint",
    "data",
    "dp",
    "optim",
    "runs",
    "train",
    "encoders",
    "eval",
    "adapt",
    "report",
    "cli",
    "recipes",
)


def call_path(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """(file below dpvision, function) of each stop, in order."""
    import dpvision

    root = str(Path(dpvision.__file__).parent) + "/"
    stops: dict[tuple[str, str], None] = {}

    def enter(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(root)
            and not code.co_name.startswith("<")
        ):
            stops.setdefault((code.co_filename.removeprefix(root), code.co_qualname))

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(stops)


def climbs(stops: list[tuple[str, str]]) -> int:
    """How often a stop is in a later package than the one before it."""
    ranks = [ORDER.index(file.partition("/")[0].removesuffix(".py")) for file, _ in stops]
    return sum(after > before for before, after in pairwise(ranks))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", default="", help="statements before the call")
    parser.add_argument("--verbose", action="store_true", help="list the stops")
    parser.add_argument("call", help="the expression to trace")
    args = parser.parse_args()
    names: dict[str, Any] = {}
    exec(args.setup, names)
    stops = call_path(lambda: eval(args.call, names))
    if args.verbose:
        print("\n".join(f"{file:40} {function}" for file, function in stops))
    print(f"{len(stops)} stops in {len({file for file, _ in stops})} files, {climbs(stops)} climbs")


if __name__ == "__main__":
    main()
