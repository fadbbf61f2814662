"""Device-side: stores of logits, whose rows may end anywhere."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.indexer.config import TILE
from jaxkv_kernels.mosaic_gpu.runtime.integers import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, SCALAR

THREADS = 128
MINUS_INFINITY = "0fFF800000"
ADDRESS = "mul.wide.u32 a, $1, {bytes}; mul.wide.u32 b, i, 4; add.s64 a, a, b; add.s64 a, a, $0;"
"""Computes the address `a` of element `i` of row $1 of the array at $0."""


def padded(max_len: int, *, interpret: bool) -> int:
    """The length of rows of the result: in the interpreter, which stores whole tiles, a multiple of TILE."""
    return -(-max_len // TILE) * TILE if interpret else max_len


def store_logits(out_ref, row, first, end, known, part: int, logits, *, interpret: bool) -> None:
    """Stores a tile of logits, a ROW array, to `out_ref[row, first:]` as far as the row goes.

    It stores -inf from position `end` on, and for tokens of unknown blocks: bit i of `known` is whether the i-th
    `part` tokens of the tile are in the cache.
    """
    if interpret:
        token = jnp.arange(TILE, dtype=jnp.int32)
        seen = (first + token < end) & ((known >> token // part & 1) > 0)
        out_ref[row, pl.ds(first, TILE)] = jnp.where(seen, logits, -jnp.inf)
        return
    length = out_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR, ROW))
    def store(_, ref, row, first, end, known, logits):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import vector

        at = ir.DenseI64ArrayAttr.get([0])
        low, high = (vector.extract(x, dynamic_position=[], static_position=at) for x in logits.registers.flat)
        # A quad of lanes holds rows n and n + 8 of a warp's 16: its first two lanes store one each.
        mgpu.utils.inline_ptx(
            "{ .reg .pred p, q; .reg .b32 i, n, lane; .reg .b64 a, b; .reg .f32 x; mov.u32 lane, %laneid; "
            "and.b32 n, lane, 1; setp.eq.b32 p, n, 0; selp.f32 x, $5, $6, p; shl.b32 n, n, 3; "
            "shr.u32 i, lane, 2; add.s32 n, n, i; mov.u32 i, %tid.x; shr.u32 i, i, 1; and.b32 i, i, 48; "
            "add.s32 n, n, i; add.s32 i, n, $2; "  # n: the token within the tile, i: its position
            f"shr.u32 n, n, {part.bit_length() - 1}; shr.u32 n, $4, n; and.b32 n, n, 1; setp.eq.b32 q, n, 0; "
            f"setp.ge.or.s32 q, i, $3, q; selp.f32 x, {MINUS_INFINITY}, x, q; "
            f"and.b32 n, lane, 2; setp.eq.b32 p, n, 0; setp.lt.and.s32 p, i, {length}, p; "
            # Logits stay in the L2 cache while keys pass through it: the selection reads them next.
            f"{ADDRESS.format(bytes=4 * length)} createpolicy.fractional.L2::evict_last.b64 b, 0f3F800000; "
            "@p st.global.L2::cache_hint.f32 [a], x, b; }",
            mgpu.utils.memref_ptr(ref),
            *(x.registers.item() for x in (row, first, end, known)),
            low,
            high,
            result_types=None,
            has_side_effects=True,
        )

    store(out_ref, row, first, end, known, logits)


def fill(out_ref, row, first, last, *, interpret: bool) -> None:
    """Stores -inf to `out_ref[row, first:last]`."""
    if interpret:

        def fill_tile(i, _):
            out_ref[row, pl.ds(first + i * TILE, TILE)] = jnp.full(TILE, -jnp.inf, jnp.float32)

        lax.fori_loop(0, floordiv(jnp.maximum(last - first, 0) + (TILE - 1), TILE), fill_tile, None)
        return
    length: Any = out_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def store(_, ref, row, first, last):
        from jax.experimental.mosaic import gpu as mgpu

        mgpu.utils.inline_ptx(
            "{ .reg .pred p; .reg .b32 i; .reg .b64 a, b; mov.u32 i, %tid.x; and.b32 i, i, 127; add.s32 i, i, $2; "
            f"{ADDRESS.format(bytes=4 * length)} setp.lt.s32 p, i, $3; @!p bra DONE; "
            f"MORE: st.global.f32 [a], {MINUS_INFINITY}; add.s32 i, i, {THREADS}; add.s64 a, a, {4 * THREADS}; "
            "setp.lt.s32 p, i, $3; @p bra MORE; DONE: }",
            mgpu.utils.memref_ptr(ref),
            *(x.registers.item() for x in (row, first, last)),
            result_types=None,
            has_side_effects=True,
        )

    store(out_ref, row, first, last)
