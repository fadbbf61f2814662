"""A minimal kernel that, like the others, updates an operand in place and has a constant."""

import triton
import triton.language as tl

from jaxkv_kernels.triton.runtime.launch import launch


def incremented(x):
    """x + 1 for int32 [16]."""
    return launch(_increment, (), updated=(x,), grid=(1,), warps=1, COUNT=16)[0]


@triton.jit
def _increment(x, COUNT: tl.constexpr):
    at = x + tl.arange(0, COUNT)
    tl.store(at, tl.load(at) + 1)
