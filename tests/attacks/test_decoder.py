"""Attacks on the decoder: a record's bytes are the attacker's, and whatever they are the record
gives pixels or contributes zero.

An exception of another type would stop the run, which shows that the record is there; a neighbour's
changed pixels would be worse.
"""

import io

import numpy as np
import pytest
from PIL import Image

from dpvision.data.decode import BadImage, decode

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "AVIF", "JPEG2000")
ROUNDS = 150


def files(kind: str) -> list[bytes]:
    """Small images of one format: noise, grey, with a palette where there is one."""
    noise = np.random.default_rng(0).integers(0, 256, (13, 17, 3), dtype=np.uint8)
    images = [Image.fromarray(noise), Image.fromarray(noise[..., 0])]
    images += [Image.fromarray(noise).convert("P")] if kind in ("PNG", "GIF", "TIFF", "BMP") else []
    found = []
    for image in images:
        file = io.BytesIO()
        image.save(file, kind)
        found.append(file.getvalue())
    return found


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """The file with bits flipped, bytes replaced, a piece cut out, repeated or zeroed, or its end
    cut off.
    """
    value = np.frombuffer(data, dtype=np.uint8).copy()
    at, end = sorted(rng.integers(0, len(value) + 1, 2))
    match rng.integers(6):
        case 0:
            where = rng.integers(0, len(value), rng.integers(1, 9))
            value[where] ^= (1 << rng.integers(0, 8, len(where))).astype(np.uint8)
        case 1:
            where = rng.integers(
                0, min(len(value), 64), rng.integers(1, 5)
            )  # the header, which has the sizes
            value[where] = rng.choice([0, 1, 127, 128, 254, 255], len(where))
        case 2:
            value = np.delete(value, slice(at, end))
        case 3:
            value = np.concatenate([value[:end], value[at:]])
        case 4:
            value[at:end] = 0
        case _:
            value = value[:at]
    return value.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_give_pixels_or_are_refused_and_nothing_else(kind: str) -> None:
    rng, outcomes = np.random.default_rng(KINDS.index(kind)), {"pixels": 0, "refused": 0}
    for data in files(kind):
        whole = decode(data)
        for _ in range(ROUNDS):
            try:
                pixels = decode(mutated(data, rng))
            except BadImage:
                outcomes["refused"] += 1
                continue
            outcomes["pixels"] += 1
            assert (
                pixels.dtype == np.uint8
                and pixels.ndim == 3
                and pixels.shape[2] == 3
                and pixels.size
            )
        assert np.array_equal(decode(data), whole), (
            "a damaged file changed what the decoder makes of a sound one"
        )
    assert min(outcomes.values()) > 0, f"the mutations test one outcome only: {outcomes}"
