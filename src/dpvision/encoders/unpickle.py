"""Load third-party pickles in a sandboxed process that only converts them to safetensors
(docs/encoders.md).

A pickle is a program. ``torch.load(weights_only=True)`` runs it with torch's list of harmless
functions. Here it runs in a separate process without environment or network, with memory and time
limited by the file's size, and returns only safetensors.

torch's loader alone is not enough for untrusted files (torch 2.15;
``test_torchs_loader_alone_takes_what_is_refused_here``). It calls nothing harmful, but it accepts
an archive that unpacks to a thousand times its size, a kilobyte that allocates gigabytes, a tensor
with more elements than bytes, and a program that never ends; and it refuses ``argparse.Namespace``,
which published checkpoints contain. Checking the pickle's opcodes beforehand finds some of these;
limits on memory and time need a separate process.
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
"""CPU time for a small pickle; every 20 MB of file add a second."""
_START_S = 120
"""Additional wall-clock time, for a slow start of Python and torch on a busy machine."""
_DIGEST = "sha256_of_pickle"
_REMEDY = "Download the file again from its publisher, or ask for it as safetensors."


def load_pickle_safely(path: str | Path) -> dict[str, Tensor]:
    """Load the tensors of a file written by ``torch.save``, by name, on the CPU. The file is never
    unpickled in this process.

    Nested dictionaries give names with dots (``model.norm.weight``); everything else than named
    dense tensors (settings, optimizer states, counters) is dropped. It accepts what
    ``torch.load(weights_only=True)`` accepts, and ``argparse.Namespace``, replaced by an empty
    object. The result is cached as ``FILE.safetensors`` next to the file, with the pickle's SHA-256
    in its metadata, and reused while the pickle is unchanged. If that folder is not writable,
    nothing is cached.

    Raises:
        CheckpointError: the file does not exist; it is not such a pickle, is truncated, or names
            anything else; it takes more time or memory than its size explains; or
            ``FILE.safetensors`` exists and was not made from a pickle.
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
                    raise CheckpointError(
                        f"weights: {path}: no tensors came back ({error}). {_REMEDY}"
                    ) from None
                _keep(made, kept)
    except OSError as error:
        raise CheckpointError(
            f"weights: {path} ({error.strerror or error}); expected a readable file. Check the "
            "path."
        ) from None
    return tensors


def _digest_of(kept: Path) -> str | None:
    try:
        with safe_open(kept, "pt") as file:
            digest = (file.metadata() or {}).get(_DIGEST)
    except SafetensorError:
        digest = None
    if digest is None:
        raise CheckpointError(
            f"weights: {kept} was not made from a pickle by dpvision; expected dpvision's copy "
            "of one. Open it directly, or move it."
        )
    return digest


def _convert(path: Path, file: IO[bytes], out: IO[bytes], digest: str, folder: str) -> None:
    seconds = TIME_S + os.fstat(file.fileno()).st_size // 20_000_000
    libraries = [
        entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")
    ]
    settings = {
        "path": libraries,
        "out": out.fileno(),
        "seconds": seconds,
        "note": {_DIGEST: digest},
    }
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
            f"weights: {path} takes more than {seconds} s to open; expected a plain dictionary "
            f"of tensors. {_REMEDY}"
        ) from None
    if done.returncode == 0:
        return
    said = "".join(
        c if c.isprintable() else " " for c in done.stdout.decode(errors="replace")
    ).strip()
    # torch's surrounding text advises to allow what it refused
    said = said.partition("WeightsUnpickler error:")[2].strip() or said
    said = said.partition("Please use `torch.serialization")[0].strip().rstrip(".")
    if done.returncode < 0:
        said = (
            f"its process was ended by signal {-done.returncode}, at the limit of {seconds} s or "
            "of memory"
        )
    reason = said or f"its process failed with status {done.returncode}"
    raise CheckpointError(
        f"weights: {path} was refused: {reason[:600]}; expected a plain dictionary of tensors. "
        f"{_REMEDY}"
    )


def _keep(made: Path, kept: Path) -> None:
    # a read-only folder only means that the weights are converted again next time
    with contextlib.suppress(OSError), replacing(kept) as partial:
        partial.write_bytes(made.read_bytes())
