"""Types and constants of MLIR for inline PTX, and the function that emits it."""

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
