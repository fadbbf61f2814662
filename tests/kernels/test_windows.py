"""GPU kernels support all windows of both sides."""

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from support.available import assume_available

REQUESTS, TOKENS, HEADS = 2, 5, 16


def reasons(implementation, operation, *, tokens=TOKENS, ragged=False, **options):
    """The reasons of an implementation against a call."""
    shape = jax.ShapeDtypeStruct
    entry = jaxkv.KVEntry("bf16", head_dim=128) if operation == "decode_kv" else jaxkv.MLAEntry("bf16")
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=8, block_size=64, entry=entry)
    cache = jaxkv.KVCache(shape((layout.size,), layout.dtype), layout)
    requests = shape((REQUESTS, 4), jnp.int32), shape((REQUESTS,), jnp.int32)
    if ragged:
        options["cu_q_lens"] = shape((REQUESTS + 1,), jnp.int32)
    if operation == "plan_decode":
        more = {"total": tokens} if ragged else {"q_len": tokens}
        found = jaxkv.explain(jaxkv.plan_decode, cache, *requests, num_heads=HEADS, **more, **options)
    else:
        axes = (tokens,) if ragged else (REQUESTS, tokens)
        sizes = entry.sizes[:1] if operation == "decode_kv" else entry.sizes
        queries = [shape((*axes, HEADS, n), jnp.bfloat16) for n in sizes]
        call = getattr(jaxkv, operation)
        found = jaxkv.explain(call, *queries, cache, *requests, layer=0, scale=1.0, **options)
    assert not found.reasons["xla"]
    return found.reasons[implementation]


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("operation", ["decode_mla", "decode_kv", "plan_decode"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (127, -1)},
        {"window": (127, 5), "ragged": True},
        {"window": (64, 3), "causal": False},
        {"window": (64, 1), "causal": False, "ragged": True},
        {"window": (64, 64), "causal": False},
        {"window": (-1, 3), "causal": False, "ragged": True},
        {"window": (-1, -1), "causal": False},
        {"window": (127, 64), "causal": False, "tokens": 1},
    ],
)
def test_windows_are_supported(implementation, operation, options, monkeypatch):
    assume_available(monkeypatch, implementation)
    assert not reasons(implementation, operation, **options)
