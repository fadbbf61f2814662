"""A language model of two small MLA layers: on the cache, and in float64 NumPy without one.

Its tokens hang on every earlier token and on its position, so that a wrong slot or table gives wrong tokens.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.models import OneDevice
from jaxkv.serving import drafts, program

LAYERS, HIDDEN, HEADS, LATENT, ROPE, VOCAB, LONGEST = 2, 24, 2, 16, 8, 97, 512
SCALE = 0.5
ROOM = 64
"""Blocks of every cache, at least."""


class Config(NamedTuple):
    vocab_size: int = VOCAB
    stop_tokens: tuple[int, ...] = ()
    max_position_embeddings: int = LONGEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ToyModel:
    params: Any
    config: Config = field(default=Config(), metadata={"static": True})
    implementation: Any = field(default=None, metadata={"static": True})
    parallel: OneDevice = field(default=OneDevice(), metadata={"static": True})

    def compiler_options(self, *, prefill=False):
        del prefill
        return {}

    @property
    def dtype(self):
        return np.dtype(np.float32)

    def layout(self, num_blocks, block_size, order="BLNHC"):
        entry = jaxkv.MLAEntry("f32", latent=LATENT, rope=ROPE)
        return jaxkv.CacheLayout(
            num_layers=LAYERS, num_blocks=num_blocks, block_size=block_size, entry=entry, order=order
        )

    def cache(self, num_blocks, block_size, order):
        # Engines of any number of blocks run the same compiled programs; the blocks beyond stay NaN.
        layout = self.layout(max(num_blocks, ROOM), block_size, order)
        # Whatever is read without having been written shows.
        return jaxkv.KVCache(jnp.full((layout.size,), jnp.nan, layout.dtype), layout)


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "embedding": (VOCAB, HIDDEN),
        "position": (LONGEST, HIDDEN),
        "query": (LAYERS, HIDDEN, HEADS * (LATENT + ROPE)),
        "entry": (LAYERS, HIDDEN, LATENT + ROPE),
        "output": (LAYERS, HEADS * LATENT, HIDDEN),
        "head": (HIDDEN, VOCAB),
    }
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ("query", "entry", "output", "head"):
        params[name] /= params[name].shape[-2] ** 0.5
    return params


def prompt(length, seed=0):
    return tuple(np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist())


def install(monkeypatch):
    """Has engines run this model's programs, also with drafts that the host makes."""
    monkeypatch.setattr(program, "step", step)
    monkeypatch.setattr(drafts, "hidden_states", hidden_states)
    monkeypatch.setattr(drafts, "output", lambda model, hidden: hidden @ model.params["head"])


def prefill(model, cache, *batch):
    cache, x = forward(model, cache, *batch)
    return cache, x[:, -1] @ model.params["head"]


def forward(model, cache, tokens, seq_lens, block_tables, slot_mapping):
    params, (rows, columns) = model.params, tokens.shape
    positions = seq_lens[:, None] - columns + jnp.arange(columns)
    x = params["embedding"][tokens] + params["position"][positions]
    for layer in range(LAYERS):
        entry = (x @ params["entry"][layer]).reshape(-1, LATENT + ROPE)
        cache = jaxkv.write_mla(cache, entry[:, :LATENT], entry[:, LATENT:], slot_mapping.reshape(-1), layer=layer)
        q = (x @ params["query"][layer]).reshape(rows, columns, HEADS, LATENT + ROPE)
        out = jaxkv.decode_mla(
            q[..., :LATENT], q[..., LATENT:], cache, block_tables, seq_lens, layer=layer, scale=SCALE
        )
        x += out.reshape(rows, columns, -1) @ params["output"][layer]
    return cache, x


def hidden_states(model, cache, *batches):
    found = []
    for batch in batches:
        cache, x = forward(model, cache, *batch)
        found.append(x)
    return cache, found


def step(model, cache, *batches, prefill=prefill):
    found = []
    for batch in batches:
        cache, logits = prefill(model, cache, *batch)
        found.append(logits)
    return cache, jnp.concatenate(found)


def logits_without_cache(params, tokens):
    """float64 [V], after the last of these tokens."""
    params = {name: array.astype(np.float64) for name, array in params.items()}
    count = len(tokens)
    x = params["embedding"][np.asarray(tokens)] + params["position"][:count]
    for layer in range(LAYERS):
        entry = x @ params["entry"][layer]
        q = (x @ params["query"][layer]).reshape(count, HEADS, LATENT + ROPE)
        scores = np.einsum("qhc,kc->hqk", q, entry) * SCALE
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        out = np.einsum("hqk,kc->qhc", p, entry[:, :LATENT])
        x = x + out.reshape(count, -1) @ params["output"][layer]
    return x[-1] @ params["head"]


def greedy_without_cache(params, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_without_cache(params, tokens))))
    return tokens[len(prompt) :]
