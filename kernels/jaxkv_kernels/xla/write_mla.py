"""Stores latents and rotary keys."""

from functools import partial

import jax

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.xla.rows import write_slots


@partial(jax.jit, static_argnames=("pages", "entry"))
def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, *, pages, entry):
    """kv_c [T, R], k_pe [T, P] into slots [T] of a layer; the new buffer."""
    rows = view_as(entry.encode((kv_c, k_pe), (kv_scale, kv_scale)), buffer.dtype)
    return write_slots(buffer, pages, rows[:, None], slot_mapping, layer)
