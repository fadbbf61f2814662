"""Whole blocks: copies, and round trips through exported rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing.buffers import entry_bytes, to_bytes, to_cache
from support import scenes
from support.arrays import on_device
from support.cases import apart, on_layouts
from support.compare import assert_same_bits
from support.suites.base import Suite, formats, layout_of


class BlockChecks(Suite):
    """Checks of `copy_blocks`, `read_blocks` and `write_blocks`."""

    def blocks(self, layout, buffer):
        """What belongs to each block, arrays of bytes [B, ...]: its run, or its entries in all layers."""
        if layout.blocks_are_runs:
            return [buffer.reshape(layout.num_blocks, -1)]
        return [np.moveaxis(view, 1, 0) for view in entry_bytes(layout, buffer)]

    def make(self, name, entry, **sizes):
        """A layout and a buffer of random bytes."""
        layout = layout_of(name, entry, num_heads=1 if entry.one_head else 2, **sizes)
        return layout, scenes.garbage(layout, np.random.default_rng(2), "random")

    def check_copy(self, layout, before):
        """A swap, a copy of one of the two, a chain, and pairs with a bad id, which are skipped."""
        last = layout.num_blocks - 1
        src = [3, 1, 1, 0, 2, -1, layout.num_blocks, 5, 2]
        dst = [1, 3, last, 2, 4, 5, 5, -2, 2**31 - 1]
        cache = to_cache(layout, before)
        after = self.run(jaxkv.copy_blocks, cache, on_device(src, jnp.int32), on_device(dst, jnp.int32))
        expected = before.copy()
        for target, source in zip(self.blocks(layout, expected), self.blocks(layout, before), strict=True):
            for s, d in zip(src[:5], dst[:5], strict=True):
                target[d] = source[s]
        assert_same_bits(to_bytes(after), expected)

    def check_travel(self, layout, before):
        """Blocks of one cache over others of another; bad ids give 0, and are skipped."""
        rows = self.run(jaxkv.read_blocks, to_cache(layout, before), on_device([5, 0, 5, -1, 99]))
        assert rows.shape == (5, layout.block_nbytes // layout.itemsize)
        rows = np.asarray(rows)
        assert not rows[3:].view(np.uint8).any()
        other, last = scenes.garbage(layout, np.random.default_rng(9), "random"), layout.num_blocks - 1
        after = self.run(jaxkv.write_blocks, to_cache(layout, other), on_device([2, last, -1, 99]), on_device(rows[:4]))
        expected = other.copy()
        for target, source in zip(self.blocks(layout, expected), self.blocks(layout, before), strict=True):
            target[2], target[last] = source[5], source[0]
        assert_same_bits(to_bytes(after), expected)


class Blocks(BlockChecks):
    """The same on every layout."""

    def test_the_buffer_may_be_a_slice_of_another_array(self):
        layout = layout_of("BLNHC", scenes.MLA_ENTRIES[0])
        whole = on_device(np.random.default_rng(1).uniform(0, 100, (3, layout.size)), layout.dtype)
        src, dst = on_device([3, 1], jnp.int32), on_device([1, 5], jnp.int32)

        @jax.jit
        def copied(whole):
            return self.run(jaxkv.copy_blocks, jaxkv.KVCache(whole[1], layout), src, dst).buffer, whole

        found, after = copied(whole)
        right = np.asarray(whole[1]).reshape(layout.num_blocks, -1).copy()
        right[[1, 5]] = right[[3, 1]]
        assert_same_bits(found, right.reshape(-1))
        assert_same_bits(after, whole)

    entries = (scenes.MLA_ENTRIES[0], scenes.KV_ENTRIES[2], scenes.KV_ENTRIES[3], scenes.INDEXER_ENTRY)

    @on_layouts(entries)
    def test_copy(self, entry, name):
        self.check_copy(*self.make(name, entry))

    @on_layouts(entries)
    def test_blocks_travel(self, entry, name):
        self.check_travel(*self.make(name, entry))

    @apart
    def test_keys_and_values_that_lie_apart(self, entry, name):
        layout = layout_of(name, entry, num_heads=2)
        before = scenes.garbage(layout, np.random.default_rng(2), "random")
        self.check_copy(layout, before)
        self.check_travel(layout, before)

    @formats(entries)
    def test_equal_fingerprints_exchange_rows(self, entry):
        heads = 1 if entry.one_head else 2
        found = scenes.layouts(entry, num_heads=heads)
        small = scenes.layouts(entry, num_heads=heads, num_blocks=5)
        by_fingerprint = {}
        for name, layout in found.items():
            by_fingerprint.setdefault(layout.fingerprint, []).append(layout)
            assert layout.fingerprint == small[name].fingerprint  # the number of blocks does not matter
        pairs = [(a, b) for group in by_fingerprint.values() for a in group for b in group if a != b]
        assert pairs, "a packed layer-major cache and a packed block-major one have the same blocks"
        for source, target in pairs:
            before = scenes.garbage(source, np.random.default_rng(2), "random")
            rows = self.run(jaxkv.read_blocks, to_cache(source, before), on_device([3, 5]))
            after = self.run(jaxkv.write_blocks, jaxkv.KVCache.zeros(target), on_device([6, 0]), rows)
            for layer in range(source.num_layers):
                moved = scenes.fetch(target, to_bytes(after), layer)[np.asarray([6, 0])]
                assert_same_bits(moved, scenes.fetch(source, before, layer)[np.asarray([3, 5])])

    @pytest.mark.parametrize("count", [0, 16])
    def test_numbers_of_blocks(self, count):
        layout, before = self.make("BLNHC", scenes.MLA_ENTRIES[0])
        rows = self.run(jaxkv.read_blocks, to_cache(layout, before), jnp.arange(count, dtype=jnp.int32))
        assert_same_bits(np.asarray(rows), before.view(layout.dtype).reshape(16, -1)[:count])
