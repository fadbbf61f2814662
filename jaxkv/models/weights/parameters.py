"""The names and shapes of a checkpoint's weights, arranged as the programs use them."""

from dataclasses import dataclass
from typing import Any

from jaxkv.models.config import Experts, Indexer, ModelConfig

LAYER, EXPERT = "{layer}", "{expert}"
NO_LAYERS = range(0)


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

    def names(self, layer: int) -> list[str]:
        """The names of a layer's pieces: one, or one an expert."""
        name = self.name.replace(LAYER, str(layer))
        return [name.replace(EXPERT, str(expert)) for expert in range(self.experts)] if self.experts else [name]


def parameters(config: ModelConfig) -> dict[str, Any]:
    """A tree of `Weight`s: "embed", "norm", "head" unless tied, and "stacks", the dense layers and those with experts.

    A stack is what `lax.scan` runs over: every leaf has a leading axis of layers.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embed": Weight("model.embed_tokens.weight", (vocab, hidden)),
        "norm": Weight("model.norm.weight", (hidden,)),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Weight("lm_head.weight", (vocab, hidden))
    stacks = (range(config.num_dense_layers), range(config.num_dense_layers, config.num_layers))
    tree["stacks"] = tuple(_stack(config, layers) for layers in stacks if layers)
    return tree


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
