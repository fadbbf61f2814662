"""Split requests: plans, which assign tokens of requests to programs, and combining the results of splits.

A plan is computed on the device from the lengths, and has one split size for all requests.  Large splits leave
multiprocessors idle.  Each small split has a fixed cost, and splits must be combined afterwards.  The plan compares a
few sizes and uses the one with the least estimated time.

`combine` writes the combined results in place to the rows of split requests.  A program loops over units of work.  A
unit is some columns of one row of a split request.  It reads the splits in groups and keeps an online softmax over
their base-2 log-sum-exps:

    for each unit:   for each group of splits:  load LSEs, values | max, weights | acc = acc * rescale + sum
                     normalize, store

Before that, it copies the LSEs of requests that are not split to the LSE result.  (A launch can update only one array
in place, which here is the array of results, so LSEs have to be copied.)  No two programs write the same bytes.

What bounds `combine`: the latency of the loads.  A group is therefore about as large as the usual number of splits per
request.  A group of 4,096 values takes 32 registers in each of 128 threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import lengths_in_table, table_tokens
from jaxkv_kernels.calls import DecodeCall, DecodeMLASparse, PlanDecode
from jaxkv_kernels.triton.arithmetic import rounded
from jaxkv_kernels.triton.attention import (
    LOG2E,
    NO_KEYS,
    Config,
    log2_sum,
    next_power_of_two,
    normalizer,
    normalizer_with_sink,
)
from jaxkv_kernels.triton.interpreter import interpreting
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import element_type, launch
from jaxkv_kernels.xla.paged import query_ranges


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """A schedule.  All arrays are int32."""

    work_tiles: jax.Array
    """[tiles, 4]: request (-1 for none), first token, end, and whether the request has several work tiles."""
    split_requests: jax.Array
    """[B, 3]: request, its first work tile, and its number of work tiles.  Split requests come first, then the others.
    """
    tiles_per_request: jax.Array
    """[B]: work tiles of each request."""
    num_split: jax.Array
    """[1]: number of split requests."""
    typical_splits: int = field(metadata={"static": True})
    """Splits per request if all requests have the same length and the splits fill the GPU once."""

    @property
    def may_split(self) -> bool:
        """Whether any request can be split."""
        return self.work_tiles.shape[0] > self.tiles_per_request.shape[0]


def multiprocessors() -> int:
    """Multiprocessors of the GPU.  The interpreter gets four, so that its short requests are split as well."""
    device: Any = jax.devices()[0]
    return 4 if interpreting.value or device.platform == "cpu" else device.core_count


def batch_invariant_reasons(call: PlanDecode | DecodeMLASparse) -> Iterator[str]:
    """A reason against a call that must be batch-invariant."""
    if call.batch_invariant:
        yield "a request is split depending on what else is in the batch: cannot be batch-invariant"


def plan_requests(call: PlanDecode | DecodeCall, config: Config, rows: int) -> Plan:
    """The schedule for `rows` rows of queries per request and head of the cache."""
    return make_plan(
        call.seq_lens,
        call.trailing,
        config=config,
        row_tiles=call.pages.num_heads * config.row_tiles(rows),
        q_len=call.q_len,
        window=call.window,
        ahead=call.ahead,
        longest=table_tokens(call.block_tables, call.pages.block_size),
        sms=multiprocessors(),
    )


def last_ends(call: DecodeCall) -> jax.Array:
    """The position [B] after the last query token of each request; unclamped lengths if there is no `trailing`."""
    if call.trailing is None:
        return call.seq_lens
    return lengths_in_table(call.seq_lens, call.block_tables, call.pages.block_size) - call.trailing


@partial(jax.jit, static_argnames=("config", "row_tiles", "q_len", "window", "ahead", "longest", "sms"))
def make_plan(
    seq_lens,
    trailing=None,
    *,
    config: Config,
    row_tiles: int,
    q_len: int,
    window: int | None,
    ahead: int | None,
    longest: int,
    sms: int,
) -> Plan:
    """The schedule for requests of `seq_lens` [B] (clamped to the range 0 to `longest`) on `sms` multiprocessors.

    `row_tiles` programs share each work tile.  Requests begin at the first token that some query token sees, and end at
    the last one; `trailing` [B], `window` and `ahead` are those of `DecodeCall`.
    """
    batch = seq_lens.size
    places = sms * config.programs_per_sm  # programs that run at the same time
    seen = query_ranges(jnp.clip(seq_lens, 0, longest), q_len, window, ahead, trailing)
    begins, ends = seen[0][:, 0], jnp.maximum(seen[1][:, -1], 0)
    lengths = ends - begins

    longest_length = jnp.maximum(lengths.max(), 1)
    share = jnp.maximum(lengths.sum(dtype=jnp.float32), 1) * row_tiles / places  # tokens per place, spread evenly
    splits = jnp.maximum(jnp.arange(1, config.max_waves + 1) * longest_length // share, 1)
    sizes = jnp.ceil(longest_length / splits / config.split_multiple).astype(jnp.int32) * config.split_multiple
    counts = jnp.maximum(-(-lengths // sizes[:, None]), 1)
    waves = -(-counts.sum(axis=1) * row_tiles // places)
    # The time, in tokens, has two upper bounds.  Programs that start in order end within an even share plus one split,
    # and also within one split per wave.
    end = jnp.minimum(share + sizes, waves * sizes) + waves * config.split_cost
    best = end.argmin()
    size, counts = sizes[best], counts[best]

    most_tiles = batch + max(batch, config.max_waves * places // row_tiles)
    tile = jnp.arange(min(most_tiles, batch * -(-longest // config.split_multiple)), dtype=jnp.int32)
    after = jnp.cumsum(counts)
    first = after - counts
    request = jnp.searchsorted(after, tile, side="right", method="compare_all").astype(jnp.int32)
    live, request = request < batch, jnp.minimum(request, batch - 1)
    begin = begins[request] + (tile - first[request]) * size
    end = jnp.minimum(begin + size, ends[request])
    is_split = counts > 1
    work_tiles = jnp.stack([jnp.where(live, request, -1), begin, end, is_split[request].astype(jnp.int32)], axis=1)
    order = jnp.argsort(~is_split, stable=True)
    split_requests = jnp.stack([order.astype(jnp.int32), first[order], jnp.where(is_split, counts, 0)[order]], axis=1)
    num_split = is_split.sum(dtype=jnp.int32)[None]
    return Plan(work_tiles, split_requests, counts, num_split, typical_splits=places // (row_tiles * batch))


GROUP_VALUES = 4096
"""Values per group of splits."""
MAX_PROGRAMS = 2048
"""About as many programs as fit on a GPU at a time.  Further programs would mostly find no work."""
LSE_TILE = 1024
"""Log-sum-exps that a program copies at a time."""


def combine(out, lse, split_out, split_lse, plan, sinks=None):
    """Writes the rows of split requests to out [B, Q, Hq, D] and lse [B, Q, Hq], and returns both.

    `split_out` [tiles, Q * Hq, D] and `split_lse` [tiles, Q * Hq] are float32, one per work tile of the plan.
    """
    batch, q_len, heads, size = out.shape
    group = min(max(4, next_power_of_two(plan.typical_splits)), 64)
    columns = min(GROUP_VALUES // group, next_power_of_two(size))
    units = batch * q_len * heads * -(-size // columns)
    out, lse = launch(
        _combine,
        (
            lse, split_out, split_lse, plan.split_requests, plan.tiles_per_request, plan.num_split,
            split_lse if sinks is None else sinks,
        ),
        (jax.ShapeDtypeStruct(lse.shape, lse.dtype),),
        updated=(out,), grid=(min(units, MAX_PROGRAMS),),
        ROWS=q_len * heads, HEADS=heads, SIZE=size, DTYPE=element_type(out.dtype), SINKS=sinks is not None,
        ALL=batch * q_len * heads, GROUP=group, COLUMNS=columns, BLOCK=LSE_TILE,
    )  # fmt: skip
    return out, lse


@triton.jit
def _combine(
    whole_lse, split_out, split_lse, split_requests, tiles_per_request, num_split, sinks, out, lse,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr, SINKS: tl.constexpr,
    ALL: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    UNITS_PER_ROW: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    for first in tl.range(tl.program_id(0) * BLOCK, ALL, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        whole = tl.load(tiles_per_request + row // ROWS, mask=row < ALL, other=0) == 1
        tl.store(lse + row, tl.load(whole_lse + row, mask=whole), mask=whole)
    for unit in tl.range(tl.program_id(0), tl.load(num_split) * ROWS * UNITS_PER_ROW, tl.num_programs(0)):
        entry = split_requests + unit // (ROWS * UNITS_PER_ROW) * 3
        request, first_tile, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        row = unit // UNITS_PER_ROW % ROWS
        column = unit % UNITS_PER_ROW * COLUMNS + tl.arange(0, COLUMNS)
        row_max = tl.full((), NO_KEYS, tl.float32)
        row_sum = tl.zeros((), tl.float32)
        acc = tl.zeros((COLUMNS,), tl.float32)
        for group in tl.range(0, count, GROUP):
            split = group + tl.arange(0, GROUP)
            exists = split < count
            source = (first_tile + split).to(tl.int64) * ROWS + row
            split_sum = tl.load(split_lse + source, mask=exists, other=float("-inf"))
            mask = exists[:, None] & (column < SIZE)[None, :]
            values = tl.load(split_out + source[:, None] * SIZE + column[None, :], mask=mask, other=0)
            new_max = tl.maximum(row_max, tl.max(split_sum, axis=0))
            weight, rescale = tl.exp2(split_sum - new_max), tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(weight, axis=0)
            acc = acc * rescale + tl.sum(values * weight[:, None], axis=0)
            row_max = new_max
        below = normalizer(row_sum)
        if SINKS:
            below = normalizer_with_sink(row_max, row_sum, tl.load(sinks + row % HEADS))
        target = request.to(tl.int64) * ROWS + row
        tl.store(out + target * SIZE + column, rounded(acc / below, DTYPE), mask=column < SIZE)
        tl.store(lse + target, log2_sum(row_max, row_sum) / LOG2E)
