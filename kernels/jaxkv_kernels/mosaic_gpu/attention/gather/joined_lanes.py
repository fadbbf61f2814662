"""What one lane does in a gather of `fp8_v4` entries (`joined.py`): MLIR and inline PTX.

e4m3 values become bf16 by integer operations.  The 7 bits of exponent and mantissa, moved to the same bits of a bf16,
are 2**-120 times the value, subnormals included; a product with 2**(120 + exponent of the scale) is exact.  This is
right for scales up to 2**7 and all values but NaN.  Chunks with others are converted by way of float32.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.attention.gather import lanes
from jaxkv_kernels.mosaic_gpu.attention.gather.lanes import COLUMN_TILE, STORE, Lane, shuffle
from jaxkv_kernels.mosaic_gpu.attention.gather.narrow import load_eight, permute
from jaxkv_kernels.mosaic_gpu.runtime.elements import words
from jaxkv_kernels.mosaic_gpu.runtime.ptx import at, c32, c64, i32, i64, ptx

COLUMN_TILES = HALF // 64
LARGEST_SCALE = 127 + 7
"""The largest e8m0 scale, as a byte, for which the product with 2**120 is a bf16 number."""
CONVERT = (
    "{ .reg .b32 high, low, even, odd;"
    " shr.u32 high, $2, 4; and.b32 high, high, 0x07070707; lop3.b32 high, $2, 0x80808080, high, 0xEA;"
    " shl.b32 low, $2, 4; and.b32 low, low, 0xF0F0F0F0;"
    " prmt.b32 even, low, high, 0x5140; prmt.b32 odd, low, high, 0x7362;"
    " mul.rn.bf16x2 $0, even, $3; mul.rn.bf16x2 $1, odd, $3; }"
)
"""Four e4m3 values times a pair of equal bf16 scales, 2**120 times as large: four bf16 values."""
CONVERT_ANY = (
    "{ .reg .b16 low, high, a, b; .reg .b32 even, odd; .reg .f32 x, y; mov.b32 {low, high}, $2;"
    " cvt.rn.f16x2.e4m3x2 even, low; cvt.rn.f16x2.e4m3x2 odd, high;"
    " mov.b32 {a, b}, even; cvt.f32.f16 x, a; cvt.f32.f16 y, b; mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3;"
    " cvt.rn.bf16x2.f32 $0, y, x;"
    " mov.b32 {a, b}, odd; cvt.f32.f16 x, a; cvt.f32.f16 y, b; mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3;"
    " cvt.rn.bf16x2.f32 $1, y, x; }"
)
"""Four e4m3 values times a float32 scale: four bf16 values.  Right for all values and scales, but slower."""
NAN = "{ .reg .b32 t; and.b32 t, $1, $2; add.u32 t, t, 0x01010101; or.b32 $0, t, $3; }"
"""Sets the sign of bytes whose other bits are all 1, of the bits that $2 masks; the other operand is or-ed to them."""


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
    if unit.scale is None:
        chunk, owners = lane.chunk, lane.owners[unit.first_row : unit.first_row + 2]
    else:
        chunk, owners = lane.rope_chunk, lane.rope_owners
    addresses = [
        ptx("mov.b64 $0, {$1, $2};", *(shuffle(word, owner) for word in own), result_types=pointer) for owner in owners
    ]
    return lanes.load_chunks(addresses, chunk, unit.offset)


def store_unit(ref, raw, scales, unit, stage: int) -> None:
    """Stores a unit as bf16 values, multiplied by the scales that the lanes which own its rows have."""
    lane, row_step = Lane(), 2 * COLUMN_TILES * COLUMN_TILE
    first = ((stage * 2 + unit.half) * 8 * COLUMN_TILES + unit.column_tile) * COLUMN_TILE
    chunks = [words(register) for register in raw.registers.flat]
    steps = [first + (unit.first_row + n) * row_step for n in range(len(chunks))]
    if unit.scale is None:
        start = at(mgpu.utils.memref_ptr(ref), lane.place(lane.chunk, COLUMN_TILES))
        for step, chunk in zip(steps, chunks, strict=True):
            ptx(STORE.format(offset=step), start, *chunk)
        return
    # Lanes have their first two rows of the four, or their last two.
    place = lane.place(arith.shli(lane.rope_chunk, c32(1)), COLUMN_TILES)
    place = arith.addi(place, arith.muli(lane.second, c32(2 * row_step)))
    starts = [at(mgpu.utils.memref_ptr(ref), x) for x in (place, arith.xori(place, c32(16)))]
    word = scales[unit.scale // 4]
    selector = c32(0x4440 + unit.scale % 4)
    bytes_ = [permute(shuffle(word, owner), c32(0), selector) for owner in lane.rope_owners]
    mask = shuffle(c32(0x7F7F7F7F), lane.lane)  # opaque: otherwise ptxas could test the words as soon as they arrive
    found = c32(0)
    for chunk in chunks:
        for value in chunk:
            found = ptx(NAN, value, mask, found, result_types=i32())
    special = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(found, c32(0x80808080)), c32(0))
    for scale in bytes_:
        special = arith.ori(special, arith.cmpi(arith.CmpIPredicate.ugt, scale, c32(LARGEST_SCALE)))

    def store(convert, factor):
        for step, chunk, scale in zip(steps, chunks, bytes_, strict=True):
            by = factor(scale)
            values = [x for value in chunk for x in ptx(convert, value, by, result_types=[i32()] * 2)]
            for start, four in zip(starts, (values[:4], values[4:]), strict=True):
                ptx(STORE.format(offset=step), start, *four)

    with mgpu.utils.when(special):
        store(CONVERT_ANY, _float32)
    with mgpu.utils.when(arith.xori(special, mgpu.c(1, ir.IntegerType.get_signless(1)))):
        store(CONVERT, _pair)


def _pair(scale) -> Any:
    """2**120 times a scale, a byte, as a pair of bf16 numbers."""
    both = 0x00800080
    return arith.addi(arith.muli(scale, c32(both)), c32(120 * both))


def _float32(scale) -> Any:
    """A scale, a byte, as float32; NaN for 255."""
    bits = arith.shli(scale, c32(23))
    nan = arith.cmpi(arith.CmpIPredicate.eq, scale, c32(255))
    return arith.bitcast(ir.F32Type.get(), arith.select(nan, c32(0x7FC00000), bits))


def prefetch(zero, own, nbytes: int) -> None:
    """Brings the rows of a tile to the L2 cache."""
    pointer = mgpu.utils.memref_ptr(zero).type
    rows = [
        ptx("mov.b64 $0, {$1, $2};", *(shuffle(word, owner) for word in own), result_types=pointer)
        for owner in Lane().owners
    ]
    lanes.prefetch(rows, nbytes)
