"""Device-side: sums scores over heads, and stores the logits, whose rows may end anywhere."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.indexer.config import TILE
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, LANE_COLUMNS, ROW, SCALAR, WGMMA

THREADS = 128


def padded(max_len: int, *, interpret: bool) -> int:
    """The length of rows of the result: in the interpreter, which stores whole tiles, a multiple of TILE."""
    return -(-max_len // TILE) * TILE if interpret else max_len


def store_logits(out_ref, row, first, end, known, part: int, partial, scale, *, skipped=None, interpret: bool) -> None:
    """Stores a tile of logits of one or two query tokens to `out_ref[row:, first:]`, up to the ends of the rows.

    It stores -inf from position `end` on (`end + 1` for the second token), and for tokens of unknown blocks: bit i of
    `known` is 1 if group i of `part` tokens of the tile is in the cache.

    `partial` has one result of `weigh` per query token; `scale` is a ROW array or None.  The first `skipped` (an int32
    scalar or None) of the query tokens are not stored.
    """
    if interpret:
        token = jnp.arange(TILE, dtype=jnp.int32)
        for n, sums in enumerate(partial):
            seen = (first + token < end + n) & ((known >> token // part & 1) > 0)
            logits = jnp.where(seen, sums.sum(axis=1) * (1 if scale is None else scale), -jnp.inf)

            @pl.when(n >= (0 if skipped is None else skipped))
            def _(n=n, logits=logits):
                out_ref[row + n, pl.ds(first, TILE)] = logits

        return
    scales = [] if scale is None else [scale]
    skips = [] if skipped is None else [skipped]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), [SCALAR] * 4, [SCALAR] * len(skips), [WGMMA] * len(partial), [ROW] * len(scales))
    )
    def store(_, ref, place, skips, partial, scales):
        from jaxkv_kernels.mosaic_gpu.indexer import heads

        scalars = [x.registers.item() for x in (*place, *skips)]
        heads.store(ref, scalars, partial, scales, length=out_ref.shape[1], part=part)

    store(out_ref, [row, first, end, known], skips, list(partial), scales)


def weigh(partial, scores, weights, *, interpret: bool):
    """The sum over heads of relu(score) * weight, of which each lane of a quad holds a part: a WGMMA tile [64, 8].

    `scores` [64, heads] is a WGMMA tile, `weights` [heads] a COLUMN array.  `partial` is a sum over other heads to add
    to, or None.
    """
    if interpret:
        weighted = jnp.maximum(scores, 0.0) * weights
        added = weighted.reshape(TILE, -1, LANE_COLUMNS).sum(axis=1)
        return added if partial is None else partial + added

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, COLUMN, [] if partial is None else [WGMMA]),
        return_type=plgpu.ShapeDtypeStruct((TILE, LANE_COLUMNS), jnp.dtype(jnp.float32), layout=WGMMA),
    )
    def weigh(_, scores, weights, partial):
        from jaxkv_kernels.mosaic_gpu.indexer import heads

        return heads.weigh(scores, weights, *partial)

    return weigh(scores, weights, [] if partial is None else [partial])


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

        from jaxkv_kernels.mosaic_gpu.indexer.heads import ADDRESS, MINUS_INFINITY

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
