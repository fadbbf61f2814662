"""Packed blocks of four groups and three tables: compressed latents and indexer keys, a window, and states."""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import offload

STATE = jaxkv.StateEntry({"conv": ((3, 5), "bfloat16"), "ssm": ((2, 4, 4), "float32")})
GROUPS = {
    "latent": jaxkv.Group(2, jaxkv.MLAEntry("bf16", latent=32, rope=8), rate=2),
    "keys": jaxkv.Group(1, jaxkv.IndexerEntry(head_dim=8), rate=4),
    "local": jaxkv.Group(2, jaxkv.KVEntry("bf16", head_dim=8), num_heads=2, table="window", window=12),
    "state": jaxkv.Group(2, STATE, rate=8, table="state", window=1),
}
LAYOUT = jaxkv.PackedLayout(num_blocks=20, block_size={"": 16, "window": 4, "state": 8}, groups=GROUPS)
TOKENS = 48
BLOCKS = {"": [3, 17, 8], "window": [4, 2, 19, 5, 11, 0, 16, 9, 1, 12, 7, 14], "state": [6, 10, 13, 15, 18, -1]}
"""The blocks of a request.  It has not filled the last block of states."""
ELSEWHERE = {"": [10, 1, 0], "window": [18, 3, 4, 5, 6, 7, 8, 9, 2, 12, 13, 17], "state": [19, 11, 16, 14, 15, -1]}
"""Blocks to which the request moves later."""

each_group = jax.jit(lambda cache, *tables: contents(cache, LAYOUT, tables))


def keys():
    """The keys of the blocks of each table."""
    about = {"layout_fingerprint": LAYOUT.fingerprint, "model": "m"}
    return {
        name: offload.prefix_keys(range(TOKENS), block_size=table.block_size, table=name, **about)
        for name, table in LAYOUT.tables.items()
    }


def filled():
    """A cache with the entries and states of the request."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    cache = jaxkv.KVCache.zeros(LAYOUT["latent"], device=jax.devices()[0])
    for name, layout in LAYOUT.items():
        group, table = GROUPS[name], jnp.asarray([BLOCKS[GROUPS[name].table]], jnp.int32)
        count = TOKENS // group.rate
        slots = jaxkv.slots_for(table, jnp.arange(count)[None], layout)[0]
        cache = cache.view(layout)
        for layer in range(group.num_layers):
            if name == "state":
                states = {part: normal(count, *shape) for part, shape in STATE.shapes.items()}
                cache = jaxkv.write_state(cache, states, slots, layer=layer)
            elif name == "keys":
                cache = jaxkv.write_indexer_k(cache, normal(count, 8), slots, layer=layer)
            elif name == "local":
                cache = jaxkv.write_kv(cache, normal(count, 2, 8), normal(count, 2, 8), slots, layer=layer)
            else:
                cache = jaxkv.write_mla(cache, normal(count, 32), normal(count, 8), slots, layer=layer)
    return cache


def contents(cache, packed, tables):
    """What each group has stored for the request, and what attention to it returns, of a cache of that layout."""
    rows = dict(zip(BLOCKS, (jnp.asarray([table], jnp.int32) for table in tables), strict=True))
    rng = np.random.default_rng(1)
    q, q_pe, q_keys, weights = (jnp.asarray(rng.standard_normal(n), jnp.bfloat16) for n in (
        (1, 4, 32), (1, 4, 8), (1, 1, 4, 8), (1, 1, 4),
    ))  # fmt: skip
    latent, keys, local, state = (cache.view(packed[name]) for name in GROUPS)
    length, sums = jnp.asarray([TOKENS]), jnp.asarray([0, TOKENS])
    found = [
        jaxkv.decode_mla(q, q_pe, latent, rows[""], length // 2, layer=0, scale=0.2),
        jaxkv.gather_indexer_k(keys, rows[""], sums // 4, total=TOKENS // 4, layer=0),
        jaxkv.indexer_logits(q_keys, weights, keys, rows[""], length // 4, layer=0, max_len=TOKENS // 4),
        jaxkv.decode_kv(q[..., :8], local, rows["window"], length, layer=0, scale=0.3, window=12),
    ]
    for layer in (jnp.int32(0), jnp.int32(1)):
        found.append(jaxkv.gather_mla(latent, rows[""], sums // 2, total=TOKENS // 2, layer=layer))
        found.append(jaxkv.gather_kv(local, rows["window"], sums, total=TOKENS, layer=layer))
        found.append(jaxkv.read_state(state, rows["state"][0], layer=layer))
    return found


def write_until_killed(folder):
    """Stores the blocks of the request on disk, and then blocks of other requests, over and over."""
    cache = filled()
    host = offload.HostPool(LAYOUT, 32, disk=offload.DiskPool(folder, LAYOUT, model="m"))
    np.savez(Path(folder) / "contents.npz", *map(np.asarray, jax.tree.leaves(each_group(cache, *BLOCKS.values()))))
    for turn in range(10_000):
        for name, blocks in BLOCKS.items():
            count, prefix = len(blocks) - blocks.count(-1), f"{turn}".encode() if turn else b""
            host.store(cache, blocks[:count], [prefix + key for key in keys()[name][:count]])
        if not turn:
            host.flush()
            print("ready", flush=True)
        time.sleep(0.001)


if __name__ == "__main__":
    write_until_killed(sys.argv[1])
