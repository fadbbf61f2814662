"""Looks up the slots of positions in block tables, in the registers of a lane."""

from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, i32, i64, ptx


class BlockTables(NamedTuple):
    """Tables in which the slots of positions are looked up."""

    array: Any
    """int32 [B, M]; in a kernel, a reference to it."""
    block_size: int
    rows: int
    """Rows of whatever has positions, per request."""


def element(ref, index, width: int) -> Any:
    """The address of element `index[-1]` of row `index[0]`, of `width` elements each, of an array of 32 bits."""
    *row, column = index
    pointer = mgpu.utils.memref_ptr(ref)
    if row:
        code = f"{{ .reg .b64 a; mul.wide.u32 a, $2, {4 * width}; mul.wide.u32 $0, $3, 4; "
        code += "add.s64 $0, $0, a; add.s64 $0, $0, $1; }"
        return ptx(code, pointer, row[0], column, result_types=i64())
    return ptx("mad.lo.s32 $0, $2, 4, $1;", pointer, column, result_types=i32())


def slot_of(tables: BlockTables, row, place) -> Any:
    """The slot of a place of a row; -1 for places below 0 or past the table, and blocks without slots."""
    table, block_size = tables.array, tables.block_size
    columns = ir.MemRefType(table.type).shape[1]
    column = arith.divui(place, c32(block_size))  # large for places below 0
    inside = arith.cmpi(arith.CmpIPredicate.ult, column, c32(columns))
    address = element(table, (arith.divui(row, c32(tables.rows)), column), columns)
    load = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, -1; @p ld.global.b32 $0, [$1]; }"
    block = ptx(load, address, arith.extui(i32(), inside), result_types=i32(), has_side_effects=True)
    slot = arith.addi(arith.muli(block, c32(block_size)), arith.remui(place, c32(block_size)))
    known = arith.cmpi(arith.CmpIPredicate.ult, block, c32(2**31 // block_size))
    return arith.select(known, slot, c32(-1))
