"""The names and shapes of a checkpoint's weights, arranged as the programs use them."""

from dataclasses import dataclass
from typing import Any

from jaxkv.models.config import ModelConfig

LAYER, EXPERT = "{layer}", "{expert}"


@dataclass(frozen=True)
class Weight:
    """A weight of the checkpoint, or one a layer (and expert), stacked; `name` has their numbers as placeholders."""

    name: str
    shape: tuple[int, ...]
    """Of one of them."""
    layers: range | None = None
    experts: int | None = None
    exact: bool = False
    """Kept in float32 whatever the model's dtype: routing and scoring are done in float32."""

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Of all of them."""
        layers = () if self.layers is None else (len(self.layers),)
        experts = () if self.experts is None else (self.experts,)
        return (*layers, *experts, *self.shape)

    def names(self, layer: int | None) -> list[str]:
        """The names of the pieces of a layer: one, or one an expert."""
        return [
            self.name.replace(LAYER, str(layer)).replace(EXPERT, str(expert)) for expert in range(self.experts or 1)
        ]


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

    def feed_forward(name: str, size: int, **options) -> dict[str, Weight]:
        return {
            "gate": weight(f"{name}.gate_proj.weight", size, hidden, **options),
            "up": weight(f"{name}.up_proj.weight", size, hidden, **options),
            "down": weight(f"{name}.down_proj.weight", hidden, size, **options),
        }

    stack: dict[str, Any] = {
        "attention_norm": weight("input_layernorm.weight", hidden),
        "attention": _attention(config, weight),
        "feed_forward_norm": weight("post_attention_layernorm.weight", hidden),
    }
    if layers.start < config.num_dense_layers:
        return {**stack, "dense": feed_forward("mlp", config.intermediate_size)}
    experts = config.experts
    mixture: dict[str, Any] = {
        "router": weight("mlp.gate.weight", experts.count, hidden, exact=True),
        "experts": feed_forward(f"mlp.experts.{EXPERT}", experts.intermediate_size, experts=experts.count),
        "shared": feed_forward("mlp.shared_experts", experts.shared_intermediate_size),
    }
    if experts.scoring == "sigmoid":
        mixture["router_bias"] = weight("mlp.gate.e_score_correction_bias", experts.count, exact=True)
    return {**stack, "mixture": mixture}


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
        tree["q"] = weight("self_attn.q_proj.weight", q_size, hidden)
    else:
        tree["q_a"] = weight("self_attn.q_a_proj.weight", config.q_lora_rank, hidden)
        tree["q_a_norm"] = weight("self_attn.q_a_layernorm.weight", config.q_lora_rank)
        tree["q"] = weight("self_attn.q_b_proj.weight", q_size, config.q_lora_rank)
    if config.indexer is not None:
        indexer, prefix = config.indexer, "self_attn.indexer"
        tree["indexer"] = {
            "q": weight(f"{prefix}.wq_b.weight", indexer.heads * indexer.head_dim, config.q_lora_rank),
            "k": weight(f"{prefix}.wk.weight", indexer.head_dim, hidden),
            "k_norm": weight(f"{prefix}.k_norm.weight", indexer.head_dim),
            "k_norm_bias": weight(f"{prefix}.k_norm.bias", indexer.head_dim),
            "weights": weight(f"{prefix}.weights_proj.weight", indexer.heads, hidden, exact=True),
        }
    return tree
