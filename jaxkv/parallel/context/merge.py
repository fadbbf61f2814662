"""Combining the partial attentions of the devices."""

import jax
from jax import lax

from jaxkv.checks import FLOATS, Dims
from jaxkv.ops import merge
from jaxkv.parallel.context.share import axis_size


def merge_states(out, lse, *, axis) -> tuple[jax.Array, jax.Array]:
    """Merges one partial result per device into the attention over the keys of all devices along a mesh axis.

    Every device gathers all parts and merges them itself.  This takes one collective.  Reductions would take two: first
    the maximum of the log-sum-exps, then the sum of the results.  On more than 4 devices, gathering parts in their own
    dtype moves more bytes than float32 sums, which matters only for large batches.

    Args:
      out: float [..., D], this device's partial result.  All devices must have the same queries.
      lse: float32 [...], its log-sum-exp, natural logarithm; -inf (or +inf or NaN) for a device without keys, whose
        result is ignored.
      axis: mesh axis (or several) of the `shard_map` around this call.

    Returns:
      out [..., D] of the part's dtype and lse float32 [...], the same on all devices along `axis`; 0 and -inf where
      every part is empty.

    Raises:
      ValueError: shapes or dtypes do not fit, or there is no such axis.
    """
    axis_size(axis)  # ValueError if there is no such axis
    dims, axes = Dims(), " ".join(f"n{i}" for i in range(len(getattr(out, "shape", ())) - 1))
    dims.check("out", out, f"{axes} D", FLOATS)
    dims.check("lse", lse, axes, ("float32",))
    parts = lax.all_gather((out, lse), axis, to="invarying")
    return merge.merge_states(*parts, implementation="xla")
