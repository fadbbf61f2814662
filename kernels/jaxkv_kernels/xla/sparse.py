"""Absorbed latent attention over selected slots, of one cache or of two."""

from functools import reduce

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import load_entries
from jaxkv_kernels.calls import DecodeMLASparse
from jaxkv_kernels.extra_slots import ExtraSlots
from jaxkv_kernels.scores import CHUNK_TOKENS, merged, with_sinks
from jaxkv_kernels.xla.paged import bytes_per_request, in_parts
from jaxkv_kernels.xla.softmax import attend


@jax.jit
def decode_mla_sparse(call: DecodeMLASparse) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Attention of each query token to its slots: out [B, Q, Hq, V], lse [B, Q, Hq] and the largest logits."""
    batch, tokens, heads, _ = call.q_latent.shape
    own = ExtraSlots(call.buffer, call.slots, call.counts, call.layer, call.kv_scale, call.pages, call.entry)
    sources = [own] if call.extra is None else [own, call.extra]

    # Every query token has its own keys, so each is computed as a request.
    def attend_requests(q_latent, q_pe, *slots):
        q = jnp.concatenate([q_latent, q_pe], axis=-1)[:, None, None]
        found = [
            _attend(q, some, source, call.scale, call.logit_cap) for some, source in zip(slots, sources, strict=True)
        ]
        out, lse = (x[:, 0, 0] for x in merged([(out, lse) for out, lse, _ in found]))
        if call.sinks is not None:
            out = with_sinks(out, lse, call.sinks)
        largest = reduce(jnp.maximum, [largest[:, 0, 0] for *_, largest in found])
        return out.astype(q_latent.dtype), lse, largest if call.max_logits else None

    queries = [q.reshape(batch * tokens, heads, -1) for q in (call.q_latent, call.q_pe)]
    keys = min(max(source.slots.shape[-1] for source in sources), CHUNK_TOKENS)
    width = sum(call.entry.sizes) + call.entry.value_dim
    needed = bytes_per_request(keys, width, heads, call.q_latent.dtype)
    found = in_parts(attend_requests, *queries, *map(used_slots, sources), bytes_per_request=needed)
    return jax.tree.map(lambda x: x.reshape(batch, tokens, *x.shape[1:]), found)


def used_slots(source: ExtraSlots) -> jax.Array:
    """The slots [B * Q, K] of one cache; -1 for those that are not used."""
    slots, size = source.slots, source.slots.shape[-1]
    if source.counts is not None:
        slots = jnp.where(jnp.arange(size, dtype=jnp.int32) < source.counts[..., None], slots, -1)
    return slots.reshape(-1, size)


def _attend(q, slots, source: ExtraSlots, scale, logit_cap):
    """Attention of q [N, 1, 1, Hq, R + P] to the slots [N, K] of one cache: what `attend` returns."""
    entry, size = source.entry, slots.shape[-1]
    chunk = min(size, CHUNK_TOKENS)
    chunks = -(-size // chunk)
    slots = jnp.pad(slots, ((0, 0), (0, chunks * chunk - size)), constant_values=-1)

    def load(i):
        some = jax.lax.dynamic_slice_in_dim(slots, i * chunk, chunk, axis=1)
        rows, valid = load_entries(source.buffer, source.pages, entry, some, source.layer)
        return *entry.keys_and_values(rows, q.dtype), valid[:, None]

    return attend(
        q, load, 0, chunks, value_dim=entry.value_dim, scale=scale, k_scale=source.kv_scale, v_scale=source.kv_scale,
        logit_cap=logit_cap,
    )  # fmt: skip
