"""Which tokens a query token of `decode_mla` and `decode_kv` sees: the arguments of masks as fields of a record."""

import math
from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv.checks import Dims, computed, describe, running_sum, window_of
from jaxkv_kernels.addressing import lengths_in_table, sums_from_0
from jaxkv_kernels.calls import DecodeCall
from jaxkv_kernels.masks import Mask, Tree


def mask_fields(
    dims: Dims,
    requests: dict[str, Any],
    q_len: int | None,
    *,
    window: int | tuple[int, int] | None,
    causal: bool,
    mask: Mask | None,
    tree_mask: ArrayLike | None,
    cu_q_lens: ArrayLike | None,
) -> dict[str, Any]:
    """The fields of a call that define which tokens its query tokens see, checked.

    Args:
      dims: has the axes B and M, and T if the queries are ragged.
      requests: the fields `pages`, `block_tables` and `seq_lens` of the call.
      q_len: query tokens per request; None if the queries are ragged.
      window: as in `decode_mla`, and likewise the other arguments.
      causal: likewise.
      mask: likewise.
      tree_mask: likewise.
      cu_q_lens: likewise.

    Raises:
      ValueError: an argument is wrong, or does not go with another one.
    """
    capacity = dims["M"] * requests["pages"].block_size
    behind, ahead = window_of(window, causal, capacity, q_len, tree=tree_mask is not None)
    tree = None if tree_mask is None else _tree(dims, requests, q_len, causal, tree_mask, cu_q_lens)
    return {"window": behind, "ahead": ahead, "tree": tree, "mask": None if mask is None else _mask(mask)}


def _mask(mask: Any) -> Mask:
    """`mask` as it is; ValueError unless it is a function of positions with results of bool."""
    expected = "expected None, or a function of query positions and key positions, which are broadcast"
    if not callable(mask) or not isinstance(mask, Hashable):
        raise ValueError(f"`mask` is {describe(mask)}: {expected} (it is static)")
    checked = cast(Mask, mask)
    queries, keys = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 1), (3,)))
    found = jax.eval_shape(checked, queries, keys)
    if getattr(found, "dtype", None) != jnp.bool_ or found.shape not in ((), (3,), (1, 3), (2, 1), (2, 3)):
        raise ValueError(
            f"`mask` returns {describe(found)} for query positions [2, 1] and key positions [3]: {expected}, which "
            "returns an array of bool"
        )
    return checked


def _tree(dims: Dims, requests: dict[str, Any], q_len, causal, tree_mask, cu_q_lens) -> Tree:
    """The tree of a call, with as many rows as its queries have."""
    if not causal:
        raise ValueError(
            "`causal` is False: expected True with a `tree_mask`, which takes the place of the causal mask"
        )
    if not hasattr(tree_mask, "dtype"):
        raise ValueError(f"`tree_mask` is {describe(tree_mask)}: expected None, or an array of bool")
    if cu_q_lens is None:
        shape = Dims(B=(dims["B"], "that of `block_tables`"), Q=(q_len, "the number of query tokens"))
        shape.check("tree_mask", tree_mask, "B Q Q", ("bool",))
    else:
        dims.check_running_sum("cu_q_lens", cu_q_lens)
        dims.check("tree_mask", tree_mask, "T J", ("bool",))

    def made(tree_mask, block_tables, seq_lens, cu_q_lens):
        count = q_len if cu_q_lens is None else jnp.diff(running_sum(cu_q_lens))
        lengths = lengths_in_table(seq_lens, block_tables, requests["pages"].block_size)
        return Tree(lengths - count, jnp.asarray(tree_mask))

    return computed(made, tree_mask, requests["block_tables"], requests["seq_lens"], cu_q_lens)


def seen_by_some(call: DecodeCall[Any], q_len: int | None, cu_q_lens: ArrayLike | None) -> jax.Array:
    """Whether `tree` and `mask` of a call show each token of a request to some query token, bool [B, M * block_size].

    The queries are in the caller's order, with `q_len` tokens per request (None without such an axis) or ragged.
    """
    (requests, columns), block_size, queries = call.block_tables.shape, call.pages.block_size, call.queries[0]
    sums = sums_from_0(jnp.full(requests, q_len or 1)) if cu_q_lens is None else running_sum(cu_q_lens)
    query = jnp.arange(math.prod(queries.shape[:-2]), dtype=jnp.int32)
    owner = jnp.searchsorted(sums[1:], query, side="right")
    starts = lengths_in_table(call.seq_lens, call.block_tables, block_size) - jnp.diff(sums)
    keys = jnp.arange(columns * block_size, dtype=jnp.int32)
    seen = jnp.ones((query.size, keys.size), bool)
    if call.tree is not None:
        rows = call.tree.seen.reshape(query.size, 1, -1)
        seen &= Tree(starts[owner], rows).sees(keys)[:, 0]
    if call.mask is not None:
        seen &= call.mask((starts[owner] + query - sums[owner])[:, None], keys[None])
    return jnp.zeros((requests, keys.size), bool).at[owner].max(seen, mode="drop")
