"""What one lane does to copy whole entries at slots: MLIR and inline PTX.  The mapping of lanes: `entry_slots.py`."""

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.barriers import arrive
from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES, WARP_ROWS, Lane, fragmented, registers_of, words
from jaxkv_kernels.mosaic_gpu.ptx.gather import address, shuffle, slot_in_list, valid
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, f32, i32, ptx
from jaxkv_kernels.mosaic_gpu.sizes import TILE

WARPS = LANES // 32
COPY = (
    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$2], {nbytes}; "
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {nbytes}, [$2];"
)
"""Arrives for an entry, and starts its copy."""


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
    return slot_in_list(ref, request, arith.addi(arith.muli(tile, c32(TILE)), _row()), length)


def copy_entries(cache, kv, slots, layer, limit, stage, raw, stats, known_row: int, barrier) -> None:
    """Starts to copy the entry of the lane's row, or stores zeros if its key is masked; arrives for the row."""
    lane, nbytes = Lane(), cache.entry.nbytes
    (slot,) = words(slots.registers.item())
    slot = shuffle(slot, lane.lane)
    known = valid(slot, limit)
    vote = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    bits = ptx(vote, arith.extui(i32(), known), result_types=i32(), has_side_effects=True, convergent=True)
    into = _bits_of(stats, known_row, stage)
    ptx("st.shared.b32 [$0], $1;", into, bits, predicate=arith.cmpi(arith.CmpIPredicate.eq, lane.lane, c32(0)))
    place = arith.addi(arith.muli(stage, c32(TILE)), _row())
    entry = at(mgpu.utils.memref_ptr(raw), arith.muli(place, c32(nbytes)))
    copies = arith.cmpi(arith.CmpIPredicate.ult, lane.lane, c32(WARP_ROWS))
    start = address(cache, kv, arith.select(known, slot, c32(0)), layer)
    with mgpu.utils.when(arith.andi(copies, known)):
        ptx(COPY.format(nbytes=nbytes), entry, start, barrier)
    with mgpu.utils.when(arith.andi(copies, arith.xori(known, _true()))):
        for offset in range(0, nbytes, 16):
            ptx(f"st.shared.v4.b32 [$0 + {offset}], {{$1, $1, $1, $1}};", entry, c32(0))
        # Later copies to these bytes are by another proxy.
        ptx("fence.proxy.async.shared::cta;")
        arrive(barrier)


def _true() -> ir.Value:
    return mgpu.c(1, ir.IntegerType.get_signless(1))


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
