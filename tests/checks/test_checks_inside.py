"""Checked mode inside JAX's transformations, and of plans."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from checks.calls import ENTRY, LENGTHS, MLA, TABLES, decode_mla, ints, write_mla
from support.compare import assert_same_bits


def write_mla_at(slots, layer, cache=None):
    values = [jnp.ones((slots.shape[0], n), jnp.bfloat16) for n in ENTRY.sizes]
    cache = jaxkv.KVCache.zeros(MLA) if cache is None else cache
    return jaxkv.write_mla(cache, *values, slots, layer=layer)


def decode_mla_at(lengths, layer, cache, plan=None):
    q = [jnp.ones((2, 2, n), jnp.bfloat16) for n in ENTRY.sizes]
    return jaxkv.decode_mla(*q, cache, ints(TABLES), lengths, layer=layer, scale=0.3, plan=plan)


class TestTransformations:
    def test_inside_jit(self):
        step = jax.jit(lambda slots: write_mla_at(slots, 1))
        jaxkv.checked(step)(ints([3, 5]))
        with pytest.raises(ValueError, match=re.escape("`slot_mapping`[1] is 24")):
            jaxkv.checked(step)(ints([3, 24]))

    def test_around_and_inside_scan_with_a_traced_layer(self):
        def model(cache, slots, lengths):
            def body(cache, layer):
                cache = write_mla_at(slots, layer, cache)
                out = decode_mla_at(lengths, layer, cache)
                return cache, out

            return jax.lax.scan(body, cache, jnp.arange(3, dtype=jnp.int32))

        check = jaxkv.checked(jax.jit(model))
        cache = jaxkv.KVCache.zeros(MLA)
        found, expected = check(cache, ints([22, 14]), ints(LENGTHS)), model(cache, ints([22, 14]), ints(LENGTHS))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_same_bits(a, b)
        with pytest.raises(ValueError, match=re.escape("`slot_mapping`[0] is 24")):
            check(cache, ints([24, 14]), ints(LENGTHS))
        with pytest.raises(ValueError, match=re.escape("`seq_lens`[1] is 9")):
            check(cache, ints([22, 14]), ints([7, 9]))

    def test_only_one_turn_of_a_scan_is_wrong(self):
        def model(cache):
            return jax.lax.scan(lambda c, i: (write_mla_at(ints([0, 1]), i, c), None), cache, jnp.arange(4))

        with pytest.raises(ValueError, match=re.escape("`layer` is 3: the cache has 3 layers")):
            jaxkv.checked(model)(jaxkv.KVCache.zeros(MLA))

    def test_a_function_that_was_traced_without_checks_is_checked(self):
        step = jax.jit(lambda slots: write_mla_at(slots, 0))
        jax.block_until_ready(step(ints([24, 24])))
        with pytest.raises(ValueError, match=re.escape("`slot_mapping`[0] is 24")):
            jaxkv.checked(step)(ints([24, 24]))
        # And the other way round: the program with checks is not the one that runs without.
        jax.block_until_ready(step(ints([24, 24])))

    def test_a_checked_function_is_traced_once(self):
        traces = []

        def step(slots):
            traces.append(1)
            return write_mla_at(slots, 0)

        check = jaxkv.checked(step)
        for slot in range(5):
            check(ints([slot, slot + 6]))
        with pytest.raises(ValueError, match="`slot_mapping`"):
            check(ints([30, 1]))
        assert len(traces) == 1

    def test_it_keeps_the_functions_name(self):
        assert jaxkv.checked(write_mla).__name__ == "write_mla"


class TestPlans:
    """A plan made for other lengths, which gives wrong results where it is used, is misuse."""

    fragments = re.escape("`seq_lens`[1] is 3: `plan` was made for 4: make one for the lengths of the call")

    def plan(self, lengths, cache=None):
        cache = jaxkv.KVCache.zeros(MLA) if cache is None else cache
        return jaxkv.plan_decode(cache, ints(TABLES), lengths, num_heads=2)

    def test_made_before_the_checked_call(self):
        plan = self.plan(ints([7, 4]))
        with pytest.raises(ValueError, match=self.fragments):
            jaxkv.checked(lambda: decode_mla(plan=plan))()
        with pytest.raises(ValueError, match=self.fragments):
            jaxkv.checked(lambda plan: decode_mla(plan=plan))(plan)
        jaxkv.checked(lambda: decode_mla(lengths=[7, 4], plan=plan))()

    def test_made_in_the_checked_call_and_used_in_a_scan(self):
        def model(cache, planned, lengths):
            plan = self.plan(planned, cache)

            def body(cache, layer):
                cache = write_mla_at(ints([22, 14]), layer, cache)
                return cache, decode_mla_at(lengths, layer, cache, plan)

            return jax.lax.scan(body, cache, jnp.arange(3, dtype=jnp.int32))

        cache, check = jaxkv.KVCache.zeros(MLA), jaxkv.checked(jax.jit(model))
        found, expected = (step(cache, ints(LENGTHS), ints(LENGTHS)) for step in (check, model))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_same_bits(a, b)
        with pytest.raises(ValueError, match=self.fragments):
            check(cache, ints([7, 4]), ints(LENGTHS))

    def test_unchecked_programs_do_not_read_the_lengths_of_a_plan(self):
        plan = self.plan(ints(LENGTHS))
        step, cache = jax.jit(lambda cache, plan: decode_mla(cache=cache, plan=plan)), jaxkv.KVCache.zeros(MLA)
        with_plan, without = (step.lower(cache, given).as_text() for given in (plan, None))
        assert with_plan == without
