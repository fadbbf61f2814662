"""What kernels that update a buffer in place may get wrong: in scans, and beyond 2**31 elements; XLA is the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing.buffers import to_cache
from support import scenes
from support.arrays import on_device
from support.compare import assert_same_bits
from support.suites.base import Suite, layout_of
from support.suites.blocks import BlockChecks
from support.suites.writes import WriteChecks, new_tokens

MLA = jaxkv.MLAEntry("bf16")

in_two_orders = pytest.mark.parametrize("order", ["BLNHC", "LBNHC"])


class WritesInScans(WriteChecks):
    """`write_mla` under `lax.scan`."""

    @in_two_orders
    def test_a_scan_over_layers_writes_them_all(self, order):
        layout = layout_of(order, MLA)
        before = scenes.garbage(layout, np.random.default_rng(0), "random")
        slots = jnp.asarray(self.slots(layout, np.random.default_rng(1)), jnp.int32)
        parts = [part[:, 0] for part in new_tokens(MLA, 1, slots.size)]
        new = [jnp.stack([part, 2 * part, 3 * part]) for part in parts]  # of each layer

        def all_layers(implementation):
            def body(cache, xs):
                layer, kv_c, k_pe = xs
                cache = jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer, implementation=implementation)
                return cache, cache.buffer[: layout.size // 2]

            scan = jax.jit(lambda cache, xs: jax.lax.scan(body, cache, xs), donate_argnums=0)
            return scan(to_cache(layout, before), (jnp.arange(3), *new))

        (found, halves), (expected, right) = all_layers(self.implementation), all_layers("xla")
        assert_same_bits(found.buffer, expected.buffer)
        assert_same_bits(halves, right)


class BlocksInScans(BlockChecks):
    """`copy_blocks`, `read_blocks` and `write_blocks` under `lax.scan`."""

    @in_two_orders
    def test_a_scan_copies_in_turn(self, order):
        layout, before = self.make(order, MLA)
        pairs = on_device([[[0, 1], [1, 2]], [[1, 2], [2, 1]], [[2, 5], [9, 2]]], jnp.int32)

        def in_turn(implementation):
            def body(cache, pair):
                cache = jaxkv.copy_blocks(cache, *pair.T, implementation=implementation)
                rows = jaxkv.read_blocks(cache, pair[:, 1], implementation=implementation)
                return jaxkv.write_blocks(cache, pair[:, 0] + 9, rows, implementation=implementation), rows

            scan = jax.jit(lambda cache, pairs: jax.lax.scan(body, cache, pairs), donate_argnums=0)
            return scan(to_cache(layout, before), pairs)

        (found, rows), (expected, right) = in_turn(self.implementation), in_turn("xla")
        assert_same_bits(found.buffer, expected.buffer)
        assert_same_bits(rows, right)


class LargeCaches(Suite):
    """Caches of more than 2**32 elements."""

    @in_two_orders
    def test_elements_beyond_2_31_are_found_and_nothing_wraps_round(self, order):
        layout = jaxkv.CacheLayout(num_layers=3, num_blocks=40_000, block_size=64, entry=MLA, order=order)
        assert layout.size > 2**32
        # Beside the ends, where elements 2**31 and 2**32 lie, in either order.
        blocks = on_device([0, 18_254, 18_255, 19_418, 19_419, 36_511, 36_512, 38_836, 38_837, 39_999], jnp.int32)
        tables, total = blocks[None], 64 * blocks.size
        slots = jaxkv.slots_for(tables, jnp.arange(total)[None], layout)[0]
        new = [part[:, 0] for part in new_tokens(MLA, 1, total)]

        def steps(implementation):
            def run(cache):
                for layer in range(3):
                    cache = jaxkv.write_mla(cache, *new, slots, layer=layer, implementation=implementation)
                cache = jaxkv.copy_blocks(cache, blocks, blocks[::-1] - 1, implementation=implementation)
                rows = jaxkv.read_blocks(cache, blocks, implementation=implementation)
                cache = jaxkv.write_blocks(cache, blocks - 3, rows, implementation=implementation)
                sums = on_device([0, total])
                options = dict(layer=2, total=total, implementation=implementation)
                parts = jaxkv.gather_mla(cache, tables, sums, **options)
                return cache, (rows, *parts)

            cache, found = jax.jit(run, donate_argnums=0)(jaxkv.KVCache.zeros(layout))
            words = cache.buffer.reshape(layout.num_layers, layout.num_blocks, -1).view(jnp.uint16)
            return jax.tree.map(np.asarray, found), np.asarray((words != 0).sum(axis=2))

        (found, used), (expected, right) = steps(self.implementation), steps("xla")
        for part, correct in zip(found, expected, strict=True):
            assert_same_bits(part, correct)
        assert_same_bits(used, right)
