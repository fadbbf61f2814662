"""A batch of requests for several devices, caches full of NaN, and how a sharded function is run."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import jaxkv
from jaxkv import parallel
from support import scenes
from support.suites.base import dtype_of

BLOCK = 8
COLUMNS = 6
LENGTHS = (0, 1, 2, 7, 16, 17, 33, 45)
LAYER, SCALE = 1, 0.11

MLA = [jaxkv.MLAEntry(name, latent=128, rope=16) for name in ("f32", "bf16", "fp8_ds_mla")]
GQA = jaxkv.KVEntry("f32", head_dim=16, value_dim=8)
ENTRIES = {entry.format: entry for entry in MLA} | {"gqa": GQA}
KV_HEADS = 8


class Batch(NamedTuple):
    """All tokens of the requests, and queries of their last ones."""

    tables: jax.Array
    lengths: jax.Array
    positions: jax.Array
    """[B, S], -1 past a request's length."""
    new: list[jax.Array]
    """[B, S, (H,) n_i]."""
    q: list[jax.Array]
    """[B, Q, Hq, n_i]."""


@cache
def batch(entry, tokens=1):
    rng = np.random.default_rng(0)
    count, longest, dtype = len(LENGTHS), max(LENGTHS), dtype_of(entry)
    lengths = np.asarray(LENGTHS, np.int32)
    positions = np.arange(longest, dtype=np.int32)[None].repeat(count, 0)
    heads = (KV_HEADS,) if isinstance(entry, jaxkv.KVEntry) else ()
    sizes = entry.sizes[:1] if heads else entry.sizes
    return Batch(
        tables=jnp.asarray(rng.permutation(count * COLUMNS).reshape(count, COLUMNS), jnp.int32),
        lengths=jnp.asarray(lengths),
        positions=jnp.asarray(np.where(positions < lengths[:, None], positions, -1)),
        new=[jnp.asarray(rng.standard_normal((count, longest, *heads, n)), dtype) for n in entry.sizes],
        q=[jnp.asarray(rng.standard_normal((count, tokens, 2 * KV_HEADS, n)), dtype) for n in sizes],
    )


def layout_of(entry, num_heads=None, **options):
    heads = num_heads or (KV_HEADS if isinstance(entry, jaxkv.KVEntry) else 1)
    blocks = len(LENGTHS) * COLUMNS
    sizes = dict(num_layers=2, num_blocks=blocks, block_size=BLOCK, num_heads=heads)
    return jaxkv.CacheLayout(**sizes, entry=entry, **options)


def divided(entry, devices, interleave=1):
    """The layout of one device's cache under context parallelism."""
    return layout_of(entry, shards=jaxkv.TokenShards(devices, interleave))


def poisoned(layout, mesh=None):
    """A cache of NaN, or one per device."""
    buffer = scenes.garbage(layout, None).view(layout.dtype)
    if mesh is None:
        return jaxkv.KVCache(jnp.asarray(buffer), layout)
    zeros = parallel.zeros(layout, mesh, "x")
    return jaxkv.KVCache(jax.device_put(np.tile(buffer, mesh.size), zeros.buffer.sharding), layout)


def write(cache, new, slots):
    """The tokens [B, S, ...] at their slots [B, S]."""
    operation = jaxkv.write_kv if isinstance(cache.layout.entry, jaxkv.KVEntry) else jaxkv.write_mla
    return operation(cache, *(x.reshape(-1, *x.shape[2:]) for x in new), slots.reshape(-1), layer=LAYER)


def decode(q, cache, tables, lengths, package=jaxkv, **keywords):
    operation = package.decode_kv if isinstance(cache.layout.entry, jaxkv.KVEntry) else package.decode_mla
    return operation(*q, cache, tables, lengths, layer=LAYER, scale=SCALE, return_lse=True, **keywords)


def run(function, mesh, in_specs, out_specs, *args):
    """The sharded function's result, of arguments put where it wants them, as a mesh of explicit axes demands."""
    placed = [jax.device_put(arg, NamedSharding(mesh, spec)) for arg, spec in zip(args, in_specs, strict=True)]
    return jax.jit(over(mesh, function, in_specs, out_specs))(*placed)


def over(mesh, function, in_specs, out_specs):
    """The sharded function.  What varies over the mesh, JAX can follow on CPUs, but not in Pallas's GPU kernels."""
    checks = jax.default_backend() == "cpu"
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checks)
