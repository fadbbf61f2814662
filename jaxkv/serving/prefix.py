"""`Prefix`: the cached part of a request, and the blocks that hold it; and counters of prefix reuse."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from jaxkv.serving.pool import BlockPool, count_common
from jaxkv.serving.request import ABSENT, Request
from jaxkv.serving.table import TableKind, partial_table
from jaxkv.serving.tiers import Tiers

OFFLOADED = -2
"""Stands for a block id if the content is not on the device, but in host memory or on disk."""


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

    @classmethod
    def of(
        cls, request: Request, running: Sequence[Request], tables: Sequence[TableKind], pool: BlockPool, tiers: Tiers
    ) -> "Prefix":
        """Finds full blocks by key.

        If there is one table, and requests keep all its blocks, it also finds the first tokens of the next block, in a
        block of a running request or in one that was released.
        """
        known = {table.name: _Known(request.keys_of(table.name), pool, tiers) for table in tables}
        end, tokens = _longest(request, tables, known)
        blocks = {table.name: known[table.name].blocks(table, tokens) for table in tables}
        for table in tables:
            index = end // table.block_size
            key, stop = request.keys_of(table.name)[index : index + 1], (index + 1) * table.block_size
            if key and any(
                donor.keys_of(table.name)[index : index + 1] == key and donor.filled < stop for donor in running
            ):
                return cls(tokens, blocks, awaited=True)
        table = partial_table(tables)
        if table is not None:
            block, count = _next_tokens(request, running, table, end // table.block_size, pool)
            if count:
                tokens, blocks = end + count, {table.name: [*known[table.name].leading(), block]}
        written = (blocks[table.name][index : index + 1] for table in tables for index in [tokens // table.block_size])
        copied = sum(block[0] not in (OFFLOADED, ABSENT) and not pool.is_free(block[0]) for block in written if block)
        return cls(tokens, blocks, copied)

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

    def __init__(self, keys: Sequence[bytes], pool: BlockPool, tiers: Tiers):
        self._keys, self._pool, self._tiers = keys, pool, tiers

    def __len__(self) -> int:
        """The number of full blocks of the request."""
        return len(self._keys)

    def find(self, index: int) -> int:
        """The id of the block with the content of block number `index`, `OFFLOADED`, or `ABSENT` if there is none."""
        if not 0 <= index < len(self._keys):
            return ABSENT
        block = self._pool.find(self._keys[index])
        if block is None:
            return OFFLOADED if self._keys[index] in self._tiers else ABSENT
        return block

    def leading(self) -> list[int]:
        """The first blocks, up to the first that is absent."""
        return list(takewhile(lambda block: block != ABSENT, map(self.find, range(len(self)))))

    def blocks(self, table: TableKind, tokens: int) -> list[int]:
        """Block ids of the prefix of `tokens` tokens; ABSENT before the window."""
        needed = table.needed(tokens)
        return [ABSENT] * needed.start + list(map(self.find, needed))


def _longest(request: Request, tables: Sequence[TableKind], known: Mapping[str, _Known]) -> tuple[int, int]:
    """The end of the last full block that is cached in every table, and the length of the prefix.

    These differ if all tokens of the request are cached: the last of them is computed again.
    """
    sizes = [table.block_size for table in tables]
    states = [table.block_size for table in tables if table.states]
    unit = math.lcm(*states) if states else math.gcd(*sizes)
    ends = [
        (len(known[table.name].leading()) if table.window is None else len(known[table.name])) * table.block_size
        for table in tables
    ]
    expiring = [table for table in tables if table.window is not None]
    last = len(request.tokens) - 1
    for end in range(min(ends) // unit * unit, 0, -unit):
        if states and end > last:
            continue  # there is no state after all tokens but the last
        tokens = min(end, last)
        if all(ABSENT not in map(known[table.name].find, table.needed(tokens)) for table in expiring):
            return end, tokens
    return 0, 0


def _next_tokens(
    request: Request, running: Sequence[Request], table: TableKind, index: int, pool: BlockPool
) -> tuple[int, int]:
    """A block that begins with the most tokens of the request's block number `index`, and how many; (-1, 0) if none.

    Earlier tokens are the same.  The request's last token is not counted, and of a running request only those that it
    has cached.
    """
    predecessor = request.predecessor(table.name, index)
    start = index * table.block_size
    wanted = request.tokens[start : min(start + table.block_size, len(request.tokens) - 1)]
    best, most = pool.find_first_tokens(predecessor, wanted)
    for donor in running:
        known = len(donor.keys_of(table.name))
        if known >= index and donor.predecessor(table.name, index) == predecessor:  # then all earlier tokens are equal
            count = count_common(wanted, donor.tokens[start : donor.cached])
            if count > most:
                best, most = donor.held[table.name].blocks[index], count
    return best, most
