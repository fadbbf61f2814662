"""A decode step of a layer with the gated delta rule, whose states are read from the cache and stored again."""

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import DecodeDeltaRule, ReadState, WriteState
from jaxkv_kernels.delta_rule import CONV, DELTA, advance, convolve, heads_of, unit_queries_and_keys
from jaxkv_kernels.xla import entries


@jax.jit
def decode_delta_rule(call: DecodeDeltaRule) -> tuple[jax.Array, jax.Array]:
    """The outputs of the new tokens, and the buffer with the states after them stored."""
    pages, slots, layer = call.pages, call.write_slots, call.layer
    cache = {"pages": pages, "entry": call.entry, "layer": layer}
    states = entries.read_state(ReadState(buffer=call.buffer, slots=call.read_slots, **cache))
    # XLA must not read the old states once more, after the new ones are stored: it would copy the cache before.
    buffer, states = jax.lax.optimization_barrier((call.buffer, states))
    conv, delta = (states[name].astype(jnp.float32) for name in (CONV, DELTA))

    one = jnp.ones(slots.shape, jnp.int32)
    mixed, conv = convolve(call.x[:, None], conv, call.conv_weight, one)
    q, k, v = heads_of(jax.nn.silu(mixed[:, 0]), *delta.shape[1:])
    out, delta = advance(*unit_queries_and_keys(q, k, delta.shape[1]), v, call.decay, call.rate, delta)

    stored = {CONV: conv, DELTA: delta}
    buffer = entries.write_state(WriteState(buffer=buffer, states=stored, slots=slots, **cache))
    known = (slots >= 0) & (slots < pages.num_slots) & (layer >= 0) & (layer < pages.num_layers)
    return jnp.where(known[:, None, None], out, 0), buffer
