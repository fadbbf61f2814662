"""The layer of DeepSeek-V4: attention to a window and to compressed entries, between hyper-connections.

A query attends to the entries of the last tokens and, in the same softmax, to compressed entries: of `hca` layers all,
of `csa` layers those that an indexer selects.  A compressed entry can be seen by the query that completes it, and by
later ones.  Values are the entries themselves, whose rotary part is rotated; it is rotated back, by the position of the
query, in the output.

A compressor makes one entry for every m tokens.  Each token has a row of values and one of gates, from two matrices.
Entry w is made when token (w + 1) m - 1 arrives:

    entry w = rope(norm(sum over rows r of softmax over rows(gate_r + bias_r) * values_r), position w m)

Its rows are those of tokens w m to w m + m - 1.  Compressors of `csa` have rows that are twice as wide, and sum over
2 m rows: the first halves of those of window w - 1, and the second halves of those of window w.

The rows of the last tokens are the compressor's state.  The cache has a state per token, in blocks that expire when no
later entry needs them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv.models.batch import Batch, SubBatch
from jaxkv.models.cache_groups import MAIN, WINDOW
from jaxkv.models.config import CompressedAttention
from jaxkv.models.layers import hyper, rope
from jaxkv.models.layers.feed_forward import feed_forward
from jaxkv.models.layers.linear import float32_linear, linear, normalised, product, rms_norm
from jaxkv.models.model import Model
from jaxkv.ops.indexer import indexer_logits, select_topk
from jaxkv.ops.query_chunks import LOGITS_BYTES, in_query_chunks, logits_bytes_of_a_token
from jaxkv.ops.slots import slots_for
from jaxkv.ops.sparse import ExtraCache
from jaxkv.ops.states import read_state, write_state
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
    out = feed_forward(config.experts, weights, normed, model.parallel, batch)
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
    slots = batch.slots_of(WINDOW, window)
    options: dict[str, Any] = {"layer": layer, "implementation": model.implementation}
    cache = _write(cache, window, kv.reshape(len(slots), -1), slots, **options)
    queries, see = (), None
    if "compressor" in weights:
        cache, queries, see = _compress(model, config, weights, x, q_latent, per_head, cache, batch, layer)
    latent = window.entry.sizes[0]

    def attend(sub_batch: SubBatch, q, positions, *queries) -> jax.Array:
        first = jnp.maximum(positions - config.window + 1, 0)[..., None]
        seen = first + jnp.arange(config.window, dtype=jnp.int32)[None, None]
        return model.parallel.decode_mla_sparse(
            q[..., :latent],
            q[..., latent:],
            cache.view(window),
            slots_for(sub_batch.tables[WINDOW], seen, window),
            counts=jnp.minimum(positions + 1, config.window),
            extra=None if see is None else see(sub_batch, positions, *queries),
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
"""`see(sub_batch, positions, *queries)` returns the compressed entries that its query tokens attend to."""


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


def _all_entries(rate: int, entries: KVCache, layer, sub_batch: SubBatch, positions) -> ExtraCache:
    """All entries, of which each query token sees those that are complete."""
    table = sub_batch.tables[MAIN]
    numbers = jnp.arange(table.shape[1] * entries.layout.block_size, dtype=jnp.int32)
    slots = slots_for(table, jnp.broadcast_to(numbers, (len(table), len(numbers))), entries)
    slots = jnp.broadcast_to(slots[:, None], (*positions.shape, len(numbers)))
    return ExtraCache(entries, slots, layer, counts=(positions + 1) // rate)


def _index_queries(config: CompressedAttention, weights, x, q_latent, cos, sin) -> tuple[jax.Array, jax.Array]:
    """The queries [B, Q, Hi, D] of the indexer, and the weights of its heads, float32 [B, Q, Hi]."""
    indexer = config.indexer
    q = linear(q_latent, weights["q"]).reshape(*x.shape[:2], indexer.heads, indexer.head_dim)
    scale = (indexer.heads * indexer.head_dim) ** -0.5
    return rope.rotate_last(q, cos, sin), float32_linear(x, weights["weights"]) * scale


def _best_entries(
    config: CompressedAttention,
    entries: KVCache,
    keys: KVCache,
    options,
    sub_batch: SubBatch,
    positions,
    q,
    head_weights,
) -> ExtraCache:
    """The entries with the highest scores, which are in the same slots as their keys.

    Query tokens see different numbers of entries, and so each is scored as a request of its own.
    """
    table, block_size, rate = sub_batch.tables[MAIN], keys.layout.block_size, config.csa_rate
    max_len = table.shape[1] * block_size
    most = min(config.indexer.topk, max_len)

    def select(q, head_weights, lengths) -> jax.Array:
        count = q.shape[1]
        seen = jnp.maximum(lengths[:, None] + jnp.arange(1 - count, 1, dtype=jnp.int32)[None], 0) // rate
        tables = jnp.repeat(table, count, axis=0)
        q_rows, weight_rows = (array.reshape(-1, 1, *array.shape[2:]) for array in (q, head_weights))
        logits = indexer_logits(q_rows, weight_rows, keys, tables, seen.reshape(-1), max_len=max_len, **options)
        by = options["implementation"]
        best = select_topk(logits, most, block_tables=tables, block_size=block_size, implementation=by)
        return best.reshape(*seen.shape, most)

    slots = in_query_chunks(
        select, q, head_weights, sub_batch.seq_lens,
        token_bytes=logits_bytes_of_a_token(head_weights, max_len), most_bytes=LOGITS_BYTES,
    )  # fmt: skip
    return ExtraCache(entries, slots, options["layer"], counts=jnp.minimum((positions + 1) // rate, most))


class Compressor(NamedTuple):
    """A compressor of one kind of layers."""

    rate: int
    """Tokens per entry (m)."""
    halves: bool
    """Whether an entry also has rows of the window before its own."""
    table: str
    """The table of the rows."""

    @property
    def span(self) -> int:
        """The rows of an entry."""
        return self.rate * (1 + self.halves)

    def closing(self, seq_lens, positions) -> tuple[jax.Array, jax.Array]:
        """The entries that the new tokens complete: their numbers, int32 [B, W], and which of these they are.

        `positions` [B, Q] are those of the new tokens; negative for padding.
        """
        new = (positions >= 0).sum(axis=1, dtype=jnp.int32)
        first = (seq_lens - new) // self.rate
        most = -(-positions.shape[1] // self.rate)
        numbers = first[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        return numbers, numbers < (seq_lens // self.rate)[:, None]

    def rows_of(self, numbers) -> jax.Array:
        """The positions, int32 [..., span], of the rows of entries; negative before the first token."""
        within = jnp.arange(self.rate - self.span, self.rate, dtype=jnp.int32)
        return numbers[..., None] * self.rate + jnp.expand_dims(within, range(numbers.ndim))

    def compress(self, weights, values, gates, positions, eps: float) -> jax.Array:
        """Entries, before rotary embedding, float32 [..., size].

        Args:
          weights: `position_bias` float32 [m, width] and `norm` float32 [size].
          values: float32 [..., span, width]; the width is that of a token's row.
          gates: the same.
          positions: int32 [..., span], of the rows; those at negative positions do not count.
          eps: the epsilon of the norm.
        """
        values, gates = self._own(values), self._own(gates) + self._bias(weights["position_bias"], gates.ndim)
        gates = jnp.where((positions >= 0)[..., None], gates, -jnp.inf)
        sums = (values * jax.nn.softmax(gates, axis=-2)).sum(axis=-2)
        return rms_norm(sums, weights["norm"], eps)

    def _own(self, rows):
        """The halves of rows [..., span, width] that an entry has: [..., span, size]."""
        if not self.halves:
            return rows
        first, second = jnp.split(rows, 2, axis=-1)
        return jnp.concatenate([first[..., : self.rate, :], second[..., self.rate :, :]], axis=-2)

    def _bias(self, bias, ndim: int):
        """The biases of the rows of an entry, [..., span, size], of those of a token's row, [m, width]."""
        if self.halves:
            bias = jnp.concatenate(jnp.split(bias, 2, axis=-1), axis=0)
        return jnp.expand_dims(bias, range(ndim - 2))


def new_entries(
    compressor: Compressor,
    config: CompressedAttention,
    weights,
    x,
    cache: KVCache,
    rows: CacheLayout,
    entries: CacheLayout,
    *,
    batch: Batch,
    layer,
    eps: float,
    implementation,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Stores the rows of new tokens x [B, Q, hidden], and computes the entries that they complete.

    Args:
      compressor: the compressor.
      config: the model's attention.
      weights: the compressor's weights.
      x: the input of the attention.
      cache: the model's cache.
      rows: the layout of the group of rows.
      entries: that of the group of entries.
      batch: the new tokens.
      layer: the layer of both groups, traced int32 scalar.
      eps: the epsilon of the norm.
      implementation: that of the operations.

    Returns:
      The cache; entries [N, size], of the dtype of x; and their slots, int32 [N], negative where there is none.
    """
    options: dict[str, Any] = {"layer": layer, "implementation": implementation}
    new = {name: product("...i,oi->...o", x, weights[name], dtype=jnp.float32) for name in ("kv", "gate")}
    new = {name: array.reshape(-1, array.shape[-1]) for name, array in new.items()}
    held = write_state(cache.view(rows), new, batch.slots_of(compressor.table, rows), **options)
    found, all_slots = [], []
    for sub_batch, positions in zip(batch.sub_batches, batch.divided(batch.positions), strict=True):
        numbers, complete = compressor.closing(sub_batch.seq_lens, positions)
        places = compressor.rows_of(numbers)
        slots = slots_for(sub_batch.tables[compressor.table], places, rows)
        states = read_state(held, slots.reshape(-1), **options)
        values, gates = (states[name].reshape(*places.shape, -1) for name in ("kv", "gate"))
        entry = compressor.compress(weights, values, gates, places, eps)
        cos, sin = rope.angles(config.compressed_rope, config.rotary_dim, numbers * compressor.rate)
        entry = rope.rotate_last(entry, cos, sin).astype(x.dtype)
        slots = slots_for(sub_batch.tables[MAIN], numbers, entries)
        found.append(entry.reshape(-1, entry.shape[-1]))
        all_slots.append(jnp.where(complete, slots, -1).reshape(-1))
    return held.view(cache.layout), jnp.concatenate(found), jnp.concatenate(all_slots)
