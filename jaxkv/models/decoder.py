"""The decoder: embedding, layers, final norm and head."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import batched
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.checks import Dims, int32
from jaxkv.models.batch import Batch, joined
from jaxkv.models.families import FAMILIES
from jaxkv.models.layers.linear import product, rms_norm
from jaxkv.models.model import Model
from jaxkv.models.split_cache import SplitCache


class NewTokens(NamedTuple):
    """New tokens of B requests, at most Q each: the arguments of `prefill`."""

    tokens: Any
    """int32 [B, Q], aligned to the end of each row."""
    seq_lens: Any
    """int32 [B], the new tokens included."""
    block_tables: Any
    """int32 [B, M]; a dict of such arrays by the name of the table, if the model has several (`Model.tables`)."""
    slot_mapping: Any
    """int32 [B, Q], slots of the table ""; negative for padding."""


def step(model: Model, cache: KVCache, *batches: NewTokens) -> tuple[KVCache, jax.Array]:
    """Processes several batches at once, such as chunks of prompts and the next tokens of other requests.

    The result is that of `prefill` of one batch after the other, except that a row may attend to tokens of the same
    request in other rows: in every layer, the entries of all new tokens are stored first.  A long chunk may therefore
    be divided into several rows.  Not so for a model with states, which a step passes on to later steps only.  Matrix
    products multiply the tokens of all batches by the same weights, so that these are read once.

    Args:
      model: from `load`.
      cache: from `model.cache`, or a `SplitCache` with the `places` of these batches; donate it.
      *batches: one or more; their B and Q may differ.

    Returns:
      The cache, and the logits after the last token of each row of all batches, float32 [sum of B, vocab].

    Raises:
      ValueError: a shape or dtype is wrong, or the cache is not of the model's layout.
    """
    cache, outputs = _forward(_last_tokens, model, cache, batches)
    return cache, head(model, jnp.concatenate([x[:, -1] for x in outputs]))


def prefill(model: Model, cache: KVCache, tokens, seq_lens, block_tables, slot_mapping) -> tuple[KVCache, jax.Array]:
    """Processes a chunk of new tokens of each request: stores their entries and attends to all cached tokens.

    If a request has fewer than Q new tokens, they are at the end of its row, as in `decode_mla`.  The positions before
    them are padding: their slots must be negative, and their tokens may be any id.  A request without new tokens has
    `seq_lens` 0 and slots -1.

    Args:
      model: from `load`.
      cache: from `model.cache`; donate it.
      tokens: int32 [B, Q], the new tokens, aligned to the end of each row.
      seq_lens: int32 [B], tokens of each request, the new ones included.
      block_tables: int32 [B, M], the blocks of each request in order; entries past the length may hold anything.  For a
        model with several tables (`Model.tables`), a dict of such arrays by their names.
      slot_mapping: int32 [B, Q], the slot of each new token, by the table ""; negative for padding.

    Returns:
      The cache, and the logits after the last token of each request, float32 [B, vocab].

    Raises:
      ValueError: a shape or dtype is wrong, or the cache is not of the model's layout.
    """
    return step(model, cache, NewTokens(tokens, seq_lens, block_tables, slot_mapping))


def decode(model: Model, cache: KVCache, tokens, seq_lens, block_tables, slot_mapping) -> tuple[KVCache, jax.Array]:
    """Processes one new token of each request; the same as a prefill with Q = 1.

    Args:
      model: from `load`.
      cache: from `model.cache`; donate it.
      tokens: int32 [B]; any id in rows without a request.
      seq_lens: int32 [B], tokens of each request, the new one included; 0 in rows without a request.
      block_tables: as in `prefill`.
      slot_mapping: int32 [B], the slot of each new token; negative in rows without a request.

    Returns:
      The cache, and the logits after each token, float32 [B, vocab].  Logits of rows without a request are meaningless.

    Raises:
      ValueError: a shape or dtype is wrong, or the cache is not of the model's layout.
    """
    return prefill(model, cache, tokens[:, None], seq_lens, block_tables, slot_mapping[:, None])


def forward(model: Model, cache: KVCache, tokens, seq_lens, block_tables, slot_mapping) -> tuple[KVCache, jax.Array]:
    """`prefill` without the head: the cache, and x [B, Q, hidden] after the last layer; padding has no meaning."""
    cache, (x,) = _forward(_layers, model, cache, [NewTokens(tokens, seq_lens, block_tables, slot_mapping)])
    return cache, x


def hidden_states(model: Model, cache: KVCache, *batches: NewTokens) -> tuple[KVCache, tuple[jax.Array, ...]]:
    """Processes several batches at once, as `step`; returns the cache and, of each batch, hidden [B, Q, hidden].

    These are the hidden states of the new tokens after the final norm: `output(model, hidden)` are their logits.
    """
    cache, outputs = _forward(_layers, model, cache, batches)
    return cache, tuple(final_norm(model, x) for x in outputs)


def _forward(layers, model: Model, cache: Any, batches: Sequence[NewTokens]) -> Any:
    """Checks the batches, and runs `layers`, which is `_layers` or `_last_tokens`, on each device."""
    model.check_cache(cache)
    if isinstance(cache, SplitCache) and len(cache.places) != len(batches):
        raise ValueError(
            f"`cache` has {len(cache.places)} `places`, and there are {len(batches)} batches: expected one for each"
        )
    tables = [_tables(model, batch.block_tables) for batch in batches]
    for name in model.tables:
        widths = {held[name].shape[-1] for held in tables}
        if len(widths) != 1:
            raise ValueError(
                f"`batches` has block tables of {sorted(widths)} blocks: expected one width, of all batches"
            )
    arrays = []
    for batch, held in zip(batches, tables, strict=True):
        dims = Dims()
        dims.check_ints("tokens", batch.tokens, "B Q")
        dims.check_ints("seq_lens", batch.seq_lens, "B")
        for name, table in held.items():
            dims.check_ints(f"block_tables[{name!r}]" if name else "block_tables", table, f"B M{name}")
        dims.check_ints("slot_mapping", batch.slot_mapping, "B Q")
        arrays += [batch.tokens, int32(batch.seq_lens), jax.tree.map(int32, held), int32(batch.slot_mapping)]
    return model.parallel.run(layers, model, cache, *arrays)


def _tables(model: Model, tables) -> dict[str, Any]:
    """The block tables by name; ValueError unless they are those of the model."""
    held = tables if isinstance(tables, dict) else {"": tables}
    if set(held) != set(model.tables):
        raise ValueError(
            f"`block_tables` has the tables {', '.join(map(repr, held))}: expected the model's, "
            f"{', '.join(map(repr, model.tables))}"
        )
    return held


def _layers(model: Model, cache: KVCache, *arrays) -> tuple[KVCache, tuple[jax.Array, ...]]:
    """All layers on one device, for its part of the model, the cache and the batches, given as one list of arrays.

    Returns the cache, and x [B, Q, hidden] of each batch.
    """
    batches = [NewTokens(*group) for group in batched(arrays, len(NewTokens._fields))]
    batch = Batch.of(model, cache, [new[1:] for new in batches])
    cache, x, batch = _run(model, cache, batches, batch, model.params["layers"])
    return cache, tuple(batch.divided(FAMILIES[model.config.architecture].unembed(model, x)))


def _last_tokens(model: Model, cache: KVCache, *arrays) -> tuple[KVCache, tuple[jax.Array, ...]]:
    """The same, but x [B, 1 or Q, hidden] has the last token of each row, and perhaps those before it.

    Nothing else of the last layer is needed, except what it stores.
    """
    store = FAMILIES[model.config.architecture].store
    batches = [NewTokens(*group) for group in batched(arrays, len(NewTokens._fields))]
    if store is None or model.config.indexer is not None or all(new.tokens.shape[1] == 1 for new in batches):
        return _layers(model, cache, *arrays)
    batch = Batch.of(model, cache, [new[1:] for new in batches])
    *first, weights = model.params["layers"]
    cache, x, batch = _run(model, cache, batches, batch, first)
    layer = jnp.int32(len(first))
    weights, cache = lax.optimization_barrier((weights, cache))
    cache = store(model, weights, x, cache, batch, layer)
    x = joined([mine[:, -1:] for mine in batch.divided(x)])
    batch = Batch.of(model, cache, [(*new[1:3], new.slot_mapping[:, -1:]) for new in batches])
    cache, _, x = FAMILIES[model.config.architecture].block(model, weights, x, cache, batch, layer)
    return cache, tuple(batch.divided(x))


def _run(model: Model, cache: KVCache, batches, batch: Batch, layers) -> tuple[KVCache, jax.Array, Batch]:
    """The embedding and `layers`, the first ones of the model."""
    # Jitted, with the layer as an argument, so that JAX traces and lowers each kind of layer once.  `lax.scan` would
    # need the weights of all layers in one array, and XLA would copy a layer's weights out of it before using them.
    family = FAMILIES[model.config.architecture]
    block = jax.jit(partial(family.block, model))
    batch = replace(batch, ids=joined([new.tokens for new in batches]))
    x = family.embed(model, model.params["embed"][batch.ids])
    for layer, weights in enumerate(layers):
        # On CPUs, XLA may convert bf16 weights to float32: never those of all layers at once, but one layer ahead.
        weights, cache = lax.optimization_barrier((weights, cache))
        cache, selected, x = block(weights, x, cache, batch, jnp.int32(layer))
        batch = replace(batch, selected=selected)
    return cache, x, batch


def head(model: Model, x) -> jax.Array:
    """Logits, float32 [..., vocab], of x [..., hidden] from `forward`: the final norm and the output matrix."""
    return output(model, final_norm(model, x))


def final_norm(model: Model, x) -> jax.Array:
    """x [..., hidden] from `forward`, normalised for the output matrix."""
    return rms_norm(x, model.params["norm"], model.config.rms_norm_eps)


def output(model: Model, x) -> jax.Array:
    """Logits, float32 [..., vocab], of normalised x [..., hidden]."""
    weight = model.params["embed"] if model.config.tie_word_embeddings else model.params["head"]
    return product("...i,oi->...o", x, weight, dtype=jnp.float32)
