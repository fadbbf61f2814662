"""Integer arithmetic of device-side code."""

from jax import lax


def floordiv(a, b: int):
    """`a // b` for non-negative integers, because kernels do not support floor division of traced integers."""
    return lax.div(a, a.dtype.type(b))


def opaque_zero(i):
    """0, computed from a loop variable `i` below 2**20 in a way that the compiler does not see through.

    It is added to the stage index of a wgmma operand in shared memory.  With a constant index, the compiler would hoist
    the 64-bit descriptors of all operands out of the loop and spill them, which makes a kernel half as fast.
    """
    return floordiv(i, 1 << 20)
