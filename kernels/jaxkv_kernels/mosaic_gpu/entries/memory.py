"""Words of 32 bits between memory and the registers of a lane: MLIR and inline PTX."""

from itertools import batched
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.entries.fields import PartAddress
from jaxkv_kernels.mosaic_gpu.entries.teams import WARPGROUP
from jaxkv_kernels.mosaic_gpu.ptx import fragments
from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, c64, i64


def strided(per_lane: int, together: int) -> Any:
    """The layout of int32 arrays [128 * per_lane] in which a lane holds vectors of `together` words."""
    return plgpu.Layout.WG_STRIDED((WARPGROUP * per_lane,), together)


def array(chunks, kind=None) -> Any:
    """An array in the layout `strided`, made of a lane's chunks: lists of words, or of values of another type."""
    together = min(len(chunks[0]), 4)
    flat = [word for chunk in chunks for word in chunk]
    return fragments.array([*batched(flat, together)], strided(len(flat), together), kind)


def chunks_of(raw, count: int) -> list[list[Any]]:
    """The chunks of `count` words of an array."""
    return [[*chunk] for chunk in batched(fragments.elements(raw), count)]


def scalar(x) -> Any:
    """The register of a scalar."""
    return x.registers.item()


def true(x) -> Any:
    """Whether an int32 scalar is not 0."""
    return arith.cmpi(arith.CmpIPredicate.ne, scalar(x), c32(0))


def both(first, second) -> Any:
    """Whether both conditions hold.  None is a condition that always holds."""
    return first if second is None else second if first is None else arith.andi(first, second)


def times(x, factor: int) -> Any:
    """A non-negative 32-bit integer times a constant, in 64 bits."""
    return arith.muli(arith.extui(i64(), x), c64(factor))


def offset_of(address: PartAddress, index) -> Any:
    """The byte at which a part of an entry lies."""
    found = c64(address.first)
    for i, stride in address.terms(index):
        found = arith.addi(found, times(i, stride))
    return found
