"""Which blocks are free, how many requests share each of the others, and what full ones contain."""


class BlockPool:
    """A free list, reference counts and the keys of contents, on the host.

    A block that got a key stays findable by it when nobody holds it any longer, until its room is needed: then the one
    that has been free for longest goes first.

    Args:
      num_blocks: blocks of the cache, 0 to num_blocks - 1; all free at first.
    """

    def __init__(self, num_blocks: int):
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks))[::-1]
        """Free, of unknown content."""
        self._kept: dict[int, None] = {}
        """Free, but findable; the longest free first."""
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        """The inverse of `_keys`."""

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those that can be found included."""
        return len(self._blank) + len(self._kept)

    def take(self) -> int:
        """A free block of no known content, now held once.  RuntimeError where none is free: ask `num_free` first."""
        if self._blank:
            block = self._blank.pop()
        elif self._kept:
            block = next(iter(self._kept))
            del self._kept[block], self._blocks[self._keys.pop(block)]
        else:
            raise RuntimeError(f"none of {self.num_blocks} blocks is free: ask `num_free` before taking one")
        self._references[block] = 1
        return block

    def name(self, block: int, key: bytes) -> None:
        """Makes a held block findable, now that it contains what `key` stands for; nothing where another block is.

        From then on nothing else may be written into it.  ValueError where nobody holds it, or it has another key.
        """
        known = self._keys.get(self._held(block), key)
        if known != key:
            raise ValueError(f"`block` is {block}, which contains {known.hex()}: expected a block without a key")
        if key not in self._blocks:
            self._keys[block], self._blocks[key] = key, block

    def find(self, key: bytes) -> int | None:
        """The block, held or free, that contains what `key` stands for; None where there is none."""
        return self._blocks.get(key)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds it."""
        return not self._references[self._known(block)]

    def is_shared(self, block: int) -> bool:
        """Whether several hold it: it must be copied before it is written."""
        return self._references[self._held(block)] > 1

    def share(self, block: int) -> int:
        """Holds a block once more.  ValueError where nobody holds it, unless it can be found."""
        if block in self._kept:
            del self._kept[block]
            self._references[block] = 1
        else:
            self._references[self._held(block)] += 1
        return block

    def release(self, block: int) -> None:
        """Gives back one hold; the last one frees the block.  ValueError where nobody holds it."""
        self._references[self._held(block)] -= 1
        if self._references[block]:
            return
        if block in self._keys:
            self._kept[block] = None
        else:
            self._blank.append(block)

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"`block` is {block}: expected one of the {self.num_blocks} blocks")
        return block

    def _held(self, block: int) -> int:
        if not self._references[self._known(block)]:
            raise ValueError(f"`block` is {block}, which is free: expected a block that is held")
        return block
