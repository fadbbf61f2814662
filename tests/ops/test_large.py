"""Caches of more than 2**31 elements: what lies beyond is found, and nothing wraps round to the beginning."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv_kernels.addressing.row_view import row_view
from support import scenes
from support.compare import assert_same_bits

ENTRY = jaxkv.MLAEntry("fp8")  # 576 elements of one byte
BLOCK_SIZE = 64
SCALE = 0.02


def layout_of(order, num_layers, num_blocks):
    sizes = dict(num_layers=num_layers, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return jaxkv.CacheLayout(**sizes, entry=ENTRY, order=order, dtype="uint8")


def write(cache, kv_c, k_pe, slots, layer):
    return jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer, kv_scale=SCALE)


def gather(cache, tables, total, layer):
    keywords = {"kv_scale": SCALE, "dtype": jnp.float32, "total": total}
    return jaxkv.gather_mla(cache, tables, jnp.asarray([0, total]), layer=layer, **keywords)


def decode(cache, q, tables, total, layer):
    keywords = {"scale": 0.1, "kv_scale": SCALE, "return_lse": True}
    return jaxkv.decode_mla(*q, cache, tables, jnp.asarray([total]), layer=layer, **keywords)


def blocks_at_edges(layout, layers):
    """The first and the last block, and those in which the elements 2**31 and 2**32 of the buffer lie."""
    offsets = [edge - layer * layout.strides.layer for edge in (2**31, 2**32) for layer in layers]
    inside = {offset // layout.strides.block for offset in offsets if offset > 0}
    return [0, *sorted(block for block in inside if 1 < block < layout.num_blocks - 2), layout.num_blocks - 1]


def check(layout, view, layers):
    """Writes, gathers, decodes and copies at both ends of the buffer and round the powers of two between."""
    assert layout.size > 2**31
    assert row_view(layout.pages).shape == view
    blocks = blocks_at_edges(layout, layers)
    total = len(blocks) * BLOCK_SIZE - 3
    tables = jnp.asarray([blocks], jnp.int32)
    slots = jaxkv.slots_for(tables, jnp.arange(total)[None], block_size=BLOCK_SIZE)[0]

    rng = np.random.default_rng(0)
    q = [jnp.asarray(rng.standard_normal((1, 2, n)), jnp.bfloat16) for n in ENTRY.sizes]
    small = layout_of("LBNHC", 1, len(blocks))
    near = jnp.arange(len(blocks), dtype=jnp.int32)[None]
    store = jax.jit(write, donate_argnums=0)
    cache = jaxkv.KVCache.zeros(layout)
    twins = []
    for layer in layers:
        # No byte of an entry is 0, so that the bytes written can be counted.
        new = [jnp.asarray(np.abs(rng.standard_normal((total, n))) + 0.1, jnp.bfloat16) for n in ENTRY.sizes]
        cache = store(cache, *new, slots, layer)
        twin = store(jaxkv.KVCache.zeros(small), *new, jnp.arange(total), 0)
        for found, expected in (
            (gather(cache, tables, total, layer), gather(twin, near, total, 0)),
            (decode(cache, q, tables, total, layer), decode(twin, q, near, total, 0)),
        ):
            for a, b in zip(found, expected, strict=True):
                assert_same_bits(a, b)
        twins.append(scenes.window(small, scenes.to_bytes(twin))[0])
        assert np.count_nonzero(twins[-1]) == total * ENTRY.nbytes

    # The last block over the last but one, and from there, as it travels, over block 1.
    last = layout.num_blocks - 1
    cache = jax.jit(jaxkv.copy_blocks, donate_argnums=0)(cache, jnp.asarray([last]), jnp.asarray([last - 1]))
    rows = jaxkv.read_blocks(cache, jnp.asarray([last - 1]))
    cache = jax.jit(jaxkv.write_blocks, donate_argnums=0)(cache, jnp.asarray([1]), rows)

    # Only now, for a buffer that NumPy looks at cannot be donated.
    everything = scenes.to_bytes(cache)
    entries = scenes.window(layout, everything)
    for layer, twin in zip(layers, twins, strict=True):
        assert_same_bits(entries[layer, blocks], twin)
        assert_same_bits(entries[layer, [last - 1, 1]], twin[[-1, -1]])
    written = sum(np.count_nonzero(twin) + 2 * np.count_nonzero(twin[-1]) for twin in twins)
    assert np.count_nonzero(everything) == written  # every other byte is 0 still
    cache.buffer.delete()


def test_elements_beyond_2_31_are_found_and_nothing_wraps_round():
    # One after the other in one test, so that one such cache at a time is in memory: 2.2, 2.2 and 4.4 GB.
    block = BLOCK_SIZE * ENTRY.nbytes
    check(layout_of("BLNHC", 3, 20_000), (20_000, 3 * block), [0, 2])
    check(layout_of("LBNHC", 3, 20_000), (3, 20_000 * block), [0, 2])
    # A layer alone has more than 2**31 elements: the view has to part layers and blocks.
    check(layout_of("LBNHC", 2, 60_000), (2, 60_000, block), [0, 1])
