"""Good calls, whatever their numbers and arrays are, and good calls that no implementation supports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from errors.calls import arrays, decode_mla, every_operation, write_kv, write_mla
from support.compare import assert_same_bits


@every_operation
def test_the_good_calls_are_good(operation):
    jax.block_until_ready(operation(arrays()))
    jax.eval_shape(operation, arrays())


@every_operation
def test_numpy_arrays_are_arrays(operation):
    a = arrays()
    from_jax, from_numpy = operation(a), operation(jax.tree.map(np.asarray, a))
    for x, y in zip(jax.tree.leaves(from_jax), jax.tree.leaves(from_numpy), strict=True):
        assert_same_bits(x, y)


def strictly(run, operation):
    """Without promotion of ranks and dtypes, and with 64-bit numbers by default: tables and slots are int64."""
    a = arrays()
    right = run(operation, a)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = run(operation, jax.tree.map(lambda x: x.astype(jnp.int64) if x.dtype == jnp.int32 else x, a))
    return zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)


@every_operation
def test_strict_programs_may_call(operation):
    for found, right in strictly(jax.eval_shape, operation):
        assert (found.shape, found.dtype) == (right.shape, right.dtype)


@pytest.mark.slow
@every_operation
def test_strict_programs_get_the_same_numbers(operation):
    for found, right in strictly(lambda operation, a: operation(a), operation):
        assert_same_bits(found, right)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_slots_of_any_integer_dtype_are_taken(dtype):
    a = arrays()
    expected = write_mla(a, layer=2).buffer
    found = write_mla(a, slot_mapping=np.asarray(a.slots, dtype), layer=np.int64(2)).buffer
    assert_same_bits(found, expected)
    if "64" not in dtype:
        assert_same_bits(write_mla(a, slot_mapping=a.slots.astype(dtype), layer=jnp.int8(2)).buffer, expected)


@pytest.mark.parametrize(
    "scale", [2, 2.0, np.float32(2), np.float64(2), np.asarray(2.0), jnp.float32(2), jnp.bfloat16(2)]
)
def test_scales_of_any_kind_of_number_are_taken(scale):
    a = arrays()
    expected = write_mla(a, cache=a.mla_fp8, kv_scale=2.0).buffer
    assert_same_bits(write_mla(a, cache=a.mla_fp8, kv_scale=scale).buffer, expected)
    assert_same_bits(decode_mla(a, scale=scale), decode_mla(a, scale=2.0))
    expected = write_kv(a, cache=a.kv_fp8, k_scale=2.0, v_scale=2.0).buffer
    heads = np.broadcast_to(np.asarray(scale), (2,))
    assert_same_bits(write_kv(a, cache=a.kv_fp8, k_scale=scale, v_scale=heads).buffer, expected)


class TestRefusal:
    """NotImplementedError is for correct calls that none of the requested implementations supports."""

    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=8, block_size=64, entry=jaxkv.MLAEntry("fp8"))

    def cache(self):
        return jaxkv.KVCache(jax.ShapeDtypeStruct((self.layout.size,), self.layout.dtype), self.layout)

    def arguments(self):
        values = [jax.ShapeDtypeStruct((5, n), jnp.bfloat16) for n in self.layout.entry.sizes]
        return self.cache(), *values, jax.ShapeDtypeStruct((5,), jnp.int32)

    def planned(self):
        options = {"num_heads": 16, "batch_invariant": True}
        return (self.cache(), jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)), options

    @pytest.mark.parametrize("implementation", ["xla", ("xla",), ["xla", "xla"]])
    def test_a_named_implementation_runs_or_says_why_not(self, implementation):
        arguments, options = self.planned()
        with pytest.raises(NotImplementedError) as caught:
            jaxkv.plan_decode(*arguments, **options, implementation=implementation)
        for fragment in ("plan_decode", "xla: ", "batch-invariant", "depend on the shape of the batch"):
            assert fragment in str(caught.value)

    def test_explain_gives_the_same_reasons(self):
        arguments, options = self.planned()
        explanation = jaxkv.explain(jaxkv.plan_decode, *arguments, **options)
        assert "batch-invariant" in explanation.reasons["xla"][0]

    def test_explain_checks_the_arguments(self):
        cache, kv_c, k_pe, slots = self.arguments()
        with pytest.raises(ValueError, match="`kv_c` has shape"):
            jaxkv.explain(jaxkv.write_mla, cache, k_pe, k_pe, slots, layer=0, kv_scale=1.0)
        with pytest.raises(ValueError, match="`layer` is 1"):
            jaxkv.explain(jaxkv.write_mla, cache, kv_c, k_pe, slots, layer=1, kv_scale=1.0)
        scale = jax.ShapeDtypeStruct((3,), jnp.float32)
        with pytest.raises(ValueError, match="`kv_scale` is float32"):
            jaxkv.explain(jaxkv.write_mla, cache, kv_c, k_pe, slots, layer=0, kv_scale=scale)
