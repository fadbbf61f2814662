"""The loader of `fp8_v4` entries at chosen slots of one cache, or of two.

Keys are whole entries, 448 e4m3 and 64 bf16 values, and so are values.  In shared memory, all of them are bf16, which
represents products of e4m3 values and powers of two exactly, whatever the scale is.  So no key needs a factor, and
queries stay as they are.

A lane finds the address of its own row once per tile, and shuffles pass it to the lanes that load chunks of the row.
Which cache a tile belongs to matters only there.  Two units are loaded ahead, to registers.  A whole tile ahead, three
units of which went through shared memory (`cp.async`), took 57 us instead of 54 for 64 requests with 128 heads, 128 +
512 slots and counts.  Units of a tile, 16 registers per lane each, or 8:

    0, 1, 2    128 e4m3 values of each row
    3          the last 64 e4m3 values: a lane loads chunks of two rows
    4          the rotary part, which is stored as it is

Where the time goes, in us, for 64 requests with 128 heads and 128 + 512 slots on an H200, when the conversion was by
integer operations (12 per 4 values, and a branch for NaN and large scales), loads allocated lines of the L1 cache, and
`combine` ran although nothing was split: 43.9.  15 of them are the first pair of tiles, with launch, queries and
results, and each other pair takes 7.  Without any work of the producer 22.4, without loads and conversion 24.4, without
loads 30.6, without conversion 34.0.  With the hardware's conversions 38.6, without allocation in L1 40.5, without
`combine` 43.3, all three 35.8; with prefetching 35.5.  No better: a second producer, so that each has one tile of a
pair, 36.2 with all three (and 0.220 ms instead of 0.190 for 128 requests with 2,048 `fp8_ds_mla` entries: registers are
spilled); float16 instead of bf16 in shared memory, 1 us less at most; four units ahead, 45.1 with the other three.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.mosaic_gpu.attention.gather import joined_lanes, lanes
from jaxkv_kernels.mosaic_gpu.attention.gather.rows import GatheredRows, lane_array, lane_registers, ref_type, word_list
from jaxkv_kernels.mosaic_gpu.runtime.elements import array
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR


@dataclass(frozen=True)
class JoinedUnit:
    """A part of the rows of a tile that a lane loads at once."""

    kind: str
    """"e4m3" (128 values of a row), "half" (64), or "rope" (64 bf16 values)."""
    offset: int
    """Its first byte in an entry."""
    half: int
    """The half of the columns of a tile that it belongs to."""
    column_tile: int
    """Its first 64 columns, among those of the half."""
    scale: int
    """Its first scale."""

    @property
    def registers(self) -> int:
        """Registers per lane."""
        return 8 if self.kind == "half" else 16


UNITS = (
    (JoinedUnit("e4m3", 0, 0, 0, 0), JoinedUnit("e4m3", 128, 0, 2, 2)),
    (JoinedUnit("e4m3", 256, 1, 0, 4), JoinedUnit("half", 384, 1, 2, 6), JoinedUnit("rope", 448, 1, 3, 0)),
)
"""The units of each half of the columns."""


@dataclass(frozen=True)
class JoinedRows:
    """The entries of one cache or of two, as rows."""

    sources: tuple[GatheredRows, ...]
    """The rows of each cache."""
    first_tiles: int
    """Tiles of the first list of slots."""
    quantised = True

    @property
    def latent_dtype(self) -> Any:
        """The dtype of keys in shared memory."""
        return jnp.dtype(jnp.bfloat16)

    rope_dtype = latent_dtype

    @property
    def pages(self) -> Pages:
        """Those of the first cache."""
        return self.sources[0].pages

    def zeros(self) -> jax.Array:
        """The row of zeros from which masked keys are loaded."""
        return self.sources[0].zeros()

    def buffer(self, buffer: jax.Array) -> jax.Array:
        """The operand that rows are loaded from; no copy."""
        return buffer

    def half(self, which: int) -> tuple[JoinedUnit, ...]:
        """The units of half the columns."""
        return UNITS[which]

    def find(self, slot_refs, count_ref, request, tile, length):
        """Starts to load the slots of a tile of keys, in each lane that of its own row, and the first list's count.

        Keys past the first `length` are masked.  `count_ref` may be None: all slots of the first list count.
        """
        counts, refs = [] if count_ref is None else [count_ref], len(slot_refs)

        @plgpu.inline_mgpu(
            arg_types=(*[plgpu.RefType()] * (refs + len(counts)), SCALAR, SCALAR, SCALAR),
            return_type=lane_array(1 + len(counts)),
        )
        def find(_, *operands):
            *found, request, tile, length = operands
            place = (x.registers.item() for x in (request, tile, length))
            count = found[refs] if counts else None
            words = joined_lanes.load_found(found[:refs], count, self.first_tiles, *place)
            return array([words], lane_registers(len(words)))

        return find(*slot_refs, *counts, request, tile, length)

    def locate(self, kv_refs, zero_ref, places, tile, found):
        """The addresses of the entries of a tile, of which `find` loaded the slots, and their scales, being loaded.

        `places` are the layer and the end of the slots of each cache.
        """
        words, count = found.size // lanes.THREADS, len(kv_refs)

        @plgpu.inline_mgpu(
            arg_types=(*[plgpu.RefType()] * (count + 1), SCALAR, lane_registers(words), *[SCALAR] * (2 * count)),
            return_type=(lane_array(2), lane_array(2)),
        )
        def locate(_, *operands):
            refs, zero, tile, found = operands[:count], operands[count], operands[count + 1], operands[count + 2]
            scalars = [x.registers.item() for x in operands[count + 3 :]]
            sources = list(zip(self.sources, refs, scalars[0::2], scalars[1::2], strict=True))
            words = joined_lanes.locate(sources, self.first_tiles, zero, tile.registers.item(), word_list(found))
            return tuple(array([pair], lane_registers(2)) for pair in (words[:2], words[2:]))

        return locate(*kv_refs, zero_ref, tile, found, *(x for place in places for x in place))

    def load(self, zero_ref, own, unit: JoinedUnit):
        """Starts to load a unit of a tile, whose addresses are `own`."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lane_registers(2)), return_type=lane_array(unit.registers))
        def load(_, zero, own):
            return array(joined_lanes.load_unit(zero, word_list(own), unit), lane_registers(unit.registers))

        return load(zero_ref, own)

    def store(self, unit: JoinedUnit, stage: int, k_ref, raw, scales) -> None:
        """Converts a unit, and stores it to `k_ref` [2, 2, 64, 256]."""

        @plgpu.inline_mgpu(arg_types=(ref_type(self.latent_dtype), lane_registers(unit.registers), lane_registers(2)))
        def store(_, ref, raw, scales):
            joined_lanes.store_unit(ref, raw, word_list(scales), unit, stage)

        store(k_ref, raw, scales)

    def mark(self, stats_ref, zero_ref, row: int, flag: tuple[int, int], own) -> None:
        """Stores the factors of a tile's keys, of which masked keys have one that is not 1; see `factors`."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), lane_registers(2)))
        def mark(_, stats, zero, own):
            lanes.store_factors(stats, row, flag, joined_lanes.is_known(zero, word_list(own)), None)

        mark(stats_ref, zero_ref, own)

    def prefetch_rows(self, zero_ref, own) -> None:
        """Prefetches the rows of a tile to the L2 cache."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lane_registers(2)))
        def prefetch(_, zero, own):
            joined_lanes.prefetch(zero, word_list(own), self.sources[0].entry.nbytes)

        prefetch(zero_ref, own)
