"""What one lane does in a gather (`rows.py` has the mapping of lanes): MLIR and inline PTX."""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.attention.gather.scaling import (
    EXPONENT,
    INVERSE,
    LARGEST,
    LEAST_FACTOR,
    MASKED_KEY,
    MOST_FACTOR,
    SMALLEST,
)

ptx = mgpu.utils.inline_ptx

THREADS, ROWS_PER_LANE = 128, 4
COLUMN_TILE = 1024
"""Bytes of 8 rows by 64 columns of 16 bits, which the swizzle permutes."""
LINE = 128
"""Bytes of a line of the L2 cache."""
ROWS = 16
"""Rows of which each lane has one."""
# Not `.nc`: such loads ptxas moves past the synchronisation after them, down to their first use.
LOAD = "ld.global.L1::evict_last.L2::256B.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
STORE = "st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};"
CONVERT = (
    "{ .reg .b16 low, high; .reg .b32 even, odd; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 even, low; "
    "cvt.rn.f16x2.e4m3x2 odd, high; mul.rn.f16x2 $0, even, $3; mul.rn.f16x2 $1, odd, $3; }"
)
"""Four e4m3 values times a pair of equal float16 scales: four float16 values."""


def i32() -> Any:
    """The type."""
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    """The type."""
    return ir.IntegerType.get_signless(64)


def c32(value: int) -> Any:
    """A constant of 32 bits."""
    return mgpu.c(value - (1 << 32) if value >= 1 << 31 else value, i32())


def c64(value: int) -> Any:
    """A constant of 64 bits."""
    return mgpu.c(value, i64())


def array(vectors, layout) -> Any:
    """int32 registers, vectors of four, as an array."""
    layout = layout.to_mgpu()
    held = np.empty((len(vectors),), dtype=object)
    for n, words in enumerate(vectors):
        held[n] = vector.from_elements(ir.VectorType.get((4,), i32()), list(words))
    return mgpu.FragmentedArray(_registers=held, _layout=layout, _is_signed=True)


def words(register) -> list[Any]:
    """The four words of a register."""
    at = (ir.DenseI64ArrayAttr.get([i]) for i in range(4))
    return [vector.extract(register, dynamic_position=[], static_position=i) for i in at]


class Lane:
    """Where the calling lane stands."""

    def __init__(self):
        thread = arith.remui(mgpu.utils.thread_idx(), c32(THREADS))
        self.lane = arith.andi(thread, c32(31))
        self.warp = arith.shrui(thread, c32(5))
        self.row = arith.addi(arith.shli(self.warp, c32(2)), arith.andi(self.lane, c32(3)))
        """Of every 16 rows."""
        self.second = arith.andi(arith.shrui(self.lane, c32(2)), c32(1))
        self.quarter = arith.shrui(self.lane, c32(3))

    @property
    def chunk(self) -> Any:
        """Of the 8 chunks of a row's unit, where a chunk takes as many bytes in shared memory."""
        return arith.addi(arith.shli(self.second, c32(2)), self.quarter)

    @property
    def e4m3_chunk(self) -> Any:
        """The same where it takes twice as many: chunks of the first column tile in quarters 0 and 1."""
        tile, odd = arith.shrui(self.quarter, c32(1)), arith.andi(self.quarter, c32(1))
        return arith.addi(arith.addi(arith.shli(tile, c32(2)), odd), arith.shli(self.second, c32(1)))

    def place(self, chunk, column_tiles: int) -> Any:
        """Bytes from a [64, 64 * column_tiles] tile to where this lane stores chunk 0 to 7 of its first row."""
        in_tile = arith.andi(self.row, c32(7))
        row_tile = arith.muli(arith.shrui(self.row, c32(3)), c32(column_tiles * COLUMN_TILE))
        swizzled = arith.shli(arith.xori(chunk, in_tile), c32(4))
        return arith.addi(arith.addi(row_tile, arith.shli(in_tile, c32(7))), swizzled)


def load_slots(ref, request, tile, length) -> list[Any]:
    """The slots of the lane's rows."""
    lane = Lane()
    width = ir.MemRefType(ref.type).shape[1]
    start = arith.addi(arith.muli(tile, c32(TILE)), lane.row)
    first = arith.addi(arith.muli(arith.extui(i64(), request), c64(4 * width)), _wide(arith.shli(start, c32(2))))
    first = _at(mgpu.utils.memref_ptr(ref), first)
    found = []
    for n in range(ROWS_PER_LANE):
        load = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; "
        load += f"@p ld.global.nc.b32 $0, [$1 + {4 * n * ROWS}]; }}"
        position = arith.addi(start, c32(n * ROWS))
        found.append(ptx(load, first, position, length, result_types=i32(), has_side_effects=True))
    return found


def valid(slots, limit) -> list[Any]:
    """Whether the slots of the lane's rows are the cache's."""
    limit = limit.registers.item()
    return [arith.cmpi(arith.CmpIPredicate.ult, slot, limit) for slot in words(slots.registers.item())]


class _Wide:
    """64-bit integers with operators."""

    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        return _Wide(arith.addi(self.value, other.value))

    def __mul__(self, other):
        return _Wide(arith.muli(self.value, other.value))


class _Narrow:
    """Non-negative 32-bit integers with operators."""

    def __init__(self, value):
        self.value = value

    def __floordiv__(self, other: int):
        return _Narrow(arith.divui(self.value, c32(other)))

    def __mod__(self, other: int):
        return _Narrow(arith.remui(self.value, c32(other)))


def rows(cache, kv, zero, slots, layer, limit) -> list[Any]:
    """Where the rows of slots begin; masked ones at `zero`."""
    known = valid(slots, limit)
    base, nothing = mgpu.utils.memref_ptr(kv), mgpu.utils.memref_ptr(zero)
    layer = _Narrow(layer.registers.item())
    found = []
    for slot, one_known in zip(words(slots.registers.item()), known, strict=True):
        offset = cache.offset(_Narrow(slot), layer, lambda n: _Wide(c64(n)), lambda x: _Wide(_wide(x.value)))
        found.append(arith.select(one_known, _at(base, offset.value), nothing))
    return found


def load_unit(addresses, unit, *, e4m3: bool) -> list[Any]:
    """The lane's chunks of a unit; all of the scales."""
    lane = Lane()
    if unit.kind != "scales":
        chunk = lane.e4m3_chunk if e4m3 and unit.kind != "rope" else lane.chunk
        addresses = [_at(address, _wide(arith.shli(chunk, c32(4)))) for address in addresses]
    load = LOAD.format(offset=unit.offset)
    found = [ptx(load, address, result_types=[i32()] * 4, has_side_effects=True) for address in addresses]
    ptx("bar.warp.sync 0xffffffff;", convergent=True)
    return found


def prefetch(rows, nbytes: int) -> None:
    """Brings whole rows to the L2 cache: the eight lanes of a row have a line each in turn."""
    for first in range(0, nbytes, 8 * LINE):
        offset = arith.addi(arith.shli(Lane().chunk, c32(LINE.bit_length() - 1)), c32(first))
        offset = _wide(arith.minui(offset, c32(nbytes - 1)))
        for address in rows:
            ptx("prefetch.global.L2 [$0];", _at(address, offset))


def scales(raw) -> tuple[list[Any], list[list[Any]]]:
    """The factors of the lane's rows as float32, and the scales to multiply by as pairs of float16."""
    f32 = ir.F32Type.get()
    factors, packed = [], []
    one = c32(0x3F800000)
    for register in raw.registers.flat:
        found = words(register)
        size = [arith.andi(word, c32(0x7FFFFFFF)) for word in found]
        most, least = size[0], size[0]
        for n in size[1:]:
            most, least = arith.maxui(most, n), arith.minui(least, n)
        safe = arith.andi(
            arith.cmpi(arith.CmpIPredicate.uge, least, c32(SMALLEST)),
            arith.cmpi(arith.CmpIPredicate.ult, most, c32(LARGEST)),
        )
        power = arith.andi(most, c32(EXPONENT))
        power = arith.maxui(arith.minui(power, c32(MOST_FACTOR)), c32(LEAST_FACTOR))
        power = arith.select(safe, one, power)
        inverse = arith.bitcast(f32, arith.subi(c32(INVERSE), power))
        ratios = [arith.mulf(arith.bitcast(f32, word), inverse) for word in found]
        factors.append(arith.bitcast(f32, power))
        for low, high in (ratios[:2], ratios[2:]):
            packed.append(ptx("cvt.rn.f16x2.f32 $0, $2, $1;", low, high, result_types=i32()))
    return factors, [packed[:4], packed[4:]]


def store_factors(stats, row: int, flag: tuple[int, int], known, factors) -> None:
    """Stores the factors of the lane's rows, and for its warp whether any is not 1."""
    f32, lane = ir.F32Type.get(), Lane()
    one, masked = (mgpu.c(value, f32) for value in (1.0, MASKED_KEY))
    base = mgpu.utils.memref_ptr(stats)
    width = 4 * ir.MemRefType(stats.type).shape[1]
    stores = arith.cmpi(arith.CmpIPredicate.ult, lane.lane, c32(4))
    start = _at(base, arith.shli(lane.row, c32(2)))
    special: Any = None
    for n, one_known in enumerate(known):
        factor = arith.select(one_known, one if factors is None else factors[n], masked)
        ptx(f"st.shared.f32 [$0 + {row * width + 4 * ROWS * n}], $1;", start, factor, predicate=stores)
        differs = arith.cmpf(arith.CmpFPredicate.UNE, factor, one)
        special = differs if special is None else arith.ori(special, differs)
    vote = (
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.f32 $0, 0f3F800000, 0f00000000, p; }"
    )
    found = ptx(vote, arith.extui(i32(), special), result_types=f32, has_side_effects=True, convergent=True)
    into = _at(base, arith.shli(lane.warp, c32(2)))
    first = arith.cmpi(arith.CmpIPredicate.eq, lane.lane, c32(0))
    ptx(f"st.shared.f32 [$0 + {flag[0] * width + 4 * flag[1]}], $1;", into, found, predicate=first)


def store_words(ref, raw, stage: int, tile: int | None) -> None:
    """Stores a unit as it is: column tile `tile` of a latent, or rotary keys."""
    _store_vectors(ref, [words(register) for register in raw.registers.flat], stage, tile)


def store_divided(ref, raw, stage: int, stats, row: int) -> None:
    """Stores rotary keys, bf16, divided by the factors that this warp has stored: powers of two."""
    width = 4 * ir.MemRefType(stats.type).shape[1]
    start = _at(mgpu.utils.memref_ptr(stats), arith.shli(Lane().row, c32(2)))
    divided = []
    for n, register in enumerate(raw.registers.flat):
        load = f"ld.shared.b32 $0, [$1 + {row * width + 4 * ROWS * n}];"
        factor = arith.andi(ptx(load, start, result_types=i32(), has_side_effects=True), c32(0x7FFFFFFF))
        inverse = arith.shrui(arith.subi(c32(INVERSE), factor), c32(16))
        inverse = arith.ori(inverse, arith.shli(inverse, c32(16)))
        divided.append(
            [ptx("mul.rn.bf16x2 $0, $1, $2;", word, inverse, result_types=i32()) for word in words(register)]
        )
    _store_vectors(ref, divided, stage, None)


def _store_vectors(ref, vectors, stage: int, tile: int | None) -> None:
    lane = Lane()
    column_tiles = 1 if tile is None else HALF // 64
    half, column = divmod(tile or 0, column_tiles)
    halves = 1 if tile is None else 2
    first = ((stage * halves + half) * 8 * column_tiles + column) * COLUMN_TILE
    start = _at(mgpu.utils.memref_ptr(ref), lane.place(lane.chunk, column_tiles))
    for n, vector_words in enumerate(vectors):
        ptx(STORE.format(offset=first + n * 2 * column_tiles * COLUMN_TILE), start, *vector_words)


def store_e4m3(ref, raw, scales, stage: int, group: int) -> None:
    """Stores a unit of e4m3 values, scale group `group` of a latent, as float16 times their scales."""
    lane = Lane()
    column_tiles = HALF // 64
    half, in_half = divmod(group, 2)
    first = ((stage * 2 + half) * 8 * column_tiles + 2 * in_half) * COLUMN_TILE
    chunk = arith.andi(arith.shli(lane.e4m3_chunk, c32(1)), c32(7))
    second_tile = arith.muli(arith.shrui(lane.quarter, c32(1)), c32(COLUMN_TILE))
    place, base = arith.addi(lane.place(chunk, column_tiles), second_tile), mgpu.utils.memref_ptr(ref)
    starts = _at(base, place), _at(base, arith.xori(place, c32(16)))
    pairs = [pair for register in scales.registers.flat for pair in words(register)]
    splat = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; mov.b32 $0, {%s, %s}; }"
    splat %= ("low", "low") if group % 2 == 0 else ("high", "high")
    for n, register in enumerate(raw.registers.flat):
        scale = ptx(splat, pairs[2 * n + group // 2], result_types=i32())
        values = [value for word in words(register) for value in ptx(CONVERT, word, scale, result_types=[i32()] * 2)]
        store = STORE.format(offset=first + n * 2 * column_tiles * COLUMN_TILE)
        for start, four in zip(starts, (values[:4], values[4:]), strict=True):
            ptx(store, start, *four)


def warpgroup_barrier() -> None:
    """Waits for all lanes of the warpgroup."""
    mgpu.utils.warpgroup_barrier()


def _wide(x) -> Any:
    """A non-negative integer in 64 bits."""
    return arith.extui(i64(), x)


def _at(pointer, offset) -> Any:
    """So many bytes, a register, from a pointer."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))
