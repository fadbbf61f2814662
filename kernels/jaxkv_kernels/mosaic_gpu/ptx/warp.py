"""Reductions over the lanes of a warp."""

from collections.abc import Iterator
from typing import Any

from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.inline import i32, ptx


def over_warp(operation: str, of: str, other: str) -> Iterator[str]:
    """PTX that reduces a register over the warp, by another one; all lanes get the same bits."""
    for lanes in (16, 8, 4, 2, 1):
        yield f"shfl.sync.bfly.b32 {other}, {of}, {lanes}, 31, -1; {operation} {of}, {of}, {other};\n"


def largest_of_lanes(bits, lanes: int) -> Any:
    """The largest `bits` among `lanes` consecutive lanes."""
    distance = lanes // 2
    while distance:
        shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        other = ptx(shuffle, bits, result_types=i32(), has_side_effects=True, convergent=True)
        bits, distance = arith.maxui(bits, other), distance // 2
    return bits
