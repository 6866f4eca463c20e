import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dpvision.encoders import dictionary as module
from dpvision.encoders.dictionary import (
    Dictionary,
    DictionarySettings,
    cache_folder,
    default_dictionary,
    default_pictures,
    learn_dictionary,
    load_dictionary,
    save_dictionary,
)
from dpvision.errors import CheckpointError, ConfigError

SMALL = DictionarySettings(num_atoms=12, num_pictures=40, num_patches=1500)


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    return default_pictures(60, 32)


@pytest.fixture(scope="module")
def learned(pictures: Tensor) -> Dictionary:
    return learn_dictionary(pictures, 16, 6, seed=0, num_patches=4000)


def _normalised(patch: np.ndarray) -> np.ndarray:
    return (patch - patch.mean()) / math.sqrt(patch.var() + 10 / 255**2)


def _slow(d: Dictionary, x_CHW: np.ndarray) -> np.ndarray:
    """The definition, patch by patch, in float64."""
    side, atoms = d.patch_px, d.atom_KP.double().numpy()
    rows, columns = x_CHW.shape[1] - side + 1, x_CHW.shape[2] - side + 1
    sums = np.zeros((2, 2, len(atoms)))
    for r in range(rows):
        for c in range(columns):
            p = _normalised(x_CHW[:, r : r + side, c : c + side].flatten())
            z = np.linalg.norm(d.whiten_PP.double().numpy() @ (p - d.mean_P.double().numpy()) - atoms, axis=1)
            sums[int(r >= math.ceil(rows / 2)), int(c >= math.ceil(columns / 2))] += np.maximum(0, z.mean() - z)
    return sums.flatten()


@pytest.mark.parametrize("size", [(12, 12), (9, 13)])
def test_features_are_those_of_the_definition_patch_by_patch(learned: Dictionary, size: tuple[int, int]) -> None:
    x = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0))
    expected = np.stack([_slow(learned, picture.double().numpy()) for picture in x])
    np.testing.assert_allclose(learned.encode(x).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_the_pieces_in_which_it_is_computed_do_not_matter(learned: Dictionary, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    whole = learned.encode(x)
    monkeypatch.setattr(module, "_CHUNK", 1)
    torch.testing.assert_close(learned.encode(x), whole)


def test_whitened_patches_are_uncorrelated_and_of_equal_variance(pictures: Tensor) -> None:
    d = learn_dictionary(pictures, 1, 4, seed=0, num_patches=20_000, whitening=1e-6)
    places = torch.nn.functional.unfold(pictures.float() / 255, 4).transpose(1, 2).reshape(-1, 48)[::7].numpy()
    fresh = np.stack([_normalised(p) for p in places]).astype(np.float64)
    covariance = np.cov((fresh - d.mean_P.numpy()) @ d.whiten_PP.double().numpy().T, rowvar=False)
    value = np.linalg.eigvalsh(covariance)
    # The mean of a patch is gone: one direction of 48 is empty. The rest is of other patches than those learned from: near one.
    assert value[0] < 0.1
    assert 0.5 < value[1] <= value[-1] < 2
    torch.testing.assert_close(d.whiten_PP, d.whiten_PP.T)  # the symmetric root: whitened patches still look like patches


def test_k_means_finds_the_patches_there_are() -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    kinds = rng.random((4, 3, 4, 4)).astype(np.float32)
    pictures = torch.from_numpy(kinds[rng.integers(0, 4, 500)])  # each picture is one patch
    found = min(
        (learn_dictionary(pictures, 4, 4, seed=seed, num_patches=500) for seed in range(8)),
        key=lambda d: float(torch.cdist(_whitened(d, kinds), d.atom_KP).min(dim=1).values.max()),
    )
    distance = torch.cdist(_whitened(found, kinds), found.atom_KP)
    assert sorted(distance.argmin(dim=1).tolist()) == [0, 1, 2, 3]
    assert distance.min(dim=1).values.max() < 1e-3 * distance.max()


def _whitened(d: Dictionary, patches: np.ndarray) -> Tensor:
    p = np.stack([_normalised(patch.flatten()) for patch in patches])
    return (torch.from_numpy(p).float() - d.mean_P) @ d.whiten_PP


def test_bytes_and_fractions_of_one_give_the_same_dictionary(pictures: Tensor, learned: Dictionary) -> None:
    again = learn_dictionary(pictures.float() / 255, 16, 6, seed=0, num_patches=4000)
    assert torch.equal(again.atom_KP, learned.atom_KP)
    other = learn_dictionary(pictures, 16, 6, seed=1, num_patches=4000)
    assert not torch.equal(other.atom_KP, learned.atom_KP)


def test_brightness_and_contrast_matter_little(learned: Dictionary, pictures: Tensor) -> None:
    x = pictures[:8].float() / 255
    plain, paler = learned.encode(x), learned.encode(0.7 * x + 0.2)
    assert (plain - paler).norm() < 0.15 * plain.norm()
    assert (plain - learned.encode(x.flip(3))).norm() > 0.15 * plain.norm()  # which a mirror image is not


def test_a_saved_dictionary_is_read_as_it_was(learned: Dictionary, tmp_path: Path) -> None:
    save_dictionary(learned, tmp_path / "new" / "d.safetensors")
    again = load_dictionary(tmp_path / "new" / "d.safetensors")
    assert all(torch.equal(getattr(again, name), getattr(learned, name)) for name in ("mean_P", "whiten_PP", "atom_KP"))
    assert again.patch_px == learned.patch_px
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["d.safetensors"]


def test_the_default_is_learned_once_and_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    first = default_dictionary(SMALL, cache=tmp_path, say=said.append)
    assert len(said) == 1 and "learning 12 atoms" in said[0] and str(tmp_path) in said[0]
    again = default_dictionary(SMALL, cache=tmp_path, say=said.append)
    assert len(said) == 1
    assert torch.equal(first.atom_KP, again.atom_KP)


def test_other_settings_or_another_generator_are_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default_dictionary(SMALL, cache=tmp_path, say=lambda text: None)
    default_dictionary(replace(SMALL, whitening=0.5), cache=tmp_path, say=lambda text: None)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(module.generator, "VERSION", -1)
    default_dictionary(SMALL, cache=tmp_path, say=lambda text: None)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_torn_file_in_the_cache_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    first = default_dictionary(SMALL, cache=tmp_path, say=said.append)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert torch.equal(default_dictionary(SMALL, cache=tmp_path, say=said.append).atom_KP, first.atom_KP)
    assert "cannot be read" in said[1] and "learned anew" in said[1]
    assert torch.equal(load_dictionary(path).atom_KP, first.atom_KP)


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("in the way")
    assert len(default_dictionary(SMALL, cache=tmp_path / "file" / "cache", say=said.append).atom_KP) == 12
    assert "Set XDG_CACHE_HOME" in said[-1] and "learns it again" in said[-1]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dpvision"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "dpvision"


def test_what_is_no_dictionary_is_refused(tmp_path: Path, learned: Dictionary) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read .*expected a saved dictionary"):
        load_dictionary(tmp_path / "absent.safetensors")
    save_dictionary(replace(learned, whiten_PP=learned.whiten_PP[:5]), tmp_path / "d.safetensors")
    with pytest.raises(CheckpointError, match="shapes"):
        load_dictionary(tmp_path / "d.safetensors")


@pytest.mark.parametrize(
    ("atoms", "patch", "whitening", "match"),
    [
        (4, 1, 0.1, r"patch_px=1 for pictures of 32x32; expected 2 px up to their side"),
        (4, 33, 0.1, r"patch_px=33 for pictures of 32x32"),
        (0, 6, 0.1, r"num_atoms=0; expected 1 to num_patches=50"),
        (51, 6, 0.1, r"num_atoms=51"),
        (4, 6, math.nan, r"whitening=nan; expected a positive number"),
    ],
)
def test_settings_out_of_range_are_refused(pictures: Tensor, atoms: int, patch: int, whitening: float, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        learn_dictionary(pictures, atoms, patch, seed=0, num_patches=50, whitening=whitening)
