"""The one source of secret randomness: ChaCha20 words under a key of the operating system.

Noise, Poisson draws, truncation subsets and the number of runs of a private selection are all
functions of these words. Each use has its own subkey, a keyed hash of what it is for, so no two
uses share a word. A word is addressed by its number: any part of a stream can be read alone.

    word i of a subkey = bytes 8 i to 8 i + 7 of ChaCha20(subkey, counter from 0, nonce 0),
                         little-endian     (RFC 8439, section 2.4)

Keys are opaque objects (decision 0039): not printed, copied or pickled; dead in a forked child; and
the noise of a step is drawn once.
"""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dpvision.errors import PrivacyError

KEY_BYTES = 32
WORDS_PER_BLOCK = 8
MAX_WORDS = WORDS_PER_BLOCK * 2**32
"""The block counter has 32 bits."""
_ZEROS = bytes(2**18)
"""Plaintext, so that the ciphertext is the stream; larger pieces leave the cache."""


_forks = 0
"""How often this process and those before it were forked, counted in the child."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Key:
    """A secret key of 32 bytes from the operating system, for one start of a run; ``new_key`` makes
    one.

    It refuses to work in a process that was forked after it was made, where it would give the noise
    and the draws of the parent again, and refuses to draw the noise of a step twice, also through
    keys made from it. Forked processes that use no key, such as workers that decode images, are not
    concerned.
    """

    __slots__ = ("_forks", "_secret", "_spent", "_uses")

    def __init__(self) -> None:
        self._hold(os.urandom(KEY_BYTES))

    @classmethod
    def for_tests(cls, secret: bytes) -> "Key":
        """Return the key of these 32 bytes, for tests and benchmarks only: whoever knows them can
        take off the noise.

        Raises:
            PrivacyError: they are not 32 bytes.
        """
        if len(secret) != KEY_BYTES:
            raise PrivacyError(
                f"stream: key of {len(secret)} bytes; expected {KEY_BYTES}. Use new_key()."
            )
        key = cls.__new__(cls)
        key._hold(secret)
        return key

    def _hold(self, secret: bytes) -> None:
        self._secret: bytes | None = secret
        self._forks = _forks
        self._uses: tuple[bytes, ...] = ()
        """The uses, one of the other, for which this key was made of the first one (``subkey``)."""
        self._spent: set[tuple[tuple[bytes, ...], int]] = set()
        """(uses, step) of what was drawn under the first key and all that were made of it, which
        share this set.
        """

    def _follow(self, key: "Key", *use: bytes) -> "Key":
        """Share the memory of ``key``, which this one was made of, and return this one."""
        self._spent, self._uses = key._spent, (*key._uses, *use)
        return self

    def made_for(self, use: bytes) -> "Key":
        """Return the key of one use, a keyed hash of its name; see ``subkey``."""
        made = hashlib.blake2b(
            use, key=self.secret(), digest_size=KEY_BYTES, person=b"dpvision.stream"
        ).digest()
        return Key.for_tests(made)._follow(self, use)

    def secret(self) -> bytes:
        """Return the bytes, for the ciphers of this package.

        Raises:
            PrivacyError: this process was forked after the key was made, or the key was handed
                over.
        """
        if self._forks != _forks:
            raise PrivacyError(
                "stream: a key made before this process was forked; expected one of this "
                "process, since both would draw the same noise. Draw and privatize in the "
                "process that called new_key(); start several ranks with torchrun."
            )
        if self._secret is None:
            raise PrivacyError(
                "stream: a key that was given to a run; expected a new one for each start. Use "
                "new_key()."
            )
        return self._secret

    def hand_over(self, exchange: Callable[[bytes], bytes]) -> "Key":
        """Return the key of the bytes that ``exchange`` makes of this one's, and disable this one:
        ranks share rank 0's key this way.
        """
        key = Key.for_tests(exchange(self.secret()))._follow(self)
        self._secret = None
        return key

    def spend(self, step: int) -> None:
        """Note that the noise of ``step`` is about to be drawn under this key.

        Raises:
            PrivacyError: it was drawn before: the difference of two releases with the same noise is
                that of the sums.
        """
        if (self._uses, step) in self._spent:
            raise PrivacyError(
                f"noise: step={step}; expected a step whose noise was not drawn under this key "
                "before, for any model: the same noise twice cancels in a difference. Release a "
                "step once, with all parameters in one sum; use new_key() for another run."
            )
        self._spent.add((self._uses, step))

    def spend_draw(self, step: int) -> None:
        """Note that the batch of ``step`` is about to be drawn with this key, which
        ``sampling.derive_rng`` made.

        Raises:
            PrivacyError: it is the key of another use or step, or drew this step before: draws must
                be independent.
        """
        if self._uses[-1:] != (_use("draw", 0, step, ""),) or (self._uses, step) in self._spent:
            raise PrivacyError(
                f"plan.draw: step={step}; expected the stream of this step under a key that did "
                "not draw it before: the same stream gives the same batch again. Use "
                "derive_rng(key, step) with one new_key() for each start of a run."
            )
        self._spent.add((self._uses, step))

    def __repr__(self) -> str:
        return "<secret key>"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "stream: a key that is copied or pickled; expected to stay in its process. Share it "
            "as train.loop does."
        )


def new_key() -> Key:
    """Return a fresh secret key from the operating system, one per start of a run: never written,
    logged or restored.
    """
    return Key()


def subkey(key: Key, purpose: str, *, run: int = 0, step: int = 0, parameter: str = "") -> Key:
    """Return the key of one use: keyed BLAKE2b of (purpose, run, step, parameter).

    Args:
        key: from ``new_key``, new at every start of a run.
        purpose: what the stream is for, such as "noise".
        run: number of the run inside a private selection, whose runs share a key; 0 elsewhere.
        step: number of the step in the ledger.
        parameter: name of the parameter, for noise.

    Raises:
        PrivacyError: not a key, or not of this process.
    """
    secret_of(key)
    return key.made_for(_use(purpose, run, step, parameter))


def _use(purpose: str, run: int, step: int, parameter: str) -> bytes:
    """The name of a use. JSON can be parsed back, so no two uses have the same."""
    return json.dumps([purpose, run, step, parameter]).encode()


def secret_of(key: Any) -> bytes:
    """Return ``key.secret()``; raises PrivacyError for anything but a ``Key``, such as bytes."""
    if not isinstance(key, Key):
        raise PrivacyError(
            f"stream: key of type {type(key).__name__}; expected a secret key. Use new_key()."
        )
    return key.secret()


def uniforms(word_W: np.ndarray, out_W: np.ndarray, spare_W: np.ndarray) -> None:
    """Write u = (k + 1/2) 2^-64 of the words k into ``out_W``: float64 in (0, 1], within one unit
    in the last place.

    Small u keep their relative precision, so that an inverted law is right in its tail: the
    smallest is 2^-65. Near 1 the spacing is that of float64, 2^-53; the last 2^10 words give 1
    itself.

    Args:
        word_W: int64 words; strided is allowed.
        spare_W: float64, overwritten.
    """
    # As int64, k is k - 2^64 in its upper half: 1 too small after scaling. The conversion of uint64
    # is ten times slower.
    np.copyto(out_W, word_W)
    out_W += 0.5
    out_W *= 2.0**-64
    np.floor(out_W, out=spare_W)
    out_W -= spare_W


class Keystream:
    """Words of one subkey, in order from any block on.

    Args:
        key: from ``subkey``.
        block: number of the first block of 8 words.
    """

    def __init__(self, key: Key, block: int = 0) -> None:
        self._key, self._next = key, block
        self._cipher = Cipher(
            algorithms.ChaCha20(secret_of(key), block.to_bytes(4, "little") + bytes(12)), None
        ).encryptor()

    def fill(self, out_W: np.ndarray) -> None:
        """Overwrite a contiguous array of 64-bit words, a multiple of 8 of them, with the next
        words.

        Raises:
            PrivacyError: the stream has no more words, or this process was forked after the key was
                made.
        """
        self._key.secret()
        num_blocks = len(out_W) // WORDS_PER_BLOCK
        assert out_W.itemsize == 8 and len(out_W) == WORDS_PER_BLOCK * num_blocks
        self._next += num_blocks
        if not self._next <= 2**32:
            raise PrivacyError(
                f"stream: block={self._next}; expected at most 2^32, 256 GiB of one key. Use "
                "more than one parameter name."
            )
        out = memoryview(out_W).cast("B")  # type: ignore[arg-type]
        for at in range(0, len(out), len(_ZEROS)):
            part = out[at : at + len(_ZEROS)]
            self._cipher.update_into(_ZEROS[: len(part)], part)


class Stream:
    """Reads one subkey's words and makes the guarantee's random draws other than noise. Each call
    continues where the last one ended.

    Args:
        key: from ``subkey``.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self._keystream = Keystream(key)

    def words(self, count: int) -> np.ndarray:
        """Return ``count`` uniform uint64 words."""
        blocks = -(-count // WORDS_PER_BLOCK)
        word_W = np.empty(blocks * WORDS_PER_BLOCK, dtype="<u8")
        self._keystream.fill(word_W)
        return word_W[:count]

    def uniforms(self, count: int) -> np.ndarray:
        """Return float64 numbers in (0, 1], made from words by the function ``uniforms``."""
        uniform_W, spare_W = np.empty(count), np.empty(count)
        uniforms(self.words(count).view("<i8"), uniform_W, spare_W)
        return uniform_W

    def integer(self, bound: int) -> int:
        """Return one of 0 to ``bound`` - 1, all equally likely: exact, by rejection. ``bound`` is 1
        to 2^64.
        """
        assert 1 <= bound <= 2**64
        usable = 2**64 - 2**64 % bound
        while (word := int(self.words(1)[0])) >= usable:
            pass
        return word % bound

    def gaps(self, rate: float, count: int, longest: int) -> np.ndarray:
        """Return int64 numbers of coins up to and including the first head, of probability
        ``rate``: Geometric(rate), cut at ``longest``.

        By inversion: 1 + floor(log(u) / log(1 - rate)). From the rounding of the logarithms, the
        probability of a gap m has a relative error of m 2^-51 at most: 4e-10 at a million, which is
        what a sample rate of 1e-6 gives.

        Args:
            rate: strictly between 0 and 1.
            longest: at most 2^52.
        """
        gap = np.log(self.uniforms(count))
        gap /= np.log1p(-rate)
        # Cut before the conversion: tiny rates give gaps beyond int64.
        np.minimum(gap, longest - 1, out=gap)
        return gap.astype(np.int64) + 1

    def subset(self, num: int, size: int) -> np.ndarray:
        """Return ``size`` of the numbers 0 to ``num`` - 1, sorted int64: every subset of that size
        is equally likely.
        """
        while True:
            word_N = self.words(num)
            order_N = np.argsort(word_N, kind="stable").astype(np.int64)
            # A tie at the border would favour the lower number. The event does not depend on the
            # order of the words, so to draw again leaves the law uniform.
            if 0 < size < num and word_N[order_N[size - 1]] == word_N[order_N[size]]:
                continue
            return np.sort(order_N[:size])
