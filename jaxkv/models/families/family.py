"""`Family`: the code that differs between families of models; and what the decoders of all families have in common."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxkv.cache import KVCache
from jaxkv.checks import FLOATS
from jaxkv.models.config import GQA, MLA, CompressedAttention, Experts, ModelConfig, Rope
from jaxkv.models.families import quantisation
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers.feed_forward import mixture_weights, swiglu_weights
from jaxkv.models.weights.weight import Weight

Layer = dict[str, Any]
"""A tree of the weights of a layer: of `Weight`s, or of arrays."""


MTP = "num_nextn_predict_layers"
WITHOUT_HEAD = {r"(embed_tokens|layers|norm|rotary_emb)\.": r"model.\1."}
"""The spelling of transformers in models without a head, such as `LlamaModel`."""


@dataclass(frozen=True)
class Family:
    """A family of models, as functions: `read`, `weights` and `block`, and others where a family differs from most."""

    read: Callable[[JsonObject], ModelConfig]
    """Reads the configuration from `config.json`; ValueError if a key is missing or a value is not supported."""
    weights: Callable[[ModelConfig, int], Layer]
    """The names and shapes of the weights of the layer of that number."""
    block: Callable[..., tuple[KVCache, jax.Array | None, jax.Array]]
    """`block(model, weights, x, cache, batch, layer)` computes a layer.

    It returns the cache, the slots selected for later layers (`Batch.selected`), and x: [B, Q, hidden], or what `embed`
    returns.
    """
    convert_weights: Callable[..., Layer] = lambda config, attention, layer: layer
    """`convert_weights(config, config.attention, layer)` converts the arrays of `weights` to those that `block` uses.
    """
    global_weights: Callable[[ModelConfig], Layer] | None = None
    """The names and shapes of the weights outside the layers, if their names are not those of `weights/parameters.py`,
    or if there are others.
    """
    embed: Callable[..., jax.Array] = lambda model, x: x
    """`embed(model, x)` converts embeddings [B, Q, hidden] to the x of the first layer."""
    unembed: Callable[..., jax.Array] = lambda model, x: x
    """`unembed(model, x)` converts the x of the last layer to [B, Q, hidden]."""
    prefix: str = ""
    """What the names of all weights begin with in checkpoints; `weights` returns names without it."""
    spellings: Mapping[str, str] = field(default_factory=WITHOUT_HEAD.copy)
    """Other names that checkpoints may have for weights, such as those that transformers saves: regular expressions of
    how a name begins, and what stands in its place in the names of `prefix`, `weights` and `global_weights`.  The first
    one that matches counts.
    """
    unused: str = ""
    """A regular expression of the names of weights that published checkpoints contain but the model does not use."""
    store: Callable[..., KVCache] | None = None
    """`store(model, weights, x, cache, batch, layer)` stores what later tokens attend to in a layer; returns the cache.

    With it, the last layer of a prefill computes only what it stores of all tokens, and the rest of the last one of
    each row.  None if `block` has to process all of them.
    """

    def own_name(self, name: str) -> str:
        """The name that this class has for the weight that a checkpoint calls `name`; see `spellings`."""
        for begins, replacement in self.spellings.items():
            if match := re.match(begins, name):
                return match.expand(replacement) + name[match.end() :]
        return name


def read_config(
    fields: JsonObject,
    attention: MLA | GQA | CompressedAttention,
    rope: Rope,
    layers: tuple[int, Experts | None] | None = None,
    *,
    tied: bool = False,
    dtype: str | None = None,
    biases: bool = False,
    mxfp4: bool = False,
    outer: JsonObject | None = None,
) -> ModelConfig:
    """Makes the configuration from the given parts and the keys that all families share.

    Args:
      fields: the object of `config.json`, or the one in it that describes the text model.
      attention: the attention of every layer.
      rope: the rotary embedding.
      layers: the number of leading dense layers, and the experts of the others; None if all layers are dense.
      tied: whether the head is tied to the embedding if `tie_word_embeddings` is absent.
      dtype: the dtype if `config.json` states none.
      biases: the only supported value of `attention_bias`, which is optional.
      mxfp4: whether experts may be in MXFP4 (see `weights/mxfp4.py`), and no weights in float8.
      outer: the object of `config.json`, if `fields` is one in it.  The architecture, `tie_word_embeddings`, and
        `dtype` if `fields` has none, are read from it.
    """
    outer = outer or fields
    for held in (fields, outer):
        if held.value("quantization_config", None) not in (None, {}):
            quantisation.check(held.child("quantization_config"), mxfp4=mxfp4)
    fields.choice("hidden_act", "silu", default="silu")
    fields.choice("attention_bias", biases, default=biases)
    fields.choice("mlp_bias", False, default=False)
    (architecture,) = outer.value("architectures")
    num_layers = fields.integer("num_hidden_layers")
    num_dense_layers, experts = layers or (num_layers, None)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        num_heads=fields.integer("num_attention_heads"),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=outer.flag("tie_word_embeddings", default=tied),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        dtype=_dtype(fields, outer, dtype),
        rope=rope,
        attention=attention,
        experts=experts,
        num_nextn_predict_layers=fields.integer(MTP, least=0) if MTP in fields else 0,
    )


def _dtype(fields: JsonObject, outer: JsonObject, default: str | None) -> str | None:
    """The dtype that `fields`, or otherwise `outer`, states; `default` if neither does: null and "auto" state none."""
    for held in (fields, outer):
        stated = held.choice(held.spelling("dtype", "torch_dtype"), *FLOATS, "auto", default=None)
        if stated not in (None, "auto"):
            return stated
    return default


def weight_of(layer: int) -> Callable[..., Weight]:
    """The function `weight(name, *shape, **options)`, which returns a `Weight` of the layer of that number."""
    return lambda name, *shape, **options: Weight(f"model.layers.{layer}.{name}", shape, **options)


def layer_weights(attention, config: ModelConfig, layer: int) -> dict[str, Any]:
    """The weights of a layer: of a norm, attention, a second norm, and a feed-forward, which is dense or has experts.

    Args:
      attention: a function `attention(config, config.attention, weight)` that returns the tree of the attention's
        weights.  It makes each with `weight(name, *shape, **options)`, which returns a `Weight` of the layer.
      config: the model's configuration.
      layer: the number of the layer, from 0.
    """
    weight, centred = weight_of(layer), config.centred_norms
    tree: dict[str, Any] = {
        "attention_norm": weight("input_layernorm.weight", config.hidden_size, centred=centred),
        "attention": attention(config, config.attention, weight),
        "feed_forward_norm": weight("post_attention_layernorm.weight", config.hidden_size, centred=centred),
    }
    if config.experts is None or layer < config.num_dense_layers:
        return {**tree, "dense": swiglu_weights(weight, "mlp", config.hidden_size, config.intermediate_size)}
    return {**tree, "mixture": mixture_weights(config, config.experts, weight)}
