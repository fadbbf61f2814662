"""`BlockPool`: which blocks are free, how many requests hold each of the others, and what can be found in them."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import takewhile

from jaxkv.offload.events import BlockEvents

type Predecessor = bytes | tuple[bytes, ...]
"""What a block follows: the key of the block before it or, if it is the first, the salt of its request."""


class BlockPool:
    """A free list of blocks, with reference counts and keys of contents, on the host.

    A block with a key can be found by it even after it is freed, until it is evicted.  The block that has been free
    for longest is evicted first.  Blocks whose tokens are given can also be found by their first tokens.

    Args:
      num_blocks: the number of blocks of the cache.  Ids are 0 to num_blocks - 1, and all are free at first.
    """

    def __init__(self, num_blocks: int):
        self._references = [0] * num_blocks
        self.events = BlockEvents()
        """Which keys are added and removed."""
        self._blank: list[int] = []
        """Free blocks without a key."""
        self._kept: dict[int, None] = {}
        """Free blocks that can still be found by key.  The one that has been free for longest comes first."""
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        """The inverse of `_keys`."""
        self._positions: dict[int, tuple[Predecessor, array]] = {}
        """What a block follows, and its tokens, if it can be found by them.  Such blocks have keys."""
        self._followers: dict[Predecessor, list[tuple[array, int]]] = {}
        """The inverse of `_positions`, sorted: the block that begins with the most of some tokens is next to them."""
        self.clear()

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that are not held, including those that can still be found by key."""
        return len(self._blank) + len(self._kept)

    def allocate(self) -> int:
        """Takes a free block, evicting a cached one if necessary.  RuntimeError if none is free: check `num_free`."""
        if self._blank:
            block = self._blank.pop()
        elif self._kept:
            block = next(iter(self._kept))
            del self._kept[block]
            self._forget(block)
        else:
            raise RuntimeError(f"none of {self.num_blocks} blocks is free: check `num_free` before allocating one")
        self._references[block] = 1
        return block

    def name(self, block: int, key: bytes, position: tuple[Predecessor, Iterable[int]] | None = None) -> None:
        """Makes a held block findable by the key of its contents, unless another block already has that key.

        Nothing else may be written to it afterwards, unless `overwrite` is called first.  ValueError if it is not held
        or has another key.

        Args:
          block: the block.
          key: the key of its contents.
          position: what the block follows, and its tokens, to make it findable by the first of them too.
        """
        known = self._keys.get(self._held(block), key)
        if known != key:
            raise ValueError(f"`block` is {block}, which contains {known.hex()}: expected a block without a key")
        if key in self._blocks:
            return
        self._keys[block], self._blocks[key] = key, block
        self.events.stored((key,))
        if position is not None:
            predecessor, tokens = position
            self._positions[block] = predecessor, array("i", tokens)
            insort(self._followers.setdefault(predecessor, []), (self._positions[block][1], block))

    def find(self, key: bytes) -> int | None:
        """The block with this key, whether in use or free; None if there is none."""
        return self._blocks.get(key)

    def find_first_tokens(self, predecessor: Predecessor, tokens: Sequence[int]) -> tuple[int, int]:
        """The block after `predecessor` that begins with the most of these tokens, and how many; (-1, 0) if none does.

        Only blocks are found whose position is known.
        """
        wanted, followers = array("i", tokens), self._followers.get(predecessor, [])
        place = bisect_left(followers, (wanted,))
        found = [(count_common(wanted, theirs), block) for theirs, block in followers[max(place - 1, 0) : place + 1]]
        count, block = max(found, default=(0, -1))
        return (block, count) if count else (-1, 0)

    def is_free(self, block: int) -> bool:
        """Whether no request holds the block."""
        return not self._references[self._known(block)]

    def is_shared(self, block: int) -> bool:
        """Whether the block is held more than once, so that it must be copied before it is written."""
        return self._references[self._held(block)] > 1

    def key_of(self, block: int) -> bytes | None:
        """The key by which a block can be found; None if there is none."""
        return self._keys.get(block)

    def length_of(self, block: int) -> int:
        """The number of tokens in a block whose position is known; 0 for other blocks."""
        return len(self._positions[block][1]) if block in self._positions else 0

    def overwrite(self, block: int) -> None:
        """Makes a held block, which can be found, unfindable: its holder is about to write other contents to it."""
        self._forget(self._held(block))

    def share(self, block: int) -> int:
        """Adds a holder to a block and returns the block.  ValueError if it is free and has no key."""
        if block in self._kept:
            del self._kept[block]
            self._references[block] = 1
        else:
            self._references[self._held(block)] += 1
        return block

    def free(self, block: int) -> None:
        """Removes one holder of a block; without holders, it is free.  ValueError if it is not held."""
        self._references[self._held(block)] -= 1
        if self._references[block]:
            return
        if block in self._keys:
            self._kept[block] = None
        else:
            self._blank.append(block)

    def clear(self) -> None:
        """Makes all blocks free, without keys."""
        self.events.removed()
        self._kept.clear()
        self._keys.clear()
        self._blocks.clear()
        self._positions.clear()
        self._followers.clear()
        self._references[:] = [0] * self.num_blocks
        self._blank[:] = range(self.num_blocks)[::-1]

    def _forget(self, block: int) -> None:
        """Removes the key and the position of a block that has a key."""
        key = self._keys.pop(block)
        del self._blocks[key]
        self.events.removed((key,))
        if block in self._positions:
            predecessor, tokens = self._positions.pop(block)
            followers = self._followers[predecessor]
            del followers[bisect_left(followers, (tokens, block))]
            if not followers:
                del self._followers[predecessor]

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"`block` is {block}: expected one of the {self.num_blocks} blocks")
        return block

    def _held(self, block: int) -> int:
        if not self._references[self._known(block)]:
            raise ValueError(f"`block` is {block}, which is free: expected a block that is held")
        return block


def count_common(ours: Iterable[int], theirs: Iterable[int]) -> int:
    """The number of leading tokens that two sequences have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
