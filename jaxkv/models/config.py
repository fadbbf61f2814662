"""The configuration of a model, from the `config.json` of a Hugging Face checkpoint."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.dispatch.validate import FLOATS
from jaxkv.models.json_object import JsonObject


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): rotary frequencies stretched to `factor` times the length of the first training."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None


@dataclass(frozen=True)
class Rope:
    """Rotary embedding; `interleaved`: a pair is (x[2i], x[2i + 1]) in the weights, else (x[i], x[i + half])."""

    theta: float
    interleaved: bool
    yarn: Yarn | None


@dataclass(frozen=True)
class Experts:
    """Routing of the mixture of experts."""

    count: int
    per_token: int
    groups: int
    groups_per_token: int
    scoring: str
    """`softmax` (V2), or `sigmoid` with a bias that corrects the choice but not the weight (V3)."""
    normalize: bool
    """Whether the weights of a token's experts are made to sum to 1 before `scale`."""
    scale: float
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True)
class Indexer:
    """The sparse indexer of DeepSeek V3.2."""

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class ModelConfig:
    """What the programs need to know about a model; static and hashable.  Names are those of `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    """Leading layers with a dense feed-forward; the others have experts."""
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    stop_tokens: tuple[int, ...]
    dtype: str
    """dtype of the checkpoint."""
    rope: Rope
    experts: Experts | None
    indexer: Indexer | None

    @classmethod
    def read(cls, path) -> "ModelConfig":
        """The configuration of the checkpoint in folder `path`, or in the file `path`.

        Raises:
          ValueError: `config.json` is missing or not a JSON object; the architecture, or a value that the model
            depends on, is not supported; or a key is missing.  The message is one line, with the file and the key.
        """
        file = path if os.path.isfile(path := Path(path)) else path / "config.json"
        if not os.path.isfile(file):  # also of a name that no file can have
            raise ValueError(f"`path` is {str(path)!r}: expected a folder with a config.json, or such a file")
        return cls._of(JsonObject.read(file))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ModelConfig":
        """Like `read`, from the decoded JSON."""
        return cls._of(JsonObject(values, "config.json"))

    @classmethod
    def _of(cls, fields: JsonObject) -> "ModelConfig":
        """All that is read from `config.json` is checked here and in the functions below; other keys are ignored."""
        architecture = _architecture(fields)
        dense_only = architecture == "YoutuForCausalLM"
        if fields.value("quantization_config", None) not in (None, {}):
            raise fields.error("quantization_config", "none: only checkpoints of unquantised weights are supported")
        fields.choice("hidden_act", "silu", default="silu")
        fields.choice("attention_bias", False, default=False)
        fields.choice("mlp_bias", False, default=False)
        num_layers = fields.integer("num_hidden_layers")
        dense = num_layers if dense_only else _num_dense_layers(fields, num_layers)
        vocab_size = fields.integer("vocab_size")
        rope_head_dim = fields.integer("qk_rope_head_dim", least=2)
        if rope_head_dim % 2:
            raise fields.error("qk_rope_head_dim", "an even number: rotary embedding turns pairs")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            num_layers=num_layers,
            num_dense_layers=dense,
            num_heads=fields.integer("num_attention_heads"),
            # Null where queries have no latent; where the key is absent, families differ in what is meant.
            q_lora_rank=None if fields.value("q_lora_rank") is None else fields.integer("q_lora_rank"),
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
            qk_rope_head_dim=rope_head_dim,
            v_head_dim=fields.integer("v_head_dim"),
            intermediate_size=fields.integer("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=dense_only),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            stop_tokens=_stop_tokens(fields, vocab_size),
            dtype=fields.choice(fields.spelling("dtype", "torch_dtype"), *FLOATS),
            rope=_rope(fields),
            experts=_experts(fields, architecture) if dense < num_layers else None,
            indexer=_indexer(fields, rope_head_dim) if architecture == "DeepseekV32ForCausalLM" else None,
        )


ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "YoutuForCausalLM",
)
"""What is supported; Moonlight's and Kimi-K2's checkpoints name DeepseekV3ForCausalLM."""


def _architecture(fields: JsonObject) -> str:
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise fields.error("architectures", f"a list of one of {', '.join(ARCHITECTURES)}")
    return names[0]


def _stop_tokens(fields: JsonObject, vocab_size: int) -> tuple[int, ...]:
    stop = fields.value("eos_token_id", None)
    tokens = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise fields.error("eos_token_id", f"token ids from 0 to {vocab_size - 1}: one, a list of them, or null")
    return tuple(tokens)


def _num_dense_layers(fields: JsonObject, num_layers: int) -> int:
    if "mlp_layer_types" not in fields:
        fields.choice("moe_layer_freq", 1, default=1)
        return min(fields.integer("first_k_dense_replace", least=0), num_layers)
    types = fields.value("mlp_layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        dense = types.count("dense")
        if types == ["dense"] * dense + ["sparse"] * (num_layers - dense):
            return dense
    raise fields.error("mlp_layer_types", f"the types of {num_layers} layers, dense ones first, then sparse ones")


def _rope(fields: JsonObject) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before)."""
    interleaved = fields.flag("rope_interleave", default=True)
    fields.choice("partial_rotary_factor", 1, 1.0, default=1)
    spelling = fields.spelling("rope_parameters", "rope_scaling")
    if spelling not in fields:
        return Rope(fields.number("rope_theta", above=1), interleaved, None)
    values = fields.child(spelling)
    theta = (values if "rope_theta" in values else fields).number("rope_theta", above=1)
    if fields.number("rope_theta", above=1, default=theta) != theta:
        raise fields.error("rope_theta", f"{theta}, as in `{spelling}`")
    values.choice("partial_rotary_factor", 1, 1.0, default=1)
    values.choice("truncate", True, default=True)
    if values.choice(values.spelling("rope_type", "type"), "default", "yarn") == "default":
        return Rope(theta, interleaved, None)
    beta_fast = values.number("beta_fast", default=None) or 32.0
    beta_slow = values.number("beta_slow", default=None) or 1.0
    if beta_fast < beta_slow:
        raise values.error("beta_fast", f"at least `beta_slow`, which is {beta_slow}")
    yarn = Yarn(
        factor=values.number("factor", least=1),
        original_length=values.integer("original_max_position_embeddings"),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=values.number("mscale", least=0, default=None),
        mscale_all_dim=values.number("mscale_all_dim", least=0, default=None),
        attention_factor=values.number("attention_factor", default=None),
    )
    return Rope(theta, interleaved, yarn)


def _experts(fields: JsonObject, architecture: str) -> Experts:
    count, size = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    v2 = architecture == "DeepseekV2ForCausalLM"
    if v2:
        method = fields.choice("topk_method", "greedy", "group_limited_greedy")
        fields.choice("norm_topk_prob", False, default=False)
    else:
        method = fields.choice("topk_method", "noaux_tc", default="noaux_tc")
    grouped = method != "greedy"
    scoring = "softmax" if v2 else "sigmoid"
    fields.choice("scoring_func", scoring, default=scoring)
    groups = fields.integer("n_group") if grouped else 1
    if count % groups:
        raise fields.error("n_group", f"a divisor of the {count} `n_routed_experts`")
    in_group = count // groups
    if groups > 1 and in_group == 1 and not v2:
        raise fields.error("n_group", f"groups of 2 or more of the {count} `n_routed_experts`, to sum their best two")
    kept = fields.integer("topk_group") if grouped else 1
    if kept > groups:
        raise fields.error("topk_group", f"at most `n_group`, which is {groups}")
    per_token = fields.integer("num_experts_per_tok")
    if per_token > kept * in_group:
        raise fields.error("num_experts_per_tok", f"at most the {kept * in_group} experts of {kept} groups")
    shared = size * fields.integer("n_shared_experts")
    return Experts(
        count=count,
        per_token=per_token,
        groups=groups,
        groups_per_token=kept,
        scoring=scoring,
        normalize=not v2 and fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        intermediate_size=size,
        shared_intermediate_size=shared,
    )


def _indexer(fields: JsonObject, rope_head_dim: int) -> Indexer:
    if "q_lora_rank" not in fields:
        raise fields.error("q_lora_rank", "an integer: the indexer's queries are made from the latent of the queries")
    head_dim = fields.integer("index_head_dim")
    if head_dim < rope_head_dim:
        raise fields.error("index_head_dim", f"at least `qk_rope_head_dim`, which is {rope_head_dim}")
    return Indexer(heads=fields.integer("index_n_heads"), head_dim=head_dim, topk=fields.integer("index_topk"))
