"""Counter-based noise for sampling (R17, sampling): a pure function of (seed, choice, position, token id).

There is no generator state, so a retried, migrated or rebuilt session draws the same tokens, in any batch.
The mixing function is splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
2014; constants by Stafford). Used by `sampler.py` only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def draw_key(seed: int, choice: int, position: int) -> int:
    """Return the 64-bit key of one draw; the parts are mixed in turn, so that neighbours share nothing."""
    key = 0
    for part in (seed, choice, position):
        key = _mix_int((key + (part & _MASK) + GOLDEN) & _MASK)
    return key


def gumbel(keys: Words, tokens: Ids) -> Floats:
    """Return standard Gumbel noise; `keys` [S, 1] and `tokens` [S, K] broadcast.

    argmax(score + gumbel) over tokens samples softmax(score) (the Gumbel-max trick).
    """
    words = keys + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    words ^= words >> np.uint64(30)
    words *= np.uint64(MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(MIX_2)
    words ^= words >> np.uint64(31)
    # 53 bits, shifted by half a step: never 0, never 1
    uniform: Floats = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def _mix_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * MIX_2) & _MASK
    return word ^ (word >> 31)
