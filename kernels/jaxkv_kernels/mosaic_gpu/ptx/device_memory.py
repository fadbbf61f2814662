"""Loads and stores of words and bytes of device memory, in the widest vectors that alignment allows."""

from typing import Any

from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.inline import i32, ptx


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
