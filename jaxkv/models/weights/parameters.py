"""The names and shapes of a checkpoint's weights, arranged as the programs use them."""

import re
from collections.abc import Iterable
from typing import Any

import jax

from jaxkv.models.config import ModelConfig
from jaxkv.models.families import FAMILIES
from jaxkv.models.weights.weight import Weight

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MTP = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
"""What a layer of multi-token prediction has besides the weights of a decoder layer."""


def parameters(config: ModelConfig) -> dict[str, Any]:
    """A tree of `Weight`s: "embed", "norm", "head" unless tied, and "stacks", the dense layers and those with experts.

    A stack is what `lax.scan` runs over: every leaf has a leading axis of layers.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    layer_weights = FAMILIES[config.architecture].weights
    tree: dict[str, Any] = {
        "embed": Weight(EMBED, (vocab, hidden)),
        "norm": Weight("model.norm.weight", (hidden,)),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Weight(HEAD, (vocab, hidden))
    stacks = (range(config.num_dense_layers), range(config.num_dense_layers, config.num_layers))
    tree["stacks"] = tuple(layer_weights(config, layers) for layers in stacks if layers)
    return tree


def unused(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """The weights among `names` that published checkpoints contain but these programs do not use.

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
    decoder = jax.tree.leaves(FAMILIES[config.architecture].weights(config, range(layer, layer + 1)))
    names = {name for weight in decoder for name in weight.all_names()}
    return names | {f"model.layers.{layer}.{name}.weight" for name in MTP}
