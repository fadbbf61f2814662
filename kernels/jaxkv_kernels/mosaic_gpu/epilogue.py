"""Storing the results of attention kernels: those of whole requests, and splits in float16.

A split's values are weighted means of a part of the keys.  They are stored in float16.  Each row, or half of a row, is
divided by its largest magnitude, which is stored as well.  This takes half the bytes of float32 and has its range.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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


class KernelResults(NamedTuple):
    """The results of an attention kernel, which `combine` turns into those of the call; in `body`, references to them.

    A work tile of a request that is not split stores to `out` and `lse`, and one of a split request to the arrays of
    its split.  Elements that no work tile stores to are undefined.  The arrays have more rows than a request if the
    kernel stores whole tiles.
    """

    out: Any
    """[B, rows, Dv], or [B, H, rows, Dv], of the queries' dtype."""
    lse: Any
    """float32 [B, rows] or [B, H, rows], natural logarithm."""
    split_out: Any
    """[splits, rows, >= Dv] or [splits, H, rows, >= Dv], the bits of SPLIT_DTYPE in the queries' dtype."""
    split_lse: Any
    """float32 [splits, rows] or [splits, H, rows], in base 2."""
    split_scale: Any
    """float32 [splits, scales, rows] or [splits, scales, H, rows]: a factor of each of the equal parts of a row."""

    def with_rows(self, rows: int) -> "KernelResults":
        """The arrays [B, H, rows / H, ...] of a call on one or more heads, as [B, rows, ...]; there is one scale."""
        return KernelResults(
            self.out.reshape(-1, rows, self.out.shape[-1]),
            self.lse.reshape(-1, rows),
            self.split_out.reshape(-1, rows, self.split_out.shape[-1]),
            self.split_lse.reshape(-1, rows),
            self.split_scale.reshape(-1, 1, rows),
        )


def result_types(
    leading: tuple[int, ...], splits: int, dtype, *, rows: int, width: int, lse: int, split_lse: int, scales: int,
    split_width: int | None = None,
) -> KernelResults:  # fmt: skip
    """Shapes and dtypes of the results of an attention kernel.

    `leading` is (requests,) or (requests, heads).  `lse` and `split_lse` are the numbers of rows of the arrays with one
    value per row.  A row of a split has `scales` scales, one for each equal part of its values.  There may be more
    values in a split, `split_width`, than in a result: those at its end are not used.
    """
    batch, *heads = leading
    shape, per_row = jax.ShapeDtypeStruct, partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return KernelResults(
        out=shape((batch, *heads, rows, width), dtype),
        lse=per_row((batch, *heads, lse)),
        split_out=shape((splits, *heads, rows, split_width or width), dtype),  # shared memory has one dtype
        split_lse=per_row((splits, *heads, split_lse)),
        split_scale=per_row((splits, scales, *heads, split_lse)),
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

    refs: KernelResults
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
        refs = self.refs
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
            store_values((acc * over_columns(inverse, acc.shape[1])).astype(refs.out.dtype), refs.out, request)
            if side == 0:
                self.stats[0] = lse * (1 / LOG2E)
                plgpu.commit_smem()
                into = refs.lse.at[request, pl.ds(self.first_row, self.stored)]
                plgpu.copy_smem_to_gmem(self.stats.at[0, pl.ds(0, self.stored)], into)

        @pl.when(split >= 0)
        def _():
            magnitude = split_scale(jnp.abs(acc).max(axis=1))
            values = (acc * over_columns(1 / magnitude, acc.shape[1])).astype(SPLIT_DTYPE)
            store_values(lax.bitcast_convert_type(values, refs.split_out.dtype), refs.split_out, split)
            inverse, lse = finalize()  # after the stores of values, because it waits for the other consumer
            store(refs.split_scale.at[split, side, rows], magnitude * inverse)
            if side == 0:
                store(refs.split_lse.at[split, rows], lse)
