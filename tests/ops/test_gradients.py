"""Gradients on `xla` are right in the modes that are documented, and raise an error that says so in all others."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import dispatch
from jaxkv.ops import OPERATIONS
from support import calls, scenes
from support.cases import each_format, further, slow
from support.opaque import Opaque

BOTH, FORWARD, REFUSED, NO_FLOATS = "both modes", "forward mode only", "an error", "no float arguments or results"

MODES = {
    "write_mla": BOTH,
    "write_mla, rotated": BOTH,
    "write_kv": BOTH,
    "write_kv, rotated": BOTH,
    "write_indexer_k": BOTH,
    "write_entries": BOTH,
    "write_state": REFUSED,
    "read_state": NO_FLOATS,
    "decode_delta_rule": REFUSED,
    "gather_mla": BOTH,
    "gather_kv": BOTH,
    "gather_indexer_k": BOTH,
    "gather_entries": REFUSED,
    "read_mla": BOTH,
    "read_kv": BOTH,
    "read_indexer_k": BOTH,
    "plan_decode": NO_FLOATS,
    "plan_decode, ragged": NO_FLOATS,
    "decode_mla": BOTH,
    "decode_mla, several query tokens": BOTH,
    "decode_mla, with a plan": BOTH,
    "decode_kv": BOTH,
    "decode_kv, ragged": BOTH,
    "decode_kv, ragged with a window": BOTH,
    "decode_mla, with a prefix": BOTH,
    "decode_kv, with prefixes": BOTH,
    "decode_kv, with masks": BOTH,
    "decode_mla_sparse": BOTH,
    "decode_mla_sparse, of two caches": BOTH,
    "indexer_logits": FORWARD,
    "indexer_logits, ragged": FORWARD,
    "select_topk": NO_FLOATS,
    "positions_to_slots": NO_FLOATS,
    "select_slots": NO_FLOATS,
    "select_slots, in chunks": NO_FLOATS,
    "merge_states": BOTH,
    "merge_states, of a list": BOTH,
    "copy_blocks": BOTH,
    "read_blocks": BOTH,
    "write_blocks": BOTH,
    "convert_blocks": REFUSED,
    "convert_blocks, to another size": REFUSED,
    "select_experts": BOTH,
    "select_experts, in groups": BOTH,
    "grouped_swiglu": FORWARD,
    "grouped_swiglu, with all arguments": FORWARD,
    "grouped_swiglu, in float8": REFUSED,
    "scaled_linear": BOTH,
    "scaled_linear, products of e4m3": REFUSED,
    "slots_for": NO_FLOATS,
    "ragged_slots": NO_FLOATS,
    "ragged_positions": NO_FLOATS,
    "block_tables_from_csr": NO_FLOATS,
    "swizzle_scales": NO_FLOATS,
    "prefill_mla": BOTH,
    "prefill_mla, ragged": BOTH,
    "prefill_kv": BOTH,
    "prefill_kv, with a window": BOTH,
    "prefill_kv, ragged": BOTH,
    "prefill_kv, ragged with a window": BOTH,
    "prefill_mla, with a window": BOTH,
    "mla_ragged_paged_attention": BOTH,
    "ragged_paged_attention": BOTH,
}
COMPOSED = ("prefill", "mla_ragged", "ragged_paged")
"""Beginnings of the names of calls whose parts have calls of their own."""
STEP = 1e-2


def test_the_modes_of_every_call_are_known():
    assert set(MODES) == set(calls.ARGUMENTS)


def scalar_of(name):
    """A sum of the results of a call, each times a random number, as a function of its float32 arguments; and these."""
    one = calls.called(name)
    arrays = [*one.arrays, *one.buffers]
    floats = [i for i, x in enumerate(arrays) if x.dtype == np.float32]

    def total(*values):
        given = list(arrays)
        for i, x in zip(floats, values, strict=True):
            given[i] = x
        results = jax.tree.leaves(one(given[: len(one.arrays)], given[len(one.arrays) :]))
        results = [x for x in results if jnp.issubdtype(x.dtype, jnp.floating)]
        draw = calls.Draw(9)
        return sum((jnp.where(jnp.isfinite(x), x, 0) * draw.floats(*x.shape)).sum() for x in results)

    return total, [jnp.asarray(arrays[i]) for i in floats]


@pytest.mark.parametrize(
    "name",
    [
        slow(name) if "," in name or name.startswith(COMPOSED) else name
        for name, mode in MODES.items()
        if mode in (BOTH, FORWARD)
    ],
)
def test_gradients_are_those_of_difference_quotients(name):
    total, values = scalar_of(name)
    draw = calls.Draw(5)
    directions = [jnp.asarray(draw.floats(*x.shape)) for x in values]
    run = jax.jit(total)
    ahead, behind = (run(*(x + s * STEP * t for x, t in zip(values, directions, strict=True))) for s in (1, -1))
    if MODES[name] == BOTH:
        gradients = jax.jit(jax.grad(jax.checkpoint(total), range(len(values))))(*values)
        found = sum((g * t).sum() for g, t in zip(gradients, directions, strict=True))
    else:
        _, found = jax.jit(lambda *x: jax.jvp(total, x, tuple(directions)))(*values)
    np.testing.assert_allclose(found, (ahead - behind) / (2 * STEP), rtol=2e-2, atol=2e-2)


def assert_refused(derive, function, values, match="gradients"):
    with pytest.raises(NotImplementedError, match=match) as caught:
        derive(function, values)
    assert "jax.lax.stop_gradient" in str(caught.value)


def forward(function, values):
    return jax.eval_shape(lambda *x: jax.jvp(function, x, x), *values)


def reverse(function, values):
    return jax.eval_shape(jax.grad(function, range(len(values))), *values)


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode == FORWARD])
def test_reverse_mode_through_a_loop_of_unknown_length_is_refused(name):
    assert_refused(reverse, *scalar_of(name), "no gradients in reverse mode: use forward mode")


@pytest.mark.parametrize("derive", [forward, reverse])
@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode == REFUSED])
def test_values_without_gradients_are_refused(name, derive):
    one = calls.called(name)
    inexact = [x for x in [*one.arrays, *one.buffers] if x.dtype == np.float32]

    def call(*values):
        values = iter(values)
        given = [next(values) if x.dtype == np.float32 else x for x in [*one.arrays, *one.buffers]]
        results = jax.tree.leaves(one(given[: len(one.arrays)], given[len(one.arrays) :]))
        return sum(x.astype(jnp.float32).sum() for x in results)

    assert_refused(derive, call, inexact)
    stopped = jax.eval_shape(lambda *x: jax.grad(lambda *x: call(*map(jax.lax.stop_gradient, x)))(*x), *inexact)
    assert stopped.shape == inexact[0].shape


ENTRIES = [*scenes.MLA_ENTRIES, *scenes.KV_ENTRIES, *scenes.INDEXER_ENTRIES]


def written(entry, dtype=None):
    """A function that writes two entries to a new cache and returns the sum of what it reads back; its arguments."""
    heads = 1 if entry.one_head else 2
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=4, num_heads=heads, entry=entry, dtype=dtype)
    kind, names = {
        jaxkv.MLAEntry: ("mla", ["kv_scale"]),
        jaxkv.KVEntry: ("kv", ["k_scale", "v_scale"]),
        jaxkv.IndexerEntry: ("indexer_k", []),
    }[type(entry)]
    write, gather = getattr(jaxkv, f"write_{kind}"), getattr(jaxkv, f"gather_{kind}")
    values = [jnp.ones((2, *[heads] * (heads > 1), size)) for size in entry.sizes]
    names = [name for name, scaled in zip(names, entry.scaled, strict=False) if scaled]
    scales = [jnp.float32(0.5) for _ in names]

    def total(*given):
        parts, given = given[: len(values)], given[len(values) :]
        options = {"layer": 0, "implementation": "xla", **dict(zip(names, given, strict=True))}
        cache = write(jaxkv.KVCache.zeros(layout), *parts, jnp.asarray([1, 2]), **options)
        rows = gather(cache, jnp.asarray([[0]]), jnp.asarray([0, 4]), total=4, dtype=jnp.float32, **options)
        return sum(x.sum() for x in jax.tree.leaves(rows))

    return total, [*values, *scales]


@pytest.mark.parametrize(
    "entry",
    [*each_format(ENTRIES), further(scenes.MIXED_ENTRIES[0])],
    ids=lambda entry: f"{type(entry).__name__} {entry.label}",
)
def test_quantised_values_and_their_scales_have_no_gradients(entry):
    total, values = written(entry)
    if not entry.quantised:
        assert len(reverse(total, values)) == len(values)
        return
    for i in range(len(values)):  # none of them, not only all together

        def of_one(x, i=i):
            return total(*values[:i], x, *values[i + 1 :])

        for derive in (forward, reverse):
            assert_refused(derive, of_one, values[i : i + 1], re.escape(f"entries of format '{entry.label}'"))


@pytest.mark.parametrize("derive", [forward, reverse])
def test_entries_in_a_buffer_of_another_dtype_have_no_gradients(derive):
    for dtype in ("uint8", "bfloat16"):
        total, values = written(jaxkv.MLAEntry("f32", latent=8, rope=4), dtype)
        assert_refused(derive, total, values, f"float32 values that are moved as bits of {dtype}")


def test_a_buffer_of_another_dtype_has_no_gradients():
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=4, entry=calls.MLA.entry, dtype="bfloat16")

    def gather(buffer):
        cache = jaxkv.KVCache(buffer, layout)
        return jaxkv.gather_mla(cache, jnp.asarray([[0]]), jnp.asarray([0, 4]), layer=0, total=4)[0].sum()

    assert_refused(forward, gather, [jnp.ones(layout.size, jnp.bfloat16)], "bfloat16 values that are moved as bits")


@pytest.mark.parametrize("derive", [forward, reverse])
def test_quantising_a_weight_has_no_gradients(derive):
    def total(weight):
        return jaxkv.TileScaled.of(weight).dequantised(jnp.float32).sum()

    assert_refused(derive, total, [jnp.ones((6, 8))], "a weight has no gradients where it is quantised")


def test_gradients_of_a_weight_in_float8_are_those_of_its_scales():
    weight, x = jaxkv.TileScaled.of(jnp.arange(48.0).reshape(6, 8)), jnp.ones((2, 8))

    def total(x, scales):
        return jaxkv.scaled_linear(x, jaxkv.TileScaled(weight.values, scales), implementation="xla").sum()

    of_x, of_scales = jax.grad(total, (0, 1))(x, weight.scales)
    values = np.asarray(weight.values, np.float32)
    np.testing.assert_allclose(of_x, np.tile(values.sum(0) * weight.scales[0, 0], (2, 1)), rtol=1e-6)
    np.testing.assert_allclose(of_scales, [[2 * values.sum()]], rtol=1e-6)


@pytest.mark.parametrize("derive", [forward, reverse])
def test_kernels_that_jax_cannot_differentiate_refuse(derive):
    """As on GPUs, whose kernels run in place of those of `xla` here."""
    other = dispatch.Backend("other", "here", Opaque, list)
    merge = next(operation for operation in OPERATIONS if operation.function is jaxkv.merge_states)

    def total(outs, lses):
        return dispatch.run_kernel(other, merge.call(outs, lses))[0].sum()

    values = [jnp.ones((2, 3, 4)), jnp.ones((2, 3))]
    assert np.isfinite(jax.jit(total)(*values))
    assert_refused(derive, total, values, "merge_states has no gradients on other: use `implementation='xla'`")
    assert [backend.name for backend in dispatch.BACKENDS if backend.kernels().transformable] == ["xla"]
