"""Whitened patches against a dictionary that k-means found (Coates, Lee & Ng 2011, "An analysis of single-layer networks in unsupervised
feature learning"), learned on public pictures: by default on our procedural textures, so that it costs no budget and knows nobody.

    p = (patch - mean) / sqrt(variance + 10)   in levels of 0 to 255,   x = W (p - m),   W = (covariance of p + whitening I)^(-1/2)   (ZCA)
    f_k = max(0, mean_j z_j - z_k),   z_k = ||x - atom_k||                                  (the "triangle")

for every patch of the picture; f is added up over each quadrant and the four sums are joined.

Legend: B or N pictures, C channels, H height, W width, M patches, P numbers of a patch, K atoms, L places of a patch, Q = 4 quadrants.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F

from dpvision.errors import CheckpointError, ConfigError
from dpvision.synthetic import textures as generator

Say = Callable[[str], None]

_METHOD = 1  # changes whenever the same settings give another dictionary
_VARIANCE_FLOOR = 10 / 255**2
_ROUNDS = 20  # of k-means; more changed nothing that a probe sees
_CHUNK = 1 << 22  # numbers of z at once: 16 MiB


@dataclass(frozen=True)
class DictionarySettings:
    """What decides the default dictionary, all of it public. Chosen on CIFAR-10, a public set (docs/features_free.md)."""

    num_atoms: int = 400
    patch_px: int = 6
    picture_px: int = 32
    num_pictures: int = 5000
    num_patches: int = 100_000
    whitening: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Dictionary:
    """A learned dictionary; tensors are float32."""

    mean_P: Tensor
    whiten_PP: Tensor
    atom_KP: Tensor
    """In whitened coordinates."""
    patch_px: int

    def to(self, device: str | torch.device) -> "Dictionary":
        """The same on another device."""
        return Dictionary(self.mean_P.to(device), self.whiten_PP.to(device), self.atom_KP.to(device), self.patch_px)

    def encode(self, x_BCHW: Tensor) -> Tensor:
        """Features float32 (B, 4 K): the quadrants row by row, K sums each; of an odd number of places the first half has one more.

        Args:
            x_BCHW: pixels from 0 to 1, on the dictionary's device; at least one pixel larger than a patch.
        """
        rows, columns = (side - self.patch_px + 1 for side in x_BCHW.shape[-2:])
        down, across = (torch.arange(n, device=x_BCHW.device) >= (n + 1) // 2 for n in (rows, columns))
        quadrant_L = (2 * down.long()[:, None] + across.long()).flatten()
        member_LQ = F.one_hot(quadrant_L, 4).to(x_BCHW.dtype)
        step = max(1, _CHUNK // (len(self.atom_KP) * rows * columns))
        return torch.cat([self._responses(part).matmul(member_LQ).transpose(1, 2).flatten(1) for part in x_BCHW.split(step)])

    def _responses(self, x_BCHW: Tensor) -> Tensor:
        """f for every place: (B, K, L)."""
        patch_BPL = _contrast_normalised(F.unfold(x_BCHW, self.patch_px), dim=1)
        x_BPL = self.whiten_PP @ patch_BPL - (self.whiten_PP @ self.mean_P)[:, None]
        square_BKL = self.atom_KP @ x_BPL
        square_BKL.mul_(-2).add_(self.atom_KP.square().sum(dim=1)[:, None]).add_(x_BPL.square().sum(dim=1, keepdim=True))
        z_BKL = square_BKL.clamp_(min=0).sqrt_()
        return torch.sub(z_BKL.mean(dim=1, keepdim=True), z_BKL).relu_()


def learn_dictionary(
    pictures_NCHW: Tensor, num_atoms: int, patch_px: int, seed: int, *, num_patches: int = 100_000, whitening: float = 1.0
) -> Dictionary:
    """Dictionary of public pictures. Nothing about it is private: pictures that must stay private have no business here.

    The same bits on the same machine; k-means adds up in an order that the processor decides.

    Args:
        pictures_NCHW: uint8, or float from 0 to 1; on the CPU.
        num_atoms: K.
        patch_px: side of a patch, 2 or more.
        seed: of the choice of patches and of the first atoms.
        num_patches: patches drawn, at least one per atom.
        whitening: added to the eigenvalues of the covariance of contrast-normalised patches (a pixel has variance about 1).

    Raises:
        ConfigError: an argument is out of range, or the pictures are smaller than a patch.
    """
    if not 2 <= patch_px <= min(pictures_NCHW.shape[-2:]):
        size = "x".join(str(n) for n in pictures_NCHW.shape[-2:])
        raise ConfigError(f"dictionary: patch_px={patch_px} for pictures of {size}; expected 2 px up to their side. Take a smaller patch.")
    if not 1 <= num_atoms <= num_patches:
        raise ConfigError(f"dictionary: num_atoms={num_atoms}; expected 1 to num_patches={num_patches}. Draw more patches.")
    if not 0 < whitening < float("inf"):
        raise ConfigError(f"dictionary: whitening={whitening}; expected a positive number. Use 1.")
    patch_MP = _contrast_normalised(_draw_patches(pictures_NCHW, patch_px, num_patches, seed), dim=1)
    # One thread: with several, the order of additions, and then the atoms, would change from run to run.
    with threadpool_limits(1):
        mean_P = patch_MP.mean(dim=0)
        patch = (patch_MP - mean_P).numpy()
        value_P, basis_PP = np.linalg.eigh((patch.T @ patch / len(patch)).astype(np.float64))
        whiten_PP = ((basis_PP / np.sqrt(value_P.clip(min=0) + whitening)) @ basis_PP.T).astype(np.float32)
        atoms = KMeans(num_atoms, init="random", n_init=1, max_iter=_ROUNDS, tol=0, random_state=seed).fit(patch @ whiten_PP)
    # Contiguous, as a loaded one is: products of another memory layout differ in their last bits.
    whiten_PP, atom_KP = (np.ascontiguousarray(a, dtype=np.float32) for a in (whiten_PP, atoms.cluster_centers_))
    return Dictionary(mean_P, torch.from_numpy(whiten_PP), torch.from_numpy(atom_KP), patch_px)


def default_pictures(num: int, size_px: int) -> Tensor:
    """The public pictures that the default dictionary is learned on: uint8 (num, 3, size_px, size_px)."""
    return generator.textures(torch.arange(num), size_px)


def default_dictionary(settings: DictionarySettings | None = None, *, cache: Path | None = None, say: Say | None = None) -> Dictionary:
    """The dictionary of these settings, from the cache, or learned now (less than a minute on one core) and kept there.

    Args:
        cache: folder; None: ``cache_folder()``. One that cannot be written to costs the time again, nothing else.
        say: is told what takes so long; None: standard error.
    """
    settings = settings or DictionarySettings()
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    path = (cache_folder() if cache is None else cache) / _file_name(settings)
    if path.exists():
        try:
            return load_dictionary(path)
        except CheckpointError as error:
            say(f"{error} It is learned anew.")
    say(
        f"dictionary: learning {settings.num_atoms} atoms of {settings.patch_px} px on {settings.num_pictures} procedural textures, "
        f"once, under a minute; kept as {path}"
    )
    dictionary = learn_dictionary(
        default_pictures(settings.num_pictures, settings.picture_px),
        settings.num_atoms,
        settings.patch_px,
        settings.seed,
        num_patches=settings.num_patches,
        whitening=settings.whitening,
    )
    try:
        save_dictionary(dictionary, path)
    except CheckpointError as error:
        say(f"{error} The next run learns it again.")
    return dictionary


def cache_folder() -> Path:
    """Where public, reproducible files are kept: $XDG_CACHE_HOME/dpvision, or ~/.cache/dpvision."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "dpvision"


def save_dictionary(dictionary: Dictionary, path: Path) -> None:
    """Write a safetensors file whole or not at all; its folder is made.

    Raises:
        CheckpointError: the disk refuses.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    tensors = {"mean": dictionary.mean_P, "whiten": dictionary.whiten_PP, "atoms": dictionary.atom_KP}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"dictionary: {path} ({error}); expected a writable place with space. Set XDG_CACHE_HOME to one.") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def load_dictionary(path: Path) -> Dictionary:
    """What ``save_dictionary`` wrote.

    Raises:
        CheckpointError: no such file, or not of that form.
    """
    try:
        tensors = load_file(path)
        mean_P, whiten_PP, atom_KP = (tensors[name].clone() for name in ("mean", "whiten", "atoms"))
        patch_px = round((len(mean_P) / 3) ** 0.5)
        if not (whiten_PP.shape == (len(mean_P),) * 2 and atom_KP.shape[1:] == mean_P.shape and 3 * patch_px**2 == len(mean_P)):
            raise ValueError(f"shapes {[tuple(t.shape) for t in tensors.values()]}")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"dictionary: {path} cannot be read ({error}); expected a saved dictionary. Delete it.") from None
    return Dictionary(mean_P, whiten_PP, atom_KP, patch_px)


def _file_name(settings: DictionarySettings) -> str:
    """Another generator, method or setting is another file."""
    text = json.dumps([_METHOD, generator.VERSION, asdict(settings)], sort_keys=True)
    return f"dictionary-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"


def _draw_patches(pictures_NCHW: Tensor, patch_px: int, num: int, seed: int) -> Tensor:
    """Random places of random pictures, float32 (M, P) from 0 to 1, each patch channel by channel as ``F.unfold`` orders it."""
    rng = np.random.Generator(np.random.PCG64(seed))
    count, _, height, width = pictures_NCHW.shape
    picture_M, top_M, left_M = (torch.from_numpy(rng.integers(0, n, num)) for n in (count, height - patch_px + 1, width - patch_px + 1))
    side = torch.arange(patch_px)
    rows, columns = (top_M[:, None] + side)[:, :, None], (left_M[:, None] + side)[:, None, :]
    patch_MHWC = pictures_NCHW[picture_M[:, None, None], :, rows, columns]
    patch_MP = patch_MHWC.permute(0, 3, 1, 2).flatten(1)
    return patch_MP.float() / 255 if pictures_NCHW.dtype == torch.uint8 else patch_MP.float()


def _contrast_normalised(patch: Tensor, dim: int) -> Tensor:
    patch = patch - patch.mean(dim=dim, keepdim=True)
    return patch / (patch.square().mean(dim=dim, keepdim=True) + _VARIANCE_FLOOR).sqrt()
