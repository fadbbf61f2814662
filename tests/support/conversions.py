"""What conversions of blocks must return, in NumPy: the entries of a prompt, taken from caches and put into others.

A cache may be divided over devices: part i of the heads and shard j of the tokens are on device i * shards + j.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import parallel
from jaxkv.testing.buffers import to_bytes, to_cache
from support import scenes
from support.compare import assert_same_bits
from support.emitters import DEFAULT_EMITTERS

_options = {"static_argnames": ("src", "dst", "table", "num_tokens"), "compiler_options": DEFAULT_EMITTERS}
convert_divided = jax.jit(parallel.convert_blocks, **_options)
convert = jax.jit(jaxkv.convert_blocks, **_options)
_read = jax.jit(jaxkv.read_blocks, compiler_options=DEFAULT_EMITTERS)
_write = jax.jit(jaxkv.write_blocks, compiler_options=DEFAULT_EMITTERS)


class Division(NamedTuple):
    """Over how many devices heads are divided, and how tokens are."""

    parts: int = 1
    shards: jaxkv.TokenShards = jaxkv.TokenShards()

    @property
    def devices(self):
        return self.parts * self.shards.num_shards


ONE = Division()


def layout_of(name, entry, *, heads=1, division=ONE, block_size, tokens, num_layers=2):
    """The layout of that name (`scenes.layouts` or `scenes.APART`) of one device, with a block more than needed."""
    owners = places(division.shards, tokens)
    share = max((slot + 1 for _, slot in owners), default=0)
    sizes = dict(
        num_heads=heads // division.parts, num_layers=num_layers, block_size=block_size,
        num_blocks=-(-share // block_size) + 1,
    )  # fmt: skip
    layout = scenes.apart(entry, name, **sizes) if name in scenes.APART else scenes.layouts(entry, **sizes)[name]
    return replace(layout, shards=division.shards) if division.shards.num_shards > 1 else layout


def places(shards, tokens):
    """The shard of each token and its slot there, counted token by token."""
    counts, found = [0] * shards.num_shards, []
    for token in range(tokens):
        shard = token // shards.interleave % shards.num_shards
        found.append((shard, counts[shard]))
        counts[shard] += 1
    return found


def entries_of(layout, division, buffers, blocks, tokens):
    """The entries of a prompt, bytes [layers, heads, tokens, nbytes]; `buffers` are the devices', uint8 [nbytes]."""
    heads = layout.num_heads
    found = np.zeros((layout.num_layers, heads * division.parts, tokens, layout.entry.nbytes), np.uint8)
    for (part, shard), buffer in zip(np.ndindex(division.parts, division.shards.num_shards), buffers, strict=True):
        mine = [(token, slot) for token, (owner, slot) in enumerate(places(division.shards, tokens)) if owner == shard]
        for layer in range(layout.num_layers):
            pages = scenes.fetch(layout, buffer, layer)[blocks]
            for token, slot in mine:
                block, offset = divmod(slot, layout.block_size)
                found[layer, part * heads : (part + 1) * heads, token] = pages[block, :, offset]
    return found


def buffers_of(layout, division, entries, blocks):
    """Buffers of zeros with the entries of a prompt: the inverse of `entries_of`."""
    heads, found = layout.num_heads, []
    for part, shard in np.ndindex(division.parts, division.shards.num_shards):
        buffer = np.zeros(layout.nbytes, np.uint8)
        for layer in range(layout.num_layers):
            pages = np.zeros((layout.num_blocks, heads, layout.block_size, layout.entry.nbytes), np.uint8)
            for token, (owner, slot) in enumerate(places(division.shards, entries.shape[2])):
                block, offset = divmod(slot, layout.block_size)
                if owner == shard:
                    pages[blocks[block], :, offset] = entries[layer, part * heads : (part + 1) * heads, token]
            scenes.place(layout, buffer, layer, pages)
        found.append(buffer)
    return found


def noise(layout, seed):
    """Random bytes, half of whose 16-bit words are NaNs of bf16 with any payload, of float32 with any low bits."""
    buffer = scenes.garbage(layout, np.random.default_rng(seed), "random")
    words = buffer[: buffer.size // 2 * 2].view(np.uint16)
    words[::2] |= 0x7F80
    words[1::4] |= 0x7FC0
    return buffer


def read(layout, buffers, blocks):
    """The payloads of blocks of every device, [devices, n, E]."""
    return np.stack([_read(to_cache(layout, buffer), jnp.asarray(blocks)) for buffer in buffers])


def written(layout, rows, blocks):
    """The bytes of caches of zeros after payloads [devices, n, E] were written to blocks."""
    zeros = jaxkv.KVCache.zeros(layout)
    return [to_bytes(_write(zeros, jnp.asarray(blocks), own)) for own in np.asarray(rows)]


def check(src, dst, tokens, divisions=(ONE, ONE), run=None):
    """A prompt of `tokens` tokens of random bytes is converted from layout `src` to `dst`, and back."""
    run = run or convert_divided
    source, target = divisions
    blocks, other_blocks = (list(range(layout.num_blocks - 1, 0, -1)) for layout in (src, dst))  # all but block 0
    before = [noise(src, seed) for seed in range(source.devices)]
    entries = entries_of(src, source, before, blocks, tokens)
    rows = run(read(src, before, blocks), src=src, dst=dst, num_tokens=tokens)
    assert rows.shape == (target.devices, len(other_blocks), dst.block_nbytes // dst.itemsize)
    for buffer, expected in zip(
        written(dst, rows, other_blocks), buffers_of(dst, target, entries, other_blocks), strict=True
    ):
        assert_same_bits(buffer, expected, f"{src} as {dst}")
    back = run(rows, src=dst, dst=src, num_tokens=tokens)
    for buffer, expected in zip(written(src, back, blocks), buffers_of(src, source, entries, blocks), strict=True):
        assert_same_bits(buffer, expected, f"{src} as {dst} and back")


def check_one(src, dst, tokens):
    """`check` of caches on one device, by `jaxkv.convert_blocks`."""
    check(src, dst, tokens, run=lambda rows, **options: convert(rows[0], **options)[None])
