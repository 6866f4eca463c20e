"""Features and scores kept beside the store that they were computed from, so that a second evaluation does not pay for them again.

Features of private pictures are as private as the pictures: they lie under STORE/confidential/features/, readable by the owner only. A
file's name is a digest of all that decides its content: the encoder (weights, and what it makes of fixed noise), the way from bytes to
pixels (settings, our source, versions of the libraries), the store and its rows. Another name is another file; nothing is ever updated.

Legend: N records, D numbers of a feature, B pictures, C channels, H height, W width.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL
import sklearn
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpvision import features
from dpvision.data import decode, loader, transform
from dpvision.data.store import Store
from dpvision.encoders.base import FrozenEncoder
from dpvision.encoders.partial_array import claim, partial_path, remove_unclaimed
from dpvision.errors import DataError

MAX_BYTES = 4 << 30
"""A store's cache is kept below this: what was used longest ago goes first."""
_LEFT_S = 24 * 3600


class FeatureCache:
    """The cache of one store. A disk that refuses (full, read-only) or a damaged file costs time, not the evaluation."""

    def __init__(self, store_dir: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self.max_bytes = store_dir / "confidential" / "features", max_bytes

    def load(self, key: str) -> dict[str, Tensor] | None:
        """The tensors kept under ``key``, or None."""
        path = self.folder / f"{key}.safetensors"
        try:
            tensors = load_file(path)
            os.utime(path)
            return tensors
        except (OSError, SafetensorError):
            return None

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep tensors under ``key``, unless they are larger than the cache."""
        if sum(t.numel() * t.element_size() for t in tensors.values()) <= self.max_bytes:
            self._write(f"{key}.safetensors", lambda path: save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path))

    def load_array(self, key: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """The array kept under ``key``, memory-mapped and read-only, or None; one of another shape or type is damaged."""
        path = self.folder / f"{key}.npy"
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
            os.utime(path)
        except (OSError, ValueError, EOFError):
            return None
        return found if found.shape == shape and found.dtype == dtype else None

    def save_array(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        blocks_from: Callable[[int], Iterable[np.ndarray]],
        *,
        step: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Write an array of any size in pieces along its first axis, and give it as ``load_array`` does. The folder has to be there.

        Going on where an earlier process stopped or was killed; while another one writes the same array, it is waited for. The array may
        be larger than the cache: then it is all that stays.

        Args:
            blocks_from: the blocks from a row on, a multiple of ``step``, in order.
            progress: called with the rows of another process, while it is waited for.

        Raises:
            DataError: the disk refuses. What is done stays.
        """
        try:
            with claim(self.folder / f"{key}.npy", shape, dtype, progress) as partial:
                if self.load_array(key, shape, dtype) is not None:  # the one that was waited for has finished
                    partial.discard()
                else:
                    first = partial.rows_done() // step * step
                    partial.write(first, blocks_from(first))
            self._make_room()
        except OSError as error:
            raise DataError(
                f"features: {self.folder} ({error.strerror or error}); expected a writable place with space. Make room, then repeat."
            ) from None
        written = self.load_array(key, shape, dtype)
        assert written is not None, "just written"
        return written

    def has_room(self, key: str, num_bytes: int) -> bool:
        """Whether the folder is there, or can be made, and its disk takes what is missing of an array of ``num_bytes``."""
        if not self.make_folder():
            return False
        partial = partial_path(self.folder / f"{key}.npy")
        there = partial.stat().st_size if partial.exists() else 0
        return shutil.disk_usage(self.folder).free > 1.05 * num_bytes - there

    def make_folder(self) -> bool:
        """Whether the folder is there, or could be made, readable by its owner only."""
        try:
            # Each level on its own: mkdir's mode does not reach the parents that it makes on the way.
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            return False
        return os.access(self.folder, os.W_OK)

    def load_json(self, key: str) -> Any:
        """The value kept under ``key``, or None."""
        try:
            return json.loads((self.folder / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def save_json(self, key: str, value: Any) -> None:
        """Keep a JSON value under ``key``."""
        self._write(f"{key}.json", lambda path: path.write_text(json.dumps(value, allow_nan=False)))

    def _write(self, name: str, write: Any) -> None:
        partial = self.folder / f".{name}.partial-{os.getpid()}"
        try:
            if not self.make_folder():
                return
            write(partial)
            partial.replace(self.folder / name)
            self._make_room()
        except OSError:
            pass
        except SafetensorError:  # how safetensors reports a full disk
            pass
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _make_room(self) -> None:
        for entry in os.scandir(self.folder):  # left by a process that was killed while it wrote
            if re.search(r"\.partial-\d+$", entry.name) and time.time() - entry.stat().st_mtime > _LEFT_S:
                os.unlink(entry)
        files = sorted(((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in os.scandir(self.folder)), reverse=True)
        total = 0
        for place, (_, size, path) in enumerate(files):
            total += size
            if total > self.max_bytes and place:  # the newest stays, whatever its size
                if path.endswith(".partial"):
                    remove_unclaimed(Path(path))
                else:
                    os.unlink(path)


@torch.inference_mode()
def fingerprint(encoder: FrozenEncoder, device: str | torch.device = "cpu") -> str:
    """Digest of an encoder: its preprocessing, its weights, and its features of four images of fixed noise at every resolution it takes.

    The noise tells apart what has no weights to look at (patches of textures), the weights what noise might not show.
    """
    digest = _digest([encoder.name, encoder.family, encoder.image_size, encoder.own_sizes, encoder.mean, encoder.std])
    _add_weights(digest, encoder)
    noise_BCHW = torch.randn(4, 3, encoder.image_size, encoder.image_size, generator=torch.Generator().manual_seed(0))
    for side in encoder.own_sizes or (encoder.image_size,):
        for name, x_BD in encoder.poolings(noise_BCHW[..., :side, :side].to(device)).items():
            digest.update(name.encode() + x_BD.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def weights_digest(encoder: FrozenEncoder) -> str | None:
    """Digest of an encoder's weights alone, the same on every machine; None for what has none to look at."""
    if encoder.backbone is None:
        return None
    digest = _digest([])
    _add_weights(digest, encoder)
    return digest.hexdigest()


def _add_weights(digest: Any, encoder: FrozenEncoder) -> None:
    if encoder.backbone is not None:
        for name, value in encoder.backbone().state_dict().items():
            digest.update(name.encode() + value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def features_key(encoder: str, store: Store, rows: np.ndarray) -> str:
    """Name of the features of ``rows`` by the encoder with this fingerprint."""
    digest = _digest([encoder, store.store_id, code_digest(decode, loader, transform, features)])
    digest.update(store.index["id"][rows].tobytes())
    return digest.hexdigest()[:40]


def score_key(*parts: Any) -> str:
    """Name of a score that ``parts`` (JSON values) decide."""
    return _digest(list(parts)).hexdigest()[:40]


def code_digest(*modules: ModuleType) -> str:
    """Digest of our modules' source and of the versions of the libraries below them: a change of either is a change of the result."""
    digest = _digest([torch.__version__, PIL.__version__, np.__version__, sklearn.__version__])
    for module in modules:
        digest.update(Path(module.__file__ or "").read_bytes())
    return digest.hexdigest()


def _digest(value: Any) -> Any:
    return hashlib.sha256(json.dumps(value).encode())
