"""Where the arrays that kernels for GPUs are given begin."""

import math
from dataclasses import replace

import jax

from jaxkv_kernels.calls import BlocksCall, Call

ALIGNMENT = 256
"""Bytes.  Mosaic GPU rejects an operand that begins elsewhere when the kernel is launched, and Triton's kernels load up
to 16 bytes at once from the beginning of an array."""


def aligned[AnyCall: Call](call: AnyCall) -> AnyCall:
    """The call with arrays that begin at multiples of `ALIGNMENT` bytes, whatever slices the user's program takes.

    XLA passes slices of larger arrays to a kernel without a copy.  Slices of arrays whose rows are multiples of
    `ALIGNMENT` begin at such multiples.  Others are copied: XLA does not look for slices behind a barrier.
    """
    behind = jax.tree.map(_behind_barrier, call)
    return replace(behind, buffer=call.buffer) if isinstance(call, BlocksCall) else behind


def _behind_barrier(array):
    row = math.prod(array.shape[1:][-1:]) * array.dtype.itemsize  # an element of a vector
    return array if row % ALIGNMENT == 0 else jax.lax.optimization_barrier(array)
