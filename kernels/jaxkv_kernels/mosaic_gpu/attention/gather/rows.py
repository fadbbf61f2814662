"""The loader of entries at chosen slots: how they reach the shared memory that wgmma reads.

TMA has no gather on Hopper, so a warpgroup gathers, 16 bytes (a chunk) per lane and instruction.

Entries of bf16 and f16 are copied to swizzled shared memory without passing through registers (`cp.async`).  A lane has
row 4 * warp + lane // 8 of every 16 rows, and copies one chunk of each line (128 bytes) of these rows.  It computes the
addresses of its four rows once, for all lines.

Quantised entries pass through registers, where e4m3 and e2m1 values are converted to float16 between load and store.
Values of entries with scales are multiplied by them there (`scaling.py`, `narrow.py`).  The single scale of all `fp8`
entries is applied to scores and results instead.  The latents of a tile of 64 rows move in units of 8 KiB, one chunk of
four rows per lane: 128 e4m3 values of each entry, which in `fp8_ds_mla` are a scale group, or 256 e2m1 values.  A lane
has row 4 * warp + lane % 4 of every 16 rows, and a chunk that depends on the quarter lane // 8 and on lane // 4 % 2. So
the eight lanes that share a phase of a shared-memory access have four rows and two chunks, which the 128-byte swizzle
spreads over all banks.  Latents of 448 values are followed by zeros.  bf16 rotary keys need no conversion, and are
copied.  e4m3 rotary keys are 64 bytes: each lane loads chunks of two rows before the latents of the tile are stored,
and stores them after these.

A row has one slot and one set of scales.  A lane loads those of a single row, called its own row: one of the 16 rows of
its warp, or half of those of this row.  Shuffles pass them to the lanes that need them.  A masked key (slot below 0 or
past the cache, or position past the count) is a row of zeros with factor -1."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Field
from jaxkv_kernels.mosaic_gpu.attention.config import HALF
from jaxkv_kernels.mosaic_gpu.attention.gather import lanes, narrow
from jaxkv_kernels.mosaic_gpu.runtime.elements import array
from jaxkv_kernels.mosaic_gpu.runtime.ptx import ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT


def lane_registers(per_lane: int) -> Any:
    """Layout of int32 arrays of which a lane holds vectors of up to four."""
    return plgpu.Layout.WG_STRIDED((lanes.THREADS * per_lane,), min(per_lane, 4))


def lane_array(per_lane: int) -> Any:
    """The type of such an array."""
    return plgpu.ShapeDtypeStruct((lanes.THREADS * per_lane,), jnp.dtype(jnp.int32), layout=lane_registers(per_lane))


LINE = lanes.LINE
"""Bytes of each entry in a unit."""
CHUNK = 16
"""Bytes of a chunk."""
OWN, FOUR = lane_registers(1), lane_registers(4)
"""The slot of a lane's own row; the slots of four rows, or four words of its own row."""
ROPE_ROWS = 2
"""Rows, of its four, whose e4m3 rotary keys a lane loads.  A row has only four chunks, for eight lanes."""


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
        return self._part("latent").dtype

    @property
    def scale_dtype(self) -> str | None:
        """The dtype of the scales of an entry: float32, e8m0 or e4m3; None if it has none."""
        return next((part.dtype for part in self.entry.fields() if "scales" in part.name), None)

    @property
    def factored(self) -> bool:
        """Whether the scales of an entry may need a factor to fit float16.  Others share one scale, or always fit."""
        return self.scale_dtype in ("float32", "e8m0")

    @property
    def converts_rope(self) -> bool:
        """Whether rotary keys are e4m3 as well."""
        return self.quantised and self._part("rope").dtype == "e4m3"

    @property
    def latent_dtype(self) -> Any:
        """The dtype of latents in shared memory."""
        return jnp.dtype(jnp.float16) if self.quantised else self.entry.dtype

    @property
    def rope_dtype(self) -> Any:
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
        count, latent = self.units // 2, self._part("latent").nbytes
        return tuple(
            Unit(n * LINE, n, min(latent - n * LINE, LINE) // CHUNK) for n in range(which * count, (which + 1) * count)
        )

    def _part(self, name: str) -> Field:
        """The part of an entry whose name contains `name`."""
        return next(part for part in self.entry.fields() if name in part.name)

    def part(self, name: str) -> int:
        """Where a part of an entry begins, in its region."""
        part = self._part(name)
        return part.offset - (self.entry.regions()[self._region(name)][0].offset if self.entry.split else 0)

    def _region(self, name: str) -> int:
        """The region of a split page that has the part; 0 if pages are not split."""
        regions = self.entry.regions() if self.entry.split else []
        return next((n for n, region in enumerate(regions) if any(name in part.name for part in region)), 0)

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
            part = self.entry.regions(pages.block_size)[region][0]
            return first + part.offset, part.step or 0
        return first, (pages.token_stride if pages.block_size > 1 else pages.block_stride) * self.itemsize

    def slots(self, slot_ref, request, tile, length):
        """The slots of a tile of keys, in each lane that of its own row; -1 at positions from `length` on."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR), return_type=lane_array(1))
        def load(_, ref, *place):
            return array([[lanes.load_slots(ref, *(x.registers.item() for x in place))]], OWN)

        return load(slot_ref, request, tile, length)

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
            latent, rope = self.part("latent") + half * lines * LINE, self.part("rope")
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
                found = narrow.load_eight(row, self.part("scales"), by_half=self._scales_by_half)
            else:
                found = lanes.load_scales(row, self.part("scales"), by_half=self._scales_by_half)
            return array([found], lane_registers(count))

        return load(kv_ref, zero_ref, slots, layer, limit)

    @property
    def _scales_by_half(self) -> bool:
        """Whether a row has twice the scales that a lane loads, so that lanes that are 16 apart load half of them."""
        return self.stored == "e2m1x2"

    def fetch_rope(self, kv_ref, zero_ref, slots, layer, limit, stage: int, r_ref) -> Any:
        """Starts to copy a tile's rotary keys to `r_ref` [2, 64, 64], or to load them; `slots` come from `spread_rope`.

        Returns the loaded chunks, or None if keys are copied.
        """
        if self.converts_rope:

            @plgpu.inline_mgpu(
                arg_types=(plgpu.RefType(), plgpu.RefType(), lane_registers(ROPE_ROWS), SCALAR, SCALAR),
                return_type=lane_array(4 * ROPE_ROWS),
            )
            def load(_, kv, zero, slots, layer, limit):
                found = lanes.load_rope(self._rows(kv, zero, slots, layer, limit), self.part("rope"))
                return array(found, lane_registers(4 * ROPE_ROWS))

            return load(kv_ref, zero_ref, slots, layer, limit)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), FOUR, SCALAR, SCALAR, ref_type(self.rope_dtype))
        )
        def copy(_, kv, zero, slots, layer, limit, ref):
            lanes.copy_rope(self._rows(kv, zero, slots, layer, limit), self.part("rope"), ref, stage)

        copy(kv_ref, zero_ref, slots, layer, limit, r_ref)
        return None

    def finish_rope(self, stage: int, r_ref, scales, loaded) -> None:
        """Completes what `fetch_rope` started; `loaded` is what it returned.

        Converts and stores loaded keys.  Waits for copied keys, and divides them by the factors of their rows.
        """
        if self.converts_rope:

            @plgpu.inline_mgpu(arg_types=(ref_type(self.rope_dtype), lane_registers(4 * ROPE_ROWS)))
            def store(_, ref, loaded):
                lanes.store_e4m3_rope(ref, loaded, stage)

            return store(r_ref, loaded)

        @plgpu.inline_mgpu(arg_types=(ref_type(self.rope_dtype), FOUR))
        def finish(_, ref, scales):
            lanes.wait_for_copies()
            *_, special, inverse = word_list(scales)
            lanes.divide_rope(ref, stage, special, inverse)

        return finish(r_ref, scales)

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

    def _scales(self, raw) -> tuple[Any, list[Any]]:
        """From the scales of a row: its factor, and two words of scales to multiply by."""
        if self.scale_dtype == "float32":
            return lanes.scales(raw)
        padding = sum(part.nbytes for part in self.entry.fields() if part.name == "padding")
        return narrow.e8m0_scales(raw, padding=padding)

    def store(self, unit: Unit, stage: int, k_ref, raw, scales) -> None:
        """Converts a unit of latents, and stores it to `k_ref` [2, 2, 64, 256]."""
        scaled = [] if self.scale_dtype is None else [FOUR]

        @plgpu.inline_mgpu(arg_types=(ref_type(self.latent_dtype), lane_registers(16), *scaled))
        def store(_, ref, raw, *scales):
            found = word_list(*scales) if scales else []
            if self.stored == "e4m3":
                scale_of = partial(lanes.scale_of_group, found, group=unit.number) if scaled else None
                lanes.store_e4m3(ref, raw, scale_of, stage, unit.number)
            else:
                of_half = narrow.e8m0_of_e2m1 if self.scale_dtype == "e8m0" else narrow.e4m3_of_e2m1
                narrow.store_e2m1(ref, raw, partial(of_half, found, half=unit.number), stage, unit.number)

        store(k_ref, raw, *([scales] if scaled else []))

    def _rows(self, kv, zero, slots, layer, limit):
        """The addresses at which the rows of a lane's slots begin."""
        return lanes.rows(self, kv, zero, word_list(slots), layer.registers.item(), limit.registers.item())


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


def async_fence(*, interpret: bool) -> None:
    """Makes visible to wgmma the values in shared memory for which the caller has waited."""
    if interpret:
        return
    plgpu.inline_mgpu()(lambda _: ptx("fence.proxy.async.shared::cta;"))()
