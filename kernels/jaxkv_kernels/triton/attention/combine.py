"""Combines the splits of requests, and writes the result in place to the rows of those requests.

A program loops over units of work.  A unit is some columns of one row of a split request.  It reads the splits in
groups and keeps an online softmax over their base-2 log-sum-exps:

    for each unit:   for each group of splits:  load LSEs, values | max, weights | acc = acc * rescale + sum
                     normalize, store

Before that, it copies the LSEs of requests that are not split to the LSE result.  (A launch can update only one array
in place, which here is the array of results, so LSEs have to be copied.)  No two programs write the same bytes.

What bounds it: the latency of the loads.  A group is therefore about as large as the usual number of splits per
request.  A group of 4,096 values takes 32 registers in each of 128 threads.
"""

import jax
import triton
import triton.language as tl

from jaxkv_kernels.triton.attention.config import next_power_of_two
from jaxkv_kernels.triton.attention.softmax import LOG2E, NO_KEYS, log2_sum, normalizer, normalizer_with_sink
from jaxkv_kernels.triton.runtime.arithmetic import rounded
from jaxkv_kernels.triton.runtime.dtypes import element_type
from jaxkv_kernels.triton.runtime.launch import launch

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
