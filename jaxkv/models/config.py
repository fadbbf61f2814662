"""The configuration of a model, from the `config.json` of a Hugging Face checkpoint."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jaxkv.models.json_object import JsonObject
from jaxkv_kernels.delta_rule import CONV, DELTA
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.format import FORMATS
from jaxkv_kernels.formats.states import StateEntry


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): scales rotary frequencies for contexts `factor` times as long as `original_length`."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None
    truncate: bool = True
    """Whether the bounds between kept, blended and divided frequencies are rounded to whole pairs."""


@dataclass(frozen=True)
class Llama3:
    """The scaling of Llama 3.1: low rotary frequencies are divided by `factor`, high ones are kept.

    A frequency is low if it makes fewer than `low_freq_factor` turns within `original_length` tokens, and high if it
    makes more than `high_freq_factor`.  Between these, the two are blended linearly.
    """

    factor: float
    original_length: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True)
class Linear:
    """Linear scaling (arXiv 2306.15595): positions, and so all rotary frequencies, are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Rope:
    """Rotary embedding.  In the order of the weights, pairs are (x[2i], x[2i + 1]) if `interleaved`, else (x[i], x[i +
    half]).
    """

    theta: float
    interleaved: bool
    scaling: Yarn | Llama3 | Linear | None


@dataclass(frozen=True)
class Experts:
    """The mixture of experts: sizes, and how tokens are routed."""

    count: int
    """The experts that have weights."""
    per_token: int
    groups: int = field(default=1, kw_only=True)
    groups_per_token: int = field(default=1, kw_only=True)
    scoring: str
    """`softmax` (V2), or `sigmoid` (V3) or `sqrtsoftplus` (V4), both with a bias that affects which experts are chosen
    but not their weights."""
    normalize: bool
    """Whether the weights of a token's experts are normalised to a sum of 1 before they are multiplied by `scale`."""
    scale: float
    intermediate_size: int
    shared_intermediate_size: int
    """0 if there is no shared expert."""
    zero_count: int = 0
    """Experts without weights, numbered after the others, that return their input (LongCat-Flash)."""
    limit: float | None = None
    """The largest magnitude of an expert's inner values, as in `grouped_swiglu` (DeepSeek-V4)."""
    alpha: float | None = None
    """The factor in the activation of GPT-OSS, as in `grouped_swiglu`; None for SwiGLU."""
    hash_layers: int = 0
    """Leading layers in which the id of a token determines its experts, by a table (DeepSeek-V4)."""


@dataclass(frozen=True)
class Indexer:
    """The sparse indexer of DeepSeek V3.2 and GLM-5."""

    heads: int
    head_dim: int
    topk: int
    interleaved: bool = False
    """Whether rotary embedding rotates the pairs (x[2i], x[2i + 1]); otherwise (x[i], x[i + half])."""
    layers: tuple[int, ...] | None = None
    """The layers that select tokens, in order; each other layer shares the selection of the last of them before it.
    None if all layers select.
    """


@dataclass(frozen=True)
class QueryScale:
    """The scaling of queries by position (Llama 4, Mistral 4): those at position p are multiplied by
    1 + beta * ln(1 + floor(p / original_length)).
    """

    beta: float
    original_length: int


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention."""

    q_lora_rank: int | None
    """Rank of the queries' latent; None if queries have none."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None
    query_scale: QueryScale | None = None
    latent_eps: float = 1e-6
    """Epsilon of the norms of both latents: of queries, and of keys and values."""
    rotated: bool = True
    """Whether there is a rotary embedding; without it, `qk_rope_head_dim` values of a key are still shared by all heads
    (Kimi Linear).
    """

    @property
    def rotary_dim(self) -> int:
        """The number of values of a query or key that rotary embedding rotates."""
        return self.qk_rope_head_dim if self.rotated else 0

    def entry(self, entry_format: str) -> MLAEntry:
        """The entry that the cache stores per token; ValueError if `entry_format` does not support it."""
        return MLAEntry(entry_format, self.kv_lora_rank, self.qk_rope_head_dim)  # type: ignore[arg-type]


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention; query head i reads KV head i // (num_heads / num_kv_heads)."""

    num_kv_heads: int
    head_dim: int
    """Size of a head of queries, keys and values."""
    biases: bool = False
    """Whether queries, keys, values and the output have biases (GPT-OSS; others with `attention_bias`)."""
    window: int | None = None
    """Tokens that a query sees in `windowed` layers, itself included; None if there are no such layers."""
    windowed: tuple[int, ...] = ()
    """The layers with a window, in order.  Unless all layers have one, their entries have their own block table."""
    unrotated: tuple[int, ...] = ()
    """The layers without rotary embedding, in order (SmolLM3)."""
    rotary: int | None = None
    """How many of the first values of a query or key are rotated; None if all are."""
    normed: bool = False
    """Whether each head of queries and keys is normalised before it is rotated."""
    gated: bool = False
    """Whether the output of a head is multiplied by the sigmoid of a gate, which is computed beside its queries."""

    @property
    def rotary_dim(self) -> int:
        """The number of values of a query or key that rotary embedding rotates."""
        return self.head_dim if self.rotary is None else self.rotary

    def entry(self, entry_format: str) -> KVEntry:
        """The entry that the cache stores per token and KV head; ValueError if `entry_format` does not support it."""
        return KVEntry(entry_format, self.head_dim)  # type: ignore[arg-type]


@dataclass(frozen=True)
class CompressedAttention:
    """The attention of DeepSeek-V4: to a window of the last tokens and, in most layers, to compressed entries.

    Keys and values are the same: one head of `head_dim` values, of which the last `rotary_dim` are rotated.
    """

    q_lora_rank: int
    head_dim: int
    rotary_dim: int
    window: int
    """The tokens, including itself, that a query attends to without compression."""
    kinds: tuple[str, ...]
    """The kind of each layer: `window`, `csa` (the window and the compressed entries that an indexer selects) or `hca`
    (the window and all compressed entries).
    """
    csa_rate: int
    """The tokens per compressed entry."""
    hca_rate: int
    indexer: Indexer
    """It scores compressed keys of its own."""
    compressed_rope: Rope
    """The rotary embedding of layers with compressed entries."""
    output_groups: int
    """Groups of heads, each with a first output matrix of its own."""
    output_rank: int
    """Values that these matrices return."""

    def entry(self, entry_format: str) -> MLAEntry:
        """The entry that the cache stores per token or compressed; ValueError if `entry_format` does not support it.

        Formats made for DeepSeek-V4 store the rotary part apart.  In others, whose rotary parts are not values, the
        whole entry is a latent.
        """
        known = FORMATS.get(entry_format)
        if known is not None and known.scaled:
            raise ValueError(
                f"`entry_format` is {entry_format!r}, which needs scales: expected a format without them, because "
                "scales of compressed entries are not supported"
            )
        rotary = self.rotary_dim if known is not None and known.rope_in_values else 0
        return MLAEntry(entry_format, self.head_dim - rotary, rotary)  # type: ignore[arg-type]

    def key_entry(self, entry_format: str) -> IndexerEntry:
        """The entry of the indexer's compressed keys beside entries of that format."""
        return IndexerEntry.for_latents(entry_format, self.indexer.head_dim)


@dataclass(frozen=True)
class HyperConnections:
    """Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams, which every part of a layer
    mixes by a doubly stochastic matrix.
    """

    streams: int
    iterations: int
    """Of the Sinkhorn-Knopp algorithm, which normalises rows and columns of that matrix."""
    eps: float


@dataclass(frozen=True)
class DeltaNet:
    """Layers with the gated delta rule (arXiv 2412.06464) instead of attention; value head i reads key head
    i // (num_value_heads / num_key_heads).
    """

    layers: tuple[int, ...]
    """These layers, in order."""
    num_key_heads: int
    """Heads of keys, and of queries."""
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Tokens that the convolution of queries, keys and values combines: a token and those before it."""
    channel_decays: bool = False
    """Whether each value of a key decays by itself (Kimi Delta Attention, arXiv 2510.26692), not each head."""

    @property
    def channels(self) -> int:
        """The values per token that the convolution passes over: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    @property
    def state(self) -> StateEntry:
        """The state of a layer: the last tokens before the convolution, and the states of the heads."""
        return StateEntry(
            {
                CONV: ((self.kernel_size - 1, self.channels), "float32"),
                DELTA: ((self.num_value_heads, self.key_head_dim, self.value_head_dim), "float32"),
            }
        )


class Reader(Protocol):
    """The part of a `Family` that reads a configuration."""

    @property
    def read(self) -> "Callable[[JsonObject], ModelConfig]":
        """Converts the keys of `config.json`."""


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model; static and hashable.  Most names are those of `config.json`."""

    family_of: ClassVar[Callable[[JsonObject], Reader]]
    """Returns the family of a `config.json`.  Families make configurations, so this module cannot import them:
    `families/__init__.py` sets this function.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    """Leading layers with a dense feed-forward; the others have experts."""
    num_heads: int
    """Query heads."""
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str | None
    """The dtype that config.json states for the weights; None if it states none."""
    rope: Rope
    """It has no effect if the attention rotates no values."""
    attention: MLA | GQA | CompressedAttention
    experts: Experts | None
    stop_tokens: tuple[int, ...] = ()
    """The tokens that end a text; none if the checkpoint states none."""
    num_nextn_predict_layers: int = 0
    """Layers of multi-token prediction in the checkpoint, which draft tokens (see `speculative.py`)."""
    attentions_per_layer: int = 1
    """Each has a layer of the cache.  With 2 (LongCat-Flash), each is followed by a dense feed-forward, beside which a
    layer has experts.
    """
    hyper: HyperConnections | None = None
    """None if there is one residual stream."""
    recurrent: DeltaNet | None = None
    """The layers that have states instead of attention; None if all layers have attention."""
    centred_norms: bool = False
    """Whether checkpoints store the weights of norms minus 1."""

    @property
    def num_attentions(self) -> int:
        """The attentions of all layers, each of which has a layer of the cache."""
        return self.first_attention(self.num_layers)

    def first_attention(self, layer: int) -> int:
        """The number of attentions before a layer."""
        recurrent = () if self.recurrent is None else self.recurrent.layers
        return (layer - sum(other < layer for other in recurrent)) * self.attentions_per_layer

    @property
    def has_dense(self) -> bool:
        """Whether a layer has a dense feed-forward, of `intermediate_size`."""
        return self.experts is None or self.num_dense_layers > 0 or self.attentions_per_layer > 1

    @property
    def indexer(self) -> Indexer | None:
        """The indexer of latent attention, whose keys lie beside the latents; None if there is none."""
        return self.attention.indexer if isinstance(self.attention, MLA) else None

    @classmethod
    def read(cls, path) -> "ModelConfig":
        """The configuration of the checkpoint in folder `path`, or in the file `path`.

        In a folder, the tokens of `generation_config.json`, if there is one, are stop tokens as well.

        Raises:
          ValueError: `config.json` is missing or not a JSON object, a key is missing, or the architecture or another
            value is not supported; or `generation_config.json` is not a JSON object, or states stop tokens that are not
            token ids.  The message is one line that names the file and the key.
        """
        file = path if os.path.isfile(path := Path(path)) else path / "config.json"
        if not os.path.isfile(file):  # also False for a name that no file can have
            raise ValueError(f"`path` is {str(path)!r}: expected a folder with a config.json, or a config.json file")
        generation = path / "generation_config.json"
        return cls._of(JsonObject.read(file), JsonObject.read(generation) if os.path.isfile(generation) else None)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ModelConfig":
        """Like `read`, but from the decoded JSON object."""
        return cls._of(JsonObject(values, "config.json"))

    @classmethod
    def _of(cls, fields: JsonObject, generation: JsonObject | None = None) -> "ModelConfig":
        """The configuration that the model's family reads, and the stop tokens.

        The family checks the keys that its models depend on, and ignores all others.
        """
        config = cls.family_of(fields).read(fields)
        return replace(config, stop_tokens=_stop_tokens(fields, generation, config.vocab_size))


def _stop_tokens(fields: JsonObject, generation: JsonObject | None, vocab_size: int) -> tuple[int, ...]:
    """The tokens that `config.json` states, then those that only `generation_config.json` states.

    Of a model with a `text_config`, the object of the whole model counts, unless its value is null.  vLLM uses the
    tokens of both files, too; transformers uses those of `config.json` only if there is no other file.
    """
    key = "eos_token_id"
    stated = fields if key in fields or "text_config" not in fields else fields.child("text_config")
    found: list[int] = []
    for held in (stated, generation) if generation is not None else (stated,):
        stop = held.value(key, None)
        tokens = [] if stop is None else stop if isinstance(stop, list) else [stop]
        if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise held.error(key, f"token ids from 0 to {vocab_size - 1}: one, a list of them, or null")
        found += tokens
    return tuple(dict.fromkeys(found))
