"""Loading rotary keys and rotating them, as `jaxkv_kernels.rotary` does."""

import triton
import triton.language as tl

from jaxkv_kernels.triton.entries.tiles import load_rows
from jaxkv_kernels.triton.runtime.arithmetic import as_float32, rounded


def pairs(cos_sin, interleaved: bool) -> str | None:
    """The constant PAIRS: which values are rotated together; None if none are."""
    return None if cos_sin is None else "interleaved" if interleaved else "halves"


@triton.jit
def load_rotated(
    array, cos_sin, row, COUNT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr
):
    """`load_rows`, rotated by rows `row` [n] of `cos_sin` [COUNT, SIZE] unless PAIRS is None.

    The other value of a pair is loaded a second time, from the same cache lines.
    """
    tile = load_rows(array, row, COUNT, SIZE, COLUMNS)
    if PAIRS is None:
        return tile
    HALF: tl.constexpr = SIZE // 2
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < COUNT)[:, None] & (column < SIZE)
    if PAIRS == "interleaved":
        second, other, angle = column % 2 == 1, column ^ 1, column // 2
    else:
        second, other, angle = column >= HALF, (column + HALF) % SIZE, column % HALF
    start = row.to(tl.int64)[:, None] * SIZE
    partner = tl.load(array + start + other, mask=mask)
    cos = tl.load(cos_sin + start + angle, mask=mask)
    sin = tl.load(cos_sin + start + HALF + angle, mask=mask)
    # Triton's `-sin` is `0 - sin`, which is +0 for both zeros.
    sin = tl.where(second, sin, sin * -1.0)
    return rounded(as_float32(tile) * cos + as_float32(partner) * sin, array.dtype.element_ty)
