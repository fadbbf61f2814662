"""Decoding and encoding e4m3 and e2m1, decoding int8, and the scales of tiles, in registers.

`from_e4m3` and `to_e4m3` convert single values, and `from_e2m1` bytes of two.  Attention and the indexer also load
several values together:

| stored | loaded as | decoded by | tiles |
|---|---|---|---|
| e4m3 | bytes, and scales | `widened` | one, in the order of memory |
| e4m3 | pairs of bytes, `load_pairs` | `halves` | even columns, odd columns |
| e4m3 | words of four bytes | `unpacked` | one, with its columns in the order of `in_word_order` |
| int8 | pairs of bytes, `load_pairs` | `int8_halves` | even columns, odd columns |
| e2m1 | pairs of bytes with four values | `load_e2m1` | columns 0, 4, 8 and so on, columns 1, 5, 9, and so on |

Each value stays in the thread, and at the index, of the pair or word that held it, so that tiles are operands of
products without an exchange through shared memory.  Queries are divided in the same way: `in_halves`, `in_quarters`,
`in_word_order`.

GPUs before Ada (sm_89) have no instructions for e4m3, and Triton does not support the type on them.  There, bytes are
encoded and decoded with integer arithmetic on the bits.  So they are on AMD GPUs: the instructions of gfx942 are for
e4m3fnuz, another format, which has no -0 and half the range.
"""

from jaxkv_kernels.formats.bits import FP8_MAX, SMALLEST_E4M3, SMALLEST_NORMAL_E4M3
from jaxkv_kernels.formats.fp4 import DROPPED, E2M1_MAX, MIDPOINTS
from jaxkv_kernels.formats.nvfp4 import TILE
from jaxkv_kernels.triton.arithmetic import compiles_ptx, rounded
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import capability
from jaxkv_kernels.triton.tiles import load_pieces

NAN = tl.constexpr(0x7FC00000)
"""The bits of a float32 NaN."""


def has_e4m3() -> bool:
    """Whether the GPU has NVIDIA's instructions that convert e4m3; passed to kernels as the constant NATIVE."""
    found = capability()
    return isinstance(found, int) and found >= 89


@triton.jit
def load_scales(first, second, head, STEPS: tl.constexpr):
    """Loads the scales [n] of both parts of entries, for heads `head` [n]; an empty tuple if STEPS is None.

    `first` and `second` point to the scales; STEPS are the distances between those of consecutive heads.  Kernels load
    scales before entries, so that nothing has to wait for them later.
    """
    scales = ()
    if STEPS is not None:
        scales += (tl.load(first + head * STEPS[0]), tl.load(second + head * STEPS[1]))
    return scales


@triton.jit
def quotient(x, divisor):
    """Float32 `x` / `divisor`, which are broadcast, rounded once.

    This is inline PTX, because the way in which Triton compiles a division for NVIDIA GPUs depends on its version: it
    may approximate the quotient, or treat denormal operands as 0.  For AMD GPUs, it does neither, and the interpreter
    divides as NumPy does.
    """
    if not compiles_ptx():
        return tl.div_rn(x, divisor)
    x, divisor = tl.broadcast(x, divisor)
    return tl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, divisor], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """Encodes float32 as bytes: rounds to nearest even and saturates at +-448.  NaN stays NaN."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormals of e4m3, below 2**-6, are multiples of 2**-9.  float32 values near 2**14 also are, so adding 2**14
    # rounds.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    found = tl.where(size < 0.015625, small, normal)
    return (sign | tl.where(x == x, found, 0x7F)).to(tl.uint8)


@triton.jit
def from_e4m3(byte, NATIVE: tl.constexpr):
    """Decodes bytes to float32, exactly."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = byte.to(tl.uint16)
    # Shifted by 7, the exponent and mantissa bits are those of a float16, 2**8 times too small.  float16 also holds
    # e4m3's subnormals.  Shifted into a float32 they would be subnormal, and CPUs may flush those to zero.
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


LARGEST_E4M3 = tl.constexpr(0x43E00000)
LARGEST_E2M1 = tl.constexpr(0x40C00000)
"""The bits of the largest values, 448 and 6, as float32."""


@triton.jit
def largest_bits(tile, keep):
    """The bits [...] of the largest magnitude of float32 values `tile` [..., n]: a NaN counts as the largest.

    Values where the mask `keep` [..., 1] is False count as 0.  The mask only matters for speed, because results of
    these rows are not stored.  Kernels that store entries load slots and values, and compute `keep` from the slots.
    Using `keep` here makes ptxas issue both loads together.  Otherwise, it would load the slots after the arithmetic on
    the values.
    """
    # Magnitudes have the same order as integers and as floats, and NaN is the largest integer.
    size = tile.to(tl.int32, bitcast=True) & (0x7FFFFFFF if keep is None else tl.where(keep, 0x7FFFFFFF, 0))
    return tl.max(size, axis=len(tile.shape) - 1)


@triton.jit
def power_of_two_scale(tile, SMALLEST_EXPONENT: tl.constexpr, keep=None, LARGEST: tl.constexpr = LARGEST_E4M3):
    """Scales [...] for float32 values `tile` [..., n], and their inverses [...].

    A scale is the smallest power of two that is at least the largest magnitude divided by the largest value that can
    be stored (its bits are LARGEST), and at least 2**SMALLEST_EXPONENT.  The formula is that of
    `jaxkv_kernels.formats.bits.power_of_two_scale`.  A NaN among the values gives NaN for both results.  `keep` is that
    of `largest_bits`.
    """
    bits = largest_bits(tile, keep)
    exponent = (bits >> 23) - (LARGEST >> 23) + ((bits & 0x7FFFFF) > (LARGEST & 0x7FFFFF)).to(tl.int32)
    exponent = tl.maximum(exponent, SMALLEST_EXPONENT)
    broken = bits > 0x7F800000
    scale = tl.where(broken, NAN, (127 + exponent) << 23)
    inverse = tl.where(broken, NAN, (127 - exponent) << 23)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


LARGEST_SCALED = tl.constexpr(E2M1_MAX)
LARGEST_SCALE = tl.constexpr(FP8_MAX)
LEAST_SCALE = tl.constexpr(SMALLEST_E4M3)
LEAST_NORMAL_SCALE = tl.constexpr(SMALLEST_NORMAL_E4M3)
DROPPED_BITS = tl.constexpr(DROPPED)
"""Constants of `jaxkv_kernels.formats.fp4`, for `e4m3_scale`."""


@triton.jit
def e4m3_scale(tile, keep, ROUND_UP: tl.constexpr, NATIVE: tl.constexpr):
    """Scales [...] for float32 values `tile` [..., n] that are stored as e2m1: bytes of e4m3, and their values.

    A scale is the largest magnitude / 6, rounded to nearest even or up, at least 2**-9 and at most 448.  The formula is
    that of `jaxkv_kernels.formats.fp4.e4m3_scale`.  A NaN among the values gives NaN.  `keep` is that of
    `largest_bits`.
    """
    bits = largest_bits(tile, keep)
    exact = quotient(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, LARGEST_SCALED, tl.float32))
    exact = tl.minimum(tl.maximum(exact, LEAST_SCALE), LARGEST_SCALE)
    if ROUND_UP:
        normal = ((exact.to(tl.int32, bitcast=True) + DROPPED_BITS) & ~DROPPED_BITS).to(tl.float32, bitcast=True)
        denormal = tl.ceil(exact * (1 / LEAST_SCALE)) * LEAST_SCALE
        exact = tl.where(exact < LEAST_NORMAL_SCALE, denormal, normal)
    byte = tl.where(bits > 0x7F800000, 0x7F, to_e4m3(exact, NATIVE)).to(tl.uint8)
    return byte, from_e4m3(byte, NATIVE)


@triton.jit
def from_e8m0(byte):
    """Decodes bytes to float32 powers of two.  Byte 0 is 0, and 255 is NaN."""
    bits = byte.to(tl.int32)
    return tl.where(bits == 255, NAN, bits << 23).to(tl.float32, bitcast=True)


E2M1_EDGES = tl.constexpr(MIDPOINTS)
"""Between neighbouring magnitudes of e2m1."""


@triton.jit
def to_e2m1(tile, scale):
    """Encodes float32 values `tile` [..., n] divided by `scale` [..., 1] as 4-bit codes, int32 [..., n].

    The exact quotient is rounded to nearest even and saturates at 6.  NaN becomes 0.  The formula is that of
    `jaxkv_kernels.formats.fp4.to_e2m1`.
    """
    size = tl.abs(tile)
    code = tl.zeros(tile.shape, tl.int32)
    for n in tl.static_range(7):
        edge = scale * E2M1_EDGES[n]
        code = tl.where(size >= edge if n % 2 else size > edge, n + 1, code)
    code = tl.where((size == float("inf")) & (scale > 0), 7, code)  # edges may be infinite as well
    return code | ((tile.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def from_e2m1(pairs, scale):
    """Decodes bytes of two e2m1 values [n, m] to float32 [n, 2 m], multiplied by the scales [n, m] of the pairs."""
    bits = pairs.to(tl.int32)
    return tl.interleave(e2m1_value(bits) * scale, e2m1_value(bits >> 4) * scale)


@triton.jit
def widened(byte, scale, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 bytes as DTYPE, multiplied in float32 by `scale`."""
    return computed_once(rounded(from_e4m3(byte, NATIVE) * scale, DTYPE))


@triton.jit
def computed_once(x):
    """Returns `x`, and keeps Triton from computing it again for each of its uses.

    Latents are an operand of two products, which need them in different register layouts.  Triton would convert the
    bytes to each layout and decode them twice.  An assembly instruction with `is_pure=False` is not duplicated: values
    are decoded once, and the result goes through shared memory to both products.
    """
    if not compiles_ptx():
        return x
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


# The GPU converts two e4m3 values at a time, and loads operands of products from shared memory in units of 16 bits,
# which is one pair.
E4M3_HALVES = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
"""PTX that converts a register with two pairs of e4m3 to one with the even values and one with the odd values."""


@triton.jit
def load_pairs(place, known, SIZE: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Loads SIZE bytes from each of the pointers `place` [n] as int16 [n, COLUMNS // 2].

    The first byte of a pair is the low one.

    Bytes past SIZE are 0, and so are rows where `known` [n] is False.  EVEN must only be set if all pointers and SIZE
    are even.
    """
    if EVEN:
        pairs = load_pieces(place.to(tl.pointer_type(tl.int16)), known, SIZE // 2, COLUMNS // 2)
    else:
        first = 2 * tl.arange(0, COLUMNS // 2)[None, :]
        low = tl.load(place[:, None] + first, mask=known[:, None] & (first < SIZE), other=0)
        high = tl.load(place[:, None] + first + 1, mask=known[:, None] & (first + 1 < SIZE), other=0)
        pairs = low.to(tl.int16) | (high.to(tl.int16) << 8)
    return pairs


@triton.jit
def halves(pairs, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Decodes the low bytes and the high bytes of int16 [n, m] to two tiles DTYPE [n, m].

    float16 represents every e4m3 value exactly.
    """
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            E4M3_HALVES, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        bits = pairs.to(tl.int32)
        low, high = _half(((bits & 0x80) << 8) | ((bits & 0x7F) << 7)), _half((bits & 0x8000) | ((bits >> 1) & 0x3F80))
    return rounded(low, DTYPE), rounded(high, DTYPE)


@triton.jit
def _half(bits):
    """The e4m3 values whose `bits` are shifted to the positions of float16, which makes them 2**8 times too small."""
    small = bits.to(tl.int16).to(tl.float16, bitcast=True)
    # e4m3's NaN has the largest bit pattern, which is 1.875 as float16.  Multiplied by 36864 it overflows to inf, and
    # inf * 0 is NaN.  The next lower pattern, 1.75, does not overflow and adds 0.
    return small * 256.0 + small * 36864.0 * 0.0


@triton.jit
def in_halves(x):
    """Splits x [n, 2 m] into its even and its odd columns, each [n, m], to match the tiles of `halves`."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


WORD_BIAS = tl.constexpr(2.0**120)
"""The exponent biases of e4m3 and bfloat16 are 7 and 127, so shifted bits are values 2**120 times too small."""


@triton.jit
def unpacked(words, DTYPE: tl.constexpr):
    """Decodes int32 words [N, W] of four e4m3 values each to DTYPE [N, 4 W], with far fewer instructions than singly.

    The first bytes of all words come first, then the second bytes, and so on.  In this order, all values stay in the
    thread that holds their word; in the order of memory, they would move between threads.  Values are exact, except for
    NaN, which becomes 480.  (A key with NaN still gives NaN, because jaxkv stores NaN as its scale.)
    """
    even, odd = _paired(words << 8), _paired(words)
    low = tl.join(_word_half(even, False, DTYPE), _word_half(even, True, DTYPE))
    high = tl.join(_word_half(odd, False, DTYPE), _word_half(odd, True, DTYPE))
    values = tl.join(low, high)  # [N, W, 2, 2]: byte b = 2 i + j is at [i, j]
    return values.permute(0, 2, 3, 1).reshape(words.shape[0], 4 * words.shape[1])


@triton.jit
def in_word_order(x):
    """x [M, 4 W] with its columns permuted to the order of `unpacked`."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return x.reshape(M, N // 4, 4).permute(0, 2, 1).reshape(M, N)


@triton.jit
def _paired(words):
    """Bytes 1 and 3 of each word as the bits of two bfloat16, which are 2**-120 times the e4m3 values."""
    return ((words >> 4) & 0x07F007F0) | (words & -0x7FFF8000)


@triton.jit
def _word_half(pairs, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    bits = (pairs >> 16 if HIGH else pairs).to(tl.int16)
    if tl.bfloat16 == DTYPE and compiles_ptx():
        return bits.to(tl.bfloat16, bitcast=True) * WORD_BIAS
    # Convert by way of float16, whose subnormals are exact everywhere.  CPUs may flush those of float32 to zero.
    half = (bits & -0x8000) | ((bits & 0x7F0) << 3)
    return (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)


INT8_HALVES = tl.constexpr("""{
    .reg .b32 shifted, bits, offset, minus;
    mov.b32 minus, 0xBF80BF80;
    shr.b32 shifted, $2, 8;
    lop3.b32 bits, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 offset, $2, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, offset, minus, bits;
    lop3.b32 bits, shifted, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 offset, shifted, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, offset, minus, bits;
}""")
"""PTX that converts a register with two pairs of int8 to one with the low and one with the high bytes, as bfloat16.

The conversions of the GPU from int8 take four times as long.  The seven low bits of a byte are added to 128, whose
bfloat16 has the bits 0x4300.  Then 128 is subtracted, or 256 (0x4380) if the sign bit is set.
"""


@triton.jit
def int8_halves(pairs, DTYPE: tl.constexpr):
    """Converts the low bytes and the high bytes of int16 [n, m] to two tiles DTYPE [n, m], exactly."""
    if tl.bfloat16 == DTYPE and compiles_ptx():
        low, high = tl.inline_asm_elementwise(
            INT8_HALVES, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        low, high = rounded((pairs << 8) >> 8, DTYPE), rounded(pairs >> 8, DTYPE)
    return low, high


E2M1_TILE = tl.constexpr(TILE)
"""Values of an `nvfp4` entry that share an e4m3 scale."""
E2M1_SCALE_UNIT = tl.constexpr(2.0**118)
"""See `e2m1_unit`."""


def e2m1_unit(dtype) -> float:
    """What tiles of `dtype` (of Triton) must be multiplied by: they are as many times too small.

    In the places where a bfloat16 has the lowest bits of its exponent and the highest one of its fraction, the bits of
    an e2m1 value are 2**-126 times that value; for float16, it is 2**-14 times.  For bfloat16, scales are multiplied by
    2**118, for which the largest scale, 448, leaves room.  Products of values and scales are exact.
    """
    return {tl.bfloat16: 2.0**8, tl.float16: 2.0**14, tl.float32: 1.0}[dtype]


def _e2m1_multiply(dtype: str, shifts: tuple[int, ...], mask: int) -> tl.constexpr:
    """PTX that converts the four values of each of two words, `$4`, and multiplies them by two scales, `$5`.

    `shifts`: by how much the magnitude of each value is shifted to the left, to the bits of `mask`.
    """
    lines = [".reg .b32 sign, size, zero;", "mov.b32 zero, 0x80008000;"]
    for n, shift in enumerate(shifts):
        lines += [
            f"shl.b32 sign, $4, {12 - 4 * n};",
            f"{'shl' if shift > 0 else 'shr'}.b32 size, $4, {abs(shift)};",
            f"and.b32 size, size, {mask:#x};",
            "lop3.b32 size, sign, 0x80008000, size, 0xEA;",
            f"fma.rn.{dtype}x2 ${n}, size, $5, zero;",
        ]
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


E2M1_TO_BFLOAT16 = _e2m1_multiply("bf16", (6, 2, -2, -6), 0x01C001C0)
E2M1_OPERANDS = tl.constexpr("=r,=r,=r,=r,r,r")
E2M1_TO_FLOAT16 = _e2m1_multiply("f16", (9, 5, 1, -3), 0x0E000E00)


@triton.jit
def load_e2m1(
    values, scales, known, SIZE: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr,
    NATIVE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Four tiles DTYPE [n, COLUMNS // 4] of SIZE values, from bytes at `values` [n] with scales at `scales` [n].

    Values are e2m1, four per 16-bit word, times an e4m3 scale for every 16 of them.
    Values past SIZE are 0, and so are rows where `known` [n] is False.  Tiles must be multiplied by UNIT, which is
    `e2m1_unit(DTYPE)`.  EVEN must only be set if all pointers are even.
    """
    words = load_pairs(values, known, SIZE // 2, COLUMNS // 2, EVEN)
    scale = from_e4m3(load_pieces(scales, known, SIZE // E2M1_TILE, COLUMNS // E2M1_TILE), NATIVE)
    if tl.bfloat16 == DTYPE and compiles_ptx():
        found = tl.inline_asm_elementwise(
            E2M1_TO_BFLOAT16, E2M1_OPERANDS, [words, _spread_scales(scale * E2M1_SCALE_UNIT, tl.bfloat16)],
            dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
    elif tl.float16 == DTYPE and compiles_ptx():
        found = tl.inline_asm_elementwise(
            E2M1_TO_FLOAT16, E2M1_OPERANDS, [words, _spread_scales(scale, tl.float16)],
            dtype=(tl.float16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        scale = _spread_scales(scale * (1 / UNIT), tl.float32)
        bits = words.to(tl.int32)
        found = ()
        for n in tl.static_range(4):
            found += (rounded(e2m1_value(bits >> 4 * n) * scale, DTYPE),)
    return found


@triton.jit
def _spread_scales(scale, DTYPE: tl.constexpr):
    """Scales [n, tiles] as DTYPE, for each word of their tile: [n, words]."""
    WORDS: tl.constexpr = E2M1_TILE // 4
    scale = tl.broadcast_to(rounded(scale, DTYPE)[:, :, None], (scale.shape[0], scale.shape[1], WORDS))
    return tl.reshape(scale, (scale.shape[0], scale.shape[1] * WORDS))


@triton.jit
def e2m1_value(code):
    """The e2m1 values of the lowest four bits of int32 numbers, as float32."""
    # Shifted by 9, the exponent and mantissa bits are those of a float16, 2**14 times too small.
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def in_quarters(x):
    """Splits x [n, 4 m] into four tiles [n, m], to match those of `load_e2m1`."""
    even, odd = in_halves(x)
    first, third = in_halves(even)
    second, fourth = in_halves(odd)
    return first, second, third, fourth


@triton.jit
def from_quarters(x):
    """The tile [n, 4 m] that `in_quarters` splits into the tiles `x`."""
    return tl.interleave(tl.interleave(x[0], x[2]), tl.interleave(x[1], x[3]))
