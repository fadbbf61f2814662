"""The names and shapes of a checkpoint's weights, arranged as the programs use them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxkv.models.config import Experts, Indexer, ModelConfig

LAYER, EXPERT = "{layer}", "{expert}"
NO_LAYERS = range(0)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MTP = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
"""What a layer of multi-token prediction has besides the weights of a decoder layer."""


@dataclass(frozen=True)
class Weight:
    """A weight of the checkpoint, or one a layer and perhaps expert, stacked; `name` has numbers as placeholders."""

    name: str
    shape: tuple[int, ...]
    """Of one of them."""
    layers: range = NO_LAYERS
    experts: int = 0
    expert_axis: int = 0
    """Where a layer's array has the axis of experts."""
    exact: bool = False
    """Kept in float32 whatever the model's dtype: routing and scoring are done in float32."""

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Of all of them."""
        shape = list(self.shape)
        if self.experts:
            shape.insert(self.expert_axis, self.experts)
        return (len(self.layers), *shape) if self.layers else tuple(shape)

    def names(self, layer: int) -> Iterator[str]:
        """The names of a layer's pieces: one, or one an expert."""
        name = self.name.replace(LAYER, str(layer))
        return (name.replace(EXPERT, str(expert)) for expert in range(self.experts)) if self.experts else iter([name])

    def all_names(self) -> Iterator[str]:
        """The names of the pieces of all layers."""
        return (name for layer in self.layers or [0] for name in self.names(layer))


def parameters(config: ModelConfig) -> dict[str, Any]:
    """A tree of `Weight`s: "embed", "norm", "head" unless tied, and "stacks", the dense layers and those with experts.

    A stack is what `lax.scan` runs over: every leaf has a leading axis of layers.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embed": Weight(EMBED, (vocab, hidden)),
        "norm": Weight("model.norm.weight", (hidden,)),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Weight(HEAD, (vocab, hidden))
    stacks = (range(config.num_dense_layers), range(config.num_dense_layers, config.num_layers))
    tree["stacks"] = tuple(_stack(config, layers) for layers in stacks if layers)
    return tree


def unused(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Those of `names` that published checkpoints have and these programs have no use for.

    - `model.layers.N.self_attn.rotary_emb.inv_freq` (Moonlight, Kimi-K2): the frequencies that follow from the rotary
      embedding's values in config.json.
    - Layers of multi-token prediction (MTP, arXiv 2412.19437, 2.2; V3, V3.2, GLM-4.7-Flash), numbered after those of
      the model: they draft tokens, and do not change which ones the model chooses.  Each has an `eh_proj`; any other
      layer past `num_hidden_layers` is one that config.json omits.
    """
    names, found = set(names), set()
    for name in names:
        match = re.fullmatch(r"model\.layers\.([0-9]{1,9})\.(self_attn\.rotary_emb\.inv_freq|eh_proj\.weight)", name)
        if match and match[2].endswith("inv_freq"):
            found.add(name)
        elif match and int(match[1]) >= config.num_layers:
            found |= _mtp_names(config, int(match[1])) & names
    return found


def _mtp_names(config: ModelConfig, layer: int) -> set[str]:
    decoder = jax.tree.leaves(_stack(config, range(layer, layer + 1)))
    names = {name for weight in decoder for name in weight.all_names()}
    return names | {f"model.layers.{layer}.{name}.weight" for name in MTP}


def _stack(config: ModelConfig, layers: range) -> dict[str, Any]:
    hidden = config.hidden_size

    def weight(name: str, *shape: int, **options) -> Weight:
        return Weight(f"model.layers.{LAYER}.{name}", shape, layers, **options)

    stack: dict[str, Any] = {
        "attention_norm": weight("input_layernorm.weight", hidden),
        "attention": _attention(config, weight),
        "feed_forward_norm": weight("post_attention_layernorm.weight", hidden),
    }
    if config.experts is None or layers.start < config.num_dense_layers:
        return {**stack, "dense": _feed_forward(weight, "mlp", hidden, config.intermediate_size)}
    return {**stack, "mixture": _mixture(config.experts, weight, hidden)}


def _feed_forward(weight, name: str, hidden: int, size: int, experts: int = 0) -> dict[str, Weight]:
    return {
        "gate": weight(f"{name}.gate_proj.weight", size, hidden, experts=experts),
        "up": weight(f"{name}.up_proj.weight", size, hidden, experts=experts),
        # [hidden, experts, size]: the inner values of all experts are one row.
        "down": weight(f"{name}.down_proj.weight", hidden, size, experts=experts, expert_axis=1),
    }


def _mixture(config: Experts, weight, hidden: int) -> dict[str, Any]:
    tree = {
        "router": weight("mlp.gate.weight", config.count, hidden, exact=True),
        "experts": _feed_forward(
            weight, f"mlp.experts.{EXPERT}", hidden, config.intermediate_size, experts=config.count
        ),
        "shared": _feed_forward(weight, "mlp.shared_experts", hidden, config.shared_intermediate_size),
    }
    if config.scoring == "sigmoid":
        tree["router_bias"] = weight("mlp.gate.e_score_correction_bias", config.count, exact=True)
    return tree


def _attention(config: ModelConfig, weight) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_heads
    latent, nope, value = config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim
    q_size = heads * (nope + config.qk_rope_head_dim)
    tree: dict[str, Any] = {
        "kv_a": weight("self_attn.kv_a_proj_with_mqa.weight", latent + config.qk_rope_head_dim, hidden),
        "kv_a_norm": weight("self_attn.kv_a_layernorm.weight", latent),
        "kv_b": weight("self_attn.kv_b_proj.weight", heads * (nope + value), latent),
        "o": weight("self_attn.o_proj.weight", hidden, heads * value),
    }
    if config.q_lora_rank is None:
        return {**tree, "q": weight("self_attn.q_proj.weight", q_size, hidden)}
    tree["q_a"] = weight("self_attn.q_a_proj.weight", config.q_lora_rank, hidden)
    tree["q_a_norm"] = weight("self_attn.q_a_layernorm.weight", config.q_lora_rank)
    tree["q"] = weight("self_attn.q_b_proj.weight", q_size, config.q_lora_rank)
    if config.indexer is not None:
        tree["indexer"] = _indexer(config.indexer, weight, hidden, config.q_lora_rank)
    return tree


def _indexer(config: Indexer, weight, hidden: int, q_lora_rank: int) -> dict[str, Weight]:
    prefix = "self_attn.indexer"
    return {
        "q": weight(f"{prefix}.wq_b.weight", config.heads * config.head_dim, q_lora_rank),
        "k": weight(f"{prefix}.wk.weight", config.head_dim, hidden),
        "k_norm": weight(f"{prefix}.k_norm.weight", config.head_dim),
        "k_norm_bias": weight(f"{prefix}.k_norm.bias", config.head_dim),
        "weights": weight(f"{prefix}.weights_proj.weight", config.heads, hidden, exact=True),
    }
