"""Metadata of attention for one step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.dispatch import least_prefill
from jaxkv.layout.layout import CacheLayout
from jaxkv.models.cache_groups import MAIN
from jaxkv.models.config import MLA, CompressedAttention
from jaxkv.models.layers import rope
from jaxkv.models.model import Model
from jaxkv.ops.plan import DecodePlan
from jaxkv.ops.slots import slots_for
from jaxkv_kernels.calls import ExpandedHeads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SubBatch:
    """B requests with Q new tokens each, aligned to the end, which attend in one call."""

    seq_lens: jax.Array
    tables: dict[str, jax.Array]
    """The block tables, int32 [B, M], by name."""

    plan: DecodePlan | tuple[DecodePlan, ...] | None
    """The plan of `decode_mla` or `decode_kv`, the same for all layers; None if a layer calls neither."""

    window_plan: DecodePlan | tuple[DecodePlan, ...] | None
    """The same for layers with a window."""

    expanded: bool = field(metadata={"static": True})
    """Whether layers call `prefill_mla`: it is faster for this number of new tokens."""

    shape: tuple[int, int] = field(metadata={"static": True})
    """(B, Q)."""

    @classmethod
    def of(cls, model: Model, cache: KVCache, seq_lens, tables, slot_mapping) -> "SubBatch":
        """Makes the sub-batch from the arguments of `prefill`; `slot_mapping` is [B, Q]."""
        q_len = slot_mapping.shape[1]
        expanded = not model.parallel.divides_tokens and _prefers_expansion(model, q_len)
        plan = window_plan = None
        decodes = model.config.indexer is None and not isinstance(model.config.attention, CompressedAttention)
        if decodes and not expanded:
            planned = partial(
                model.parallel.plan_decode,
                seq_lens=seq_lens,
                num_heads=model.num_heads,
                q_len=q_len,
                dtype=model.dtype,
                implementation=model.implementation,
            )
            plan, window = planned(cache, tables[MAIN]), getattr(model.config.attention, "window", None)
            if window is not None:
                view, table = model.windowed_view(cache)
                window_plan = planned(view, tables[table], window=window)
        return cls(seq_lens, tables, plan, window_plan, expanded, slot_mapping.shape)

    @property
    def block_tables(self) -> jax.Array:
        """The table of the entries that tokens attend to."""
        return self.tables[MAIN]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The new tokens of a step.

    Layers process arrays [B, Q, ...] if the step has one sub-batch, and [1, T, ...], with the tokens of all
    sub-batches one after the other, if it has several.
    """

    cos: jax.Array
    """float32 [B, Q, rotary_dim / 2], the same shape as `sin`: the rotary embedding of the tokens."""
    sin: jax.Array
    slots: jax.Array
    """int32 [B * Q], the slots of the new tokens in this device's cache."""
    positions: jax.Array
    """int32, the shape of the tokens: their positions; negative for padding."""
    sub_batches: tuple[SubBatch, ...]

    query_scales: jax.Array | None = None
    """float32, the shape of the tokens: the factors of the queries of MLA; None if the model has none."""

    ids: jax.Array | None = None
    """int32, the shape of the tokens: their ids; None if they are not known."""

    selected: jax.Array | None = None
    """int32 [B, Q, K] or [1, T, K], the slots that the last layer with an indexer has selected, or with a `SplitCache`
    the positions, for layers that share them; None before that layer, and if all layers have an indexer, or none.
    """

    @classmethod
    def of(cls, model: Model, cache: KVCache, batches: Sequence[tuple[Any, Any, Any]]) -> "Batch":
        """Makes the batch from `seq_lens`, the block tables by name and `slot_mapping` [B, Q] of each sub-batch."""
        slots = jnp.concatenate([slot_mapping.reshape(-1) for *_, slot_mapping in batches])
        config, positions = model.config, []
        for seq_lens, _, slot_mapping in batches:
            q_len = slot_mapping.shape[1]
            positions.append(seq_lens[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None])
        positions = joined(positions)
        scale = config.attention.query_scale if isinstance(config.attention, MLA) else None
        return cls(
            *rope.angles(config.rope, config.attention.rotary_dim, positions),
            model.parallel.slots(slots, cache.layout),
            jnp.where(joined([slot_mapping for *_, slot_mapping in batches]) < 0, -1, positions),
            tuple(SubBatch.of(model, cache, *batch) for batch in batches),
            None if scale is None else rope.query_scales(scale, positions),
        )

    @property
    def is_padding(self) -> jax.Array:
        """bool, the shape of the tokens: those before the new tokens of their row, and all of an empty row."""
        return self.positions < 0

    def slots_of(self, table: str, cache: KVCache | CacheLayout) -> jax.Array:
        """The slots of the new tokens, int32 [B * Q], in a table of the blocks of a cache or layout."""
        if table == MAIN:
            return self.slots
        positions = self.divided(self.positions)
        slots = [
            slots_for(sub_batch.tables[table], mine, cache)
            for sub_batch, mine in zip(self.sub_batches, positions, strict=True)
        ]
        return joined(slots).reshape(-1)

    def divided(self, x) -> list[jax.Array]:
        """The arrays [B, Q, ...] of the sub-batches, of an array that layers process."""
        if len(self.sub_batches) == 1:
            return [x]
        ends = np.cumsum([rows * columns for rows, columns in (sub_batch.shape for sub_batch in self.sub_batches)])
        pieces = jnp.split(x, ends[:-1], axis=1)
        return [piece.reshape(*sub.shape, *x.shape[2:]) for piece, sub in zip(pieces, self.sub_batches, strict=True)]

    def attend(self, attention: Callable[..., jax.Array], *arrays) -> jax.Array:
        """Calls `attention(sub_batch, *arrays)` for each sub-batch with its [B, Q, ...] of the arrays; joins the
        results.
        """
        divided = zip(*map(self.divided, arrays), strict=True)
        return joined([attention(sub, *mine) for sub, mine in zip(self.sub_batches, divided, strict=True)])


def joined(arrays: Sequence[jax.Array]) -> jax.Array:
    """The array that layers process, of the arrays [B, Q, ...] of the sub-batches."""
    if len(arrays) == 1:
        return arrays[0]
    return jnp.concatenate([array.reshape(1, -1, *array.shape[2:]) for array in arrays], axis=1)


def _prefers_expansion(model: Model, q_len: int) -> bool:
    """Whether the model has dense latent attention, and calls `prefill_mla` for `q_len` new tokens per request."""
    attention = model.config.attention
    if not isinstance(attention, MLA) or attention.indexer is not None:
        return False
    heads = ExpandedHeads(
        model.dtype,
        latent=attention.kv_lora_rank,
        rope=attention.qk_rope_head_dim,
        nope=attention.qk_nope_head_dim,
        value=attention.v_head_dim,
    )
    least = least_prefill(heads, model.implementation)
    return least is not None and q_len >= least
