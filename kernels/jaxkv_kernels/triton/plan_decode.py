"""Plans of `decode_mla` and `decode_kv`."""

from jaxkv_kernels.triton.decode_kv import plan_kv
from jaxkv_kernels.triton.decode_mla import plan_latents
from jaxkv_kernels.triton.splits import Plan


def plan_decode(
    buffer, block_tables, seq_lens, *, pages, entry, heads, tokens, window, batch_invariant, dtype=None
) -> Plan:
    """The schedule for `heads` query heads and `tokens` query tokens per request."""
    del buffer, batch_invariant, dtype
    plan = plan_latents if entry.one_head else plan_kv
    return plan(block_tables, seq_lens, pages=pages, entry=entry, heads=heads, q_len=tokens, window=window)
