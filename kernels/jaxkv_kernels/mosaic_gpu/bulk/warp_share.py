"""How work is divided: among CTAs by tokens; within a CTA, among warps by heads first, then by tokens."""

from dataclasses import dataclass
from math import gcd

import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.mosaic_gpu.runtime.device import multiprocessors

WARPS = 4
"""Warps per CTA: one warpgroup."""
CTAS = 4
"""Target number of CTAs per multiprocessor; tokens per CTA grow only beyond it."""
MOST_TOKENS, SOFT_BYTES = 4, 32 * 1024
"""The most tokens per CTA, and the bytes that they should not exceed, so that several CTAs share a multiprocessor.

Gathers of 8,192 latents took 7.3, 7.4 and 7.5 us with 4, 8 and 16 tokens (H200).  Writes took the same time with each.
"""
MOST_BYTES = 160 * 1024
"""Bytes of shared memory that the tokens of a CTA may take."""


@dataclass(frozen=True)
class WarpShare:
    """A warp's share: `rounds` consecutive tokens, and of each of them `heads` consecutive heads."""

    tokens: int
    """Tokens per CTA: a power of two."""
    heads: int
    head_ways: int
    """Warps that share a token."""

    @property
    def token_ways(self) -> int:
        """Tokens that the warps of a CTA process at the same time."""
        return WARPS // self.head_ways

    @property
    def rounds(self) -> int:
        """Tokens per warp."""
        return -(-self.tokens // self.token_ways)

    def token(self, warp, i: int):
        """The i-th token of a warp, as an index within the CTA; `tokens` or more if there are fewer tokens than
        warps."""
        return lax.div(warp, jnp.int32(self.head_ways)) * self.rounds + i

    def first_head(self, warp):
        """The first of the warp's heads."""
        return lax.rem(warp, jnp.int32(self.head_ways)) * self.heads


def token_ways(heads: int) -> int:
    """Tokens that the warps of a CTA process at the same time."""
    return WARPS // gcd(heads, WARPS)


def warp_share(count: int, heads: int, nbytes: int, *, interpret: bool, least: int = 1) -> WarpShare:
    """Shares of `count` tokens of `heads` heads and `nbytes` bytes each, at least `least` tokens per CTA."""
    tokens, ctas = least, 4 if interpret else CTAS * multiprocessors()
    while 2 * tokens <= min(MOST_TOKENS, SOFT_BYTES // nbytes) and tokens * ctas < count:
        tokens *= 2
    ways = gcd(heads, WARPS)
    return WarpShare(tokens, heads // ways, ways)
