"""Random block tables, lengths, slots and block ids, some of them invalid."""

import numpy as np

from jaxkv.layout.layout import CacheLayout
from jaxkv.testing.random_layouts import pick

FAR = (-1, -7, -(2**31), 2**31 - 1)
"""Blocks and slots that no cache has."""


def draw_lengths(rng: np.random.Generator, requests: int, most: int, block_size: int) -> np.ndarray:
    """Lengths [B] from 0 to `most`, often near the edges of blocks and of the tiles of GPU kernels."""
    near = rng.choice([block_size, 64, 128], requests) * rng.integers(0, 9, requests)
    near += rng.integers(-1, 2, requests)
    found = np.where(rng.random(requests) < 0.5, near, rng.integers(most + 1, size=requests))
    return np.clip(np.where(rng.random(requests) < 0.1, most, found), 0, most)


def past_the_limits(rng: np.random.Generator, lengths: np.ndarray, most: int) -> np.ndarray:
    """The same lengths, after they have been clamped: some of the first and last are replaced by ones outside."""
    changed = rng.random(lengths.shape) < pick(rng, 0, 0, 0.3)
    below, above = (rng.choice(values, lengths.shape) for values in ((-1, -(2**31)), (most + 1, 2**31 - 1)))
    return np.where(changed & (lengths == 0), below, np.where(changed & (lengths == most), above, lengths))


def draw_tables(rng: np.random.Generator, layout: CacheLayout, columns: int, lengths: np.ndarray) -> np.ndarray:
    """Tables [B, M].

    Requests have blocks of their own or share them.  Table entries past the lengths hold any value, and a few before
    them are not blocks of the cache.
    """
    blocks, shape = layout.num_blocks, (lengths.size, columns)
    if lengths.size * columns <= blocks and rng.random() < 0.7:
        tables = rng.permutation(blocks)[: lengths.size * columns].reshape(shape)
    else:
        tables = rng.integers(blocks, size=shape)
    used = np.arange(columns) * layout.block_size < lengths[:, None]
    if rng.random() < 0.1:
        used &= rng.random(shape) < 0.7
    return np.where(used, tables, rng.choice([*FAR, blocks, int(rng.integers(blocks))], shape))


def reveal(live: np.ndarray, layout: CacheLayout, tables: np.ndarray, first, last) -> None:
    """Marks the slots of the tokens [first, last) of each request in `live`."""
    size = layout.block_size
    for row, begin, end in zip(tables, np.broadcast_to(first, last.shape), last, strict=True):
        positions = np.arange(max(begin, 0), end)
        blocks = row[positions // size].astype(np.int64)
        known = (blocks >= 0) & (blocks < layout.num_blocks)
        live[(blocks * size + positions % size)[known]] = True


def draw_distinct(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
    """`count` integers: distinct ones of range(size), and some outside of it."""
    found = rng.choice([*FAR, size], count)
    inside = rng.permutation(size)[:count]
    inside = np.where(rng.random(inside.size) < 0.1, found[: inside.size], inside)
    found[: inside.size] = inside
    return rng.permutation(found)
