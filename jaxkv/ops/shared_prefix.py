"""Prefixes that requests share: tokens that are stored once, before the own tokens of several requests.

`decode_mla` and `decode_kv` then are a cascade.  The query tokens of all requests with the same prefix attend to it as
those of one request, without a mask, so that it is read once for all of them.  The results are merged with those of
attention to the own tokens of each request.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv.checks import Dims, computed, int32, running_sum
from jaxkv.ops.ragged_queries import Arrangement, Groups, arrange
from jaxkv_kernels.calls import DecodeCall, PlanDecode


@dataclass(frozen=True)
class SharedPrefixes:
    """The checked arguments `prefix_tables`, `prefix_lens` and `prefix_of` of a call."""

    tables: jax.Array
    """int32 [G, M], the blocks of each prefix."""
    lens: jax.Array
    """int32 [G]."""
    of: jax.Array | None
    """int32 [B], the prefix of each request; None if all requests have the only one."""

    def arranged[C: DecodeCall[Any] | PlanDecode](
        self,
        call: C,
        *,
        heads: int,
        q_len: int | None,
        cu_q_lens: ArrayLike | None,
        total: int,
        groups: Groups | None = None,
    ) -> tuple[C, Arrangement, jax.Array | None]:
        """The call on the prefixes.

        Args:
          call: the call on the own tokens, before its own arrangement.
          heads: query heads.
          q_len: query tokens per request; None for one, without an axis, or if they are ragged.
          cu_q_lens: as in `decode_mla`.
          total: query tokens of all requests.
          groups: those of a plan for the prefixes.

        Returns:
          The call, whose results have the axes [total, Hq, ...]; its arrangement; and the query token of each row of
          these results, or None if rows are in the order of the query tokens.
        """
        order, sums = None, None
        if self.of is not None:
            each = partial(_by_prefix, count=self.lens.shape[0], q_len=q_len or 1, total=total)
            order, sums = computed(each, self.of, None if cu_q_lens is None else running_sum(cu_q_lens))
        elif cu_q_lens is not None:
            sums = computed(lambda sums: sums[jnp.array([0, -1])], running_sum(cu_q_lens))
        call = replace(call, block_tables=self.tables, seq_lens=self.lens, window=None, ahead=None, tree=None)
        if isinstance(call, DecodeCall):
            rows = partial(_rows, order=order, one_request=sums is None)
            call = call.with_queries(*(computed(rows, q) for q in call.queries))
        else:
            call = replace(call, q_len=total if sums is None else 1)
        dims = Dims(B=(self.lens.shape[0], ""), T=(total, ""), Hq=(heads, ""))
        arrangement = arrange(call, dims, q_len=total if sums is None else None, cu_q_lens=sums, groups=groups)
        return call, arrangement, order


def shared_prefixes(dims: Dims, prefix_tables, prefix_lens, prefix_of, window, mask) -> SharedPrefixes | None:
    """The arguments of these names, checked; None if there are none.  `dims` has the axis B."""
    if prefix_tables is None:
        for name, value in (("prefix_lens", prefix_lens), ("prefix_of", prefix_of)):
            if value is not None:
                raise ValueError(f"`{name}` is given without `prefix_tables`: expected None")
        return None
    if window is not None:
        raise ValueError(f"`window` is {window!r}: expected None, because query tokens see all of `prefix_tables`")
    if mask is not None:
        raise ValueError("`mask` is a function: expected None, because query tokens see all of `prefix_tables`")
    if prefix_of is None and len(getattr(prefix_tables, "shape", ())) == 2:
        raise ValueError(
            "`prefix_of` is None: expected int32 [B], the row of `prefix_tables` for each request (for one prefix of "
            "all requests, pass `prefix_tables` [M])"
        )
    if isinstance(prefix_lens, int):
        prefix_lens = np.asarray(prefix_lens)
    own = Dims()
    own.check_ints("prefix_tables", prefix_tables, "M" if prefix_of is None else "G M")
    own.check_ints("prefix_lens", prefix_lens, "" if prefix_of is None else "G")
    tables, lens = int32(prefix_tables), int32(prefix_lens)
    if prefix_of is None:
        return SharedPrefixes(*computed(lambda *x: (x[0][None], x[1][None]), tables, lens), None)
    dims.check_ints("prefix_of", prefix_of, "B")
    return SharedPrefixes(tables, lens, int32(prefix_of))


def _by_prefix(prefix_of, sums, *, count: int, q_len: int, total: int) -> tuple[jax.Array, jax.Array]:
    """The query tokens [total], sorted by prefix, and the running sum [count + 1] of those of each prefix.

    Those of no prefix, or of no request, come last.
    """
    row, batch = jnp.arange(total, dtype=jnp.int32), prefix_of.shape[0]
    if sums is None:
        request = row // q_len
    else:
        request = jnp.searchsorted(sums[1:], row, side="right", method="compare_all").astype(jnp.int32)
        request = jnp.where(row < sums[0], batch, request)
    prefix = prefix_of.at[request].get(mode="fill", fill_value=-1)
    prefix = jnp.where((prefix >= 0) & (prefix < count), prefix, count)
    order = jnp.argsort(prefix, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(prefix[order], jnp.arange(count + 1, dtype=jnp.int32), method="compare_all")
    return order, ends.astype(jnp.int32)


def _rows(q, *, order, one_request: bool):
    """Queries `q` [B, H, D], [B, Q, H, D] or [T, H, D] as [T, H, D] in this order, or as [1, T, H, D]."""
    q = jnp.asarray(q).reshape(-1, *q.shape[-2:])
    q = q if order is None else q[order]
    return q[None] if one_request else q
