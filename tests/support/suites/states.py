"""States: stored and read bit for bit where they belong, on every layout, with every other byte as it was."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxkv
from jaxkv.testing import assert_caches_equal
from jaxkv.testing.buffers import to_cache
from jaxkv.testing.random_layouts import draw_state, draw_strides, pick
from support import oracle, scenes
from support.arrays import on_device
from support.cases import random_numbers
from support.compare import assert_same_bits
from support.suites.base import Suite, layout_of

MIXED = jaxkv.StateEntry({"conv": ((3, 5), "bfloat16"), "ssm": ((2, 4, 3), "float32"), "count": ((), "float16")})
PLAIN = jaxkv.StateEntry({"conv": ((4, 8), "float32"), "ssm": ((2, 4, 4), "float32")})

STRANGE = [0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x00000001, 0x80000000, 0x7F7FFFFF]
"""Bits of float32: a signalling NaN, a quiet one with a payload, infinities, a denormal, -0, the largest."""


def states_of(entry, count, seed=3):
    """`count` states by name, as NumPy arrays of the entry's dtypes; the first has strange values."""
    rng = np.random.default_rng(seed)
    found = {name: rng.standard_normal((count, *shape)).astype(jnp.dtype(dtype)) for name, shape, dtype in entry.arrays}
    for x in found.values():
        if count and x.dtype == np.float32:
            flat = x[0].reshape(-1).view(np.uint32)
            flat[: len(STRANGE)] = STRANGE[: flat.size]
    return found


class StateChecks(Suite):
    """Checks of `write_state` and `read_state`."""

    def check_write(self, layout, layer, slots, kind="nan"):
        """Writes states into garbage and compares the whole buffer."""
        states = states_of(layout.entry, len(slots))
        before = scenes.garbage(layout, np.random.default_rng(5), kind)
        values = {name: on_device(x) for name, x in states.items()}
        cache = self.run(jaxkv.write_state, to_cache(layout, before), values, on_device(slots), layer=layer)
        expected = self.stored(layout, before, layer, slots, states)
        assert_caches_equal(cache, to_cache(layout, expected), padding=True)

    def stored(self, layout, before, layer, slots, states):
        """The bytes `before`, with states at slots of a layer."""
        expected, encoded = before.copy(), oracle.encode_state(states)
        entries = scenes.fetch(layout, expected, layer)
        for row, slot in enumerate(slots):
            if 0 <= slot < layout.num_slots:
                entries[slot // layout.block_size, 0, slot % layout.block_size] = encoded[row]
        scenes.place(layout, expected, layer, entries)
        return expected

    def check_read(self, layout, layer, slots):
        """Reads states, all others being NaN."""
        known = sorted({slot for slot in slots if 0 <= slot < layout.num_slots})
        states = states_of(layout.entry, len(known))
        before = scenes.garbage(layout, np.random.default_rng(5))
        cache = to_cache(layout, self.stored(layout, before, layer, known, states))
        found = self.run(jaxkv.read_state, cache, on_device(slots, jnp.int32), layer=layer)
        rows = [known.index(slot) if slot in known else -1 for slot in slots]
        assert set(found) == set(states)
        for name, x in states.items():
            padded = np.concatenate([x, np.zeros_like(x[:1])])
            assert_same_bits(found[name], padded[rows], name)

    def slots(self, layout, count=7, seed=0):
        """Distinct slots among ones that no cache has."""
        rng = np.random.default_rng(seed)
        good = rng.permutation(layout.num_slots)[:count]
        return rng.permutation([*good, -1, -(2**31), layout.num_slots, 2**31 - 1]).astype(np.int32).tolist()


class States(StateChecks):
    """The same on every layout."""

    @pytest.mark.parametrize("name", scenes.layout_names(MIXED))
    def test_every_layout(self, name):
        layout = layout_of(name, MIXED, block_size=4)
        self.check_write(layout, 1, self.slots(layout))
        self.check_read(layout, 1, [*self.slots(layout), *self.slots(layout)[:3]])

    @settings(max_examples=settings.default.max_examples // 20)
    @given(random_numbers)
    def test_strides_drawn_at_random(self, rng):
        layout = draw_strides(rng, draw_state(rng))
        layer = int(rng.integers(layout.num_layers))
        self.check_write(layout, layer, self.slots(layout), pick(rng, "nan", "random"))
        self.check_read(layout, layer, self.slots(layout))

    def test_one_trace_serves_all_slots_and_layers(self):
        layout = layout_of("packed, uint8", PLAIN, block_size=4)
        chex.clear_trace_counter()

        @jax.jit
        @chex.assert_max_traces(n=1)
        def moved(cache, source, target, layer):
            states = self.run(jaxkv.read_state, cache, source, layer=layer)
            return self.run(jaxkv.write_state, cache, states, target, layer=layer)

        cache = jaxkv.KVCache.zeros(layout)
        for n in range(3):
            cache = moved(cache, on_device([n, -1]), on_device([-n, n + 1]), jnp.int32(n))

    def test_neighbours_of_random_bytes_survive_in_every_layer(self):
        layout = layout_of("BLNHC", PLAIN, block_size=3)
        for layer in range(layout.num_layers):
            self.check_write(layout, layer, self.slots(layout, seed=layer), "random")
            self.check_read(layout, layer, self.slots(layout, seed=layer))

    def test_one_state_per_block_of_a_table_of_its_own(self):
        groups = {
            "latent": jaxkv.Group(2, jaxkv.MLAEntry("bf16", latent=24, rope=8)),
            "state": jaxkv.Group(3, MIXED, rate=16, table="state", window=1),
        }
        layout = jaxkv.PackedLayout(num_blocks=9, block_size=16, groups=groups)["state"]
        assert layout.block_size == 1
        self.check_write(layout, 2, self.slots(layout))
        self.check_read(layout, 2, self.slots(layout))

    def test_values_are_rounded_to_the_dtypes_of_the_entry(self):
        layout = layout_of("BLNHC", MIXED, block_size=4)
        rng = np.random.default_rng(0)
        states = {name: rng.standard_normal((2, *shape)).astype(np.float32) for name, shape, _ in MIXED.arrays}
        values = {name: on_device(x) for name, x in states.items()}
        cache = self.run(jaxkv.write_state, jaxkv.KVCache.zeros(layout), values, on_device([5, 2]), layer=0)
        found = self.run(jaxkv.read_state, cache, on_device([5, 2]), layer=0)
        for name, _, dtype in MIXED.arrays:
            assert_same_bits(found[name], states[name].astype(jnp.dtype(dtype)), name)

    @pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1])
    def test_traced_layer_outside_the_cache_writes_nothing_and_reads_zeros(self, layer):
        layout = layout_of("BLNHC", PLAIN, block_size=4)
        before = scenes.garbage(layout, np.random.default_rng(0), "random")
        states = {name: on_device(x) for name, x in states_of(PLAIN, 2).items()}
        cache, slots, layer = to_cache(layout, before), on_device([1, 2]), on_device(layer, jnp.int32)
        after = self.run(jaxkv.write_state, cache, states, slots, layer=layer)
        assert_caches_equal(after, cache, padding=True)
        for x in self.run(jaxkv.read_state, cache, slots, layer=layer).values():
            assert not np.asarray(x).any()

    def test_arrays_may_have_any_names(self):
        """Names with spaces, and names that number like the axes of another array."""
        arrays = {"conv state": (2, 3), "a\tb": (2,), "a": (1,) * 11, "a1": (7,), "T": (3,)}
        entry = jaxkv.StateEntry({name: (shape, "float32") for name, shape in arrays.items()})
        layout = layout_of("BLNHC", entry, block_size=4)
        self.check_write(layout, 1, self.slots(layout))
        self.check_read(layout, 1, self.slots(layout))

    def test_no_states(self):
        layout = layout_of("BLNHC", PLAIN, block_size=4)
        self.check_write(layout, 0, np.zeros(0, np.int32))
        self.check_read(layout, 0, [])

    def test_a_scan_over_layers_carries_the_states_on(self):
        """Each layer adds its number to what the layer before it has stored."""
        layout = layout_of("packed, uint8", PLAIN, block_size=4)
        slots = on_device([3, 17, -1])

        def body(cache, layer):
            read = self.run(jaxkv.read_state, cache, slots, layer=layer - 1)
            states = {name: x + layer for name, x in read.items()}
            return self.run(jaxkv.write_state, cache, states, slots, layer=layer), read["ssm"]

        cache = jaxkv.KVCache.zeros(layout)
        cache, read = jax.jit(lambda cache: jax.lax.scan(body, cache, jnp.arange(1, 3)), donate_argnums=0)(cache)
        assert (np.asarray(read)[:, 0, 0, 0, 0] == [0, 1]).all()
        assert not np.asarray(read)[:, 2].any()
        found = self.run(jaxkv.read_state, cache, slots, layer=2)["conv"]
        assert (np.asarray(found)[:2] == 3).all()
