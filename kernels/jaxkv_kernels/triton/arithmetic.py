"""Products and conversions that are correct on the GPU and in Triton's interpreter.

The interpreter's own operations multiply the bits of bf16 values as integers, truncate float32 to bf16, and convert
denormal bf16 values incorrectly.
"""

from jaxkv_kernels.triton.language import tl, triton

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
IEEE = tl.constexpr("ieee")
"""A tl.constexpr, because Triton 3.6 does not accept a plain string as the default of a constexpr parameter."""


def compiles_ptx(_semantic=None) -> tl.constexpr:
    """Whether the kernel is compiled for an NVIDIA GPU and may have assembly in PTX: a constant of the compilation.

    Triton's compiler passes `_semantic` to functions that are marked as below.  The interpreter does not.
    """
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "cuda")


vars(compiles_ptx)["__triton_builtin__"] = True


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr = IEEE):
    """acc + a @ b for a [M, K], b [K, N] and float32 acc [M, N].

    PRECISION applies to float32 operands.  "ieee" uses all bits and no tensor cores, and keeps all operands of a thread
    in registers.  "tf32x3" uses 22 bits of each operand, as two tf32 numbers, and fewer registers if tiles are large.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """`x` as DTYPE (bfloat16, float16 or float32), rounded to nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE and x.dtype != tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, even)  # NaN stays NaN
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def as_float32(x):
    """`x` (bfloat16, float16 or float32) as float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)
