"""int8 values as pairs of bytes, which become operands like those of `e4m3_pairs.py`.

The conversions of the GPU from int8 take four times as long as those here, which put the bits of a byte into the
fraction of a float of a known exponent, and then subtract what that adds.
"""

import triton
import triton.language as tl

from jaxkv_kernels.triton.runtime.arithmetic import INTERPRETED, rounded

TO_BFLOAT16 = tl.constexpr("""{
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
"""PTX that converts a register with two pairs to one with the low bytes and one with the high bytes, as bfloat16.

The seven low bits of a byte are added to 128, whose bfloat16 has the bits 0x4300.  Then 128 is subtracted, or 256
(0x4380) if the sign bit is set.
"""


@triton.jit
def int8_halves(pairs, DTYPE: tl.constexpr):
    """Converts the low bytes and the high bytes of int16 [n, m] to two tiles DTYPE [n, m], exactly."""
    if tl.bfloat16 == DTYPE and not INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            TO_BFLOAT16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        low, high = rounded((pairs << 8) >> 8, DTYPE), rounded(pairs >> 8, DTYPE)
    return low, high
