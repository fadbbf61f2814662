"""Dealing out new or gathered tokens: to CTAs by tokens, within a CTA to warps by heads, then by tokens."""

from dataclasses import dataclass
from math import gcd

import jax.numpy as jnp
from jax import lax

WARPS = 4
"""Of a CTA: one warpgroup."""
CTAS = 4 * 132
"""Keep all multiprocessors busy: a CTA has more tokens than it must only where there are as many CTAs."""
MOST_TOKENS, SOFT_BYTES = 4, 32 * 1024
"""Tokens per CTA: no more than that, and no more bytes if it can be helped, so that several share a multiprocessor.

Gathers of 8,192 latents took 7.3, 7.4 and 7.5 us with 4, 8 and 16 tokens (H200); writes do not care.
"""
MOST_BYTES = 160 * 1024
"""Shared memory that the tokens of a CTA may take."""


@dataclass(frozen=True)
class WarpShare:
    """What a warp has: `rounds` tokens in a row, of each `heads` heads in a row."""

    tokens: int
    """Tokens per CTA: a power of two."""
    heads: int
    head_ways: int
    """Warps that share a token."""

    @property
    def token_ways(self) -> int:
        """Tokens that are taken side by side."""
        return WARPS // self.head_ways

    @property
    def rounds(self) -> int:
        """Tokens per warp."""
        return -(-self.tokens // self.token_ways)

    def token(self, warp, i: int):
        """The i-th token of a warp, counted within the CTA; past `tokens` where there are fewer than warps."""
        return lax.div(warp, jnp.int32(self.head_ways)) * self.rounds + i

    def first_head(self, warp):
        """The first of the warp's heads."""
        return lax.rem(warp, jnp.int32(self.head_ways)) * self.heads


def token_ways(heads: int) -> int:
    """Tokens that the warps of a CTA take side by side."""
    return WARPS // gcd(heads, WARPS)


def warp_share(count: int, heads: int, nbytes: int, *, interpret: bool, least: int = 1) -> WarpShare:
    """Shares of `count` tokens of `heads` heads and `nbytes` bytes each, at least `least` tokens per CTA."""
    tokens, ctas = least, 4 if interpret else CTAS
    while 2 * tokens <= min(MOST_TOKENS, SOFT_BYTES // nbytes) and tokens * ctas < count:
        tokens *= 2
    ways = gcd(heads, WARPS)
    return WarpShare(tokens, heads // ways, ways)
