"""`Prefix`: the cached part of a request, and the blocks that hold it; and counters of prefix reuse."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from jaxkv.serving.pool import BlockPool, count_common
from jaxkv.serving.request import ABSENT, Request
from jaxkv.serving.table import TableKind, partial_table

OFFLOADED = -2
"""Stands for a block id if the content is not on the device, but in host memory or on disk."""
LEAST_PART = 4
"""A prefix ends inside a block only if at least this part of the block is found, a quarter.  A copy is a program of its
own that moves the whole block, while a few more tokens rarely change how many chunks a prompt takes."""


@dataclass(frozen=True)
class Prefix:
    """The longest cached prefix of a request: that for which every table has the blocks that the next token needs."""

    tokens: int
    """Length of the prefix.  It excludes the request's last token, whose logits must be computed."""
    blocks: Mapping[str, list[int]]
    """The blocks of each table that hold the prefix: ids on the device, `OFFLOADED`, or `ABSENT` if not needed."""
    copied: int = 0
    """How many blocks must be copied, because the request will write to them and others hold them."""
    awaited: bool = False
    """Whether a running request computes the next full block."""
    lacks_state_at: int = 0
    """Where a longer prefix would end if there were a state there; 0 if there is no such place."""

    @classmethod
    def of(
        cls,
        request: Request,
        running: Sequence[Request],
        tables: Sequence[TableKind],
        pool: BlockPool,
        tiers: Container[bytes],
    ) -> "Prefix":
        """Finds full blocks by key, on the device and in tiers.

        If there is one table whose blocks requests keep, and others are only of states, it also finds the first tokens
        of the next block, a quarter of it or more, in a block of a running request or in one that was released.
        """
        known = {table.name: _Known(request.keys_of(table.name), pool, tiers) for table in tables}
        cached = {table.name: known[table.name].tokens(table) for table in tables}
        leading, block, partial = [], ABSENT, partial_table(tables)
        if partial is not None:
            leading = known[partial.name].leading()
            block, count = _next_tokens(request, running, partial, len(leading), pool)
            cached[partial.name] += count
        end, tokens, lacks_state_at = _longest(request, tables, known, cached)
        blocks = {table.name: known[table.name].blocks(table, tokens) for table in tables}
        if partial is not None and end > len(leading) * partial.block_size:
            blocks[partial.name] = [*leading, block]
        for table in tables:
            index = end // table.block_size
            key, stop = request.keys_of(table.name)[index : index + 1], (index + 1) * table.block_size
            if key and any(
                donor.keys_of(table.name)[index : index + 1] == key and donor.filled < stop for donor in running
            ):
                return cls(tokens, blocks, awaited=True)
        written = (blocks[table.name][index : index + 1] for table in tables for index in [tokens // table.block_size])
        copied = sum(block[0] not in (OFFLOADED, ABSENT) and not pool.is_free(block[0]) for block in written if block)
        return cls(tokens, blocks, copied, lacks_state_at=lacks_state_at)

    @property
    def on_device(self) -> list[int]:
        """The ids of blocks on the device."""
        return [block for found in self.blocks.values() for block in found if block not in (OFFLOADED, ABSENT)]

    @property
    def is_offloaded(self) -> bool:
        """Whether blocks must be loaded."""
        return any(OFFLOADED in found for found in self.blocks.values())


@dataclass
class PrefixCacheStats:
    """Counts tokens of requests when they join the batch.  A preempted request counts again when it rejoins."""

    tokens: int = 0
    """All tokens of these requests."""
    found: int = 0
    """Tokens whose entries were found, so that they were not computed."""
    loaded: int = 0
    """Found tokens whose blocks were loaded from host memory or disk; the others were on the device."""


class _Known:
    """The blocks of a table that hold full blocks of a request."""

    def __init__(self, keys: Sequence[bytes], pool: BlockPool, tiers: Container[bytes]):
        self._keys, self._pool, self._tiers = keys, pool, tiers
        self._found: dict[int, int] = {}
        """What was found: other threads may change what tiers have, and a prefix must be of one moment."""

    def __len__(self) -> int:
        """The number of full blocks of the request."""
        return len(self._keys)

    def find(self, index: int) -> int:
        """The id of the block with the content of block number `index`, `OFFLOADED`, or `ABSENT` if there is none."""
        if not 0 <= index < len(self._keys):
            return ABSENT
        if index not in self._found:
            block = self._pool.find(self._keys[index])
            if block is None:
                block = OFFLOADED if self._keys[index] in self._tiers else ABSENT
            self._found[index] = block
        return self._found[index]

    def leading(self) -> list[int]:
        """The first blocks, up to the first that is absent."""
        return list(takewhile(lambda block: block != ABSENT, map(self.find, range(len(self)))))

    def tokens(self, table: TableKind) -> int:
        """The end of the last full block that may be of use; without a window, none before it is absent."""
        return (len(self.leading()) if table.window is None else len(self)) * table.block_size

    def blocks(self, table: TableKind, tokens: int) -> list[int]:
        """Block ids of the prefix of `tokens` tokens; ABSENT before the window."""
        needed = table.needed(tokens)
        return [ABSENT] * needed.start + list(map(self.find, needed))


def _longest(
    request: Request, tables: Sequence[TableKind], known: Mapping[str, _Known], cached: Mapping[str, int]
) -> tuple[int, int, int]:
    """The end of the longest prefix that is cached in every table, its length, and `Prefix.lacks_state_at`.

    The first two differ if all tokens of the request are cached: the last of them is computed again.

    Args:
      request: the request.
      tables: its tables.
      known: their blocks.
      cached: up to where the blocks of each may be of use.
    """
    sizes = [table.block_size for table in tables]
    states = [table.block_size for table in tables if table.states]
    unit = math.lcm(*states) if states else 1 if partial_table(tables) else math.gcd(*sizes)
    expiring = [table for table in tables if table.window is not None]
    last = len(request.tokens) - 1
    most = min(cached.values()) // unit * unit
    if states and most > last:
        most -= unit  # there is no state after all tokens but the last
    for end in range(most, 0, -unit):
        if all(ABSENT not in map(known[table.name].find, table.needed(min(end, last))) for table in expiring):
            return end, min(end, last), most if most > end and states else 0
    return 0, 0, most if states else 0


def _next_tokens(
    request: Request, running: Sequence[Request], table: TableKind, index: int, pool: BlockPool
) -> tuple[int, int]:
    """A block that begins with the most tokens of the request's block number `index`, and how many; (-1, 0) if none.

    Earlier tokens are the same.  All tokens of a block are found by its key; here, its last one is not counted, nor is
    the request's, and of a running request only those that it has cached.  It must be a quarter of a block or more.
    """
    predecessor = request.predecessor(table.name, index)
    start = index * table.block_size
    wanted = request.tokens[start : min(start + table.block_size, len(request.tokens)) - 1]
    best, most = pool.find_first_tokens(predecessor, wanted)
    for donor in running:
        if not wanted or donor.tokens[start : start + 1] != wanted[:1]:
            continue  # most have other tokens: nothing else is looked up then
        known = len(donor.keys_of(table.name))
        if known >= index and donor.predecessor(table.name, index) == predecessor:  # then all earlier tokens are equal
            count = count_common(wanted, donor.tokens[start : donor.cached])
            if count > most:
                best, most = donor.held[table.name].blocks[index], count
    return (best, most) if most * LEAST_PART >= table.block_size else (-1, 0)
