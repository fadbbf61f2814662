"""Trees and masks on implementations whose kernels have none: kernels attend to most tokens, plain JAX to the rest.

    tree    A kernel attends to the tokens before the new ones.  All query tokens of a request see them, so that they
            become heads.  Plain JAX attends to the new tokens, of which there are as many as columns in the tree.
    mask    The tokens that a query token sees are intervals, which differ between the query tokens of a request.  For
            each interval there is a call of a kernel, for which each query token is a request of its own, whose table
            begins with the first whole block of the interval.  Plain JAX attends to the tokens before that block.

The results are merged in float32 by their log-sum-exps.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import lengths_in_table
from jaxkv_kernels.calls import DecodeCall, DecodeMLA, PlanDecode
from jaxkv_kernels.masks import Interval, Intervals, Sliding, disjoint
from jaxkv_kernels.scores import merged
from jaxkv_kernels.token_heads import heads_as_tokens, tokens_as_heads
from jaxkv_kernels.xla.attention import FewTokens, decode_kv, decode_mla
from jaxkv_kernels.xla.visible import Visible

type Results = tuple[jax.Array, jax.Array]


def reasons_by_parts[C: (DecodeCall, PlanDecode)](
    reasons: Callable[[C], Iterator[str]],
) -> Callable[[C], Iterator[str]]:
    """The reasons against calls that run by parts, from those against the calls of a kernel."""

    def reasons_of_call(call: C) -> Iterator[str]:
        if _is_whole(call):
            yield from reasons(call)
        elif call.mask is not None and not isinstance(call.mask, Intervals):
            yield "`mask`, a function: supports those of `jaxkv.masks`, by which query tokens see intervals of tokens"
        elif call.batch_invariant:
            yield "`batch_invariant` with a `mask` or `tree_mask`: parts of a call depend on the rest of the batch"
        else:
            yield from reasons(jax.eval_shape(lambda call: _kernel_calls(call)[0], call))

    return reasons_of_call


def plan_by_parts(call: PlanDecode, plan_decode: Callable[[PlanDecode], Any]) -> Any:
    """The schedule of calls that run by parts, by the function that makes those of a kernel."""
    return plan_decode(call) if _is_whole(call) else tuple(plan_decode(part) for part in _kernel_calls(call))


def decode_by_parts[C: DecodeCall](call: C, decode: Callable[[C], Results]) -> Results:
    """The results of a call, by the function that runs a kernel."""
    if _is_whole(call):
        return decode(call)
    calls = _kernel_calls(replace(call, plan=None))
    plans = call.plan or [None] * len(calls)
    parts = [_ordered(decode(replace(part, plan=plan)), call) for part, plan in zip(calls, plans, strict=True)]
    out, lse = merged([*parts, *_rest(call)])
    return out.astype(call.dtype), lse


def _is_whole(call: DecodeCall | PlanDecode) -> bool:
    """Whether a kernel runs the call by itself."""
    return call.tree is None and call.mask is None


def _alike(call: DecodeCall | PlanDecode) -> bool:
    """Whether all query tokens of a request see the same tokens before the new ones."""
    return call.window is None and call.mask is None


def _shown_by(call: DecodeCall | PlanDecode) -> Intervals:
    """The mask of the call, of intervals as `reasons_by_parts` demands; one that shows all tokens if there is none."""
    assert call.mask is None or isinstance(call.mask, Intervals)
    return Sliding(-1, -1) if call.mask is None else call.mask


def _spans(call: DecodeCall | PlanDecode) -> list[Interval]:
    """The intervals of tokens before the new ones that each query token sees, [B, Q], or [B, 1] if they are `_alike`.

    Those of one query token have no token in common.
    """
    lengths = lengths_in_table(call.seq_lens, call.block_tables, call.pages.block_size)
    last = lengths if call.tree is None else jnp.clip(call.tree.start, 0, lengths)
    if _alike(call):
        return [Interval(jnp.zeros_like(last)[:, None], last[:, None])]
    visible = Visible.of(call, lengths, call.q_len, call.trailing, call.tree)
    begins, ends = visible.begins, jnp.minimum(visible.ends, last[:, None])
    shown = _shown_by(call).intervals(visible.queries)
    spans = disjoint([Interval(jnp.maximum(a.begin, begins), jnp.minimum(a.end, ends)) for a in shown])
    return [Interval(jnp.clip(begin, 0, jnp.maximum(end, 0)), jnp.maximum(end, 0)) for begin, end in spans]


def _kernel_calls[C: (DecodeCall, PlanDecode)](call: C) -> list[C]:
    """The calls of a kernel without tree and mask: one for each of `_spans`."""
    size, columns = call.pages.block_size, jnp.arange(call.block_tables.shape[1], dtype=jnp.int32)
    if isinstance(call, PlanDecode):
        rows = replace(call, q_len=1, heads=call.heads * (call.q_len if _alike(call) else 1))
    elif _alike(call):
        rows = call.with_queries(*(tokens_as_heads(q, call.pages.num_heads) for q in call.queries))
    else:
        rows = call.with_queries(*map(_each_alone, call.queries))
    rows = replace(rows, tree=None, mask=None, window=None, ahead=0, trailing=None)

    def part(span: Interval) -> C:
        block = -(-span.begin // size)
        shifted = jnp.minimum(block[..., None] + columns, columns.size - 1)
        tables = jnp.take_along_axis(call.block_tables[:, None], shifted, axis=-1)
        lengths = jnp.maximum(span.end - block * size, 0)
        return replace(rows, block_tables=tables.reshape(-1, columns.size), seq_lens=lengths.reshape(-1))

    return [part(span) for span in _spans(call)]


def _each_alone(q: jax.Array) -> jax.Array:
    """Queries [B, Q, H, D] as those of requests of one query token, [B * Q, 1, H, D]."""
    return q.reshape(q.shape[0] * q.shape[1], 1, *q.shape[2:])


def _ordered(results: Results, call: DecodeCall) -> Results:
    """The results of one of `_kernel_calls` as those of `call`."""
    if _alike(call):
        out, lse = (heads_as_tokens(x, call.pages.num_heads, call.q_len) for x in results)
    else:
        out, lse = (x.reshape(-1, call.q_len, *x.shape[2:]) for x in results)
    return out, lse


def _rest(call: DecodeCall) -> Iterator[Results]:
    """Attention to the tokens that no kernel attends to, in float32."""
    attend: Callable[..., Results] = decode_mla if isinstance(call, DecodeMLA) else decode_kv
    size, spans = call.pages.block_size, _spans(call)
    aligned = call.window is None and len(spans) == 1 and _shown_by(call).aligned(size)
    for begin, end in [] if aligned else spans:
        positions = begin[..., None] + jnp.arange(size, dtype=jnp.int32)
        seen = positions < jnp.minimum(-(-begin // size) * size, end)[..., None]
        tables = jnp.repeat(call.block_tables, call.q_len, axis=0)
        alone = replace(call.with_queries(*map(_each_alone, call.queries)), block_tables=tables, tree=None)
        yield _ordered(attend(alone, FewTokens(positions.reshape(-1, size), seen.reshape(-1, 1, size))), call)
    if call.tree is not None:
        lengths = lengths_in_table(call.seq_lens, call.block_tables, size)
        positions = call.tree.start[:, None] + jnp.arange(call.tree.seen.shape[-1], dtype=jnp.int32)
        visible = Visible.of(call, lengths, call.q_len, call.trailing, call.tree)
        yield attend(call, FewTokens(positions, visible.of_keys(positions)))
