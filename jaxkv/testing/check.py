"""Checks of random calls: one compiled program per case, which returns an error for each result of a call.

The expected result is that of `xla` on a twin: a packed cache of one layer.  An address map, computed by NumPy from the
strides alone, gives the place of each entry of the twin in the buffer under test.  Everything that a call may not read
is NaN.  Everything that it may not write is random bytes, which must not change.  Writes, gathers and copies must agree
bit for bit, attention and updated states within some roundings of their dtype.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.testing.buffers import AddressMap, cache_of, elements_of, packed_twin
from jaxkv.testing.case import Case, Draw
from jaxkv.testing.compare import differ, excess


def checker(case: Case, implementation: str) -> Callable[..., jax.Array]:
    """A function of an `AddressMap` and a `Draw` that returns error / tolerance of each result, float32 [n].

    A value above 1 means that the result is wrong.
    """
    layout, twin_layout = case.layout, packed_twin(case.layout, case.layout.dtype)
    bits = jnp.dtype(f"uint{8 * layout.itemsize}")

    def values_of(raw):
        return raw if layout.dtype == bits else lax.bitcast_convert_type(raw, layout.dtype)

    def raw(cache):
        arrays = [x if layout.dtype == bits else lax.bitcast_convert_type(x, bits) for x in jax.tree.leaves(cache)]
        return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)

    def noise(key, size):
        return jax.random.bits(key, (size,), bits)

    def normal(key, shapes):
        keys = jax.random.split(key, len(shapes))
        return [_random(k, shape, dtype) for k, (shape, dtype) in zip(keys, shapes, strict=True)]

    def reading(key, draw: Draw, where: AddressMap, layer, twin_layer):
        nan = np.asarray(np.iinfo(bits).max, bits)
        twin = cache_of(twin_layout, values_of(jnp.full((twin_layout.size,), nan, bits)))
        slots = jnp.where(draw.live, jnp.arange(layout.num_slots, dtype=jnp.int32), -1)
        entries = normal(key, [(shape, jnp.float32) for shape in case.entry_shapes(layout.num_slots)])
        twin = case.writer(twin, *entries, slots, layer=0, **draw.scales, implementation="xla")
        cache = cache_of(layout, values_of(jnp.where(where.layer == layer, raw(twin)[where.place], nan)))
        values = normal(jax.random.fold_in(key, 1), case.value_shapes)
        found = case.run(cache, values, draw, draw.layer, implementation)
        exact = [value.astype(jnp.float32) for value in values]
        expected = case.expected(twin, exact, draw, twin_layer)
        if case.result == "bits":
            return [differ(*pair) for pair in _pairs(found, expected)]
        if case.result == "logits":
            terms = math.sqrt(layout.entry.sizes[0])  # size of the summed terms: products of random vectors
            roundings = 128  # one for each product of a sum
            if values[0].dtype == jnp.float8_e4m3fn and implementation == "mosaic_gpu":
                # Hopper adds up products of e4m3 with 13 bits after the leading one, and truncates: the mean error of a
                # truncation is 2**10 times that of a float32 rounding.
                roundings *= 2**10
            return [excess(found, expected, roundings=roundings, dtype="float32", magnitude=terms, floor=terms)]
        # Queries in e4m3 have results of another dtype.
        dtype = jax.tree.leaves(found)[0].dtype.name
        if case.result == "sums":
            roundings = 128 if dtype == "float32" else 4
            return [excess(found, expected, roundings=roundings, dtype=dtype, magnitude=1, floor=1)]
        # The size of scores.  Capped scores also have errors of the size of the cap, because the kernels compute tanh
        # as a difference, such as cap * (1 - 2 / (1 + exp(2 s / cap))).
        cap = dict(case.options).get("logit_cap") or 0
        scores = 4 + cap
        # The relative error of a softmax weight equals the absolute error of its score.  A good float32 tanh is off by
        # up to 2 roundings, so two of them differ by up to 4, which the cap multiplies.  The tolerance of 16-bit
        # results is wider than this.
        size = 1 + 4 / 64 * cap if dtype == "float32" else 1
        return [
            excess(
                found[0],
                expected[0],
                roundings=64 if dtype == "float32" else 4,
                dtype=dtype,
                magnitude=size,
                floor=size - 1,
            ),
            *(
                excess(*pair, roundings=64, dtype="float32", magnitude=scores, floor=scores)
                for pair in zip(found[1:], expected[1:], strict=True)
            ),
        ]

    def writing(key, draw: Draw, where: AddressMap, layer, twin_layer):
        before = noise(jax.random.fold_in(key, 2), elements_of(layout))
        twin_before = noise(jax.random.fold_in(key, 3), twin_layout.size)
        before = jnp.where(where.layer == layer, twin_before[where.place], before)
        values = normal(key, case.value_shapes)
        found = case.run(cache_of(layout, values_of(before)), values, draw, draw.layer, implementation)
        twin = case.expected(cache_of(twin_layout, values_of(twin_before)), values, draw, twin_layer)
        return [differ(raw(found), jnp.where(where.layer == layer, raw(twin)[where.place], before))]

    def updating(key, draw: Draw, where: AddressMap, layer, twin_layer):
        slots = jnp.arange(layout.num_slots, dtype=jnp.int32)
        states = normal(key, [(shape, jnp.float32) for shape in case.entry_shapes(layout.num_slots)])
        twin = jaxkv.KVCache.zeros(twin_layout)
        twin = case.writer(twin, *states, slots, layer=0, implementation="xla")
        before = noise(jax.random.fold_in(key, 2), elements_of(layout))
        before = jnp.where(where.layer == layer, raw(twin)[where.place], before)
        values = normal(jax.random.fold_in(key, 1), case.value_shapes)
        out, cache = case.run(cache_of(layout, values_of(before)), values, draw, draw.layer, implementation)
        expected, twin = case.expected(twin, values, draw, twin_layer)
        *_, written = draw.index
        found, right = (
            jaxkv.read_state(held, written, layer=at, implementation="xla")
            for held, at in ((cache, draw.layer), (twin, twin_layer))
        )
        # All else is as it was: the twin with the states that were found.
        twin = jaxkv.write_state(twin, found, written, layer=twin_layer, implementation="xla")
        rest = differ(raw(cache), jnp.where(where.layer == layer, raw(twin)[where.place], before))
        pairs = [(out, expected), *((found[name], right[name]) for name in right)]
        limits = {"float32": 128, "float16": 2, "bfloat16": 2}
        errors = [
            excess(*pair, roundings=limits[pair[0].dtype.name], dtype=pair[0].dtype.name, magnitude=1, floor=1)
            for pair in pairs
        ]
        return [*errors, rest]

    def moving(key, draw: Draw, where: AddressMap):
        before = noise(key, elements_of(layout))
        known = [(ids >= 0) & (ids < layout.num_blocks) for ids in draw.index]
        if case.value_shapes:
            rows = noise(jax.random.fold_in(key, 1), where.blocks[0].size * case.count).reshape(case.count, -1)
        else:
            rows = jnp.where(known[0][:, None], before[where.blocks[jnp.where(known[0], draw.index[0], 0)]], 0)
        values = [values_of(rows) for _ in case.value_shapes]
        found = case.run(cache_of(layout, values_of(before)), values, draw, draw.layer, implementation)
        if not isinstance(found, jaxkv.KVCache):
            return [differ(found, values_of(rows))]
        target = jnp.where(known[0] & known[-1], draw.index[-1], layout.num_blocks)
        pair = jnp.full(layout.num_blocks, -1, jnp.int32).at[target].set(jnp.arange(case.count), mode="drop")
        pair = jnp.where(where.block >= 0, pair[where.block], -1)
        return [differ(raw(found), jnp.where(pair >= 0, rows[pair, where.place_in_block], before))]

    def run(where: AddressMap, draw: Draw):
        key = jax.random.key(draw.key)
        if case.effect == "moves blocks":
            return jnp.stack(moving(key, draw, where))
        inside = (draw.layer >= 0) & (draw.layer < layout.num_layers)
        layer, twin_layer = jnp.where(inside, draw.layer, 0), jnp.where(inside, 0, 1)
        check = {"writes": writing, "updates states": updating}.get(case.effect, reading)
        return jnp.stack(check(key, draw, where, layer, twin_layer))

    return run


def _random(key, shape: tuple[int, ...], dtype) -> jax.Array:
    """Normal values, or random bytes if `dtype` is uint8."""
    return jax.random.bits(key, shape, dtype) if dtype == "uint8" else _rounded(jax.random.normal(key, shape), dtype)


def _rounded(x: jax.Array, dtype) -> jax.Array:
    """float32 `x` rounded to `dtype`.

    A cast alone does not suffice: if the result is converted back to float32, XLA may remove both casts.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def _pairs(found, expected) -> list[tuple[jax.Array, jax.Array]]:
    return list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
