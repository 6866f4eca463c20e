"""Patches of textures: against a slow loop, and the laws that a private head counts on."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import fft
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import center_crop, pad, resize

from dpvision.data.transform import blank_margin, own_size
from dpvision.encoders.fixed import fixed_encoder
from dpvision.encoders.identity import fingerprint
from dpvision.encoders.patch_constants import (
    FOLDER,
    SETTINGS,
    SIZES,
    PatchSettings,
    SizeConstants,
    feature_orders,
    learn_constants,
    load_constants,
    mirror_channels,
    save_constants,
    scattering_channels,
)
from dpvision.encoders.patch_features import PatchFeatures
from dpvision.encoders.patches import VARIANCE_FLOOR, PatchBank, learn_bank
from dpvision.encoders.scattering import make_scattering
from dpvision.encoders.whitening import Whitening, cell_frequencies, fit_whitening
from dpvision.errors import CheckpointError, ConfigError
from dpvision.synthetic.textures import textures

SMALL = PatchSettings(32, stride=1, num_textures=48, num_atoms=10)


@pytest.fixture(scope="module")
def texture_NCHW() -> Tensor:
    return textures(torch.arange(900, 924), 32)


@pytest.fixture(scope="module")
def small() -> SizeConstants:
    return learn_constants(SMALL)


def _slow(bank: PatchBank, x_CHW: np.ndarray) -> np.ndarray:
    """The definition, patch by patch in float64: (2 K, cells, cells) of one image, without the
    mirror image.
    """
    k, weight_PK, bias_K = (
        bank.patch_px,
        bank.weight_PK.double().numpy(),
        bank.bias_K.double().numpy(),
    )
    side = x_CHW.shape[-1] - k + 1
    edge = [round(i * side / bank.cells) for i in range(bank.cells + 1)]
    count = len(bias_K)
    total, number = (
        np.zeros((2 * count, bank.cells, bank.cells)),
        np.zeros((bank.cells, bank.cells)),
    )
    for row in range(side):
        for column in range(side):
            patch_P = x_CHW[:, row : row + k, column : column + k].ravel()
            patch_P = patch_P - patch_P.mean()
            patch_P = patch_P / math.sqrt((patch_P**2).mean() + VARIANCE_FLOOR)
            z_K = patch_P @ weight_PK + bias_K
            cell = (
                np.searchsorted(edge, row, side="right") - 1,
                np.searchsorted(edge, column, side="right") - 1,
            )
            total[:, *cell] += np.concatenate([np.maximum(z_K - 1, 0), np.maximum(-z_K - 1, 0)])
            number[cell] += 1
    return np.sqrt(total / number)


def test_features_are_those_of_the_definition(texture_NCHW: Tensor) -> None:
    bank = learn_bank(texture_NCHW, num_atoms=7, patch_px=6, stride=1, cells=3)
    x_CHW = texture_NCHW[3].numpy() / 255
    expected = (_slow(bank, x_CHW) + _slow(bank, x_CHW[..., ::-1])) / 2
    found = bank(torch.from_numpy(x_CHW).float()[None])[0].unflatten(1, (3, 3))
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-3)
    # Where the mean over a cell is not tiny, the square root does not enlarge rounding.
    np.testing.assert_allclose(found.numpy()[expected > 0.05], expected[expected > 0.05], rtol=1e-4)


def test_atoms_are_whitened_patches_of_length_one(texture_NCHW: Tensor) -> None:
    bank = learn_bank(texture_NCHW, num_atoms=50, patch_px=4, stride=1, cells=2)
    # weight = W atom, and W has eigenvalues of at most 1: none is longer than its atom.
    length_K = torch.linalg.vector_norm(bank.weight_PK, dim=0)
    assert (length_K <= 1 + 1e-5).all() and (length_K > 0.1).all()
    assert bank.weight_PK.shape == (48, 50)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "stride"), [(s.side_px, s.stride) for s in SETTINGS.values()])
def test_an_image_and_its_mirror_image_have_the_same_features(
    side: int, stride: int, texture_NCHW: Tensor
) -> None:
    bank = learn_bank(texture_NCHW, num_atoms=6, patch_px=6, stride=stride, cells=3)
    x_BCHW = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(side))
    torch.testing.assert_close(bank(x_BCHW.flip(-1)), bank(x_BCHW), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(bank(x_BCHW.flip(-2)), bank(x_BCHW), atol=1e-2)


def test_whitening_makes_the_covariance_of_textures_what_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    f_NCQ = (
        torch.einsum(
            "dc,ncq->ndq",
            torch.randn(6, 6, generator=generator),
            torch.randn(400, 6, 5, generator=generator),
        )
        + 3
    )
    whitening = fit_whitening(f_NCQ, floor=0.2)
    y_CM = (
        (whitening.matrix_CC.double() @ (f_NCQ - whitening.mean_CQ).double())
        .transpose(0, 1)
        .flatten(1)
    )
    scaled = (
        whitening.matrix_CC.double()
        * (f_NCQ - whitening.mean_CQ).double().square().mean((0, 2)).sqrt()
    )
    # R (C + w I) R^T = I, so what is left of the covariance is I - w R R^T.
    torch.testing.assert_close(
        y_CM @ y_CM.T / y_CM.shape[1],
        torch.eye(6) - 0.2 * scaled @ scaled.T,
        atol=1e-4,
        rtol=1e-4,
        check_dtype=False,
    )
    row_BD = whitening(f_NCQ[:9])
    torch.testing.assert_close(torch.linalg.vector_norm(row_BD, dim=1), torch.ones(9))


def test_cell_frequencies_are_an_orthogonal_transform_with_the_cells_mean_as_constant() -> None:
    plain_QQ, scaled_QQ = (
        cell_frequencies(3, 3, [1.0]),
        cell_frequencies(3, 3, [4.0, 2.0, 1.0, 0.5]),
    )
    torch.testing.assert_close(plain_QQ @ plain_QQ.T, torch.eye(9), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        plain_QQ @ torch.ones(9), torch.tensor([3.0] + [0.0] * 8), atol=1e-6, rtol=0
    )
    energy = scaled_QQ.square().sum(1).unflatten(0, (3, 3))
    torch.testing.assert_close(
        energy, torch.tensor([[4.0, 2.0, 1.0], [2.0, 1.0, 0.5], [1.0, 0.5, 0.5]])
    )
    # A half that stands for a row which mirrors itself: its frequencies are the even ones of the
    # whole row.
    half = torch.rand(4, generator=torch.Generator().manual_seed(1))
    whole = fft.dct(torch.cat([half, half.flip(0)]).numpy(), norm="ortho")
    np.testing.assert_allclose(
        (cell_frequencies(1, 4, [1.0]) @ half).numpy() * math.sqrt(2), whole[::2], atol=1e-6
    )
    np.testing.assert_allclose(whole[1::2], 0, atol=1e-6)
    # Against SciPy's transform of one square.
    square = torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
    expected = fft.dctn(square.numpy(), norm="ortho")
    np.testing.assert_allclose(
        (plain_QQ @ square.flatten()).unflatten(0, (3, 3)).numpy(), expected, atol=1e-6
    )


def test_half_of_the_scattering_stands_for_the_whole(texture_NCHW: Tensor) -> None:
    transform = make_scattering(32, centred=True)
    mirror = mirror_channels(transform)
    assert torch.equal(mirror[mirror], torch.arange(3 * 81))
    x_BCHW = texture_NCHW.float() / 255
    whole = transform(x_BCHW, log=True).flatten(1, 2)
    whole = (whole + whole[:, mirror].flip(-1)) / 2
    half = scattering_channels(transform, x_BCHW)
    assert torch.equal(half.unflatten(2, (8, 4)), whole[..., :4])
    whitening = fit_whitening(half, 0.3, mirror)
    left = (whitening.matrix_CC @ (half - whitening.mean_CQ)).square().sum((1, 2))
    right_half, right_mean = half[:, mirror], whitening.mean_CQ[mirror]
    right = (whitening.matrix_CC @ (right_half - right_mean)).square().sum((1, 2))
    # The whitening treats both halves alike, so that lengths and angles are those of the whole.
    torch.testing.assert_close(right, left, rtol=1e-3, atol=1e-3)


def test_a_centred_transform_sees_the_mirror_image_mirrored(texture_NCHW: Tensor) -> None:
    x_BCHW = texture_NCHW.float() / 255
    error = {}
    for centred in (False, True):
        transform = make_scattering(32, centred=centred)
        plain, mirrored = (transform(x, log=True).flatten(1, 2) for x in (x_BCHW, x_BCHW.flip(-1)))
        error[centred] = float(
            (plain - mirrored[:, mirror_channels(transform)].flip(-1)).abs().mean() / plain.std()
        )
    assert error[True] < 0.01 < 0.1 < error[False]


@pytest.mark.parametrize("name", ["patches", "patches+scattering", "patches+scattering+zooms"])
def test_an_images_features_have_the_same_bits_whatever_stands_beside_it(
    name: str, small: SizeConstants, texture_NCHW: Tensor
) -> None:
    features = PatchFeatures({32: small}, scattering="scattering" in name, zooms="zooms" in name)
    x_BCHW = texture_NCHW.float() / 255
    whole_BD = features(x_BCHW)
    torch.testing.assert_close(torch.linalg.vector_norm(whole_BD, dim=1), torch.ones(24))
    for start, stop in ((3, 4), (0, 5), (7, 24), (16, 24)):
        assert torch.equal(features(x_BCHW[start:stop]), whole_BD[start:stop])
    other = x_BCHW.clone()
    other[:7], other[8:] = 1e3, -1e3
    assert torch.equal(features(other)[7], whole_BD[7])
    assert torch.equal(features(x_BCHW.flip(0)), whole_BD.flip(0))


@pytest.mark.parametrize("side", [32, 64])
def test_a_row_with_zooms_is_the_mean_of_those_of_versions_that_torchvision_makes(
    side: int, small: SizeConstants
) -> None:
    constants = small if side == 32 else learn_constants(replace(SMALL, side_px=64, stride=2))
    plain, features = (
        PatchFeatures({side: constants}, scattering=True, zooms=zooms) for zooms in (False, True)
    )
    x_BCHW = textures(torch.arange(6), side).float() / 255
    edge = side // 16
    inner = center_crop(x_BCHW, [side - 2 * edge] * 2)
    outer = pad(x_BCHW, [edge] * 4, padding_mode="reflect")
    versions = [
        x_BCHW,
        resize(inner, [side] * 2, InterpolationMode.BICUBIC, antialias=False),
        resize(outer, [side] * 2, InterpolationMode.BICUBIC, antialias=True),
    ]
    mean_BD = torch.stack([plain(version).double() for version in versions]).mean(0)
    wanted_BD = mean_BD / mean_BD.norm(dim=1, keepdim=True)
    assert (features(x_BCHW) - wanted_BD).abs().max() < 1e-6
    assert (plain(x_BCHW) - wanted_BD).norm(dim=1).min() > 0.05
    # an image and its mirror image have the same row, as without zooms
    mirrored_BD, row_BD = features(x_BCHW.flip(-1)), features(x_BCHW)
    off, off_plain = (
        (a - b).norm(dim=1).max()
        for a, b in ((mirrored_BD, row_BD), (plain(x_BCHW.flip(-1)), plain(x_BCHW)))
    )
    assert off < off_plain + 0.01


def test_orders_tell_the_frequencies_of_a_rows_dimensions(texture_NCHW: Tensor) -> None:
    order_D = feature_orders(scattering=True)
    assert order_D.shape == (22_176,) and order_D.unique().tolist() == [0, 1, 2, 3]
    assert (feature_orders(scattering=False) == order_D[:14_400]).all()
    # Order 0 is a mean over all cells: shuffling the rows of cells leaves it alone, and moves every
    # other vertical frequency.
    cells_QQ = load_constants(32).scattering.cells_QQ
    assert cells_QQ is not None
    f_QC = torch.rand(32, 243, generator=torch.Generator().manual_seed(0))
    moved_QC = f_QC.unflatten(0, (8, 4))[torch.tensor([4, 0, 6, 2, 1, 7, 3, 5])].flatten(0, 1)
    same_D = ((cells_QQ @ f_QC - cells_QQ @ moved_QC).abs() < 1e-5).flatten()
    assert (
        same_D[order_D[14_400:] == 0].all() and same_D.unflatten(0, (8, 4, 243)).all(2).sum() == 4
    )  # u = 0
    encoder = fixed_encoder("patches+scattering", 32)
    assert (
        encoder.order_D is not None
        and len(encoder.order_D) == encoder.poolings(torch.rand(1, 3, 32, 32))["3x3"].shape[1]
    )
    assert fixed_encoder("hog").order_D is None


def test_an_image_is_seen_at_its_own_resolution_on_any_canvas(small: SizeConstants) -> None:
    larger = learn_constants(replace(SMALL, side_px=64, stride=2))
    features = PatchFeatures({32: small, 64: larger}, scattering=True)
    encoder = replace(
        fixed_encoder("patches", 64), poolings=lambda x_BCHW: {"3x3": features(x_BCHW)}
    )
    pixels = [
        np.asarray(textures(torch.tensor([side]), side)[0].permute(1, 2, 0))
        for side in (32, 64, 36, 150)
    ]
    shown = [encoder.preprocess(p) for p in pixels]
    assert [x.shape for x in shown] == [(3, 64, 64)] * 4
    together = features(torch.from_numpy(np.stack(shown)))
    assert blank_margin(torch.from_numpy(np.stack(shown))).tolist() == [32, 0, 32, 0]
    small_alone = features(torch.from_numpy(pixels[0]).permute(2, 0, 1)[None].float() / 255)
    torch.testing.assert_close(together[:1], small_alone, atol=1e-5, rtol=1e-5)
    for b in range(4):
        assert torch.equal(features(torch.from_numpy(shown[b])[None])[0], together[b])


@pytest.mark.parametrize(
    ("side", "seen"),
    [(8, 32), (28, 32), (32, 32), (50, 32), (52, 64), (64, 64), (102, 64), (103, 128), (5000, 224)],
)
def test_the_resolution_follows_the_shorter_side(side: int, seen: int) -> None:
    assert own_size(side, side + 70, SIZES) == own_size(side + 70, side, SIZES) == seen


def test_every_image_that_can_be_decoded_has_finite_features() -> None:
    encoder = fixed_encoder("patches+scattering", 64)
    assert encoder.own_sizes == (32, 64) and encoder.image_size == 64
    rng = np.random.Generator(np.random.PCG64(0))
    kinds = {
        "grey": Image.fromarray(rng.integers(0, 256, (40, 40), dtype=np.uint8)),
        "16 bit": Image.fromarray(rng.integers(0, 1 << 16, (64, 64), dtype=np.uint16)),
        "tiny": Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)),
        "one pixel": Image.new("RGB", (1, 1), (255, 0, 0)),
        "black": Image.new("RGB", (64, 64)),
        "white": Image.new("RGB", (300, 20), (255, 255, 255)),
        "huge": Image.effect_noise((3000, 2000), 80).convert("RGB"),
        "transparent": Image.fromarray(rng.integers(0, 256, (64, 64, 4), dtype=np.uint8), "RGBA"),
    }
    x_BCHW = torch.from_numpy(np.stack([encoder.preprocess(image) for image in kinds.values()]))
    row_BD = encoder.poolings(x_BCHW)["3x3"]
    assert row_BD.isfinite().all() and row_BD.shape == (8, 9 * 1600 + 32 * 243)
    cosine_BB = row_BD @ row_BD.T
    assert (cosine_BB.fill_diagonal_(0) < 0.999).all()


def test_the_encoder_says_what_it_is_made_of() -> None:
    encoder = fixed_encoder("patches", 100)
    assert (encoder.own_sizes, encoder.image_size, encoder.standard_rows, encoder.family) == (
        (32, 64),
        64,
        True,
        "fixed",
    )
    assert encoder.lineage[0]["visibility"] == "public" and encoder.weights == "trained"
    assert fixed_encoder("patches").own_sizes == (32, 64, 128)
    with pytest.raises(ConfigError, match=r"image_size=7; expected 8 px or more for patches"):
        fixed_encoder("patches", 7)


def test_saved_constants_give_the_same_features_and_damaged_ones_are_refused(
    small: SizeConstants, texture_NCHW: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, 32, SMALL)
    path = tmp_path / "patches-32px.safetensors"
    save_constants(small, path)
    x_BCHW = texture_NCHW.float() / 255
    a_BD, b_BD = (
        PatchFeatures({32: c}, scattering=True)(x_BCHW)
        for c in (small, load_constants(32, tmp_path))
    )
    assert float((a_BD - b_BD).abs().max()) < 2e-3 * float(a_BD.abs().max())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cannot be read .* Reinstall dpvision"):
        load_constants(32, tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        load_constants(64, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("side", SIZES)
def test_the_shipped_constants_are_those_that_textures_give(side: int) -> None:
    shipped, learned = load_constants(side), learn_constants(SETTINGS[side])
    torch.testing.assert_close(shipped.bank.weight_PK, learned.bank.weight_PK, atol=1e-4, rtol=1e-3)
    x_BCHW = textures(torch.arange(50_000, 50_020), side).float() / 255
    a_BD, b_BD = (PatchFeatures({side: c}, scattering=True)(x_BCHW) for c in (shipped, learned))
    assert float(F.cosine_similarity(a_BD, b_BD).min()) > 0.9999


@pytest.mark.parametrize(
    ("side", "digest"),
    [
        (32, "36d9215238fe4acd8114b6d0c37bbdb12ffe660c1ab28c9c537860410f8d8c66"),
        (64, "2f37f480704283c5a14d07ea8794d025887d6b280681d46a75a5a73c94337061"),
        (128, "8e749ecafba892f3813a84ac055a3398a7e16f33b530451e4e705d3fa5321d5e"),
        (224, "51953c56c6a0ee44e4eec1561156915acd0c5f0dd26790e79d6856f0010339cd"),
    ],
)
def test_the_shipped_files_are_those_that_the_slow_test_compared(side: int, digest: str) -> None:
    """Who changes a file runs the slow test above and writes the new digest here."""
    assert (
        hashlib.sha256((FOLDER / f"patches-{side}px.safetensors").read_bytes()).hexdigest()
        == digest
    )


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit(small: SizeConstants, texture_NCHW: Tensor) -> None:
    features, threads = PatchFeatures({32: small}, scattering=True), torch.get_num_threads()
    x_BCHW = textures(torch.arange(70), 32).float() / 255
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(features(x_BCHW))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])
    with torch.inference_mode():
        assert torch.equal(features(x_BCHW[:20]), found[0][:20])


def test_the_fingerprint_tells_constants_of_every_resolution_apart(small: SizeConstants) -> None:
    larger = learn_constants(replace(SMALL, side_px=64, stride=2, num_textures=24))
    moved = small.patches.mean_CQ + 0.01
    patches = Whitening(moved, small.patches.matrix_CC, small.patches.cells_QQ)
    other = SizeConstants(small.bank, patches, small.scattering)
    found = []
    for smallest in (small, other):
        features = PatchFeatures({32: smallest, 64: larger}, scattering=False)
        found.append(
            fingerprint(
                replace(
                    fixed_encoder("patches", 64),
                    poolings=lambda x_BCHW, f=features: {"3x3": f(x_BCHW)},
                )
            )
        )
    assert found[0] != found[1]
