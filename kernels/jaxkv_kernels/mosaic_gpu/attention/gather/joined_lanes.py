"""What one lane does in a gather of `fp8_v4` entries (`joined.py`): MLIR and inline PTX.

e4m3 values become float16, float32 and bf16, all of them exactly, and are multiplied by the power of two that is their
scale in bf16.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.attention.gather import lanes
from jaxkv_kernels.mosaic_gpu.attention.gather.lanes import COLUMN_TILE, STORE, Lane, shuffle
from jaxkv_kernels.mosaic_gpu.attention.gather.narrow import load_eight, permute
from jaxkv_kernels.mosaic_gpu.ptx.fragments import words
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, i32, i64, ptx

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


def load_found(slot_refs, count_ref, first_tiles: int, request, tile, length) -> list[Any]:
    """The slot of the lane's own row, and with `count_ref` the count of the first list; -1 for slots past `length`.

    Of two lists, the first one has `first_tiles` tiles, and `length` counts from its begin.
    """
    if len(slot_refs) == 1:
        return [lanes.load_slots(slot_refs[0], request, tile, length)]
    sizes = [ir.MemRefType(ref.type).shape[1] for ref in slot_refs]
    is_second = arith.cmpi(arith.CmpIPredicate.sge, tile, c32(first_tiles))

    def choose(second, first):
        return arith.select(is_second, second, first)

    before = choose(c32(first_tiles), c32(0))
    position = arith.addi(arith.muli(arith.subi(tile, before), c32(TILE)), Lane().own_row)
    length = choose(arith.subi(length, c32(first_tiles * TILE)), c32(sizes[0]))
    first, second = (mgpu.utils.memref_ptr(ref) for ref in slot_refs)
    place = arith.muli(arith.extui(i64(), request), choose(*(c64(4 * size) for size in reversed(sizes))))
    place = arith.addi(place, arith.extui(i64(), arith.shli(position, c32(2))))
    load = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.b32 $0, [$1]; }"
    start = at(choose(second, first), place)
    found = [ptx(load, start, position, length, result_types=i32(), has_side_effects=True)]
    if count_ref is not None:
        at_request = at(mgpu.utils.memref_ptr(count_ref), arith.muli(arith.extui(i64(), request), c64(4)))
        found.append(ptx("ld.global.b32 $0, [$1];", at_request, result_types=i32(), has_side_effects=True))
    return found


def locate(sources, first_tiles: int, zero, tile, found) -> list[Any]:
    """The address of the entry of the lane's own row, as two words, and its 8 scales, which are being loaded.

    `sources` lists, for each cache, its rows (`GatheredRows`), its reference, a layer, and the end of its slots.
    """
    nothing = mgpu.utils.memref_ptr(zero)
    slot, *counts = (shuffle(word, Lane().lane) for word in found)
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
    offset = sources[0][0].part("scales")
    return [*_halves(entry), *load_eight(scales, offset, by_half=False)]


def _halves(pointer) -> list[Any]:
    """The two words of an address."""
    return list(ptx("mov.b64 {$0, $1}, $2;", pointer, result_types=[i32()] * 2))


def is_known(zero, own) -> Any:
    """Whether an address is not that of the zeros for masked keys."""
    low, high = _halves(mgpu.utils.memref_ptr(zero))
    differs = [arith.cmpi(arith.CmpIPredicate.ne, a, b) for a, b in zip(own, (low, high), strict=True)]
    return arith.ori(*differs)


def load_unit(zero, own, unit) -> list[Any]:
    """The lane's chunks of a unit, from the addresses that the lanes which own its rows have."""
    lane, pointer = Lane(), mgpu.utils.memref_ptr(zero).type
    chunk = {"e4m3": lane.e4m3_chunk, "half": lane.rope_chunk, "rope": lane.chunk}[unit.kind]
    owners = lane.rope_owners if unit.kind == "half" else lane.owners
    addresses = [
        ptx("mov.b64 $0, {$1, $2};", *(shuffle(word, owner) for word in own), result_types=pointer) for owner in owners
    ]
    return lanes.load_chunks(addresses, chunk, unit.offset, LOAD)


def store_unit(ref, raw, scales, unit, stage: int) -> None:
    """Stores a unit as bf16 values, multiplied by the scales that the lanes which own its rows have."""
    lane = Lane()
    first = ((stage * 2 + unit.half) * 8 * COLUMN_TILES + unit.column_tile) * COLUMN_TILE
    chunks = [words(register) for register in raw.registers.flat]
    steps = [first + n * 2 * COLUMN_TILES * COLUMN_TILE for n in range(len(chunks))]
    if unit.kind == "rope":
        start = at(mgpu.utils.memref_ptr(ref), lane.place(lane.chunk, COLUMN_TILES))
        for step, chunk in zip(steps, chunks, strict=True):
            ptx(STORE.format(offset=step), start, *chunk)
        return
    if unit.kind == "half":
        # Lanes have their first two rows of the four, or their last two.
        rows = arith.muli(lane.second, c32(4 * COLUMN_TILES * COLUMN_TILE))
        place = arith.addi(lane.place(arith.shli(lane.rope_chunk, c32(1)), COLUMN_TILES), rows)
        owners, byte = lane.rope_owners, c32(2)
    else:
        second_tile = arith.muli(arith.shrui(lane.quarter, c32(1)), c32(COLUMN_TILE))
        chunk = arith.andi(arith.shli(lane.e4m3_chunk, c32(1)), c32(7))
        place = arith.addi(lane.place(chunk, COLUMN_TILES), second_tile)
        owners, byte = lane.owners, arith.addi(arith.shrui(lane.quarter, c32(1)), c32(unit.scale % 4))
    starts = [at(mgpu.utils.memref_ptr(ref), x) for x in (place, arith.xori(place, c32(16)))]
    word = scales[unit.scale // 4]
    selector = arith.addi(byte, c32(0x4440))
    bytes_ = [permute(shuffle(word, owner), c32(0), selector) for owner in owners]
    for step, chunk, scale in zip(steps, chunks, map(_pair, bytes_), strict=True):
        values = [x for value in chunk for x in ptx(CONVERT, value, scale, result_types=[i32()] * 2)]
        for start, four in zip(starts, (values[:4], values[4:]), strict=True):
            ptx(STORE.format(offset=step), start, *four)


def _pair(scale) -> Any:
    """An e8m0 scale, a byte, as a pair of bf16 numbers; NaN for 255."""
    normal = arith.shli(scale, c32(7))
    least = arith.cmpi(arith.CmpIPredicate.eq, scale, c32(0))
    nan = arith.cmpi(arith.CmpIPredicate.eq, scale, c32(255))
    found = arith.select(nan, c32(0x7FC0), arith.select(least, c32(0x0040), normal))
    return permute(found, found, c32(0x1010))


def prefetch(zero, own, nbytes: int) -> None:
    """Brings the rows of a tile to the L2 cache."""
    pointer = mgpu.utils.memref_ptr(zero).type
    rows = [
        ptx("mov.b64 $0, {$1, $2};", *(shuffle(word, owner) for word in own), result_types=pointer)
        for owner in Lane().owners
    ]
    lanes.prefetch(rows, nbytes)
