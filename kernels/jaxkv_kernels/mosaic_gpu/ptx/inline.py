"""Inline PTX: types and constants of MLIR for its operands, addresses, and the code of a whole kernel."""

import struct
from collections.abc import Iterable
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

ptx = mgpu.utils.inline_ptx


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


def emit(code: Iterable[str], refs, *operands) -> None:
    """Emits the code of a whole kernel, whose operands are pointers to `refs`, and then `operands`."""
    pointers = (mgpu.utils.memref_ptr(ref) for ref in refs)
    ptx("{" + "".join(code) + "}", *pointers, *operands, result_types=None, has_side_effects=True, convergent=True)
