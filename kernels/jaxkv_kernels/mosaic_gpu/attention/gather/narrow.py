"""Scales and conversions of narrow formats: e8m0 and e4m3 scales, e2m1 values.  What one lane does, in MLIR and PTX.

e2m1 values become e4m3 first: their four bits, moved to the right places of a byte, are an e4m3 value of 2**-6 times
theirs.  The conversion of e4m3 to float16, which the hardware has, is exact, and 2**6 is part of the scale.

Scales that are powers of two are multiplied into values as float16 powers of two, whose first byte has the whole
number. So a token's scales, 8 in two words, become 8 such bytes, and a lane that needs a scale copies its byte to both
halves of a word."""

from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.attention.config import HALF
from jaxkv_kernels.mosaic_gpu.attention.gather.lanes import (
    COLUMN_TILE,
    STORE,
    WARP_ROWS,
    Lane,
    shuffle,
)
from jaxkv_kernels.mosaic_gpu.attention.gather.scaling import E8M0_RANGE
from jaxkv_kernels.mosaic_gpu.ptx.fragments import words
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, i32, ptx

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


def permute(low, high, selector) -> Any:
    """Four of the bytes of two words, by the digits of `selector`."""
    return ptx("prmt.b32 $0, $1, $2, $3;", low, high, selector, result_types=i32())


def upper_half() -> Any:
    """Whether the lane is one of the last 16 of its warp: 0 or 1."""
    return arith.shrui(Lane().lane, c32(WARP_ROWS.bit_length() - 1))


def load_eight(address, offset: int, *, by_half: bool) -> list[Any]:
    """8 bytes at `offset` of the lane's own row; with `by_half`, the next 8 in the last 16 lanes of a warp."""
    if by_half:
        address = at(address, arith.extui(ir.IntegerType.get_signless(64), arith.shli(upper_half(), c32(3))))
    return list(ptx(LOAD_PAIR.format(offset=offset), address, result_types=[i32()] * 2, has_side_effects=True))


def e8m0_scales(raw, *, padding: int) -> tuple[Any, list[Any]]:
    """From the 16 scales of a row of e2m1 values, of which lanes that are 16 apart have 8 each: its factor, as float32.

    Also the scales to multiply by, as the first bytes of float16 numbers.  The last `padding` bytes are not scales.
    """
    lane, (base, least_safe, most_safe) = Lane().lane, E8M0_RANGE
    first, second = (shuffle(word, lane) for word in raw)
    if padding:
        # Scales before the padding stand in for it.
        whole = permute(second, second, c32(0x1010))
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
    negative = permute(negative, negative, c32(0x1010))
    exponents = [_pairwise("add.s16x2", pair, negative) for pair in pairs]
    exponents = [arith.shli(_pairwise("max.s16x2", pair, c32(0)), c32(2)) for pair in exponents]
    scales = [arith.ori(low, arith.shli(high, c32(8))) for low, high in zip(exponents[:2], exponents[2:], strict=True)]
    nan = arith.cmpi(arith.CmpIPredicate.eq, most, c32(255))
    scales = [arith.select(nan, c32(0x7E7E7E7E), word) for word in scales]
    return arith.bitcast(ir.F32Type.get(), arith.shli(power, c32(23))), scales


def _extreme(which: str, pairs) -> Any:
    """The largest or smallest of pairs of 16-bit numbers, also of the lane 16 apart."""
    found = pairs[0]
    for pair in pairs[1:]:
        found = _pairwise(f"{which}.u16x2", found, pair)
    found = _pairwise(f"{which}.u16x2", found, permute(found, found, c32(0x1032)))
    found = _pairwise(f"{which}.u16x2", found, shuffle(found, arith.xori(Lane().lane, c32(WARP_ROWS))))
    return arith.andi(found, c32(0xFFFF))


def _pairwise(operation: str, a, b) -> Any:
    return ptx(f"{operation} $0, $1, $2;", a, b, result_types=i32())


def e8m0_of_e2m1(scales, owner, half: int) -> list[Any]:
    """The scale of the lane's chunk, 32 values of half `half`, as a pair of float16, twice."""
    owner = arith.addi(owner, c32(half * WARP_ROWS))
    found = _splat(shuffle(scales[0], owner), shuffle(scales[1], owner), Lane().e2m1_chunk)
    return [found, found]


def _splat(low, high, place) -> Any:
    """The byte number `place` of two words as the first byte of both float16 numbers of a word."""
    byte = permute(low, high, arith.muli(place, c32(0x1111)))
    return arith.andi(byte, c32(0xFF00FF00))


def e4m3_of_e2m1(raw, owner, half: int) -> list[Any]:
    """The scales of the two tiles of 16 values of the lane's chunk, times 2**6, as pairs of float16.

    `raw` has 16 of the 32 scales of a row, the other 16 being in the lane 16 apart: as stored by `nvfp4_ds_mla`, scale
    t at byte 8 * (t % 4) + t // 4.
    """
    lane = Lane()
    owner = arith.addi(owner, arith.shli(lane.second, c32(WARP_ROWS.bit_length() - 1)))
    first, second = (shuffle(raw[2 * n + half], owner) for n in range(2))
    selector = arith.addi(arith.muli(lane.quarter, c32(0x11)), c32(0x40))
    both = permute(first, second, selector)
    convert = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }"
    both = ptx(convert, both, result_types=i32())
    both = ptx("mul.rn.f16x2 $0, $1, $2;", both, c32(0x54005400), result_types=i32())
    return [permute(both, both, c32(selector)) for selector in (0x1010, 0x3232)]


def store_e2m1(ref, raw, scales_of: Callable[[Any], list[Any]], stage: int, half: int) -> None:
    """Stores half a latent of e2m1 values as float16 times the scales of each row's owner, one per 16 values."""
    lane = Lane()
    column_tiles = HALF // 64
    first = (stage * 2 + half) * 8 * column_tiles * COLUMN_TILE
    place = arith.addi(
        lane.place(arith.shli(lane.second, c32(2)), column_tiles), arith.muli(lane.quarter, c32(COLUMN_TILE))
    )
    starts = [at(mgpu.utils.memref_ptr(ref), arith.xori(place, c32(16 * n))) for n in range(4)]
    for n, (register, owner) in enumerate(zip(raw.registers.flat, lane.owners, strict=True)):
        scales = scales_of(owner)
        for i, (word, start) in enumerate(zip(words(register), starts, strict=True)):
            values = ptx(CONVERT_E2M1, word, scales[i // 2], result_types=[i32()] * 4)
            ptx(STORE.format(offset=first + n * 2 * column_tiles * COLUMN_TILE), start, *values)
