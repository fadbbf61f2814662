"""What the kernels of experts store, computed from whole arrays, for Pallas's interpreter."""

from dataclasses import replace

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxkv_kernels.calls import SelectExperts
from jaxkv_kernels.experts import expert_groups, gated
from jaxkv_kernels.xla.kernels import XLA


def select_experts(call: SelectExperts, refs, first, count: int) -> None:
    """Stores the choices of `count` tokens from `first` on.  `refs` are logits, perhaps the bias, and both results."""
    *operands, ids_ref, weights_ref = refs
    logits, bias = operands[0][...], operands[1][...] if len(operands) > 1 else None
    found = XLA().select_experts(replace(call, logits=logits, bias=bias))
    for token in range(count):

        @pl.when(first + token < len(call.logits))
        def _(row=first + token):
            for ref, values in zip((ids_ref, weights_ref), found, strict=True):
                ref[row] = values[row]


def list_chosen(experts_ref, refs, count: int, more: int, size: int) -> None:
    """Stores the tiles of the chosen experts to the four results `refs`."""
    ids, most = jnp.arange(count + more), refs[0].shape[0]
    chosen = (experts_ref[...][:, None] == ids).any(axis=0) | (ids >= count)
    (found,) = jnp.nonzero(chosen, size=most)
    for ref, values in zip(refs, (found, found * size, jnp.full(most, size), chosen.sum()[None]), strict=True):
        ref[...] = values.astype(jnp.int32)


def group_choices(experts_ref, refs, per_token: int, count: int, tile: int, align: int) -> None:
    """Stores the rows of choices, the tokens of rows, and the tiles to the six results `refs`."""
    groups = expert_groups(experts_ref[...].reshape(-1, per_token), count, tile=tile, align=align)
    for ref, values in zip(refs, (groups.rows.reshape(-1), groups.tokens, *groups.tiles(align)), strict=True):
        ref[...] = values


def gate_up(x, chosen, gate, up, *shared, choices, experts, more, inner, width, limit):
    """What the first kernel of a single token stores."""
    del width
    ids = jnp.clip(chosen[0, :choices], 0, experts - 1)

    def product(matrix, other):
        rows = jnp.concatenate([*other, matrix[ids].reshape(-1, x.shape[1])])
        return jnp.einsum("d,id->i", x[0], rows, preferred_element_type=jnp.float32)

    return gated(product(gate, shared[:1]), product(up, shared[1:]), limit, None)


def down(hidden, chosen, shares, down, *shared, choices, experts, more, inner, width):
    """What the second kernel of a single token stores."""
    del width
    chosen, shares = chosen[0, :choices], shares[0, :choices]
    known, ids = (chosen >= 0) & (chosen < experts), jnp.clip(chosen, 0, experts - 1)
    parts = hidden.reshape(-1, inner)
    results = jnp.einsum("ki,kdi->kd", parts[more:], down[ids], preferred_element_type=jnp.float32)
    total = jnp.where(known[:, None], results * shares[:, None], 0).sum(axis=0)
    for matrix in shared:
        total += jnp.einsum("i,di->d", hidden[: more * inner], matrix, preferred_element_type=jnp.float32)
    return total
