"""What the kernels of dense attention by tcgen05 have in common: the walk of a CTA, and of each of its warpgroups.

`mla_dense_blackwell.py` and `gqa_blackwell.py` have the timelines.  A kernel has the attributes `call`, `pages`,
`view` or `views`, `tokens` and `rows_per_token`, `dtype`, `softmax` and `interpret`; its scratch memory has `o`, `s`
and `p` in tensor memory, and the barriers `q_free`, `s_full`, `s_free`, `p_full` and `o_full`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu import masks
from jaxkv_kernels.mosaic_gpu.epilogue import KernelResults, split_scale
from jaxkv_kernels.mosaic_gpu.paged_tma import PagedKeys, PageTable
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores
from jaxkv_kernels.mosaic_gpu.runtime.registers import (
    LANE_COLUMNS,
    TCGEN05,
    any_positive,
    filled,
    fold_columns,
    over_columns,
)
from jaxkv_kernels.mosaic_gpu.sizes import TILE
from jaxkv_kernels.mosaic_gpu.softmax import THRESHOLDS, check_threshold
from jaxkv_kernels.mosaic_gpu.tile_scheduler import PAIR_COSTS, SplitCosts, WorkTile, load_work_range, load_work_tile

ROWS = 128
"""Rows of a tile: the lanes of tensor memory."""
SOFTMAX_REGISTERS, OTHER_REGISTERS = 240, 128
"""Registers per lane of the softmax warpgroup, and of the other two."""
O_COLUMNS = 64
"""Columns of O that are in registers at once."""
COSTS = SplitCosts(
    least=2, overhead=2 * PAIR_COSTS.overhead, combining=2 * PAIR_COSTS.combining, split=2 * PAIR_COSTS.split
)
"""PAIR_COSTS in steps of a single tile."""


@dataclass(frozen=True, kw_only=True)
class BlackwellConfig:
    """What both kernels have.  Nothing has been measured on Blackwell: the numbers are those of Hopper's kernels.

    Each kernel has a type of its own, by which `tuning.using` finds its configuration.
    """

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(COSTS, overhead=overhead) for overhead in (2, 4, 8)),
    }

    rescale_threshold: int = 8
    """As in MLADenseConfig.  Here a rescale reads and writes the sums in tensor memory."""
    split_costs: SplitCosts = COSTS

    def __post_init__(self):
        check_threshold(self)


def row_tiles(rows: int) -> int:
    """Tiles of rows of a request with `rows` rows."""
    return -(-rows // ROWS)


@dataclass(frozen=True)
class CTA:
    """What the warpgroups of a CTA share."""

    kernel: Any
    operands: Any
    results: KernelResults
    scratch: Any
    partition: Any
    first_row: Any
    """The first row of its tile."""

    @property
    def table(self) -> PageTable:
        """The block table."""
        return PageTable(self.operands.block_tables, self.kernel.pages)

    @property
    def rows(self) -> pl.Slice:
        """Its rows."""
        return pl.ds(self.first_row, ROWS)

    def load_layer(self):
        """The layer, and whether it is in the cache."""
        layer = self.operands.layer[0]
        return layer, (layer >= 0) & (layer < self.kernel.pages.num_layers)

    def walk(self, work_tile):
        """Calls `work_tile(tile, used, is_first)` for each work tile, after `used` key tiles of others.

        Returns how many key tiles there are.
        """
        first, end, tile = load_work_range(self.operands.partitions, self.partition)

        def step(n, carry):
            used, tile = carry
            next_tile = load_work_tile(self.operands.work_tiles, n + 1)  # the loads proceed during this work tile
            work_tile(tile, used, n == first)
            return used + (tile.end - tile.begin), next_tile

        used, _ = lax.fori_loop(first, end, step, (jnp.int32(0), tile))
        return used

    def first_token(self, tile: WorkTile, i):
        """The position of the first token of key tile `i`."""
        token = i * TILE
        return token if self.kernel.call.window is None else tile.origin + token


class Producer:
    """The warpgroup that brings queries and keys to shared memory."""

    def __init__(self, cta: Any):
        self.cta, self.kernel, self.scratch = cta, cta.kernel, cta.scratch
        self.paged: list[PagedKeys]
        """Set by `run`, since the layer is loaded."""

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(OTHER_REGISTERS, action="decrease")
        layer, in_cache = self.cta.load_layer()
        self.paged = self.loaders(jnp.where(in_cache, layer, 0))
        used = self.cta.walk(self.work_tile)
        pl.when(used > 0)(lambda: self.wait_for_last_use(used))

    def loaders(self, layer) -> list[PagedKeys]:
        """The loaders of the layer's keys; `look_up` uses the first."""
        raise NotImplementedError

    def work_tile(self, tile: WorkTile, used, is_first) -> None:
        """Fetches the keys and the queries of a work tile, after `used` key tiles of others."""

        def step(i, found):
            ahead = self.fetch(found, tile, i, used + (i - tile.begin))
            pl.when(i == tile.begin)(lambda: self.fetch_queries(tile.request, is_first))
            return ahead

        lax.fori_loop(tile.begin, tile.end, step, self.start(tile))

    def start(self, tile: WorkTile):
        """What `fetch` needs to bring the first key tile of a work tile."""
        raise NotImplementedError

    def fetch(self, found, tile: WorkTile, i, used):
        """Brings key tile `i`, which follows `used` others, once its stages are free.

        `found` is what `start`, or the call for the key tile before, returned.
        """
        raise NotImplementedError

    def look_up(self, tile: WorkTile, i):
        """The blocks of key tile `i`."""
        return self.paged[0].look_up(tile.request, self.cta.first_token(tile, i))

    def fetch_queries(self, request, is_first) -> None:
        """Fetches the queries of a request, once those of the work tile before are no longer needed."""
        raise NotImplementedError

    def rings(self, used) -> tuple[tuple[Any, int, Any], ...]:
        """The barriers that free the stages of each ring, how many they are, and how often stages were filled.

        There were `used` key tiles.
        """
        raise NotImplementedError

    def wait_for_last_use(self, used) -> None:
        """Waits for the last use of each stage, after `used` key tiles, and of the queries."""
        plgpu.barrier_wait(self.scratch.q_free)
        for free, stages, number in self.rings(used):
            for stage in range(stages):
                pl.when(number > stage)(lambda barrier=free.at[stage]: plgpu.barrier_wait(barrier))


class Multiplier:
    """The warpgroup that issues all products."""

    def __init__(self, cta: Any):
        self.cta, self.kernel, self.scratch = cta, cta.kernel, cta.scratch

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(OTHER_REGISTERS, action="decrease")
        used = self.cta.walk(self.work_tile)
        pl.when(used > 0)(lambda: plgpu.barrier_wait(self.scratch.s_free))

    def work_tile(self, tile: WorkTile, used, is_first) -> None:
        """Issues the products of a work tile, after `used` key tiles of others."""
        del is_first
        self.prepare_queries()

        def step(i, _):
            number = used + (i - tile.begin)
            pl.when(i < tile.end)(lambda: self.multiply_queries(number, i == tile.begin))
            pl.when(i > tile.begin)(lambda: self.add_values(number - 1, i - 1 > tile.begin))

        lax.fori_loop(tile.begin, tile.end + 1, step, None)

    def prepare_queries(self) -> None:
        """What is done with the queries of a work tile before they are multiplied: here, nothing."""

    def multiply_queries(self, used, is_first) -> None:
        """S = Q K' for the key tile that follows `used` others; `is_first`: in its work tile."""
        raise NotImplementedError

    def add_values(self, used, accumulate) -> None:
        """O = P V, or with `accumulate` O += P V, for the key tile that follows `used` others."""
        raise NotImplementedError


class Softmax:
    """The warpgroup that turns scores into weights, rescales sums, and stores results."""

    def __init__(self, cta: Any):
        self.cta, self.kernel, self.scratch, self.softmax = cta, cta.kernel, cta.scratch, cta.kernel.softmax
        # Set by `run`, since they are loaded.
        self.scale: Any
        self.in_cache: Any

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(SOFTMAX_REGISTERS, action="increase")
        self.scale = self.load_scale()
        _, self.in_cache = self.cta.load_layer()
        self.cta.walk(self.work_tile)

    def load_scale(self):
        """The factor of the scores, in base 2."""
        return self.cta.operands.scale[0] * LOG2E

    @property
    def values(self) -> Any:
        """Where values are in shared memory [stages, 64, columns]."""
        raise NotImplementedError

    def value_stage(self, used):
        """The stage of the values of a key tile that follows `used` others."""
        raise NotImplementedError

    def wait_for_values(self, used) -> None:
        """Waits until values have landed; here, they have, since the scores are computed from them."""

    def store(self, tile: WorkTile, running_max, row_sum) -> None:
        """Stores the results of a work tile, and waits until TMA has read them."""
        raise NotImplementedError

    def work_tile(self, tile: WorkTile, used, is_first) -> None:
        """Attends to the keys of a work tile, after `used` key tiles of others, and stores the result."""
        del is_first
        ends, unmasked = masks.seen_tokens(tile, self.in_cache, TILE, self.kernel.call.window)

        def step(i, carry):
            return self.key_tile(tile, ends, i, used + (i - tile.begin), masks.is_masked(unmasked, i), *carry)

        start = self.softmax.empty_max(ROWS), filled(TCGEN05, 0, ROWS, LANE_COLUMNS)
        running_max, row_sum = lax.fori_loop(tile.begin, tile.end, step, start)
        plgpu.barrier_wait(self.scratch.o_full)
        self.store(tile, running_max, row_sum)
        plgpu.barrier_arrive(self.scratch.q_free)

    def key_tile(self, tile: WorkTile, ends: masks.Ends, i, used, masked, old_max, row_sum):
        """The weights of a key tile: the column of this warpgroup in the timeline."""
        scratch, softmax = self.scratch, self.softmax
        s = self.scores(tile, ends, i, masked)
        running_max = softmax.update_max(s, old_max)
        weights = softmax.weights(s, running_max)
        (row_sum,) = softmax.rescale(old_max, running_max, row_sum)
        row_sum += fold_columns(jnp.add, weights)

        # Accesses to tensor memory are waited for by the whole warpgroup, so all of its warps take the same branch.
        raised = any_positive(running_max - old_max, interpret=self.kernel.interpret, warpgroup=True, tile=TCGEN05)
        has_sums = i > tile.begin
        pl.when(has_sums)(lambda: plgpu.barrier_wait(scratch.o_full))
        pl.when(raised & has_sums)(lambda: self.rescale_sums(jnp.exp2(old_max - running_max)))
        self.wait_for_values(used)
        pl.when(masked)(lambda: self.clear_values(tile, ends, i, used))
        plgpu.async_store_tmem(scratch.p, weights.astype(self.kernel.dtype))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(scratch.p_full)
        return running_max, row_sum

    def scores(self, tile: WorkTile, ends: masks.Ends, i, masked):
        """S of key tile `i` in registers: scaled, capped and masked."""
        call, scratch = self.kernel.call, self.scratch
        plgpu.barrier_wait(scratch.s_full)
        s = plgpu.async_load_tmem(scratch.s, layout=TCGEN05)
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(scratch.s_free)
        s *= self.scale
        if call.logit_cap is not None:
            s = cap_scores(s, call.logit_cap)
        mask = partial(
            masks.apply_mask,
            table=self.cta.table,
            request=tile.request,
            first_row=self.cta.first_row,
            ends=ends,
            tokens=self.kernel.tokens,
            first_token=self.cta.first_token(tile, i),
            heads=self.kernel.rows_per_token,
            keys=1,
            window=call.window,
            ahead=call.ahead,
            tile=TCGEN05,
        )
        return lax.cond(masked, mask, lambda s: s, s)

    def clear_values(self, tile: WorkTile, ends: masks.Ends, i, used) -> None:
        """Zeroes the values of unseen tokens of key tile `i`, which follows `used` others."""
        first_seen = masks.first_seen(ends, self.kernel.tokens, self.kernel.call.window)
        columns, place = self.values.shape[-1], (self.value_stage(used),)
        masks.clear_values(
            self.values, place, 0, columns, self.cta.table, tile.request, self.cta.first_token(tile, i), ends.seen,
            first_seen=first_seen, interpret=self.kernel.interpret,
        )  # fmt: skip

    def sums(self) -> Iterator[tuple[pl.Slice, Any]]:
        """Yields columns of O, and their sums in registers.  The loads have completed after `wait_load_tmem`."""
        for first in range(0, self.scratch.o.shape[1], O_COLUMNS):
            columns = pl.ds(first, O_COLUMNS)
            yield columns, plgpu.async_load_tmem(self.scratch.o.at[:, columns], layout=TCGEN05)

    def rescale_sums(self, factor) -> None:
        """Multiplies each row of O by a factor."""
        for columns, x in self.sums():
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(self.scratch.o.at[:, columns], x * over_columns(factor, O_COLUMNS))
        plgpu.commit_tmem()

    def split_scales(self):
        """The divisors of the rows of O in a split (`split_scale`)."""
        magnitude = 0.0
        for _, x in self.sums():
            magnitude = jnp.maximum(magnitude, jnp.abs(x).max(axis=1))
        return split_scale(magnitude)
