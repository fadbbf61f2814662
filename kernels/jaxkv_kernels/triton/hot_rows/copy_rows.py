"""Copies entries between host memory, which kernels access by its address, and rows on the device.

A warp copies one entry at a time, in words as wide as the alignment of its addresses allows.
"""

from dataclasses import dataclass
from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.addressing.entry_rows import entry_runs
from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.triton.entries.addresses import in_bytes, slots_of, token_address
from jaxkv_kernels.triton.runtime.launch import launch

WARPS = 4
WIDEST = 16
"""Bytes of the widest load or store of a thread."""
LINE = tl.constexpr(128)
"""Bytes of a cache line.  A warp reads parts of as few lines as possible, each of which is a request to the host."""
WORDS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}
"""By bytes."""


@dataclass(frozen=True)
class CopyRun:
    """A run of bytes of an entry, on the device and in host memory.  Kernels receive it as a constant."""

    pages: Pages
    """In bytes, as `host_pages`."""
    host_pages: Pages

    @property
    def alignment(self) -> int:
        """Bytes to which all addresses are aligned, at most `WIDEST`."""
        both = self.pages, self.host_pages
        steps = ((x.width, x.offset, x.layer_stride, x.block_stride, x.token_stride) for x in both)
        return gcd(WIDEST, *sum(steps, ()))

    @property
    def word_bytes(self) -> int:
        """Bytes of a word, of which a thread copies several in a row."""
        return min(self.alignment, 4)

    @property
    def word(self) -> tl.dtype:
        """The type of a word."""
        return WORDS[self.word_bytes]

    @property
    def words(self) -> int:
        """The number of words."""
        return self.pages.width // self.word_bytes

    @property
    def columns(self) -> int:
        """The words of the lines that it may touch, as a power of two."""
        return triton.next_power_of_2((self.pages.width + LINE.value - self.alignment) // self.word_bytes)


def copy_runs(pages: Pages, host_pages: Pages, entry, itemsize: int) -> list[CopyRun]:
    """The runs of bytes that an entry consists of, one or two, in a buffer whose elements have `itemsize` bytes."""
    return [
        CopyRun(in_bytes(here, itemsize), in_bytes(host, itemsize))
        for here, host in zip(*(entry_runs(each, entry, itemsize) for each in (pages, host_pages)), strict=True)
    ]


@partial(jax.jit, static_argnames=("pages", "host_pages", "entry"))
def store_rows(buffer, address, writes, slots, host_slots, layer, *, pages, host_pages, entry):
    """Copies entries from slots [n] of the buffer to host_slots [n] of host memory; returns `writes` plus 1.

    XLA does not know that the memory changes.  Later kernels that read it are ordered by `writes`.
    """
    operands = address, slots, host_slots, jnp.reshape(layer, (1,)), buffer
    grid = (triton.cdiv(slots.size, WARPS),)
    for run in copy_runs(pages, host_pages, entry, buffer.dtype.itemsize):
        constants = {"RUN": run, "COUNT": slots.size, "TILE": WARPS}
        writes = launch(_store_rows, operands, updated=(writes,), grid=grid, warps=WARPS, **constants)[0]
    return writes


@triton.jit
def _store_rows(
    address, slots, host_slots, layers, buffer, writes, RUN: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr
):
    pages: tl.constexpr = RUN.pages  # Triton 3.6 cannot pass attributes on
    host_pages: tl.constexpr = RUN.host_pages
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    layer = tl.load(layers)
    slot = tl.load(slots + n, mask=n < COUNT, other=-1)
    host_slot = tl.load(host_slots + n, mask=n < COUNT, other=-1)
    keep = (slot >= 0) & (slot < slots_of(layer, pages))
    keep &= (host_slot >= 0) & (host_slot < slots_of(layer, host_pages))
    words, column = load_words(token_address(buffer, layer, slot, 0, pages), keep, RUN)
    store_words(token_address(host_memory(address), layer, host_slot, 0, host_pages), words, column, keep, RUN)
    if tl.program_id(0) == 0:
        tl.store(writes, tl.load(writes) + 1)


@triton.jit
def host_memory(address):
    """An address, given as two int32, as int64."""
    return (tl.load(address + 1).to(tl.int64) << 32) | (tl.load(address).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def load_words(start, keep, RUN: tl.constexpr):
    """The words of runs at the addresses `start` [n], where `keep` [n] holds, and their numbers: both [n, columns]."""
    before = (start.to(tl.int64) % LINE).to(tl.int32) // RUN.word_bytes  # words of the first line
    together: tl.constexpr = RUN.alignment // RUN.word_bytes
    before = tl.multiple_of(before, together)
    column = tl.arange(0, RUN.columns)[None, :] - before[:, None]
    return tl.load(_words(start, RUN)[:, None] + column, mask=_within(column, keep, RUN)), column


@triton.jit
def store_words(end, words, column, keep, RUN: tl.constexpr):
    """Stores the words with numbers `column` of runs at the addresses `end` [n], where `keep` [n] holds."""
    tl.store(_words(end, RUN)[:, None] + column, words, mask=_within(column, keep, RUN))


@triton.jit
def _words(place, RUN: tl.constexpr):
    """Addresses [n] as pointers to words."""
    alignment: tl.constexpr = RUN.alignment
    return tl.multiple_of(place.to(tl.pointer_type(RUN.word)), alignment)


@triton.jit
def _within(column, keep, RUN: tl.constexpr):
    return keep[:, None] & (column >= 0) & (column < RUN.words)
