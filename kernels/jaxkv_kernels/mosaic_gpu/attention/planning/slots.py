"""The plan of sparse attention, in which each query token is a request of its own, with a number of slots."""

import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.attention.config import PAIR, TILE, SplitCosts
from jaxkv_kernels.mosaic_gpu.attention.plan import Plan, make_plan
from jaxkv_kernels.mosaic_gpu.runtime.device import MULTIPROCESSORS, interpreting


def plan_slots(
    counts, *, size: int, heads: int, costs: SplitCosts, batch_invariant: bool, by_kernel: bool = False
) -> Plan:
    """The schedule of query tokens with `counts` [N] slots each, at most `size`."""
    partitions = 4 if interpreting.value else max(MULTIPROCESSORS // -(-heads // TILE), 1)
    # The kernel masks slots, so the plan only sees a table of one valid block per request.
    table = jnp.zeros((counts.size, 1), jnp.int32)
    return make_plan(
        counts, table, partitions=partitions, tokens=1, block_size=size, num_blocks=None, step=PAIR, costs=costs,
        batch_invariant=batch_invariant, by_kernel=by_kernel,
    )  # fmt: skip
