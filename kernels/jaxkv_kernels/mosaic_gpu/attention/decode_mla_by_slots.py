"""Dense MLA decode of some quantised entries (`config.by_slots`), as sparse attention to all slots of a request.

The schedule of sparse attention loads entries by slot.  Here, slots are computed from the block table.  Reading a slot
adds 4 bytes to the 352 to 656 of each token.  Several query tokens of a request each read its entries again.  With a
window, a query token has the slots of the tokens in it only.
"""

import jax.numpy as jnp

from jaxkv_kernels.addressing import lengths_in_table, slots_for, table_tokens
from jaxkv_kernels.mosaic_gpu.attention.decode_mla_sparse import config_of, decode_slots
from jaxkv_kernels.mosaic_gpu.attention.plan import Plan
from jaxkv_kernels.mosaic_gpu.attention.planning.slots import plan_slots
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting


def decode_by_slots(
    q_latent, q_pe, buffer, block_tables, seq_lens, layer, scale, plan: Plan | None,
    *, pages, entry, logit_cap, window,
):  # fmt: skip
    """Maps q_latent [B, Q, Hq, R], q_pe [B, Q, Hq, P] to out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    batch, tokens, heads, _ = q_latent.shape
    size = _most_slots(block_tables, pages, window)
    if window is None:
        positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
        slots = slots_for(block_tables, positions, block_size=pages.block_size)
        slots = jnp.broadcast_to(slots[:, None], (batch, tokens, size))
    else:
        first = jnp.maximum(_ends(block_tables, seq_lens, pages, tokens) - window, 0)
        positions = (first[..., None] + jnp.arange(size, dtype=jnp.int32)).reshape(batch, -1)
        slots = slots_for(block_tables, positions, block_size=pages.block_size).reshape(batch, tokens, size)
    if plan is None:
        plan = plan_by_slots(
            block_tables, seq_lens,
            pages=pages, entry=entry, heads=heads, tokens=tokens, window=window, batch_invariant=False,
        )  # fmt: skip
    return decode_slots(
        q_latent, q_pe, buffer, slots, None, layer, scale, None, plan, pages=pages, entry=entry, logit_cap=logit_cap
    )


def plan_by_slots(
    block_tables, seq_lens, *, pages, entry, heads: int, tokens: int, window, batch_invariant: bool
) -> Plan:
    """The schedule of such calls: query token t of a request sees all but the last `tokens` - 1 - t slots."""
    counts = _ends(block_tables, seq_lens, pages, tokens).reshape(-1)
    size = _most_slots(block_tables, pages, window)
    if window is not None:
        counts = jnp.minimum(counts, window)
    costs = config_of(entry, queries=counts.size, size=size, heads=heads).split_costs
    return plan_slots(
        counts, size=size, heads=heads, costs=costs, batch_invariant=batch_invariant,
        by_kernel=not interpreting.value,
    )  # fmt: skip


def _ends(block_tables, seq_lens, pages, tokens: int):
    """The position after the last token that each query token sees, int32 [B, tokens]."""
    lengths = lengths_in_table(seq_lens, block_tables, pages.block_size)
    return jnp.maximum(lengths[:, None] - jnp.arange(tokens - 1, -1, -1, dtype=jnp.int32), 0)


def _most_slots(block_tables, pages, window: int | None) -> int:
    """The most tokens that a query token sees."""
    size = table_tokens(block_tables, pages.block_size)
    return size if window is None else min(size, window)
