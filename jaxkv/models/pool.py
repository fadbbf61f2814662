"""Which blocks are free, and how many requests share each of the others."""


class BlockPool:
    """A free list and reference counts, on the host.

    Args:
      num_blocks: blocks of the cache, 0 to num_blocks - 1; all free at first.
    """

    def __init__(self, num_blocks: int):
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free block, now held once.  RuntimeError where none is free: ask `num_free` first."""
        if not self._free:
            raise RuntimeError(f"none of {self.num_blocks} blocks is free: ask `num_free` before taking one")
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: int) -> int:
        """Holds a block once more.  ValueError where nobody holds it."""
        self._references[self._held(block)] += 1
        return block

    def is_shared(self, block: int) -> bool:
        """Whether several hold it: it must be copied before it is written."""
        return self._references[self._held(block)] > 1

    def release(self, block: int) -> None:
        """Gives back one hold; the last one frees the block.  ValueError where nobody holds it."""
        self._references[self._held(block)] -= 1
        if not self._references[block]:
            self._free.append(block)

    def _held(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"`block` is {block}: expected one of the {self.num_blocks} blocks")
        if not self._references[block]:
            raise ValueError(f"`block` is {block}, which is free: expected a block that is held")
        return block
