"""The compressor of DeepSeek-V4: one entry for every m tokens.

Each token has a row of values and one of gates, from two matrices.  Entry w is made when token (w + 1) m - 1 arrives:

    entry w = rope(norm(sum over rows r of softmax over rows(gate_r + bias_r) * values_r), position w m)

Its rows are those of tokens w m to w m + m - 1.  Compressors of `csa` have rows that are twice as wide, and sum over
2 m rows: the first halves of those of window w - 1, and the second halves of those of window w.

The rows of the last tokens are the compressor's state.  The cache has a state per token, in blocks that expire when no
later entry needs them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv.models.batch import Batch
from jaxkv.models.compressed_cache import MAIN
from jaxkv.models.config import CompressedAttention
from jaxkv.models.layers import rope
from jaxkv.models.layers.linear import product, rms_norm
from jaxkv.ops.slots import slots_for
from jaxkv.ops.states import read_state, write_state


class Compressor(NamedTuple):
    """A compressor of one kind of layers."""

    rate: int
    """Tokens per entry (m)."""
    halves: bool
    """Whether an entry also has rows of the window before its own."""
    table: str
    """The table of the rows."""

    @property
    def span(self) -> int:
        """The rows of an entry."""
        return self.rate * (1 + self.halves)

    def closing(self, seq_lens, positions) -> tuple[jax.Array, jax.Array]:
        """The entries that the new tokens complete: their numbers, int32 [B, W], and which of these they are.

        `positions` [B, Q] are those of the new tokens; negative for padding.
        """
        new = (positions >= 0).sum(axis=1, dtype=jnp.int32)
        first = (seq_lens - new) // self.rate
        most = -(-positions.shape[1] // self.rate)
        numbers = first[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        return numbers, numbers < (seq_lens // self.rate)[:, None]

    def rows_of(self, numbers) -> jax.Array:
        """The positions, int32 [..., span], of the rows of entries; negative before the first token."""
        within = jnp.arange(self.rate - self.span, self.rate, dtype=jnp.int32)
        return numbers[..., None] * self.rate + jnp.expand_dims(within, range(numbers.ndim))

    def compress(self, weights, values, gates, positions, eps: float) -> jax.Array:
        """Entries, before rotary embedding, float32 [..., size].

        Args:
          weights: `position_bias` float32 [m, width] and `norm` float32 [size].
          values: float32 [..., span, width]; the width is that of a token's row.
          gates: the same.
          positions: int32 [..., span], of the rows; those at negative positions do not count.
          eps: the epsilon of the norm.
        """
        values, gates = self._own(values), self._own(gates) + self._bias(weights["position_bias"], gates.ndim)
        gates = jnp.where((positions >= 0)[..., None], gates, -jnp.inf)
        sums = (values * jax.nn.softmax(gates, axis=-2)).sum(axis=-2)
        return rms_norm(sums, weights["norm"], eps)

    def _own(self, rows):
        """The halves of rows [..., span, width] that an entry has: [..., span, size]."""
        if not self.halves:
            return rows
        first, second = jnp.split(rows, 2, axis=-1)
        return jnp.concatenate([first[..., : self.rate, :], second[..., self.rate :, :]], axis=-2)

    def _bias(self, bias, ndim: int):
        """The biases of the rows of an entry, [..., span, size], of those of a token's row, [m, width]."""
        if self.halves:
            bias = jnp.concatenate(jnp.split(bias, 2, axis=-1), axis=0)
        return jnp.expand_dims(bias, range(ndim - 2))


def new_entries(
    compressor: Compressor,
    config: CompressedAttention,
    weights,
    x,
    cache: KVCache,
    rows: CacheLayout,
    entries: CacheLayout,
    *,
    batch: Batch,
    layer,
    eps: float,
    implementation,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Stores the rows of new tokens x [B, Q, hidden], and computes the entries that they complete.

    Args:
      compressor: the compressor.
      config: the model's attention.
      weights: the compressor's weights.
      x: the input of the attention.
      cache: the model's cache.
      rows: the layout of the group of rows.
      entries: that of the group of entries.
      batch: the new tokens.
      layer: the layer of both groups, traced int32 scalar.
      eps: the epsilon of the norm.
      implementation: that of the operations.

    Returns:
      The cache; entries [N, size], of the dtype of x; and their slots, int32 [N], negative where there is none.
    """
    options: dict[str, Any] = {"layer": layer, "implementation": implementation}
    new = {name: product("...i,oi->...o", x, weights[name], dtype=jnp.float32) for name in ("kv", "gate")}
    new = {name: array.reshape(-1, array.shape[-1]) for name, array in new.items()}
    held = write_state(cache.view(rows), new, batch.slots_of(compressor.table, rows.block_size), **options)
    found, all_slots = [], []
    for part, positions in zip(batch.parts, batch.divided(batch.positions), strict=True):
        numbers, complete = compressor.closing(part.seq_lens, positions)
        places = compressor.rows_of(numbers)
        slots = slots_for(part.tables[compressor.table], places, block_size=rows.block_size)
        states = read_state(held, slots.reshape(-1), **options)
        values, gates = (states[name].reshape(*places.shape, -1) for name in ("kv", "gate"))
        entry = compressor.compress(weights, values, gates, places, eps)
        cos, sin = rope.angles(config.compressed_rope, config.rotary_dim, numbers * compressor.rate)
        entry = rope.rotate_last(entry, cos, sin).astype(x.dtype)
        slots = slots_for(part.tables[MAIN], numbers, block_size=entries.block_size)
        found.append(entry.reshape(-1, entry.shape[-1]))
        all_slots.append(jnp.where(complete, slots, -1).reshape(-1))
    return held.view(cache.layout), jnp.concatenate(found), jnp.concatenate(all_slots)
