"""The secret stream: RFC 8439's own vectors, a second ChaCha20 written from its text, seeking,
subkeys, and the laws of the draws.
"""

import copy
import hashlib
import itertools
import os
import pickle

import numpy as np
import pytest
from mpmath import mp
from scipy import stats

from dpvision.errors import PrivacyError
from dpvision.privacy import stream as stream_module
from dpvision.privacy.stream import MAX_WORDS, Key, Keystream, Stream, new_key, subkey, uniforms

KEY = bytes(range(32))
RARE = 1e-6
"""Chance that a right draw fails a test of its law; the keys are fixed, so it either does or does
not.
"""

# RFC 8439, appendix A.1, test vectors 1 to 4 (all with nonce 0): key, block counter, keystream.
VECTORS = [
    (
        bytes(32),
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        bytes(32),
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        bytes(31) + b"\1",
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        b"\0\xff" + bytes(30),
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
]


def words(key: bytes, block: int, num_blocks: int) -> np.ndarray:
    word_W = np.empty(8 * num_blocks, dtype="<u8")
    Keystream(Key.for_tests(key), block).fill(word_W)
    return word_W


def chacha20(key: bytes, block: int, nonce: bytes = bytes(12)) -> bytes:
    """One block, written from section 2.3 of RFC 8439."""

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for one, other, third, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[one] = (x[one] + x[other]) % 2**32
            x[third] ^= x[one]
            x[third] = (x[third] << by | x[third] >> (32 - by)) % 2**32

    material = b"expand 32-byte k" + key + block.to_bytes(4, "little") + nonce
    start = [int.from_bytes(material[i : i + 4], "little") for i in range(0, 64, 4)]
    x = list(start)
    for _ in range(10):
        for i in range(4):
            quarter(i, i + 4, i + 8, i + 12)
        for i in range(4):
            quarter(i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12)
    return b"".join(((a + b) % 2**32).to_bytes(4, "little") for a, b in zip(x, start, strict=True))


@pytest.mark.parametrize(("key", "block", "expected"), VECTORS)
def test_the_words_are_those_of_rfc_8439(key: bytes, block: int, expected: str) -> None:
    assert words(key, block, 1).tobytes().hex() == expected == chacha20(key, block).hex()


def test_the_second_chacha20_is_the_one_of_section_2_3_2() -> None:
    assert chacha20(KEY, 1, bytes.fromhex("000000090000004a00000000")).hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize("block", [0, 7, 2**31 - 1, 2**32 - 3])
def test_any_block_can_be_read_alone(block: int) -> None:
    assert words(KEY, block, 3).tobytes() == b"".join(chacha20(KEY, block + i) for i in range(3))


def test_reading_on_is_reading_at_once() -> None:
    whole, keystream, parts = words(KEY, 0, 10_000), Keystream(Key.for_tests(KEY)), []
    for num_blocks in (
        1,
        4096,
        4097,
        1806,
    ):  # pieces on both sides of what the cipher takes at once
        part = np.empty(8 * num_blocks, dtype="<u8")
        keystream.fill(part)
        parts.append(part)
    assert np.array_equal(np.concatenate(parts), whole)
    rng = Stream(Key.for_tests(KEY))
    assert np.array_equal(
        np.concatenate([rng.words(1), rng.words(8)]), whole[[0, *range(8, 16)]]
    ), "a call starts at a new block"


def test_a_stream_ends_where_its_counter_does() -> None:
    assert MAX_WORDS == 2**35
    words(KEY, 2**32 - 1, 1)
    with pytest.raises(PrivacyError, match="256 GiB"):
        words(KEY, 2**32 - 1, 2)


def test_a_subkey_is_a_keyed_hash_of_what_it_is_for() -> None:
    expected = hashlib.blake2b(
        b'["noise", 2, 3, "a.weight"]', key=KEY, digest_size=32, person=b"dpvision.stream"
    ).digest()
    assert (
        subkey(Key.for_tests(KEY), "noise", run=2, step=3, parameter="a.weight").secret()
        == expected
    )
    uses = itertools.product(
        (KEY, bytes(32)),
        ("noise", "draw"),
        (0, 1, 23),
        (0, 1, 3, 31),
        ("", "a", "b", 'a", "b', "1"),
    )
    keys = [
        subkey(Key.for_tests(key), use, run=run, step=step, parameter=name).secret()
        for key, use, run, step, name in uses
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("secret", [b"", b"short", bytes(31), bytes(64)])
def test_a_key_of_another_length_is_refused(secret: bytes) -> None:
    with pytest.raises(PrivacyError, match="new_key"):
        Key.for_tests(secret)


def test_bytes_are_no_key() -> None:
    for use in (lambda: subkey(KEY, "noise"), lambda: Keystream(KEY), lambda: Stream(KEY)):  # type: ignore[arg-type]
        with pytest.raises(PrivacyError, match="key of type bytes"):
            use()


def test_a_key_is_not_shown_copied_or_pickled() -> None:
    key = Key.for_tests(KEY)
    assert KEY.hex() not in repr(key) and "x1f" not in repr(key) and not hasattr(key, "__dict__")
    for leave in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError, match="copied or pickled"):
            leave(key)


def test_a_key_that_was_handed_over_is_dead_and_the_other_one_is_the_same() -> None:
    key = Key.for_tests(KEY)
    other = key.hand_over(lambda secret: secret)
    assert other.secret() == KEY
    with pytest.raises(PrivacyError, match="given to a run"):
        key.secret()


def test_keys_come_fresh_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "os", os)
    keys = {new_key().secret() for _ in range(100)}
    assert len(keys) == 100 and {len(key) for key in keys} == {32}
    monkeypatch.setattr(stream_module.os, "urandom", lambda size: b"s" * size)
    assert new_key().secret() == b"s" * 32


def test_uniforms_keep_the_precision_of_small_ones() -> None:
    """Against exact rational numbers, within one unit in the last place: 2^-65 and not 0 at the
    lower end.
    """
    special = [
        0,
        1,
        2,
        3,
        2**11,
        2**52 + 1,
        2**53 + 1,
        2**62 - 1,
        2**63 - 1,
        2**63,
        2**63 + 1,
        2**64 - 2**11 - 1,
        2**64 - 1,
    ]
    word_W = np.array(special + Stream(Key.for_tests(KEY)).words(2000).tolist(), dtype=np.uint64)
    got, spare = np.empty(len(word_W)), np.empty(len(word_W))
    uniforms(word_W.view(np.int64), got, spare)
    with mp.workprec(200):
        for k, u in zip(word_W.tolist(), got.tolist(), strict=True):
            exact = (mp.mpf(k) + 0.5) / 2**64
            assert abs(mp.mpf(u) - exact) <= np.spacing(float(exact))
    assert got[0] == 2.0**-65 and got.min() > 0 and got[len(special) - 1] == 1
    assert stats.kstest(got[len(special) :], "uniform").pvalue > RARE


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 2**63 + 1, 2**64])
def test_bounded_integers_are_uniform(bound: int) -> None:
    rng = Stream(Key.for_tests(KEY))
    drawn = [rng.integer(bound) for _ in range(3000)]
    assert min(drawn) >= 0 and max(drawn) < bound
    cells = min(bound, 10)
    seen = np.bincount([cells * x // bound for x in drawn], minlength=cells)
    assert bound == 1 or stats.chisquare(seen).pvalue > RARE


def test_bounded_integers_are_unbiased_by_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words beyond the largest multiple of the bound would favour small numbers: they are drawn
    again.
    """
    given = iter([2**64 - 1, 2**64 - 2, 5])
    monkeypatch.setattr(
        Stream, "words", lambda self, count: np.array([next(given)], dtype=np.uint64)
    )
    assert Stream(Key.for_tests(KEY)).integer(2**63 - 1) == 5


@pytest.mark.parametrize(("num", "size"), [(1, 0), (1, 1), (6, 2), (5, 5), (5, 4)])
def test_every_subset_of_a_size_is_equally_likely(num: int, size: int) -> None:
    rng = Stream(Key.for_tests(KEY))
    subsets = list(itertools.combinations(range(num), size))
    drawn = [tuple(rng.subset(num, size).tolist()) for _ in range(300 * len(subsets))]
    seen = [drawn.count(subset) for subset in subsets]
    assert sum(seen) == len(drawn)
    assert len(subsets) == 1 or stats.chisquare(seen).pvalue > RARE


def test_a_tie_at_the_border_of_a_subset_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([[7, 7, 9], [9, 8, 7]])
    monkeypatch.setattr(Stream, "words", lambda self, count: np.array(next(given), dtype=np.uint64))
    assert Stream(Key.for_tests(KEY)).subset(3, 1).tolist() == [2]


@pytest.mark.parametrize("rate", [1e-12, 0.3, 0.999])
def test_a_gap_is_the_inverse_of_its_law(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """P(gap > m) = (1 - rate)^m = P(u <= (1 - rate)^m): the gap at u is the least m + 1 with (1 -
    rate)^(m + 1) < u, by exact numbers.
    """
    monkeypatch.setattr(Stream, "uniforms", lambda self, count: np.array(given))
    given = [2.0**-65, 1e-15, 1e-3, 0.1, 0.29, 0.5, 0.7000001, 0.9, 1 - 2.0**-53, 1.0]
    with mp.workprec(400):
        exact = [int(mp.floor(mp.log(mp.mpf(u)) / mp.log1p(-mp.mpf(rate)))) + 1 for u in given]
    got = Stream(Key.for_tests(KEY)).gaps(rate, len(given), 2**52)
    # Of the huge gaps at a rate of 1e-12, one in 1e15 of each is lost to rounding.
    np.testing.assert_allclose(got, np.minimum(exact, 2**52), rtol=1e-15 if rate < 1e-6 else 0)
    assert Stream(Key.for_tests(KEY)).gaps(rate, len(given), 17).max() <= 17
