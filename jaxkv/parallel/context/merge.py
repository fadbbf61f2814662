"""Combining the partial attentions of the devices."""

import jax

from jaxkv.arguments import FLOATS, Dims
from jaxkv.parallel.context.share import here
from jaxkv_kernels.xla.merge_states import merge_over


def merge_states(out, lse, *, axis) -> tuple[jax.Array, jax.Array]:
    """`jaxkv.merge_states` of one part a device: attention over the keys of all devices along a mesh axis.

    Two collectives: the maximum of the log-sum-exps, then the sum of the float32 results and of their weights.

    Args:
      out: float [..., D], this device's partial result of the queries that all devices share.
      lse: float32 [...], its log-sum-exp, natural logarithm; -inf (or +inf or NaN) for a device without keys, whose
        result is not looked at.
      axis: mesh axis (or several) of the `shard_map` around this call.

    Returns:
      out [..., D] of the part's dtype and lse float32 [...], the same on all devices along `axis`; 0 and -inf where
      every part is empty.

    Raises:
      ValueError: shapes or dtypes do not fit, or there is no such axis.
    """
    here(axis)
    dims, axes = Dims(), " ".join(f"n{i}" for i in range(len(getattr(out, "shape", ())) - 1))
    dims.check("out", out, f"{axes} D", FLOATS)
    dims.check("lse", lse, axes, ("float32",))
    return merge_over(out, lse, axis)
