"""Textures: pure functions of their integers, and pictures with the statistics that they claim."""

import numpy as np
import pytest
import torch

from dpvision.errors import ConfigError
from dpvision.mixing import mix_numpy, mix_torch, uniform_torch
from dpvision.synthetic.texture_bank import FIELD_SIDE, NUM_ANGLES, NUM_CONTOURS, NUM_FIELDS, contours_QA, fields_MSS
from dpvision.synthetic.textures import _count_things, textures


def test_a_picture_does_not_depend_on_the_others_or_on_their_order() -> None:
    """Parts, padding of vector instructions and the sort by number of things must not show in a bit."""
    number = torch.arange(40)
    look = number * 7 + 1
    for size in (24, 32, 64):
        together = textures(number, size, instance_N=look)
        backwards = textures(number.flip(0), size, instance_N=look.flip(0)).flip(0)
        alone = torch.cat([textures(number[i : i + 1], size, instance_N=look[i : i + 1]) for i in range(40)])
        assert torch.equal(together, backwards) and torch.equal(together, alone)


def test_threads_do_not_change_a_bit() -> None:
    number, before = torch.arange(24), torch.get_num_threads()
    one = textures(number, 96)
    try:
        torch.set_num_threads(3)
        assert torch.equal(textures(number, 96), one)
    finally:
        torch.set_num_threads(before)


def test_programs_and_instances_differ() -> None:
    number = torch.arange(300)
    flat = textures(number, 16).flatten(1).float()
    assert torch.unique(flat, dim=0).shape[0] == 300
    looks = textures(torch.full((50,), 3), 16, instance_N=torch.arange(50)).flatten(1)
    assert torch.unique(looks, dim=0).shape[0] == 50


def test_a_look_shows_the_same_world() -> None:
    """Another look at a program resembles its straight look more than another program does: in colour, at least."""
    number = torch.arange(200)
    straight = textures(number, 32).float().mean(dim=(2, 3))
    looked = textures(number, 32, instance_N=number + 5).float().mean(dim=(2, 3))
    own = (straight - looked).norm(dim=1).median()
    other = (straight - looked.roll(1, 0)).norm(dim=1).median()
    assert own < 0.6 * other


def test_the_same_world_at_every_size() -> None:
    """A large picture averaged down agrees with the small one, far beyond what two programs have in common."""
    number = torch.arange(60)
    small = textures(number, 32).float()
    large = torch.nn.functional.avg_pool2d(textures(number, 128).float(), 4)

    def likeness(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (x.mean(1).flatten(1) - x.mean(1).flatten(1).mean(1, keepdim=True) for x in (a, b))
        return torch.nn.functional.cosine_similarity(a, b)

    assert likeness(small, large).median() > 0.85
    assert likeness(small, large.roll(1, 0)).abs().median() < 0.3


def test_no_picture_is_empty() -> None:
    grey = textures(torch.arange(2000), 32).float().mean(1).flatten(1)
    assert (grey.std(dim=1) > 5).all(), "a nearly flat picture teaches nothing"
    clipped = ((grey < 1) | (grey > 254)).float().mean(dim=1)
    assert clipped.median() < 0.05


def test_the_spectrum_falls_as_that_of_things_and_not_of_noise() -> None:
    """Power over frequency, log-log, at 64 px: white noise has slope 0, 1/f noise -2, photographs about -2 to -3."""
    grey = textures(torch.arange(400), 64).float().mean(1).numpy()
    window = np.hanning(64)[:, None] * np.hanning(64)
    power = (np.abs(np.fft.fft2((grey - grey.mean((1, 2), keepdims=True)) * window)) ** 2).mean(0)
    cycles = np.fft.fftfreq(64, 1 / 64)
    radius = np.hypot(cycles[:, None], cycles[None]).round().astype(int)
    profile = np.array([power[radius == k].mean() for k in range(3, 25)])
    slope = np.polyfit(np.log(np.arange(3, 25)), np.log(profile), 1)[0]
    assert -3.3 < slope < -1.9


def test_edges_are_sparse_as_in_scenes_of_things() -> None:
    """Gradients of Gaussian noise have kurtosis 3; of pictures with occlusion far more."""
    grey = textures(torch.arange(300), 32).float().mean(1)
    step = grey.diff(dim=2).flatten()
    step = step - step.mean()
    assert step.pow(4).mean() / step.pow(2).mean() ** 2 > 6


def test_numbers_of_things_are_spread() -> None:
    count = _count_things(torch.arange(20_000)).bincount(minlength=13)
    assert count[:3].sum() == 0 and (count[3:] > 1700).all() and len(count) == 13


def test_the_bank_is_periodic_and_in_range() -> None:
    field, contour = fields_MSS(), contours_QA()
    assert field.shape == (NUM_FIELDS, FIELD_SIDE, FIELD_SIDE) and contour.shape == (NUM_CONTOURS, NUM_ANGLES)
    assert np.isfinite(field).all() and np.abs(field).max() <= 3
    assert (contour > 0).all() and np.allclose(contour.max(axis=1), 1)
    seam = np.abs(field[:, :, 0] - field[:, :, -1]).mean(axis=1)
    inside = np.abs(np.diff(field, axis=2)).mean(axis=(1, 2))
    assert (seam < 3 * inside + 0.05).mean() > 0.95, "a jump where the field repeats would be a line in the picture"


def test_numpy_and_torch_mix_alike() -> None:
    x = np.random.default_rng(0).integers(-(2**63), 2**63, 1000)
    assert np.array_equal(mix_torch(torch.from_numpy(x)).numpy().view(np.uint64), mix_numpy(x.view(np.uint64)))
    u = uniform_torch(torch.from_numpy(x), 64)
    assert u.min() >= 0 and u.max() < 1 and abs(float(u.mean()) - 0.5) < 4 * (1 / 12 / u.numel()) ** 0.5


@pytest.mark.parametrize(
    ("numbers", "size"),
    [(torch.arange(2), 4), (torch.arange(2), 2048), (torch.arange(2.0), 32), (torch.zeros(2, 2, dtype=torch.int64), 32)],
)
def test_wrong_arguments_are_refused(numbers: torch.Tensor, size: int) -> None:
    with pytest.raises(ConfigError, match="expected"):
        textures(numbers, size)


@pytest.mark.slow
def test_fused_pictures_are_the_same_pictures() -> None:
    """Compiled, and in a part that is not full: one level of 255 in a few pixels at most; nor does a neighbour change a bit."""
    number = torch.arange(21)
    eager, fused = textures(number, 32), textures(number, 32, compiled=True)
    difference = (eager.int() - fused.int()).abs()
    assert difference.max() <= 1 and (difference > 0).float().mean() < 1e-3
    assert torch.equal(textures(number[5:9], 32, compiled=True), fused[5:9])
