"""Stores keys and values of all heads."""

from functools import partial

import jax

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.xla.rows import write_slots


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """k [T, H, D], v [T, H, Dv] into slots [T] of a layer; the new buffer."""
    rows = view_as(entry.encode((k, v), (k_scale, v_scale)), buffer.dtype)
    return write_slots(buffer, pages, rows, slot_mapping, layer)
