"""`BlockManager`: the blocks that requests hold, and what these contain."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.offload.transfers import SKIPPED, padded_ids
from jaxkv.serving.pool import BlockPool
from jaxkv.serving.prefix import OFFLOADED, Prefix
from jaxkv.serving.request import ABSENT, Held, Request
from jaxkv.serving.table import TableKind, partial_table
from jaxkv.serving.tiers import Load, Tiers


class BlockManager:
    """The block tables of requests: allocates their blocks from a pool, fills, finds and frees them.

    Args:
      tables: the tables of each request.
      pool: the blocks of the cache, which all tables share.
      tiers: the connectors.
      keys: `prefix_keys`, with the layout and the model.
      copy: a compiled `copy_blocks` or `SplitCache.copy_block`, which donates the cache.
      places: the most running requests.
      max_len: the most tokens of a request.
    """

    def __init__(
        self,
        tables: Sequence[TableKind],
        pool: BlockPool,
        tiers: Tiers,
        *,
        keys: Callable[..., list[bytes]],
        copy: Callable[..., Any],
        places: int,
        max_len: int,
    ):
        self.tables, self.pool, self.tiers = tuple(tables), pool, tiers
        self.arrays = {table.name: np.full((places, table.up_to(max_len)), ABSENT, np.int32) for table in tables}
        """The block tables of running requests, by place: int32 [places, M]."""
        self.max_len = min(table.up_to(max_len) * table.block_size for table in tables)
        """The most tokens of a request, rounded up to blocks."""
        self.loads: dict[Request, Load] = {}
        """The loads of the prefixes of running requests."""
        self._next: tuple[Request, Container[bytes]] | None = None
        """The request that joins next, and which of its blocks can be loaded; None before they are looked up."""
        self._partial = partial_table(self.tables)
        self._keys = keys
        self._copy = copy
        # Without tables that keep all blocks, prefixes may end anywhere.
        self._prefix_size = math.gcd(*(table.block_size for table in tables if table.plain)) or 1

    def extend_keys(self, request: Request) -> None:
        """Adds the keys of the request's full blocks."""
        for table in self.tables:
            keys = request.held.setdefault(table.name, Held()).keys
            known = len(keys) * table.block_size
            if len(request.tokens) - known >= table.block_size:
                keys += self._keys_after(request, table, len(keys), request.tokens[known:], table.block_size)

    def prefix(self, request: Request, running: Sequence[Request]) -> Prefix:
        """The longest cached prefix of a request that waits."""
        if self._next is None or self._next[0] is not request:
            keys = (key for table in self.tables for key in request.keys_of(table.name))
            self._next = request, self.tiers.blocks_of(keys)
        prefix = Prefix.of(request, running, self.tables, self.pool, self._next[1])
        if self.loads and not prefix.awaited:
            loading = set[bytes]().union(*(load.contents for load in self.loads.values()))
            if not loading.isdisjoint(key for key, _ in self._offloaded(request, prefix)):
                return replace(prefix, awaited=True)
        return prefix

    def blocks_of_prefix(self, request: Request, tokens: int) -> list[tuple[TableKind, int, bytes]]:
        """The blocks that a request needs to go on after its first `tokens` tokens: their tables, numbers and keys."""
        return [
            (table, index, self._key(request, table, index, tokens))
            for table in self.tables
            for index in table.needed(tokens)
        ]

    def _key(self, request: Request, table: TableKind, index: int, tokens: int) -> bytes:
        """The key of block number `index`, if a request uses it for its first `tokens` tokens."""
        start = index * table.block_size
        if table == self._partial and tokens < start + table.block_size:
            (key,) = self._keys_after(request, table, index, request.tokens[start:tokens], tokens - start)
            return key
        return request.keys_of(table.name)[index]

    def adopt(self, cache: KVCache, request: Request, tokens: int, rows: jax.Array, write: Callable) -> KVCache:
        """Writes the blocks of a request's prefix that are missing to free blocks, where they can be found then.

        Blocks of other contents are evicted for them, but not those of this prefix.  If too few are free, the last
        ones are left out.

        Args:
          cache: the cache; it is donated.
          request: a request that does not run, whose keys are known.
          tokens: the length of its prefix.
          rows: the contents of `blocks_of_prefix`, by `padded_rows`.
          write: a compiled `write_blocks`, which donates the cache.
        """
        found = self.blocks_of_prefix(request, tokens)
        held = [self.pool.share(block) for _, _, key in found if (block := self.pool.find(key)) is not None]
        targets = np.full(len(found), SKIPPED, np.int32)
        for n, (_, _, key) in enumerate(found):
            if self.pool.find(key) is None and self.pool.num_free:
                targets[n] = self.pool.allocate()
        cache = write(cache, padded_ids(targets), rows)
        for block, (table, index, _) in zip(targets.tolist(), found, strict=True):
            if block != SKIPPED:
                self._name(block, request, table, index, tokens)
                held.append(block)
        self._free(held)
        return cache

    def cached_prefix(self, request: Request, running: Sequence[Request]) -> Prefix:
        """The longest prefix of a request, whose keys are known, in blocks of the cache."""
        return Prefix.of(request, running, self.tables, self.pool, tiers=())

    def count(self, request: Request, prefix: Prefix, end: int) -> int:
        """The number of blocks that a request holds if it joins with this prefix, and its first step ends at `end`."""
        return sum(
            len({*table.needed(prefix.tokens), *self._written(request, table, prefix.tokens, end)})
            for table in self.tables
        )

    def blocks_to_join(self, request: Request, prefix: Prefix, end: int) -> int:
        """The number of free blocks that `allocate` and `ensure_writable` use for that."""
        kept = sum(not self.pool.is_free(block) for block in prefix.on_device)
        return self.count(request, prefix, end) - kept + prefix.copied

    def allocate(self, request: Request, prefix: Prefix) -> None:
        """Gives a request, which has a place, the blocks of its prefix, and free ones for those that must be loaded."""
        self._next = None
        for block in prefix.on_device:  # first, so that none of them is evicted
            self.pool.share(block)
        for name, blocks in prefix.blocks.items():
            held = request.held[name]
            held.blocks = [self.pool.allocate() if block == OFFLOADED else block for block in blocks]
            held.first = next((n for n, block in enumerate(blocks) if block != ABSENT), len(blocks))
            self.arrays[name][request.place, : len(blocks)] = held.blocks

    def has_blocks_up_to(self, request: Request, end: int) -> bool:
        """Whether a running request has the blocks for a step that ends at token `end`."""
        return all(end <= len(request.held[table.name].blocks) * table.block_size for table in self.tables)

    def missing_blocks(self, request: Request, end: int) -> int:
        """The number of free blocks that `ensure_writable` allocates: for new blocks, and for copies of shared ones."""
        count = 0
        for table in self.tables:
            blocks = request.held[table.name].blocks
            for index in self._written(request, table, request.cached, end):
                count += index >= len(blocks) or blocks[index] == ABSENT or self.pool.is_shared(blocks[index])
        return count

    def ensure_writable[Cache](self, cache: Cache, request: Request, end: int) -> Cache:
        """Gives a request its own blocks for a step that ends at token `end`: new ones, and copies of shared ones.

        If the request overwrites tokens by which others can find a block, that block is copied too, unless there is no
        room for it.
        """
        for table in self.tables:
            blocks, keys = request.held[table.name].blocks, request.keys_of(table.name)
            for index in self._written(request, table, request.cached, end):
                blocks += [ABSENT] * (index + 1 - len(blocks))
                if (block := blocks[index]) == ABSENT:
                    blocks[index] = self.pool.allocate()
                else:
                    # What others can find in the block is lost, unless its tokens are only those that are kept.
                    found = self.pool.key_of(block) not in (None, *keys[index : index + 1])
                    lost = found and self.pool.length_of(block) > request.cached - index * table.block_size
                    if self.pool.is_shared(block) or (lost and self.pool.num_free > self.missing_blocks(request, end)):
                        blocks[index] = self.pool.allocate()
                        cache = self._copy(cache, _ids(block), _ids(blocks[index]))
                        self.pool.free(block)
                    elif found:
                        self.pool.overwrite(block)
                self.arrays[table.name][request.place, index] = blocks[index]
        return cache

    def fill(self, cache: KVCache, request: Request, start: int, end: int) -> None:
        """Registers the keys of the blocks that became full with the tokens [start, end), and offers them to tiers.

        Prefixes that others can reuse end at the ends of blocks, of the tables that keep all blocks.  Of the other
        tables, tiers are therefore offered only the blocks that a request needs to continue after such a prefix.  At
        the end, blocks that no later token of this request needs are freed.
        """
        filled = [(table, index) for table in self.tables for index in table.filled(start, end)]
        if filled:
            self.extend_keys(request)
            contents = {}
            for table, index in filled:
                held = request.held[table.name]
                self._name(held.blocks[index], request, table, index, end)
                if table.is_needed_after(self._prefix_size, index):
                    contents[held.keys[index]] = held.blocks[index]
            self.tiers.offer(cache, contents)
        for table in self.tables:
            if table.window is not None:
                self._expire(request, table, table.needed(end).start)

    def load(self, cache: KVCache, request: Request, prefix: Prefix) -> None:
        """Begins to load the blocks of a prefix that are not on the device, into those that `allocate` has given."""
        contents = {key: request.held[name].blocks[index] for key, (name, index) in self._offloaded(request, prefix)}
        self.loads[request] = Load(contents)
        self.tiers.begin(self.loads[request], cache)

    def advance_loads(self, cache: KVCache, *, timeout: float = 0) -> tuple[KVCache, dict[Request, int]]:
        """Continues all loads; waits for one of them at most `timeout` seconds if nothing else can be done.

        Returns the cache, and the requests whose loads have ended, with the number of tokens in the blocks that were
        loaded.  It is 0 if the load failed.
        """
        cache = self.tiers.advance(cache, self.loads.values(), timeout=timeout)
        ended = {}
        for request, load in list(self.loads.items()):
            if load.has_failed or load.is_done:
                ended[request] = 0 if load.has_failed else self._loaded(request, load)
                self._end_load(request)
        return cache, ended

    def _loaded(self, request: Request, load: Load) -> int:
        """Registers the keys of the blocks of a load that is done; returns the number of tokens that they have."""
        covered: set[int] = set()
        for table in self.tables:
            for index, key in enumerate(request.keys_of(table.name)):
                if (block := load.contents.get(key)) is not None:
                    self._name(block, request, table, index, (index + 1) * table.block_size)
                    covered.update(range(index * table.block_size, (index + 1) * table.block_size))
        return len(covered)

    def _end_load(self, request: Request) -> None:
        self.loads[request].cancel()
        del self.loads[request]

    def _offloaded(self, request: Request, prefix: Prefix) -> Iterator[tuple[bytes, tuple[str, int]]]:
        """The keys of the blocks of a prefix that are not on the device, with their tables and numbers."""
        for name, blocks in prefix.blocks.items():
            for index, block in enumerate(blocks):
                if block == OFFLOADED:
                    yield request.keys_of(name)[index], (name, index)

    def free(self, request: Request) -> None:
        """Frees the blocks of a request.  Blocks that other requests share remain held.

        If a prefix may end inside a block, the tokens of its last one can still be found.

        Launched steps and loads may still write to the blocks.  Programs that later holders launch run after them.
        """
        if request in self.loads:
            self._end_load(request)
        if self._partial is not None:
            self._name_tail(request, self._partial)
        for table in self.tables:
            held = request.held[table.name]
            self.arrays[table.name][request.place] = ABSENT
            self._free(block for block in held.blocks if block != ABSENT)
            held.blocks, held.first = [], 0

    def clear(self) -> None:
        """Empties the block tables and ends all loads, without freeing blocks."""
        self._next = None
        for request in list(self.loads):
            self._end_load(request)
        for table in self.arrays.values():
            table[:] = ABSENT

    def warm_up(self, cache: Any) -> Any:
        """Compiles the copies of blocks and the programs of transfers."""
        return self.tiers.warm_up(self._copy(cache, _ids(SKIPPED), _ids(SKIPPED)))

    def _name(self, block: int, request: Request, table: TableKind, index: int, tokens: int) -> None:
        """Registers the key of a block, of a request whose first `tokens` tokens are cached.

        If a prefix may end inside the block, also registers its tokens.
        """
        position = None
        if table == self._partial:
            start, end = index * table.block_size, min((index + 1) * table.block_size, tokens)
            position = request.predecessor(table.name, index), request.tokens[start:end]
        self.pool.name(block, self._key(request, table, index, tokens), position)

    def _name_tail(self, request: Request, table: TableKind) -> None:
        """Registers the tokens of a request's last block, unless it is full or they can be found in another."""
        index, count = divmod(request.filled, table.block_size)
        tokens, predecessor = request.tokens[request.filled - count :][:count], request.predecessor(table.name, index)
        if self.pool.find_first_tokens(predecessor, tokens)[1] < count:
            self._name(request.held[table.name].blocks[index], request, table, index, request.filled)

    def _keys_after(
        self, request: Request, table: TableKind, index: int, tokens: Sequence[int], size: int
    ) -> list[bytes]:
        """A key for each `size` of these tokens, which follow the first `index` blocks of a request."""
        after = request.keys_of(table.name)[index - 1] if index else None
        return self._keys(tokens, block_size=size, table=table.name, after=after, cache_salt=request.cache_salt)

    def _written(self, request: Request, table: TableKind, start: int, end: int) -> range:
        """The indices of the blocks that a request must not share, from token `start` on.

        In a table that keeps all blocks, these are the blocks of all its further tokens.  In a table with a window,
        they are only those of the next step, which writes up to token `end`.
        """
        return table.written(start, max(request.length, end) if table.window is None else end)

    def _expire(self, request: Request, table: TableKind, first: int) -> None:
        """Frees the blocks of a table before block number `first`."""
        held = request.held[table.name]
        expired = held.blocks[held.first : first]
        held.blocks[held.first : first] = [ABSENT] * len(expired)
        self.arrays[table.name][request.place, held.first : first] = ABSENT
        self._free(block for block in expired if block != ABSENT)
        held.first = max(first, held.first)

    def _free(self, blocks: Iterable[int]) -> None:
        # Free the last block first, so that it is evicted first: a block is useless without those before it.
        for block in reversed(list(blocks)):
            self.pool.free(block)


def _ids(block: int) -> np.ndarray:
    return np.asarray([block], np.int32)
