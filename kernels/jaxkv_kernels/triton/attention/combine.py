"""Combines the pieces of requests that were cut, in place of their rows of the result.

Who does what.  Programs take turns at units of work: some columns of a row of a cut request.  A program reads the
pieces in groups, as large as there usually are pieces of a request, and keeps a running softmax over their log-sum-exps
(base 2).  Besides, the log-sum-exps of requests that were not cut are copied, as a
launch updates one array only.
Order.  None: no two programs write the same bytes.
Budget.  Registers: 4,096 values of 128 threads.
"""

import jax
import triton
import triton.language as tl

from jaxkv_kernels.triton.attention.decode_tiles import power_of_two
from jaxkv_kernels.triton.attention.softmax import EMPTY, LOG2E, divisor, divisor_with_sink, log_sum
from jaxkv_kernels.triton.runtime.arithmetic import rounded
from jaxkv_kernels.triton.runtime.dtypes import element_type
from jaxkv_kernels.triton.runtime.launch import launch

VALUES = 4096
"""Of a group of pieces."""
PROGRAMS = 2048
COPIED = 1024
"""Log-sum-exps at a time."""


def combine(out, lse, part_out, part_lse, plan, sinks=None):
    """out [B, Q, Hq, D] with the rows of cut requests, and lse [B, Q, Hq], of their pieces [items, Q * Hq (, D)]."""
    batch, tokens, heads, size = out.shape
    group = min(max(4, power_of_two(plan.usual)), 64)
    columns = min(VALUES // group, power_of_two(size))
    units = batch * tokens * heads * -(-size // columns)
    out, lse = launch(
        _combine,
        (
            lse, part_out, part_lse, plan.cuts, plan.counts, plan.number,
            part_lse if sinks is None else sinks,
        ),
        (jax.ShapeDtypeStruct(lse.shape, lse.dtype),),
        updated=out, grid=(min(units, PROGRAMS),),
        ROWS=tokens * heads, HEADS=heads, SIZE=size, DTYPE=element_type(out.dtype), SINKS=sinks is not None,
        ALL=batch * tokens * heads, GROUP=group, COLUMNS=columns, BLOCK=COPIED,
    )  # fmt: skip
    return out, lse


@triton.jit
def _combine(
    whole_lse, part_out, part_lse, cuts, counts, number, sinks, out, lse,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr, SINKS: tl.constexpr,
    ALL: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    SHARES: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    for first in tl.range(tl.program_id(0) * BLOCK, ALL, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        whole = tl.load(counts + row // ROWS, mask=row < ALL, other=0) == 1
        tl.store(lse + row, tl.load(whole_lse + row, mask=whole), mask=whole)
    for unit in tl.range(tl.program_id(0), tl.load(number) * ROWS * SHARES, tl.num_programs(0)):
        cut = cuts + unit // (ROWS * SHARES) * 3
        request, item, count = tl.load(cut), tl.load(cut + 1), tl.load(cut + 2)
        row = unit // SHARES % ROWS
        column = unit % SHARES * COLUMNS + tl.arange(0, COLUMNS)
        top = tl.full((), EMPTY, tl.float32)
        total = tl.zeros((), tl.float32)
        acc = tl.zeros((COLUMNS,), tl.float32)
        for group in tl.range(0, count, GROUP):
            piece = group + tl.arange(0, GROUP)
            there = piece < count
            source = (item + piece).to(tl.int64) * ROWS + row
            found = tl.load(part_lse + source, mask=there, other=float("-inf"))
            mask = there[:, None] & (column < SIZE)[None, :]
            values = tl.load(part_out + source[:, None] * SIZE + column[None, :], mask=mask, other=0)
            new = tl.maximum(top, tl.max(found, axis=0))
            weight, shrink = tl.exp2(found - new), tl.exp2(top - new)
            total = total * shrink + tl.sum(weight, axis=0)
            acc = acc * shrink + tl.sum(values * weight[:, None], axis=0)
            top = new
        below = divisor(total)
        if SINKS:
            below = divisor_with_sink(top, total, tl.load(sinks + row % HEADS))
        target = request.to(tl.int64) * ROWS + row
        tl.store(out + target * SIZE + column, rounded(acc / below, DTYPE), mask=column < SIZE)
        tl.store(lse + target, log_sum(top, total) / LOG2E)
