"""Arguments that GPU kernels reject with a reason, and some that operations convert for all implementations."""

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from support.available import assume_available

B, M, Q, HQ, BLOCKS, SIZE, H = 2, 4, 1, 16, 8, 64, 2
shape = jax.ShapeDtypeStruct
REQUESTS = shape((B, M), jnp.int32), shape((B,), jnp.int32)
on_gpus = pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])


def cache_of(entry):
    heads = 1 if entry.one_head else H
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=BLOCKS, block_size=SIZE, num_heads=heads, entry=entry)
    return jaxkv.KVCache(shape((layout.size,), layout.dtype), layout)


def reasons(implementation, monkeypatch, operation, *args, **options):
    """The reasons of an implementation against a call, which `xla` supports."""
    assume_available(monkeypatch, implementation)
    found = jaxkv.explain(operation, *args, **options)
    assert not found.reasons["xla"]
    return found.reasons[implementation]


def calls_of_keys():
    """Operations on keys and values, and their arguments."""
    cache, q = cache_of(jaxkv.KVEntry("fp8")), shape((B, Q, HQ, 128), jnp.bfloat16)
    new, slots = shape((3, H, 128), jnp.bfloat16), shape((3,), jnp.int32)
    return {
        "write_kv": ((cache, new, new, slots), {}),
        "gather_kv": ((cache, REQUESTS[0], shape((B + 1,), jnp.int32)), {"total": 9}),
        "read_kv": ((cache, slots), {}),
        "decode_kv": ((q, cache, *REQUESTS), {"scale": 1.0}),
        "prefill_kv": ((q, cache, *REQUESTS), {"scale": 1.0}),
    }


@on_gpus
@pytest.mark.parametrize("operation", calls_of_keys())
def test_scales_per_token(operation, implementation, monkeypatch):
    args, options = calls_of_keys()[operation]
    for k_shape, v_shape in (((BLOCKS, SIZE, H), ()), ((H,), (BLOCKS, SIZE, H)), ((), (H,))):
        scales = {"k_scale": shape(k_shape, jnp.float32), "v_scale": shape(v_shape, jnp.float32)}
        call = getattr(jaxkv, operation)
        found = reasons(implementation, monkeypatch, call, *args, layer=0, **options, **scales)
        expected = [name for name, scale in scales.items() if len(scale.shape) == 3]
        assert [*found] == [f"`{name}` per token: supports a scalar, or one scale per head" for name in expected]


@on_gpus
def test_the_largest_logits(implementation, monkeypatch):
    q = [shape((B, Q, HQ, n), jnp.bfloat16) for n in (512, 64)]
    args = (*q, cache_of(jaxkv.MLAEntry("bf16")), shape((B, Q, 64), jnp.int32))
    options = {"layer": 0, "scale": 1.0}
    found = reasons(implementation, monkeypatch, jaxkv.decode_mla_sparse, *args, **options, return_max_logits=True)
    assert found == ("`return_max_logits`: returns results and log-sum-exps only",)
    assert not reasons(implementation, monkeypatch, jaxkv.decode_mla_sparse, *args, **options)


@on_gpus
@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8_ds_mla"])
def test_queries_in_e4m3_are_supported(form, implementation, monkeypatch):
    q = [shape((B, Q, HQ, n), jnp.float8_e4m3fn) for n in (512, 64)]
    cache, options = cache_of(jaxkv.MLAEntry(form)), {"layer": 0, "scale": 1.0}
    if form == "fp8":
        options["kv_scale"] = 1.0
    for scale in (None, 0.5, shape((HQ,), jnp.float32)):
        given = {**options, "q_scale": scale}
        assert not reasons(implementation, monkeypatch, jaxkv.decode_mla, *q, cache, *REQUESTS, **given)
        slots = shape((B, Q, 64), jnp.int32)
        assert not reasons(implementation, monkeypatch, jaxkv.decode_mla_sparse, *q, cache, slots, **given)


@on_gpus
def test_lengths_of_query_tokens_are_supported(implementation, monkeypatch):
    cache = cache_of(jaxkv.IndexerEntry())
    options = {"layer": 0, "max_len": 100}
    for axes, lengths, more in (
        ((B, 3), (B, 3), {}),
        ((5,), (B,), {"cu_q_lens": shape((B + 1,), jnp.int32)}),
    ):
        q, weights = shape((*axes, 64, 128), jnp.bfloat16), shape((*axes, 64), jnp.float32)
        args = q, weights, cache, REQUESTS[0], shape(lengths, jnp.int32)
        assert not reasons(implementation, monkeypatch, jaxkv.indexer_logits, *args, **options, **more)
    lengths = shape((B, 3), jnp.int32)
    logits = shape((B, 3, 100), jnp.float32)
    assert not reasons(implementation, monkeypatch, jaxkv.select_topk, logits, 5, lengths=lengths)
