"""Arrays in registers as the elements that the calling lane holds, for inline PTX."""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from jaxkv_kernels.mosaic_gpu.runtime.ptx import i32


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
