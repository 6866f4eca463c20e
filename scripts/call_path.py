"""Which functions of dpvision does a call enter, in which order?

    python scripts/call_path.py --walks             the walks below, a line each
    PYTHONPATH=/tmp/before/src python scripts/call_path.py --walks      in another checkout
    python scripts/call_path.py --setup "from dpvision import make_plan" "make_plan(...)"

A stop is a function of dpvision that the call enters for the first time, in whichever thread. What
runs while a module is imported does not count, nor do lambdas, comprehensions and generated
functions (a dataclass's ``__init__``). A climb is a stop in a package on a later line of the order
of imports (ORDER in the checkout's tests/test_imports.py) than the stop before it: a reader of the
path goes back up.

Walks, each on 400 scenes of 32 px:

    training step   ``dpvision.fit`` of a private run of one step
    adapt           ``dpvision adapt``, from the command line to the end
    to features     the same until the first image is decoded for the head's features
    evaluate        ``dpvision.evaluate`` of that encoder, k-NN and linear probe, controls
    statement       ``dpvision.make_statement`` of that head's run
"""

import argparse
import contextlib
import importlib.util
import inspect
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Stops = list[tuple[str, str]]
"""(file below src/dpvision, function) of each stop, in order."""


def call_path(call: Callable[[], Any], within: CodeType | None = None) -> Stops:
    """Return the stops of ``call``; with ``within``, of what that function calls, itself first."""
    import dpvision

    root = str(Path(dpvision.__file__).parent) + "/"
    stops: dict[tuple[str, str], None] = {}
    depth = 0  # of frames of ``within``
    importing: dict[int, int] = {}  # thread -> modules that are being imported

    def enter(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal depth
        code, thread = frame.f_code, threading.get_ident()
        if event not in ("call", "return"):
            return
        change = 1 if event == "call" else -1
        if code.co_name == "<module>":
            importing[thread] = importing.get(thread, 0) + change
        if code is within:
            depth += change
        if event == "return" or importing.get(thread) or (within and not depth):
            return
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if is_function and code.co_filename.startswith(root):
            stops.setdefault((code.co_filename.removeprefix(root), code.co_qualname))

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(stops)


def climbs(stops: Stops) -> int:
    """How often a stop is in a package on a later line of the order than the one before it."""
    order = _order()
    ranks = [order.get(file.partition("/")[0].removesuffix(".py"), 99) for file, _ in stops]
    return sum(after > before for before, after in pairwise(ranks))


def _order() -> dict[str, int]:
    """Package -> line in the order of imports of the checkout that is traced."""
    import dpvision

    tests = Path(dpvision.__file__).parents[2] / "tests" / "test_imports.py"
    if not tests.exists():
        raise SystemExit(f"call_path: no {tests}; expected the order of imports there.")
    spec = importlib.util.spec_from_file_location("order_of_imports", tests)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RANK


def walks() -> dict[str, Stops]:
    """Trace the four walks in a new folder; "to features" is the start of "adapt"."""
    import dpvision
    from dpvision.cli import main

    def run(line: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            if status := main(line.split()):
                raise SystemExit(f"call_path: dpvision {line}: exit status {status}")

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in ("private", "train --public", "test --first 9000 --public"):
            run(f"data scenes {name} --num 400 --size-px 32 --workers 1")
        adapt = call_path(
            lambda: run(
                "adapt --data private --encoder hog --num-classes 8 --dataset-size 400 --epsilon 8"
                " --name head"
            )
        )
        images = next(i for i, (file, _) in enumerate(adapt) if file == "data/decode.py")
        return {
            "training step": call_path(
                lambda: run(
                    "train vip.micro_random_start --data private --privacy.dataset-size 400"
                    " --privacy.expected-batch-size 8 --privacy.steps 1 --privacy.target-epsilon 8"
                    " --name trained"
                ),
                within=dpvision.fit.__code__,
            ),
            "adapt": adapt,
            "to features": adapt[: images + 1],
            "evaluate": call_path(
                lambda: run("evaluate hog --train train --test test --workers 1 --no-cache"),
                within=dpvision.evaluate.__code__,
            ),
            "statement": call_path(lambda: dpvision.make_statement(Path("runs/head"))),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", default="", help="statements before the call, not traced")
    parser.add_argument("--verbose", action="store_true", help="list the stops")
    parser.add_argument("--walks", action="store_true", help="trace the four walks")
    parser.add_argument("call", nargs="?", help="the expression to trace")
    args = parser.parse_args()
    if args.walks == bool(args.call):
        parser.error("expected either --walks or a call")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names: dict[str, Any] = {}
    exec(args.setup, names)
    paths = walks() if args.walks else {args.call: call_path(lambda: eval(args.call, names))}
    for name, stops in paths.items():
        if args.verbose:
            print("\n".join(f"{file:40} {function}" for file, function in stops))
        files = len({file for file, _ in stops})
        print(f"{name:16} {len(stops)} stops in {files} files, {climbs(stops)} climbs")


if __name__ == "__main__":
    main()
