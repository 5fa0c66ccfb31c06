"""A seeded shuffle of n items as a function position → item, without a stored permutation.

160 B tokens are 20 million sequences of 8192. A stored permutation would take 80 MB and a second per epoch on every
rank; this takes a few microseconds per sequence. It is a Feistel network on the smallest even number of
bits that covers n, repeated until the result is below n ("cycle walking"), which makes it a bijection on 0 … n - 1.
"""

import hashlib
from functools import lru_cache

ROUNDS = 6


def shuffled(position: int, n: int, seed: int, epoch: int) -> int:
    """The item at `position` in the shuffle of 0 … n - 1 for this seed and epoch."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits
    mask = (1 << half) - 1
    keys = _round_keys(seed, epoch)
    while True:
        # A round can be undone, whatever `_mix` does: the old right half is the new left one, and the old left half is the
        # new right one XOR the same mixture. So the rounds permute the numbers of 2 * half bits, at most 4n of them.
        left, right = position >> half, position & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        position = (left << half) | right
        # A result of n or more is permuted again. This follows a cycle of the permutation to its next number below n; no
        # other position below n ends there. It stops at the cycle's start at the latest, on average after at most 4 turns.
        if position < n:
            return position


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"pc.data.order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every bit of the 64-bit input affects the whole result."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
