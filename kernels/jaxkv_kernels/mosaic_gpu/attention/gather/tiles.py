"""The producer of sparse attention: gathers tiles of keys, pair by pair, for the consumers of `slots.py`.

Two tiles before a tile is fetched, its slots are loaded and, with `prefetch`, its rows are prefetched to the L2 cache.

Tiles of bf16 and f16 are copied half by half, as soon as consumers free the halves that hold the previous pair.  No
lane of the producer waits for a copy.

Tiles of quantised entries are stored unit by unit.  Loads run ahead of stores by a ring of units, also from one tile
or work tile to the next: while a unit is converted and stored, the next ones are being loaded.  Scales are loaded a
tile ahead.  Rotary keys are copied, or loaded, while the latents of their tile are stored.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import SparseConfig

FACTOR, FLAG, STATS = 5, 7, 8
"""Rows of `stats`: the first of the two with factors, one per tile; the flags of tiles with factors other than 1, four
per tile.  The last is the number of rows."""


@dataclass(frozen=True)
class GatherTiles:
    """The sources and destinations of tiles, and the barriers between producer and consumers."""

    config: SparseConfig
    rows: Any
    """`GatheredRows`, or `JoinedRows`."""
    kv_ref: Any
    zero_ref: Any
    slot_ref: Any
    k: Any
    r: Any
    stats: Any
    k_full: Any
    """`StoredFull` or `CopiedFull`.  Barrier 2 * tile + half: that half is full; for the far half, also rotary keys."""
    k_free: Any
    interpret: bool

    def run(self, layer, first, end, first_tile, load_work_tile, q_free, fetch_queries) -> None:
        """Gathers the keys of the work tiles from `first`, whose columns are `first_tile`, to `end`.

        Also fetches their queries.  `load_work_tile` loads the columns of a work tile.  `fetch_queries` fetches the
        queries of a request; it is called once `q_free` has completed.
        """
        layer, limit = self._place(self.rows.pages, layer)

        def work_of(tile, n):
            """Request, first pair, end of the pairs, and slots to attend to: none past the last work tile."""
            return tile.request, tile.begin, tile.end, jnp.where(n < end, tile.keys, 0)

        def load_work(n):
            return work_of(load_work_tile(n), n)

        def work_tile(n, carry):
            request, begin, stop, keys = load_work(n)

            def pair(i, carry):
                used, state = carry

                def of_next_work_tile():  # loaded when it is needed: registers are scarce
                    request, begin, _, keys = load_work(n + 1)
                    return request, begin, keys

                following, next_pair, next_keys = lax.cond(
                    i + 1 < stop, lambda: (request, i + 1, keys), of_next_work_tile
                )
                beyond = [(following, 2 * next_pair + tile, next_keys) for tile in range(2)]

                def after_tile_0():
                    @pl.when((i == begin) & (n > first))
                    def _():
                        plgpu.barrier_wait(q_free)
                        fetch_queries(request)

                return used + 1, self._fetch_pair(layer, limit, used, state, beyond, after_tile_0)

            return lax.fori_loop(begin, stop, pair, carry)

        request, begin, _, keys = work_of(first_tile, first)

        @pl.when(end > first)
        def _():
            fetch_queries(request)

        slots = tuple(self._find(request, 2 * begin + tile, keys) for tile in range(2))
        lax.fori_loop(first, end, work_tile, (jnp.int32(0), self._start(layer, limit, slots)))

        @pl.when(end > first)
        def _():  # every completion of a barrier must be waited for
            plgpu.barrier_wait(q_free)
            for half in range(4):
                plgpu.barrier_wait(self.k_free[half])

    def _place(self, pages, layer) -> tuple[Any, Any]:
        """A layer of a cache, and the end of its slots: 0 if there is no such layer."""
        in_cache = (layer >= 0) & (layer < pages.num_layers)
        return jnp.where(in_cache, layer, 0), jnp.where(in_cache, pages.num_slots, 0)

    def _start(self, layer, limit, slots) -> Any:
        """The state before the first pair, whose slots are `slots`, tile by tile."""
        raise NotImplementedError

    def _fetch_pair(self, layer, limit, used, state, beyond, after_tile_0) -> Any:
        """Fetches the two tiles of a pair, and returns the state before the next pair.

        `used` is the number of pairs before this one.  `beyond` has the request, tile and number of keys of each tile
        of the next pair.  `after_tile_0` is called after tile 0 has been fetched.
        """
        raise NotImplementedError

    def _find(self, request, tile, keys):
        return self.rows.slots(self.slot_ref, request, tile, keys)

    def _wait_free(self, tile, half, used):
        @pl.when(used > 0)
        def _():
            plgpu.barrier_wait(self.k_free[2 * tile + half])

    def _stored(self, half):
        """Signals that a half is stored, or that its copies have been started: every lane arrives.

        The consumers make the half visible to wgmma.  A fence here might wait for loads that have not finished.
        """
        if self.interpret:
            plgpu.commit_smem()
        self.k_full.arrive(half)


class CopiedTiles(GatherTiles):
    """For entries that are copied as they are.  The state is the slots of the next pair."""

    def _start(self, layer, limit, slots):
        return slots

    def _fetch_pair(self, layer, limit, used, state, beyond, after_tile_0):
        coming = tuple(self._find(*tile) for tile in beyond)
        for tile, slots in enumerate(state):
            for half in (tile, 1 - tile):
                self._wait_free(tile, half, used)
                if half == tile:
                    self.rows.factors(self.stats, FACTOR + tile, (FLAG, 4 * tile), slots, limit, None)
                rope = [] if half == tile else [self.r]
                self.rows.copy(self.kv_ref, slots, layer, limit, tile, half, self.k, *rope)
                self._stored(2 * tile + half)
            if self.config.prefetch:
                self.rows.prefetch(self.kv_ref, self.zero_ref, self.rows.spread(coming[tile]), layer, limit)
            if tile == 0:
                after_tile_0()
        return coming


class ConvertedTiles(GatherTiles):
    """For quantised entries.  The state: units and scales that are being loaded, and slots of the next two tiles."""

    def _start(self, layer, limit, slots):
        here, ahead = slots
        raw = self._load_scales(here, layer, limit)
        spread = self.rows.spread(here)
        ring = tuple(self._load(spread, layer, limit, unit) for unit in self._units(0)[: self._ring])
        return ring, raw, here, ahead

    def _fetch_pair(self, layer, limit, used, state, beyond, after_tile_0):
        state = self._fetch_tile(layer, limit, 0, used, state, beyond[0])
        after_tile_0()
        return self._fetch_tile(layer, limit, 1, used, state, beyond[1])

    @property
    def _ring(self) -> int:
        """The number of units that are loaded ahead."""
        return min(self.config.units_ahead, self.rows.units)

    def _units(self, tile):
        """The units of a tile in the order in which they are stored: first those of the near half, half `tile`."""
        return self.rows.half(tile) + self.rows.half(1 - tile)

    def _load(self, slots, layer, limit, unit):
        return self.rows.load(self.kv_ref, self.zero_ref, slots, layer, limit, unit)

    def _load_scales(self, slots, layer, limit):
        return self.rows.load_scales(self.kv_ref, self.zero_ref, slots, layer, limit)

    def _fetch_tile(self, layer, limit, tile, used, state, beyond):
        """Stores a tile, whose first units are in `ring`; loads those of the next one.

        `state`: the units and scales that are being loaded; the slots of this tile and of the next one.  `beyond`: the
        request, tile and number of keys of the one after, whose slots are loaded here.
        """
        rows, (ring, raw, here, ahead) = self.rows, state
        units, ring = self._units(tile), list(ring)
        coming = units + self._units(1 - tile)
        from_cache = self.kv_ref, self.zero_ref
        self._wait_free(tile, tile, used)
        rope = rows.fetch_rope(*from_cache, rows.spread_rope(here), layer, limit, tile, self.r)
        ahead_spread = rows.spread(ahead)
        here_spread = rows.spread(here) if self._ring < len(units) else None
        after = self._find(*beyond)
        scales = rows.factors(self.stats, FACTOR + tile, (FLAG, 4 * tile), here, limit, raw)
        raw = self._load_scales(ahead, layer, limit)
        for n, unit in enumerate(units):
            if n == len(units) // 2:
                self._stored(2 * tile + tile)
                self._wait_free(tile, 1 - tile, used)
            rows.store(unit, tile, self.k, ring[n % self._ring], scales)
            slots = here_spread if n + self._ring < len(units) else ahead_spread
            ring[n % self._ring] = self._load(slots, layer, limit, coming[n + self._ring])
        if self.config.prefetch:
            rows.prefetch(*from_cache, rows.spread(after), layer, limit)
        rows.finish_rope(tile, self.r, scales, rope)
        self._stored(2 * tile + 1 - tile)
        return tuple(ring), raw, ahead, after


@dataclass(frozen=True)
class ExtraRefs:
    """The second cache of a call, its slots, the first of which is that of `place`, and its layer."""

    kv_ref: Any
    slot_ref: Any
    layer: Any


@dataclass(frozen=True)
class JoinedTiles(GatherTiles):
    """For entries that are keys and values as a whole (`joined.py`), of one cache or of two.

    The state: units that are being loaded; the scales and the addresses of the next tile; the slots of the one after.
    """

    extra: ExtraRefs | None = None
    count_ref: Any = None
    """The numbers of slots to attend to in the first of two lists; None if that is all of them."""

    def _start(self, layer, limit, slots):
        here, ahead = slots
        own, scales = self._locate(layer, limit, here)
        ring = tuple(self.rows.load(self.zero_ref, own, unit) for unit in self._units(0)[: self.config.units_ahead])
        return ring, scales, own, ahead

    def _fetch_pair(self, layer, limit, used, state, beyond, after_tile_0):
        state = self._fetch_tile(layer, limit, 0, used, state, beyond[0])
        after_tile_0()
        return self._fetch_tile(layer, limit, 1, used, state, beyond[1])

    def _units(self, tile):
        """The units of a tile in the order in which they are stored: first those of the near half, half `tile`."""
        return self.rows.half(tile) + self.rows.half(1 - tile)

    def _find(self, request, tile, keys):
        """The slots of a tile, which are being loaded, and its number."""
        slot_refs = [self.slot_ref, *([] if self.extra is None else [self.extra.slot_ref])]
        return self.rows.find(slot_refs, self.count_ref, request, tile, keys), tile

    def _locate(self, layer, limit, found):
        slots, tile = found
        refs, places = [self.kv_ref], [(layer, limit)]
        if self.extra is not None:
            refs.append(self.extra.kv_ref)
            places.append(self._place(self.rows.sources[1].pages, self.extra.layer))
        return self.rows.locate(refs, self.zero_ref, places, tile, slots)

    def _fetch_tile(self, layer, limit, tile, used, state, beyond):
        """Stores a tile, whose first units are in the ring; loads those of the next one."""
        ring, scales, own, following = state
        units, ring, near = self._units(tile), list(ring), len(self.rows.half(tile))
        coming = units + self._units(1 - tile)
        self._wait_free(tile, tile, used)
        self.rows.mark(self.stats, self.zero_ref, FACTOR + tile, (FLAG, 4 * tile), own)
        after = self._find(*beyond)
        ahead, scales_ahead = self._locate(layer, limit, following)
        if self.config.prefetch:
            self.rows.prefetch_rows(self.zero_ref, ahead)
        for n, unit in enumerate(units):
            if n == near:
                self._stored(2 * tile + tile)
                self._wait_free(tile, 1 - tile, used)
            next_unit = n + len(ring)
            self.rows.store(unit, tile, self.k, ring.pop(0), scales)
            addresses = own if next_unit < len(units) else ahead
            ring.append(self.rows.load(self.zero_ref, addresses, coming[next_unit]))
        self._stored(2 * tile + 1 - tile)
        return tuple(ring), scales_ahead, ahead, after
