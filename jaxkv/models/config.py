"""The configuration of a model, from the `config.json` of a Hugging Face checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
          ValueError: the architecture, or a value in the configuration, is not supported, or a field is missing.
        """
        file = path if (path := Path(path)).is_file() else path / "config.json"
        if not file.is_file():
            raise ValueError(f"`path` is {str(path)!r}: expected a folder with a config.json, or such a file")
        return cls.from_json(json.loads(file.read_text()))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ModelConfig":
        """Like `read`, from the decoded JSON."""
        fields = _Fields(values)
        architecture = next(iter(values.get("architectures") or ()), None)
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"`architectures` begins with {architecture!r}: expected one of {', '.join(ARCHITECTURES)}"
            )
        if values.get("quantization_config"):
            raise ValueError("`quantization_config` is present: expected a checkpoint of unquantised weights")
        fields.require("hidden_act", "silu", default="silu")
        fields.require("attention_bias", False, default=False)
        fields.require("mlp_bias", False, default=False)
        num_layers = fields["num_hidden_layers"]
        dense = num_layers if architecture == "YoutuForCausalLM" else _num_dense_layers(fields, num_layers)
        stop = values.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            num_layers=num_layers,
            num_dense_layers=dense,
            num_heads=fields["num_attention_heads"],
            q_lora_rank=fields["q_lora_rank"],
            kv_lora_rank=fields["kv_lora_rank"],
            qk_nope_head_dim=fields["qk_nope_head_dim"],
            qk_rope_head_dim=fields["qk_rope_head_dim"],
            v_head_dim=fields["v_head_dim"],
            intermediate_size=fields["intermediate_size"],
            rms_norm_eps=fields["rms_norm_eps"],
            tie_word_embeddings=values.get("tie_word_embeddings", architecture == "YoutuForCausalLM"),
            max_position_embeddings=fields["max_position_embeddings"],
            stop_tokens=() if stop is None else tuple(stop) if isinstance(stop, list) else (stop,),
            dtype=values.get("dtype") or values.get("torch_dtype") or "bfloat16",
            rope=_rope(fields, values.get("rope_interleave", True)),
            experts=_experts(fields, architecture) if dense < num_layers else None,
            indexer=_indexer(fields) if architecture == "DeepseekV32ForCausalLM" else None,
        )


ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "YoutuForCausalLM",
)
"""What is supported; Moonlight's and Kimi-K2's checkpoints name DeepseekV3ForCausalLM."""


class _Fields(dict):
    """A JSON object whose missing fields are named."""

    def __missing__(self, name):
        raise ValueError(f"config.json has no `{name}`, which this architecture needs")

    def require(self, name, *expected, default):
        value = self.get(name, default)
        if value not in expected:
            raise ValueError(f"`{name}` is {value!r}: expected {' or '.join(map(repr, expected))}")


def _num_dense_layers(fields: _Fields, num_layers: int) -> int:
    types = fields.get("mlp_layer_types")
    if types is None:
        fields.require("moe_layer_freq", 1, default=1)
        return min(fields["first_k_dense_replace"], num_layers)
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise ValueError(f"`mlp_layer_types` is {types}: expected {num_layers} layers, dense ones first, then sparse")
    return dense


def _rope(fields: _Fields, interleaved: bool) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before)."""
    values = _Fields(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    theta = values.get("rope_theta") or fields["rope_theta"]
    values.setdefault("rope_type", values.get("type", "default"))
    values.require("rope_type", "default", "yarn", default="default")
    values.require("partial_rotary_factor", 1, default=1)
    values.require("truncate", True, default=True)
    if values["rope_type"] == "default":
        return Rope(theta, interleaved, None)
    yarn = Yarn(
        factor=values["factor"],
        original_length=values["original_max_position_embeddings"],
        beta_fast=values.get("beta_fast") or 32,
        beta_slow=values.get("beta_slow") or 1,
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        attention_factor=values.get("attention_factor"),
    )
    return Rope(theta, interleaved, yarn)


def _experts(fields: _Fields, architecture: str) -> Experts:
    count, size = fields["n_routed_experts"], fields["moe_intermediate_size"]
    v2 = architecture == "DeepseekV2ForCausalLM"
    if v2:
        fields.require("topk_method", "greedy", "group_limited_greedy", default="greedy")
        fields.require("norm_topk_prob", False, default=False)
        grouped = fields.get("topk_method") == "group_limited_greedy"
    else:
        fields.require("topk_method", "noaux_tc", default="noaux_tc")
        grouped = True
    scoring = "softmax" if v2 else "sigmoid"
    fields.require("scoring_func", scoring, default=scoring)
    groups = fields["n_group"] if grouped else 1
    if count % groups:
        raise ValueError(f"`n_group` is {groups}: expected a divisor of the {count} `n_routed_experts`")
    per_token, kept = fields["num_experts_per_tok"], fields["topk_group"] if grouped else 1
    if per_token > kept * (count // groups):
        raise ValueError(
            f"`num_experts_per_tok` is {per_token}: expected at most the {kept * (count // groups)} experts of "
            f"{kept} groups"
        )
    return Experts(
        count=count,
        per_token=per_token,
        groups=groups,
        groups_per_token=kept,
        scoring=scoring,
        normalize=not v2 and fields["norm_topk_prob"],
        scale=fields["routed_scaling_factor"],
        intermediate_size=size,
        shared_intermediate_size=size * fields["n_shared_experts"],
    )


def _indexer(fields: _Fields) -> Indexer:
    return Indexer(heads=fields["index_n_heads"], head_dim=fields["index_head_dim"], topk=fields["index_topk"])
