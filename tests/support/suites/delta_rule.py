"""Decode steps of the gated delta rule: outputs and states are those of float64, and every other byte is as it was."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.testing.buffers import to_bytes, to_cache
from support import oracle, scenes
from support.arrays import on_device
from support.cases import further
from support.compare import assert_close, assert_same_bits
from support.suites.base import Suite, layout_of

ROUNDINGS = 32
"""Sums of up to 128 products, and a few factors that are rounded."""


class Shape(NamedTuple):
    """The sizes of a layer."""

    key_heads: int
    heads: int
    keys: int
    values: int
    taps: int = 4
    dtype: str = "float32"
    """Of the states."""

    @property
    def channels(self):
        return 2 * self.key_heads * self.keys + self.heads * self.values

    @property
    def entry(self):
        delta = (self.heads, self.keys, self.values), self.dtype
        return jaxkv.StateEntry({"conv": ((self.taps - 1, self.channels), self.dtype), "delta": delta})


SMALL = Shape(2, 4, 8, 6)
ODD = Shape(1, 3, 5, 7, taps=3)
"""Arrays of 45 bytes and more, which padding follows."""
REAL = Shape(1, 2, 128, 128)
"""Heads of Qwen3-Next and Kimi Linear."""

READ, WRITTEN = (3, 5, -1, 7, 2**31 - 1, 2, 2), (3, 9, 4, -1, 6, 2**31 - 1, 8)
"""Tokens in place, to another slot, of new requests, and padding; slot 2 is that of a prefix."""


def numbers(shape, count, channel_decays=False, dtype="float32", seed=3):
    """Arguments of `count` tokens, by name, as NumPy arrays."""
    rng = np.random.default_rng(seed)

    def normal(*dims, dtype=dtype):
        return rng.standard_normal(dims).astype(jnp.dtype(dtype))

    decays = shape.keys if channel_decays else 1
    return {
        "x": normal(count, shape.channels),
        "decay": -rng.uniform(0, 2, (count, shape.heads, decays)).astype(np.float32),
        "rate": rng.uniform(0, 1, (count, shape.heads)).astype(np.float32),
        "conv_weight": normal(shape.channels, shape.taps),
    }


def states_in(layout, buffer, layer, slots):
    """The states at slots, by name, from the bytes of a buffer; 0 where there is no slot."""
    entries, end = scenes.fetch(layout, buffer, layer)[:, 0].reshape(layout.num_slots, -1), 0
    known = np.asarray([0 <= slot < layout.num_slots for slot in slots])
    found = {}
    for name, dims, dtype in layout.entry.arrays:
        size = int(np.prod(dims)) * jnp.dtype(dtype).itemsize
        rows = entries[np.where(known, slots, 0), end : end + size].copy().view(jnp.dtype(dtype))
        found[name] = np.where(known[:, None], rows, 0).reshape(len(slots), *dims)
        end += size + -size % 16
    return found


class DeltaRule(Suite):
    """Checks of `decode_delta_rule`."""

    def check(self, layout, shape, layer=1, read=READ, written=WRITTEN, kind="nan", **options):
        """A step among garbage; states that are read are numbers."""
        given = numbers(shape, len(read), **options)
        before = scenes.garbage(layout, np.random.default_rng(5), kind)
        entries, rng = scenes.fetch(layout, before, layer), np.random.default_rng(6)
        for slot in {slot for slot in read if 0 <= slot < layout.num_slots}:
            state = {n: rng.standard_normal((1, *dims)).astype(jnp.dtype(t)) for n, dims, t in layout.entry.arrays}
            entries[slot // layout.block_size, 0, slot % layout.block_size] = oracle.encode_state(state)[0]
        scenes.place(layout, before, layer, entries)
        old = states_in(layout, before, layer, read)

        arrays = map(on_device, given.values())
        slots = on_device(read, jnp.int32), on_device(written, jnp.int32)
        out, cache = self.run(jaxkv.decode_delta_rule, *arrays, to_cache(layout, before), *slots, layer=layer)
        after = to_bytes(cache)

        known = np.asarray([0 <= slot < layout.num_slots for slot in written])
        right, conv, delta = oracle.decode_delta_rule(**given, **old)
        assert out.dtype == jnp.float32
        assert_close(out, np.where(known[:, None, None], right, 0), roundings=ROUNDINGS, what="out")
        new = states_in(layout, after, layer, written)
        assert_same_bits(new["conv"][known], conv[known].astype(new["conv"].dtype), "conv")
        assert_close(new["delta"][known], delta[known], roundings=ROUNDINGS, what="delta")
        # Besides the new states, with zeros as their padding, every byte is as it was.
        entries = scenes.fetch(layout, before, layer)
        for row in np.flatnonzero(known):
            state = oracle.encode_state({name: x[row : row + 1] for name, x in new.items()})[0]
            entries[written[row] // layout.block_size, 0, written[row] % layout.block_size] = state
        scenes.place(layout, before, layer, entries)
        assert_same_bits(after, before, "buffer")

    @pytest.mark.parametrize("name", scenes.layout_names(SMALL.entry))
    def test_every_layout(self, name):
        self.check(layout_of(name, SMALL.entry, block_size=4), SMALL)

    @pytest.mark.parametrize("channel_decays", [False, True], ids=["decays of heads", "decays of channels"])
    @pytest.mark.parametrize(
        "shape",
        [REAL, ODD, further(Shape(2, 2, 1, 1, taps=2)), further(Shape(1, 2, 64, 48)), further(Shape(1, 1, 16, 8, 8))],
        ids=lambda shape: "x".join(map(str, shape[:5])),
    )
    def test_sizes(self, shape, channel_decays):
        layout = layout_of("BLNHC", shape.entry, block_size=4)
        self.check(layout, shape, kind="random", channel_decays=channel_decays)

    @pytest.mark.parametrize(
        ("dtype", "states"),
        [
            ("bfloat16", "float32"),
            ("bfloat16", "bfloat16"),
            further("float16", "float32"),
            further("float32", "float16"),
        ],
    )
    def test_dtypes(self, dtype, states):
        for shape in (SMALL, ODD):
            shape = shape._replace(dtype=states)
            self.check(layout_of("BLNHC", shape.entry, block_size=4), shape, dtype=dtype)

    def test_one_state_per_block_of_a_table_of_its_own(self):
        groups = {
            "latent": jaxkv.Group(2, jaxkv.MLAEntry("bf16", latent=24, rope=8)),
            "state": jaxkv.Group(3, SMALL.entry, rate=16, table="state", window=1),
        }
        layout = jaxkv.PackedLayout(num_blocks=11, block_size=16, groups=groups)["state"]
        self.check(layout, SMALL, layer=2, kind="random")

    @pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1])
    def test_a_traced_layer_outside_the_cache_is_padding(self, layer):
        layout = layout_of("BLNHC", SMALL.entry, block_size=4)
        before = scenes.garbage(layout, np.random.default_rng(0), "random")
        arrays, slots = map(on_device, numbers(SMALL, 2).values()), on_device([1, 2])
        cache, layer = to_cache(layout, before), on_device(layer, jnp.int32)
        out, cache = self.run(jaxkv.decode_delta_rule, *arrays, cache, slots, slots, layer=layer)
        assert not np.asarray(out).any()
        assert_same_bits(to_bytes(cache), before)

    def test_no_tokens(self):
        layout = layout_of("BLNHC", SMALL.entry, block_size=4)
        before = scenes.garbage(layout, np.random.default_rng(0), "random")
        arrays, none = map(on_device, numbers(SMALL, 0).values()), on_device(np.zeros(0, np.int32))
        out, cache = self.run(jaxkv.decode_delta_rule, *arrays, to_cache(layout, before), none, none, layer=0)
        assert out.shape == (0, SMALL.heads, SMALL.values)
        assert_same_bits(to_bytes(cache), before)

    def test_steps_of_all_layers_in_one_donated_program(self):
        """Layers in a scan, whose states go on from step to step; one trace serves all slots."""
        layout, steps = layout_of("packed, uint8", SMALL.entry, block_size=4), 3
        given = [numbers(SMALL, 2, seed=seed) for seed in range(steps)]
        chex.clear_trace_counter()

        def step(cache, arrays, read, written):
            def body(cache, layer):
                out, cache = self.run(jaxkv.decode_delta_rule, *arrays, cache, read, written, layer=layer)
                return cache, out

            return jax.lax.scan(body, cache, jnp.arange(layout.num_layers, dtype=jnp.int32))

        step = jax.jit(chex.assert_max_traces(step, n=1), donate_argnums=0)
        cache, places = jaxkv.KVCache.zeros(layout), [(-1, -1), (3, 5), (3, 6), (7, 6)]
        conv, delta = (np.zeros((2, *dims)) for dims in SMALL.entry.shapes.values())
        for arrays, read, written in zip(given, places[:-1], places[1:], strict=True):
            cache, outs = step(cache, [*map(on_device, arrays.values())], on_device(read), on_device(written))
            right, conv, delta = oracle.decode_delta_rule(**arrays, conv=conv, delta=delta)
            for out in np.asarray(outs):
                assert_close(out, right, roundings=ROUNDINGS)
        for layer in range(layout.num_layers):
            found = states_in(layout, to_bytes(cache), layer, places[-1])
            assert_close(found["delta"], delta, roundings=ROUNDINGS)
            assert_close(found["conv"], conv, roundings=0.5)
