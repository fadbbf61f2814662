"""Loaders: where an attention kernel's keys and values come from, and how they reach shared memory.

A schedule chooses the stages and barriers; a loader knows how keys lie in device memory.  Loaders that copy columns of
pages have the interface of `Keys`.  `quantised/latents.py` has one for whole entries, and `gather/` one for slots.
"""

from typing import Any, NamedTuple, Protocol

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.paging.page_table import PageTable
from jaxkv_kernels.mosaic_gpu.attention.paging.token_rows import TokenRows
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import prefetch_to_l2


class Columns(NamedTuple):
    """Some columns of a tile of keys, and where they go."""

    first: int
    """Counted from the entry's first value."""
    count: int
    into: Any
    """Shared memory [64, count]."""
    full: Any
    """The barrier that completes when they have landed."""
    part: int = 0
    """1 for columns of values that do not follow their keys; `first` then counts from the first of the values."""


class Keys(Protocol):
    """A loader of tiles of 64 keys, used by the producer warpgroup."""

    def look_up(self, request, first_token):
        """Loads what `fetch` needs to find a tile.  Call it one tile ahead, so that nothing waits for these loads."""

    def fetch(self, found, first_token, *parts: Columns, **copy) -> None:
        """Starts the copies of a tile that was looked up; `copy` are options of the copies (multicast)."""

    def prefetch(self, found, first_token, *, interpret: bool) -> None:
        """Prefetches a tile that was looked up to the L2 cache."""


class PagedKeys:
    """Keys in the pages of a cache, copied by TMA as they are."""

    def __init__(self, kv_ref, view: TokenRows, table: PageTable, layer, head: Any = 0):
        self._kv_ref, self._view, self._table = kv_ref, view, table
        self._layer, self._head = layer, head
        view.install(kv_ref)

    def look_up(self, request, first_token):
        """The blocks of a tile."""
        return self._table.blocks(request, first_token)

    def fetch(self, found, first_token, *parts: Columns, **copy) -> None:
        """Starts one TMA copy per element of `parts` and block that the tile lies in."""
        rows = self._table.copy_rows
        for first_row, block, token in self._table.copies(found, first_token):
            for first, count, into, full, part in parts:
                origin, row = self._view.index(self._layer, block, token, self._head, part)
                source = self._kv_ref.at[origin, pl.ds(row, rows), self._view.columns(first, count, origin)]
                plgpu.copy_gmem_to_smem(source, into.at[pl.ds(first_row, rows)], full, **copy)

    def prefetch(self, found, first_token, *, interpret: bool) -> None:
        """Prefetches whole entries, as one run of bytes per block: for pages with contiguous tokens."""
        nbytes = self._table.copy_rows * self._table.pages.width * self._kv_ref.dtype.itemsize
        for _, block, token in self._table.copies(found, first_token):
            start = self._view.start(self._kv_ref, *self._view.index(self._layer, block, token, self._head))
            prefetch_to_l2(start, nbytes, interpret=interpret)
