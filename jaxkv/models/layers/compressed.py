"""The layer of DeepSeek-V4: attention to a window and to compressed entries, between hyper-connections.

A query attends to the entries of the last tokens and, in the same softmax, to compressed entries: of `hca` layers all,
of `csa` layers those that an indexer selects.  A compressed entry can be seen by the query that completes it, and by
later ones.  Values are the entries themselves, whose rotary part is rotated; it is rotated back, by the position of the
query, in the output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
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
from jaxkv.ops.query_chunks import LOGITS_BYTES, in_query_chunks, logits_bytes_of_a_token
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
    eps, rotary = model.config.rms_norm_eps, model.config.rope
    if "compressor" in weights:
        rotary = config.compressed_rope
    cos, sin = rope.angles(rotary, config.rotary_dim, batch.positions)
    per_head = cos[:, :, None], sin[:, :, None]
    q_latent = rms_norm(linear(x, weights["q_a"]), weights["q_a_norm"], eps)
    q = linear(q_latent, weights["q"]).reshape(*x.shape[:2], -1, config.head_dim)
    q = rope.rotate_last(normalised(q, eps), *per_head)
    kv = rope.rotate_last(rms_norm(linear(x, weights["kv"]), weights["kv_norm"], eps), cos, sin)

    window = model.groups_of(cache)["window"]
    slots = batch.slots_of("window", window.block_size)
    options: dict[str, Any] = {"layer": layer, "implementation": model.implementation}
    cache = _write(cache, window, kv.reshape(len(slots), -1), slots, **options)
    queries, see = (), None
    if "compressor" in weights:
        cache, queries, see = _compress(model, config, weights, x, q_latent, per_head, cache, batch, layer)
    latent = window.entry.sizes[0]

    def attend(part: Part, q, positions, *queries) -> jax.Array:
        first = jnp.maximum(positions - config.window + 1, 0)[..., None]
        seen = first + jnp.arange(config.window, dtype=jnp.int32)[None, None]
        return model.parallel.decode_mla_sparse(
            q[..., :latent],
            q[..., latent:],
            cache.view(window),
            slots_for(part.tables["window"], seen, block_size=window.block_size),
            counts=jnp.minimum(positions + 1, config.window),
            extra=None if see is None else see(part, positions, *queries),
            sinks=weights["sinks"],
            scale=config.head_dim**-0.5,
            **options,
        )

    out = batch.attend(attend, q, batch.positions, *queries)
    out = rope.rotate_last(out, per_head[0], -per_head[1])
    groups = config.output_groups
    out = out.reshape(*x.shape[:2], groups, -1)
    out = product("bqgi,gri->bqgr", out, weights["o_a"].reshape(groups, config.output_rank, -1))
    return cache, linear(out.reshape(*x.shape[:2], -1), weights["o"])


See = Callable[..., ExtraCache]
"""`see(part, positions, *queries)` returns the compressed entries that the query tokens of a part attend to."""


def _compress(
    model: Model, config: CompressedAttention, weights, x, q_latent, per_head, cache: KVCache, batch: Batch, layer
) -> tuple[KVCache, tuple[jax.Array, ...], See]:
    """Stores the rows of x and the compressed entries that they complete.

    Returns the cache, arrays of the query tokens, and the function that takes them.
    """
    kind = "csa" if "indexer" in weights else "hca"
    layouts, rows = model.groups_of(cache), f"{kind}_rows"
    place = jnp.asarray([config.kinds[:i].count(kind) for i in range(len(config.kinds))], jnp.int32)[layer]
    options: dict[str, Any] = {"layer": place, "implementation": model.implementation}
    compressor = Compressor(config.csa_rate if kind == "csa" else config.hca_rate, kind == "csa", rows)
    entries = partial(new_entries, compressor, config, batch=batch, eps=model.config.rms_norm_eps, **options)

    cache, new, slots = entries(weights["compressor"], x, cache, layouts[rows], layouts[kind])
    cache = _write(cache, layouts[kind], new, slots, **options)
    if kind == "hca":
        return cache, (), partial(_all_entries, config.hca_rate, cache.view(layouts[kind]), place)
    indexer, keys = weights["indexer"], layouts["indexer"]
    cache, new, slots = entries(indexer["compressor"], x, cache, layouts["indexer_rows"], keys)
    cache = write_indexer_k(cache.view(keys), new, slots, **options).view(cache.layout)
    see = partial(_best_entries, config, cache.view(layouts[kind]), cache.view(keys), options)
    return cache, _index_queries(config, indexer, x, q_latent, *per_head), see


def _write(cache: KVCache, layout: CacheLayout, entries, slots, **options) -> KVCache:
    """Stores entries [T, head_dim] in a group of latents, whose format may store their rotary part apart."""
    latent = layout.entry.sizes[0]
    written = write_mla(cache.view(layout), entries[:, :latent], entries[:, latent:], slots, **options)
    return written.view(cache.layout)


def _all_entries(rate: int, entries: KVCache, layer, part: Part, positions) -> ExtraCache:
    """All entries, of which each query token sees those that are complete."""
    table, block_size = part.tables[MAIN], entries.layout.block_size
    numbers = jnp.arange(table.shape[1] * block_size, dtype=jnp.int32)
    slots = slots_for(table, jnp.broadcast_to(numbers, (len(table), len(numbers))), block_size=block_size)
    slots = jnp.broadcast_to(slots[:, None], (*positions.shape, len(numbers)))
    return ExtraCache(entries, slots, layer, counts=(positions + 1) // rate)


def _index_queries(config: CompressedAttention, weights, x, q_latent, cos, sin) -> tuple[jax.Array, jax.Array]:
    """The queries [B, Q, Hi, D] of the indexer, and the weights of its heads, float32 [B, Q, Hi]."""
    indexer = config.indexer
    q = linear(q_latent, weights["q"]).reshape(*x.shape[:2], indexer.heads, indexer.head_dim)
    scale = (indexer.heads * indexer.head_dim) ** -0.5
    return rope.rotate_last(q, cos, sin), linear(x.astype(jnp.float32), weights["weights"]) * scale


def _best_entries(
    config: CompressedAttention, entries: KVCache, keys: KVCache, options, part: Part, positions, q, head_weights
) -> ExtraCache:
    """The entries with the highest scores, which are in the same slots as their keys.

    Query tokens see different numbers of entries, and so each is scored as a request of its own.
    """
    table, block_size, rate = part.tables[MAIN], keys.layout.block_size, config.csa_rate
    max_len = table.shape[1] * block_size
    most = min(config.indexer.topk, max_len)

    def select(q, head_weights, lengths) -> jax.Array:
        count = q.shape[1]
        seen = jnp.maximum(lengths[:, None] + jnp.arange(1 - count, 1, dtype=jnp.int32)[None], 0) // rate
        tables = jnp.repeat(table, count, axis=0)
        q_rows, weight_rows = (array.reshape(-1, 1, *array.shape[2:]) for array in (q, head_weights))
        logits = indexer_logits(q_rows, weight_rows, keys, tables, seen.reshape(-1), max_len=max_len, **options)
        best = select_topk(logits, most, implementation=options["implementation"])
        return positions_to_slots(best, tables, block_size=block_size).reshape(*seen.shape, most)

    slots = in_query_chunks(
        select, q, head_weights, part.seq_lens,
        token_bytes=logits_bytes_of_a_token(head_weights, max_len), most_bytes=LOGITS_BYTES,
    )  # fmt: skip
    return ExtraCache(entries, slots, options["layer"], counts=jnp.minimum((positions + 1) // rate, most))
