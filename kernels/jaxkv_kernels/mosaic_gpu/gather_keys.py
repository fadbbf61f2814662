"""The producer of sparse attention: gathers keys of chosen slots into the shared memory that wgmma reads.

TMA cannot gather on Hopper.  A warpgroup does it instead, one pair of key tiles at a time, for the consumers of
`mla_sparse.py`.  Each lane moves 16 bytes, a chunk, per instruction.

Entries of bf16 and f16 are copied to swizzled shared memory without passing through registers (`cp.async`).  A lane has
row 4 * warp + lane // 8 of every 16 rows, and copies one chunk of each line (128 bytes) of these rows.  It computes the
addresses of its four rows once, for all lines.

Quantised entries pass through registers, where e4m3 and e2m1 values are converted to float16 between load and store.
Values of entries with scales are multiplied by them there (`scaling.py`).  The single scale of all `fp8` entries is
applied to scores and results instead.  The latents of a tile of 64 rows move in units of 8 KiB, one chunk of four rows
per lane: 128 e4m3 values of each entry, which in `fp8_ds_mla` are a scale group, or 256 e2m1 values.  A lane has row
4 * warp + lane % 4 of every 16 rows, and a chunk that depends on the quarter lane // 8 and on lane // 4 % 2.  So the
eight lanes that share a phase of a shared-memory access have four rows and two chunks, which the 128-byte swizzle
spreads over all banks.  Latents of 448 values are followed by zeros.  bf16 rotary keys need no conversion, and are
copied.  e4m3 rotary keys are 64 bytes: each lane loads chunks of two rows before the latents of the tile are stored,
and stores them after these.

A lane loads the slot and the scales of one row, its own row.  (If a row has many scales, lanes l and l + 16 load half
of them each.)  Shuffles pass them to the lanes that need them.  With row = 16 * group + 4 * warp + i:

    own row of lane l             group = l % 16 // 4, i = l % 4; lanes l and l + 16 have the same
    rows whose chunks it loads    i = l % 4, all four groups; `Lane.owners` are the lanes that own them
    rows that it copies           i = l // 8, all four groups (`CopyLane`)

A masked key (slot below 0 or past the cache, or position past the count) is a row of zeros with factor -1.

Timeline.  Two tiles before a tile is fetched, its slots are loaded and, with `prefetch`, its rows are prefetched to the
L2 cache.

Tiles of bf16 and f16 are copied half by half, as soon as consumers free the halves that hold the previous pair.  No
lane of the producer waits for a copy.

Tiles of quantised entries are stored unit by unit.  Loads run ahead of stores by a ring of units, also from one tile
or work tile to the next: while a unit is converted and stored, the next ones are being loaded.  Scales are loaded a
tile ahead.  Rotary keys are copied, or loaded, while the latents of their tile are stored.

Two CTAs that attend to the same keys, with other heads, each convert all of them.  Sharing the conversion was slower:
if each converts half of a tile, and stores it to the shared memory of both by `st.async` (20 bytes per cycle), 128
requests with 128 heads and 2,048 slots of `fp8_ds_mla` entries take 0.236 ms on an H100 instead of 0.191.

Barriers.  Consumers wait for half a tile of keys, which the producer's lanes store or copy to shared memory.  Copies
(`cp.async`) are asynchronous.  A lane therefore issues an arrival that completes once its copies have landed
(`cp.async.mbarrier.arrive`).  Pallas has no such arrivals, so these barriers are words of `stats`
(`lane_barriers.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.calls import STATIC, record
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Field
from jaxkv_kernels.mosaic_gpu.lane_barriers import LaneBarriers
from jaxkv_kernels.mosaic_gpu.ptx import gather as lanes
from jaxkv_kernels.mosaic_gpu.ptx.fragments import array
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.sizes import HALF, LATENT

LINE = lanes.LINE
"""Bytes of each entry in a unit."""
CHUNK = 16
"""Bytes of a chunk."""
ROPE_ROWS = 2
"""Rows, of its four, whose e4m3 rotary keys a lane loads.  A row has only four chunks, for eight lanes."""
FACTOR, FLAG, STATS = 5, 7, 8
"""Rows of `stats`: the first of the two with factors, one per tile; the flags of tiles with factors other than 1, four
per tile.  The last is the number of rows."""
BARRIERS = 7, 32
"""Where in `stats` the barriers of tiles are: a row and a column."""
HALVES, FULL = 4, 6
"""Halves of the two tiles of a pair, numbered 2 * tile + half; barriers of these, and of the tiles' rotary keys."""


def lane_registers(per_lane: int) -> Any:
    """Layout of int32 arrays of which a lane holds vectors of up to four."""
    return plgpu.Layout.WG_STRIDED((lanes.THREADS * per_lane,), min(per_lane, 4))


def lane_array(per_lane: int) -> Any:
    """The type of such an array."""
    return plgpu.ShapeDtypeStruct((lanes.THREADS * per_lane,), jnp.dtype(jnp.int32), layout=lane_registers(per_lane))


OWN, FOUR = lane_registers(1), lane_registers(4)
"""The slot of a lane's own row; the slots of four rows, or four words of its own row."""


def word_list(held) -> list[Any]:
    """The words of an array of one register per lane."""
    return lanes.words(held.registers.item())


def _word(held) -> Any:
    """The word of an array of one word per lane."""
    (word,) = word_list(held)
    return word


def ref_type(dtype) -> Any:
    """The type of references to the swizzled shared memory that tiles are stored to."""
    return plgpu.RefType(swizzled(1, dtype=dtype).transforms)


@record
class Slots:
    """The slots that each query token attends to; in a kernel, references to the arrays."""

    of: Any
    """int32: a list [N, K] for each query token, or block tables [B, M], whose positions are attended to."""
    begins: Any = None
    """int32 [N]: with block tables, the first position of each query token; None for 0."""
    block_size: int | None = field(default=None, metadata=STATIC)
    """Tokens per block of block tables; None for lists."""
    tokens: int = field(default=1, metadata=STATIC)
    """Query tokens per block table."""

    @property
    def refs(self) -> list[Any]:
        """The arrays or references."""
        return [self.of] if self.begins is None else [self.of, self.begins]

    def with_refs(self, refs: Sequence[Any]) -> "Slots":
        """The same for other references."""
        return replace(self, **dict(zip(("of", "begins"), refs, strict=False)))


@dataclass(frozen=True)
class Unit:
    """The part of its rows' latents that a lane loads at once, to be converted."""

    offset: int
    """Its first byte in an entry."""
    number: int
    """Its number among the units of an entry."""
    chunks: int
    """The chunks of 16 bytes of a line that belong to latents.  The others are loaded as zeros."""


@dataclass(frozen=True)
class GatheredRows:
    """The entries of a paged cache of `MLAEntry`, as rows.  Strides of `pages` are in elements of `itemsize` bytes."""

    pages: Pages
    entry: MLAEntry
    itemsize: int

    @property
    def quantised(self) -> bool:
        """Whether latents are stored as e4m3 or e2m1, and converted to float16."""
        return self.entry.quantised

    @property
    def stored(self) -> str:
        """The dtype of latents in the byte map."""
        return self._field("latent").dtype

    @property
    def scale_dtype(self) -> str | None:
        """The dtype of the scales of an entry: float32, e8m0 or e4m3; None if it has none."""
        return next((field.dtype for field in self.entry.fields() if "scales" in field.name), None)

    @property
    def factored(self) -> bool:
        """Whether the scales of an entry may need a factor to fit float16.  Others share one scale, or always fit."""
        return self.scale_dtype in ("float32", "e8m0")

    @property
    def converts_rope(self) -> bool:
        """Whether rotary keys are e4m3 as well."""
        return self.quantised and self._field("rope").dtype == "e4m3"

    @property
    def latent_dtype(self) -> np.dtype:
        """The dtype of latents in shared memory."""
        return jnp.dtype(jnp.float16) if self.quantised else self.entry.dtype

    @property
    def rope_dtype(self) -> np.dtype:
        """The dtype of rotary keys in shared memory."""
        return jnp.dtype(jnp.bfloat16) if self.quantised and not self.converts_rope else self.latent_dtype

    @property
    def line_values(self) -> int:
        """The values of a line of quantised latents."""
        return LINE if self.stored == "e4m3" else 2 * LINE

    @property
    def units(self) -> int:
        """The units of a tile of quantised entries."""
        return LATENT // self.line_values

    def half(self, which: int) -> tuple[Unit, ...]:
        """The units of half a latent."""
        count, latent = self.units // 2, self._field("latent").nbytes
        return tuple(
            Unit(n * LINE, n, min(latent - n * LINE, LINE) // CHUNK) for n in range(which * count, (which + 1) * count)
        )

    def _field(self, name: str) -> Field:
        """The field of an entry whose name contains `name`."""
        return next(field for field in self.entry.fields() if name in field.name)

    def offset_of(self, name: str) -> int:
        """The byte at which a field of an entry begins, in its region."""
        field = self._field(name)
        return field.offset - (self.entry.regions()[self._region(name)][0].offset if self.entry.split else 0)

    def _region(self, name: str) -> int:
        """The region of a split page that has the field; 0 if pages are not split."""
        regions = self.entry.regions() if self.entry.split else []
        return next((n for n, region in enumerate(regions) if any(name in field.name for field in region)), 0)

    def zeros(self) -> jax.Array:
        """The row of zeros from which masked keys are loaded.

        One byte at its end is not zero.  XLA would fill an array of zeros in each call, but keeps this as a constant.
        """
        row = np.zeros(self.entry.nbytes + 16, np.uint8)
        row[-1] = 1
        return jnp.asarray(row)

    def buffer(self, buffer: jax.Array) -> jax.Array:
        """The operand that rows are loaded from; no copy."""
        return buffer

    def offset(self, slot, layer, constant, wide, region: int = 0):
        """The byte at which the entry of a slot begins, or what a region of a split page has of it.

        `constant` makes offsets of ints, `wide` of int32.
        """
        pages, (first, token) = self.pages, self._region_place(region)
        start = constant(first) + wide(layer) * constant(pages.layer_stride * self.itemsize)
        block = pages.block_stride * self.itemsize
        if pages.num_blocks == 1 or block == pages.block_size * token:
            return start + wide(slot) * constant(token)
        number, within = slot // pages.block_size, slot % pages.block_size
        return start + wide(number) * constant(block) + wide(within) * constant(token)

    def _region_place(self, region: int) -> tuple[int, int]:
        """The byte at which a region of the first page begins, and its bytes per token."""
        pages, first = self.pages, self.pages.offset * self.itemsize
        if self.entry.split:
            field = self.entry.regions(pages.block_size)[region][0]
            return first + field.offset, field.step or 0
        return first, (pages.token_stride if pages.block_size > 1 else pages.block_stride) * self.itemsize

    def load_slots(self, slots: Slots, request, tile, length):
        """The slots of a tile of keys, in each lane that of its own row; -1 at positions from `length` on."""
        refs = slots.refs

        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(refs), SCALAR, SCALAR, SCALAR), return_type=lane_array(1))
        def load(_, refs, *indices):
            return array([[lanes.load_slots(slots.with_refs(refs), *(x.registers.item() for x in indices))]], OWN)

        return load(refs, request, tile, length)

    def spread(self, slots):
        """Returns, in each lane, the slots of the rows whose latents it loads in part."""
        return self._spread(slots, lanes.ROWS_PER_LANE, lambda lane: lane.owners)

    def spread_rope(self, slots):
        """Returns, in each lane, the slots of the rows whose rotary keys it loads in part."""
        if not self.converts_rope:
            return self.spread(slots)
        return self._spread(slots, ROPE_ROWS, lambda lane: lane.rope_owners)

    def _spread(self, slots, count, owners):
        @plgpu.inline_mgpu(arg_types=(OWN,), return_type=lane_array(count))
        def spread(_, slots):
            return array([lanes.spread(_word(slots), owners(lanes.Lane()))], lane_registers(count))

        return spread(slots)

    def copy(self, kv_ref, slots, layer, limit, stage: int, half: int, k_ref, r_ref=None) -> None:
        """Starts to copy half of a tile's latents to `k_ref` [2, 2, 64, 256], and rotary keys to `r_ref` [2, 64, 64].

        Entries are not quantised.  `slots` are those of lanes' own rows; slots of valid keys are below `limit`.
        """
        lines = 2 * HALF // LINE
        types = [ref_type(self.latent_dtype)] * (1 if r_ref is None else 2)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), OWN, SCALAR, SCALAR, *types))
        def copy(_, kv, slots, layer, limit, k, *r):
            latent, rope = self.offset_of("latent") + half * lines * LINE, self.offset_of("rope")
            first = (stage * 2 + half) * lines * lanes.ROPE_TILE
            parts = [(latent, lines, k, first, lines), *((rope, 1, ref, stage * lanes.ROPE_TILE, 1) for ref in r)]
            lanes.copy_rows(self, kv, _word(slots), layer.registers.item(), limit.registers.item(), parts)

        copy(kv_ref, slots, layer, limit, k_ref, *([] if r_ref is None else [r_ref]))

    def load(self, kv_ref, zero_ref, slots, layer, limit, unit: Unit):
        """Starts to load a unit of a tile's rows.  `slots` come from `spread`; valid ones are below `limit`."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), FOUR, SCALAR, SCALAR), return_type=lane_array(16)
        )
        def load(_, kv, zero, slots, layer, limit):
            rows = self._rows(kv, zero, slots, layer, limit)
            return array(lanes.load_unit(rows, zero, unit, self.stored), lane_registers(16))

        return load(kv_ref, zero_ref, slots, layer, limit)

    def load_scales(self, kv_ref, zero_ref, slots, layer, limit):
        """Starts to load the scales of a tile's rows, in each lane those of its own row; None if entries have none."""
        if self.scale_dtype is None:
            return None
        count = 2 if self.scale_dtype == "e8m0" else 4

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), OWN, SCALAR, SCALAR), return_type=lane_array(count)
        )
        def load(_, kv, zero, slots, layer, limit):
            (row,) = self._rows(kv, zero, slots, layer, limit)
            if self.scale_dtype == "e8m0":
                scales = lanes.load_eight(row, self.offset_of("scales"), by_half=self._scales_by_half)
            else:
                scales = lanes.load_scales(row, self.offset_of("scales"), by_half=self._scales_by_half)
            return array([scales], lane_registers(count))

        return load(kv_ref, zero_ref, slots, layer, limit)

    @property
    def _scales_by_half(self) -> bool:
        """Whether a row has twice the scales that a lane loads, so that lanes that are 16 apart load half of them."""
        return self.stored == "e2m1x2"

    def fetch_rope(self, kv_ref, zero_ref, slots, layer, limit, stage: int, r_ref) -> jax.Array | None:
        """Starts to copy a tile's rotary keys to `r_ref` [2, 64, 64], or to load them; `slots` come from `spread_rope`.

        Returns the loaded chunks, or None if keys are copied.
        """
        if self.converts_rope:

            @plgpu.inline_mgpu(
                arg_types=(plgpu.RefType(), plgpu.RefType(), lane_registers(ROPE_ROWS), SCALAR, SCALAR),
                return_type=lane_array(4 * ROPE_ROWS),
            )
            def load(_, kv, zero, slots, layer, limit):
                chunks = lanes.load_rope(self._rows(kv, zero, slots, layer, limit), self.offset_of("rope"))
                return array(chunks, lane_registers(4 * ROPE_ROWS))

            return load(kv_ref, zero_ref, slots, layer, limit)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), FOUR, SCALAR, SCALAR, ref_type(self.rope_dtype))
        )
        def copy(_, kv, zero, slots, layer, limit, ref):
            lanes.copy_rope(self._rows(kv, zero, slots, layer, limit), self.offset_of("rope"), ref, stage)

        copy(kv_ref, zero_ref, slots, layer, limit, r_ref)
        return None

    def finish_rope(self, stage: int, r_ref, scales, loaded, k_full: LaneBarriers) -> None:
        """Completes what `fetch_rope` started, and arrives at the barrier of rotary keys; `loaded` is what it returned.

        Converts and stores loaded keys.  Copied keys arrive by themselves, unless they must be divided by the factors
        of their rows.
        """
        barrier, ref = HALVES + stage, ref_type(self.rope_dtype)
        if self.converts_rope:

            @plgpu.inline_mgpu(arg_types=(ref, lane_registers(4 * ROPE_ROWS)))
            def store(_, ref, loaded):
                lanes.store_e4m3_rope(ref, loaded, stage)

            store(r_ref, loaded)
            k_full.arrive(barrier)
            return

        @plgpu.inline_mgpu(arg_types=(ref, FOUR, plgpu.RefType()))
        def finish(_, ref, scales, memory):
            *_, special, inverse = word_list(scales)
            lanes.finish_rope(ref, stage, special, inverse, k_full.of(memory, barrier))

        finish(r_ref, scales, k_full.memory)

    def prefetch(self, kv_ref, zero_ref, slots, layer, limit) -> None:
        """Prefetches the rows of a tile to the L2 cache; `slots` come from `spread`."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), FOUR, SCALAR, SCALAR))
        def prefetch(_, kv, zero, slots, layer, limit):
            lanes.prefetch(self._rows(kv, zero, slots, layer, limit), self.entry.nbytes)

        prefetch(kv_ref, zero_ref, slots, layer, limit)

    def factors(self, stats_ref, row: int, flag: tuple[int, int], slots, limit, raw):
        """Stores the factors of a tile's keys to row `row` of `stats_ref`, and whether any is not 1 to `flag`.

        `flag` is the row and the column of warp 0's value, which is 1 if a factor of its keys is not 1.  The values of
        other warps follow.  `raw` is what `load_scales` returned, or None for entries without scales.  Returns what
        `store` and `finish_rope` need.
        """
        if not self.factored:

            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), OWN, SCALAR))
            def mark(_, stats, slots, limit):
                lanes.store_factors(stats, row, flag, lanes.valid(_word(slots), limit.registers.item()), None)

            mark(stats_ref, slots, limit)
            return raw

        held = lane_registers(2 if self.scale_dtype == "e8m0" else 4)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), OWN, SCALAR, held), return_type=lane_array(4))
        def scale(_, stats, slots, limit, raw):
            factor, scales = self._scales(word_list(raw))
            known = lanes.valid(_word(slots), limit.registers.item())
            factor, special = lanes.store_factors(stats, row, flag, known, factor)
            return array([[*scales, special, lanes.inverse_pair(factor)]], FOUR)

        return scale(stats_ref, slots, limit, raw)

    def _scales(self, raw) -> tuple[Any, Sequence[Any]]:
        """From the scales of a row: its factor, and two words of scales to multiply by."""
        if self.scale_dtype == "float32":
            return lanes.scales(raw)
        padding = sum(field.nbytes for field in self.entry.fields() if field.name == "padding")
        return lanes.e8m0_scales(raw, padding=padding)

    def store(self, unit: Unit, stage: int, k_ref, raw, scales) -> None:
        """Converts a unit of latents, and stores it to `k_ref` [2, 2, 64, 256]."""
        scaled = [] if self.scale_dtype is None else [FOUR]

        @plgpu.inline_mgpu(arg_types=(ref_type(self.latent_dtype), lane_registers(16), *scaled))
        def store(_, ref, raw, *scales):
            held = word_list(*scales) if scales else []
            if self.stored == "e4m3":
                scale_of = partial(lanes.scale_of_group, held, group=unit.number) if scaled else None
                lanes.store_e4m3(ref, raw, scale_of, stage, unit.number)
            else:
                of_half = lanes.e8m0_of_e2m1 if self.scale_dtype == "e8m0" else lanes.e4m3_of_e2m1
                lanes.store_e2m1(ref, raw, partial(of_half, held, half=unit.number), stage, unit.number)

        store(k_ref, raw, *([scales] if scaled else []))

    def _rows(self, kv, zero, slots, layer, limit):
        """The addresses at which the rows of a lane's slots begin."""
        return lanes.rows(self, kv, zero, word_list(slots), layer.registers.item(), limit.registers.item())


@dataclass(frozen=True)
class GatherTiles:
    """The sources and destinations of tiles, and the barriers between producer and consumers."""

    rows: Any
    """`GatheredRows`, or `FP8V4Rows`."""
    prefetch: bool
    units_ahead: int
    """See `SparseConfig`."""
    kv_ref: Any
    zero_ref: Any
    slots: Slots
    k: Any
    r: Any
    stats: Any
    k_full: Any
    """`LaneBarriers`, `CopyBarriers` or `InterpretedBarriers`.  Barrier 2 * tile + half: that half is full; if keys
    are copied, the far half with the rotary keys, which otherwise have barrier HALVES + tile."""
    k_free: Any

    def run(self, layer, first, end, first_tile, load_work_tile, q_free, fetch_queries) -> None:
        """Gathers the keys of the work tiles from `first`, whose columns are `first_tile`, to `end`.

        Also fetches their queries.  `load_work_tile` loads the columns of a work tile.  `fetch_queries` fetches the
        queries of a request; it is called once `q_free` has completed.
        """
        layer, limit = self._layer_and_limit(self.rows.pages, layer)

        def work_of(tile, n):
            """Request, first pair, end of the pairs, and slots to attend to: none past the last work tile."""
            return tile.request, tile.begin, tile.end, jnp.where(n < end, tile.keys, 0)

        def load_work(n):
            return work_of(load_work_tile(n), n)

        def work_tile(n, carry):
            request, begin, stop, keys = load_work(n)

            def pair(i, carry):
                used, state = carry

                def of_next_work_tile():  # loaded when it is needed: registers are scarce
                    request, begin, _, keys = load_work(n + 1)
                    return request, begin, keys

                following, next_pair, next_keys = lax.cond(
                    i + 1 < stop, lambda: (request, i + 1, keys), of_next_work_tile
                )
                beyond = [(following, 2 * next_pair + tile, next_keys) for tile in range(2)]

                def after_tile_0():
                    @pl.when((i == begin) & (n > first))
                    def _():
                        plgpu.barrier_wait(q_free)
                        fetch_queries(request)

                return used + 1, self._fetch_pair(layer, limit, used, state, beyond, after_tile_0)

            return lax.fori_loop(begin, stop, pair, carry)

        request, begin, _, keys = work_of(first_tile, first)

        @pl.when(end > first)
        def _():
            fetch_queries(request)

        slots = tuple(self._load_slots(request, 2 * begin + tile, keys) for tile in range(2))
        lax.fori_loop(first, end, work_tile, (jnp.int32(0), self._start(layer, limit, slots)))

        @pl.when(end > first)
        def _():  # every completion of a barrier must be waited for
            plgpu.barrier_wait(q_free)
            for half in range(4):
                plgpu.barrier_wait(self.k_free[half])

    def _layer_and_limit(self, pages, layer) -> tuple[Any, Any]:
        """A layer of a cache, and the end of its slots: 0 if there is no such layer."""
        in_cache = (layer >= 0) & (layer < pages.num_layers)
        return jnp.where(in_cache, layer, 0), jnp.where(in_cache, pages.num_slots, 0)

    def _start(self, layer, limit, slots) -> tuple[Any, ...]:
        """The state before the first pair, whose slots are `slots`, tile by tile."""
        raise NotImplementedError

    def _fetch_pair(self, layer, limit, used, state, beyond, after_tile_0) -> tuple[Any, ...]:
        """Fetches the two tiles of a pair, and returns the state before the next pair.

        `used` is the number of pairs before this one.  `beyond` has the request, tile and number of keys of each tile
        of the next pair.  `after_tile_0` is called after tile 0 has been fetched.
        """
        raise NotImplementedError

    def _load_slots(self, request, tile, keys):
        return self.rows.load_slots(self.slots, request, tile, keys)

    def _units(self, tile):
        """The units of a tile in the order in which they are stored: first those of the near half, half `tile`."""
        return self.rows.half(tile) + self.rows.half(1 - tile)

    def _wait_free(self, tile, half, used):
        @pl.when(used > 0)
        def _():
            plgpu.barrier_wait(self.k_free[2 * tile + half])

    def _stored(self, half):
        """Signals that a half is stored, or that its copies have been started: every lane arrives.

        The consumers make the half visible to wgmma.  A fence here might wait for loads that have not finished.
        """
        self.k_full.arrive(half)


class CopiedTiles(GatherTiles):
    """For entries that are copied as they are.  The state is the slots of the next pair."""

    def _start(self, layer, limit, slots):
        return slots

    def _fetch_pair(self, layer, limit, used, state, beyond, after_tile_0):
        coming = tuple(self._load_slots(*tile) for tile in beyond)
        for tile, slots in enumerate(state):
            for half in (tile, 1 - tile):
                self._wait_free(tile, half, used)
                if half == tile:
                    self.rows.factors(self.stats, FACTOR + tile, (FLAG, 4 * tile), slots, limit, None)
                rope = [] if half == tile else [self.r]
                self.rows.copy(self.kv_ref, slots, layer, limit, tile, half, self.k, *rope)
                self._stored(2 * tile + half)
            if self.prefetch:
                self.rows.prefetch(self.kv_ref, self.zero_ref, self.rows.spread(coming[tile]), layer, limit)
            if tile == 0:
                after_tile_0()
        return coming


class ConvertedTiles(GatherTiles):
    """For quantised entries.  The state: units and scales that are being loaded, and slots of the next two tiles."""

    def _start(self, layer, limit, slots):
        here, ahead = slots
        raw = self._load_scales(here, layer, limit)
        spread = self.rows.spread(here)
        ring = tuple(self._load(spread, layer, limit, unit) for unit in self._units(0)[: self._ring])
        return ring, raw, here, ahead

    def _fetch_pair(self, layer, limit, used, state, beyond, after_tile_0):
        state = self._fetch_tile(layer, limit, 0, used, state, beyond[0])
        after_tile_0()
        return self._fetch_tile(layer, limit, 1, used, state, beyond[1])

    @property
    def _ring(self) -> int:
        """The number of units that are loaded ahead."""
        return min(self.units_ahead, self.rows.units)

    def _load(self, slots, layer, limit, unit):
        return self.rows.load(self.kv_ref, self.zero_ref, slots, layer, limit, unit)

    def _load_scales(self, slots, layer, limit):
        return self.rows.load_scales(self.kv_ref, self.zero_ref, slots, layer, limit)

    def _fetch_tile(self, layer, limit, tile, used, state, beyond):
        """Stores a tile, whose first units are in `ring`; loads those of the next one.

        `state`: the units and scales that are being loaded; the slots of this tile and of the next one.  `beyond`: the
        request, tile and number of keys of the one after, whose slots are loaded here.
        """
        rows, (ring, raw, here, ahead) = self.rows, state
        units, ring = self._units(tile), list(ring)
        coming = units + self._units(1 - tile)
        from_cache = self.kv_ref, self.zero_ref
        self._wait_free(tile, tile, used)
        rope = rows.fetch_rope(*from_cache, rows.spread_rope(here), layer, limit, tile, self.r)
        ahead_spread = rows.spread(ahead)
        here_spread = rows.spread(here) if self._ring < len(units) else None
        after = self._load_slots(*beyond)
        scales = rows.factors(self.stats, FACTOR + tile, (FLAG, 4 * tile), here, limit, raw)
        if not rows.converts_rope:
            rows.finish_rope(tile, self.r, scales, rope, self.k_full)
        raw = self._load_scales(ahead, layer, limit)
        for n, unit in enumerate(units):
            if n == len(units) // 2:
                self._stored(2 * tile + tile)
                self._wait_free(tile, 1 - tile, used)
            rows.store(unit, tile, self.k, ring[n % self._ring], scales)
            slots = here_spread if n + self._ring < len(units) else ahead_spread
            ring[n % self._ring] = self._load(slots, layer, limit, coming[n + self._ring])
        if self.prefetch:
            rows.prefetch(*from_cache, rows.spread(after), layer, limit)
        if rows.converts_rope:
            rows.finish_rope(tile, self.r, scales, rope, self.k_full)
        self._stored(2 * tile + 1 - tile)
        return tuple(ring), raw, ahead, after
