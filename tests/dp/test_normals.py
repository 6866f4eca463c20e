"""Normals: the exact function of the stream's words, their law far into the tails, and any range
drawn alone.
"""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import torch
from made import key
from mpmath import mp

from dpvision.dp import normals as normals_module
from dpvision.dp.normals import (
    Normals,
    box_muller,
    key_words,
    normals,
    second_uniforms,
    smallest_words,
)
from dpvision.privacy.gaussian import LARGEST_NORMAL
from dpvision.privacy.stream import Key, Keystream, subkey

KEY = subkey(key(), "noise", step=3, parameter="a")
LARGEST = math.sqrt(130 * math.log(2))


def words(count: int, key: Key = KEY) -> np.ndarray:
    word_W = np.empty(count, dtype="<i8")
    Keystream(key).fill(word_W)
    return word_W


def violations(x: np.ndarray) -> list[str]:
    """Which laws of a standard normal sample ``x`` breaks, each at about five standard errors."""
    n, square = len(x), x**2
    found = []
    for name, got, expected, variance in (
        ("mean", x.mean(), 0, 1),
        ("variance", square.mean(), 1, 2),
        ("skewness", (square * x).mean(), 0, 15),
        ("kurtosis", (square**2).mean(), 3, 96),
        ("sixth moment", (square**3).mean(), 15, 10_170),
        ("neighbours", (x[1:] * x[:-1]).mean(), 0, 1),
        ("squares of neighbours", ((square[1:] - 1) * (square[:-1] - 1)).mean(), 0, 4),
    ):
        if not abs(got - expected) < 5 * math.sqrt(variance / n):
            found.append(name)
    for sigma in (3.0, 4.0):
        for side, seen in (("upper", (x > sigma).sum()), ("lower", (x < -sigma).sum())):
            mean = n * scipy.stats.norm.sf(sigma)
            if (
                not min(scipy.stats.poisson.cdf(seen, mean), scipy.stats.poisson.sf(seen - 1, mean))
                > 1e-7
            ):
                found.append(f"{side} tail at {sigma:g}")
    if not scipy.stats.kstest(x[:100_000], "norm").pvalue > 1e-6:
        found.append("distribution")
    return found


def test_normals_obey_their_law() -> None:
    assert violations(normals(KEY, 0, 2**20)) == []


def test_the_law_is_sharp_enough_to_see_mistakes() -> None:
    x = np.random.default_rng(0).standard_normal(2**20)
    assert violations(x) == []
    assert "mean" in violations(x + 0.006) and "variance" in violations(x * 1.006)
    assert "kurtosis" in violations(
        np.random.default_rng(0).laplace(scale=math.sqrt(0.5), size=2**18)
    )
    assert violations(np.clip(x, -4, 4)) == ["upper tail at 4", "lower tail at 4"]
    assert "neighbours" in violations(np.repeat(x[::2], 2))
    assert "distribution" in violations(np.round(x, 1))


@pytest.mark.parametrize("bits", [10, 20, 30, 40])
def test_the_far_tail_is_that_of_a_normal(bits: int) -> None:
    """Words divided by 2^40: radii beyond 7.4 standard deviations, as 1 in 10^12 is. Their half
    squares are shifted exponentials.
    """
    word = words(2**18).view(np.uint64)
    word[0::2] >>= np.uint64(bits)
    x = all_normals(word.view(np.int64))
    half_square = (x[0::2] ** 2 + x[1::2] ** 2) / 2 - bits * math.log(2)
    assert half_square.min() > 0
    assert scipy.stats.kstest(half_square, "expon").pvalue > 1e-6


def all_normals(word_W: np.ndarray) -> np.ndarray:
    made = Normals()
    return np.concatenate(
        [
            made.box_muller(part.copy()).copy()
            for part in np.split(word_W, max(1, len(word_W) // 2**15))
        ]
    )


@pytest.mark.parametrize("way", ["numpy", "torch"])
def test_a_normal_is_the_exact_function_of_its_words_within_4_ulp(way: str) -> None:
    """Of the float64 uniform and angle, against 50 digits; both are within half a unit of the
    words' (``test_stream``).
    """
    ends = [
        0,
        1,
        -1,
        2**63 - 1,
        -(2**63),
        2**52,
        -(2**11),
        2**61,
        -(2**61),
        2**62,
        -(2**62),
        3 * 2**61,
        12345,
    ]
    word_W = np.concatenate([np.array([[k, w] for k in ends for w in ends]).ravel(), words(4000)])
    got = (
        Normals().box_muller(word_W.copy())
        if way == "numpy"
        else box_muller(torch.from_numpy(word_W)).numpy()
    )
    with mp.workprec(170):
        for at in range(0, len(word_W), 2):
            scaled = (float(word_W[at]) + 0.5) * 2.0**-64
            uniform, angle = (
                scaled - math.floor(scaled),
                float(word_W[at + 1]) * (2 * math.pi * 2.0**-64),
            )
            radius = mp.sqrt(-2 * mp.log(mp.mpf(uniform)))
            for value, expected in zip(
                got[at : at + 2], (radius * mp.cos(angle), radius * mp.sin(angle)), strict=True
            ):
                assert abs(mp.mpf(float(value)) - expected) <= 4 * np.spacing(abs(float(expected)))


def test_the_largest_normal_is_beyond_nine_standard_deviations() -> None:
    """k = 0 without a second word, at the angles 0, a quarter, a half and three quarters of a turn;
    with one the missing mass is as stated.
    """
    quarter = [0, 2**62, -(2**63), -(2**62)]
    x = Normals().box_muller(np.array([[0, angle] for angle in quarter]).ravel()).reshape(4, 2)
    expected = LARGEST * np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])
    np.testing.assert_allclose(x, expected, atol=2e-15, rtol=1e-15)
    assert abs(LARGEST - 9.492) < 1e-3
    assert 2 * scipy.stats.norm.sf(LARGEST_NORMAL) == pytest.approx(8.7e-41, rel=0.03)
    assert math.sqrt(-2 * math.log(2.0**-64 * 2.0**-65)) == LARGEST_NORMAL


def by_torch(word_W: torch.Tensor, first_pair: int) -> np.ndarray:
    """As a GPU does it, but with as many second words as there may be."""
    found_K2 = smallest_words(word_W, most=len(word_W))
    uniform_K = second_uniforms(found_K2, KEY, first_pair)
    return box_muller(word_W, second=(found_K2[:, 0], uniform_K)).numpy()


def test_the_smallest_words_are_those_of_the_smallest_uniforms() -> None:
    word_W = torch.from_numpy(words(4096))
    found_K2 = smallest_words(word_W, most=10)
    unsigned_H = word_W.numpy().view(np.uint64)[0::2]
    assert set(found_K2[:, 0].tolist()) == set(np.argsort(unsigned_H)[:10].tolist())
    assert torch.equal(found_K2[:, 1], word_W[0::2][found_K2[:, 0]])
    assert len(smallest_words(word_W[:16])) == 8


def test_second_words_are_the_same_by_numpy_and_torch_and_in_any_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(normals_module, "_RARE", 0.3)
    whole, word_W = normals(KEY, 0, 4096), words(4096)
    theirs = by_torch(torch.from_numpy(word_W), 0)
    assert (np.abs(whole - theirs) <= 4 * np.spacing(np.abs(whole))).all()
    assert np.array_equal(normals(KEY, 999, 2001), whole[999:2001])
    later = by_torch(torch.from_numpy(word_W[1024:]), 512)
    np.testing.assert_array_equal(later, theirs[1024:])


@pytest.mark.parametrize(
    ("first", "stop"),
    [
        (0, 1),
        (1, 2),
        (7, 9),
        (8, 16),
        (5, 270_000),
        (2**17 - 1, 2**17 + 1),
        (40_001, 40_001),
        (99_999, 100_000),
    ],
)
def test_any_range_is_the_slice_of_the_whole(first: int, stop: int) -> None:
    whole = normals(KEY, 0, 300_000)
    assert np.array_equal(normals(KEY, first, stop), whole[first:stop])


def test_a_range_far_out_needs_nothing_before_it() -> None:
    assert np.array_equal(normals(KEY, 2**35 - 5, 2**35), normals(KEY, 2**35 - 9, 2**35)[4:])


def test_standard_deviations_scale() -> None:
    [(at, scaled)] = Normals().blocks(KEY, 3, 1000, std=0.37)
    assert at == 3
    np.testing.assert_allclose(scaled, 0.37 * normals(KEY, 3, 1000), rtol=1e-15)


def test_torch_and_numpy_agree_within_4_ulp() -> None:
    """The second is what a GPU computes."""
    word_W = words(2**20)
    ours, theirs = all_normals(word_W), box_muller(torch.from_numpy(word_W)).numpy()
    assert (np.abs(ours - theirs) <= 4 * np.spacing(np.abs(ours))).all()
    assert violations(theirs) == []


INTERPRETED = """
import numpy as np, torch
from dpvision.dp.chacha_triton import chacha_words
from dpvision.dp.normals import key_words
from dpvision.privacy.stream import Key, Keystream

for block, num in ((0, 1), (5, 300), (2**31 - 3, 10), (2**32 - 130, 130)):
    key = Key.for_tests(bytes(range(num % 7, num % 7 + 32)))
    expected = np.empty(8 * num, dtype="<i8")
    Keystream(key, block).fill(expected)
    assert torch.equal(chacha_words(key_words([Key.for_tests(bytes(32)), key])[1], block, num),
                       torch.from_numpy(expected)), (block, num)
print("equal")
"""


@pytest.mark.slow
def test_the_gpu_kernel_makes_the_same_words_bit_for_bit() -> None:
    """Under Triton's interpreter, on a CPU."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


def test_the_gpu_kernel_compiles_for_gpus_that_are_not_here() -> None:
    """To machine code of the A100 (8.0) and of the H100 (9.0), with Triton's own assembler; block
    numbers of 32 and of 64 bits.
    """
    pytest.importorskip("triton")
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpvision.dp.chacha_triton import _PROGRAM_BLOCKS, _words

    for capability, integer in ((80, "i32"), (90, "i32"), (90, "i64")):
        types = {
            "out_W": "*i64",
            "key_8": "*i64",
            "first_block": integer,
            "num_blocks": integer,
            "PROGRAM_BLOCKS": "constexpr",
        }
        source = ASTSource(
            fn=_words, signature=types, constexprs={"PROGRAM_BLOCKS": _PROGRAM_BLOCKS}
        )
        assert (
            len(compile_kernel(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])
            > 1000
        )


@pytest.mark.gpu
def test_a_gpu_makes_the_same_normals() -> None:
    from dpvision.dp.chacha_triton import chacha_words

    made = chacha_words(key_words([KEY])[0].to("cuda"), 0, 2**17)
    assert np.array_equal(made.cpu().numpy(), words(2**20))
    ours, theirs = normals(KEY, 0, 2**20), box_muller(made).cpu().numpy()
    assert (np.abs(ours - theirs) <= 4 * np.spacing(np.abs(ours))).all()


def test_a_thread_holds_a_few_mebibytes_in_float64() -> None:
    assert (
        Normals()._word_W.nbytes + Normals()._spare_3H.nbytes <= 3 * 2**20
        and normals_module._BLOCK % 8 == 0
    )
