"""Beam search and best-of-n: inside one `lax.while_loop` on a cache, and on the host without a cache.

The model is that of `support.toy_model`.  A sequence that ends with the stop token gives its blocks back.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv import blocks
from support import toy_model
from support.toy_model import VOCAB, logits_without_cache

BLOCK_SIZE, MAX_BLOCKS = 4, 8


def prefill(model, cache, num_blocks, prompt):
    """The prompt in the cache, as one sequence, and the logits after it."""
    tables = blocks.BlockTables.create(
        num_sequences=1, max_blocks=MAX_BLOCKS, num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    tables, new = blocks.append(tables, jnp.asarray([len(prompt)]), max_tokens=len(prompt))
    cache, logits = toy_model.prefill(model, cache, prompt[None], tables.seq_lens, tables.block_tables, new.slots)
    return tables, cache, logits, new.ok


def decode(model, cache, tables, tokens, live):
    """Appends a token to each live sequence, in the tables and in the cache; and the logits after it."""
    tables, new = blocks.append(tables, live.astype(jnp.int32))
    cache = jaxkv.copy_blocks(cache, new.src, new.dst)
    cache, logits = toy_model.prefill(model, cache, tokens[:, None], tables.seq_lens, tables.block_tables, new.slots)
    return tables, cache, logits, new.ok


def beam_choice(logits, scores, live, step, stop):
    """The beams of the next step: parents, tokens and scores.  A beam that has ended competes with its score."""
    width = len(scores)
    options = scores[:, None] + jax.nn.log_softmax(logits)
    ended = jnp.where(jnp.arange(VOCAB)[None] == stop, scores[:, None], -jnp.inf)
    options = jnp.where(live[:, None], options, ended)
    options = jnp.where((step == 0) & (jnp.arange(width)[:, None] > 0), -jnp.inf, options)  # at first, one beam
    scores, index = lax.top_k(options.reshape(-1), width)
    return index // VOCAB, index % VOCAB, scores


def sample_choice(logits, scores, live, step, stop, noise):
    """The next token of each sequence, drawn by Gumbel noise [count, n, V]; a sequence that has ended stays."""
    tokens = jnp.where(live, jnp.argmax(logits + noise[step], axis=-1), stop).astype(jnp.int32)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]
    return jnp.arange(len(scores), dtype=jnp.int32), tokens, scores + jnp.where(live, logp, 0)


@partial(jax.jit, static_argnames=("num_blocks", "width", "count", "stop"), donate_argnames="cache")
def search(model, cache, prompt, noise=None, *, num_blocks, width, count, stop):
    """Tokens [width, count], scores [width], blocks in use after each step [count], and whether none was missing.

    With `noise`, best-of-n of n = width samples; otherwise beam search.
    """
    choice = beam_choice if noise is None else partial(sample_choice, noise=noise)
    tables, cache, logits, ok = prefill(model, cache, num_blocks, prompt)
    state = dict(
        step=jnp.int32(0),
        tables=blocks.fork(tables, jnp.zeros(width, jnp.int32)),
        cache=cache,
        logits=jnp.broadcast_to(logits, (width, VOCAB)),
        tokens=jnp.full((width, count), stop, jnp.int32),
        scores=jnp.zeros(width),
        live=jnp.ones(width, bool),
        used=jnp.zeros(count, jnp.int32),
        ok=ok.all(),
    )

    def goes_on(state):
        return (state["step"] < count) & state["live"].any()

    def body(state):
        step = state["step"]
        parents, tokens, scores = choice(state["logits"], state["scores"], state["live"], step, stop)
        tables = blocks.fork(state["tables"], parents)
        live = state["live"][parents] & (tokens != stop)
        tables = blocks.truncate(tables, jnp.where(live, tables.seq_lens, 0))
        tables, cache, logits, ok = decode(model, state["cache"], tables, tokens, live)
        return dict(
            step=step + 1,
            tables=tables,
            cache=cache,
            logits=logits,
            tokens=state["tokens"][parents].at[:, step].set(tokens),
            scores=scores,
            live=live,
            used=state["used"].at[step].set(tables.allocator.num_used),
            ok=state["ok"] & ok.all(),
        )

    state = lax.while_loop(goes_on, body, state)
    return state["tokens"], state["scores"], state["used"], state["ok"], state["cache"]


def search_on_host(params, prompt, noise=None, *, width, count, stop):
    """The same on the host: each sequence is a list, and is computed as a whole for each token.

    The blocks in use are as many as the live sequences have different prefixes that end where a block or a sequence
    does.  No two beams are equal; of samples, only the prompt is the same prefix, as equal tokens are drawn apart.
    """
    beams, used = [(0.0, [], True)], []
    if noise is not None:
        beams *= width
    for step in range(count):
        options = []
        for number, (score, tokens, live) in enumerate(beams):
            if not live:
                options.append((score, [*tokens, stop], False))
                continue
            logits = logits_without_cache(params, [*prompt, *tokens])
            logp = logits - logits.max()
            logp -= np.log(np.exp(logp).sum())
            drawn = range(VOCAB) if noise is None else [int(np.argmax(logits + noise[step, number]))]
            options += [(score + logp[token], [*tokens, token], token != stop) for token in drawn]
        beams = sorted(options, key=lambda option: -option[0])[:width] if noise is None else options
        prefixes = {
            (end > len(prompt) and noise is not None and number, (*prompt, *tokens)[:end])
            for number, (_, tokens, live) in enumerate(beams)
            for end in range(BLOCK_SIZE, (len(prompt) + step + BLOCK_SIZE + 1) * live, BLOCK_SIZE)
        }
        used.append(len(prefixes))
        if not prefixes:
            break
    tokens = np.asarray([tokens + [stop] * (count - len(tokens)) for _, tokens, _ in beams])
    return tokens, np.asarray([score for score, *_ in beams]), np.asarray(used + [0] * (count - len(used)))
