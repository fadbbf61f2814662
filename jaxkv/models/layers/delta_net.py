"""A layer with the gated delta rule instead of attention (Gated DeltaNet, Kimi Delta Attention); its states are in the
cache.

A state is a matrix per value head, and the last tokens before a short convolution, in float32.  Block j of the table
"state" (`Model.layout_with_states`) has the states of all recurrent layers after the last token of block j that was
computed.  A step reads the state of the block with the request's last cached token, and writes that of the block with
its own last token; ids of other blocks may be -1, so that a running request needs two blocks at most.  States are
passed on between steps, not between rows: in a step, a request has one row, and no row writes a block that another one
reads.  Rows of one token each are decoded by `decode_delta_rule`, in place where both blocks are the same.

A block of a prompt whose state is kept is a prefix.  Another request continues from it if its tables have the same
block of states, and the same blocks of keys and values up to it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch, joined
from jaxkv.models.config import DeltaNet
from jaxkv.models.layers.block import AttentionFn
from jaxkv.models.layers.delta_rule import gated_delta_rule
from jaxkv.models.layers.linear import linear, rms_norm, with_rank
from jaxkv.models.model import STATE, Model
from jaxkv.ops.slots import slots_for
from jaxkv.ops.states import decode_delta_rule, read_state, write_state
from jaxkv_kernels.delta_rule import CONV, DELTA, convolve, heads_of


def delta_net_or(attention: AttentionFn) -> AttentionFn:
    """`delta_net` in layers that have its weights, else `attention`, with the number of the layer among those of its
    kind: the cache counts layers of each kind.
    """

    def mixer(model: Model, config, weights, x, cache: KVCache, batch: Batch, layer):
        recurrent: Any = model.config.recurrent
        before = (jnp.asarray(recurrent.layers, jnp.int32) < layer).sum(dtype=jnp.int32)
        if "conv" in weights:
            return delta_net(model, recurrent, weights, x, cache, batch, before)
        return attention(model, config, weights, x, cache, batch, layer - before)

    return mixer


class Inputs(NamedTuple):
    """What the rule and the output of a layer are computed from, [B, Q, ...]."""

    mixed: jax.Array
    """[..., channels], queries, keys and values before the convolution."""
    decay: jax.Array
    """float32 [..., H, 1 or K], logarithms."""
    rate: jax.Array
    """float32 [..., H]."""
    gate: jax.Array
    """float32 [..., H, V], the factors of the normalised outputs."""


def delta_net(
    model: Model, config: DeltaNet, weights, x, cache: KVCache, batch: Batch, layer
) -> tuple[KVCache, None, jax.Array]:
    """Computes the new tokens from the states before them, and stores the states after the last of them.

    Args:
      model: the model.
      config: the model's recurrent layers.
      weights: the weights of this layer.
      x: [B, Q, hidden].
      cache: the model's cache, as the view of keys and values.
      batch: the new tokens; each request has one row.
      layer: traced int32 scalar, the number of this layer among the recurrent ones.

    Returns:
      The cache, None, and the output [B, Q, hidden].
    """
    shape, options = x.shape[:2], {"layer": layer, "implementation": model.implementation}
    packed = model.layout_with_states(config, cache.layout.num_blocks, cache.layout.block_size)
    states, tokens = cache.view(packed[STATE]), packed.groups[STATE].rate

    inputs = (_of_channels if config.channel_decays else _of_heads)(config, weights, x)
    new = batch.slots.reshape(shape) >= 0, inputs.mixed, inputs.decay, inputs.rate
    outs, stored = [], []
    for sub_batch, *arrays in zip(batch.sub_batches, *map(batch.divided, new), strict=True):
        count = arrays[0].sum(axis=1, dtype=jnp.int32)
        before, after = sub_batch.seq_lens - count - 1, jnp.where(count > 0, sub_batch.seq_lens, 0) - 1
        slots = [slots_for(sub_batch.tables[STATE], last // tokens, states) for last in (before, after)]
        if sub_batch.shape[1] == 1:
            mixed, decay, rate = (part[:, 0] for part in arrays[1:])
            weight = weights["conv"][:, 0]
            out, states = decode_delta_rule(mixed, decay, rate, weight, states, *slots, **options)
            outs.append(out[:, None])
            continue
        # XLA must not read the old states once more, after the new ones are stored: it would copy the cache before.
        states, state = lax.optimization_barrier((states, read_state(states, slots[0], **options)))
        state, out = _advance(config, weights, state, count, *arrays)
        stored.append((state, slots[1]))
        outs.append(out)
    for state, slots in stored:
        states = write_state(states, state, slots, **options)

    out = joined(outs).astype(x.dtype)
    out = rms_norm(out, weights["norm"], model.config.rms_norm_eps).astype(jnp.float32) * inputs.gate
    return states.view(cache.layout), None, linear(out.astype(x.dtype).reshape(*shape, -1), weights["o"])


def _of_heads(config: DeltaNet, weights, x) -> Inputs:
    """Those of Gated DeltaNet, whose weights have the rows of a key head, and then those of the next."""
    shape, values = x.shape[:2], config.num_value_heads // config.num_key_heads * config.value_head_dim
    grouped = linear(x, weights["qkvz"]).reshape(*shape, config.num_key_heads, -1)
    *mixed, gate = jnp.split(grouped, [config.key_head_dim, 2 * config.key_head_dim, -values], axis=-1)
    mixed = jnp.concatenate([part.reshape(*shape, -1) for part in mixed], axis=-1)
    rate, step = jnp.split(linear(x, weights["ba"]).reshape(*shape, config.num_key_heads, -1), 2, axis=-1)
    rate, step = (part.astype(jnp.float32).reshape(*shape, config.num_value_heads) for part in (rate, step))
    decay = -jnp.exp(with_rank(weights["a_log"], 3)) * jax.nn.softplus(step + with_rank(weights["dt_bias"], 3))
    gate = gate.reshape(*shape, config.num_value_heads, -1).astype(jnp.float32)
    return Inputs(mixed, decay[..., None], jax.nn.sigmoid(rate), jax.nn.silu(gate))


def _of_channels(config: DeltaNet, weights, x) -> Inputs:
    """Those of Kimi Delta Attention, with as many heads of keys as of values."""
    shape = (*x.shape[:2], config.num_value_heads, -1)
    mixed = jnp.concatenate([linear(x, weights[name]) for name in ("q", "k", "v")], axis=-1)
    step, gate = (
        linear(linear(x, weights[f"{name}_a"]), weights[f"{name}_b"]).astype(jnp.float32) for name in ("step", "gate")
    )
    step = jax.nn.softplus(step + with_rank(weights["dt_bias"], 3)).reshape(shape)
    rate = jax.nn.sigmoid(linear(x, weights["rate"]).astype(jnp.float32))
    return Inputs(mixed, -jnp.exp(weights["a_log"]) * step, rate, jax.nn.sigmoid(gate.reshape(shape)))


def _advance(config: DeltaNet, weights, state, count, is_new, mixed, decay, rate) -> tuple[dict[str, Any], jax.Array]:
    """The state after the new tokens of one sub-batch, and their outputs, float32 [B, Q, H, V].

    `mixed` are queries, keys and values before the convolution, [B, Q, channels].
    """
    mixed, conv = convolve(mixed, state[CONV], weights["conv"][:, 0], count)
    # Padding leaves the state as it is, whatever it holds.
    mixed, decay, rate = (
        jnp.where(jnp.expand_dims(is_new, range(2, part.ndim)), part, 0) for part in (jax.nn.silu(mixed), decay, rate)
    )
    q, k, v = heads_of(mixed, config.num_value_heads, config.key_head_dim, config.value_head_dim)
    out, delta = gated_delta_rule(q, k, v, decay, rate, state[DELTA])
    return {CONV: conv, DELTA: delta}, out
