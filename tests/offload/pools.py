"""Pools of small blocks, and what is in them."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import offload
from jaxkv.testing.buffers import to_cache
from support import scenes

ENTRY = jaxkv.MLAEntry("bf16", latent=8, rope=4)
SIZES = dict(num_layers=3, num_blocks=16, block_size=4)
LAYOUT = jaxkv.CacheLayout(**SIZES, entry=ENTRY)


def filled(layout, seed=0):
    """A cache of random bytes, and its blocks as rows."""
    cache = to_cache(layout, scenes.garbage(layout, np.random.default_rng(seed), "random"))
    cache = jaxkv.KVCache(jax.device_put(cache.buffer, jax.devices()[0]), layout)
    return cache, np.asarray(jaxkv.read_blocks(cache, jnp.arange(layout.num_blocks)))


def names(count, prompt="a"):
    return [f"{prompt}{i}".encode() for i in range(count)]


def blocks_of(cache, blocks):
    return np.asarray(jaxkv.read_blocks(cache, jnp.asarray(blocks, jnp.int32)))


KEY, OTHER = bytes(range(32)), bytes(32)


def reopened(folder, **options):
    """A pool on disk in that folder."""
    return offload.DiskPool(folder, LAYOUT, **{"model": "m"} | options)


def flip(place, mask=1):
    def damage(file):
        contents = bytearray(file.read_bytes())
        contents[place] ^= mask
        file.write_bytes(contents)

    return damage
