"""Merging partial results of attention by their log-sum-exps."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv.checks import FLOATS, computed, describe
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import BATCH, HEADS, array
from jaxkv_kernels import calls


def merge_states(
    outs: ArrayLike | Sequence[ArrayLike],
    lses: ArrayLike | Sequence[ArrayLike],
    *,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of disjoint sets of keys, from the attention over each set.

    Args:
      outs: N arrays [..., D], or one [N, ..., D]: partial results for the same queries.
      lses: N arrays [...], or one [N, ...]: their float32 log-sum-exps, natural logarithm.  Multiply those of base 2,
        which FlashInfer returns, by `math.log(2)`.  A part without keys has -inf (some kernels return +inf or NaN); its
        result is ignored.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      out [..., D] of the parts' dtype and lse float32 [...].  A query without keys in any part gets 0 and -inf.

    Raises:
      ValueError: a shape or dtype is wrong, or differs between parts.
    """
    outs, lses = _stacked("outs", outs, FLOATS), _stacked("lses", lses, ("float32",))
    if not outs.shape or not outs.shape[0]:
        raise ValueError(f"`outs` has shape {outs.shape}: expected [N, ..., D] with N at least 1")
    if lses.shape != outs.shape[:-1]:
        raise ValueError(
            f"`lses` has shape {lses.shape}: expected {outs.shape[:-1]}, that of `outs` without its last axis"
        )
    return run(calls.MergeStates(outs=outs, lses=lses), implementation)


def _stacked(name: str, parts: Any, dtypes: tuple[str, ...]) -> jax.Array:
    """The parts as one array, whose dtype must be one of `dtypes`."""
    several = isinstance(parts, list | tuple)
    for part in parts if several else (parts,):
        if str(getattr(part, "dtype", None)) not in dtypes:
            raise ValueError(
                f"`{name}` is or holds {describe(part)}: expected an array, or several, of {' or '.join(dtypes)}"
            )
    if not several:
        return parts
    kinds = {(tuple(part.shape), str(part.dtype)) for part in parts}
    if len(kinds) != 1:
        found = ", ".join(map(describe, parts)) or "no arrays"
        raise ValueError(f"`{name}` has {found}: expected at least one array, all of one shape and dtype")
    return computed(jnp.stack, parts)


def _sample():
    return (array("bfloat16", 2, BATCH, HEADS, 512), array("float32", 2, BATCH, HEADS)), {}


OPERATIONS = (Operation(merge_states, _sample),)
