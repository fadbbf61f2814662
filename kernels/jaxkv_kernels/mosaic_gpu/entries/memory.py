"""Words of 32 bits between memory and the registers of a lane: MLIR and inline PTX."""

from itertools import batched
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.entries.fields import PartAddress
from jaxkv_kernels.mosaic_gpu.entries.teams import WARPGROUP
from jaxkv_kernels.mosaic_gpu.runtime import elements
from jaxkv_kernels.mosaic_gpu.runtime.ptx import c32, c64, i32, i64, ptx


def strided(per_lane: int, together: int) -> Any:
    """The layout of int32 arrays [128 * per_lane] in which a lane holds vectors of `together` words."""
    return plgpu.Layout.WG_STRIDED((WARPGROUP * per_lane,), together)


def array(chunks, kind=None) -> Any:
    """An array in the layout `strided`, made of a lane's chunks: lists of words, or of values of another type."""
    together = min(len(chunks[0]), 4)
    flat = [word for chunk in chunks for word in chunk]
    return elements.array([*batched(flat, together)], strided(len(flat), together), kind)


def chunks_of(raw, count: int) -> list[list[Any]]:
    """The chunks of `count` words of an array."""
    return [[*chunk] for chunk in batched(elements.elements(raw), count)]


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


def _kind(width: int) -> str:
    return "b32" if width == 1 else f"v{width}.b32"


def load_words(pointer, offset: int, nbytes: int, alignment: int, active) -> list[Any]:
    """Words of `nbytes` bytes; 0 where `active` does not hold."""
    width = min(alignment, nbytes) // 4
    found: list[Any] = []
    for first in range(0, nbytes, 4 * width):
        names = ", ".join(f"${n}" for n in range(width))
        load = f"ld.global.{_kind(width)} {names if width == 1 else '{' + names + '}'}, [${width} + {offset + first}];"
        operands = [pointer]
        if active is not None:
            zeros = " ".join(f"mov.b32 ${n}, 0;" for n in range(width))
            load = f"{{ .reg .pred p; setp.ne.b32 p, ${width + 1}, 0; {zeros} @p {load} }}"
            operands.append(arith.extui(i32(), active))
        found += ptx(load, *operands, result_types=[i32()] * width, has_side_effects=True)
    return found


def store_words(pointer, offset: int, values, alignment: int, active) -> None:
    """Stores words where `active` holds."""
    width = min(alignment // 4, len(values))
    for first in range(0, len(values), width):
        names = ", ".join(f"${n + 1}" for n in range(width))
        store = f"st.global.{_kind(width)} [$0 + {offset + 4 * first}], {names if width == 1 else '{' + names + '}'};"
        ptx(store, pointer, *values[first : first + width], predicate=active)


def load_byte(pointer, offset: int, active) -> Any:
    """A byte as a word; 0 where `active` does not hold."""
    load = f"ld.global.u8 $0, [$1 + {offset}];"
    if active is None:
        return ptx(load, pointer, result_types=i32(), has_side_effects=True)
    load = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p {load} }}"
    return ptx(load, pointer, arith.extui(i32(), active), result_types=i32(), has_side_effects=True)


def store_byte(pointer, offset: int, word, active) -> None:
    """Stores the lowest byte of a word where `active` holds."""
    ptx(f"st.global.u8 [$0 + {offset}], $1;", pointer, word, predicate=active)
