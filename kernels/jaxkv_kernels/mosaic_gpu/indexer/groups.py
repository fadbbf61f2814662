"""Groups of query tokens.  Each group is scored like a request of its own, so that its queries fit in shared memory."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.mosaic_gpu.indexer.key_rows import QUERY_ROWS
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv


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
