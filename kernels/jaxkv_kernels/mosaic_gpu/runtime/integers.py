"""Integer arithmetic of device-side code."""

from jax import lax


def floordiv(a, b: int):
    """`a // b` of non-negative integers; kernels have no floor division of traced ones."""
    return lax.div(a, a.dtype.type(b))


def opaque_zero(i):
    """0, computed from a loop variable below 2**20, so that the compiler cannot know it.

    Added to the stage index of a wgmma operand in shared memory.  With a constant index, the compiler hoists the
    64-bit descriptors of all operands out of the loop and spills them, which makes a kernel half as fast.
    """
    return floordiv(i, 1 << 20)
