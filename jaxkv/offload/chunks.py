"""Chunks (blocks that were stored together), in order of their last use."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from jaxkv.offload.transfers import HostArray


@dataclass(eq=False)
class Chunk:
    """Blocks that are transferred as one array, because every transfer costs the host about 50 us whatever its size."""

    keys: tuple[bytes, ...]
    rows: HostArray
    """[len(keys), E]."""
    written: Future | None = None
    """The write to disk; None without a disk pool."""

    @property
    def has_arrived(self) -> bool:
        """Whether the chunk has arrived in host memory, so that reading it does not wait."""
        return isinstance(self.rows, np.ndarray) or self.rows.is_ready()  # type: ignore[missing-attribute]


class Chunks:
    """A mapping from keys of blocks to the chunks that hold them.  A chunk is added and removed as a whole."""

    def __init__(self):
        self._places: dict[bytes, tuple[Chunk, int]] = {}
        self._chunks: dict[Chunk, None] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        """The number of blocks in all chunks."""
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks, least recently used first."""
        return iter(self._chunks)

    def place(self, key: bytes) -> tuple[Chunk, int]:
        """The chunk of a block and its row there.  KeyError if no chunk has it."""
        return self._places[key]

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk; none of its blocks may be in another chunk."""
        self._chunks[chunk] = None
        self._places.update((key, (chunk, row)) for row, key in enumerate(chunk.keys))

    def remove(self, chunk: Chunk) -> None:
        """Removes a chunk if it is present, also if an interrupted `add` or `remove` has left only a part of it."""
        if chunk in self._chunks:
            for key in chunk.keys:
                if key in self._places and self._places[key][0] is chunk:
                    del self._places[key]
            del self._chunks[chunk]

    def use(self, keys: Iterable[bytes]) -> None:
        """Marks blocks of a prompt as used, the first one most recently, because the others are useless without it."""
        for key in reversed(list(keys)):
            if key in self._places:
                chunk, _ = self._places[key]
                del self._chunks[chunk]
                self._chunks[chunk] = None
