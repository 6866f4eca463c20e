import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from dpvision.encoders.encoder import Encoder
from dpvision.encoders.fixed import FIXED, fixed_encoder, raw_pixels
from dpvision.encoders.open import open_encoder
from dpvision.errors import ConfigError
from dpvision.eval.probes.ridge import fit_ridge

NAMES = list(FIXED)
CIFAR = Path(__file__).parents[2].parent / "shared" / "data" / "cifar10"


def _features(encoder: Encoder, x_BCHW: Tensor) -> Tensor:
    """Default pooling of pixels from 0 to 1, a few hundred at a time."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (encoder.mean, encoder.std))
    with torch.inference_mode():
        return torch.cat(
            [
                next(iter(encoder.poolings((part - mean) / std).values()))
                for part in x_BCHW.split(200)
            ]
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [16, 28, 32, 50, 64])
def test_each_gives_finite_features_for_every_size_and_each_image_on_its_own(
    name: str, size: int
) -> None:
    encoder = fixed_encoder(name, size)
    assert (encoder.name, encoder.family, encoder.backbone, encoder.confidential) == (
        name,
        "fixed",
        None,
        False,
    )
    assert encoder.image_size == (
        size if not name.startswith("patches") else max(s for s in (32, 64) if s <= max(size, 32))
    )
    x = torch.rand(
        5, 3, encoder.image_size, encoder.image_size, generator=torch.Generator().manual_seed(0)
    )
    feature = _features(encoder, x)
    assert feature.dtype == torch.float32 and feature.ndim == 2 and feature.isfinite().all()
    torch.testing.assert_close(_features(encoder, x[2:3]), feature[2:3], atol=1e-4, rtol=1e-4)
    assert feature.std(dim=0).max() > 0


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("pixels", 768),
        ("hog", 7 * 7 * 36),
        ("scattering", 3 * 81 * 16),
        ("patches", 14_400),
        ("patches+scattering", 22_176),
        ("patches+scattering+zooms", 22_176),
    ],
)
def test_widths_at_thirty_two_pixels_are_those_of_the_documentation(name: str, width: int) -> None:
    assert _features(fixed_encoder(name, 32), torch.rand(2, 3, 32, 32)).shape == (2, width)


@pytest.mark.parametrize("name", ["scattering"])
def test_a_larger_image_of_the_same_thing_has_nearly_the_same_features(name: str) -> None:
    line = torch.linspace(0, 1, 96)
    large = (0.5 + 0.4 * (6 * line[:, None] + 9 * line).sin()).expand(1, 3, 96, 96)
    small = torch.nn.functional.interpolate(large, (32, 32), mode="area")
    a, b = _features(fixed_encoder(name, 96), large), _features(fixed_encoder(name, 32), small)
    assert (a - b).norm() < 0.1 * b.norm()


def test_pixels_are_those_of_the_baseline_of_every_score() -> None:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(open_encoder("pixels").poolings(x)["pixels"], raw_pixels(x)["pixels"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hog", "scattering"])
def test_edges_help_to_read_digits_from_few_examples(name: str) -> None:
    digits = load_digits()
    x = torch.from_numpy(digits.images[:800] / 16).float()[:, None].expand(-1, 3, -1, -1)
    x = torch.nn.functional.interpolate(x, (32, 32), mode="bilinear")
    label, train = digits.target[:800], np.arange(800) < 150

    def accuracy(encoder: str) -> float:
        feature = _features(fixed_encoder(encoder, 32), x).numpy()
        return float(
            (
                fit_ridge(feature[train], label[train]).predict(feature[~train]) == label[~train]
            ).mean()
        )

    assert accuracy(name) > accuracy("pixels") + 0.02


@pytest.mark.parametrize("spec", ["pixels", "timm:resnet18", "random:runs/a"])
def test_averaged_weights_of_what_has_none_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=rf"--ema with {spec}; expected a run"):
        open_encoder(spec, ema=True)


def test_unknown_names_and_tiny_images_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'sift'; expected one of "
        r"\['pixels', 'hog', 'scattering', 'patches', 'patches\+scattering', "
        r"'patches\+scattering\+zooms'\]",
    ):
        fixed_encoder("sift", 32)
    with pytest.raises(ConfigError, match=r"image_size=7; expected 8 px or more for hog\. Enlarge"):
        fixed_encoder("hog", 7)
    with pytest.raises(ConfigError, match=r"image_size=8; expected 12 px or more for scattering"):
        fixed_encoder("scattering", 8)


@pytest.mark.slow
def test_patches_read_photographs_far_better_than_pixels_do() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    if not CIFAR.exists():
        pytest.skip(f"no CIFAR-10 in {CIFAR}")

    def read(part: str, num: int) -> tuple[Tensor, np.ndarray]:
        table = parquet.read_table(CIFAR / f"{part}.parquet").slice(0, num)
        files = table["image"].combine_chunks().field("bytes").to_pylist()
        pixels = np.stack(
            [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
        )
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, table["label"].to_numpy()

    (train_x, train_label), (test_x, test_label) = read("train", 5000), read("test", 2000)
    accuracy = {}
    for name in ("pixels", "patches+scattering"):
        encoder = fixed_encoder(name, 32)
        probe = fit_ridge(_features(encoder, train_x).numpy(), train_label)
        accuracy[name] = float(
            (probe.predict(_features(encoder, test_x).numpy()) == test_label).mean()
        )
    assert accuracy["patches+scattering"] > 0.6 > accuracy["pixels"] + 0.15


PINNED = {
    "pixels": (-2.888044, -6.86808),
    "hog": (1.654494, 1.487074),
    "scattering": (-0.4991893, -0.4347336),
    "patches": (0.4696827, -0.3086175),
    "patches+scattering": (0.7136088, 0.8724971),
}
"""The product of two images' features with cos(0), cos(1), ..., by the code before these features
were modules. The features of a head's run must stay what they were.
"""


@pytest.mark.parametrize("name", PINNED)
def test_features_are_those_of_earlier_versions(name: str) -> None:
    grey = (load_digits().images[:12] * 15.9).astype(np.uint8)
    sheets = [
        np.tile(np.concatenate(list(grey[i : i + k]), 1), (k, 1)) for i, k in ((0, 4), (4, 8))
    ]
    encoder = fixed_encoder(name)
    x_BCHW = torch.from_numpy(
        np.stack([encoder.preprocess(sheet[..., None].repeat(3, 2)) for sheet in sheets])
    )
    with torch.inference_mode():
        x_BD = encoder(x_BCHW).double()
    wave_D = torch.cos(torch.arange(x_BD.shape[1], dtype=torch.float64))
    np.testing.assert_allclose(x_BD @ wave_D, PINNED[name], atol=2e-4)
