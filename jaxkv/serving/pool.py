"""`BlockPool`: which blocks are free, how many requests hold each of the others, and the keys of full blocks."""


class BlockPool:
    """A free list of blocks, with reference counts and keys of contents, on the host.

    A block with a key can be found by it even after it is freed, until it is evicted.  The block that has been free
    for longest is evicted first.

    Args:
      num_blocks: the number of blocks of the cache.  Ids are 0 to num_blocks - 1, and all are free at first.
    """

    def __init__(self, num_blocks: int):
        self._references = [0] * num_blocks
        self._blank: list[int] = []
        """Free blocks without a key."""
        self._kept: dict[int, None] = {}
        """Free blocks that can still be found by key.  The one that has been free for longest comes first."""
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        """The inverse of `_keys`."""
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
            del self._kept[block], self._blocks[self._keys.pop(block)]
        else:
            raise RuntimeError(f"none of {self.num_blocks} blocks is free: check `num_free` before allocating one")
        self._references[block] = 1
        return block

    def name(self, block: int, key: bytes) -> None:
        """Makes a held block findable by the key of its contents, unless another block already has that key.

        Nothing may be written to it afterwards.  ValueError if it is not held or has another key.
        """
        known = self._keys.get(self._held(block), key)
        if known != key:
            raise ValueError(f"`block` is {block}, which contains {known.hex()}: expected a block without a key")
        if key not in self._blocks:
            self._keys[block], self._blocks[key] = key, block

    def find(self, key: bytes) -> int | None:
        """The block with this key, whether in use or free; None if there is none."""
        return self._blocks.get(key)

    def is_free(self, block: int) -> bool:
        """Whether no request holds the block."""
        return not self._references[self._known(block)]

    def is_shared(self, block: int) -> bool:
        """Whether the block is held more than once, so that it must be copied before it is written."""
        return self._references[self._held(block)] > 1

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
        self._kept.clear()
        self._keys.clear()
        self._blocks.clear()
        self._references[:] = [0] * self.num_blocks
        self._blank[:] = range(self.num_blocks)[::-1]

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"`block` is {block}: expected one of the {self.num_blocks} blocks")
        return block

    def _held(self, block: int) -> int:
        if not self._references[self._known(block)]:
            raise ValueError(f"`block` is {block}, which is free: expected a block that is held")
        return block
