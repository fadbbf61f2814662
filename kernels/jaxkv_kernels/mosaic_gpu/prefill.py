"""Prefill on Hopper, by cuDNN and by a kernel of attention to earlier tokens, `attend_expanded`.

The kernel attends to keys and values that are expanded from latents.  The rotary part of a key, which all heads share,
stays in an array of its own.  cuDNN needs one array of keys, and joining the two would write and read all keys once
more.  Each query sees the first `kv_lens` keys of its request, or those of them that are in a window around its
position.  A CTA then visits only the tiles of keys that some of its queries see.

Work.  A CTA has 128 query tokens of one head, 64 per consumer, and one of `splits` equal ranges of keys, in tiles of
128.  CTAs with the same keys are neighbours in the grid, so that most of them read the keys from the L2 cache.
Timeline, downwards:

    producer                  consumer 0                         consumer 1
    queries, once             S = Q K'  -> k_full                -> turn
    keys    -> k_free         arrives turn                       S = Q K'  -> k_full
    values  -> v_free         softmax, P in registers            arrives turn
                              -> turn                            softmax
                              O += P V  -> v_full; next S        -> turn
                              arrives turn                       O += P V; next S
                              ...

Both consumers arrive at `turn` and wait for it twice per tile: once the product S has started, and after the softmax.
Consumer 1 is half a tile behind, so that one consumer multiplies while the other one computes its softmax.

Barriers, and how many arrivals complete them:
    q_full                    the queries have landed (one per 64 columns and consumer)
    k_full, v_full [stage]    keys (2: both parts), or values, have landed
    k_free, v_free [stage]    both consumers have multiplied them (2)
    turn                      (2)

Budget, for keys of 128 + 64 and values of 128.  Shared memory: keys and values 160 KiB (2 stages) + queries 48 KiB, in
whose place results are stored.  Registers: O 64 + S 64 + P 32 of 232 per lane for consumers, 40 for the producer.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import ExpandedHeads, PrefillKV, PrefillMLA
from jaxkv_kernels.mosaic_gpu import cudnn, entries
from jaxkv_kernels.mosaic_gpu.masks import MASKED
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, floordiv, multiply_add, opaque_zero
from jaxkv_kernels.mosaic_gpu.runtime.device import WGMMA as WGMMA_CAPABILITIES
from jaxkv_kernels.mosaic_gpu.runtime.device import (
    consumer_registers,
    interpreting,
    multiprocessors,
    unavailable_reasons,
)
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import (
    LANE_COLUMNS,
    WGMMA,
    fold_columns,
    over_columns,
    zeros,
)
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.softmax import OnlineSoftmax
from jaxkv_kernels.mosaic_gpu.token_rows import TILE_ROWS
from jaxkv_kernels.scores import too_large
from jaxkv_kernels.xla import prefill as gathered

SIZES = (128, 64, 128)
"""Values of a key without and in its rotary part, and of a value: DeepSeek's."""
ROWS = 64
"""Query tokens of a consumer."""
KEYS = 128
"""Keys of a tile."""
CHUNK = 64
"""Columns of queries, or of a result, that are contiguous in shared memory."""
STAGES = 2
PRODUCER_REGISTERS = 40
THRESHOLD = 8.0
"""The running max is raised when a score in base 2 exceeds it by more than this; the same as in the other kernels."""
LEAST_KEYS = 1024
"""The least keys of a split, here and by cuDNN: merging it must take little in comparison."""
SPLITS = (1, 2, 4, 8)
WELL_FILLED = 1.1
"""If idle multiprocessors make the kernel take at most this many times as long, more splits are not worth merging."""

CUDNN_ROWS = 2 * 132 * 128
"""Query rows (requests x heads x tokens) with which cuDNN fills a GPU: two work tiles of 128 rows per multiprocessor of
an H200."""
CUDNN_CHUNKS = 2
"""With room for at most this many chunks, all of them run unconditionally.

XLA's loops and conditions wait for the host, which cost 0.46 ms per layer on an H200.  A chunk without tokens takes
about 0.15 ms: its keys and values are expanded, but cuDNN skips them."""

LEAST_WITH_CUDNN = 1024
"""New tokens per request from which on `prefill_mla` is faster than `decode_mla`, if cuDNN attends to earlier tokens.

With 512, it was not faster on an H200; with 8,192, it was.  Nothing in between was measured."""
LEAST_WITH_KERNEL = 256
"""The same if `attend_expanded` does."""


def cudnn_splits(keys: int, rows: int) -> int:
    """Splits of a chunk's keys for cuDNN: as many as fill the GPU, each of LEAST_KEYS or more."""
    splits = 1
    while rows * splits < CUDNN_ROWS and keys % (2 * splits * LEAST_KEYS) == 0:
        splits *= 2
    return splits


CUDNN = gathered.DenseAttention(cudnn.attention, cudnn.ragged_attention, cudnn_splits, CUDNN_CHUNKS)


def prefill_mla(call: PrefillMLA) -> tuple[jax.Array, jax.Array]:
    """The results of a call.

    cuDNN attends to the new tokens, and `attend_expanded` to earlier ones if it supports the heads and queries are not
    ragged; otherwise cuDNN does that as well.  XLA attends to all tokens if cuDNN does not support the heads, and to
    new ones if there is a logit cap.
    """
    nope, value, rope = call.w_uk.shape[1], call.w_uv.shape[1], call.q_pe.shape[-1]
    if any(cudnn.unsupported_reasons(call.dtype, nope + rope, value)):
        return gathered.prefill_mla(call, entries.gather)
    shared_rope = None
    if not any(unsupported_reasons(call.dtype, nope, rope, value)) and not any(too_large(call.logit_cap)):
        attend = partial(attend_expanded, scale=call.scale, logit_cap=call.logit_cap)
        shared_rope = gathered.SharedRopeAttention(attend, TILE_ROWS)
    return gathered.prefill_mla(call, entries.gather, _dense(call), shared_rope)


def prefill_kv(call: PrefillKV) -> tuple[jax.Array, jax.Array]:
    """The results of a call: by cuDNN, or by XLA if cuDNN does not support the heads or there is a logit cap."""
    unsupported = any(cudnn.unsupported_reasons(call.dtype, *call.entry.sizes))
    return gathered.prefill_kv(call, entries.gather, gathered.XLA if unsupported else _dense(call))


def _dense(call: PrefillMLA | PrefillKV) -> gathered.DenseAttention:
    """Attention to heads that cuDNN supports: cuDNN has no logit cap."""
    return CUDNN if call.logit_cap is None else gathered.XLA


def least_prefill(heads: ExpandedHeads) -> int | None:
    """New tokens per request from which on `prefill_mla` is faster than `decode_mla`; None if cuDNN lacks the heads.

    With fewer tokens, it takes more flops, or more time for what is not a product.  The times are those of a layer of
    DeepSeek-V2-Lite (16 heads, bfloat16) on an H200.  For 8,192 new tokens, attention takes 0.8 ms, and absorbed
    attention 5.4.  For 512 new tokens after 32,768 cached ones, `attend_expanded` takes 0.25 ms, cuDNN 0.34 and
    absorbed attention 0.81.  Expanding the cached tokens takes 0.19 ms more, and joining their keys, which only cuDNN
    needs, 0.10.  Both take longer if a table has room for more tokens than are cached (see `CUDNN_CHUNKS`).
    """
    least = gathered.least_by_flops(heads)
    if least is None or any(cudnn.unsupported_reasons(heads.dtype, heads.nope + heads.rope, heads.value)):
        return None
    by_kernel = not any(unsupported_reasons(heads.dtype, heads.nope, heads.rope, heads.value))
    return max(least, LEAST_WITH_KERNEL if by_kernel else LEAST_WITH_CUDNN)


def unsupported_reasons(dtype, nope: int, rope: int, value: int) -> Iterator[str]:
    """Reasons against `attend_expanded` for such heads, and those of this machine."""
    yield from unavailable_reasons(WGMMA_CAPABILITIES)
    if dtype not in (jnp.bfloat16, jnp.float16):
        yield f"queries of {jnp.dtype(dtype).name}: supports bfloat16 and float16"
    if (nope, rope, value) != SIZES:
        yield f"heads of {nope} + {rope} and {value} values: supports {SIZES[0]} + {SIZES[1]} and {SIZES[2]}"


def attend_expanded(
    q, k_nope, k_pe, v, kv_lens, *, scale: float, window: int | None = None, ahead: int | None = None, offset=None,
    logit_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The attention of queries to the first keys of their requests, in one or more splits of the keys.

    Args:
      q: [B, Q, H, N + P], bfloat16 or float16.
      k_nope: [B, S, H, N], the dtype of `q`.  S is a multiple of TILE_ROWS (`token_rows.py`): TMA clips copies of tiles
        only then.
      k_pe: [B, S, P], the same for all heads.
      v: [B, S, H, V].
      kv_lens: int32 [B], the keys of each request.
      scale: the softmax scale.
      window: how many keys up to its own, this one included, a query sees; None for all.
      ahead: how many keys after its own a query sees; None for all.
      offset: int32 [B], the position of the first query among the keys, with `window` or `ahead`.
      logit_cap: as in `decode_mla`, up to 64.

    Returns:
      For each split, out [B, Q, H, V] of q's dtype and float32 lse [B, Q, H]; 0 and -inf for no keys.
    """
    batch, tokens, heads, _ = q.shape
    splits = splits_of(batch * heads * -(-tokens // (2 * ROWS)), k_nope.shape[1])
    rows = jnp.pad(q, ((0, 0), (0, -tokens % 8), (0, 0), (0, 0)))
    options = {"scale": scale, "window": window, "ahead": ahead, "logit_cap": logit_cap, "splits": splits}
    out, lse = _attend(rows, k_nope, k_pe, v, kv_lens, offset, **options, interpret=bool(interpreting.value))
    return out[:, :, :tokens], jnp.swapaxes(lse[..., :tokens], 2, 3)


def splits_of(tiles: int, keys: int) -> int:
    """Splits of `keys`, given the number of tiles of query rows: the fewest that fill the GPU well."""
    at_once = multiprocessors()

    def rounds(splits: int) -> float:
        """The time, relative to that of a GPU without idle multiprocessors."""
        return -(-tiles * splits // at_once) * at_once / (tiles * splits)

    possible = [splits for splits in SPLITS if splits == 1 or keys >= splits * LEAST_KEYS]
    return next((splits for splits in possible if rounds(splits) <= WELL_FILLED), min(possible, key=rounds))


@partial(jax.jit, static_argnames=("scale", "window", "ahead", "logit_cap", "splits", "interpret"))
def _attend(q, k_nope, k_pe, v, kv_lens, offset, *, scale, window, ahead, logit_cap, splits, interpret):
    batch, tokens, heads, head_dim = q.shape
    dtype, nope, value_dim = q.dtype, k_nope.shape[-1], v.shape[-1]
    row_tiles = -(-tokens // (2 * ROWS))
    split_keys = -(-k_nope.shape[1] // (splits * KEYS)) * KEYS
    softmax = OnlineSoftmax(keys=1, threshold=THRESHOLD, interpret=interpret)
    chunks = max(head_dim, value_dim) // CHUNK

    def body(
        q_ref, k_nope_ref, k_pe_ref, v_ref, lens_ref, *refs,
        q, k, pe, v, stats, q_full, k_full, k_free, v_full, v_free, turn, operands: Any = None,
    ):  # fmt: skip
        *offset_ref, out_ref, lse_ref = refs
        keys, tile, wg = (lax.axis_index(axis) for axis in ("keys", "tile", "wg"))
        request_and_head = floordiv(keys, splits)
        split = keys - request_and_head * splits
        request = floordiv(request_and_head, heads)
        head = request_and_head - request * heads
        first_key = split * split_keys
        count = jnp.clip(lens_ref[request] - first_key, 0, split_keys)
        steps = floordiv(count + (KEYS - 1), KEYS)

        def stage_of(i):
            return lax.rem(i, jnp.int32(STAGES))

        def first_row(consumer):
            return pl.multiple_of((2 * tile + consumer) * ROWS, ROWS)

        begin = None
        if offset is not None:
            place = offset_ref[0][request] - first_key  # of query token 0 among the keys of the split
            begin, end = jnp.int32(0), steps
            if window is not None:
                begin = floordiv(jnp.maximum(place + first_row(0) - (window - 1), 0), KEYS)
            if ahead is not None:
                end = floordiv(jnp.clip(place + first_row(2) + ahead, 0, count) + (KEYS - 1), KEYS)
            steps = jnp.maximum(end - begin, 0)

        def first_of(step):
            """The first key of a step."""
            return (step if begin is None else begin + step) * KEYS

        def producer():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            for consumer in range(2):
                source = q_ref.at[request, pl.ds(first_row(consumer), ROWS), head]
                for c in range(head_dim // CHUNK):
                    plgpu.copy_gmem_to_smem(source.at[:, pl.ds(c * CHUNK, CHUNK)], q.at[consumer, c], q_full)

            @pl.loop(0, steps)
            def _(i):
                stage, own = stage_of(i), pl.ds(first_key + first_of(i), KEYS)

                def free(barrier):
                    pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(barrier.at[stage]))

                free(k_free)
                plgpu.copy_gmem_to_smem(k_nope_ref.at[request, own, head], k.at[stage], k_full.at[stage])
                plgpu.copy_gmem_to_smem(k_pe_ref.at[request, own], pe.at[stage], k_full.at[stage])
                free(v_free)
                plgpu.copy_gmem_to_smem(v_ref.at[request, own, head], v.at[stage], v_full.at[stage])

            @pl.loop(jnp.maximum(steps - STAGES, 0), steps)
            def _(i):  # every completion of a barrier must be waited for
                for barrier in (k_free, v_free):
                    plgpu.barrier_wait(barrier.at[stage_of(i)])

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def consumer():
            plgpu.set_max_registers(consumer_registers(PRODUCER_REGISTERS), action="increase")
            scratch = operands.at[wg] if interpret else None
            plgpu.barrier_wait(q_full)
            pl.when(wg == 1)(take_turns)

            def step(i, carry):
                acc, running_max, row_sum = carry
                z = opaque_zero(i)
                stage = stage_of(i) + z
                plgpu.barrier_wait(k_full.at[stage])

                def product(acc):
                    for c in range(head_dim // CHUNK):
                        first = c * CHUNK
                        tile = k.at[stage, :, pl.ds(first, CHUNK)] if first < nope else pe.at[stage]
                        plgpu.wgmma(acc, q.at[wg + z, c], tile.transpose((1, 0)))
                    take_turns()
                    return acc[...]

                s = pl.run_scoped(product, plgpu.ACC((ROWS, KEYS), jnp.float32)) * (scale * LOG2E)
                plgpu.barrier_arrive(k_free.at[stage])
                if logit_cap is not None:
                    s = cap_scores(s, logit_cap)

                def mask(s):
                    key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA) + first_of(i)
                    s = jnp.where(key < count, s, MASKED)
                    if offset is None:
                        return s
                    row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=WGMMA) + place + first_row(wg)
                    if window is not None:
                        s = jnp.where(key > row - window, s, MASKED)
                    return s if ahead is None else jnp.where(key <= row + ahead, s, MASKED)

                masked = first_of(i + 1) > count
                if window is not None:  # the window of the last row begins after the first key
                    masked |= first_of(i) <= place + first_row(wg) + (ROWS - 1 - window)
                if ahead is not None:  # the first row does not see the last key
                    masked |= first_of(i + 1) > place + first_row(wg) + (1 + ahead)
                s = lax.cond(masked, mask, lambda s: s, s)
                running_max, acc, row_sum = softmax.update(s, running_max, acc, row_sum)
                w = softmax.weights(s, running_max)
                row_sum = row_sum + fold_columns(jnp.add, w)
                w = w.astype(dtype)
                take_turns()
                plgpu.barrier_wait(v_full.at[stage])
                acc, _ = multiply_add(acc, w, v.at[stage], scratch=scratch)
                plgpu.barrier_arrive(v_free.at[stage])
                return acc, running_max, row_sum

            carry = zeros(ROWS, value_dim), softmax.empty_max(ROWS), zeros(ROWS, LANE_COLUMNS)
            acc, running_max, row_sum = lax.fori_loop(0, steps, step, carry)
            pl.when(wg == 0)(take_turns)
            inverse, lse = softmax.finalize(row_sum.sum(axis=1), running_max)
            acc = (acc * over_columns(inverse, value_dim)).astype(dtype)
            for c in range(value_dim // CHUNK):
                q[wg, c] = acc[:, c * CHUNK : (c + 1) * CHUNK]
            stats[wg] = lse * (1 / LOG2E)
            plgpu.commit_smem()
            own = pl.ds(first_row(wg), ROWS)

            @pl.when(first_row(wg) < tokens)
            def _():
                into = out_ref.at[split, request, own, head]
                for c in range(value_dim // CHUNK):
                    plgpu.copy_smem_to_gmem(q.at[wg, c], into.at[:, pl.ds(c * CHUNK, CHUNK)])

            plgpu.copy_smem_to_gmem(stats.at[wg], lse_ref.at[split, request, head, own])
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == 2, producer, consumer)

    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=(
            jax.ShapeDtypeStruct((splits, batch, tokens, heads, value_dim), dtype),
            jax.ShapeDtypeStruct((splits, batch, heads, row_tiles * 2 * ROWS), jnp.float32),
        ),
        grid=(batch * heads * splits, row_tiles),
        grid_names=("keys", "tile"),
        num_threads=3,
        thread_name="wg",
        kernel_name="attend_expanded",
        scratch_types={
            # In chunks of columns, so that it holds both queries and results.
            "q": swizzled(2, chunks, ROWS, CHUNK, dtype=dtype),
            "k": swizzled(STAGES, KEYS, nope, dtype=dtype),
            "pe": swizzled(STAGES, KEYS, head_dim - nope, dtype=dtype),
            "v": swizzled(STAGES, KEYS, value_dim, dtype=dtype),
            "stats": plgpu.SMEM((2, ROWS), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2 * head_dim // CHUNK),
            "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "v_full": plgpu.Barrier(num_barriers=STAGES),
            "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "turn": plgpu.Barrier(num_arrivals=2),
            # The interpreter needs register operands of wgmma in shared memory.
            **({"operands": swizzled(2, ROWS, KEYS, dtype=dtype)} if interpret else {}),
        },
    )(q, k_nope, k_pe, v, kv_lens, *([] if offset is None else [offset]))
