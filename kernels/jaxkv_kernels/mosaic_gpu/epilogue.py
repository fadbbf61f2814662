"""Storing the results of attention kernels: those of whole requests, and splits in float16.

A split's values are weighted means of a part of the keys.  They are stored in float16.  Each row, or half of a row, is
divided by its largest magnitude, which is stored as well.  This takes half the bytes of float32 and has its range.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, opaque_zero
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, over_columns, store
from jaxkv_kernels.mosaic_gpu.sizes import HALF, TILE
from jaxkv_kernels.mosaic_gpu.softmax import OnlineSoftmax

SPLIT_DTYPE = jnp.float16
FINITE = 1e37
"""Rows with a larger magnitude, infinity or NaN are not divided, so that infinity and NaN are preserved."""


def result_types(
    leading: tuple[int, ...], splits: int, dtype, *, rows: int, width: int, lse: int, split_lse: int, scales: int,
    split_width: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Shapes and dtypes of the five results of an attention kernel.

    These are the values and log-sum-exps of whole requests, and the values, log-sum-exps (base 2) and scales of splits.

    `leading` is (requests,) or (requests, heads).  `lse` and `split_lse` are the numbers of rows of the arrays with one
    value per row.  A row of a split has `scales` scales, one for each equal part of its values.  There may be more
    values in a split, `split_width`, than in a result: those at its end are not used.
    """
    batch, *heads = leading
    shape, per_row = jax.ShapeDtypeStruct, partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return (
        shape((batch, *heads, rows, width), dtype),
        per_row((batch, *heads, lse)),
        shape(
            (splits, *heads, rows, split_width or width), dtype
        ),  # holds the bits of SPLIT_DTYPE, as shared memory has one dtype
        per_row((splits, *heads, split_lse)),
        per_row((splits, scales, *heads, split_lse)),
    )


def split_scale(magnitude):
    """The divisors of a split's rows, computed from the rows' largest magnitudes."""
    return jnp.where(magnitude < FINITE, jnp.maximum(magnitude, 1 / FINITE), 1.0)


def half_columns(half: int, columns: int, index, width: int = HALF) -> pl.Slice:
    """`width` columns of an array that may have fewer than twice as many.

    TMA loads zeros past its end, and stores nothing there.  Only a slice whose start is not constant may reach beyond
    the end.  `index` is any int32 scalar.
    """
    start = half * width
    return pl.ds(start if start + width <= columns else pl.multiple_of(opaque_zero(index) + start, TILE), width)


@dataclass(frozen=True)
class HalvesEpilogue:
    """Stores the results of 64 rows from two consumer warpgroups, which each have half of the columns.

    A consumer's row sums are over half of the keys, so results of whole requests need those of both.  Values of a split
    can be stored before these are known, because each consumer divides its half of a row by that half's largest
    magnitude.  Only scales and log-sum-exps wait for the other consumer.
    """

    refs: Any
    """The results, in the order of `result_types`."""
    stats: Any
    """Shared memory [>= 3, 64]: log-sum-exps in row 0, row sums of the two consumers in rows 1 and 2."""
    wait_for_both: Callable[[], None]
    softmax: OnlineSoftmax
    first_row: Any
    stored: int
    """Rows per tile to store in the log-sum-exps of whole requests: TMA does not clip 1-D copies at the array's end."""
    value_scale: Any = None
    """A factor of the results, if any."""

    def store(
        self, side: int, acc, row_sum, running_max, request, split, stage, load_sinks: Callable[[], Any] | None = None
    ) -> None:
        """Starts the stores of consumer `side`, staged in shared memory `stage` [64, columns].

        A negative `split` means that the results are those of a whole request.

        `load_sinks` returns the sinks of the rows, in base 2.  They are not applied to splits, because `combine`
        applies them.
        """

        def finalize(*sinks):
            return self.finalize(side, row_sum, running_max, *sinks)

        self.store_final(side, acc, finalize, request, split, stage, load_sinks)

    def finalize(self, side: int, row_sum, running_max, *sinks):
        """What `OnlineSoftmax.finalize` returns of the row sums of both consumers, which both call this."""
        self.stats[1 + side] = row_sum.sum(axis=1)
        self.wait_for_both()
        sums = plgpu.load(self.stats.at[1], layout=ROW) + plgpu.load(self.stats.at[2], layout=ROW)
        inverse, lse = self.softmax.finalize(sums, running_max, *sinks)
        return (inverse if self.value_scale is None else inverse * self.value_scale), lse

    def store_final(
        self, side: int, acc, finalize: Callable[..., Any], request, split, stage,
        load_sinks: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        """As `store`, with `finalize` to get the factors that normalize `acc`, and log-sum-exps in base 2."""
        out_ref, lse_ref, split_out_ref, split_lse_ref, split_scale_ref = self.refs
        rows = pl.ds(self.first_row, TILE)

        def store_values(values, to, place):
            # Nothing of this half exists.  Mosaic drops the axis of an array's only tile of columns, and with it the
            # start of a slice, so that the copy would overwrite the other half.
            if side * stage.shape[-1] >= to.shape[-1]:
                return
            stage[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                stage, to.at[place, rows, half_columns(side, to.shape[-1], request, stage.shape[-1])]
            )

        @pl.when(split < 0)
        def _():
            inverse, lse = finalize(*([] if load_sinks is None else [load_sinks()]))
            store_values((acc * over_columns(inverse, acc.shape[1])).astype(out_ref.dtype), out_ref, request)
            if side == 0:
                self.stats[0] = lse * (1 / LOG2E)
                plgpu.commit_smem()
                into = lse_ref.at[request, pl.ds(self.first_row, self.stored)]
                plgpu.copy_smem_to_gmem(self.stats.at[0, pl.ds(0, self.stored)], into)

        @pl.when(split >= 0)
        def _():
            magnitude = split_scale(jnp.abs(acc).max(axis=1))
            values = (acc * over_columns(1 / magnitude, acc.shape[1])).astype(SPLIT_DTYPE)
            store_values(lax.bitcast_convert_type(values, split_out_ref.dtype), split_out_ref, split)
            inverse, lse = finalize()  # after the stores of values, because it waits for the other consumer
            store(split_scale_ref.at[split, side, rows], magnitude * inverse)
            if side == 0:
                store(split_lse_ref.at[split, rows], lse)
