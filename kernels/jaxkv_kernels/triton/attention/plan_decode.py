"""Split-KV plans: they assign tokens of requests to programs, and are computed on the device from the lengths.

A plan has one split size for all requests.  Large splits leave multiprocessors idle.  Each small split has a fixed
cost, and splits must be combined afterwards.  The plan compares a few sizes and uses the one with the least estimated
time.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing.slots import table_tokens
from jaxkv_kernels.triton.attention.config import Config, kv_config, latent_config
from jaxkv_kernels.triton.runtime.interpreting import interpreting


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """A schedule.  All arrays are int32."""

    work_tiles: jax.Array
    """[tiles, 4]: request (-1 for none), first token, end, and whether the request has several work tiles."""
    split_requests: jax.Array
    """[B, 3]: request, its first work tile, and its number of work tiles.  Split requests come first, then the others.
    """
    tiles_per_request: jax.Array
    """[B]: work tiles of each request."""
    num_split: jax.Array
    """[1]: number of split requests."""
    typical_splits: int = field(metadata={"static": True})
    """Splits per request if all requests have the same length and the splits fill the GPU once."""

    @property
    def may_split(self) -> bool:
        """Whether any request can be split."""
        return self.work_tiles.shape[0] > self.tiles_per_request.shape[0]


def plan_decode(
    buffer, block_tables, seq_lens, *, pages, entry, heads, tokens, window, batch_invariant, dtype=None
) -> Plan:
    """The schedule for `heads` query heads and `tokens` query tokens per request."""
    del buffer, batch_invariant, dtype
    rows = tokens * (heads // pages.num_heads)
    config = (latent_config if entry.one_head else kv_config)(entry, rows, entry.dtype)
    return make_plan(
        seq_lens, config=config, row_tiles=pages.num_heads * config.row_tiles(rows), q_len=tokens, window=window,
        longest=table_tokens(block_tables, pages.block_size), sms=multiprocessors(),
    )  # fmt: skip


def plan_or_default(plan: Plan | None, q, block_tables, seq_lens, *, pages, entry, window) -> Plan:
    """`plan`, or if that is None, a new one for queries `q` [B, Q, Hq, ...]."""
    if plan is not None:
        return plan
    return plan_decode(
        None, block_tables, seq_lens,
        pages=pages, entry=entry, heads=q.shape[2], tokens=q.shape[1], window=window, batch_invariant=False,
    )  # fmt: skip


def multiprocessors() -> int:
    """Multiprocessors of the GPU.  The interpreter gets four, so that its short requests are split as well."""
    device: Any = jax.devices()[0]
    return 4 if interpreting.value or device.platform == "cpu" else device.core_count


@partial(jax.jit, static_argnames=("config", "row_tiles", "q_len", "window", "longest", "sms"))
def make_plan(
    seq_lens, *, config: Config, row_tiles: int, q_len: int, window: int | None, longest: int, sms: int
) -> Plan:
    """The schedule for requests of `seq_lens` [B] (clamped to the range 0 to `longest`) on `sms` multiprocessors.

    `row_tiles` programs share each work tile.  With a window, requests begin at the first token that some query sees.
    """
    batch = seq_lens.size
    places = sms * config.programs_per_sm  # programs that run at the same time
    ends = jnp.clip(seq_lens, 0, longest)
    begins = jnp.zeros_like(ends)
    if window is not None:
        begins = jnp.clip(ends - q_len + 1 - window, 0, ends)
    lengths = ends - begins

    longest_length = jnp.maximum(lengths.max(), 1)
    share = jnp.maximum(lengths.sum(dtype=jnp.float32), 1) * row_tiles / places  # tokens per place, spread evenly
    splits = jnp.maximum(jnp.arange(1, config.max_waves + 1) * longest_length // share, 1)
    sizes = jnp.ceil(longest_length / splits / config.split_multiple).astype(jnp.int32) * config.split_multiple
    counts = jnp.maximum(-(-lengths // sizes[:, None]), 1)
    waves = -(-counts.sum(axis=1) * row_tiles // places)
    # The time, in tokens, has two upper bounds.  Programs that start in order end within an even share plus one split,
    # and also within one split per wave.
    end = jnp.minimum(share + sizes, waves * sizes) + waves * config.split_cost
    best = end.argmin()
    size, counts = sizes[best], counts[best]

    most_tiles = batch + max(batch, config.max_waves * places // row_tiles)
    tile = jnp.arange(min(most_tiles, batch * -(-longest // config.split_multiple)), dtype=jnp.int32)
    after = jnp.cumsum(counts)
    first = after - counts
    request = jnp.searchsorted(after, tile, side="right", method="compare_all").astype(jnp.int32)
    live, request = request < batch, jnp.minimum(request, batch - 1)
    begin = begins[request] + (tile - first[request]) * size
    end = jnp.minimum(begin + size, ends[request])
    is_split = counts > 1
    work_tiles = jnp.stack([jnp.where(live, request, -1), begin, end, is_split[request].astype(jnp.int32)], axis=1)
    order = jnp.argsort(~is_split, stable=True)
    split_requests = jnp.stack([order.astype(jnp.int32), first[order], jnp.where(is_split, counts, 0)[order]], axis=1)
    num_split = is_split.sum(dtype=jnp.int32)[None]
    return Plan(work_tiles, split_requests, counts, num_split, typical_splits=places // (row_tiles * batch))
