"""How the query tokens of an attention call are arranged as the rows of requests that kernels attend with.

Kernels support one form: queries [B, Q, H, D], the last Q tokens of each of B requests, under a causal mask.  Other
forms are arranged as this one, outside of the kernels:

    ragged       Each request's query tokens are divided into groups of at most `size` tokens.  A group is a request of
                 its own, with the blocks of the whole request and a length up to its own last token.
    not causal   All query tokens of a request see the same keys, as the heads of one query token do: they become heads.

Calls with a `window` have no such form if query tokens see some tokens after their own, or if a group has fewer tokens
than places, and neither have those with a `tree_mask`.  Groups then have the whole length, and kernels compute their
masks from it and from `trailing`, the number of tokens after the last place.  Places without tokens come last, so that
their windows begin after those of the tokens: what no query token sees may hold NaN.

A group has as many rows (query tokens x heads that share keys) as a kernel's tile.  A kernel that supported ragged
queries itself would therefore read the keys as often.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.checks import Dims, computed, int32, running_sum
from jaxkv_kernels.addressing import lengths_in_table
from jaxkv_kernels.calls import DecodeCall, PlanDecode
from jaxkv_kernels.masks import Tree
from jaxkv_kernels.token_heads import heads_as_tokens, tokens_as_heads

TILE_ROWS, FEW_ROWS = 64, 16
"""Rows of a tile of queries in GPU kernels, and how many of them all kernels for quantised entries support."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Ragged query tokens, divided into groups.  All arrays are int32."""

    requests: jax.Array
    """[G]: the request of each group; -1 for unused groups."""
    num_trailing: jax.Array
    """[G]: how many query tokens of the request come after the group; negative if places of the group do."""
    tokens: jax.Array
    """[G, size]: the query token in each place.  Places without one, before or after those of the group, hold any."""
    places: jax.Array
    """[T]: the place of each query token among all G * size; G * size for tokens of no request."""

    @property
    def size(self) -> int:
        """Places per group."""
        return self.tokens.shape[1]


def group_size(total: int, requests: int, rows_per_token: int, tile_rows: int = TILE_ROWS) -> int:
    """Query tokens per group, for `total` tokens of `requests`.

    As many as fill a tile of rows, but no more than a request has on average, rounded up to a power of two.
    """
    average = -(-total // requests)
    return max(1, min(tile_rows // rows_per_token, 1 << (average - 1).bit_length()))


@partial(jax.jit, static_argnames=("total", "size", "from_first"))
def divide(cu_q_lens: jax.Array, *, total: int, size: int, from_first: bool = False) -> Groups:
    """Divides `total` query tokens into groups of at most `size` tokens.

    Request b of B has the tokens from cu_q_lens[b] to cu_q_lens[b + 1], which does not fall (`running_sum`).  They are
    divided from the last one on, so that only the first group of a request may have fewer, or with `from_first` from
    the first one on, so that only the last group may.
    """
    batch = cu_q_lens.shape[0] - 1
    counts = cu_q_lens[1:] - cu_q_lens[:-1]
    spare = -counts % size if from_first else jnp.zeros_like(counts)  # places at the end of the last group
    after = jnp.cumsum(-(-counts // size), dtype=jnp.int32)  # groups of this request and those before it
    group = jnp.arange((total + batch * (size - 1)) // size, dtype=jnp.int32)
    request = _first_above(after, group)
    used, request = request < batch, jnp.minimum(request, batch - 1)
    num_trailing = jnp.where(used, (after[request] - 1 - group) * size - spare[request], 0)
    end = cu_q_lens[request] + counts[request] - num_trailing
    tokens = end[:, None] - size + jnp.arange(size, dtype=jnp.int32)

    owned, owner, back = owners(cu_q_lens, total)
    places = after[owner] * size - 1 - spare[owner] - back
    none = group.size * size
    return Groups(
        requests=jnp.where(used, request, -1),
        num_trailing=num_trailing,
        tokens=jnp.clip(tokens, 0, total - 1),
        places=jnp.where(owned & (places >= 0), jnp.minimum(places, none), none),
    )


def owners(cu_q_lens: jax.Array, total: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether each of `total` query tokens belongs to a request, which one, and how many tokens of it come after.

    `cu_q_lens` is as in `divide`.  All results are [T]; for tokens of no request, the last two may hold any request and
    any number.
    """
    batch, token = cu_q_lens.shape[0] - 1, jnp.arange(total, dtype=jnp.int32)
    owner = _first_above(cu_q_lens[1:], token)
    owned, owner = (owner < batch) & (token >= cu_q_lens[0]), jnp.minimum(owner, batch - 1)
    return owned, owner, cu_q_lens[owner + 1] - 1 - token


def _first_above(ascending, values):
    """For each of `values`, the index of the first element that is larger."""
    return jnp.searchsorted(ascending, values, side="right", method="compare_all").astype(jnp.int32)


def arrange(
    call: DecodeCall[Any] | PlanDecode,
    dims: Dims,
    *,
    q_len: int | None,
    cu_q_lens: ArrayLike | None,
    groups: Groups | None = None,
) -> "Arrangement":
    """Checks how the queries of a call are to be arranged, and returns the arrangement.

    Args:
      call: a call whose queries, tables and lengths are those that the caller passed.
      dims: has the axes B and Hq, and T if the queries are ragged.
      q_len: query tokens per request; None if queries have no such axis.
      cu_q_lens: as in `decode_mla`; if not None, the queries are ragged.
      groups: those of a plan; None to divide the query tokens here.

    Raises:
      ValueError: `cu_q_lens` has the wrong shape or dtype.
    """
    kv_heads = call.pages.num_heads
    if cu_q_lens is not None:
        dims.check_running_sum("cu_q_lens", cu_q_lens)
        if data_checks.checking():
            check_rises(int32(cu_q_lens), dims["T"])
        if groups is None:
            windowed = call.window is not None
            tile_rows = FEW_ROWS if windowed and call.entry.quantised else TILE_ROWS
            size = group_size(dims["T"], dims["B"], dims["Hq"] // kv_heads, tile_rows)
            divided = partial(divide, total=dims["T"], size=size, from_first=windowed)
            groups = computed(divided, running_sum(cu_q_lens))
    as_heads = call.window is None and call.ahead is None and call.tree is None and call.mask is None
    return Arrangement(q_len, kv_heads, as_heads, groups)


def check_rises(cu_q_lens, total: int) -> None:
    """Checks, in checked mode, that `cu_q_lens` rises from 0 to at most `total`."""
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), cu_q_lens[:-1]])
    rises = (cu_q_lens >= before) & (cu_q_lens <= total) & ((jnp.arange(cu_q_lens.size) > 0) | (cu_q_lens == 0))
    data_checks.require(
        rises, "cu_q_lens", cu_q_lens, f"expected a running sum that begins at 0, of {total} query tokens"
    )


@dataclass(frozen=True)
class Arrangement:
    """The arrangement of the query tokens of one call."""

    q_len: int | None
    """Query tokens per request; None if queries have no such axis: [B, H, D], or ragged."""
    kv_heads: int
    """Heads of the cache.  The query heads that share one are adjacent."""
    as_heads: bool
    """Whether query tokens become heads, because all those of a request see the same keys."""
    groups: Groups | None
    """None if queries are not ragged."""

    @property
    def _size(self) -> int:
        """Query tokens of a request, or of a group."""
        return self.groups.size if self.groups is not None else self.q_len or 1

    def applied[C: DecodeCall[Any] | PlanDecode](self, call: C) -> C:
        """The call of `arrange` with the queries, tables and lengths of the kernel's requests."""
        tables, lengths = self._requests(call)
        ahead, tree = 0 if self.as_heads else call.ahead, self._tree(call.tree)
        trailing = self.groups.num_trailing if self.groups is not None and self._trails(call) else None
        call = replace(call, block_tables=tables, seq_lens=lengths, trailing=trailing, ahead=ahead, tree=tree)
        if isinstance(call, DecodeCall):
            return call.with_queries(*map(self._queries, call.queries))
        if not self.as_heads:
            return replace(call, q_len=self._size)
        return replace(call, q_len=1, heads=call.heads * self._size)

    def _trails(self, call: DecodeCall[Any] | PlanDecode) -> bool:
        """Whether groups have `trailing`, and the whole length of their request."""
        return not self.as_heads and (call.ahead != 0 or (call.window is not None and self._size > 1))

    def _requests(self, call: DecodeCall[Any] | PlanDecode) -> tuple[Any, Any]:
        """The block tables [G, M] and lengths [G] of the kernel's requests."""
        if self.groups is None:
            return call.block_tables, call.seq_lens
        whole = call.ahead != 0 or self._trails(call)
        of_groups = partial(_requests_of_groups, block_size=call.pages.block_size, whole=whole)
        return computed(of_groups, self.groups, call.block_tables, call.seq_lens)

    def _tree(self, tree: Tree | None) -> Tree | None:
        """`tree`, whose rows are those of the call's queries, for the kernel's requests."""
        return tree if tree is None or self.groups is None else computed(_trees_of_groups, tree, self.groups)

    def _queries(self, q):
        """`q` [B, Q, H, D], [B, H, D] or (ragged) [T, H, D] as the kernel's queries."""
        if self.groups is None and self.q_len is not None and not self.as_heads:
            return q
        return computed(partial(_arranged, kv_heads=self.kv_heads if self.as_heads else None), q, self.groups)

    def results(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The kernel's out [G, Q, H, Dv] and lse [G, Q, H] in the order of the call's queries.

        Their leading axes are then those of the queries: [B, Q, H], [B, H] or (ragged) [T, H].  Query tokens of no
        request get 0 and -inf.
        """
        if self.as_heads:
            out, lse = (heads_as_tokens(x, self.kv_heads, self._size) for x in (out, lse))
        if self.groups is not None:
            return _in_places(out, self.groups, 0.0), _in_places(lse, self.groups, -jnp.inf)
        return (out[:, 0], lse[:, 0]) if self.q_len is None else (out, lse)


# Compiled as a whole each: a call outside of `jax.jit` would otherwise run a program per line.


@partial(jax.jit, static_argnames=("block_size", "whole"))
def _requests_of_groups(groups: Groups, block_tables, seq_lens, *, block_size: int, whole: bool):
    """The block tables and lengths of groups; with `whole`, the whole lengths of their requests."""
    request = jnp.maximum(groups.requests, 0)
    lengths = lengths_in_table(seq_lens, block_tables, block_size)[request]
    if not whole:
        lengths = lengths - groups.num_trailing
    return block_tables[request], jnp.where(groups.requests < 0, 0, lengths)


@jax.jit
def _trees_of_groups(tree: Tree, groups: Groups) -> Tree:
    return Tree(tree.start[jnp.maximum(groups.requests, 0)], tree.seen[groups.tokens])


@partial(jax.jit, static_argnames="kv_heads")
def _arranged(q, groups: Groups | None, *, kv_heads: int | None):
    """Queries in the places of groups; with `kv_heads`, query tokens become heads."""
    if groups is not None:
        q = q[groups.tokens]
    elif q.ndim == 3:
        q = q[:, None]
    return q if kv_heads is None else tokens_as_heads(q, kv_heads)


@partial(jax.jit, static_argnames="empty")
def _in_places(x, groups: Groups, empty: float):
    """Results [G, size, ...] as those of the query tokens [T, ...]; `empty` for tokens of no request."""
    return x.reshape(-1, *x.shape[2:]).at[groups.places].get(mode="fill", fill_value=empty)
