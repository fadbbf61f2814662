"""What one lane does to copy whole entries at slots: MLIR and inline PTX.  The mapping of lanes: `entry_slots.py`."""

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.barriers import arrive, arrive_for_copies
from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES, WARP_ROWS, Lane, fragmented, registers_of, words
from jaxkv_kernels.mosaic_gpu.ptx.gather import address, shuffle, valid
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, f32, i32, i64, ptx
from jaxkv_kernels.mosaic_gpu.sizes import TILE

WARP = 32
WARPS = LANES // WARP
COPY = "cp.async.cg.shared.global.L2::256B [$0 + {into}], [$1], 16, $2;"
"""Copies 16 bytes to shared memory.  If the size, the last operand, is 0 instead of 16, stores zeros and reads
nothing."""
CHUNK = 16
"""Bytes that a lane copies at once."""


def _row() -> ir.Value:
    """The row of the tile whose entry the lane copies; lanes that are 16 apart have the same."""
    lane = Lane()
    return arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), arith.andi(lane.lane, c32(WARP_ROWS - 1)))


def _bits_of(ref, row: int, stage) -> ir.Value:
    """The address of the calling warp's word of a stage in a row of `stats`."""
    width = ir.MemRefType(ref.type).shape[1]
    word = arith.addi(arith.muli(stage, c32(WARPS)), Lane().warp)
    return at(mgpu.utils.memref_ptr(ref), arith.addi(c32(4 * width * row), arith.shli(word, c32(2))))


def load_slot(ref, request, tile, length) -> ir.Value:
    """The slot of the lane's row; -1 at positions from `length` on."""
    width = ir.MemRefType(ref.type).shape[1]
    position = arith.addi(arith.muli(tile, c32(TILE)), _row())
    first = arith.addi(arith.muli(arith.extui(i64(), request), c64(4 * width)), _wide(arith.shli(position, c32(2))))
    load = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.b32 $0, [$1]; }"
    return ptx(load, at(mgpu.utils.memref_ptr(ref), first), position, length, result_types=i32(), has_side_effects=True)


def _wide(x) -> ir.Value:
    return arith.extui(i64(), x)


def copy_entries(cache, kv, slots, layer, limit, stage, raw, stats, known_row: int, barrier) -> None:
    """Starts to copy the entries of the warp's rows, or stores zeros where keys are masked; arrives for the lane."""
    lane, nbytes = Lane(), cache.entry.nbytes
    (slot,) = words(slots.registers.item())
    slot = shuffle(slot, lane.lane)
    known = valid(slot, limit)
    vote = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    bits = ptx(vote, arith.extui(i32(), known), result_types=i32(), has_side_effects=True, convergent=True)
    into = _bits_of(stats, known_row, stage)
    ptx("st.shared.b32 [$0], $1;", into, bits, predicate=arith.cmpi(arith.CmpIPredicate.eq, lane.lane, c32(0)))
    entry = address(cache, kv, arith.select(known, slot, c32(0)), layer)
    entry = ptx("mov.b64 {$0, $1}, $2;", entry, result_types=[i32()] * 2)
    first = arith.addi(arith.muli(stage, c32(TILE)), arith.muli(lane.warp, c32(WARP_ROWS)))
    rows = at(mgpu.utils.memref_ptr(raw), arith.muli(first, c32(nbytes)))

    def copy(row, column, into: int, predicate=None):
        """Copies a chunk of an entry to `into` bytes after the lane's chunk of the first row."""
        low, high = (shuffle(word, row) for word in entry)
        start = ptx("mov.b64 $0, {$1, $2};", low, high, result_types=i64())
        start = arith.addi(start, arith.extui(i64(), arith.muli(column, c32(CHUNK))))
        size = arith.shli(arith.andi(arith.shrui(bits, row), c32(1)), c32(4))
        ptx(COPY.format(into=into), to, start, size, predicate=predicate)

    # 32 lanes copy the first 32 chunks of a row, then what is left of several rows.
    to = at(rows, arith.muli(lane.lane, c32(CHUNK)))
    for row in range(WARP_ROWS):
        copy(c32(row), lane.lane, row * nbytes)
    left = nbytes // CHUNK - WARP
    at_once = WARP // left
    own, column = (op(lane.lane, c32(left)) for op in (arith.divui, arith.remui))
    column = arith.addi(column, c32(WARP))
    to = at(rows, arith.addi(arith.muli(own, c32(nbytes)), arith.muli(column, c32(CHUNK))))
    for row in range(0, WARP_ROWS, at_once):
        rest = min(at_once, WARP_ROWS - row)
        predicate = arith.cmpi(arith.CmpIPredicate.ult, own, c32(rest))
        copy(arith.andi(arith.addi(own, c32(row)), c32(WARP - 1)), column, row * nbytes, predicate)
    arrive(barrier)
    arrive_for_copies(barrier)


def load_known(stats, row: int, stage, layout):
    """Float32 [64]: 1 for each row of a tile whose bit is set, otherwise 0."""
    lane = Lane()
    bits = ptx("ld.shared.b32 $0, [$1];", _bits_of(stats, row, stage), result_types=i32(), has_side_effects=True)
    registers = registers_of(layout, (TILE,))
    for half in range(2):
        bit = arith.andi(arith.shrui(bits, arith.addi(lane.row, c32(8 * half))), c32(1))
        value = arith.sitofp(f32(), bit)
        registers[0, 0, half, 0, 0] = vector.from_elements(ir.VectorType.get((1,), f32()), [value])
    return fragmented(registers, layout)
