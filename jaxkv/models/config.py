"""The configuration of a model, from the `config.json` of a Hugging Face checkpoint."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.models.json_object import JsonObject
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry


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
class Llama3:
    """The scaling of Llama 3.1: long waves are stretched to `factor` times their length, short ones kept.

    A wave is long if it turns fewer than `low_freq_factor` times in the length of the first training, and short if it
    turns more than `high_freq_factor` times; between them, frequencies are blended.
    """

    factor: float
    original_length: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True)
class Rope:
    """Rotary embedding.  Pairs are (x[2i], x[2i + 1]) in the weights if `interleaved`, else (x[i], x[i + half])."""

    theta: float
    interleaved: bool
    scaling: Yarn | Llama3 | None


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
class MLA:
    """Multi-head latent attention."""

    q_lora_rank: int | None
    """None where queries have no latent."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None

    @property
    def rotary_dim(self) -> int:
        """The number of values of a query or key that rotary embedding rotates."""
        return self.qk_rope_head_dim

    def entry(self, entry_format: str) -> MLAEntry:
        """What the cache stores per token; ValueError for a format that cannot hold it."""
        return MLAEntry(entry_format, self.kv_lora_rank, self.qk_rope_head_dim)


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention; query head i reads KV head i // (num_heads / num_kv_heads)."""

    num_kv_heads: int
    head_dim: int
    """Of queries, keys and values."""

    @property
    def rotary_dim(self) -> int:
        """Values of a query or key that rotary embedding turns: all."""
        return self.head_dim

    def entry(self, entry_format: str) -> KVEntry:
        """What the cache stores per token and KV head; ValueError for a format that cannot hold it."""
        return KVEntry(entry_format, self.head_dim)


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
    """Query heads."""
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    stop_tokens: tuple[int, ...]
    dtype: str
    """dtype of the checkpoint."""
    rope: Rope
    attention: MLA | GQA
    experts: Experts | None

    @property
    def indexer(self) -> Indexer | None:
        """That of the attention, if it has one."""
        return self.attention.indexer if isinstance(self.attention, MLA) else None

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
        """The family reads and checks what its models depend on; other keys are ignored."""
        from jaxkv.models.families import family_of  # families are made of configurations: they import this module

        return family_of(fields).read(fields)
