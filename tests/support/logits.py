"""The logits of a model at every position of a prompt, on a cache with all block tables that the model has."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import models
from jaxkv_kernels.addressing import slots_for


@partial(jax.jit, donate_argnums=1)
def _run(model, cache, *batch):
    """Logits of all new tokens, [1, Q, vocab]."""
    cache, x = models.forward(model, cache, *batch)
    return cache, models.head(model, x)


def logits_of(model, tokens):
    """The logits at every position, [len(tokens), vocab], computed in two chunks by the same program."""
    width, count = -(-len(tokens) // 2), len(tokens)
    size = model.usual_block_size
    sizes = {"": size}
    layout = model.layout(1, size)
    if isinstance(layout, jaxkv.PackedLayout):
        sizes = {name: table.block_size for name, table in layout.tables.items()}
    needed = {name: -(-count // held) for name, held in sizes.items()}
    blocks = iter(np.random.default_rng(0).permutation(sum(needed.values())))
    tables = {name: np.asarray([[next(blocks) for _ in range(of)]], np.int32) for name, of in needed.items()}
    cache, found = model.cache(sum(needed.values()), size), []
    for start in (0, width):
        new = tokens[start : start + width]
        padding = width - len(new)
        positions = np.asarray([[-1] * padding + [*range(start, start + len(new))]])
        slots = slots_for(tables[""], positions, block_size=size)
        length = jnp.asarray([start + len(new)], jnp.int32)
        padded = np.asarray([[0] * padding + new], np.int32)
        cache, logits = _run(model, cache, padded, length, tables if len(tables) > 1 else tables[""], slots)
        found.append(np.asarray(logits)[0, padding:])
    return np.concatenate(found)
