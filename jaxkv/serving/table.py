"""`TableKind`: how requests use one of the block tables of a cache."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv_kernels.formats.states import StateEntry


@dataclass(frozen=True)
class TableKind:
    """Which blocks of a table a request needs and writes."""

    name: str
    block_size: int
    """Tokens per block."""
    window: int | None = None
    """Blocks that lie before the last `window` tokens expire; None if requests keep all."""
    states: bool = False
    """Whether a block has a state after the last token that was computed in it, instead of entries of its tokens."""

    @property
    def plain(self) -> bool:
        """Whether requests keep all blocks, and each has entries of its tokens."""
        return self.window is None and not self.states

    def needed(self, tokens: int) -> range:
        """The blocks that a request needs to go on after its first `tokens` tokens."""
        first = 0 if self.window is None else max(tokens - self.window, 0)
        return range(first // self.block_size, self.up_to(tokens))

    def is_needed_after(self, every: int, block: int) -> bool:
        """Whether requests need this block to continue after a prefix whose length is a multiple of `every` tokens.

        If the prefix is the whole prompt, the request computes its last token again, and needs the blocks which that
        token reads.
        """
        end = -(-(block + 1) * self.block_size // every) * every
        return block >= self.needed(end - 1).start

    def written(self, start: int, end: int) -> range:
        """The blocks that a step writes which processes the tokens [start, end)."""
        last = self.up_to(end)
        return range(last - 1 if self.states else start // self.block_size, last)

    def filled(self, start: int, end: int) -> range:
        """The blocks that are complete after such a step, and were not before.

        A state is complete if the step ended where the block ends: then it is that of the whole block.
        """
        last = end // self.block_size
        if self.states:
            return range(last - 1 if end % self.block_size == 0 else last, last)
        return range(start // self.block_size, last)

    def up_to(self, tokens: int) -> int:
        """The number of blocks with the first `tokens` tokens."""
        return -(-tokens // self.block_size)

    def most_held(self, tokens: int, step: int) -> int:
        """The most blocks that a request of `tokens` tokens holds at once, of which a step processes up to `step`.

        Blocks expire when the host has read the tokens of a step, which is when the next one has been launched.
        """
        if self.window is None:
            return self.up_to(tokens)
        return min(self.up_to(tokens), 3 if self.states else self.up_to(self.window + 2 * step) + 1)


def capacity(tables: Sequence[TableKind], num_blocks: int, step: int) -> int:
    """The most tokens of a request that fit in `num_blocks` blocks, if a step processes up to `step` of them."""
    limit = num_blocks * max(table.block_size for table in tables)

    def held(tokens: int) -> int:
        return sum(table.most_held(tokens, step) for table in tables)

    return bisect_right(range(limit + 1), num_blocks, key=held) - 1


def partial_table(tables: Sequence[TableKind]) -> TableKind | None:
    """The table in whose blocks a prefix may end anywhere, or wherever there is a state; None if there is none.

    It is the only one besides those of states, and requests keep all its blocks.
    """
    (table, *others) = (table for table in tables if not table.states)
    return table if table.plain and not others else None


def tables_of(layout: CacheLayout | PackedLayout, block_size: int, *, divided: bool = False) -> tuple[TableKind, ...]:
    """The tables of a layout, the one with the slots of new tokens first.

    Args:
      layout: that of one device's cache.
      block_size: tokens per block of the first table, on all devices together.
      divided: whether each device has only some of the tokens of a block.

    Raises:
      ValueError: the tokens of blocks are divided, and there are several tables or windows; a group of states has
        neither a state per block nor per token, or shares a table with entries; or the first table has states.
    """
    if not isinstance(layout, PackedLayout):
        return (TableKind("", block_size),)
    found = []
    for name, table in layout.tables.items():
        groups = {group: layout.groups[group] for group in table.groups}
        states = [group for group, about in groups.items() if isinstance(about.entry, StateEntry) and about.rate > 1]
        rates = {group: groups[group].rate for group in states}
        if any(rate != table.block_size for rate in rates.values()) or (states and len(states) < len(groups)):
            raise ValueError(
                f"table {name!r} has states of {rates} tokens, blocks of {table.block_size} tokens and the groups "
                f"{', '.join(groups)}: expected a state per token, or tables with nothing but states per block"
            )
        size = block_size if divided or len(layout.tables) == 1 else table.block_size
        found.append(TableKind(name, size, 1 if states else table.window, bool(states)))
    found.sort(key=lambda table: table.name != "")
    if found[0].states:
        raise ValueError(
            f"table {found[0].name!r} has states: expected a first table with an entry per token, and states in another"
        )
    if divided and not (len(found) == 1 and found[0].plain):
        raise ValueError(
            f"the cache has the tables {', '.join(repr(table.name) for table in found)}, with windows or states: on "
            "devices that divide the tokens of blocks, only one table that keeps all entries is supported"
        )
    return tuple(found)
