"""`ExtraSlots`, the second cache of a sparse decode."""

from dataclasses import dataclass, field

import jax

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.formats.entries import MLAEntry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExtraSlots:
    """Entries of another cache that query tokens attend to as well, in the same softmax."""

    buffer: jax.Array
    slots: jax.Array
    """int32 [B, Q, K]."""
    counts: jax.Array | None
    """int32 [B, Q]; None if all slots are used."""
    layer: jax.Array
    kv_scale: jax.Array | None
    """float32 scalar, or None for formats without a scale."""
    pages: Pages = field(metadata={"static": True})
    entry: MLAEntry = field(metadata={"static": True})
