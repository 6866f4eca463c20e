"""``dpvision COMMAND ...``: the journeys, one module each; imported only when called, so that ``plan`` starts without torch."""

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from dpvision.errors import DPVisionError

# command -> (module, one line of help)
COMMANDS = {
    "plan": ("plan", "what can this data set afford? noise, steps, epsilon, before any compute is spent"),
    "data": ("data", "import images into a store; inspect it, split it, make procedural scenes"),
    "synth": ("synth", "procedural textures for a warm start: look at them, train on them, write them as files"),
    "train": ("train", "run a recipe: private, or not and saying so; resume after a stop or a crash"),
    "adapt": ("adapt", "a public encoder, private images: a private classifier in one step or many, with its statement"),
    "evaluate": ("evaluate", "score encoders: k-NN, linear, few-shot; random weights and raw pixels beside them"),
    "embed": ("embed", "write an encoder's features for a store or a folder of images"),
    "caption": ("caption", "say in words what is in images, with a captioner that was trained here"),
    "ledger": ("ledger", "what a store's records have been charged so far, by run; set the owner's cap"),
    "report": ("report", "the guarantee statement (JSON) and one page to read; the operator's page beside it"),
    "verify": ("verify", "check a statement: hashes, ledger, lineage, and epsilon by a second accountant"),
    "compare": ("compare", "training curves and scores of several runs on one page, for the operator"),
    "doctor": ("doctor", "can this model be trained privately? the way of each parameter, memory; exactness and price, measured"),
    "demo": ("demo", "the whole way in a few minutes, on procedural scenes or on your own images"),
}

_FOOT = """
Start with `dpvision demo`, then `dpvision plan --help`. Each command takes --help and --json.
The epsilon printed is the epsilon executed: docs/tour.md tells the story, docs/pitfalls.md what can go wrong elsewhere."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 after one clear error message."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("dpvision"))
        return 0
    if args[0] not in COMMANDS:
        print(f"dpvision: {args[0]!r}; expected one of {', '.join(COMMANDS)}. See dpvision --help.", file=sys.stderr)
        return 2
    try:
        importlib.import_module(f"dpvision.cli.{COMMANDS[args[0]][0]}").run(args[1:])
    except DPVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # an OSError: asked for first
        with contextlib.suppress(OSError):  # Python flushes standard output once more at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            place = f" ({error.filename})" if error.filename else ""
            print(
                f"error: disk: {error.strerror}{place}. Nothing saved before is lost; make room, then repeat or --resume.", file=sys.stderr
            )
            return 2
        raise
    except KeyboardInterrupt:
        print("\nstopped; a run in progress goes on with --resume from its last checkpoint.", file=sys.stderr)
        return 130
    return 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: dpvision COMMAND ...\n\nTrain image models on images that must stay private.\n\n" + "\n".join(lines) + "\n" + _FOOT
