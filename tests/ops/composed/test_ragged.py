"""Writing and attending in one call, with tpu-inference's arguments."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support.compare import assert_close, assert_same_bits
from support.scenes import to_bytes

BLOCK, COLUMNS, NEW, LENGTHS, USED = 16, 3, (1, 1, 0, 20, 5), (17, 1, 30, 41, 9), 4
"""Two decode steps, a sequence without new tokens, a chunk of a prompt, and a sequence that is not in use."""
LATENTS, HEADS = jaxkv.MLAEntry("f32", latent=32, rope=8), jaxkv.KVEntry("f32", head_dim=16, value_dim=8)
SUMS = np.cumsum([0, *NEW])


def arguments(entry, kv_heads=1):
    """A random cache, and the queries and new values of 30 tokens, of which 3 belong to no sequence."""
    rng, total = np.random.default_rng(0), SUMS[-1] + 3
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=20, block_size=BLOCK, num_heads=kv_heads, entry=entry)
    cache = jaxkv.KVCache(jnp.asarray(rng.standard_normal(layout.size), jnp.float32), layout)
    heads = () if entry.one_head else (kv_heads,)
    new = [jnp.asarray(rng.standard_normal((total, *heads, n)), jnp.float32) for n in entry.sizes]
    sizes = entry.sizes if entry.one_head else entry.sizes[:1]
    q = [jnp.asarray(rng.standard_normal((total, 4, n)), jnp.float32) for n in sizes]
    tables = rng.permutation(20)[: len(NEW) * COLUMNS].reshape(len(NEW), COLUMNS)
    return cache, q, new, tables


def paged(tables):
    """kv_lens, page_indices, cu_q_lens, distribution."""
    return *(jnp.asarray(x, jnp.int32) for x in (LENGTHS, tables.reshape(-1), SUMS)), jnp.asarray([2, 3, USED])


def step(write, decode, cache, q, new, tables):
    """The cache and results of each sequence by the operations themselves."""
    slots = np.full(len(q[0]), -1)
    for s in range(USED):
        positions = np.arange(LENGTHS[s] - NEW[s], LENGTHS[s])
        slots[SUMS[s] : SUMS[s + 1]] = tables[s, positions // BLOCK] * BLOCK + positions % BLOCK
    cache = write(cache, *new, jnp.asarray(slots), layer=1)
    for s in range(USED):
        if NEW[s]:
            mine = [x[None, SUMS[s] : SUMS[s + 1]] for x in q]
            yield s, decode(*mine, cache, jnp.asarray(tables[s : s + 1]), jnp.asarray(LENGTHS[s : s + 1]), layer=1)[0]
    yield None, cache


def check(found, cache, right):
    for s, expected in right:
        if s is None:
            assert_same_bits(to_bytes(cache), to_bytes(expected))
        else:
            assert_close(found[SUMS[s] : SUMS[s + 1]], expected, roundings=64, magnitude=1)
    assert not np.asarray(found[SUMS[USED] :]).any()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 18, "soft_cap": 5.0, "q_scale": 0.5}])
def test_latents(options):
    cache, q, new, tables = arguments(LATENTS)

    def decode(*args, **keywords):
        scale = 0.1 * options.get("q_scale", 1)
        return jaxkv.decode_mla(
            *args, **keywords, scale=scale, window=options.get("sliding_window"), logit_cap=options.get("soft_cap")
        )

    out, after = jaxkv.mla_ragged_paged_attention(*q, *new, cache, *paged(tables), layer=1, sm_scale=0.1, **options)
    check(out, after, step(jaxkv.write_mla, decode, cache, q, new, tables))


@pytest.mark.parametrize("causal", [True, False])
def test_keys_and_values(causal):
    cache, q, new, tables = arguments(HEADS, kv_heads=2)
    sinks = jnp.asarray([0.0, 1.0, -1.0, 3.0])

    def decode(*args, **keywords):
        return jaxkv.decode_kv(*args, **keywords, scale=0.3, causal=causal, sinks=sinks)

    out, after = jaxkv.ragged_paged_attention(
        *q, *new, cache, *paged(tables), sinks, layer=1, sm_scale=0.3, use_causal_mask=causal
    )
    check(out, after, step(jaxkv.write_kv, decode, cache, q, new, tables))


def test_quantised_latents_have_one_scale():
    entry = jaxkv.MLAEntry("fp8", latent=32, rope=8)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=20, block_size=BLOCK, entry=entry)
    _, q, new, tables = arguments(LATENTS)
    run = jaxkv.mla_ragged_paged_attention
    both = [
        run(*q, *new, jaxkv.KVCache.zeros(layout), *paged(tables), layer=1, k_scale=0.02, v_scale=v)[0]
        for v in (None, 0.02)
    ]
    assert_same_bits(*both)
    with pytest.raises(ValueError, match=re.escape("`v_scale` is 0.03: expected None or `k_scale`, 0.02")):
        run(*q, *new, jaxkv.KVCache.zeros(layout), *paged(tables), layer=1, k_scale=0.02, v_scale=0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: jnp.zeros(16, jnp.int32)}, "`page_indices` has 16 elements: expected a multiple of the 5 sequences"),
        ({2: jnp.zeros(5, jnp.int32)}, "`cu_q_lens` has shape (5,)"),
        ({3: jnp.zeros(2, jnp.int32)}, "`distribution` has shape (2,)"),
        ({0: jnp.zeros(5)}, "`kv_lens` has dtype float32"),
    ],
)
def test_wrong_arguments(change, message):
    cache, q, new, tables = arguments(LATENTS)
    args = list(paged(tables))
    for i, x in change.items():
        args[i] = x
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxkv.mla_ragged_paged_attention(*q, *new, cache, *args, layer=1)
