"""What `jaxkv.explain` returns for calls of dense attention."""

import jax
import jax.numpy as jnp

import jaxkv

REQUESTS, HEADS = 2, 16


def explained(operation, entry, *, tokens, ragged=False, **options):
    """The explanation of a call with `tokens` query tokens per request, or in all if they are `ragged`."""
    shape = jax.ShapeDtypeStruct
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=8, block_size=64, entry=entry)
    cache = jaxkv.KVCache(shape((layout.size,), layout.dtype), layout)
    requests = shape((REQUESTS, 4), jnp.int32), shape((REQUESTS,), jnp.int32)
    if ragged:
        options["cu_q_lens"] = shape((REQUESTS + 1,), jnp.int32)
    if operation == "plan_decode":
        more = {"total": tokens} if ragged else {"q_len": tokens}
        return jaxkv.explain(jaxkv.plan_decode, cache, *requests, num_heads=HEADS, **more, **options)
    axes = (tokens,) if ragged else (REQUESTS, tokens)
    sizes = entry.sizes[:1] if operation == "decode_kv" else entry.sizes
    queries = [shape((*axes, HEADS, n), jnp.bfloat16) for n in sizes]
    return jaxkv.explain(getattr(jaxkv, operation), *queries, cache, *requests, layer=0, scale=1.0, **options)
