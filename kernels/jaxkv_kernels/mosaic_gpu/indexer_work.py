"""How the work of `indexer_logits` is divided: query tokens into groups, keys into tiles, tiles among CTAs.

Each group of query tokens is scored like a request of its own, so that its queries fit in shared memory.  The tiles of
all requests, one request after another, are divided evenly among the CTAs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv

TILE = 64
"""Keys of a tile: the rows of a warpgroup's wgmma."""
COLUMNS = 128
"""The most columns of a product."""
QUERY_ROWS = 256
"""The most rows (query tokens x heads) of a group of query tokens: all of them must fit in shared memory."""


def rows_per_token(heads: int) -> int:
    """Heads, rounded up to a multiple of 8 (wgmma's columns) or, above 128 heads, to whole products of 128 columns."""
    return -(-heads // 8) * 8 if heads <= COLUMNS else -(-heads // COLUMNS) * COLUMNS


@dataclass(frozen=True)
class Groups:
    """The query tokens of a request in groups of equal size.  Padding comes before the first token."""

    q_len: int
    """Query tokens per request."""
    tokens: int
    """Query tokens per group."""

    @classmethod
    def of(cls, q_len: int, rows: int) -> "Groups":
        """As few groups as possible, of up to QUERY_ROWS rows each, for query tokens of `rows` rows."""
        count = -(-q_len // max(QUERY_ROWS // rows, 1))
        return cls(q_len, -(-q_len // count))

    @property
    def count(self) -> int:
        """Groups per request."""
        return -(-self.q_len // self.tokens)

    @property
    def padding(self) -> int:
        """Tokens of the first group that are not tokens of the request."""
        return self.count * self.tokens - self.q_len

    def lengths(self, seq_lens: jax.Array, capacity: int) -> jax.Array:
        """int32 [B * count]: the keys that the last token of each group sees; 0 or less if it sees none."""
        if self.count == 1:
            return seq_lens
        later = self.tokens * jnp.arange(self.count - 1, -1, -1, dtype=jnp.int32)
        return (jnp.clip(seq_lens, 0, capacity)[:, None] - later).reshape(-1)

    def rows(self, groups: int) -> int:
        """The query tokens of all requests, which together have `groups` groups."""
        return groups // self.count * self.q_len

    def request(self, group) -> Any:
        """Device-side: the request of a group; groups are counted over all requests."""
        return group if self.count == 1 else floordiv(group, self.count)

    def row(self, group, token: int) -> Any:
        """Device-side: the row of a group's token in the result; rows are counted over the tokens of all requests."""
        return group * self.tokens + token - self.padding * (self.request(group) + 1)

    def skipped(self, group, token: int) -> Any:
        """Device-side: how many of a group's tokens from `token` on are padding; None if none are in any group."""
        if token >= self.padding:
            return None
        return jnp.where(lax.rem(group, jnp.int32(self.count)) > 0, 0, self.padding - token)


class Share(NamedTuple):
    """Consecutive tiles; tiles of a request count from its first."""

    first_request: Any
    first_tile: Any
    last_request: Any
    """Below `first_request` if the share is empty."""
    last_end: Any
    """The tile after the last of `last_request`."""

    def tiles(self, request, begin, end):
        """The tiles of a request within the share, of all its tiles from `begin` to `end`."""
        begin = jnp.where(request == self.first_request, self.first_tile, begin)
        return begin, jnp.where(request == self.last_request, self.last_end, end)


@dataclass(frozen=True)
class Tiles:
    """The tiles of each request, given its length."""

    capacity: int
    """Tokens that a request's block table has room for."""
    max_len: int
    """Positions of the result."""

    @property
    def most(self) -> int:
        """Tokens of a request that can have logits."""
        return min(self.capacity, self.max_len)

    @property
    def per_request(self) -> int:
        """Tiles of a request's logits, computed or filled."""
        return -(-self.max_len // TILE)

    def computed(self, length):
        """Tiles of a request that are computed; the others are filled."""
        return floordiv(jnp.clip(length, 0, self.most) + (TILE - 1), TILE)
