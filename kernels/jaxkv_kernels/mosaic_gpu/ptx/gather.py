"""What one lane does in a gather of keys: MLIR and inline PTX.  `gather_keys.py` has the mapping of lanes.

e2m1 values become e4m3 first: their four bits, moved to the right places of a byte, are an e4m3 value of 2**-6 times
theirs.  The conversion of e4m3 to float16, which the hardware has, is exact, and 2**6 is part of the scale.

Scales that are powers of two are multiplied into e2m1 values as float16 powers of two, whose first byte has the whole
number.  So a token's scales, 8 in two words, become 8 such bytes, and a lane that needs a scale copies its byte to both
halves of a word.
"""

from collections.abc import Callable, Sequence

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.barriers import arrive, arrive_for_copies
from jaxkv_kernels.mosaic_gpu.ptx.block_tables import BlockTables, slot_of
from jaxkv_kernels.mosaic_gpu.ptx.conversions import E4M3_TO_F16
from jaxkv_kernels.mosaic_gpu.ptx.fragments import permuted, words
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, i32, i64, ptx
from jaxkv_kernels.mosaic_gpu.ptx.loads import COLUMN_TILE, LOAD_SHARED
from jaxkv_kernels.mosaic_gpu.ptx.stores import STORE_SHARED
from jaxkv_kernels.mosaic_gpu.scaling import (
    E8M0_RANGE,
    EXPONENT,
    INVERSE,
    LARGEST,
    LEAST_FACTOR,
    MASKED_KEY,
    MOST_FACTOR,
    SMALLEST,
)
from jaxkv_kernels.mosaic_gpu.sizes import HALF, TILE

THREADS, ROWS_PER_LANE = 128, 4
LINE = 128
"""Bytes of a line of the L2 cache."""
WARP_ROWS = 16
"""Rows of a tile that a warp loads."""
ROPE_TILE = 8 * COLUMN_TILE
"""Bytes of the rotary keys of a tile."""
COPY = "cp.async.cg.shared.global.L2::256B [$0 + {into}], [$1 + {offset}], 16, $2;"
"""Copies 16 bytes to shared memory.  If the size, the last operand, is 0 instead of 16, stores zeros and reads
nothing."""
# Not `.nc`: ptxas would move such loads past the synchronisation that follows them, down to their first use.
LOAD = "ld.global.L1::evict_last.L2::256B.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
CONVERT = (
    "{ .reg .b16 low, high; .reg .b32 even, odd; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 even, low; "
    "cvt.rn.f16x2.e4m3x2 odd, high; mul.rn.f16x2 $0, even, $3; mul.rn.f16x2 $1, odd, $3; }"
)
"""Four e4m3 values times a pair of equal float16 scales: four float16 values."""
CONVERT_E2M1 = (
    "{ .reg .b32 even, odd, t; .reg .b16 a, b, c, d;"
    " shl.b32 t, $4, 4; and.b32 t, t, 0x80808080; shl.b32 even, $4, 2; lop3.b32 even, even, 0x1C1C1C1C, t, 0xEA;"
    " and.b32 t, $4, 0x80808080; shr.b32 odd, $4, 2; lop3.b32 odd, odd, 0x1C1C1C1C, t, 0xEA;"
    " prmt.b32 t, even, odd, 0x5140; mov.b32 {a, b}, t; prmt.b32 t, even, odd, 0x7362; mov.b32 {c, d}, t;"
    " cvt.rn.f16x2.e4m3x2 even, a; mul.rn.f16x2 $0, even, $5; cvt.rn.f16x2.e4m3x2 odd, b; mul.rn.f16x2 $1, odd, $5;"
    " cvt.rn.f16x2.e4m3x2 even, c; mul.rn.f16x2 $2, even, $5; cvt.rn.f16x2.e4m3x2 odd, d; mul.rn.f16x2 $3, odd, $5; }"
)
"""Eight e2m1 values of a word, times a pair of equal float16 scales, as four words of two float16 values.

`even` and `odd` are the even and the odd ones of the values as e4m3."""
LOAD_PAIR = "ld.global.L1::evict_last.L2::256B.v2.b32 {{$0, $1}}, [$2 + {offset}];"


def shuffle(word, lane) -> ir.Value:
    """The word of another lane of the warp.

    Loaded words are passed through a shuffle before they are used.  ptxas would move arithmetic on them up to
    the load, past barriers, and lanes would wait there for the load.  It does not move a shuffle.
    """
    return ptx(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", word, lane, result_types=i32(), has_side_effects=True, convergent=True
    )


class Lane:
    """The position of the calling lane."""

    def __init__(self):
        thread = arith.remui(mgpu.utils.thread_idx(), c32(THREADS))
        self.lane = arith.andi(thread, c32(31))
        self.warp = arith.shrui(thread, c32(5))
        self.in_warp = self._in_warp
        """The index of the lane's row among the 4 that its warp loads of every 16 rows."""
        self.row = arith.addi(arith.shli(self.warp, c32(2)), self.in_warp)
        """The number of that row among the 16."""
        self.second = arith.andi(arith.shrui(self.lane, c32(2)), c32(1))
        self.quarter = arith.shrui(self.lane, c32(3))

    @property
    def _in_warp(self) -> ir.Value:
        return arith.andi(self.lane, c32(3))

    @property
    def own(self) -> ir.Value:
        """The lane's own row among the 16 of the warp.  Lanes that are 16 apart have the same."""
        return arith.andi(self.lane, c32(WARP_ROWS - 1))

    @property
    def own_row(self) -> ir.Value:
        """The same among the 64 rows of a tile."""
        in_group = arith.addi(arith.shli(self.warp, c32(2)), arith.andi(self.lane, c32(3)))
        return arith.addi(arith.shli(arith.shrui(self.own, c32(2)), c32(4)), in_group)

    @property
    def owners(self) -> list[ir.Value]:
        """The lanes whose own rows are those that this lane loads chunks of."""
        return [arith.addi(self.in_warp, c32(4 * n)) for n in range(ROWS_PER_LANE)]

    @property
    def rope_owners(self) -> list[ir.Value]:
        """The same for e4m3 rotary keys, of which a lane loads chunks of two rows: its first two or its last two."""
        first = arith.addi(self.in_warp, arith.shli(self.second, c32(3)))
        return [first, arith.addi(first, c32(4))]

    @property
    def chunk(self) -> ir.Value:
        """Which of the 8 chunks of a line of a row the lane has, for values that are stored as they are."""
        return arith.addi(arith.shli(self.second, c32(2)), self.quarter)

    @property
    def e4m3_chunk(self) -> ir.Value:
        """The same for e4m3 values, stored as float16: quarters 0 and 1 have the chunks of the first column tile."""
        tile, odd = arith.shrui(self.quarter, c32(1)), arith.andi(self.quarter, c32(1))
        return arith.addi(arith.addi(arith.shli(tile, c32(2)), odd), arith.shli(self.second, c32(1)))

    @property
    def e2m1_chunk(self) -> ir.Value:
        """The same for e2m1 values, stored as float16: a quarter has the two chunks of a column tile."""
        return arith.addi(arith.shli(self.quarter, c32(1)), self.second)

    @property
    def rope_chunk(self) -> ir.Value:
        """The same for e4m3 rotary keys (4 chunks).  The last two rows have another order, to use other banks."""
        return arith.xori(self.quarter, arith.shli(self.second, c32(1)))

    def swizzled_offset(self, chunk, column_tiles: int) -> ir.Value:
        """Where this lane stores `chunk` (0 to 7) of its first row: a byte offset in a [64, 64 * column_tiles] tile."""
        in_tile = arith.andi(self.row, c32(7))
        row_tile = arith.muli(arith.shrui(self.row, c32(3)), c32(column_tiles * COLUMN_TILE))
        swizzled = arith.shli(arith.xori(chunk, in_tile), c32(4))
        return arith.addi(arith.addi(row_tile, arith.shli(in_tile, c32(7))), swizzled)


class CopyLane(Lane):
    """A lane that copies without registers: eight consecutive lanes copy a line (128 bytes) of one row."""

    @property
    def _in_warp(self) -> ir.Value:
        return arith.shrui(self.lane, c32(3))

    @property
    def chunk(self) -> ir.Value:
        """Which chunk of a line the lane has."""
        return arith.andi(self.lane, c32(7))


def upper_half() -> ir.Value:
    """Whether the lane is one of the last 16 of its warp: 0 or 1."""
    return arith.shrui(Lane().lane, c32(WARP_ROWS.bit_length() - 1))


def load_slots(slots, request, tile, length) -> ir.Value:
    """The slot of the lane's own row; -1 at positions from `length` on.  `slots` are `gather_keys.Slots`."""
    ref = slots.of
    position = arith.addi(arith.muli(tile, c32(TILE)), Lane().own_row)
    if slots.block_size is not None:
        inside = arith.cmpi(arith.CmpIPredicate.slt, position, length)
        if slots.begins is not None:
            begin = at(mgpu.utils.memref_ptr(slots.begins), _wide(arith.shli(request, c32(2))))
            begin = ptx("ld.global.b32 $0, [$1];", begin, result_types=i32(), has_side_effects=True)
            position = arith.addi(position, begin)
        tables = BlockTables(ref, slots.block_size, slots.tokens)
        return slot_of(tables, request, arith.select(inside, position, c32(-1)))
    return slot_in_list(ref, request, position, length)


def slot_in_list(ref, request, position, length) -> ir.Value:
    """The slot at a position of row `request` of lists [N, K]; -1 at positions from `length` on."""
    width = ir.MemRefType(ref.type).shape[1]
    first = arith.addi(arith.muli(arith.extui(i64(), request), c64(4 * width)), _wide(arith.shli(position, c32(2))))
    load = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.b32 $0, [$1]; }"
    return ptx(load, at(mgpu.utils.memref_ptr(ref), first), position, length, result_types=i32(), has_side_effects=True)


def spread(slot, owners: list[ir.Value]) -> list[ir.Value]:
    """The slots of the rows that a lane loads chunks of: those of the own rows of the lanes `owners`."""
    return [shuffle(slot, owner) for owner in owners]


def valid(slot, limit) -> ir.Value:
    """Whether a slot lies in the cache."""
    return arith.cmpi(arith.CmpIPredicate.ult, slot, limit)


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


def address(cache, kv, slot, layer, region: int = 0) -> ir.Value:
    """The address at which the row of a slot begins, or what a region of a split page has of it."""
    offset = cache.offset(
        _Narrow(slot), _Narrow(layer), lambda n: _Wide(c64(n)), lambda x: _Wide(_wide(x.value)), region
    )
    return at(mgpu.utils.memref_ptr(kv), offset.value)


def rows(cache, kv, zero, slots, layer, limit) -> list[ir.Value]:
    """The addresses at which the rows of slots begin; for masked keys, the address of `zero`."""
    nothing = mgpu.utils.memref_ptr(zero)
    return [arith.select(valid(slot, limit), address(cache, kv, slot, layer), nothing) for slot in slots]


def _wide(x) -> ir.Value:
    """A non-negative integer in 64 bits."""
    return arith.extui(i64(), x)


def prefetch(rows, nbytes: int) -> None:
    """Brings whole rows to the L2 cache: the eight lanes that share a row prefetch a line each at a time."""
    for first in range(0, nbytes, 8 * LINE):
        offset = arith.addi(arith.shli(Lane().chunk, c32(LINE.bit_length() - 1)), c32(first))
        offset = _wide(arith.minui(offset, c32(nbytes - 1)))
        for address in rows:
            ptx("prefetch.global.L2 [$0];", at(address, offset))


def copy_rows(cache, kv, slot, layer, limit, parts) -> None:
    """Starts to copy lines of a tile's rows, and zeros for masked keys.  `slot` is the slot of the lane's own row.

    `parts` lists what to copy.  Each part is a tuple: its first byte in an entry, its number of lines, the shared
    memory that it goes to, the byte there at which the first line of the tile's first row begins, and the number of
    column tiles per group of 8 rows.
    """
    lane = CopyLane()
    chunks = []
    for row in spread(slot, lane.owners):
        known = valid(row, limit)
        start = address(cache, kv, arith.select(known, row, c32(0)), layer)
        chunks += [(*_chunks([start], lane.chunk), arith.select(known, c32(16), c32(0)))]
    for offset, lines, ref, first, column_tiles in parts:
        destination = at(mgpu.utils.memref_ptr(ref), lane.swizzled_offset(lane.chunk, column_tiles))
        for n, (start, size) in enumerate(chunks):
            for line in range(lines):
                into = first + (n * 2 * column_tiles + line) * COLUMN_TILE
                ptx(COPY.format(into=into, offset=offset + line * LINE), destination, start, size)


def copy_rope(addresses, offset: int, ref, stage: int) -> None:
    """Starts to copy rotary keys to shared memory as they are."""
    lane = Lane()
    start = at(mgpu.utils.memref_ptr(ref), lane.swizzled_offset(lane.chunk, 1))
    for n, address in enumerate(_chunks(addresses, lane.chunk)):
        into = stage * ROPE_TILE + n * 2 * COLUMN_TILE
        ptx(f"cp.async.cg.shared.global.L2::128B [$0 + {into}], [$1 + {offset}], 16;", start, address)


def load_unit(addresses, zero, unit, stored: str) -> list[tuple[ir.Value, ...]]:
    """The lane's chunks of a unit of latents; zeros, which are at `zero`, past the end of a latent."""
    chunk = Lane().e4m3_chunk if stored == "e4m3" else Lane().e2m1_chunk
    if unit.chunks < LINE // 16:
        inside = arith.cmpi(arith.CmpIPredicate.ult, chunk, c32(unit.chunks))
        nothing = mgpu.utils.memref_ptr(zero)
        addresses = [arith.select(inside, address, nothing) for address in addresses]
    return load_chunks(addresses, chunk, unit.offset)


def load_rope(addresses, offset: int) -> list[tuple[ir.Value, ...]]:
    """The lane's chunks of e4m3 rotary keys."""
    return load_chunks(addresses, Lane().rope_chunk, offset)


def load_chunks(addresses, chunk, offset: int, load: str = LOAD) -> list[tuple[ir.Value, ...]]:
    """16 bytes of each row: chunk number `chunk` of those that begin at `offset`."""
    load = load.format(offset=offset)
    addresses = _chunks(addresses, chunk)
    loaded = [ptx(load, address, result_types=[i32()] * 4, has_side_effects=True) for address in addresses]
    ptx("bar.warp.sync 0xffffffff;", convergent=True)
    return loaded


def _chunks(addresses, chunk) -> list[ir.Value]:
    """The addresses of the lane's chunk of each row."""
    return [at(address, _wide(arith.shli(chunk, c32(4)))) for address in addresses]


def load_scales(address, offset: int, *, by_half: bool) -> list[ir.Value]:
    """16 bytes of scales of the lane's own row; with `by_half`, the next 16 in the last 16 lanes of a warp."""
    if by_half:
        address = at(address, _wide(arith.andi(Lane().lane, c32(WARP_ROWS))))
    return list(ptx(LOAD.format(offset=offset), address, result_types=[i32()] * 4, has_side_effects=True))


def load_eight(address, offset: int, *, by_half: bool) -> list[ir.Value]:
    """8 bytes at `offset` of the lane's own row; with `by_half`, the next 8 in the last 16 lanes of a warp."""
    if by_half:
        address = at(address, _wide(arith.shli(upper_half(), c32(3))))
    return list(ptx(LOAD_PAIR.format(offset=offset), address, result_types=[i32()] * 2, has_side_effects=True))


def scales(raw) -> tuple[ir.Value, list[ir.Value]]:
    """From the scales of a row: its factor as float32; the scales to multiply by, as pairs of float16."""
    f32, one, lane = ir.F32Type.get(), c32(0x3F800000), Lane().lane
    words_of_row = [shuffle(word, lane) for word in raw]
    size = [arith.andi(word, c32(0x7FFFFFFF)) for word in words_of_row]
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
    ratios = [arith.mulf(arith.bitcast(f32, word), inverse) for word in words_of_row]
    pairs = [ptx("cvt.rn.f16x2.f32 $0, $2, $1;", *pair, result_types=i32()) for pair in (ratios[:2], ratios[2:])]
    return arith.bitcast(f32, power), pairs


def e8m0_scales(raw, *, padding: int) -> tuple[ir.Value, Sequence[ir.Value]]:
    """From the 16 scales of a row of e2m1 values, of which lanes that are 16 apart have 8 each: its factor, as float32.

    Also the scales to multiply by, as the first bytes of float16 numbers.  The last `padding` bytes are not scales.
    """
    lane, (base, least_safe, most_safe) = Lane().lane, E8M0_RANGE
    first, second = (shuffle(word, lane) for word in raw)
    if padding:
        # Scales before the padding stand in for it.
        whole = permuted(second, second, c32(0x1010))
        second = arith.select(arith.cmpi(arith.CmpIPredicate.ne, upper_half(), c32(0)), whole, second)
    mask = c32(0x00FF00FF)
    pairs = [arith.andi(word, mask) for word in (first, second)]
    pairs += [arith.andi(arith.shrui(word, c32(8)), mask) for word in (first, second)]
    most, least = _extreme("max", pairs), _extreme("min", pairs)
    safe = arith.andi(
        arith.cmpi(arith.CmpIPredicate.uge, least, c32(least_safe)),
        arith.cmpi(arith.CmpIPredicate.ule, most, c32(most_safe)),
    )
    power = arith.maxui(arith.minui(most, c32(253)), c32(27))
    power = arith.select(safe, c32(127), power)
    # The exponent of a scale divided by the factor, in float16: less than 1 becomes 0, which is below 2**-14.
    negative = arith.subi(c32(base), power)
    negative = permuted(negative, negative, c32(0x1010))
    exponents = [_pairwise("add.s16x2", pair, negative) for pair in pairs]
    exponents = [arith.shli(_pairwise("max.s16x2", pair, c32(0)), c32(2)) for pair in exponents]
    scales = [arith.ori(low, arith.shli(high, c32(8))) for low, high in zip(exponents[:2], exponents[2:], strict=True)]
    nan = arith.cmpi(arith.CmpIPredicate.eq, most, c32(255))
    scales = [arith.select(nan, c32(0x7E7E7E7E), word) for word in scales]
    return arith.bitcast(ir.F32Type.get(), arith.shli(power, c32(23))), scales


def _extreme(which: str, pairs) -> ir.Value:
    """The largest or smallest of pairs of 16-bit numbers, also of the lane 16 apart."""
    extreme = pairs[0]
    for pair in pairs[1:]:
        extreme = _pairwise(f"{which}.u16x2", extreme, pair)
    extreme = _pairwise(f"{which}.u16x2", extreme, permuted(extreme, extreme, c32(0x1032)))
    extreme = _pairwise(f"{which}.u16x2", extreme, shuffle(extreme, arith.xori(Lane().lane, c32(WARP_ROWS))))
    return arith.andi(extreme, c32(0xFFFF))


def _pairwise(operation: str, a, b) -> ir.Value:
    return ptx(f"{operation} $0, $1, $2;", a, b, result_types=i32())


def e8m0_of_e2m1(scales, owner, half: int) -> list[ir.Value]:
    """The scale of the lane's chunk, 32 values of half `half`, as a pair of float16, twice."""
    owner = arith.addi(owner, c32(half * WARP_ROWS))
    scale = _splat(shuffle(scales[0], owner), shuffle(scales[1], owner), Lane().e2m1_chunk)
    return [scale, scale]


def _splat(low, high, number) -> ir.Value:
    """The byte `number` of two words as the first byte of both float16 numbers of a word."""
    byte = permuted(low, high, arith.muli(number, c32(0x1111)))
    return arith.andi(byte, c32(0xFF00FF00))


def e4m3_of_e2m1(raw, owner, half: int) -> list[ir.Value]:
    """The scales of the two tiles of 16 values of the lane's chunk, times 2**6, as pairs of float16.

    `raw` has 16 of the 32 scales of a row, the other 16 being in the lane 16 apart: as stored by `nvfp4_ds_mla`, scale
    t at byte 8 * (t % 4) + t // 4.
    """
    lane = Lane()
    owner = arith.addi(owner, arith.shli(lane.second, c32(WARP_ROWS.bit_length() - 1)))
    first, second = (shuffle(raw[2 * n + half], owner) for n in range(2))
    selector = arith.addi(arith.muli(lane.quarter, c32(0x11)), c32(0x40))
    both = permuted(first, second, selector)
    convert = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }"
    both = ptx(convert, both, result_types=i32())
    both = ptx("mul.rn.f16x2 $0, $1, $2;", both, c32(0x54005400), result_types=i32())
    return [permuted(both, both, c32(selector)) for selector in (0x1010, 0x3232)]


def scale_of_group(pairs, owner, group: int) -> ir.Value:
    """The scale of group `group` of the row of lane `owner`, as a pair; `pairs` are what `scales` returned."""
    splat = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; mov.b32 $0, {%s, %s}; }"
    splat %= ("low", "low") if group % 2 == 0 else ("high", "high")
    return ptx(splat, shuffle(pairs[group // 2], owner), result_types=i32())


def store_factors(stats, row: int, flag: tuple[int, int], known, factor) -> tuple[ir.Value, ir.Value]:
    """Stores the factor of the lane's own row, and for its warp whether any is not 1.  Returns both."""
    f32, lane = ir.F32Type.get(), Lane()
    one, masked = (mgpu.c(value, f32) for value in (1.0, MASKED_KEY))
    base = mgpu.utils.memref_ptr(stats)
    width = 4 * ir.MemRefType(stats.type).shape[1]
    factor = arith.select(known, one if factor is None else factor, masked)
    into = at(base, arith.shli(lane.own_row, c32(2)))
    stores = arith.cmpi(arith.CmpIPredicate.ult, lane.lane, c32(WARP_ROWS))
    ptx(f"st.shared.f32 [$0 + {row * width}], $1;", into, factor, predicate=stores)
    special = arith.cmpf(arith.CmpFPredicate.UNE, factor, one)
    vote = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.b32 $0, 0x3F800000, 0, p; }"
    any_special = ptx(vote, arith.extui(i32(), special), result_types=i32(), has_side_effects=True, convergent=True)
    into = at(base, arith.shli(lane.warp, c32(2)))
    first = arith.cmpi(arith.CmpIPredicate.eq, lane.lane, c32(0))
    ptx(f"st.shared.b32 [$0 + {flag[0] * width + 4 * flag[1]}], $1;", into, any_special, predicate=first)
    return factor, any_special


def inverse_pair(factor) -> ir.Value:
    """1 / |factor|, a power of two, twice in bf16."""
    factor = arith.andi(arith.bitcast(i32(), factor), c32(0x7FFFFFFF))
    inverse = arith.shrui(arith.subi(c32(INVERSE), factor), c32(16))
    return arith.ori(inverse, arith.shli(inverse, c32(16)))


def finish_rope(ref, stage: int, special, inverse, barrier) -> None:
    """Arrives at `barrier` once the bf16 rotary keys that this lane copies are in shared memory.

    If `special` is not 0, waits for them, and multiplies them by the inverse factors of rows.  It is the same for all
    lanes of a warp.
    """
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ne, special, c32(0))):
        ptx("cp.async.wait_all;")
        lane = Lane()
        start = at(mgpu.utils.memref_ptr(ref), lane.swizzled_offset(lane.chunk, 1))
        for n, owner in enumerate(lane.owners):
            offset = stage * ROPE_TILE + n * 2 * COLUMN_TILE
            by = shuffle(inverse, owner)
            loaded = ptx(LOAD_SHARED.format(offset=offset), start, result_types=[i32()] * 4, has_side_effects=True)
            divided = [ptx("mul.rn.bf16x2 $0, $1, $2;", word, by, result_types=i32()) for word in loaded]
            ptx(STORE_SHARED.format(offset=offset), start, *divided)
        arrive(barrier)
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, special, c32(0))):
        arrive_for_copies(barrier)


def store_e4m3(ref, raw, scale_of: Callable[[ir.Value], ir.Value] | None, stage: int, group: int) -> None:
    """Stores a unit of e4m3 values, group `group` of a latent, as float16 times their scales.

    `scale_of` returns the scale for the row of a lane; None if entries have no scales of their own.
    """
    lane = Lane()
    column_tiles = HALF // 64
    half, in_half = divmod(group, 2)
    first = ((stage * 2 + half) * 8 * column_tiles + 2 * in_half) * COLUMN_TILE
    chunk = arith.andi(arith.shli(lane.e4m3_chunk, c32(1)), c32(7))
    second_tile = arith.muli(arith.shrui(lane.quarter, c32(1)), c32(COLUMN_TILE))
    offset = arith.addi(lane.swizzled_offset(chunk, column_tiles), second_tile)
    starts = [at(mgpu.utils.memref_ptr(ref), x) for x in (offset, arith.xori(offset, c32(16)))]
    for n, (register, owner) in enumerate(zip(raw.registers.flat, lane.owners, strict=True)):
        values = _converted(register, *([] if scale_of is None else [scale_of(owner)]))
        for start, four in zip(starts, (values[:4], values[4:]), strict=True):
            ptx(STORE_SHARED.format(offset=first + n * 2 * column_tiles * COLUMN_TILE), start, *four)


def store_e4m3_rope(ref, raw, stage: int) -> None:
    """Stores e4m3 rotary keys, which `load_rope` loaded, as float16."""
    lane = Lane()
    rows = arith.muli(lane.second, c32(4 * COLUMN_TILE))
    offset = arith.addi(lane.swizzled_offset(arith.shli(lane.rope_chunk, c32(1)), 1), rows)
    starts = [at(mgpu.utils.memref_ptr(ref), x) for x in (offset, arith.xori(offset, c32(16)))]
    for n, register in enumerate(raw.registers.flat):
        values = _converted(register)
        for start, four in zip(starts, (values[:4], values[4:]), strict=True):
            ptx(STORE_SHARED.format(offset=stage * ROPE_TILE + n * 2 * COLUMN_TILE), start, *four)


def _converted(register, *scale) -> list[ir.Value]:
    """A chunk of e4m3 values as words of float16 values, multiplied by a pair of equal scales if there is one."""
    convert = CONVERT if scale else E4M3_TO_F16
    return [value for word in words(register) for value in ptx(convert, word, *scale, result_types=[i32()] * 2)]


def store_e2m1(ref, raw, scales_of: Callable[[ir.Value], list[ir.Value]], stage: int, half: int) -> None:
    """Stores half a latent of e2m1 values as float16 times the scales of each row's owner, one per 16 values."""
    lane = Lane()
    column_tiles = HALF // 64
    first = (stage * 2 + half) * 8 * column_tiles * COLUMN_TILE
    offset = arith.addi(
        lane.swizzled_offset(arith.shli(lane.second, c32(2)), column_tiles), arith.muli(lane.quarter, c32(COLUMN_TILE))
    )
    starts = [at(mgpu.utils.memref_ptr(ref), arith.xori(offset, c32(16 * n))) for n in range(4)]
    for n, (register, owner) in enumerate(zip(raw.registers.flat, lane.owners, strict=True)):
        scales = scales_of(owner)
        for i, (word, start) in enumerate(zip(words(register), starts, strict=True)):
            values = ptx(CONVERT_E2M1, word, scales[i // 2], result_types=[i32()] * 4)
            ptx(STORE_SHARED.format(offset=first + n * 2 * column_tiles * COLUMN_TILE), start, *values)
