"""Products of rows with the weights of their experts, for rows that are sorted by expert, on sm_90.

Weights are the left operand of wgmma (64 rows: output features) and rows of tokens the right one, so that a few tokens
fill a product as well as many.  Both are stored with the summed dimension last.  A work tile is a tile of rows of one
expert times `2 * features` rows of its weights: `features` rows each of gate and up, or twice as many of down.
Persistent CTAs take work tiles in turn, all features of a tile of rows before the next.  Experts without rows have no
tiles, and their weights are not read.  Timeline of a CTA:

    producer     weights and rows, 64 values of the summed dimension per step, as fast as stages are free;
                 of down, the first weights while CTAs of the previous kernel, gate and up, are still running
    consumers    per step: first product, second product | after the last step: silu(first) * second (or both as they
                 are), rounded, transposed in shared memory, copied to the result while the next work tile begins

Barriers, per stage:
    full    both halves of the weights, and the rows, have landed
    free    all consumers have multiplied them

A tile may extend past its group: the rows of other groups or of none that it then multiplies do not affect its own,
and are not stored.

Budget.  Shared memory: per stage, 16 KiB of weights per consumer and 128 bytes per row, for as many stages as fit;
per consumer, 128 bytes per row for results.  Registers of a consumer: one per row of a tile.  With e4m3 weights, a step
has 128 values: 16 KiB of weights per consumer and 256 bytes per row; registers: one and a half per row, for the sums so
far and one product of a step, and 32 to 64 for operands (`e4m3_weights.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.experts import usual_rows
from jaxkv_kernels.mosaic_gpu import e4m3_weights
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, floordiv
from jaxkv_kernels.mosaic_gpu.runtime.device import SHARED_MEMORY, consumer_registers, interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents, wait_for_previous
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, over_columns, zeros
from jaxkv_kernels.mosaic_gpu.runtime.registers import store as store_registers
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.tile_scaled import TILE
from jaxkv_kernels.tuning import require

RESERVED = 2048
"""Bytes of shared memory for barriers and alignment."""
FEATURES = 64
"""Rows of weights per product: those of a warpgroup's wgmma."""
ALIGN = 8
"""Groups of rows begin at multiples of it: wgmma's columns, and the rows of a swizzled tile."""
STEP = 64
"""Values of the summed dimension per step: a row of a swizzled tile."""
MOST_ROWS = 128
"""The most rows of a tile: a consumer's two accumulators then take 128 registers per lane."""
ONE_CONSUMER = 64
"""The most rows of a tile for which one consumer is faster than two."""
FEW_TOKENS = 64
"""The most tokens that all fit in a tile, and are therefore not sorted by expert."""
MOST_ROWS_OF_FP8 = 112
"""The most rows of a tile with weights in float8.  With 128, for which registers do not suffice, 8,192 tokens take 2.22
instead of 1.85; with 64, 2.09."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The configuration of both products of `grouped_swiglu`, and of `scaled_linear`.

    Times, here and in the defaults, are in milliseconds of the whole operation on an H200 (jax 0.11.2), with DeepSeek
    V2-Lite's 64 experts of 2,048 to 1,408 values and six experts per token.
    """

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "rows": (8, 16, 24, 32, 48, 64, 96, 128),
        "consumers": (1, 2),
        "stages": (3, 4, 6, 8, 12),
    }

    rows: int
    """Rows of a tile: tokens that are multiplied with weights in shared memory."""
    consumers: int
    """Warpgroups that multiply, each with 2 x 64 rows of weights.  Two read fewer bytes of tokens per weight."""
    stages: int = 12
    """Steps of 64 values of the summed dimension in shared memory; fewer if they do not fit."""
    producer_registers: int = 40
    """Registers per lane of the producer warpgroup, if there are two consumers."""

    @property
    def features(self) -> int:
        """Rows of weights that a CTA multiplies at a time, of each of two matrices or halves."""
        return self.consumers * FEATURES

    def __post_init__(self):
        require(
            self.rows % ALIGN == 0 and 0 < self.rows <= MOST_ROWS, self, "rows", f"a multiple of 8 up to {MOST_ROWS}"
        )
        require(self.consumers in (1, 2), self, "consumers", "1 or 2")
        require(self.stages >= 2, self, "stages", "2 or more")
        require(self.producer_registers in (24, 40, 56), self, "producer_registers", "24, 40 or 56")


def default_config(tokens: int, choices: int, experts: int) -> ExpertsConfig:
    """The default configuration for `choices` rows of `tokens` tokens in all, divided among `experts`.

    A tile has `usual_rows`, because weights are read once per tile.  128 tokens take 0.290 with tiles of 24 rows,
    0.294 with 16 and 0.291 with 32; 256 tokens take 0.300 with 40 and 0.306 with 32.  With few rows, which are bound
    by memory, smaller tiles of weights divide the work more evenly: with two consumers instead of one, 1 token takes
    0.042 instead of 0.040, 128 tokens 0.296 instead of 0.290, and 512 tokens, with tiles of 64 rows, 0.328 instead of
    0.322.
    """
    rows = tokens if tokens <= FEW_TOKENS else usual_rows(choices, experts, min(tokens, MOST_ROWS))
    rows = math.ceil(rows / ALIGN) * ALIGN
    return ExpertsConfig(rows=rows, consumers=1 if rows <= ONE_CONSUMER else 2)


def default_config_of_fp8(tokens: int, choices: int, experts: int, inner: int) -> ExpertsConfig:
    """The same for weights in float8, of experts of `inner` values.

    Two consumers convert weights while the other one multiplies: 32 tokens take 0.167 instead of 0.176, 128 tokens
    0.184 instead of 0.200, and 512 tokens 0.227 instead of 0.260.  But if there are too few tiles of features for all
    multiprocessors, one consumer divides them further: 1 token takes 0.034 instead of 0.037.
    """
    rows = math.ceil(usual_rows(choices, experts, min(tokens, MOST_ROWS_OF_FP8)) / ALIGN) * ALIGN
    tiles = min(choices, experts) * math.ceil(inner / (2 * FEATURES))
    return ExpertsConfig(rows=min(rows, MOST_ROWS_OF_FP8), consumers=1 if tiles < 0.75 * multiprocessors() else 2)


def token_reasons(x) -> Iterator[str]:
    """A reason against tokens of such a dtype."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        yield f"`x` of {x.dtype}: supports bfloat16 and float16"


def products(
    rows,
    matrices,
    scales,
    tiles,
    following=(),
    *,
    early: bool = False,
    shared=(),
    num_rows: int | None = None,
    parts: int = 0,
    biases=(),
    limit: float | None = None,
    alpha: float | None = None,
    config: ExpertsConfig,
) -> jax.Array:
    """The products of each row with the matrices of its expert.

    Args:
      rows: [P, D], grouped by expert; or [config.rows, D], which every tile multiplies.
      matrices: gate and up [E, I, D], for the result silu(gate row) * (up row); or one [E, I, D], for its product.
        They have the dtype of `rows`, or are e4m3.
      scales: for e4m3 matrices, the scales of each, float32 [E, ceil(I / 128), D / 128].  Values of rows, and those
        of the result, are then in the order of `e4m3_weights.in_positions`.
      tiles: experts [M], first rows [M] and sizes [M], both in units of 8 rows, and the number of tiles [1].
      following: the matrices and scales of a call on the result, which follows this one; it has the same `tiles`, and
        is `early`.
      early: whether the previous kernel was such a call, so that weights can be loaded while it is still running.
      shared: the matrices of n experts after the E of `matrices`, without scales: gate and up [n, I, D], or one
        [I, n, D].
      num_rows: P, if `rows` has fewer rows, because every tile multiplies all of them.
      parts: if positive, rows are multiplied with one matrix [1, I, D], whose summed dimension is divided into `parts`
        equal parts, one per tile: `tiles` has numbers of parts instead of experts.
      biases: vectors [E, I] that are added to gate row and up row; none for e4m3 matrices, or with `shared`.
      limit: if given, gate row is at most that, and up row lies between -limit and limit.
      alpha: if given, the result is g * sigmoid(alpha g) * (u + 1) of g = gate row and u = up row.
      config: the configuration.

    Returns:
      [P, I], or with `parts` the sum of each part, float32 [parts, I, P].  Rows of no tile are undefined.
    """
    depth, interpret = rows.shape[1], bool(interpreting.value)
    same_rows = num_rows is not None and len(rows) < num_rows
    num_rows = num_rows or len(rows)
    width = matrices[0].shape[1]
    gated = len(matrices) == 2
    count_of_matrices = matrices[0].shape[0]
    consumers, features, tile_rows = config.consumers, config.features, config.rows
    outputs = features if gated else 2 * features  # features of the result per work tile
    per_tile = -(-width // outputs)
    step_size = TILE if scales else STEP
    steps = depth // step_size // max(parts, 1)
    stages = min(config.stages, _room(config, step_size, rows.dtype.itemsize, matrices[0].dtype.itemsize))
    ctas = 2 if interpret else multiprocessors()

    def body(rows_ref, *refs):
        weight_refs, refs = refs[: len(matrices)], refs[len(matrices) :]
        shared_refs, refs = refs[: len(shared)], refs[len(shared) :]
        scale_refs, refs = refs[: len(scales)], refs[len(scales) :]
        bias_refs, refs = refs[: len(biases)], refs[len(biases) :]
        tile_refs, refs = refs[: len(tiles)], refs[len(tiles) :]
        next_refs, (out_ref, w_s, x_s, out_s, full, free, *a_s) = refs[: len(following)], refs[len(following) :]
        expert_ref, start_ref, size_ref, count_ref = tile_refs
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        if not early:
            wait_for_previous(interpret=interpret)
        if following:
            pdl_launch_dependents((*tile_refs, *next_refs), interpret=interpret)
        count = floordiv(jnp.maximum(count_ref[0] * per_tile - cta, 0) + (ctas - 1), ctas)

        def stage_of(n):
            return lax.rem(n, jnp.int32(stages))

        def work_tile(i):
            """The tile of rows and the first output feature of the CTA's work tile i."""
            number = cta + i * ctas
            tile = floordiv(number, per_tile)
            return tile, (number - tile * per_tile) * outputs

        def matrix_and_step(tile):
            """The matrix of a tile of rows, and its first step."""
            number = expert_ref[tile]
            return (jnp.int32(0), number * steps) if parts else (number, jnp.int32(0))

        def producer():
            if consumers > 1:
                plgpu.set_max_registers(config.producer_registers, action="decrease")

            def loads(i):
                """Functions that start the copies of a step of work tile i: of weights, and of rows."""
                tile, feature = work_tile(i)
                expert, first_step = matrix_and_step(tile)
                first = 0 if same_rows else start_ref[tile] * ALIGN

                def columns(k):
                    return pl.ds((first_step + k) * step_size, step_size)

                def weights(k):
                    stage = stage_of(i * steps + k)
                    for half in range(2):
                        number, start = (half, 0) if gated else (0, half * features)
                        own = pl.ds(feature + start, features)

                        def load(matrix, *place, to=w_s.at[stage, half]):
                            plgpu.copy_gmem_to_smem(matrix.at[*place, columns(k)], to, full.at[stage])

                        if not shared:
                            load(weight_refs[number], expert, own)
                            continue
                        place = (expert - count_of_matrices, own)
                        place = place if gated else place[::-1]
                        pl.when(expert < count_of_matrices)(partial(load, weight_refs[number], expert, own))
                        pl.when(expert >= count_of_matrices)(partial(load, shared_refs[number], *place))

                def rows(k):
                    source = rows_ref.at[pl.ds(first, tile_rows), columns(k)]
                    stage = stage_of(i * steps + k)
                    plgpu.copy_gmem_to_smem(source, x_s.at[stage], full.at[stage])

                return weights, rows

            ahead = min(stages, steps)

            def load_first(operand):
                pl.when(count > 0)(lambda: pl.loop(0, ahead)(loads(jnp.int32(0))[operand]))

            load_first(0)
            if early:
                wait_for_previous(interpret=interpret)
            load_first(1)

            def run(i, _):
                weights, rows = loads(i)

                def step(k, _):
                    n = i * steps + k

                    @pl.when(n >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[stage_of(n)])

                    weights(k)
                    rows(k)

                lax.fori_loop(jnp.where(i == 0, ahead, 0), steps, step, None)

            lax.fori_loop(0, count, run, None)

            @pl.loop(jnp.maximum(count * steps - stages, 0), count * steps)
            def _(n):
                plgpu.barrier_wait(free.at[stage_of(n)])  # every completion of a barrier must be waited for

        def consumer():
            if consumers > 1:
                plgpu.set_max_registers(consumer_registers(config.producer_registers), action="increase")

            acc = plgpu.ACC((FEATURES, tile_rows), jnp.float32)

            def multiply(n, tile, feature):
                """Both products of a work tile, float32 [64, rows of a tile]."""
                del tile, feature

                def sums(*accs):
                    def step(k, _):
                        stage = stage_of(n + k)
                        plgpu.barrier_wait(full.at[stage])
                        operand = x_s.at[stage].transpose((1, 0))
                        for half, acc in enumerate(accs):
                            plgpu.wgmma(acc, w_s.at[stage, half, pl.ds(wg * FEATURES, FEATURES)], operand)

                        @pl.when(k > 0)
                        def _():
                            plgpu.wgmma_wait(2)  # until the products of the previous step are complete
                            plgpu.barrier_arrive(free.at[stage_of(n + k - 1)])

                    lax.fori_loop(0, steps, step, None)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[stage_of(n + steps - 1)])
                    return tuple(acc[...] for acc in accs)

                return pl.run_scoped(sums, acc, acc)

            def multiply_scaled(n, tile, feature):
                """The same with e4m3 weights: the products of a step are multiplied by their tiles' scales."""
                expert, first_step = matrix_and_step(tile)
                # Of a tile of features beyond the last, nothing is stored.
                starts = (feature, feature) if gated else (feature, feature + features)
                scale_rows = [jnp.minimum(floordiv(start, TILE), scale_refs[0].shape[1] - 1) for start in starts]

                def product(stage, operands, meanwhile):
                    """The product of a step, and the result of `meanwhile`, which overlaps with it."""

                    def run(acc):
                        for group, operand in enumerate(operands):
                            if interpret:  # the interpreter supports no operand in registers
                                a_s[0][wg, group] = operand
                                plgpu.commit_smem()
                                operand = a_s[0].at[wg, group]
                            columns = x_s.at[stage, :, pl.ds(group * e4m3_weights.GROUP, e4m3_weights.GROUP)]
                            plgpu.wgmma(acc, operand, columns.transpose((1, 0)))
                        beside = meanwhile()
                        return acc[...], beside

                    return pl.run_scoped(run, acc)

                def step(k, totals):
                    stage = stage_of(n + k)
                    factors = [
                        scale_refs[half if gated else 0][expert, row, first_step + k]
                        for half, row in enumerate(scale_rows)
                    ]
                    plgpu.barrier_wait(full.at[stage])

                    def operands(half):
                        return e4m3_weights.operands(w_s, stage, half, wg, rows.dtype)

                    first, others = product(stage, operands(0), lambda: operands(1))
                    second, _ = product(stage, others, lambda: [])
                    plgpu.barrier_arrive(free.at[stage])
                    return totals[0] + first * factors[0], totals[1] + second * factors[1]

                return lax.fori_loop(0, steps, step, (zeros(FEATURES, tile_rows), zeros(FEATURES, tile_rows)))

            def bias(ref, expert, feature):
                """Those of the features from `feature` on; of features beyond the last, nothing is stored."""
                place = ref.at[expert, pl.ds(jnp.minimum(feature, width - FEATURES), FEATURES)]
                return plgpu.load(place, layout=ROW, optimized=False).astype(jnp.float32)

            def store(values, tile, feature):
                """Starts the copy of a [64, rows] tile, transposed, to the columns of the result from `feature` on."""
                columns = pl.ds(feature, FEATURES)
                own = out_s.at[wg]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                own.transpose((1, 0))[...] = values.astype(out_ref.dtype)
                plgpu.commit_smem()
                first, size = start_ref[tile], size_ref[tile]

                @pl.when(feature < width)
                def _():
                    @pl.when(size == tile_rows // ALIGN)
                    def _():
                        plgpu.copy_smem_to_gmem(own, out_ref.at[pl.ds(first * ALIGN, tile_rows), columns])

                    @pl.when(size < tile_rows // ALIGN)
                    def _():
                        @pl.loop(0, size)
                        def _(i):
                            part = own.at[pl.ds(i * ALIGN, ALIGN)]
                            plgpu.copy_smem_to_gmem(part, out_ref.at[pl.ds((first + i) * ALIGN, ALIGN), columns])

            def store_sums(values, tile, feature):
                """Stores a [64, rows] tile as it is."""

                @pl.when(feature < width)
                def _():
                    place = pl.ds(feature, FEATURES), pl.ds(start_ref[tile] * ALIGN, tile_rows)
                    store_registers(out_ref.at[expert_ref[tile], *place], values)

            def run(i, _):
                tile, feature = work_tile(i)
                feature = feature + wg * FEATURES
                first, second = (multiply_scaled if scales else multiply)(i * steps, tile, feature)
                if gated:
                    if biases:
                        first, second = (
                            x + over_columns(bias(ref, expert_ref[tile], feature), tile_rows)
                            for x, ref in zip((first, second), bias_refs, strict=True)
                        )
                    if limit is not None:
                        first = jnp.minimum(first, limit)
                        second = jnp.maximum(jnp.minimum(second, limit), -limit)
                    store(_silu(first) * second if alpha is None else _silu(first, alpha) * (second + 1), tile, feature)
                else:
                    for half, values in enumerate((first, second)):
                        (store_sums if parts else store)(values, tile, feature + half * features)

            lax.fori_loop(0, count, run, None)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == consumers, producer, consumer)

    out = ((parts, width, num_rows), jnp.float32) if parts else ((num_rows, width), rows.dtype)
    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        waits=True,
        out_type=jax.ShapeDtypeStruct(*out),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name="experts_gate_up" if gated else "linear_parts" if parts else "experts_down",
        scratch_types=[
            swizzled(stages, 2, features, step_size, dtype=matrices[0].dtype),
            swizzled(stages, tile_rows, step_size, dtype=rows.dtype),
            swizzled(consumers, tile_rows, FEATURES, dtype=rows.dtype),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            *([swizzled(consumers, 2, FEATURES, e4m3_weights.GROUP, dtype=rows.dtype)] if scales and interpret else []),
        ],
    )(rows, *matrices, *shared, *scales, *biases, *tiles, *following)


def _room(config: ExpertsConfig, step: int, itemsize: int, weight_itemsize: int) -> int:
    """The stages for which shared memory has room."""
    results = config.consumers * config.rows * FEATURES * itemsize
    stage = (2 * config.features * weight_itemsize + config.rows * itemsize) * step
    return (SHARED_MEMORY - RESERVED - results) // stage


def _silu(x, alpha: float = 1.0) -> Any:
    """x * sigmoid(alpha x)."""
    return x / (1 + jnp.exp2(x * (-LOG2E * alpha)))
