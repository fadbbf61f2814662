"""Which memory a function reads: found by replacing parts of a buffer by NaN and looking at the result."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import jaxkv
from jaxkv.testing.buffers import stored_fields
from jaxkv.testing.caches import byte_name, name_of


class Memory(NamedTuple):
    """A cache, and the part of it that a result must be computed from."""

    layout: jaxkv.CacheLayout
    layer: int
    head: int
    places: Sequence[tuple[int, int, str]]
    """The block of each token, its index there, and a name of it."""
    stored: np.ndarray
    """The bytes of the cache."""


def explain_read(memory: Memory, result: Callable[[np.ndarray], bytes]) -> str:
    """A sentence: which memory `result` reads that it must not read, or does not read although it must.

    `result` returns the bits of a result, given the bytes of the cache.  It is called some hundred times.
    """
    layout, buffer = memory.layout, np.zeros_like(memory.stored)
    own = np.zeros(buffer.size, bool)
    blocks, tokens = np.asarray([place[:2] for place in memory.places], np.int64).reshape(-1, 2).T
    for _, view in stored_fields(layout, own):
        view[memory.layer, blocks, memory.head, tokens] = True
    buffer[own] = memory.stored[own]
    quiet = result(buffer)

    def reads(places: np.ndarray) -> bool:
        changed = buffer.copy()
        changed[places] = 0xFF
        return result(changed) != quiet

    others = np.flatnonzero(~own)
    if reads(others):
        while others.size > 1:
            first, second = np.array_split(others, 2)
            others = first if reads(first) else second
        return f"It reads {byte_name(layout, int(others[0]))}, which it must not read."
    fields = [(field.name, view) for field, view in stored_fields(layout, np.arange(buffer.size))]
    for block, token, name in reversed(memory.places):
        for field, view in fields:
            if field != "padding" and not reads(view[memory.layer, block, memory.head, token]):
                entry = name_of(memory.layer, block, memory.head, token)
                return f"It does not read {field} of {entry}, which is {name}."
    return "It reads the memory that it must, and no other: what it computes is wrong."
