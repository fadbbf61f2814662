"""DeepSeek-V4: attention to a window and to compressed entries, hyper-connections, and experts in every layer.

The names of weights are those of published checkpoints, which have weights in float8 and experts in FP4.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.config import CompressedAttention, Experts, HyperConnections, Indexer, ModelConfig, Rope, Yarn
from jaxkv.models.families.family import Family, read_config
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers import hyper, rope
from jaxkv.models.layers.compressed import block
from jaxkv.models.model import Model
from jaxkv.models.weights.weight import EXPERT, Weight

KINDS = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
"""The kinds of layers by their names in `layer_types`."""
RATIOS = {0: "window", 4: "csa", 128: "hca"}
"""The kinds of layers by their numbers in `compress_ratios`, which are also the rates."""


def _read(fields: JsonObject) -> ModelConfig:
    fields = fields.renamed({"intermediate_size": "moe_intermediate_size"})
    fields.choice("expert_dtype", "fp4", "fp8", None, default=None)
    rotary = _rotary_dim(fields)
    plain, compressed = _ropes(fields, rotary)
    attention = _read_attention(fields, rotary, compressed)
    config = read_config(fields, attention, plain, (0, _read_experts(fields)))
    if config.tie_word_embeddings:
        raise fields.error("tie_word_embeddings", "false")
    if config.num_heads % attention.output_groups:
        raise fields.error("o_groups", f"a divisor of the {config.num_heads} `num_attention_heads`")
    connections = HyperConnections(
        fields.integer("hc_mult"), fields.integer("hc_sinkhorn_iters"), fields.number("hc_eps", least=0)
    )
    # Its layer of multi-token prediction has other weights than those that `speculative.py` describes.
    return replace(config, hyper=connections, num_nextn_predict_layers=0)


def _read_attention(fields: JsonObject, rotary: int, compressed: Rope) -> CompressedAttention:
    fields.choice("num_key_value_heads", 1)
    kinds, rates = _kinds(fields)
    if set(kinds) == {"window"}:
        key = "layer_types" if "layer_types" in fields else "compress_ratios"
        raise fields.error(key, "at least one layer with compressed entries")
    index_head_dim = fields.integer("index_head_dim")
    if index_head_dim < rotary:
        raise fields.error("index_head_dim", f"at least the {rotary} values that are rotated")
    return CompressedAttention(
        q_lora_rank=fields.integer("q_lora_rank"),
        head_dim=fields.integer("head_dim"),
        rotary_dim=rotary,
        window=fields.integer("sliding_window"),
        kinds=kinds,
        csa_rate=rates["csa"],
        hca_rate=rates["hca"],
        indexer=Indexer(fields.integer("index_n_heads"), index_head_dim, fields.integer("index_topk")),
        compressed_rope=compressed,
        output_groups=fields.integer("o_groups"),
        output_rank=fields.integer("o_lora_rank"),
    )


def _rotary_dim(fields: JsonObject) -> int:
    """`qk_rope_head_dim`, or `partial_rotary_factor` of `head_dim`; both, if they agree."""
    head_dim = fields.integer("head_dim")
    if "partial_rotary_factor" not in fields:
        rotary, key = fields.integer("qk_rope_head_dim"), "qk_rope_head_dim"
    else:
        rotary, key = int(head_dim * fields.number("partial_rotary_factor")), "partial_rotary_factor"
        if "qk_rope_head_dim" in fields and fields.integer("qk_rope_head_dim") != rotary:
            raise fields.error("qk_rope_head_dim", f"{rotary}, which is `partial_rotary_factor` of `head_dim`")
    if rotary % 2 or not 0 < rotary < head_dim:
        raise fields.error(key, f"an even number of rotated values, fewer than the {head_dim} of `head_dim`")
    return rotary


def _kinds(fields: JsonObject) -> tuple[tuple[str, ...], dict[str, int]]:
    """The kind of each layer, and the rates of compression, by kind."""
    count = fields.integer("num_hidden_layers")
    rates = {kind: ratio for ratio, kind in RATIOS.items() if ratio}
    if "layer_types" not in fields and "compress_ratios" in fields:
        ratios = fields.value("compress_ratios")
        # Those of layers of multi-token prediction follow.
        known = isinstance(ratios, list) and len(ratios) >= count
        if not known or not all(type(ratio) is int and ratio in RATIOS for ratio in ratios):
            raise fields.error("compress_ratios", f"0, 4 or 128 for each of {count} layers")
        return tuple(RATIOS[ratio] for ratio in ratios[:count]), rates
    types = fields.per_layer("layer_types", *KINDS, count=count)
    if "compress_rates" in fields:
        held = fields.child("compress_rates")
        rates = {kind: held.integer(name, least=2) for name, kind in KINDS.items() if kind in rates}
    return tuple(KINDS[kind] for kind in types), rates


def _ropes(fields: JsonObject, rotary: int) -> tuple[Rope, Rope]:
    """The rotary embeddings of layers without and with compressed entries, of which both rotate `rotary` values.

    transformers writes one object with both; published files have `rope_theta`, `compress_rope_theta` and
    `rope_scaling`, which applies to layers with compressed entries only.
    """
    scalings, theta = {"yarn": _yarn}, fields.number("rope_theta", above=1)
    compressed_theta = fields.number("compress_rope_theta", above=1)
    found = []
    values = fields.child("rope_parameters") if "rope_parameters" in fields else None
    for name, expected in (("main", theta), ("compress", compressed_theta)):
        if values is not None:
            held = values.child(name)
            if int(fields.integer("head_dim") * held.number("partial_rotary_factor")) != rotary:
                raise held.error("partial_rotary_factor", f"that of {rotary} values in a head, as outside")
            if held.number("rope_theta", above=1) != expected:
                raise held.error("rope_theta", f"{expected}, as outside")
            found.append(rope.read_values(held, scalings if name == "compress" else {}, expected, interleaved=True))
        elif name == "compress" and "rope_scaling" in fields:
            read = rope.read_values(fields.child("rope_scaling"), scalings, expected, interleaved=True)
            if isinstance(read.scaling, Yarn) and read.scaling.attention_factor is None:
                read = replace(read, scaling=replace(read.scaling, attention_factor=1.0))
            found.append(read)
        else:
            found.append(Rope(expected, True, None))
    return found[0], found[1]


def _yarn(values: JsonObject) -> Yarn:
    """Bounds are always rounded: DeepSeek's code has no `truncate`, and transformers 5.24 does not read it here."""
    values.choice("truncate", True, default=True)
    return rope.read_yarn(values)


def _read_experts(fields: JsonObject) -> Experts:
    fields.choice("topk_method", "noaux_tc", default="noaux_tc")
    fields.choice("norm_topk_prob", True)
    fields.choice("n_shared_experts", 1)
    count, per_token = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    if per_token > count:
        raise fields.error("num_experts_per_tok", f"at most the {count} `n_routed_experts`")
    size = fields.integer("moe_intermediate_size")
    return Experts(
        count=count,
        per_token=per_token,
        scoring=fields.choice("scoring_func", "sqrtsoftplus"),
        normalize=True,
        scale=fields.number("routed_scaling_factor"),
        intermediate_size=size,
        shared_intermediate_size=size,
        limit=fields.number("swiglu_limit"),
        hash_layers=_hash_layers(fields),
    )


def _hash_layers(fields: JsonObject) -> int:
    count = fields.integer("num_hidden_layers")
    if "mlp_layer_types" not in fields and "num_hash_layers" in fields:
        return min(fields.integer("num_hash_layers", least=0), count)
    types = fields.value("mlp_layer_types")
    hashed = types.count("hash_moe") if isinstance(types, list) else 0
    if types != ["hash_moe"] * hashed + ["moe"] * (count - hashed):
        raise fields.error("mlp_layer_types", f"the types of {count} layers, first those of hash_moe, then moe")
    return hashed


def _global_weights(config: ModelConfig) -> dict[str, Any]:
    hidden, vocab = config.hidden_size, config.vocab_size
    connections: Any = config.hyper
    n = connections.streams
    return {
        "embed": Weight("embed.weight", (vocab, hidden), expanded=True),
        "norm": Weight("norm.weight", (hidden,), exact=True),
        "head": Weight("head.weight", (vocab, hidden), expanded=True),
        "last_hyper": _hyper(Weight, "hc_head", n, n, hidden, 1),
    }


def _hyper(weight, prefix: str, results: int, streams: int, hidden: int, scales: int) -> dict[str, Weight]:
    """The weights of hyper-connections."""
    return {
        "projection": weight(f"{prefix}_fn", (results, streams * hidden), exact=True),
        "base": weight(f"{prefix}_base", (results,), exact=True),
        "scale": weight(f"{prefix}_scale", (scales,), exact=True),
    }


def _weights(config: ModelConfig, layer: int) -> dict[str, Any]:
    def weight(name: str, shape: tuple[int, ...], **options) -> Weight:
        return Weight(f"layers.{layer}.{name}", shape, **options)

    hidden = config.hidden_size
    connections: Any = config.hyper
    n = connections.streams
    return {
        "attention_hyper": _hyper(weight, "hc_attn", (2 + n) * n, n, hidden, 3),
        "attention_norm": weight("attn_norm.weight", (hidden,), exact=True),
        "attention": _attention_weights(config, config.attention, weight, layer),
        "feed_forward_hyper": _hyper(weight, "hc_ffn", (2 + n) * n, n, hidden, 3),
        "feed_forward_norm": weight("ffn_norm.weight", (hidden,), exact=True),
        "mixture": _mixture_weights(config, config.experts, weight, layer),
    }


def _attention_weights(config: ModelConfig, attention: Any, weight, layer: int) -> dict[str, Any]:
    hidden, heads, kind = config.hidden_size, config.num_heads, attention.kinds[layer]
    size, rank, groups = attention.head_dim, attention.q_lora_rank, attention.output_groups
    tree = {
        "q_a": weight("attn.wq_a.weight", (rank, hidden)),
        "q_a_norm": weight("attn.q_norm.weight", (rank,), exact=True),
        "q": weight("attn.wq_b.weight", (heads * size, rank)),
        "kv": weight("attn.wkv.weight", (size, hidden)),
        "kv_norm": weight("attn.kv_norm.weight", (size,), exact=True),
        "o_a": weight("attn.wo_a.weight", (groups * attention.output_rank, heads * size // groups), expanded=True),
        "o": weight("attn.wo_b.weight", (hidden, groups * attention.output_rank)),
        "sinks": weight("attn.attn_sink", (heads,), exact=True),
    }
    if kind != "window":
        rate = attention.csa_rate if kind == "csa" else attention.hca_rate
        tree["compressor"] = _compressor_weights(weight, "attn.compressor", rate, size, hidden, halves=kind == "csa")
    if kind == "csa":
        indexer = attention.indexer
        tree["indexer"] = {
            "q": weight("attn.indexer.wq_b.weight", (indexer.heads * indexer.head_dim, rank)),
            "weights": weight("attn.indexer.weights_proj.weight", (indexer.heads, hidden), lossless=True),
            "compressor": _compressor_weights(
                weight, "attn.indexer.compressor", attention.csa_rate, indexer.head_dim, hidden, halves=True
            ),
        }
    return tree


def _compressor_weights(weight, prefix: str, rate: int, size: int, hidden: int, *, halves: bool) -> dict[str, Weight]:
    width = (1 + halves) * size
    return {
        "kv": weight(f"{prefix}.wkv.weight", (width, hidden), expanded=True),
        "gate": weight(f"{prefix}.wgate.weight", (width, hidden), expanded=True),
        "position_bias": weight(f"{prefix}.ape", (rate, width), exact=True),
        "norm": weight(f"{prefix}.norm.weight", (size,), exact=True),
    }


def _mixture_weights(config: ModelConfig, experts: Any, weight, layer: int) -> dict[str, Any]:
    hidden, size = config.hidden_size, experts.intermediate_size
    names = {"gate": ("w1", (size, hidden)), "down": ("w2", (hidden, size)), "up": ("w3", (size, hidden))}
    tree = {
        "router": weight("ffn.gate.weight", (experts.count, hidden), lossless=True),
        "experts": {
            part: weight(f"ffn.experts.{EXPERT}.{name}.weight", shape, experts=experts.count)
            for part, (name, shape) in names.items()
        },
        "shared": {part: weight(f"ffn.shared_experts.{name}.weight", shape) for part, (name, shape) in names.items()},
    }
    if layer < experts.hash_layers:
        tree["experts_of_ids"] = weight("ffn.gate.tid2eid", (config.vocab_size, experts.per_token), below=experts.count)
    else:
        tree["router_bias"] = weight("ffn.gate.bias", (experts.count,), exact=True)
    return tree


def _embed(model: Model, x) -> jax.Array:
    """Streams [B, Q, n, hidden], all of which are the embeddings."""
    connections: Any = model.config.hyper
    return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], connections.streams, x.shape[-1]))


def _unembed(model: Model, x) -> jax.Array:
    connections: Any = model.config.hyper
    return hyper.last(connections, model.params["last_hyper"], x, model.config.rms_norm_eps)


# transformers 5.24 restores the published names of most parts when it saves a model, but not of all.
SPELLINGS = {
    r"model\.embed_tokens\.": "embed.",
    r"model\.hc_head\.hc_(fn|base|scale)": r"hc_head_\1",
    r"model\.(layers\.[0-9]+\.attn)\.norm\.": r"\1.kv_norm.",
    r"model\.(layers|norm)\.": r"\1.",
}
DEEPSEEK_V4 = Family(
    _read,
    _weights,
    block,
    global_weights=_global_weights,
    embed=_embed,
    unembed=_unembed,
    spellings=SPELLINGS,
    unused=r"mtp\..*",
)
