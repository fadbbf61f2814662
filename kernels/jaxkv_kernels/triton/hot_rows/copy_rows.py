"""Copies entries between host memory, which kernels access by its address, and rows on the device.

A program copies ROWS entries at a time, one per warp, in words as wide as the alignment of their addresses allows.

What bounds it: the link to the host.
"""

from collections.abc import Iterator
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.addressing.entry_rows import entry_runs
from jaxkv_kernels.triton.entries.addresses import in_bytes, slots_of, token_address
from jaxkv_kernels.triton.runtime.launch import launch

ROWS, WARPS = 4, 4
PROGRAMS = 2048
"""Programs that load rows: as many as the GPU runs at once."""
WIDEST = 16
"""Bytes of the widest load or store of a thread."""
LINE = tl.constexpr(128)
"""Bytes of a cache line.  A warp reads parts of as few lines as possible, each of which is a request to the host."""
WORDS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}
"""By bytes."""


def load_rows(buffer, address, writes, counts, sources, targets, layer, *, pages, host_pages, entry):
    """The buffer with entries from host memory: counts[b] of request b, from the slots `sources` [B, N] to `targets`.

    `writes` is an operand only because the memory must be read after them.
    """
    requests, count = sources.shape
    operands = address, writes, counts, sources, targets, jnp.reshape(layer, (1,))
    shares = min(triton.cdiv(count, ROWS), triton.cdiv(PROGRAMS, requests))
    for constants in _constants(pages, host_pages, entry, buffer.dtype.itemsize, count):
        grid = (requests, shares)
        buffer = launch(_load_rows, operands, updated=buffer, grid=grid, warps=WARPS, SHARES=shares, **constants)[0]
    return buffer


@partial(jax.jit, static_argnames=("pages", "host_pages", "entry"))
def store_rows(buffer, address, writes, slots, host_slots, layer, *, pages, host_pages, entry):
    """Copies entries from slots [n] of the buffer to host_slots [n] of host memory; returns `writes` plus 1.

    XLA does not know that the memory changes.  Later kernels that read it are ordered by `writes`.
    """
    operands = address, slots, host_slots, jnp.reshape(layer, (1,)), buffer
    for constants in _constants(pages, host_pages, entry, buffer.dtype.itemsize, slots.size):
        grid = (triton.cdiv(slots.size, ROWS),)
        writes = launch(_store_rows, operands, updated=writes, grid=grid, warps=WARPS, **constants)[0]
    return writes


def _constants(pages, host_pages, entry, itemsize, count) -> Iterator[dict[str, Any]]:
    """Constants of the kernels, for each run of bytes that an entry consists of."""
    for runs in zip(*(entry_runs(each, entry, itemsize) for each in (pages, host_pages)), strict=True):
        here, host = (in_bytes(run, itemsize) for run in runs)
        steps = ((x.width, x.offset, x.layer_stride, x.block_stride, x.token_stride) for x in (here, host))
        alignment = gcd(WIDEST, *sum(steps, ()))
        word = min(alignment, 4)
        yield {
            "PAGES": here,
            "HOST_PAGES": host,
            "COUNT": count,
            "ALIGNMENT": alignment,
            "WORD": WORDS[word],
            "WIDTH": here.width // word,
            "COLUMNS": triton.next_power_of_2((here.width + LINE.value - alignment) // word),
            "TILE": ROWS,
        }


@triton.jit
def _load_rows(
    address, writes, counts, sources, targets, layers, buffer,
    PAGES: tl.constexpr, HOST_PAGES: tl.constexpr, COUNT: tl.constexpr, ALIGNMENT: tl.constexpr, WORD: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    count = tl.load(counts + request)
    layer = tl.load(layers)
    host = _host(address)
    first = request.to(tl.int64) * COUNT
    for start in range(tl.program_id(1) * TILE, count, SHARES * TILE):
        n = start + tl.arange(0, TILE)
        source = tl.load(sources + first + n, mask=n < count, other=0)
        target = tl.load(targets + first + n, mask=n < count, other=0)
        here = _words(token_address(host, layer, source, 0, HOST_PAGES), ALIGNMENT, WORD)
        there = _words(token_address(buffer, layer, target, 0, PAGES), ALIGNMENT, WORD)
        _copy(here, there, n < count, WIDTH, COLUMNS, ALIGNMENT)


@triton.jit
def _store_rows(
    address, slots, host_slots, layers, buffer, writes,
    PAGES: tl.constexpr, HOST_PAGES: tl.constexpr, COUNT: tl.constexpr, ALIGNMENT: tl.constexpr, WORD: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    layer = tl.load(layers)
    slot = tl.load(slots + n, mask=n < COUNT, other=-1)
    host_slot = tl.load(host_slots + n, mask=n < COUNT, other=-1)
    keep = (slot >= 0) & (slot < slots_of(layer, PAGES)) & (host_slot >= 0) & (host_slot < slots_of(layer, HOST_PAGES))
    start = _words(token_address(buffer, layer, slot, 0, PAGES), ALIGNMENT, WORD)
    end = _words(token_address(_host(address), layer, host_slot, 0, HOST_PAGES), ALIGNMENT, WORD)
    _copy(start, end, keep, WIDTH, COLUMNS, ALIGNMENT)
    if tl.program_id(0) == 0:
        tl.store(writes, tl.load(writes) + 1)


@triton.jit
def _host(address):
    """An address, given as two int32, as int64."""
    return (tl.load(address + 1).to(tl.int64) << 32) | (tl.load(address).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _words(place, ALIGNMENT: tl.constexpr, WORD: tl.constexpr):
    """Addresses [n] as pointers to words."""
    return tl.multiple_of(place.to(tl.pointer_type(WORD)), ALIGNMENT)


@triton.jit
def _copy(start, end, keep, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Copies WIDTH words from the pointers `start` [n] to `end` [n], where `keep` [n] holds."""
    word: tl.constexpr = start.dtype.element_ty.primitive_bitwidth // 8
    before = (start.to(tl.int64) % LINE).to(tl.int32) // word  # words of the first line
    column = tl.arange(0, COLUMNS)[None, :] - tl.multiple_of(before, ALIGNMENT // word)[:, None]
    mask = keep[:, None] & (column >= 0) & (column < WIDTH)
    tl.store(end[:, None] + column, tl.load(start[:, None] + column, mask=mask), mask=mask)
