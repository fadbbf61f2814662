"""Multi-head latent attention over the cache, to all cached tokens or to those that an indexer selects.

The indexer is that of DeepSeek V3.2 and GLM-5.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch, SubBatch, joined
from jaxkv.models.config import MLA, Indexer, ModelConfig, Rope, Yarn
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import rope
from jaxkv.models.layers.linear import float32_linear, layer_norm, linear, product, rms_norm
from jaxkv.models.model import Model
from jaxkv.models.split_cache import SplitCache
from jaxkv.ops.indexer import select_positions
from jaxkv.ops.writes import write_indexer_k, write_mla

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents in most families, whatever `rms_norm_eps` of config.json is.

Published modelling code makes these norms without an epsilon, so that they have the default of their class, while the
other norms get `rms_norm_eps`:

- `modeling_deepseek.py` of deepseek-ai/DeepSeek-V2 and V3, and of moonshotai/Moonlight-16B-A3B, Kimi-K2 and Kimi-K2.5.
  Moonlight and Kimi-K2.5 state an `rms_norm_eps` of 1e-5.
- `inference/model.py` of deepseek-ai/DeepSeek-V3.2, which has 1e-6 for all norms.
- `modeling_kimi.py` of moonshotai/Kimi-Linear-48B-A3B and `modeling_longcat_flash.py` of
  meituan-longcat/LongCat-Flash-Chat, which both state an `rms_norm_eps` of 1e-5.

transformers 5.24 does the same in all of its models with latents except GLM-5-Next and DeepSeek-V4.  For A.X K1,
Mistral 4 and Youtu, whose `rms_norm_eps` is 1e-6, nothing else is known.  vLLM and SGLang use `rms_norm_eps` for all
models.
"""
INDEXER_KEY_EPS = 1e-6
"""Epsilon of the norm of the indexer's keys."""


def read(fields: JsonObject, *, q_latent: bool = False, latent_eps: float = LATENT_EPS) -> MLA:
    """Reads the ranks and head sizes; the result has no indexer.

    Args:
      fields: the object of `config.json` that describes the text model.
      q_latent: whether to reject a `q_lora_rank` of null, which stands for queries without a latent.
      latent_eps: epsilon of the norms of latents; see `LATENT_EPS` and `rms_norm_eps`.
    """
    if q_latent and fields.value("q_lora_rank") is None:
        raise fields.error("q_lora_rank", "an integer: models of this architecture make queries from a latent")
    rope_head_dim = fields.integer("qk_rope_head_dim", least=2)
    if rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number: rotary embedding rotates pairs")
    return MLA(
        # Null if queries have no latent.  The key is required, because families differ in what its absence means.
        q_lora_rank=None if fields.value("q_lora_rank") is None else fields.integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_head_dim,
        v_head_dim=fields.integer("v_head_dim"),
        latent_eps=latent_eps,
    )


def weights(config: ModelConfig, attention: MLA, weight) -> dict[str, Any]:
    """The weights of the attention; `weight` as in `layer_weights`."""
    hidden, heads = config.hidden_size, config.num_heads
    latent, nope, value = attention.kv_lora_rank, attention.qk_nope_head_dim, attention.v_head_dim
    q_size = heads * (nope + attention.qk_rope_head_dim)
    tree: dict[str, Any] = {
        "kv_a": weight("self_attn.kv_a_proj_with_mqa.weight", latent + attention.qk_rope_head_dim, hidden),
        "kv_a_norm": weight("self_attn.kv_a_layernorm.weight", latent),
        "kv_b": weight("self_attn.kv_b_proj.weight", heads * (nope + value), latent, expanded=True),
        "o": weight("self_attn.o_proj.weight", hidden, heads * value),
    }
    if attention.q_lora_rank is None:
        return {**tree, "q": weight("self_attn.q_proj.weight", q_size, hidden)}
    tree["q_a"] = weight("self_attn.q_a_proj.weight", attention.q_lora_rank, hidden)
    tree["q_a_norm"] = weight("self_attn.q_a_layernorm.weight", attention.q_lora_rank)
    tree["q"] = weight("self_attn.q_b_proj.weight", q_size, attention.q_lora_rank)
    return tree


def convert_weights(config: ModelConfig, attention: MLA, layer: dict[str, Any]) -> dict[str, Any]:
    """A layer with `kv_b` split into W_UK and W_UV, as absorbed attention needs them.

    For each head, `kv_b` has the rows of W_UK and then those of W_UV.
    """
    tree = dict(layer["attention"])
    kv_b = tree.pop("kv_b")
    kv_b = kv_b.reshape(config.num_heads, -1, attention.kv_lora_rank)
    tree["w_uk"], tree["w_uv"] = kv_b[:, : attention.qk_nope_head_dim], kv_b[:, attention.qk_nope_head_dim :]
    return {**layer, "attention": tree}


def attention(
    model: Model, config: MLA, weights, x, cache: Any, batch: Batch, layer
) -> tuple[Any, jax.Array | None, jax.Array]:
    """Stores the entries of x and attends to all cached tokens.

    If devices divide the heads, the output is this device's term of a sum over devices.

    Args:
      model: the model.
      config: the model's attention.
      weights: the weights of this layer's attention.
      x: [B, Q, hidden].
      cache: the model's cache, a KVCache or, with an indexer, a SplitCache.
      batch: the new tokens.
      layer: traced int32 scalar.

    Returns:
      The cache; the slots selected for later layers, as in `Batch.selected`; and the output [B, Q, hidden].
    """
    q_source = x
    if config.q_lora_rank is not None:
        q_source = rms_norm(linear(x, weights["q_a"]), weights["q_a_norm"], config.latent_eps)
    q = linear(q_source, weights["q"])
    q = q.reshape(*x.shape[:2], model.num_heads, config.qk_nope_head_dim + config.qk_rope_head_dim)
    if batch.query_scales is not None:
        q = q * batch.query_scales.astype(q.dtype)[:, :, None, None]
    q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    interleaved = model.config.rope.interleaved
    q_pe = rope.rotate_first(q_pe, batch.cos[:, :, None], batch.sin[:, :, None], interleaved=interleaved)
    cache = store(model, config, weights, x, cache, batch, layer)

    options = _options(model, layer) | {"scale": _softmax_scale(config, model.config.rope)}
    selected = None
    if config.indexer is None:
        attend = partial(_attend, model, weights, cache, options=options)
        out = batch.attend(attend, q_nope, q_pe)
    else:
        chosen = batch.selected
        if "indexer" in weights:
            found = _select(model, config.indexer, weights["indexer"], x, q_source, cache, batch, layer)
            cache, chosen = found
        selected = None if config.indexer.layers is None else chosen
        if isinstance(cache, SplitCache):
            cache, out = _attend_split(model, weights, cache, batch, (q_nope, q_pe, chosen), options=options)
        else:
            attend = partial(_attend_sparse, model, weights, cache, options=options)
            out = batch.attend(attend, q_nope, q_pe, chosen)
    return cache, selected, linear(out.reshape(*x.shape[:2], -1), weights["o"])


def store(model: Model, config: MLA, weights, x, cache: Any, batch: Batch, layer) -> Any:
    """Stores the entries of x; the arguments are those of `attention`.  Keys of an indexer are not stored."""
    kv_c, k_pe = jnp.split(linear(x, weights["kv_a"]), [config.kv_lora_rank], axis=-1)
    kv_c = rms_norm(kv_c, weights["kv_a_norm"], config.latent_eps)
    k_pe = rope.rotate_first(k_pe, batch.cos, batch.sin, interleaved=model.config.rope.interleaved)
    tokens, options = len(batch.slots), _options(model, layer)
    if isinstance(cache, SplitCache):
        for place, sub_batch, *new in _of_each(batch, cache.places, kv_c, k_pe, batch.positions):
            cache = cache.write(place, sub_batch.block_tables, *new, **options)
        return cache
    return write_mla(cache, kv_c.reshape(tokens, -1), k_pe.reshape(tokens, -1), batch.slots, **options)


def _options(model: Model, layer) -> dict[str, Any]:
    """What all operations on the cache get."""
    return {"layer": layer, "implementation": model.implementation, **model.entry_scales(layer)}


def _attend(model: Model, weights, cache: KVCache, sub_batch: SubBatch, q_nope, q_pe, *, options) -> jax.Array:
    """Values [B, Q, H, V] of the attention of one sub-batch to all cached tokens."""
    index = sub_batch.block_tables, sub_batch.seq_lens
    if sub_batch.expanded:
        up = weights["w_uk"], weights["w_uv"]
        return model.parallel.prefill_mla(q_nope, q_pe, *up, cache, *index, **options)
    q_latent = product("bqhn,hnr->bqhr", q_nope, weights["w_uk"])
    out = model.parallel.decode_mla(q_latent, q_pe, cache, *index, plan=sub_batch.plan, **options)
    return _expanded(out, weights, cache)


def _attend_sparse(
    model: Model, weights, cache: KVCache, sub_batch: SubBatch, q_nope, q_pe, slots, *, options
) -> jax.Array:
    """The same for the cached tokens in `slots` [B, Q, K]."""
    q_latent = product("bqhn,hnr->bqhr", q_nope, weights["w_uk"])
    out = model.parallel.decode_mla_sparse(q_latent, q_pe, cache, slots, **options)
    return _expanded(out, weights, cache)


def _attend_split(
    model: Model, weights, cache: SplitCache, batch: Batch, queries, *, options
) -> tuple[SplitCache, jax.Array]:
    """The cache, and the outputs of `_attend_sparse`, joined over the sub-batches.

    `queries` are q_nope, q_pe and the positions of the cached tokens that they attend to, as layers process them.
    """
    found = []
    where = {"layer": options["layer"], "implementation": model.implementation}
    for place, sub_batch, q_nope, q_pe, positions in _of_each(batch, cache.places, *queries):
        latents = cache.find(place, sub_batch.block_tables, positions, **where)
        cache, at = latents.cache, {**options, "layer": latents.layer}
        found.append(
            _attend_sparse(model, weights, latents.on_device, sub_batch, q_nope, q_pe, latents.slots, options=at)
        )
    return cache, joined(found)


def _of_each(batch: Batch, places: Sequence[Any], *arrays) -> Iterator[tuple[Any, ...]]:
    """The place of each sub-batch, the sub-batch, and its [B, Q, ...] of the arrays."""
    return zip(places, batch.sub_batches, *map(batch.divided, arrays), strict=True)


def _expanded(out, weights, cache: KVCache) -> jax.Array:
    """Values [B, Q, H, V] from sums of latents, which sums of rotary parts follow in formats of DeepSeek V4."""
    return product("bqhr,hvr->bqhv", out[..., : cache.layout.entry.latent], weights["w_uv"])


def _softmax_scale(config: MLA, rotary: Rope) -> float:
    """1 / sqrt(nope + rope), multiplied by YaRN's mscale squared if the checkpoint has an `mscale_all_dim`."""
    scale, yarn = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5, rotary.scaling
    if not isinstance(yarn, Yarn) or not yarn.mscale_all_dim:
        return scale
    return scale * rope.mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def _select(
    model: Model, config: Indexer, weights, x, q_latent, cache: Any, batch: Batch, layer
) -> tuple[Any, jax.Array]:
    """Stores the indexer's keys of x; returns the cache and the slots with the highest scores, int32 [B, Q, <= topk].

    Of a `SplitCache`, whose layers have latents at other slots, it returns the positions of these tokens.

    score[j] = sum over heads h of w_h * relu(q_h . k_j / sqrt(heads * head_dim)), over the tokens j that a query sees.
    DeepSeek first multiplies queries and keys by a Hadamard matrix.  This is left out, because it does not change the
    products.

    Args:
      model: the model.
      config: the model's indexer.
      weights: the weights of this layer's indexer.
      x: [B, Q, hidden], the input of the attention.
      q_latent: [B, Q, q_lora_rank], the latent of the queries after its norm.
      cache: the model's cache, as the view of the latents, or a SplitCache.
      batch: the new tokens.
      layer: traced int32 scalar.
    """
    q = linear(q_latent, weights["q"]).reshape(*x.shape[:2], config.heads, config.head_dim)
    k = layer_norm(linear(x, weights["k"]), weights["k_norm"], weights["k_norm_bias"], INDEXER_KEY_EPS)
    # Their pairs may be interleaved or not, whatever those of the attention are.
    q = rope.rotate_first(q, batch.cos[:, :, None], batch.sin[:, :, None], interleaved=config.interleaved)
    k = rope.rotate_first(k, batch.cos, batch.sin, interleaved=config.interleaved)
    head_weights = float32_linear(x, weights["weights"]) * (config.heads * config.head_dim) ** -0.5

    if config.layers is not None:  # the cache has keys of these layers only, and of the MTP layer after them
        layer = (jnp.asarray(config.layers, jnp.int32) < layer).sum(dtype=jnp.int32)
    options = {"layer": layer, "implementation": model.implementation}
    block_size = cache.layout.block_size
    if isinstance(cache, SplitCache):
        keys, select_best = cache.keys, select_positions
    else:
        keys = cache.view(model.packed_layout(config, cache.layout.num_blocks, block_size)["indexer"])
        select_best = model.parallel.select_slots
    keys = write_indexer_k(keys, k.reshape(-1, config.head_dim), batch.slots, **options)

    def select(sub_batch: SubBatch, q, head_weights) -> jax.Array:
        index, max_len = (sub_batch.block_tables, sub_batch.seq_lens), sub_batch.block_tables.shape[1] * block_size
        return select_best(q, head_weights, keys, *index, config.topk, max_len=max_len, **options)

    chosen = batch.attend(select, q, head_weights)
    if isinstance(cache, SplitCache):
        return replace(cache, keys=keys), chosen
    return keys.view(cache.layout), chosen
