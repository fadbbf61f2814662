"""The names and shapes of a checkpoint's weights, arranged as the model uses them."""

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import jax

from jaxkv.models.config import ModelConfig
from jaxkv.models.families import FAMILIES
from jaxkv.models.families.family import Layer
from jaxkv.models.weights import entry_scales, fp8
from jaxkv.models.weights.weight import Weight

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MTP = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
"""The modules of an MTP layer (see `unused`) besides those of a decoder layer."""


def parameters(config: ModelConfig, *, mtp: bool, names: Container[str] | None = None) -> dict[str, Any]:
    """A tree of `Weight`s: "embed", "norm", "head" (unless tied to the embedding) and "layers", a tree per layer.

    With `mtp`, also "mtp": the layer of multi-token prediction, which has its decoder layer as "layer".  With the
    `names` of a checkpoint's weights, optional weights that it lacks are None.
    """
    tree: dict[str, Any] = {**_global_weights(config), "layers": tuple(_layers(config))}
    if mtp:
        tree["mtp"] = _mtp(config)
    if names is None:
        return tree
    return jax.tree.map(lambda weight: None if weight.optional and weight.name not in names else weight, tree)


def required_names(config: ModelConfig, *, mtp: bool) -> Iterator[str]:
    """The names of all weights that a checkpoint must have, one by one: a wrong configuration may have billions."""
    for tree in chain([_global_weights(config)], _layers(config), [_mtp(config)] if mtp else []):
        for weight in jax.tree.leaves(tree):
            if not weight.optional:
                yield from weight.all_names()


def _global_weights(config: ModelConfig) -> Layer:
    global_weights = FAMILIES[config.architecture].global_weights
    if global_weights is not None:
        return _named(config, global_weights(config))
    hidden, vocab = config.hidden_size, config.vocab_size
    tree = {
        "embed": Weight(EMBED, (vocab, hidden), expanded=True),
        "norm": Weight("model.norm.weight", (hidden,), centred=config.centred_norms),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Weight(HEAD, (vocab, hidden), expanded=True)
    return _named(config, tree)


def _layers(config: ModelConfig) -> Iterator[Layer]:
    return (_layer(config, layer) for layer in range(config.num_layers))


def _layer(config: ModelConfig, layer: int) -> Layer:
    return _named(config, FAMILIES[config.architecture].weights(config, layer))


def _named(config: ModelConfig, tree: Any) -> Any:
    """The tree with the names that the checkpoint has, which begin with the family's prefix."""
    prefix = FAMILIES[config.architecture].prefix
    return jax.tree.map(lambda weight: replace(weight, name=prefix + weight.name), tree)


def _mtp(config: ModelConfig) -> Layer:
    """The weights of the MTP layer; the embedding and the output matrix are the model's own."""
    hidden, layer = config.hidden_size, config.num_layers
    sizes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    tree = {name: Weight(f"model.layers.{layer}.{name}.weight", shape) for name, shape in sizes.items()}
    return {**_named(config, tree), "layer": _layer(config, layer)}


def copied(config: ModelConfig, *, mtp: bool) -> dict[str, str]:
    """The names of weights that a checkpoint may repeat, and those of the model's own that they must equal.

    A tied head, and with `mtp` the MTP layer's embedding and output matrix (arXiv 2412.19437, section 2.2, shares both
    with the model).
    """
    head = EMBED if config.tie_word_embeddings else HEAD
    found = {HEAD: EMBED} if config.tie_word_embeddings else {}
    if mtp:
        shared = {"embed_tokens": EMBED, "shared_head.head": head}
        found |= {f"model.layers.{config.num_layers}.{name}.weight": own for name, own in shared.items()}
    prefix = FAMILIES[config.architecture].prefix
    return {prefix + name: prefix + own for name, own in found.items()}


def unused(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """The weights among `names` that published checkpoints contain but the model does not use.

    - `model.layers.N.self_attn.rotary_emb.inv_freq` (Moonlight, Kimi-K2) or `model.rotary_emb.inv_freq`: rotary
      frequencies, which are computed from config.json instead.
    - Scales of cached entries (see `entry_scales.py`), which are read apart if the entry format needs them.
    - Layers of multi-token prediction (MTP, arXiv 2412.19437, section 2.2; V3, V3.2, GLM-4.7-Flash), numbered after the
      model's layers.  They only draft tokens.  Each has an `eh_proj`; any other layer past `num_hidden_layers` is not
      counted as unused, because config.json should have included it.  Families with other names outside the layers
      (V4) have none that are called so.
    - The `unused` ones of the family, and their scales.
    """
    family, names = FAMILIES[config.architecture], set(names)
    found = entry_scales.names_of(config, names)
    inside = re.escape(family.prefix) + r"model\."
    frequencies = re.compile(inside + r"(layers\.[0-9]{1,9}\.self_attn\.)?rotary_emb\.inv_freq")
    drafting = re.compile(inside + r"layers\.([0-9]{1,9})\.eh_proj\.weight")
    for name in names:
        own = family.unused and re.fullmatch(family.unused, fp8.without_suffix(name))
        if own or frequencies.fullmatch(name):
            found.add(name)
        match = drafting.fullmatch(name)
        if match and int(match[1]) >= config.num_layers and family.global_weights is None:
            found |= _mtp_names(config, int(match[1])) & names
    return found


def _mtp_names(config: ModelConfig, layer: int) -> set[str]:
    prefix = FAMILIES[config.architecture].prefix
    names = {name for weight in jax.tree.leaves(_layer(config, layer)) for name in weight.all_names()}
    names |= {f"{prefix}model.layers.{layer}.{name}.weight" for name in MTP}
    return names.union(*map(fp8.scale_names, names))


def spellings(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """The names that this module has for those of a checkpoint's `names` that are spelt in another way.

    They are those of `Family.spellings`; and a head without an embedding is the embedding if config.json ties the two,
    because weights that share memory are saved once.
    """
    family = FAMILIES[config.architecture]
    own = {name: family.own_name(name) for name in names}
    embed, head = family.prefix + EMBED, family.prefix + HEAD
    if config.tie_word_embeddings and embed not in own.values():
        own = {name: embed if new == head else new for name, new in own.items()}
    return {name: new for name, new in own.items() if new != name}
