"""`Family`: the code that differs between families of models."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxkv.cache import KVCache
from jaxkv.models.config import ModelConfig
from jaxkv.models.json_object import JsonObject

Layer = dict[str, Any]
"""A tree of the weights of a layer: of `Weight`s, or of arrays."""


WITHOUT_HEAD = {r"(embed_tokens|layers|norm|rotary_emb)\.": r"model.\1."}
"""The spelling of transformers in models without a head, such as `LlamaModel`."""


@dataclass(frozen=True)
class Family:
    """A family of models, as four functions."""

    read: Callable[[JsonObject], ModelConfig]
    """Reads the configuration from `config.json`; ValueError if a key is missing or a value is not supported."""
    weights: Callable[[ModelConfig, int], Layer]
    """The names and shapes of the weights of the layer of that number."""
    block: Callable[..., tuple[KVCache, jax.Array | None, jax.Array]]
    """`block(model, weights, x, cache, batch, layer)` computes a layer.

    It returns the cache, the slots selected for later layers (`Batch.selected`), and x: [B, Q, hidden], or what `enter`
    returns.
    """
    arrange: Callable[..., Layer] = lambda config, attention, layer: layer
    """`arrange(config, config.attention, layer)` converts the arrays of `weights` to those that `block` uses."""
    outside: Callable[[ModelConfig], Layer] | None = None
    """The weights outside the layers, if their names are not those of `weights/parameters.py`, or if there are others.
    """
    enter: Callable[..., jax.Array] = lambda model, x: x
    """`enter(model, x)` converts embeddings [B, Q, hidden] to the x of the first layer."""
    leave: Callable[..., jax.Array] = lambda model, x: x
    """`leave(model, x)` converts the x of the last layer to [B, Q, hidden]."""
    prefix: str = ""
    """What the names of all weights begin with in checkpoints; `weights` returns names without it."""
    spellings: Mapping[str, str] = field(default_factory=WITHOUT_HEAD.copy)
    """Other names that checkpoints may have for weights, such as those that transformers saves: regular expressions of
    how a name begins, and what stands in its place in the names of `prefix`, `weights` and `outside`.  The first one
    that matches counts.
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
