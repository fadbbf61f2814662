"""Plans of `decode_mla` and `decode_kv`."""

from collections.abc import Iterator

from jaxkv_kernels.calls import PlanDecode
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.triton import gqa, mla
from jaxkv_kernels.triton.attention import empty_reasons
from jaxkv_kernels.triton.splits import Plan, batch_invariant_reasons


def unsupported_reasons(call: PlanDecode) -> Iterator[str]:
    """Reasons against a call."""
    yield from empty_reasons(block_tables=call.block_tables)
    if isinstance(call.entry, MLAEntry):
        yield from mla.entry_reasons(call.entry)
    else:
        yield from gqa.entry_reasons(call.entry, call.dtype)
    yield from batch_invariant_reasons(call)


def plan_decode(call: PlanDecode) -> Plan:
    """The schedule for the requests of a call."""
    return mla.plan_latents(call) if isinstance(call.entry, MLAEntry) else gqa.plan_kv(call)
