"""The configuration and weights that the decoders of all families have in common."""

from collections.abc import Callable
from typing import Any

from jaxkv.checks import FLOATS
from jaxkv.models.config import GQA, MLA, CompressedAttention, Experts, ModelConfig, Rope
from jaxkv.models.families.parts import experts as mixture
from jaxkv.models.families.parts import quantisation
from jaxkv.models.families.parts.feed_forward import feed_forward
from jaxkv.models.json_object import JsonObject
from jaxkv.models.weights.weight import Weight

MTP = "num_nextn_predict_layers"


def read(
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


def of_layer(layer: int) -> Callable[..., Weight]:
    """The function `weight(name, *shape, **options)`, which returns a `Weight` of the layer of that number."""
    return lambda name, *shape, **options: Weight(f"model.layers.{layer}.{name}", shape, **options)


def weights(attention, config: ModelConfig, layer: int) -> dict[str, Any]:
    """The weights of a layer: of a norm, attention, a second norm, and a feed-forward, which is dense or has experts.

    Args:
      attention: a function `attention(config, config.attention, weight)` that returns the tree of the attention's
        weights.  It makes each with `weight(name, *shape, **options)`, which returns a `Weight` of the layer.
      config: the model's configuration.
      layer: the number of the layer, from 0.
    """
    weight, centred = of_layer(layer), config.centred_norms
    tree: dict[str, Any] = {
        "attention_norm": weight("input_layernorm.weight", config.hidden_size, centred=centred),
        "attention": attention(config, config.attention, weight),
        "feed_forward_norm": weight("post_attention_layernorm.weight", config.hidden_size, centred=centred),
    }
    if config.experts is None or layer < config.num_dense_layers:
        return {**tree, "dense": feed_forward(weight, "mlp", config.hidden_size, config.intermediate_size)}
    return {**tree, "mixture": mixture.weights(config, config.experts, weight)}
