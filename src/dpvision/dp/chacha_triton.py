"""ChaCha20 words on a GPU, bit for bit those of ``privacy.stream.Keystream`` (RFC 8439, section
2.3): additions, rotations, xors.

Words and gradients stay on the GPU. One GPU thread computes one block of 64 bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpvision.privacy.stream import WORDS_PER_BLOCK

_PROGRAM_BLOCKS = 128


@triton.jit
def _quarter(a, b, c, d):  # type: ignore[no-untyped-def]
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _store(out_W, block_P, pair, low_P, high_P, inside_P):  # type: ignore[no-untyped-def]
    word_P = low_P.to(tl.uint64) | (high_P.to(tl.uint64) << 32)
    tl.store(out_W + block_P * 8 + pair, word_P.to(tl.int64, bitcast=True), mask=inside_P)


@triton.jit
def _words(out_W, key_8, first_block, num_blocks, PROGRAM_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    block_P = tl.program_id(0).to(tl.int64) * PROGRAM_BLOCKS + tl.arange(0, PROGRAM_BLOCKS)
    inside_P = block_P < num_blocks
    zero = tl.zeros((PROGRAM_BLOCKS,), tl.uint32)
    counter_P = (first_block + block_P).to(tl.uint32)
    x0, x1, x2, x3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k0, k1 = zero + tl.load(key_8).to(tl.uint32), zero + tl.load(key_8 + 1).to(tl.uint32)
    k2, k3 = zero + tl.load(key_8 + 2).to(tl.uint32), zero + tl.load(key_8 + 3).to(tl.uint32)
    k4, k5 = zero + tl.load(key_8 + 4).to(tl.uint32), zero + tl.load(key_8 + 5).to(tl.uint32)
    k6, k7 = zero + tl.load(key_8 + 6).to(tl.uint32), zero + tl.load(key_8 + 7).to(tl.uint32)
    x4, x5, x6, x7, x8, x9, x10, x11 = k0, k1, k2, k3, k4, k5, k6, k7
    x12, x13, x14, x15 = counter_P, zero, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    _store(out_W, block_P, 0, x0 + 0x61707865, x1 + 0x3320646E, inside_P)
    _store(out_W, block_P, 1, x2 + 0x79622D32, x3 + 0x6B206574, inside_P)
    _store(out_W, block_P, 2, x4 + k0, x5 + k1, inside_P)
    _store(out_W, block_P, 3, x6 + k2, x7 + k3, inside_P)
    _store(out_W, block_P, 4, x8 + k4, x9 + k5, inside_P)
    _store(out_W, block_P, 5, x10 + k6, x11 + k7, inside_P)
    _store(out_W, block_P, 6, x12 + counter_P, x13, inside_P)
    _store(out_W, block_P, 7, x14, x15, inside_P)


def chacha_words(key_8: Tensor, block: int, num_blocks: int) -> Tensor:
    """Return the words of blocks ``block`` to ``block + num_blocks`` - 1: int64 of shape (8
    num_blocks,) on the key's device.

    Args:
        key_8: a row of ``normals.key_words``, on the GPU.
        block: ``block + num_blocks`` is at most 2^32.
    """
    assert 0 <= block <= block + num_blocks <= 2**32
    out_W = torch.empty(WORDS_PER_BLOCK * num_blocks, dtype=torch.int64, device=key_8.device)
    _words[(triton.cdiv(num_blocks, _PROGRAM_BLOCKS),)](
        out_W, key_8, block, num_blocks, PROGRAM_BLOCKS=_PROGRAM_BLOCKS
    )
    return out_W
