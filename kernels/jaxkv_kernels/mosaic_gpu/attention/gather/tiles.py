"""The producers of sparse attention: they gather tiles of keys, pair by pair, for the consumers of `slots.py`.

Tiles of bf16 and f16 are copied half by half, as soon as consumers free the halves that hold the previous pair.  No
lane of the producer waits for a copy.  The slots of a pair are loaded while the previous one is copied and, with
`prefetch`, its rows are prefetched to the L2 cache.

Tiles of quantised entries are stored unit by unit, by a producer for each of the two tiles of a pair.  Loads run ahead
of stores by a ring of units, also from one pair or work tile to the next: while a unit is converted and stored, the
next ones are being loaded.  The slots of the next tile are loaded while the near half of a tile is stored, and its
scales while the far half is.  Rotary keys are copied, or loaded, while the latents of their tile are stored.
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
    """The sources and destinations of tiles, and the barriers between a producer and the consumers."""

    tiles: tuple[int, ...]
    """The tiles of each pair that this producer gathers.  That of tile 0 also fetches the queries."""
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

        `load_work_tile` loads the columns of a work tile.  `fetch_queries` fetches the queries of a request; it is
        called once `q_free` has completed.
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
                beyond = [(following, 2 * next_pair + tile, next_keys) for tile in self.tiles]

                def fetch_next_queries():
                    @pl.when((i == begin) & (n > first))
                    def _():
                        plgpu.barrier_wait(q_free)
                        fetch_queries(request)

                return used + 1, self._fetch_pair(layer, limit, used, state, beyond, fetch_next_queries)

            return lax.fori_loop(begin, stop, pair, carry)

        request, begin, _, keys = work_of(first_tile, first)
        if 0 in self.tiles:

            @pl.when(end > first)
            def _():
                fetch_queries(request)

        slots = tuple(self._find(request, 2 * begin + tile, keys) for tile in self.tiles)
        lax.fori_loop(first, end, work_tile, (jnp.int32(0), self._start(layer, limit, slots)))

        @pl.when(end > first)
        def _():  # every completion of a barrier must be waited for
            if 0 in self.tiles:
                plgpu.barrier_wait(q_free)
            for tile in self.tiles:
                for half in range(2):
                    plgpu.barrier_wait(self.k_free[2 * tile + half])

    def _place(self, pages, layer) -> tuple[Any, Any]:
        """A layer of a cache, and the end of its slots: 0 if there is no such layer."""
        in_cache = (layer >= 0) & (layer < pages.num_layers)
        return jnp.where(in_cache, layer, 0), jnp.where(in_cache, pages.num_slots, 0)

    def _start(self, layer, limit, slots) -> Any:
        """The state before the first pair, whose slots are `slots`, tile by tile."""
        raise NotImplementedError

    def _fetch_pair(self, layer, limit, used, state, beyond, fetch_next_queries) -> Any:
        """Fetches the tiles of a pair, and returns the state before the next pair.

        `used` is the number of pairs before this one.  `beyond` has the request, tile and number of keys of each tile
        of the next pair.  `fetch_next_queries` fetches the queries of the pair's request, if they are not the previous
        pair's.
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
    """For entries that are copied as they are, by one producer.  The state is the slots of the next pair."""

    def _start(self, layer, limit, slots):
        return slots

    def _fetch_pair(self, layer, limit, used, state, beyond, fetch_next_queries):
        coming = tuple(self._find(*tile) for tile in beyond)
        for tile, slots in zip(self.tiles, state, strict=True):
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
                fetch_next_queries()
        return coming


class StoredTiles(GatherTiles):
    """For entries that are converted, and stored unit by unit, by a producer for each of the two tiles.

    The state: units and scales that are being loaded, and where the rows of the next tile are.
    """

    def _start(self, layer, limit, slots):
        (found,) = slots
        rows, scales = self._locate(layer, limit, found)
        return tuple(self._load(layer, limit, rows, unit) for unit in self._units()[: self._ring]), scales, rows

    def _fetch_pair(self, layer, limit, used, state, beyond, fetch_next_queries):
        (tile,) = self.tiles
        ring, scales, own = state
        units, ring, near = self._units(), list(ring), len(self.rows.half(tile))
        if tile == 0:
            fetch_next_queries()
        self._wait_free(tile, tile, used)
        held = self._begin(layer, limit, tile, own, scales)
        found = self._find(*beyond[0])
        ahead, scales_ahead = own, scales
        for n, unit in enumerate(units):
            if n == len(units) // 2:  # now the slots of the next tile have arrived
                ahead, scales_ahead = self._locate(layer, limit, found)
            if n == near:
                self._stored(2 * tile + tile)
                self._wait_free(tile, 1 - tile, used)
            self._store(unit, tile, ring.pop(0), held)
            following = n + self._ring
            rows, unit = (own, units[following]) if following < len(units) else (ahead, units[following - len(units)])
            ring.append(self._load(layer, limit, rows, unit))
        self._end(tile, held)
        self._stored(2 * tile + 1 - tile)
        return tuple(ring), scales_ahead, ahead

    @property
    def _ring(self) -> int:
        """The number of units that are loaded ahead."""
        return min(self.config.units_ahead, len(self._units()) // 2)

    def _units(self):
        """The units of a tile in the order in which they are stored: first those of the near half."""
        (tile,) = self.tiles
        return self.rows.half(tile) + self.rows.half(1 - tile)

    def _locate(self, layer, limit, found) -> tuple[Any, Any]:
        """Where the rows of a tile are, of which `_find` loaded the slots, and their scales, which are being loaded."""
        raise NotImplementedError

    def _load(self, layer, limit, rows, unit) -> Any:
        """Starts to load a unit."""
        raise NotImplementedError

    def _begin(self, layer, limit, tile, rows, scales) -> Any:
        """Stores the factors of a tile; returns what `_store` and `_end` need."""
        raise NotImplementedError

    def _store(self, unit, tile, raw, held) -> None:
        """Converts and stores a unit."""
        raise NotImplementedError

    def _end(self, tile, held) -> None:
        """Completes what `_begin` started."""


class ConvertedTiles(StoredTiles):
    """For latents that become float16, with rotary keys of their own."""

    def _locate(self, layer, limit, found):
        if self.config.prefetch:
            self.rows.prefetch(self.kv_ref, self.zero_ref, self.rows.spread(found), layer, limit)
        return found, self.rows.load_scales(self.kv_ref, self.zero_ref, found, layer, limit)

    def _load(self, layer, limit, rows, unit):
        return self.rows.load(self.kv_ref, self.zero_ref, self.rows.spread(rows), layer, limit, unit)

    def _begin(self, layer, limit, tile, rows, scales):
        places = self.rows.spread_rope(rows)
        rope = self.rows.fetch_rope(self.kv_ref, self.zero_ref, places, layer, limit, tile, self.r)
        return self.rows.factors(self.stats, FACTOR + tile, (FLAG, 4 * tile), rows, limit, scales), rope

    def _store(self, unit, tile, raw, held):
        self.rows.store(unit, tile, self.k, raw, held[0])

    def _end(self, tile, held):
        self.rows.finish_rope(tile, self.r, *held)


@dataclass(frozen=True)
class ExtraRefs:
    """The second cache of a call, its slots, the first of which is that of `place`, and its layer."""

    kv_ref: Any
    slot_ref: Any
    layer: Any


@dataclass(frozen=True)
class JoinedTiles(StoredTiles):
    """For entries that are keys and values as a whole (`joined.py`), of one cache or of two."""

    extra: ExtraRefs | None = None
    count_ref: Any = None
    """The numbers of slots to attend to in the first of two lists; None if that is all of them."""

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
        addresses, scales = self.rows.locate(refs, self.zero_ref, places, tile, slots)
        if self.config.prefetch:
            self.rows.prefetch_rows(self.zero_ref, addresses)
        return addresses, scales

    def _load(self, layer, limit, rows, unit):
        return self.rows.load(self.zero_ref, rows, unit)

    def _begin(self, layer, limit, tile, rows, scales):
        self.rows.mark(self.stats, self.zero_ref, FACTOR + tile, (FLAG, 4 * tile), rows)
        return scales

    def _store(self, unit, tile, raw, held):
        self.rows.store(unit, tile, self.k, raw, held)
