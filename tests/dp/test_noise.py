"""The law of the noise, the independence of its streams, its divisor; and that these tests see the usual mistakes."""

import hashlib
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpvision.config import PrivacyConfig
from dpvision.dp import hardened
from dpvision.dp.clip import ClippedSum
from dpvision.dp.hardened import hardened_normals
from dpvision.dp.noise import DPGradient, new_key, privatize, torch_normals
from dpvision.errors import PrivacyError
from dpvision.privacy.plan import make_plan

GENERATORS = ["torch", "hardened"]
KEY = bytes(range(32))
STD, BATCH, CLIP = 0.75, 40.0, 0.5


def plan(generator="torch", guarantee="simulated"):
    noise = {} if guarantee == "none" else {"noise_multiplier": STD / CLIP, "max_grad_norm": CLIP}
    return make_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=BATCH,
            steps=10,
            guarantee=guarantee,
            noise_generator=generator,
            **{"max_grad_norm": None, **noise},
        )
    )


def zeros(num_records=3, **sizes) -> ClippedSum:
    return ClippedSum({name: torch.zeros(size) for name, size in sizes.items()}, num_records, torch.ones(3), torch.ones(3), CLIP)


def noise(step=0, key=KEY, generator="torch", **sizes) -> dict[str, np.ndarray]:
    """Noise in units of its standard deviation."""
    gradient = privatize(zeros(**sizes), plan(generator), step, key)
    return {name: value.double().numpy() * BATCH / STD for name, value in gradient.grads.items()}


def violations(x: np.ndarray) -> list[str]:
    """Which laws of a standard normal sample ``x`` breaks, each at about five standard errors."""
    n = len(x)
    found = []
    if not abs(x.mean()) < 5 / math.sqrt(n):
        found.append("mean")
    if not abs(x.var() - 1) < 5 * math.sqrt(2 / n):
        found.append("variance")
    if not abs(scipy.stats.skew(x)) < 5 * math.sqrt(6 / n):
        found.append("skewness")
    if not abs(scipy.stats.kurtosis(x)) < 5 * math.sqrt(24 / n):
        found.append("kurtosis")
    if not scipy.stats.kstest(x, "norm").pvalue > 1e-6:
        found.append("distribution")
    return found


@pytest.mark.parametrize("generator", GENERATORS)
def test_noise_is_normal_with_the_plans_scale(generator):
    drawn = noise(generator=generator, matrix=(1000, 900), bias=100_000)
    x = np.concatenate([drawn["matrix"].ravel(), drawn["bias"]])
    assert len(x) == 10**6 and violations(x) == []


def test_the_law_is_sharp_enough_to_see_mistakes():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(10**6)
    assert violations(x) == []
    assert "mean" in violations(x + 0.0375)
    assert "variance" in violations(x * math.sqrt(1.0625))
    assert "kurtosis" in violations(rng.laplace(scale=math.sqrt(0.5), size=10**6))
    assert "distribution" in violations(rng.uniform(-math.sqrt(3), math.sqrt(3), 10**6))


@pytest.mark.parametrize("generator", GENERATORS)
def test_streams_do_not_correlate(generator):
    size = 2**20
    first = noise(step=5, generator=generator, a=2 * size, b=size)
    later = noise(step=6, generator=generator, a=size)
    restarted = noise(step=5, key=bytes(32), generator=generator, a=size)
    streams = [first["a"][:size], first["a"][size:], first["b"], later["a"], restarted["a"]]
    off_diagonal = np.corrcoef(streams)[~np.eye(len(streams), dtype=bool)]
    assert np.abs(off_diagonal).max() < 4e-3
    assert abs(np.corrcoef(first["b"][1:], first["b"][:-1])[0, 1]) < 4e-3


@pytest.mark.parametrize("generator", GENERATORS)
def test_noise_is_a_function_of_key_step_and_name(generator):
    reference = noise(step=2, generator=generator, a=50, b=50)
    assert np.array_equal(noise(step=2, generator=generator, b=50)["b"], reference["b"]), "other parameters changed it"
    for other in (
        noise(step=3, generator=generator, a=50)["a"],
        noise(step=2, key=new_key(), generator=generator, a=50)["a"],
        reference["b"],
    ):
        assert not np.isin(other, reference["a"]).any()


def test_keys_come_fresh_from_the_operating_system():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and {len(key) for key in keys} == {32}


def test_whole_state_of_the_generator_is_keyed():
    """Against numpy's Mersenne Twister from the same 624 words; ``manual_seed`` would keep 32 bits of any seed."""
    a, b = (torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32))
    assert torch.equal(a, b), "torch now uses more bits of a CPU seed: the comment in torch_normals is out of date"
    twister = np.random.MT19937()
    words = np.frombuffer(hashlib.shake_256(KEY).digest(2496), dtype="<u4")
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    raw = twister.random_raw(32).reshape(16, 2)
    uniform = (((raw[:, 0] << np.uint64(32)) | raw[:, 1]) & np.uint64(2**53 - 1)).astype(np.float64) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log1p(-uniform[:8])), 2 * np.pi * uniform[8:]
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    np.testing.assert_allclose(torch_normals(KEY, 16).numpy(), expected, rtol=1e-12, atol=1e-14)


def test_hardened_stream_is_aes_in_counter_mode_added_in_fours():
    ecb = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    blocks = b"".join(ecb.update(counter.to_bytes(16, "big")) for counter in range(10))
    uniform = [((int.from_bytes(blocks[8 * i : 8 * i + 8], "little") >> 12) + 0.5) / 2**52 for i in range(20)]
    np.testing.assert_array_equal(hardened._uniforms(KEY, 20), uniform)
    radius, angle = uniform[:10], uniform[10:]
    four = [math.sqrt(-2 * math.log(r)) * f(2 * math.pi * a) for f in (math.cos, math.sin) for r, a in zip(radius, angle, strict=True)]
    expected = [sum(four[k::5]) / 2 for k in range(5)]
    np.testing.assert_allclose(hardened_normals(KEY, 5).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("num_records", [0, 1, 40, 63])
def test_divisor_is_the_expected_batch_size_whatever_was_realised(num_records):
    total = ClippedSum({"a": torch.full((1000,), 8.0)}, num_records, torch.ones(num_records), torch.ones(num_records), CLIP)
    gradient = privatize(total, plan(), 0, KEY)
    torch.testing.assert_close(gradient.grads["a"], (8.0 + STD * torch.from_numpy(noise(a=1000)["a"])).float() / BATCH)
    assert isinstance(gradient, DPGradient) and gradient.grads["a"].dtype == torch.float32


def test_noise_is_added_once_whatever_the_number_of_physical_batches():
    parts = zeros(a=1000) + zeros(a=1000) + zeros(a=1000)
    assert torch.equal(privatize(parts, plan(), 4, KEY).grads["a"], privatize(zeros(a=1000), plan(), 4, KEY).grads["a"])


def test_without_guarantee_only_the_division_happens():
    total = ClippedSum({"a": torch.tensor([8.0, 1.0]), "b": torch.tensor(3.0)}, 5, torch.zeros(0), torch.ones(5), None)
    gradient = privatize(total, plan(guarantee="none"), 0, KEY)
    torch.testing.assert_close(gradient.grads, {"a": torch.tensor([0.2, 0.025]), "b": torch.tensor(0.075)})


def test_secret_sum_is_not_written_to():
    total = zeros(a=10)
    privatize(total, plan(), 0, KEY)
    assert not total.grads["a"].any()


@pytest.mark.parametrize("key", [b"", b"short", bytes(64)])
def test_key_of_another_length_is_refused(key):
    with pytest.raises(PrivacyError, match="new_key"):
        privatize(zeros(a=3), plan(), 0, key)


@pytest.mark.parametrize("std", [0.0, float("nan")])
def test_guarantee_without_noise_is_refused(std):
    broken = SimpleNamespace(guarantee="dp", noise_std=std, expected_batch_size=BATCH, noise_generator="torch")
    with pytest.raises(PrivacyError, match="noise_std"):
        privatize(zeros(a=3), broken, 0, KEY)


@pytest.mark.parametrize("max_grad_norm", [0.4999, 0.5001, 5.0, None])
def test_a_sum_of_another_clip_norm_than_the_plans_is_refused(max_grad_norm):
    other = replace(zeros(a=3), max_grad_norm=max_grad_norm)
    with pytest.raises(PrivacyError, match=r"max_grad_norm=plan\.max_grad_norm"):
        privatize(other, plan(), 0, KEY)
    assert privatize(zeros(a=3), plan(), 0, KEY).grads["a"].any()
    with pytest.raises(PrivacyError, match="plan with max_grad_norm=None"):
        privatize(zeros(a=3), plan(guarantee="none"), 0, KEY)
