"""`toy_model` with further layers: a window, a recurrent state, compressed entries; each in a group of the cache.

Tokens hang on every earlier token through the state and through the layer that attends to all, on the last ones through
the window, and on every fourth one through the compressed entries: a wrong block of any table gives wrong tokens.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.serving import program
from support import toy_model
from support.toy_model import HEADS, HIDDEN, LATENT, LONGEST, ROOM, ROPE, SCALE, VOCAB

WINDOW, RATE, WIDTH, DECAY = 9, 4, 16, 0.75
ENTRY = jaxkv.MLAEntry("f32", latent=LATENT, rope=ROPE)
STATE = jaxkv.StateEntry({"sum": ((2, WIDTH // 2), "float32"), "last": ((HIDDEN,), "float32")})


class Config(NamedTuple):
    vocab_size: int = VOCAB
    stop_tokens: tuple[int, ...] = ()
    max_position_embeddings: int = LONGEST
    layers: tuple[str, ...] = ("full", "window", "state", "compressed")
    window_block: int = 4
    state_block: int = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class HybridModel(toy_model.ToyModel):
    config: Config = field(default=Config(), metadata={"static": True})

    def layout(self, num_blocks, block_size, order="BLNHC"):
        sizes = {"": block_size, "window": self.config.window_block, "state": self.config.state_block}
        groups = {
            "full": jaxkv.Group(1, ENTRY),
            "compressed": jaxkv.Group(1, ENTRY, rate=RATE),
            "window": jaxkv.Group(1, ENTRY, table="window", window=WINDOW),
            "state": jaxkv.Group(1, STATE, rate=sizes["state"], table="state", window=1),
        }
        groups = {name: group for name, group in groups.items() if name in self.config.layers}
        sizes = {group.table: sizes[group.table] for group in groups.values()}
        return jaxkv.PackedLayout(num_blocks=num_blocks, block_size=sizes, groups=groups, order=order, dtype="float32")

    def cache(self, num_blocks, block_size, order):
        layout = self.layout(max(num_blocks, ROOM), block_size, order)["full"]
        return jaxkv.KVCache(jnp.full((layout.size,), jnp.nan, layout.dtype), layout)


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"embedding": (VOCAB, HIDDEN), "position": (LONGEST, HIDDEN), "head": (HIDDEN, VOCAB)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    params["head"] /= HIDDEN**0.5
    for layer in ("full", "window", "compressed"):
        shapes = {
            "query": (HIDDEN, HEADS * (LATENT + ROPE)),
            "entry": (HIDDEN, LATENT + ROPE),
            "output": (HEADS * LATENT, HIDDEN),
        }
        params[layer] = {
            name: (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32) for name, shape in shapes.items()
        }
    shapes = {"in": (HIDDEN, WIDTH), "before": (HIDDEN, WIDTH), "out": (WIDTH, HIDDEN)}
    params["state"] = {
        name: (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32) for name, shape in shapes.items()
    }
    return params


def install(monkeypatch):
    """Has engines run this model's programs."""
    monkeypatch.setattr(program, "step", partial(toy_model.step, prefill=prefill))


def prefill(model, cache, tokens, seq_lens, block_tables, slot_mapping):
    params, config, (rows, columns) = model.params, model.config, tokens.shape
    tables = block_tables if isinstance(block_tables, dict) else {"": block_tables}
    block_size = cache.layout.block_size
    packed = model.layout(cache.layout.num_blocks, block_size)
    positions = seq_lens[:, None] - columns + jnp.arange(columns)
    live = slot_mapping >= 0
    x = params["embedding"][tokens] + params["position"][positions]
    for layer in config.layers:
        view = cache.view(packed[layer])
        if layer == "state":
            view, out = recur(view, params["state"], x, tables["state"], seq_lens, live, config.state_block)
            x, cache = x + out, view.view(cache.layout)
            continue
        weights = params[layer]
        entry = (x @ weights["entry"]).reshape(-1, LATENT + ROPE)
        q = (x @ weights["query"]).reshape(rows, columns, HEADS, LATENT + ROPE)
        table, options = tables[""], {"layer": 0, "scale": SCALE}
        slots, seen = slot_mapping, None
        if layer == "window":
            table, options = tables["window"], options | {"window": WINDOW}
            slots = jaxkv.slots_for(table, jnp.where(live, positions, -1), view)
        if layer == "compressed":  # an entry of the last of every RATE tokens; each token is a request of its own
            last = live & (positions % RATE == RATE - 1)
            slots = jaxkv.slots_for(table, jnp.where(last, positions // RATE, -1), view)
            seen = jnp.where(live, (positions + 1) // RATE, 0).reshape(-1)
        view = jaxkv.write_mla(view, entry[:, :LATENT], entry[:, LATENT:], slots.reshape(-1), layer=0)
        if seen is None:
            out = jaxkv.decode_mla(q[..., :LATENT], q[..., LATENT:], view, table, seq_lens, **options)
        else:
            q, table = q.reshape(rows * columns, HEADS, -1), jnp.repeat(table, columns, axis=0)
            out = jaxkv.decode_mla(q[..., :LATENT], q[..., LATENT:], view, table, seen, **options)
        x = x + out.reshape(rows, columns, -1) @ weights["output"]
        cache = view.view(cache.layout)
    return cache, x[:, -1] @ params["head"]


def recur(cache, weights, x, table, seq_lens, live, block_size):
    """sum = DECAY sum + x in + x' before, where x' is the token before x, or 0; the layer's output is tanh(sum) out."""
    start = seq_lens - live.sum(axis=1)
    before, after = (
        jaxkv.slots_for(table, jnp.where(end > 0, (end - 1) // block_size, -1)[:, None], cache)[:, 0]
        for end in (start, seq_lens)
    )
    states = jaxkv.read_state(cache, before, layer=0)

    def token(carry, inputs):
        total, last = carry
        mine, valid = inputs
        new = DECAY * total + mine @ weights["in"] + last @ weights["before"]
        total, last = (jnp.where(valid[:, None], *pair) for pair in ((new, total), (mine, last)))
        return (total, last), jnp.tanh(total) @ weights["out"]

    carry = states["sum"].reshape(len(x), WIDTH), states["last"]
    (total, last), out = jax.lax.scan(token, carry, (x.swapaxes(0, 1), live.T))
    new = {"sum": total.reshape(len(x), 2, WIDTH // 2), "last": last}
    return jaxkv.write_state(cache, new, after, layer=0), out.swapaxes(0, 1)


def logits_without_cache(params, tokens, layers):
    """float64 [V], after the last of these tokens."""
    params = jax.tree.map(lambda array: array.astype(np.float64), params)
    count = len(tokens)
    x = params["embedding"][np.asarray(tokens)] + params["position"][:count]
    token = np.arange(count)
    for layer in layers:
        weights = params[layer]
        if layer == "state":
            total, last, out = np.zeros(WIDTH), np.zeros(HIDDEN), []
            for mine in x:
                total = DECAY * total + mine @ weights["in"] + last @ weights["before"]
                last = mine
                out.append(np.tanh(total) @ weights["out"])
            x = x + np.asarray(out)
            continue
        visible = token <= token[:, None]
        if layer == "window":
            visible &= token > token[:, None] - WINDOW
        entry = x @ weights["entry"]
        q = (x @ weights["query"]).reshape(count, HEADS, LATENT + ROPE)
        if layer == "compressed":
            visible &= token % RATE == RATE - 1
        scores = np.where(visible[:, None], np.einsum("qhc,kc->qhk", q, entry) * SCALE, -np.inf)
        with np.errstate(invalid="ignore"):
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            p = np.where(visible.any(axis=-1)[:, None, None], p / p.sum(axis=-1, keepdims=True), 0)
        out = np.einsum("qhk,kc->qhc", p, entry[:, :LATENT])
        x = x + out.reshape(count, -1) @ weights["output"]
    return x[-1] @ params["head"]


def greedy_without_cache(params, prompt, count, layers):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_without_cache(params, tokens, layers))))
    return tokens[len(prompt) :]


prompt = toy_model.prompt
