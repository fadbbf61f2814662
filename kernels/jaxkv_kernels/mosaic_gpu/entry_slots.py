"""Tiles of quantised latents at chosen slots, for the kernel of few rows (`quantised_swap_ab.py`).

Entries are copied to shared memory as they are, each by one bulk copy.  Lane l < 16 of warp w of the producer has row
16 w + l of each tile.  It loads the row's slot one tile ahead, and starts the copy once the stage is free.

What bounds it: an H100 copies random rows of 656 bytes at 2.05 TB/s, two thirds of the rate of consecutive ones.  For
64 requests of 2,048 slots, the copies alone take 0.042 ms; with 16 heads, this kernel and `combine` take 0.049.  Copies
of 16 bytes per lane (`cp.async`) are no faster, and take 0.055 with a prefetch size of 256 bytes, since rows do not
begin at multiples of it.

A masked key (slot below 0 or past the cache, or position past the count) is a row of zeros, which its lane stores.  A
bit per row shows consumers whether the key counts (1) or is masked (0), because the scores of zeros are 0, not -inf.

Barriers.  A tile's barrier completes when all 64 rows have arrived (1 per row) and the bytes of their copies have
landed.  It is in `stats` (`lane_barriers.py`), as are the bits:

    row KNOWN of `stats`    4 words per stage: per warp, a bit for each of its 16 rows
    row LANDED              2 words per stage: the barrier
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import DecodeMLASparse
from jaxkv_kernels.mosaic_gpu.gather_keys import GatheredRows, Slots, lane_array
from jaxkv_kernels.mosaic_gpu.interpreter.gather import InterpretedRows
from jaxkv_kernels.mosaic_gpu.lane_barriers import LaneBarriers
from jaxkv_kernels.mosaic_gpu.masks import MASKED
from jaxkv_kernels.mosaic_gpu.ptx import slots as lanes
from jaxkv_kernels.mosaic_gpu.ptx.fragments import array
from jaxkv_kernels.mosaic_gpu.quantised_tiles import STATS, N
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, SCALAR, over_columns
from jaxkv_kernels.mosaic_gpu.sizes import TILE
from jaxkv_kernels.mosaic_gpu.tile_scheduler import WorkTile

KNOWN, LANDED = STATS, STATS + 1
"""Rows of `stats`: a bit per key, 1 if it is not masked, and the barriers of tiles."""
OWN = plgpu.Layout.WG_STRIDED((lanes.LANES,), 1)
PLAIN = plgpu.RefType()


class SlotSource:
    """The keys of sparse attention: those at the slots [query tokens, K] of `call`."""

    stats = STATS + 2
    window = None

    def __init__(self, call: DecodeMLASparse, interpret: bool):
        kind = InterpretedRows if interpret else GatheredRows
        self.pages, self.interpret = call.pages, interpret
        self.rows: Any = kind(call.pages, call.entry, call.buffer.dtype.itemsize)
        self.operands, self.table = [self.rows.buffer(call.buffer)], call.slots

    def memory(self, stages: int) -> dict[str, Any]:
        """The scratch memory of `keys`."""
        if not self.interpret:
            return {}
        return {"known": plgpu.SMEM((stages, TILE), jnp.float32), "k_full": plgpu.Barrier(num_barriers=stages)}

    def keys(self, kv_refs, table_ref, scratch) -> "SlotKeys":
        """The keys, given references to `operands` and `table`; all lanes of the CTA call this."""
        if self.interpret:
            return InterpretedSlotKeys(
                self, kv_refs[0], table_ref, scratch["raw"][0], scratch["known"], scratch["k_full"]
            )
        raw, stats = scratch["raw"][0], scratch["stats"]
        landed = LaneBarriers(stats, (LANDED, 0), raw.shape[0], arrivals=TILE)
        landed.start()
        return SlotKeys(self, kv_refs[0], table_ref, raw, stats, landed)


@dataclass(frozen=True)
class SlotKeys:
    """Tiles of keys at slots, in a kernel."""

    source: SlotSource
    kv_ref: Any
    slot_ref: Any
    raw: Any
    known: Any
    """Shared memory with a bit for each row of the tiles, or for the interpreter a number."""
    landed: Any
    """The barriers of the tiles."""

    def loader(self, layer, in_cache, head) -> "SlotLoader":
        """The producer's part."""
        del head
        return SlotLoader(self, jnp.where(in_cache, layer, 0), jnp.where(in_cache, self.source.pages.num_slots, 0))

    def wait(self, stage, use) -> None:
        """Waits for tile number `use`: `use` // stages is the phase of the barrier of its stage."""
        self.landed.wait_for_copies(stage, lax.div(use, jnp.int32(self.raw.shape[0])))

    def clear_unseen(self, place) -> None:
        """Does nothing: masked keys are zeros."""

    def mask(self, place, scores):
        """The scores [64, N] of a tile, with those of masked keys masked."""
        return jnp.where(over_columns(self._known(place.stage), N) > 0, scores, MASKED)

    def _known(self, stage):
        """1 for each key of a tile that is not masked, otherwise 0; float32 [64]."""

        @plgpu.inline_mgpu(
            arg_types=(PLAIN, SCALAR), return_type=plgpu.ShapeDtypeStruct((TILE,), jnp.dtype(jnp.float32), layout=ROW)
        )
        def load(_, ref, stage):
            return lanes.load_known(ref, KNOWN, stage.registers.item(), ROW)

        return load(self.known, stage)

    def load_slots(self, tile: WorkTile, step):
        """The slots of a tile, in each lane that of its row; -1 at positions past the count."""

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, SCALAR, SCALAR), return_type=lane_array(1))
        def load(_, ref, *indices):
            return array([[lanes.load_slot(ref, *(x.registers.item() for x in indices))]], OWN)

        return load(self.slot_ref, tile.request, step, tile.keys)

    def copy(self, slots, layer, limit, stage) -> None:
        """Starts to copy the entries at `slots` to a stage; slots of keys that are not masked are below `limit`."""
        rows = self.source.rows

        @plgpu.inline_mgpu(arg_types=(PLAIN, OWN, SCALAR, SCALAR, SCALAR, PLAIN, PLAIN))
        def copy(_, kv, slots, layer, limit, stage, raw, stats):
            layer, limit, stage = (x.registers.item() for x in (layer, limit, stage))
            barrier = self.landed.of(stats, stage)
            lanes.copy_entries(rows, kv, slots, layer, limit, stage, raw, stats, KNOWN, barrier)

        copy(self.kv_ref, slots, layer, limit, stage, self.raw, self.known)


class InterpretedSlotKeys(SlotKeys):
    """The same for Pallas's interpreter, which runs no inline PTX."""

    def wait(self, stage, use):
        """Waits for a barrier of Pallas."""
        del use
        plgpu.barrier_wait(self.landed.at[stage])

    def load_slots(self, tile, step):
        """Slots [64]."""
        return self.source.rows.load_slots(Slots(of=self.slot_ref), tile.request, step, tile.keys)

    def copy(self, slots, layer, limit, stage):
        """Copies the entries; the copies are complete on return."""
        nbytes = self.source.rows.entry.nbytes
        self.raw[stage] = self.source.rows.entries(self.kv_ref, slots, layer, limit, nbytes).reshape(-1)
        self.known[stage] = ((slots >= 0) & (slots < limit)).astype(jnp.float32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.landed.at[stage])

    def _known(self, stage):
        return self.known[stage]


@dataclass(frozen=True)
class SlotLoader:
    """Copies tiles of keys from slots."""

    keys: SlotKeys
    layer: Any
    limit: Any

    def look_up(self, tile: WorkTile, step):
        """Loads what `fetch` needs; call it one tile ahead, so that nothing waits for these loads."""
        return self.keys.load_slots(tile, step)

    def fetch(self, found, tile: WorkTile, step, stage) -> None:
        """Starts the copies of a tile that was looked up."""
        del tile, step
        self.keys.copy(found, self.layer, self.limit, stage)
