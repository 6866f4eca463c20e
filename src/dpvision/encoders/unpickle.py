"""Other people's weights: safetensors as they are, pickles through a process that can do nothing else (guarantee.md, rule 11).

A pickle is a program. ``torch.load(weights_only=True)`` runs it with torch's own list of harmless functions; here that happens in a
separate process without environment, network, or more memory and time than the file's size explains, and only safetensors come back.

Alone, torch's loader is not enough for a file from elsewhere (torch 2.15; ``test_torchs_loader_alone_takes_what_is_refused_here``). It
calls nothing harmful either, but it takes an archive that unpacks to a thousand times its size, a kilobyte that asks for gigabytes, a
tensor of more numbers than there are bytes, and a program that never ends; and it refuses ``argparse.Namespace``, which published
checkpoints hold. A check of the pickle's instructions beforehand finds some of these; memory and time need a process of their own.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dpvision.encoders import unpickle_worker
from dpvision.errors import CheckpointError
from dpvision.files import replacing
from dpvision.weights import unpack

TIME_S = 60
"""Processor time for a small pickle; every 20 MB of file give another second."""
_START_S = 120
"""Wall-clock time beyond it, for a slow start of Python and torch on a busy machine."""
_DIGEST = "sha256_of_pickle"
_REMEDY = "Get the file again from its publisher, or ask for it as safetensors."


def load_pickle_safely(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a file that ``torch.save`` wrote, by name, on the CPU; never unpickled in this process.

    Nested dictionaries give names with dots (``model.norm.weight``); everything that is no dense tensor under a name (settings, optimizer
    states, counters) is left behind. Allowed are what ``torch.load(weights_only=True)`` allows, and ``argparse.Namespace``, replaced by an
    object that keeps nothing. The result stays beside the file as ``FILE.safetensors``, with the pickle's SHA-256 in its metadata, and
    is used from then on as long as the pickle is the same. Where that folder cannot be written, nothing is kept.

    Raises:
        CheckpointError: there is no such file; it is no such pickle, truncated, or names anything else; it takes more time or memory than
            its size explains; or a ``FILE.safetensors`` lies there that was made from something else than a pickle.
    """
    path = Path(path)
    kept = path.with_name(path.name + ".safetensors")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if kept.exists() and _digest_of(kept) == digest:
                return unpack(kept)[0]
            file.seek(0)
            with tempfile.TemporaryDirectory(prefix="dpvision-unpickle-") as folder:
                made = Path(folder, "out.safetensors")
                with made.open("wb") as out:
                    _convert(path, file, out, digest, folder)
                try:
                    tensors = load_file(made)
                except SafetensorError as error:
                    raise CheckpointError(f"weights: {path}: no tensors came back ({error}). {_REMEDY}") from None
                _keep(made, kept)
    except OSError as error:
        raise CheckpointError(f"weights: {path} ({error.strerror or error}); expected a readable file. Correct the path.") from None
    return tensors


def _digest_of(kept: Path) -> str | None:
    try:
        with safe_open(kept, "pt") as file:
            digest = (file.metadata() or {}).get(_DIGEST)
    except SafetensorError:
        digest = None
    if digest is None:
        raise CheckpointError(
            f"weights: {kept} was not made from a pickle by dpvision; expected the copy kept beside one. Name it itself, or move it."
        )
    return digest


def _convert(path: Path, file: IO[bytes], out: IO[bytes], digest: str, folder: str) -> None:
    seconds = TIME_S + os.fstat(file.fileno()).st_size // 20_000_000
    libraries = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    settings = {"path": libraries, "out": out.fileno(), "seconds": seconds, "note": {_DIGEST: digest}}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", unpickle_worker.__file__, json.dumps(settings)],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[out.fileno()],
            env={"OMP_NUM_THREADS": "1"},
            cwd=folder,
            timeout=seconds + _START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"weights: {path} takes more than {seconds} s to open; expected a plain dictionary of tensors. {_REMEDY}"
        ) from None
    if done.returncode == 0:
        return
    said = "".join(c if c.isprintable() else " " for c in done.stdout.decode(errors="replace")).strip()
    # what torch says around it is advice to allow what it refused
    said = said.partition("WeightsUnpickler error:")[2].strip() or said
    said = said.partition("Please use `torch.serialization")[0].strip().rstrip(".")
    if done.returncode < 0:
        said = f"its process was ended by signal {-done.returncode}, after {seconds} s of work or for memory"
    reason = said or f"its process failed with status {done.returncode}"
    raise CheckpointError(f"weights: {path} was refused: {reason[:600]}; expected a plain dictionary of tensors. {_REMEDY}")


def _keep(made: Path, kept: Path) -> None:
    # a folder that cannot be written is no reason to refuse the weights: next time they are converted again
    with contextlib.suppress(OSError), replacing(kept) as partial:
        partial.write_bytes(made.read_bytes())
