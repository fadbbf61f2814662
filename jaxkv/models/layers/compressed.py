"""The layer of DeepSeek-V4: attention to a window and to compressed entries, between hyper-connections.

A query attends to the entries of the last tokens and, in the same softmax, to compressed entries: of `hca` layers all,
of `csa` layers those that an indexer selects.  A compressed entry can be seen by the query that completes it, and by
later ones.  Values are the entries themselves, whose rotary part is rotated; it is rotated back, by the position of the
query, in the output.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.dispatch.query_chunks import LOGITS_BYTES, in_query_chunks, logits_bytes_of_a_token
from jaxkv.layout.layout import CacheLayout
from jaxkv.models.batch import Batch, Part
from jaxkv.models.compressed_cache import MAIN
from jaxkv.models.config import CompressedAttention
from jaxkv.models.layers import hyper, rope
from jaxkv.models.layers.compressor import Compressor, new_entries
from jaxkv.models.layers.feed_forward import feed_forward
from jaxkv.models.layers.linear import linear, normalised, product, rms_norm
from jaxkv.models.model import Model
from jaxkv.ops.indexer import indexer_logits, positions_to_slots, select_topk
from jaxkv.ops.slots import slots_for
from jaxkv.ops.sparse import ExtraCache
from jaxkv.ops.writes import write_indexer_k, write_mla


def block(model: Model, weights, x, cache: KVCache, batch: Batch, layer) -> tuple[KVCache, None, jax.Array]:
    """The layer; x is [B, Q, streams, hidden]."""
    config: Any = model.config
    eps = config.rms_norm_eps
    connections = hyper.Connections.of(config.hyper, weights["attention_hyper"], x, eps)
    normed = rms_norm(connections.read(x), weights["attention_norm"], eps)
    cache, out = attention(model, config.attention, weights["attention"], normed, cache, batch, layer)
    x = connections.write(x, out)
    connections = hyper.Connections.of(config.hyper, weights["feed_forward_hyper"], x, eps)
    normed = rms_norm(connections.read(x), weights["feed_forward_norm"], eps)
    out = feed_forward(config.experts, weights, normed, model.parallel, batch.ids)
    return cache, None, connections.write(x, out)


def attention(
    model: Model, config: CompressedAttention, weights, x, cache: KVCache, batch: Batch, layer
) -> tuple[KVCache, jax.Array]:
    """Stores the entries of x [B, Q, hidden], and attends; returns the cache and the output [B, Q, hidden]."""
    eps, compresses = model.config.rms_norm_eps, "compressor" in weights
    cos, sin = rope.angles(
        config.compressed_rope if compresses else model.config.rope, config.rotary_dim, batch.positions
    )
    per_head = cos[:, :, None], sin[:, :, None]
    q_latent = rms_norm(linear(x, weights["q_a"]), weights["q_a_norm"], eps)
    q = linear(q_latent, weights["q"]).reshape(*x.shape[:2], -1, config.head_dim)
    q = rope.rotate_last(normalised(q, eps), *per_head)
    kv = rope.rotate_last(rms_norm(linear(x, weights["kv"]), weights["kv_norm"], eps), cos, sin)

    layouts, options = model.groups_of(cache), {"implementation": model.implementation}
    window = layouts["window"]
    slots = batch.slots_of("window", window.block_size)
    cache = _write(cache, window, kv.reshape(len(slots), -1), slots, layer=layer, **options)
    arrays, extra = (q, batch.positions), None
    if compresses:
        kind = "csa" if "indexer" in weights else "hca"
        place = jnp.asarray([config.kinds[:i].count(kind) for i in range(len(config.kinds))], jnp.int32)[layer]
        options["layer"] = place
        compressor = Compressor(config.csa_rate if kind == "csa" else config.hca_rate, halves=kind == "csa")
        store = partial(
            new_entries, compressor, config, batch=batch, tables=(f"{kind}_rows", MAIN), norm_eps=eps, **options
        )
        cache, entries, slots = store(weights["compressor"], x, cache, (layouts[f"{kind}_rows"], layouts[kind]))
        cache = _write(cache, layouts[kind], entries, slots, **options)
        seen = partial(_all_entries, config.hca_rate, layouts[kind])
        if kind == "csa":
            index = weights["indexer"]
            keys = layouts["indexer"]
            cache, entries, slots = store(index["compressor"], x, cache, (layouts["indexer_rows"], keys))
            cache = write_indexer_k(cache.view(keys), entries, slots, **options).view(cache.layout)
            arrays = (*arrays, *_index_queries(config, index, x, q_latent, *per_head))
            seen = partial(_best_entries, config, cache.view(keys), options)
        extra = seen, ExtraCache(cache.view(layouts[kind]), None, place)

    def attend(part: Part, q, positions, *index) -> jax.Array:
        sizes = window.entry.sizes
        first = jnp.maximum(positions - config.window + 1, 0)[..., None]
        slots = slots_for(
            part.tables["window"],
            first + jnp.arange(config.window, dtype=jnp.int32)[None, None],
            block_size=window.block_size,
        )
        others = None
        if extra is not None:
            see, others = extra
            chosen, counts = see(part, positions, *index)
            others = others._replace(slots=chosen, counts=counts)
        return model.parallel.decode_mla_sparse(
            q[..., : sizes[0]],
            q[..., sizes[0] :],
            cache.view(window),
            slots,
            layer=layer,
            scale=config.head_dim**-0.5,
            counts=jnp.minimum(positions + 1, config.window),
            extra=others,
            sinks=weights["sinks"],
            implementation=model.implementation,
        )

    out = rope.rotate_last(batch.attend(attend, *arrays), per_head[0], -per_head[1])
    groups = config.output_groups
    out = out.reshape(*x.shape[:2], groups, -1)
    out = product("bqgi,gri->bqgr", out, weights["o_a"].reshape(groups, config.output_rank, -1))
    return cache, linear(out.reshape(*x.shape[:2], -1), weights["o"])


def _write(cache: KVCache, layout: CacheLayout, entries, slots, **options) -> KVCache:
    """Stores entries [T, head_dim] in a group of latents, whose format may store their rotary part apart."""
    latent = layout.entry.sizes[0]
    written = write_mla(cache.view(layout), entries[:, :latent], entries[:, latent:], slots, **options)
    return written.view(cache.layout)


def _all_entries(rate: int, layout: CacheLayout, part: Part, positions) -> tuple[jax.Array, jax.Array]:
    """The slots [B, Q, K] of all compressed entries, and how many of them each query token sees, [B, Q]."""
    table = part.tables[MAIN]
    numbers = jnp.arange(table.shape[1] * layout.block_size, dtype=jnp.int32)
    slots = slots_for(table, jnp.broadcast_to(numbers, (len(table), len(numbers))), block_size=layout.block_size)
    return jnp.broadcast_to(slots[:, None], (*positions.shape, len(numbers))), (positions + 1) // rate


def _index_queries(config: CompressedAttention, weights, x, q_latent, cos, sin) -> tuple[jax.Array, jax.Array]:
    """The queries [B, Q, Hi, D] of the indexer, and the weights of its heads, float32 [B, Q, Hi]."""
    indexer = config.indexer
    q = linear(q_latent, weights["q"]).reshape(*x.shape[:2], indexer.heads, indexer.head_dim)
    scale = (indexer.heads * indexer.head_dim) ** -0.5
    return rope.rotate_last(q, cos, sin), linear(x.astype(jnp.float32), weights["weights"]) * scale


def _best_entries(
    config: CompressedAttention, keys: KVCache, options, part: Part, positions, q, head_weights
) -> tuple[jax.Array, jax.Array]:
    """The slots [B, Q, K] of the entries with the highest scores, and how many of them there are, [B, Q].

    Query tokens see different numbers of entries, and so each is scored as a request of its own.
    """
    table, block_size, rate = part.tables[MAIN], keys.layout.block_size, config.csa_rate
    max_len = table.shape[1] * block_size
    most = min(config.indexer.topk, max_len)

    def select(q, head_weights, lengths) -> jax.Array:
        count = q.shape[1]
        seen = jnp.maximum(lengths[:, None] + jnp.arange(1 - count, 1, dtype=jnp.int32)[None], 0) // rate
        tables = jnp.repeat(table, count, axis=0)
        rows = (array.reshape(-1, 1, *array.shape[2:]) for array in (q, head_weights))
        logits = indexer_logits(*rows, keys, tables, seen.reshape(-1), max_len=max_len, **options)
        best = select_topk(logits, most, implementation=options["implementation"])
        return positions_to_slots(best, tables, block_size=block_size).reshape(*seen.shape, most)

    slots = in_query_chunks(
        select, q, head_weights, part.seq_lens,
        token_bytes=logits_bytes_of_a_token(head_weights, max_len), most_bytes=LOGITS_BYTES,
    )  # fmt: skip
    return slots, jnp.minimum((positions + 1) // rate, most)
