"""Arrays in registers as the elements that the calling lane holds, for inline PTX, and its position in a tile."""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, i32, ptx

LANES, WARP_ROWS = 128, 16
"""Lanes of a warpgroup; rows of a wgmma tile that a warp has."""


class Lane:
    """The position of the calling lane in a wgmma tile: rows 16 `warp` + `row` + {0, 8}, columns 2 `quad` + {0, 1}."""

    def __init__(self):
        thread = arith.remui(mgpu.utils.thread_idx(), c32(LANES))
        self.thread = thread
        self.lane = arith.andi(thread, c32(31))
        self.warp = arith.shrui(thread, c32(5))
        self.row = arith.shrui(self.lane, c32(2))
        self.quad = arith.andi(thread, c32(3))


def words(register) -> list[Any]:
    """The elements of a register, which is a vector of MLIR."""
    positions = (ir.DenseI64ArrayAttr.get([i]) for i in range(ir.VectorType(register.type).shape[0]))
    return [vector.extract(register, dynamic_position=[], static_position=i) for i in positions]


def elements(array) -> list[Any]:
    """The elements of an array that the lane holds, register by register."""
    return [word for register in array.registers.flat for word in words(register)]


def array(vectors, layout, kind=None) -> Any:
    """An array in a layout of Pallas, from the lane's elements: a list per register, all of equal length.

    Elements are int32, or floats of the MLIR type `kind`.
    """
    held = np.empty((len(vectors),), dtype=object)
    for n, own in enumerate(vectors):
        held[n] = vector.from_elements(ir.VectorType.get((len(own),), kind or i32()), list(own))
    signed = True if kind is None else None
    return mgpu.FragmentedArray(_registers=held, _layout=layout.to_mgpu(), _is_signed=signed)


def splat(word) -> Any:
    """An int32 that is the same in all lanes of a warp, as a scalar of Pallas."""
    return mgpu.FragmentedArray.splat(word, (), is_signed=True)


def registers_of(layout, shape) -> Any:
    """Room for the registers of an array of this layout and shape."""
    return np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)


def fragmented(registers, layout) -> Any:
    """An array of these registers."""
    signed = None
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def as_pair(word, kind) -> Any:
    """A vector of two 16-bit values."""
    one = vector.from_elements(ir.VectorType.get((1,), i32()), [word])
    return vector.bitcast(ir.VectorType.get((2,), kind), one)


def permuted(a, b, selector) -> Any:
    """A word of four bytes of two words, chosen by `selector` (PTX `prmt`)."""
    return ptx("prmt.b32 $0, $1, $2, $3;", a, b, selector, result_types=i32())
