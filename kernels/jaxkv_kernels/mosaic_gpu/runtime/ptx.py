"""Types and constants of MLIR for inline PTX, and what several kernels' PTX has in common."""

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

ptx = mgpu.utils.inline_ptx
LOAD_SHARED = "ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
"""Loads 16 bytes of shared memory."""
E4M3_TO_F16 = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
"""Converts a word of four e4m3 values to two words of two float16 values each."""

INT8_TO_F16 = (
    "{ .reg .b32 x, offset; xor.b32 x, $2, 0x80808080; mov.b32 offset, 0x64806480; "
    "prmt.b32 $0, x, 0x64646464, 0x4140; sub.rn.f16x2 $0, $0, offset; "
    "prmt.b32 $1, x, 0x64646464, 0x4342; sub.rn.f16x2 $1, $1, offset; }"
)
"""Converts a word of four int8 values to two words of two float16 values each.

A byte of 128 more than the value is the low byte of a float16 between 1,024 (0x6400) and 2,048, from which 1,152
(0x6480) is subtracted."""


def i32() -> Any:
    """The type."""
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    """The type."""
    return ir.IntegerType.get_signless(64)


def f32() -> Any:
    """The type."""
    return ir.F32Type.get()


def c32(value: int) -> Any:
    """A constant of 32 bits."""
    return mgpu.c(value - (1 << 32) if value >= 1 << 31 else value, i32())


def c64(value: int) -> Any:
    """A constant of 64 bits."""
    return mgpu.c(value, i64())


def at(pointer, offset) -> Any:
    """The address `offset` bytes, a register, after a pointer."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def constant(value: float) -> str:
    """A float32 constant in PTX."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def over_warp(operation: str, of: str, other: str) -> Iterator[str]:
    """PTX that reduces a register over the warp, by another one; all lanes get the same bits."""
    for lanes in (16, 8, 4, 2, 1):
        yield f"shfl.sync.bfly.b32 {other}, {of}, {lanes}, 31, -1; {operation} {of}, {of}, {other};\n"


def emit(code: Iterable[str], refs, *operands) -> None:
    """Emits the code of a whole kernel, whose operands are pointers to `refs`, and then `operands`."""
    pointers = (mgpu.utils.memref_ptr(ref) for ref in refs)
    ptx("{" + "".join(code) + "}", *pointers, *operands, result_types=None, has_side_effects=True, convergent=True)
