"""Merges partial attentions of the same queries over disjoint sets of keys.

It computes out = sum of exp(lse_i - lse) * out_i, where lse = log(sum of exp(lse_i)).

A program processes ROWS queries and loops over the partial results twice:

    for each partial result:   load LSEs | maximum
    for each partial result:   load LSEs, values | weights | acc, row_sum
                               normalize, store

What bounds it: memory bandwidth.  Two tiles of 2,048 values take 32 registers per thread, and no shared memory.
"""

from collections.abc import Iterator
from typing import Any

import jax

from jaxkv_kernels.calls import MergeStates
from jaxkv_kernels.triton.arithmetic import rounded
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import launch
from jaxkv_kernels.triton.tiles import TILE_LIMIT, WARPS, load_rows, store_rows, tile_shape


def unsupported_reasons(call: MergeStates) -> Iterator[str]:
    """Reasons against a call."""
    if not call.outs.size:
        yield "outs of no values: a kernel would have nothing to do"
    elif call.outs.shape[-1] > TILE_LIMIT:
        yield f"outs of {call.outs.shape[-1]} values: supports at most {TILE_LIMIT}, as of parts of entries"


@jax.jit
def merge_states(call: MergeStates) -> tuple[jax.Array, jax.Array]:
    """The results of attention over disjoint sets of keys, for the same queries, as one: out [..., D] and lse [...]."""
    outs, lses = call.outs, call.lses
    shapes = jax.ShapeDtypeStruct(outs.shape[1:], outs.dtype), jax.ShapeDtypeStruct(lses.shape[1:], lses.dtype)
    tile = tile_shape((outs.shape[-1],))
    count = lses[0].size
    constants: dict[str, Any] = {"PARTS": outs.shape[0], "SIZE": outs.shape[-1], "COUNT": count, "ROWS": tile["ROWS"]}
    grid = (triton.cdiv(count, tile["ROWS"]),)
    constants["COLUMNS"] = tile["COLUMNS"][0]
    out, lse = launch(_merge_states, (outs, lses), shapes, grid=grid, warps=WARPS, **constants)
    return out, lse


@triton.jit
def _merge_states(
    outs, lses, out, lse,
    PARTS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    for part in range(PARTS):
        row_max = tl.maximum(row_max, _without_nan(lses + part * tl.cast(COUNT, tl.int64), row, COUNT))
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in range(PARTS):
        first = part * tl.cast(COUNT, tl.int64)
        weight = tl.exp(_without_nan(lses + first, row, COUNT) - base)
        values = load_rows(outs + first * SIZE, row, COUNT, SIZE, COLUMNS).to(tl.float32)
        acc += tl.where(weight[:, None] > 0, values * weight[:, None], 0.0)
        row_sum += weight
    divisor = tl.where(row_sum > 0, row_sum, 1.0)
    store_rows(out, row, rounded(acc / divisor[:, None], out.dtype.element_ty), COUNT, SIZE, COLUMNS)
    tl.store(lse + row, tl.where(row_sum > 0, base + tl.log(divisor), float("-inf")), mask=row < COUNT)


@triton.jit
def _without_nan(lses, row, COUNT: tl.constexpr):
    """Loads the LSEs of rows.  +inf and NaN, which some kernels return for rows without keys, become -inf."""
    found = tl.load(lses + row, mask=row < COUNT, other=float("-inf"))
    return tl.where(found < float("inf"), found, float("-inf"))
