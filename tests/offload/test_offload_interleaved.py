"""Any interleaving of writes, decodes, stores, reuses and loads gives the same results as without offload.

Two caches run the same steps.  One loads its blocks from a nearly full pool, in front of a small disk, whose transfers
sometimes fail; the other loads them from a dictionary of everything that was ever stored.
"""

import hashlib
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import offload
from jaxkv.offload import host as host_module
from jaxkv.offload import transfers
from support.cases import each_value
from support.compare import assert_same_bits

STEPS = 2500
BLOCKS, BLOCK_SIZE, LAYERS = 12, 4, 2
MOST = 6
"""The most blocks per step."""
REMEMBERED = 60
"""The number of most recently stored blocks that may be loaded again."""
HELD = 6

MLA = jaxkv.MLAEntry("f32", latent=4, rope=2)
KV = jaxkv.KVEntry("bf16", head_dim=4, value_dim=2)
PACKED = jaxkv.PackedLayout(
    num_blocks=BLOCKS,
    block_size=BLOCK_SIZE,
    groups={"latent": jaxkv.Group(LAYERS, MLA), "indexer": jaxkv.Group(1, jaxkv.IndexerEntry(head_dim=4))},
)
SIZES = dict(num_layers=LAYERS, num_blocks=BLOCKS, block_size=BLOCK_SIZE)


class Injected(RuntimeError):
    """A failure of a transfer that the test injects."""


def mla_write(rng):
    values = [jnp.asarray(rng.standard_normal((8, n)), jnp.float32) for n in MLA.sizes]
    return lambda cache, slots, layer: jaxkv.write_mla(cache, *values, slots, layer=layer)


def mla_decode(rng):
    q = [jnp.asarray(rng.standard_normal((2, 3, n)), jnp.float32) for n in MLA.sizes]
    return lambda cache, *where, layer: jaxkv.decode_mla(*q, cache, *where, layer=layer, scale=0.5, return_lse=True)


def kv_write(rng):
    values = [jnp.asarray(rng.standard_normal((8, 2, n)), jnp.bfloat16) for n in KV.sizes]
    return lambda cache, slots, layer: jaxkv.write_kv(cache, *values, slots, layer=layer)


def kv_decode(rng):
    q = jnp.asarray(rng.standard_normal((2, 4, KV.head_dim)), jnp.bfloat16)
    return lambda cache, *where, layer: jaxkv.decode_kv(q, cache, *where, layer=layer, scale=0.5, return_lse=True)


def packed_write(rng):
    latents, keys = mla_write(rng), jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)

    def write(cache, slots, layer):
        cache = latents(cache, slots, layer)
        indexer = jaxkv.write_indexer_k(cache.view(PACKED["indexer"]), keys, slots, layer=0)
        return indexer.view(PACKED["latent"])

    return write


CASES = {
    "cross-layer": (jaxkv.CacheLayout(**SIZES, entry=MLA), mla_write, mla_decode),
    "layer-major": (jaxkv.CacheLayout(**SIZES, entry=KV, num_heads=2, order="LHBNC"), kv_write, kv_decode),
    "padded": (jaxkv.CacheLayout(**SIZES, entry=MLA, order="BHLNC", block_padding=4), mla_write, mla_decode),
    "packed": (PACKED, packed_write, mla_decode),
}


class Walk:
    """Steps drawn at random, on both caches."""

    def __init__(self, layout, write, decode, disk, seed):
        self.rng = np.random.default_rng(seed)
        view = layout["latent"] if isinstance(layout, jaxkv.PackedLayout) else layout
        self.cache, self.twin = (
            jaxkv.KVCache(jax.device_put(jnp.zeros(view.size, view.dtype), jax.devices()[0]), view) for _ in range(2)
        )
        self.pool = offload.HostPool(layout, 10, disk=disk)
        self.stored: dict[bytes, np.ndarray] = {}
        self.held: list[bytes] = []
        self.failures = self.interrupted = self.loaded = self.missing = 0
        self.write_tokens = jax.jit(write(self.rng), donate_argnums=0)
        self.decode_tokens = jax.jit(decode(self.rng))
        self.write_twin = jax.jit(jaxkv.write_blocks, donate_argnums=0)
        self.read_twin = jax.jit(jaxkv.read_blocks)

    def some(self, most=MOST):
        return self.rng.permutation(BLOCKS)[: self.rng.integers(1, most + 1)]

    def layer(self):
        return jnp.int32(self.rng.integers(LAYERS))

    def write(self):
        """New tokens in some blocks: those of requests, or blocks that were just freed."""
        slots = jnp.asarray(self.rng.permutation(BLOCKS * BLOCK_SIZE)[:8], jnp.int32)
        layer = self.layer()
        self.cache, self.twin = (self.write_tokens(cache, slots, layer) for cache in (self.cache, self.twin))

    def decode(self):
        tables = jnp.asarray(self.rng.permutation(BLOCKS)[:6].reshape(2, 3), jnp.int32)
        lengths = jnp.asarray(self.rng.integers(0, 3 * BLOCK_SIZE + 1, 2), jnp.int32)
        layer = self.layer()
        ours, theirs = (self.decode_tokens(cache, tables, lengths, layer=layer) for cache in (self.cache, self.twin))
        for one, other in zip(ours, theirs, strict=True):
            assert_same_bits(one, other)

    def store(self):
        """Stores blocks, named by their content, and frees them: the next writes overwrite them."""
        blocks = self.some()
        rows = np.asarray(self.read_twin(self.twin, self.padded(blocks)))[: blocks.size]
        keys = [hashlib.sha256(row.tobytes()).digest() for row in rows]
        self.stored |= dict(zip(keys, rows, strict=True))
        with self.counted_failures():
            count = self.pool.store(self.cache, blocks, keys)
            assert self.pool.matched(keys) >= count
        slots = jnp.asarray((blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:8], jnp.int32)
        slots = jnp.full(8, -1, jnp.int32).at[: slots.size].set(slots)
        self.cache, self.twin = (self.write_tokens(cache, slots, jnp.int32(0)) for cache in (self.cache, self.twin))

    def load(self):
        if not self.stored:
            return
        known = list(self.stored)[-REMEMBERED:]
        here = [key for key in known if key in self.pool]
        wanted = known if self.rng.random() < 0.1 else here
        blocks = self.some()[: len(wanted)]
        keys = [wanted[i] for i in self.rng.integers(len(wanted), size=blocks.size)] if wanted else []
        try:
            self.pool.hold(keys)  # on disk they might go meanwhile
        except KeyError as error:
            absent = bytes.fromhex(error.args[0].split()[0])
            assert absent in keys
            assert absent not in self.pool
            with pytest.raises(KeyError) as missing:  # maybe another one, which the disk pool has evicted meanwhile
                self.pool.load(self.cache, blocks, keys)
            absent = bytes.fromhex(missing.value.args[0].split()[0])
            assert absent in keys
            assert absent not in self.pool
            self.missing += 1
            return
        rows = np.zeros((MOST, *self.row_shape), self.twin.layout.dtype)
        try:
            with self.counted_failures():
                self.cache = self.pool.load(self.cache, blocks, keys)
                for row, key in zip(rows, keys, strict=False):  # the pool may hold none of the keys any more
                    row[...] = self.stored[key]
                self.twin = self.write_twin(self.twin, self.padded(blocks), rows)
                self.loaded += len(keys)
        except offload.LoadFailed as failed:
            # What was to be filled holds anything; everything else must be as it was.
            self.cache = failed.cache
            self.twin = self.write_twin(self.twin, self.padded(blocks), self.read_twin(self.cache, self.padded(blocks)))
            self.interrupted += 1
        finally:
            self.pool.release(keys)

    def hold(self):
        here = [key for key in list(self.stored)[-REMEMBERED:] if key in self.pool]
        keys = [here[i] for i in self.rng.integers(len(here), size=2)] if here and len(self.held) < HELD else []
        try:
            self.pool.hold(keys)
        except KeyError:
            return
        self.held += keys

    def release(self):
        self.rng.shuffle(self.held)
        count = int(self.rng.integers(len(self.held) + 1))
        self.pool.release(self.held[:count])
        del self.held[:count]

    def check(self):
        assert_same_bits(self.cache.buffer, self.twin.buffer)
        assert all(key in self.pool for key in self.held)
        assert len(self.pool) <= self.pool.num_blocks

    @property
    def row_shape(self):
        return (self.twin.layout.pages.block_elements,)

    def padded(self, blocks):
        """Ids for the twin, which has one program for all numbers of blocks."""
        return jnp.full(MOST, -1, jnp.int32).at[: len(blocks)].set(jnp.asarray(blocks, jnp.int32))

    @contextmanager
    def counted_failures(self):
        try:
            yield
        except Injected:
            self.failures += 1

    def run(self, steps):
        kinds = [self.write, self.decode, self.store, self.load, self.hold, self.release]
        for step in range(steps):
            kinds[self.rng.choice(6, p=[0.2, 0.15, 0.25, 0.3, 0.05, 0.05])]()
            if step % 50 == 0:
                self.check()
        self.check()


def failing(rng, transfer):
    """`transfer`, but sometimes failing."""

    def maybe(*args):
        if rng.random() < 0.03:
            raise Injected("the test has it so")
        return transfer(*args)

    return maybe


@each_value(("case", "with_disk"), [*CASES], [True, False], default=1)
def test_the_same_as_without_offload(case, with_disk, tmp_path, monkeypatch):
    layout, write, decode = CASES[case]
    monkeypatch.setattr(host_module, "POOL_CHUNKS", 2)  # up to 4 blocks in a chunk
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # nobody pulls the plug here
    disk = offload.DiskPool(tmp_path, layout, model="m", num_blocks=16) if with_disk else None
    walk = Walk(layout, write, decode, disk, seed=len(case) + with_disk)
    rng = np.random.default_rng(1)
    for name in ("to_host", "to_device", "to_pinned"):
        monkeypatch.setattr(transfers, name, failing(rng, getattr(transfers, name)))
    walk.run(STEPS // 2)
    print(vars(walk.pool.stats), walk.failures, walk.interrupted, walk.missing)
    assert min(walk.failures, walk.interrupted, walk.missing, walk.loaded // 100) > 0
    assert walk.pool.stats.evicted > 100
    assert not with_disk or walk.pool.stats.read > 20
