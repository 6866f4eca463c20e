"""``dpvision COMMAND ...``. Each command is one module, imported only when called, so that ``plan``
starts without torch.
"""

import contextlib
import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from dpvision.errors import DPVisionError, remedy_for

# command -> (module, one line of help)
COMMANDS = {
    "plan": ("plan", "choose noise, steps and epsilon for a data set before any compute is spent"),
    "data": ("data", "import images into a store; inspect it, split it, make procedural scenes"),
    "synth": (
        "synth",
        "make procedural textures for a warm start: a store, image files or a contact sheet",
    ),
    "train": ("train", "train a recipe, with or without privacy; resume after a stop or a crash"),
    "adapt": ("adapt", "train a private classifier on a public encoder, in one step or many"),
    "tune": (
        "tune",
        "choose settings by simulated, public, charged or privately selected trials; prints "
        "what each way costs",
    ),
    "evaluate": (
        "evaluate",
        "score encoders by k-NN, linear and few-shot protocols, against random weights and raw "
        "pixels",
    ),
    "embed": ("embed", "write an encoder's features for a store or a folder of images"),
    "predict": ("predict", "classify images with a trained classifier; a table of probabilities"),
    "calibrate": (
        "calibrate",
        "fit a classifier's temperature and thresholds on public images",
    ),
    "export": ("export", "write a trained model for timm, transformers, ONNX, safetensors or PEFT"),
    "caption": ("caption", "caption images with a trained captioner"),
    "ledger": (
        "ledger",
        "show the epsilon charged to a store, by run and in total; set the owner's cap",
    ),
    "report": (
        "report",
        "write the guarantee statement (JSON), the report page and the operator's page",
    ),
    "verify": (
        "verify",
        "check a statement: hashes, ledger, lineage, and epsilon by a second accountant",
    ),
    "audit": (
        "audit",
        "check on canaries that the mechanism that runs is the one that is stated",
    ),
    "doctor": (
        "doctor",
        "check whether a model can be trained privately; measure exactness, memory and overhead",
    ),
    "demo": (
        "demo",
        "run the main steps in a few minutes, on procedural scenes or on your own images",
    ),
}

_MOST_SHOWN = 4000
_RESUMED = ("train", "adapt", "tune")

_FOOT = """
Start with `dpvision demo`, then `dpvision plan --help`. Each command takes --help and --json.
The epsilon printed is the epsilon executed: see docs/tour.md for the design and
docs/pitfalls.md for common mistakes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 after printing an error message."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names print on terminals without UTF-8, too
            stream.reconfigure(errors="backslashreplace")
    # Imports make a million objects, hardly one of them garbage. With the default of 10, Python
    # looks through all of them eight times before a command's work begins.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("dpvision"))
        return 0
    if args[0] not in COMMANDS:
        print(
            f"dpvision: {args[0]!r}; expected one of {', '.join(COMMANDS)}. See dpvision --help.",
            file=sys.stderr,
        )
        return 2
    try:
        importlib.import_module(f"dpvision.cli.{COMMANDS[args[0]][0]}").run(args[1:])
    except DPVisionError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # a subclass of OSError, so it comes first
        with contextlib.suppress(OSError):  # Python flushes standard output again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            print(f"error: {_denied(error)}", file=sys.stderr)
            return 2
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            place = f" ({error.filename})" if error.filename else ""
            remedy = remedy_for(error, "Free space, then repeat or --resume.")
            print(
                f"error: disk: {error.strerror}{place}; expected to write there. Earlier "
                f"checkpoints are safe. {remedy}",
                file=sys.stderr,
            )
            return 2
        raise
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        print(
            f"error: hardware: {error}\n"
            "Use a smaller --batch-size, or free the GPU of other processes.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(
            "\nstopped"
            f"""{
                "; --resume continues a run from its last checkpoint" if args[0] in _RESUMED else ""
            }.""",
            file=sys.stderr,
        )
        return 130
    return 0


def one_line(text: str) -> str:
    """Return an error's text as one line of at most 4,000 characters that only prints.

    It may quote names and values of a file by somebody else: line ends become blanks, control
    characters are escaped, and the middle of a longer text is left out, not the remedy at its end.
    """
    text = " ".join(text.splitlines())
    if len(text) > _MOST_SHOWN:
        text = f"{text[: _MOST_SHOWN // 2]} [...] {text[-_MOST_SHOWN // 4 :]}"
    return printable(text)[:_MOST_SHOWN]


def printable(text: str) -> str:
    """Return a text, which may quote a file by somebody else, with escapes for what does not
    print: control characters, marks of text direction, and bytes of a name that are no UTF-8.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _denied(error: OSError) -> str:
    """Return which file or folder may not be used, how, and what to do, for an error of
    permissions.
    """
    if not error.filename:
        return (
            f"permission: {error.strerror}; expected a file that this user may use. Check the "
            "permissions of the paths given."
        )

    def may(path: Path, mode: int) -> bool:
        return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)

    path, verb = Path(os.fsdecode(error.filename)).absolute(), "written"
    closed = next(
        (
            folder
            for folder in reversed(path.parents)
            if folder.is_dir() and not may(folder, os.X_OK)
        ),
        None,
    )
    if closed is not None:
        path, verb = closed, "entered"
    elif os.path.lexists(path):
        verb = "read" if not may(path, os.R_OK | (os.X_OK if path.is_dir() else 0)) else "written"
    else:
        path, verb = path.parent, "written to"
    return (
        f"permission: {path}: {error.strerror}; expected one that may be {verb} by this user. "
        f"Have its owner change that (ls -ld {quote(str(path))}), or give another path; then "
        "repeat, or --resume. Earlier checkpoints are safe."
    )


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return (
        "usage: dpvision COMMAND ...\n\nTrain image models on images that must stay private.\n\n"
        + "\n".join(lines)
        + "\n"
        + _FOOT
    )
