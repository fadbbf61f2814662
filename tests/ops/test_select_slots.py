"""`select_slots`: temporary memory is bounded, and arguments are checked."""

import jax
import jax.numpy as jnp
import pytest

import jaxkv

REQUESTS, TOKENS, HEADS, MAX_LEN, K = 2, 512, 4, 8192, 64
LOGITS = 4 * REQUESTS * TOKENS * MAX_LEN
"""Bytes of the logits of all query tokens."""


def arguments():
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=256, block_size=64, entry=jaxkv.IndexerEntry("bf16"))
    shape = jax.ShapeDtypeStruct
    return layout, (
        shape((REQUESTS, TOKENS, HEADS, 128), jnp.bfloat16),
        shape((REQUESTS, TOKENS, HEADS), jnp.float32),
        shape((layout.size,), layout.dtype),
        shape((REQUESTS, MAX_LEN // 64), jnp.int32),
        shape((REQUESTS,), jnp.int32),
    )


def temporary_bytes(**options) -> int:
    """Temporary memory of the compiled call."""
    layout, arrays = arguments()

    def select(q, weights, buffer, tables, lengths):
        cache = jaxkv.KVCache(buffer, layout)
        return jaxkv.select_slots(q, weights, cache, tables, lengths, K, layer=1, max_len=MAX_LEN, **options)

    analysis = jax.jit(select).lower(*arrays).compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("fraction", [4, 16])
def test_temporary_memory_is_bounded(fraction):
    """By three times `logits_bytes`, and twice the slots of all query tokens."""
    most = LOGITS // fraction
    assert temporary_bytes(logits_bytes=most) <= 3 * most + 2 * 4 * REQUESTS * TOKENS * K
    assert temporary_bytes() == temporary_bytes(logits_bytes=2**40) >= LOGITS  # one chunk, by default


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_the_bound_is_a_positive_int(value):
    with pytest.raises(ValueError, match="`logits_bytes`"):
        temporary_bytes(logits_bytes=value)


def test_lengths_are_checked_before_they_are_divided():
    layout, arrays = arguments()
    q, weights, buffer, tables, _ = (jnp.zeros(array.shape, array.dtype) for array in arrays)
    cache = jaxkv.KVCache(buffer, layout)

    def select(lengths):
        options = dict(layer=0, max_len=200, logits_bytes=1)
        return jaxkv.select_slots(q[:, :2], weights[:, :2], cache, tables, lengths, 4, **options)

    jaxkv.checked(select)(jnp.asarray([1, MAX_LEN]))
    with pytest.raises(ValueError, match=r"`seq_lens`\[1\] is 8193"):
        jaxkv.checked(select)(jnp.asarray([0, MAX_LEN + 1]))
