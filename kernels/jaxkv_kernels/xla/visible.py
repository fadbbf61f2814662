"""Which tokens of its request each query token of `decode_mla` and `decode_kv` sees."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import DecodeCall, PlanDecode
from jaxkv_kernels.masks import Intervals, Mask, Tree
from jaxkv_kernels.xla.paged import query_ends, query_ranges


@dataclass(frozen=True)
class Visible:
    """The tokens that the query tokens [B, Q] of a call see."""

    begins: jax.Array
    """[B, Q], the first position that each may see."""
    ends: jax.Array
    """[B, Q], the end of these."""
    queries: jax.Array
    """[B, Q], the position of each query token."""
    tree: Tree | None
    mask: Mask | None

    @classmethod
    def of(
        cls,
        call: DecodeCall | PlanDecode,
        lengths: jax.Array,
        tokens: int,
        trailing: jax.Array | None,
        tree: Tree | None,
    ) -> Self:
        """What the requests of `call` see that have these `lengths`, clamped by `lengths_in_table`."""
        begins, ends = query_ranges(lengths, tokens, call.window, call.ahead, trailing)
        queries = query_ends(lengths if trailing is None else lengths - trailing, tokens) - 1
        if isinstance(call.mask, Intervals):
            firsts, lasts = (jnp.stack(x) for x in zip(*call.mask.intervals(queries), strict=True))
            begins, ends = jnp.maximum(begins, firsts.min(axis=0)), jnp.minimum(ends, lasts.max(axis=0))
        return cls(begins, ends, queries, tree, call.mask)

    def of_keys(self, positions: jax.Array) -> jax.Array:
        """Whether each query token sees the tokens at `positions` [S] or [B, S]: bool [B, Q, S]."""
        keys = positions[..., None, :]
        seen = (keys < self.ends[..., None]) & (keys >= self.begins[..., None])
        if self.tree is not None:
            seen &= self.tree.sees(positions)
        if self.mask is not None:
            seen &= self.mask(self.queries[..., None], keys)
        return seen
