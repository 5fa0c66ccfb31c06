"""Random normal numbers by position: entry (i, j) of a named matrix depends only on the name, i and j.

A generator with state must draw a full matrix to get a shard of it, and CPU and GPU generators draw different numbers.
Here each entry's position goes through the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", 2014). Its 64 bits become a uniform and then a normal number. So a rank draws only its own shard,
and all layouts and devices draw the same numbers: integers are exact, and normals are float64 before they are rounded
to float32. If two devices' `erfinv` differ in the last bit, about one of 10^8 float32 numbers differs.
"""

import hashlib
import math

import torch
from torch import Tensor

_CHUNK = {"cpu": 2**16, "cuda": 2**24}
"""Entries drawn at a time: few enough for a CPU's cache; enough to fill a GPU, with a few hundred MiB of memory."""


def seed_of(name: str) -> int:
    """A 64-bit seed as a signed integer, as torch needs it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


@torch.no_grad()
def fill_normal_(block: Tensor, seed: int, row_length: int, offset: tuple[int, int], std: float, cut: float = math.inf):
    """Fill a block of a matrix with its part of N(0, std^2).

    Args:
        block: [n, m], in any dtype; filled with numbers drawn in float32.
        seed: of the matrix.
        row_length: columns of the full matrix.
        offset: row and column of the block's first entry in the full matrix.
        std: standard deviation, before truncation.
        cut: truncate the distribution at this many standard deviations.
    """
    if not block.numel():
        return
    within = math.erf(cut / math.sqrt(2.0))  # probability of the truncated interval
    rows, columns = (
        torch.arange(start, start + size, device=block.device) for start, size in zip(offset, block.shape, strict=True)
    )
    rows_at_a_time = max(1, _CHUNK.get(block.device.type, 2**16) // block.size(1))
    for some, part in zip(rows.split(rows_at_a_time), block.split(rows_at_a_time), strict=True):
        bits = random_bits_((some * row_length)[:, None] + columns, seed)
        uniform = (bits >> 12).bitwise_and_(2**52 - 1).double()  # one of 2^52 values
        uniform.add_(0.5).mul_(2.0**-51).sub_(1.0)  # in (-1, 1), exactly
        normal = uniform.mul_(within).erfinv_().mul_(math.sqrt(2.0) * std)
        part.copy_(normal.float())  # the same numbers in any dtype


def random_bits_(counter: Tensor, seed: int) -> Tensor:
    """Replace each counter (int64, any shape) by 64 random bits: output number `counter` of SplitMix64 from `seed`."""
    bits = counter.add_(1).mul_(_signed(0x9E3779B97F4A7C15)).add_(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # torch's right shift copies the sign bit; mask it to get a logical shift
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(_signed(factor))
    return bits


def _signed(bits: int) -> int:
    """64 bits as a signed integer; torch multiplies and adds these modulo 2^64."""
    return bits - 2**64 if bits >= 2**63 else bits
