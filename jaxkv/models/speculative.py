"""Speculative decoding with the model's own layer of multi-token prediction (MTP, arXiv 2412.19437, section 2.2).

For each position i, the MTP layer combines the model's hidden state h_i with the embedding of the token i + 1, and
predicts the token i + 2:

    x_i = eh_proj [enorm(embed(token i + 1)), hnorm(h_i)]       the order in which checkpoints store `eh_proj`
    y_i = shared_head.norm(decoder_layer(x)_i)                  logits = output matrix @ y_i

h_i is the model's hidden state after its final norm, the input of the output matrix.  To draft further tokens, y_i
takes the place of h_{i + 1}.  (Section 2.2 leaves open whether h is normalised.  SGLang and vLLM, which serve these
weights, pass the normalised states of the model.  For further drafts, SGLang passes normalised ones, and vLLM those
before `shared_head.norm`; this only affects how many drafts are accepted.)

The entry of x_i is stored in the layer `num_layers` of the cache, in the slot of token i.
"""

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.checks import Dims, int32
from jaxkv.models.batch import Batch
from jaxkv.models.decoder import NewTokens, hidden_states, output
from jaxkv.models.families import FAMILIES
from jaxkv.models.layers.linear import linear, rms_norm
from jaxkv.models.model import Model
from jaxkv.models.sampling import SamplingBatch, sample


def mtp_forward(
    model: Model, cache: KVCache, hidden, tokens, seq_lens, block_tables, slot_mapping
) -> tuple[KVCache, jax.Array]:
    """The MTP layer at Q new positions of each request.

    Rows are aligned to the end, as in `prefill`: padding has negative slots.

    Args:
      model: from `load` with `mtp`.
      cache: from `model.cache`; donate it.
      hidden: [B, Q, hidden], for each position i the model's hidden state after the final norm, from `verify`.
      tokens: int32 [B, Q], for each position i the token i + 1.
      seq_lens: int32 [B], positions of each request, the new ones included.  The MTP layer must have processed all
        earlier ones.
      block_tables: int32 [B, M], as in `prefill`.
      slot_mapping: int32 [B, Q], the slots of the positions.

    Returns:
      The cache, and y [B, Q, hidden]: `output(model, y)` are the logits of the tokens i + 2.

    Raises:
      ValueError: a shape or dtype is wrong, the cache is not of the model's layout, or the model has no MTP layer.
    """
    if "mtp" not in model.params:
        raise ValueError("`model` has no layer of multi-token prediction: load it with `mtp=True`")
    model.check_cache(cache)
    dims = Dims()
    dims.check_ints("tokens", tokens, "B Q")
    dims.check("hidden", hidden, "B Q hidden", (str(model.dtype),))
    dims.check_ints("seq_lens", seq_lens, "B")
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("slot_mapping", slot_mapping, "B Q")
    index = int32(seq_lens), {"": int32(block_tables)}, int32(slot_mapping)
    return model.parallel.run(_mtp_layer, model, cache, hidden, tokens, *index)


def _mtp_layer(model: Model, cache: KVCache, hidden, tokens, seq_lens, tables, slot_mapping):
    """`mtp_forward` on one device, for its part of the model, the cache and the batch."""
    config, weights = model.config, model.params["mtp"]
    embedded = rms_norm(model.params["embed"][tokens], weights["enorm"], config.rms_norm_eps)
    hidden = rms_norm(hidden, weights["hnorm"], config.rms_norm_eps)
    x = linear(jnp.concatenate([embedded, hidden], axis=-1), weights["eh_proj"])
    batch = Batch.of(model, cache, [(seq_lens, tables, slot_mapping)])
    block = FAMILIES[config.architecture].block
    cache, _, x = block(model, weights["layer"], x, cache, batch, jnp.int32(config.num_layers))
    return cache, rms_norm(x, weights["shared_head.norm"], config.rms_norm_eps)


def draft(
    model: Model, cache: KVCache, hidden, tokens, seq_lens, block_tables, slot_mapping
) -> tuple[KVCache, jax.Array]:
    """Drafts K tokens of each request with the MTP layer, each the most likely one.

    Processes the new positions as `mtp_forward`, then K - 1 further positions, one at a time.  The entries of these
    further positions are made of drafts; the next call overwrites them, because it starts at the first of them.

    Args:
      model: from `load` with `mtp`.
      cache: from `model.cache`; donate it.
      hidden: [B, Q, hidden], as in `mtp_forward`.
      tokens: int32 [B, Q], as in `mtp_forward`; the last one of a row is the request's last token.
      seq_lens: int32 [B], as in `mtp_forward`; 0 in rows without a request.
      block_tables: int32 [B, M].
      slot_mapping: int32 [B, Q + K - 1], the slots of the new positions and of the K - 1 positions after them.  At the
        first of these that is negative, the row's drafts end: those that it and later positions give have no meaning.

    Returns:
      The cache, and the drafts, int32 [B, K].

    Raises:
      ValueError: as `mtp_forward`, or `slot_mapping` has fewer than Q columns.
    """
    dims = Dims()
    dims.check_ints("tokens", tokens, "B Q")
    dims.check_ints("slot_mapping", slot_mapping, "B N")
    new, seq_lens = tokens.shape[1], int32(seq_lens)
    if slot_mapping.shape[1] < new:
        raise ValueError(f"`slot_mapping` has {slot_mapping.shape[1]} columns: expected {new} or more, as `tokens` has")
    cache, y = mtp_forward(model, cache, hidden, tokens, seq_lens, block_tables, slot_mapping[:, :new])
    drafts = [_likeliest(model, y)]
    for i in range(new, slot_mapping.shape[1]):
        slots = slot_mapping[:, i : i + 1]
        lengths = jnp.where(slots[:, 0] >= 0, seq_lens + len(drafts), 0)
        cache, y = mtp_forward(model, cache, y[:, -1:], drafts[-1][:, None], lengths, block_tables, slots)
        drafts.append(_likeliest(model, y))
    return cache, jnp.stack(drafts, axis=1)


def _likeliest(model: Model, y) -> jax.Array:
    """The most likely token after the last position of y [B, Q, hidden], int32 [B]."""
    return output(model, y[:, -1]).argmax(axis=-1).astype(jnp.int32)


def verify(
    model: Model, cache: KVCache, tokens, seq_lens, block_tables, slot_mapping, sampling: SamplingBatch
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Computes the model's own tokens after each of up to Q new tokens, of which all but the first are drafts.

    The result has the model's own distribution: the draft d of a position is a single token, so that rejection sampling
    (arXiv 2211.17192, algorithm 1) accepts d with the probability p(d) that the model gives it, and otherwise draws
    from the other tokens.  Drawing x from p, and accepting d if x = d, is the same.  x is drawn with the request's
    random numbers for that position, so that up to rounding the tokens are those without drafts.

    Args:
      model: from `load`.
      cache: from `model.cache`; donate it.
      tokens: int32 [B, Q], the last known token of each request and up to Q - 1 drafts, aligned to the end.
      seq_lens: int32 [B], tokens of each request, the drafts included; 0 in rows without a request.
      block_tables: int32 [B, M], as in `prefill`.
      slot_mapping: int32 [B, Q], the slot of each new token; negative for padding.
      sampling: how the tokens of each request are chosen.

    Returns:
      - the cache.  Entries of rejected drafts remain until later tokens overwrite them.
      - hidden [B, Q, hidden], the hidden states of the new tokens after the final norm.
      - sampled, int32 [B, Q]: the model's token after each new token; -1 if its logits are NaN.  Of row b, the first
        accepted[b] + 1 after the padding are valid.
      - accepted, int32 [B]: the number of leading drafts that equal the model's tokens.

    Raises:
      ValueError: a shape or dtype is wrong, the cache is not of the model's layout, or the model has states, which
        would remember rejected drafts.
    """
    if model.config.recurrent is not None:
        raise ValueError(
            "`model` has recurrent layers, whose states would remember rejected drafts: expected attention"
        )
    cache, (hidden,) = hidden_states(model, cache, NewTokens(tokens, seq_lens, block_tables, slot_mapping))
    sampled, accepted = accept(output(model, hidden), tokens, int32(slot_mapping) < 0, seq_lens, sampling)
    return cache, hidden, sampled, accepted


def accept(logits, tokens, padding, seq_lens, sampling: SamplingBatch) -> tuple[jax.Array, jax.Array]:
    """`sampled` and `accepted` of `verify`, given the logits [B, Q, V] after its tokens, and which of them are padding.

    `padding` is bool [B, Q].
    """
    rows, columns = tokens.shape
    # A token's random numbers are those of its position, the number of tokens before it.
    positions = int32(seq_lens)[:, None] + jnp.arange(1 - columns, 1, dtype=jnp.int32)[None]
    sampling = jax.tree.map(lambda option: jnp.repeat(option, columns), sampling)
    sampled = sample(logits.reshape(rows * columns, -1), sampling, positions.reshape(-1))
    sampled = sampled.reshape(rows, columns)
    right = padding[:, :-1] | (sampled[:, :-1] == tokens[:, 1:])
    accepted = jnp.where(padding[:, :-1], 0, jnp.cumprod(right, axis=1, dtype=jnp.int32))
    return sampled, accepted.sum(axis=1, dtype=jnp.int32)
