"""The public operations: each checks its arguments, chooses an implementation and runs its kernel."""

from jaxkv.ops import (
    attention,
    blocks,
    gathers,
    indexer,
    merge,
    plan,
    prefill,
    products,
    routing,
    sparse,
    states,
    writes,
)
from jaxkv.ops.operation import Operation

OPERATIONS: tuple[Operation, ...] = (
    *writes.OPERATIONS,
    *gathers.OPERATIONS,
    *plan.OPERATIONS,
    *attention.OPERATIONS,
    *sparse.OPERATIONS,
    *prefill.OPERATIONS,
    *indexer.OPERATIONS,
    *merge.OPERATIONS,
    *states.OPERATIONS,
    *blocks.OPERATIONS,
    *routing.OPERATIONS,
    *products.OPERATIONS,
)
"""Every operation that dispatches to kernels.  Code that covers all operations iterates over this tuple."""
