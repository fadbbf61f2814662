"""`HotRows`: the rows that an LRU cache in plain Python has, with the bytes of host memory in them."""

import gc
from collections import OrderedDict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import offload
from support.arrays import on_device
from support.cases import slow
from support.compare import assert_same_bits

LAYERS, REQUESTS, BLOCK, ROWS, TOKENS = 2, 3, 8, 24, 120


class PythonLRU:
    """The rows of one request and layer: position -> row, the least recently used first; free rows are negative."""

    def __init__(self, rows):
        self._rows = OrderedDict((-1 - row, row) for row in range(rows))

    def use(self, positions):
        """The row of each position after one call; None for negative positions."""
        wanted = list(dict.fromkeys(p for p in positions if p >= 0))
        missing = [p for p in wanted if p not in self._rows]
        evicted = [p for p in self._rows if p not in wanted][: len(missing)]
        new = dict(zip(evicted, missing, strict=True))
        used = [(new.get(p, p), row) for p, row in self._rows.items() if p in wanted or p in new]
        kept = [(p, row) for p, row in self._rows.items() if p not in wanted and p not in new]
        self._rows = OrderedDict(kept + used)
        return [self._rows.get(p) if p >= 0 else None for p in positions]


class HotRowsChecks:
    """A cache in host memory, the same on the device, and rows of it."""

    implementation: str

    def make(self, entry, dtype=None, *, rows=ROWS, tokens=TOKENS):
        """Host memory of random entries, a cache that holds the same, block tables, and empty rows."""
        rng = np.random.default_rng(0)
        layout = jaxkv.CacheLayout(
            num_layers=LAYERS, num_blocks=REQUESTS * tokens // BLOCK, block_size=BLOCK, entry=entry, dtype=dtype
        )
        parts = [on_device(rng.standard_normal((LAYERS, layout.num_slots, n)), jnp.bfloat16) for n in entry.sizes]
        full = jaxkv.KVCache.zeros(layout)
        for layer in range(LAYERS):
            slots = jnp.arange(layout.num_slots)
            full = jaxkv.write_mla(full, *(part[layer] for part in parts), slots, layer=layer, implementation="xla")
        host = offload.HostEntries(layout)
        blocks = rng.permutation(layout.num_blocks)
        host.store(full, blocks, blocks)
        tables = on_device(rng.permutation(layout.num_blocks).reshape(REQUESTS, -1), jnp.int32)
        hot = offload.HotRows.zeros(host, num_requests=REQUESTS, rows=rows, max_tokens=tokens)
        return host, full, tables, hot

    def fetch(self, hot, positions, tables, layer):
        """`HotRows.fetch`, compiled."""
        return _fetch(hot, on_device(positions, jnp.int32), tables, layer, implementation=self.implementation)

    def write(self, hot, values, positions, tables, layer):
        """`HotRows.write_mla`, compiled; `hot` is donated."""
        return _write(hot, *values, positions, tables, layer, implementation=self.implementation)

    def assert_same_entries(self, hot, slots, full, tables, positions, layer):
        """The rows at `slots` have the bytes of the tokens, and are -1 for masked ones."""
        of_tokens = jaxkv.slots_for(tables, on_device(positions, jnp.int32), full)
        assert_same_bits(np.asarray(slots) < 0, np.asarray(of_tokens) < 0)
        assert_same_bits(_bytes(hot.cache, slots, layer), _bytes(full, of_tokens, layer))


class HotRows(HotRowsChecks):
    """What an implementation of `fetch_rows` and `store_rows` has to do."""

    @pytest.mark.parametrize(
        ("rows", "tokens", "few", "shape"),
        [
            (ROWS, TOKENS, 30, (REQUESTS, 1, 12)),
            (ROWS, TOKENS, 30, (REQUESTS, 2, 12)),
            slow(1024, 4096, 900, (REQUESTS, 1, 1000)),  # several programs per request
        ],
    )
    def test_rows_are_those_of_an_lru_cache(self, rows, tokens, few, shape):
        _host, full, tables, hot = self.make(jaxkv.MLAEntry("bf16", 16, 8), rows=rows, tokens=tokens)
        rng = np.random.default_rng(1)
        oracle = [[PythonLRU(rows) for _ in range(REQUESTS)] for _ in range(LAYERS)]
        for step in range(6):
            for layer in range(LAYERS):
                positions = rng.integers(-1, few if rng.random() < 0.5 else tokens, shape)  # with equal ones
                hot, slots = self.fetch(hot, positions, tables, jnp.int32(layer))
                used = [oracle[layer][b].use(positions[b].reshape(-1).tolist()) for b in range(REQUESTS)]
                expected = [[-1 if row is None else b * rows + row for row in found] for b, found in enumerate(used)]
                assert np.asarray(slots).reshape(REQUESTS, -1).tolist() == expected, (step, layer)
                self.assert_same_entries(hot, slots, full, tables, positions, layer)

    @pytest.mark.parametrize(
        ("entry", "dtype"),
        [
            (jaxkv.MLAEntry("fp8_v4", 64, 16), None),
            slow(jaxkv.MLAEntry("fp8_ds_mla", 128, 16), None),
            slow(jaxkv.MLAEntry("f32", 16, 3), "bfloat16"),
        ],
    )
    def test_attention_is_bit_equal_to_a_cache_that_fits(self, entry, dtype):
        _host, full, tables, hot = self.make(entry, dtype)
        rng, (latent, rope) = np.random.default_rng(2), entry.sizes
        q_latent, q_pe = (on_device(rng.standard_normal((REQUESTS, 1, 4, n)), jnp.float32) for n in (latent, rope))
        for _turn in range(3):
            positions = np.stack([rng.permutation(TOKENS)[None, :20] for _ in range(REQUESTS)])
            hot, slots = self.fetch(hot, positions, tables, 1)
            self.assert_same_entries(hot, slots, full, tables, positions, 1)
            of_tokens = jaxkv.slots_for(tables, on_device(positions, jnp.int32), full)
            attend = jax.jit(
                lambda cache, slots: jaxkv.decode_mla_sparse(
                    q_latent, q_pe, cache, slots, layer=1, scale=0.1, return_lse=True, implementation="xla"
                )
            )
            for found, right in zip(attend(hot.cache, slots), attend(full, of_tokens), strict=True):
                assert_same_bits(found, right)

    def test_what_is_not_in_the_cache_is_masked(self):
        _host, full, tables, hot = self.make(jaxkv.MLAEntry("bf16", 16, 8))
        tables = tables.at[1, 2].set(-1).at[1, 3].set(2**31 - 1)
        positions = np.full((REQUESTS, 1, 6), -1)
        positions[:, 0] = [3, TOKENS, 2 * BLOCK, 3 * BLOCK + 1, -(2**31), 2**31 - 1]
        hot, slots = self.fetch(hot, positions, tables, 0)
        assert (np.asarray(slots)[:, 0] >= 0).tolist() == [
            [True, False, b != 1, b != 1, False, False] for b in range(3)
        ]
        self.assert_same_entries(hot, slots, full, tables, positions, 0)
        for layer in (-1, LAYERS, 2**31 - 1):
            after, slots = self.fetch(hot, positions, tables, jnp.int32(layer))
            assert (np.asarray(slots) == -1).all()
            assert_same_bits(after.maps, hot.maps)
            assert_same_bits(after.cache.buffer, hot.cache.buffer)

    @pytest.mark.parametrize("entry", [jaxkv.MLAEntry("bf16", 16, 8), slow(jaxkv.MLAEntry("fp8_v4", 64, 16))])
    def test_new_tokens_are_stored_on_both_sides(self, entry):
        host, full, tables, hot = self.make(entry)
        rng = np.random.default_rng(3)
        for step in range(2):
            positions = np.asarray([[step, 100], [-1, 50 + step], [TOKENS - 1, TOKENS]], np.int32)
            values = [on_device(rng.standard_normal((6, n)), jnp.bfloat16) for n in entry.sizes]
            hot = self.write(hot, values, positions, tables, jnp.int32(1))
            slots = jaxkv.slots_for(tables, jnp.asarray(positions), full).reshape(-1)
            full = jaxkv.write_mla(full, *values, slots, layer=1)
            jax.block_until_ready(hot)
            assert_same_bits(host.blocks.reshape(-1), full.buffer)
            hot, slots = self.fetch(hot, positions[:, None], tables, 1)
            self.assert_same_entries(hot, slots, full, tables, positions[:, None], 1)
            others = np.arange(70, 70 + ROWS)[None, None].repeat(REQUESTS, 0)
            hot, _ = self.fetch(hot, others, tables, 1)  # evicts them all
            hot, slots = self.fetch(hot, positions[:, None], tables, 1)
            self.assert_same_entries(hot, slots, full, tables, positions[:, None], 1)

    @pytest.mark.parametrize("entry", [jaxkv.MLAEntry("bf16", 16, 8), slow(jaxkv.MLAEntry("fp8_v4", 64, 16))])
    def test_entries_are_copied_to_and_from_layers_of_other_caches(self, entry):
        host, full, _, hot = self.make(entry)
        one = jaxkv.KVCache.zeros(
            jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=BLOCK, entry=entry, dtype=host.layout.dtype)
        )
        slots = np.asarray([3, 30, -1, 5, 32, 31, 0], np.int32)  # 32 is the first slot after the cache
        hosts = np.asarray([200, 7, 9, -1, 11, host.layout.num_slots, 359], np.int32)
        here, there = slots[[0, 1, 6]], hosts[[0, 1, 6]]
        loaded = _load(hot, one, slots, hosts, jnp.int32(0), jnp.int32(1), implementation=self.implementation)
        assert_same_bits(_bytes(loaded, here, 0), _bytes(full, there, 1))
        others = np.setdiff1d(np.arange(32, dtype=np.int32), here)
        assert not np.asarray(_bytes(loaded, others, 0)).any()
        # Back to other places of the other layer.
        before, targets = host.blocks.copy(), np.where(hosts < 0, hosts, hosts - 1).astype(np.int32)
        hot = _store(hot, loaded, slots, targets, jnp.int32(0), jnp.int32(0), implementation=self.implementation)
        right = np.asarray(_bytes(full, there, 1))
        again = _load(hot, one, here, there - 1, jnp.int32(0), jnp.int32(0), implementation=self.implementation)
        assert_same_bits(_bytes(again, here, 0), right)
        assert (np.asarray(hot.writes) > 0).all()
        rows = np.flatnonzero((host.blocks != before).any(axis=1))
        assert {*rows.tolist()} <= {*((there - 1) // BLOCK).tolist()}
        before = host.blocks.copy()
        for layer, host_layer in [(1, 0), (0, LAYERS), (-1, 0), (0, -1)]:
            options = {"implementation": self.implementation}
            same = _load(hot, loaded, slots, hosts, jnp.int32(layer), jnp.int32(host_layer), **options)
            assert_same_bits(same.buffer, loaded.buffer)
            jax.block_until_ready(_store(hot, loaded, slots, hosts, jnp.int32(layer), jnp.int32(host_layer), **options))
            assert_same_bits(host.blocks, before)

    def test_forgotten_tokens_are_fetched_again(self):
        host, full, tables, hot = self.make(jaxkv.MLAEntry("bf16", 16, 8))
        positions = np.arange(10)[None, None].repeat(REQUESTS, 0)
        hot, _ = self.fetch(hot, positions, tables, 1)
        jax.block_until_ready(hot)
        host.blocks[...] = 0
        blank = jaxkv.KVCache.zeros(host.layout)
        hot, slots = self.fetch(hot.forget(on_device([True, False, True])), positions, tables, 1)
        for request, source in enumerate((blank, full, blank)):
            one = slice(request, request + 1)
            self.assert_same_entries(hot, slots[one], source, tables[one], positions[one], 1)


class HotRowsMisuse:
    """Errors, whatever the implementation."""

    def test_arguments(self):
        make = HotRowsChecks().make
        host, _, tables, hot = make(jaxkv.MLAEntry("bf16", 16, 8))
        sizes = dict(num_layers=2, num_blocks=4, block_size=8)
        with pytest.raises(ValueError, match="expected a CacheLayout of MLAEntry"):
            offload.HostEntries(jaxkv.CacheLayout(**sizes, entry=jaxkv.KVEntry("bf16")))
        with pytest.raises(ValueError, match="expected order BLNHC"):
            offload.HostEntries(jaxkv.CacheLayout(**sizes, entry=jaxkv.MLAEntry("bf16"), order="LBNHC"))
        with pytest.raises(ValueError, match="`rows` is 20: expected a multiple of the block size 8"):
            offload.HotRows.zeros(host, num_requests=1, rows=20, max_tokens=64)
        with pytest.raises(ValueError, match="`host` is None: expected HostEntries"):
            offload.HotRows.zeros(None, num_requests=1, rows=8, max_tokens=64)
        with pytest.raises(ValueError, match="`positions` has 25 tokens per request: expected at most 24"):
            hot.fetch(jnp.zeros((REQUESTS, 1, 25), jnp.int32), tables, layer=0)
        with pytest.raises(ValueError, match="B is the requests of these rows"):
            hot.fetch(jnp.zeros((REQUESTS + 1, 1, 2), jnp.int32), tables, layer=0)
        with pytest.raises(ValueError, match="`layer` is 2: expected an int from 0 to 1"):
            hot.fetch(jnp.zeros((REQUESTS, 1, 2), jnp.int32), tables, layer=2)
        with pytest.raises(ValueError, match="`which` has dtype int32: expected bool"):
            hot.forget(jnp.zeros(REQUESTS, jnp.int32))
        layers, n = {"layer": 0, "host_layer": 0}, jnp.zeros(2, jnp.int32)
        with pytest.raises(ValueError, match="`host_layer` is 2: expected an int from 0 to 1"):
            hot.load(hot.cache, n, n, **{**layers, "host_layer": 2})
        with pytest.raises(ValueError, match=r"`host_slots` has shape \(3,\)"):
            hot.store(hot.cache, n, jnp.zeros(3, jnp.int32), **layers)
        other = jaxkv.KVCache.zeros(jaxkv.CacheLayout(**sizes, entry=jaxkv.MLAEntry("f16", 16, 8)))
        with pytest.raises(ValueError, match=r"expected MLAEntry\(.*, as host memory has"):
            hot.load(other, n, n, **layers)
        with pytest.raises(ValueError, match="`cache` has other blocks than the host memory"):
            host.store(other, [0], [0])
        with pytest.raises(ValueError, match="`blocks` has 2 ids and `targets` 1: expected as many"):
            host.store(jaxkv.KVCache.zeros(host.layout), [0, 1], [0])

    def test_memory_that_no_longer_exists(self):
        host, _, tables, hot = HotRowsChecks().make(jaxkv.MLAEntry("bf16", 16, 8))
        del host
        gc.collect()
        with pytest.raises(RuntimeError, match="no host memory at address"):
            jax.block_until_ready(
                hot.fetch(jnp.zeros((REQUESTS, 1, 2), jnp.int32), tables, layer=0, implementation="xla")
            )


def _bytes(cache, slots, layer):
    """The bytes of entries at `slots`, 0 for those that are masked."""
    slots = on_device(slots).reshape(-1)
    tables = jnp.where(slots < 0, -1, slots // BLOCK)[:, None]
    sums, starts = jnp.arange(len(slots) + 1), jnp.maximum(slots, 0) % BLOCK
    # Each token is a request whose run begins at its place in its block.
    return jaxkv.gather_entries(cache, tables, sums, layer=layer, total=len(slots), seq_starts=starts)


@partial(jax.jit, static_argnames="implementation")
def _fetch(hot, positions, tables, layer, *, implementation):
    return hot.fetch(positions, tables, layer=layer, implementation=implementation)


@partial(jax.jit, static_argnames="implementation")
def _load(hot, cache, slots, host_slots, layer, host_layer, *, implementation):
    places = {"layer": layer, "host_layer": host_layer}
    return hot.load(cache, slots, host_slots, **places, implementation=implementation)


@partial(jax.jit, static_argnames="implementation")
def _store(hot, cache, slots, host_slots, layer, host_layer, *, implementation):
    places = {"layer": layer, "host_layer": host_layer}
    return hot.store(cache, slots, host_slots, **places, implementation=implementation)


@partial(jax.jit, static_argnames="implementation", donate_argnames="hot")
def _write(hot, kv_c, k_pe, positions, tables, layer, *, implementation):
    return hot.write_mla(kv_c, k_pe, positions, tables, layer=layer, implementation=implementation)
