"""Other names that checkpoints have for the weights that `parameters.py` describes."""

from collections.abc import Iterable

from jaxkv.models.config import ModelConfig
from jaxkv.models.families import FAMILIES
from jaxkv.models.weights.parameters import EMBED, HEAD


def spellings(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """The names that `parameters` has for those of a checkpoint's `names` that are spelt in another way.

    They are those of `Family.spellings`; and a head without an embedding is the embedding if config.json ties the two,
    because weights that share memory are saved once.
    """
    family = FAMILIES[config.architecture]
    own = {name: family.own_name(name) for name in names}
    embed, head = family.prefix + EMBED, family.prefix + HEAD
    if config.tie_word_embeddings and embed not in own.values():
        own = {name: embed if new == head else new for name, new in own.items()}
    return {name: new for name, new in own.items() if new != name}
