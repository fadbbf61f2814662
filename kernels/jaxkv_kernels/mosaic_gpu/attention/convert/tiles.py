"""The producer of dense attention on quantised entries: loads tiles of keys, pair by pair, and stores them converted.

A tile is stored by halves, each as soon as its shared memory is free.  Every lane signals a half once it has stored its
share; the consumers make it visible to wgmma, since a fence here might wait for loads.  The loads of the next tile's
latents follow, so that they are on their way in registers until its shared memory is free, also across the ends of work
tiles.  Rotary keys, which are needed last, are loaded between the halves: the loads of the latents have brought them to
the L2 cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.convert.e4m3 import E4M3Pages


@dataclass(frozen=True)
class ConvertTiles:
    """Where tiles come from and go to."""

    pages: E4M3Pages
    kv_ref: Any
    table_ref: Any
    k: Any
    r: Any
    k_full: Any
    """Barriers [2 * tile + half]: a half is stored; with the half that is stored last, also the rotary keys."""
    k_free: Any
    interpret: bool

    def run(self, layer, first, end, load_work_tile: Callable[[Any], Any], fetch_queries: Callable[..., None]) -> None:
        """Stores the keys of the work tiles from `first` to `end`, and has their queries fetched.

        Half t of tile t is stored first.  `fetch_queries(request, again)` fetches the queries of a request.
        """

        pages = self.pages

        def load(block, tile, half):
            return pages.load_half(self.kv_ref, block, tile, layer, half)

        def look_up(request, tile):
            return pages.look_up(self.table_ref, request, tile)

        def store(keys, t, block, tile, used):
            """Stores a tile: half t first, then the other one and the rotary keys."""
            for half, chunks in zip((t, 1 - t), keys, strict=True):

                @pl.when(used)
                def _(half=half):
                    plgpu.barrier_wait(self.k_free[2 * t + half])

                if half == t:
                    pages.store_half(chunks, t, half, self.k)
                    rope = pages.load_rope(self.kv_ref, block, tile, layer)  # in registers that the half has left
                else:
                    pages.store_half(chunks, t, half, self.k)
                    pages.store_rope(rope, t, self.r)
                if self.interpret:
                    plgpu.commit_smem()
                plgpu.barrier_arrive(self.k_full[2 * t + half])

        def work_tile(n, carry):
            request, begin, stop, *_ = load_work_tile(n)

            def pair(i, carry):
                keys, block, block_after = carry
                used = (n > first) | (i > begin)
                tile = 2 * i
                store(keys, 0, block, tile, used)
                keys = tuple(load(block_after, tile + 1, half) for half in (1, 0))

                @pl.when((i == begin) & (n > first))
                def _():
                    fetch_queries(request, again=True)

                request_after, pair_after = lax.cond(
                    i + 1 < stop, lambda: (request, i + 1), lambda: tuple(load_work_tile(n + 1)[:2])
                )
                blocks = tuple(look_up(request_after, 2 * pair_after + t) for t in range(2))
                store(keys, 1, block_after, tile + 1, used)
                return tuple(load(blocks[0], 2 * pair_after, half) for half in (0, 1)), *blocks

            return lax.fori_loop(begin, stop, pair, carry)

        request, begin, *_ = load_work_tile(first)

        @pl.when(end > first)
        def _():
            fetch_queries(request, again=False)

        blocks = tuple(look_up(request, 2 * begin + t) for t in range(2))
        keys = tuple(load(blocks[0], 2 * begin, half) for half in (0, 1))
        lax.fori_loop(first, end, work_tile, (keys, *blocks))
