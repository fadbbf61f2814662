"""The loader of `fp8_v4` entries at chosen slots of one cache, or of two.

V is the whole entry, RoPE included: K = V, 448 e4m3 and 64 bf16 values.  In shared memory, all of them are bf16, which
represents products of e4m3 values and powers of two exactly, whatever the scale is: e4m3 values become float16, float32
and bf16, and are multiplied by their scale in bf16.  So no key needs a factor, and queries stay as they are.

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
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.mosaic_gpu.gather_keys import (
    FACTOR,
    FLAG,
    GatheredRows,
    GatherTiles,
    Slots,
    lane_array,
    lane_registers,
    ref_type,
    word_list,
)
from jaxkv_kernels.mosaic_gpu.ptx import gather as lanes
from jaxkv_kernels.mosaic_gpu.ptx.fragments import array, permuted, words
from jaxkv_kernels.mosaic_gpu.ptx.gather import Lane, load_eight, shuffle
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, i32, i64, ptx
from jaxkv_kernels.mosaic_gpu.ptx.loads import COLUMN_TILE
from jaxkv_kernels.mosaic_gpu.ptx.stores import STORE_SHARED
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.mosaic_gpu.sizes import HALF, TILE

COLUMN_TILES = HALF // 64
LOAD = lanes.LOAD.replace("L1::evict_last", "L1::no_allocate")
"""Entries of 576 bytes share lines of the L1 cache; 64 requests with 128 heads and 128 + 512 slots take 40.5 us instead
of 43.9 without allocating these.  Entries of 656 bytes are slower so: 203 us instead of 190."""
CONVERT = (
    "{ .reg .b16 low, high, a, b; .reg .b32 even, odd; .reg .f32 x, y; mov.b32 {low, high}, $2;"
    " cvt.rn.f16x2.e4m3x2 even, low; cvt.rn.f16x2.e4m3x2 odd, high;"
    " mov.b32 {a, b}, even; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 even, y, x;"
    " mov.b32 {a, b}, odd; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 odd, y, x;"
    " mul.rn.bf16x2 $0, even, $3; mul.rn.bf16x2 $1, odd, $3; }"
)
"""Four e4m3 values times a pair of equal bf16 scales: four bf16 values."""


@dataclass(frozen=True)
class FP8V4Unit:
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
    (FP8V4Unit("e4m3", 0, 0, 0, 0), FP8V4Unit("e4m3", 128, 0, 2, 2)),
    (FP8V4Unit("e4m3", 256, 1, 0, 4), FP8V4Unit("half", 384, 1, 2, 6), FP8V4Unit("rope", 448, 1, 3, 0)),
)
"""The units of each half of the columns."""


@dataclass(frozen=True)
class FP8V4Rows:
    """The entries of one cache or of two, as rows."""

    sources: tuple[GatheredRows, ...]
    """The rows of each cache."""
    first_tiles: int
    """Tiles of the first list of slots."""
    quantised = True

    @property
    def latent_dtype(self) -> np.dtype:
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

    def half(self, which: int) -> tuple[FP8V4Unit, ...]:
        """The units of half the columns."""
        return UNITS[which]

    def load_slots(self, slots: Slots, extra_ref, count_ref, request, tile, length):
        """Starts to load the slots of a tile of keys, in each lane that of its own row, and the first list's count.

        Keys past the first `length` are masked.  `extra_ref` are the lists of a second cache, or None.  `count_ref` may
        be None: all slots of the first list count.
        """
        extra, counts = ([] if ref is None else [ref] for ref in (extra_ref, count_ref))

        @plgpu.inline_mgpu(
            arg_types=(
                *([plgpu.RefType()] * len(refs) for refs in (slots.refs, extra, counts)),
                SCALAR,
                SCALAR,
                SCALAR,
            ),
            return_type=lane_array(1 + len(counts)),
        )
        def load(_, refs, extra, counts, *indices):
            indices = [x.registers.item() for x in indices]
            if extra:
                words = _load_slots((*refs, *extra), counts, self.first_tiles, *indices)
            else:
                words = [lanes.load_slots(slots.with_refs(refs), *indices)]
            return array([words], lane_registers(len(words)))

        return load(slots.refs, extra, counts, request, tile, length)

    def locate(self, kv_refs, zero_ref, layers, tile, slots):
        """The addresses of the entries of a tile, whose slots `load_slots` loaded, and their scales, being loaded.

        `layers` are the layer and the end of the slots of each cache.
        """
        words, count = slots.size // lanes.THREADS, len(kv_refs)

        @plgpu.inline_mgpu(
            arg_types=(*[plgpu.RefType()] * (count + 1), SCALAR, lane_registers(words), *[SCALAR] * (2 * count)),
            return_type=(lane_array(2), lane_array(2)),
        )
        def locate(_, *operands):
            refs, zero, tile, slots = operands[:count], operands[count], operands[count + 1], operands[count + 2]
            scalars = [x.registers.item() for x in operands[count + 3 :]]
            sources = list(zip(self.sources, refs, scalars[0::2], scalars[1::2], strict=True))
            words = _entry_addresses(sources, self.first_tiles, zero, tile.registers.item(), word_list(slots))
            return tuple(array([pair], lane_registers(2)) for pair in (words[:2], words[2:]))

        return locate(*kv_refs, zero_ref, tile, slots, *(x for layer in layers for x in layer))

    def load(self, zero_ref, own, unit: FP8V4Unit):
        """Starts to load a unit of a tile, whose addresses are `own`."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lane_registers(2)), return_type=lane_array(unit.registers))
        def load(_, zero, own):
            return array(_load_unit(zero, word_list(own), unit), lane_registers(unit.registers))

        return load(zero_ref, own)

    def store(self, unit: FP8V4Unit, stage: int, k_ref, raw, scales) -> None:
        """Converts a unit, and stores it to `k_ref` [2, 2, 64, 256]."""

        @plgpu.inline_mgpu(arg_types=(ref_type(self.latent_dtype), lane_registers(unit.registers), lane_registers(2)))
        def store(_, ref, raw, scales):
            _store_unit(ref, raw, word_list(scales), unit, stage)

        store(k_ref, raw, scales)

    def mark(self, stats_ref, zero_ref, row: int, flag: tuple[int, int], own) -> None:
        """Stores the factors of a tile's keys, of which masked keys have one that is not 1; see `factors`."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), lane_registers(2)))
        def mark(_, stats, zero, own):
            lanes.store_factors(stats, row, flag, _is_known(zero, word_list(own)), None)

        mark(stats_ref, zero_ref, own)

    def prefetch_rows(self, zero_ref, own) -> None:
        """Prefetches the rows of a tile to the L2 cache."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lane_registers(2)))
        def prefetch(_, zero, own):
            _prefetch(zero, word_list(own), self.sources[0].entry.nbytes)

        prefetch(zero_ref, own)


@dataclass(frozen=True)
class ExtraRefs:
    """Second cache: buffer, slots, layer."""

    kv_ref: Any
    slot_ref: Any
    layer: Any


@dataclass(frozen=True)
class FP8V4Tiles(GatherTiles):
    """For `fp8_v4` entries of one cache or of two.

    The state: units that are being loaded; the scales and the addresses of the next tile; the slots of the one after.
    """

    extra: ExtraRefs | None = None
    count_ref: Any = None
    """The numbers of slots to attend to in the first of two lists; None if that is all of them."""

    def _start(self, layer, limit, slots):
        here, ahead = slots
        own, scales = self._locate(layer, limit, here)
        ring = tuple(self.rows.load(self.zero_ref, own, unit) for unit in self._units(0)[: self.units_ahead])
        return ring, scales, own, ahead

    def _fetch_pair(self, layer, limit, used, state, beyond, after_tile_0):
        state = self._fetch_tile(layer, limit, 0, used, state, beyond[0])
        after_tile_0()
        return self._fetch_tile(layer, limit, 1, used, state, beyond[1])

    def _load_slots(self, request, tile, keys):
        """The slots of a tile, which are being loaded, and its number."""
        extra_ref = None if self.extra is None else self.extra.slot_ref
        return self.rows.load_slots(self.slots, extra_ref, self.count_ref, request, tile, keys), tile

    def _locate(self, layer, limit, slots_and_tile):
        slots, tile = slots_and_tile
        refs, layers = [self.kv_ref], [(layer, limit)]
        if self.extra is not None:
            refs.append(self.extra.kv_ref)
            layers.append(self._layer_and_limit(self.rows.sources[1].pages, self.extra.layer))
        return self.rows.locate(refs, self.zero_ref, layers, tile, slots)

    def _fetch_tile(self, layer, limit, tile, used, state, beyond):
        """Stores a tile, whose first units are in the ring; loads those of the next one."""
        ring, scales, own, following = state
        units, ring, near = self._units(tile), list(ring), len(self.rows.half(tile))
        coming = units + self._units(1 - tile)
        self._wait_free(tile, tile, used)
        self.rows.mark(self.stats, self.zero_ref, FACTOR + tile, (FLAG, 4 * tile), own)
        after = self._load_slots(*beyond)
        ahead, scales_ahead = self._locate(layer, limit, following)
        if self.prefetch:
            self.rows.prefetch_rows(self.zero_ref, ahead)
        for n, unit in enumerate(units):
            if n == near:
                self._stored(2 * tile + tile)
                self._wait_free(tile, 1 - tile, used)
            next_unit = n + len(ring)
            self.rows.store(unit, tile, self.k, ring.pop(0), scales)
            addresses = own if next_unit < len(units) else ahead
            ring.append(self.rows.load(self.zero_ref, addresses, coming[next_unit]))
        self._stored(2 * tile + 1 - tile)
        return tuple(ring), scales_ahead, ahead, after


def _load_slots(slot_refs, count_refs, first_tiles: int, request, tile, length) -> list[ir.Value]:
    """The slot of the lane's own row in one of two lists; -1 for slots past `length`.  Also the first list's count.

    The first list has `first_tiles` tiles, and `length` counts from its begin.  `count_refs` may be empty.
    """
    sizes = [ir.MemRefType(ref.type).shape[1] for ref in slot_refs]
    is_second = arith.cmpi(arith.CmpIPredicate.sge, tile, c32(first_tiles))

    def choose(second, first):
        return arith.select(is_second, second, first)

    before = choose(c32(first_tiles), c32(0))
    position = arith.addi(arith.muli(arith.subi(tile, before), c32(TILE)), Lane().own_row)
    length = choose(arith.subi(length, c32(first_tiles * TILE)), c32(sizes[0]))
    first, second = (mgpu.utils.memref_ptr(ref) for ref in slot_refs)
    offset = arith.muli(arith.extui(i64(), request), choose(*(c64(4 * size) for size in reversed(sizes))))
    offset = arith.addi(offset, arith.extui(i64(), arith.shli(position, c32(2))))
    load = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.b32 $0, [$1]; }"
    start = at(choose(second, first), offset)
    loaded = [ptx(load, start, position, length, result_types=i32(), has_side_effects=True)]
    for count_ref in count_refs:
        at_request = at(mgpu.utils.memref_ptr(count_ref), arith.muli(arith.extui(i64(), request), c64(4)))
        loaded.append(ptx("ld.global.b32 $0, [$1];", at_request, result_types=i32(), has_side_effects=True))
    return loaded


def _entry_addresses(sources, first_tiles: int, zero, tile, loaded) -> list[ir.Value]:
    """The address of the entry of the lane's own row, as two words, and its 8 scales, which are being loaded.

    `sources` lists, for each cache, its rows (`GatheredRows`), its reference, a layer, and the end of its slots.
    """
    nothing = mgpu.utils.memref_ptr(zero)
    slot, *counts = (shuffle(word, Lane().lane) for word in loaded)
    is_second = arith.cmpi(arith.CmpIPredicate.sge, tile, c32(first_tiles))
    of_sources = [
        [lanes.valid(slot, limit), *(lanes.address(rows, kv, slot, layer, region) for region in range(2))]
        for rows, kv, layer, limit in sources
    ]
    if counts:
        position = arith.addi(arith.muli(tile, c32(TILE)), Lane().own_row)
        counted = arith.cmpi(arith.CmpIPredicate.slt, position, counts[0])
        of_sources[0][0] = arith.andi(of_sources[0][0], counted)
    if len(sources) > 1:
        of_sources = [[arith.select(is_second, b, a) for a, b in zip(*of_sources, strict=True)]]
    ((known, *addresses),) = of_sources
    entry, scales = (arith.select(known, address, nothing) for address in addresses)
    offset = sources[0][0].offset_of("scales")
    return [*_halves(entry), *load_eight(scales, offset, by_half=False)]


def _halves(pointer) -> list[ir.Value]:
    """The two words of an address."""
    return list(ptx("mov.b64 {$0, $1}, $2;", pointer, result_types=[i32()] * 2))


def _is_known(zero, own) -> ir.Value:
    """Whether an address is not that of the zeros for masked keys."""
    low, high = _halves(mgpu.utils.memref_ptr(zero))
    differs = [arith.cmpi(arith.CmpIPredicate.ne, a, b) for a, b in zip(own, (low, high), strict=True)]
    return arith.ori(*differs)


def _load_unit(zero, own, unit) -> list[tuple[ir.Value, ...]]:
    """The lane's chunks of a unit, from the addresses that the lanes which own its rows have."""
    lane, pointer = Lane(), mgpu.utils.memref_ptr(zero).type
    chunk = {"e4m3": lane.e4m3_chunk, "half": lane.rope_chunk, "rope": lane.chunk}[unit.kind]
    owners = lane.rope_owners if unit.kind == "half" else lane.owners
    addresses = [
        ptx("mov.b64 $0, {$1, $2};", *(shuffle(word, owner) for word in own), result_types=pointer) for owner in owners
    ]
    return lanes.load_chunks(addresses, chunk, unit.offset, LOAD)


def _store_unit(ref, raw, scales, unit, stage: int) -> None:
    """Stores a unit as bf16 values, multiplied by the scales that the lanes which own its rows have."""
    lane = Lane()
    first = ((stage * 2 + unit.half) * 8 * COLUMN_TILES + unit.column_tile) * COLUMN_TILE
    chunks = [words(register) for register in raw.registers.flat]
    steps = [first + n * 2 * COLUMN_TILES * COLUMN_TILE for n in range(len(chunks))]
    if unit.kind == "rope":
        start = at(mgpu.utils.memref_ptr(ref), lane.swizzled_offset(lane.chunk, COLUMN_TILES))
        for step, chunk in zip(steps, chunks, strict=True):
            ptx(STORE_SHARED.format(offset=step), start, *chunk)
        return
    if unit.kind == "half":
        # Lanes have their first two rows of the four, or their last two.
        rows = arith.muli(lane.second, c32(4 * COLUMN_TILES * COLUMN_TILE))
        offset = arith.addi(lane.swizzled_offset(arith.shli(lane.rope_chunk, c32(1)), COLUMN_TILES), rows)
        owners, byte = lane.rope_owners, c32(2)
    else:
        second_tile = arith.muli(arith.shrui(lane.quarter, c32(1)), c32(COLUMN_TILE))
        chunk = arith.andi(arith.shli(lane.e4m3_chunk, c32(1)), c32(7))
        offset = arith.addi(lane.swizzled_offset(chunk, COLUMN_TILES), second_tile)
        owners, byte = lane.owners, arith.addi(arith.shrui(lane.quarter, c32(1)), c32(unit.scale % 4))
    starts = [at(mgpu.utils.memref_ptr(ref), x) for x in (offset, arith.xori(offset, c32(16)))]
    word = scales[unit.scale // 4]
    selector = arith.addi(byte, c32(0x4440))
    bytes_ = [permuted(shuffle(word, owner), c32(0), selector) for owner in owners]
    for step, chunk, scale in zip(steps, chunks, map(_pair, bytes_), strict=True):
        values = [x for value in chunk for x in ptx(CONVERT, value, scale, result_types=[i32()] * 2)]
        for start, four in zip(starts, (values[:4], values[4:]), strict=True):
            ptx(STORE_SHARED.format(offset=step), start, *four)


def _pair(scale) -> ir.Value:
    """An e8m0 scale, a byte, as a pair of bf16 numbers; NaN for 255."""
    normal = arith.shli(scale, c32(7))
    least = arith.cmpi(arith.CmpIPredicate.eq, scale, c32(0))
    nan = arith.cmpi(arith.CmpIPredicate.eq, scale, c32(255))
    scale = arith.select(nan, c32(0x7FC0), arith.select(least, c32(0x0040), normal))
    return permuted(scale, scale, c32(0x1010))


def _prefetch(zero, own, nbytes: int) -> None:
    """Brings the rows of a tile to the L2 cache."""
    pointer = mgpu.utils.memref_ptr(zero).type
    rows = [
        ptx("mov.b64 $0, {$1, $2};", *(shuffle(word, owner) for word in own), result_types=pointer)
        for owner in Lane().owners
    ]
    lanes.prefetch(rows, nbytes)
