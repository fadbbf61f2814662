"""Blocks that were stored together, and which of them was used least recently."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from jaxkv.offload.transfers import HostArray


@dataclass(eq=False)
class Chunk:
    """Blocks that travel as one array: every transfer takes some 50 us of the host, whatever its size."""

    keys: tuple[bytes, ...]
    rows: HostArray
    """[len(keys), E]."""
    written: Future | None = None
    """Of the copy on disk, where there is to be one."""

    @property
    def has_arrived(self) -> bool:
        """Whether nobody would wait for it."""
        return isinstance(self.rows, np.ndarray) or self.rows.is_ready()  # type: ignore[missing-attribute]


class Chunks:
    """Chunks by the keys of their blocks; a chunk comes and goes as a whole."""

    def __init__(self):
        self._places: dict[bytes, tuple[Chunk, int]] = {}
        self._chunks: dict[Chunk, None] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        """Blocks in all."""
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks, least recently used first."""
        return iter(self._chunks)

    def place(self, key: bytes) -> tuple[Chunk, int]:
        """The chunk of a block, and which row it is there.  KeyError where it is in none."""
        return self._places[key]

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk of blocks that are in no other."""
        self._chunks[chunk] = None
        self._places.update((key, (chunk, row)) for row, key in enumerate(chunk.keys))

    def remove(self, chunk: Chunk) -> None:
        """Removes a chunk; nothing where it is gone already."""
        if chunk in self._chunks:
            del self._chunks[chunk]
            for key in chunk.keys:
                del self._places[key]

    def use(self, keys: Iterable[bytes]) -> None:
        """Marks blocks of a prompt as used: the first most recently, as the others are worth nothing without it."""
        for key in reversed(list(keys)):
            if key in self._places:
                chunk, _ = self._places[key]
                del self._chunks[chunk]
                self._chunks[chunk] = None
