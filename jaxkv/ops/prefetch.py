"""Reading arrays into the cache of the device ahead of time."""

from collections.abc import Sequence

import jax

from jaxkv.dispatch.backends import Call, run
from jaxkv.dispatch.validate import describe
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import TOKENS, array


def prefetch(x: jax.Array, arrays: Sequence[jax.Array], *, implementation=None) -> jax.Array:
    """`x` as it is, after the device has begun to read `arrays` into its L2 cache.

    What depends on the result is computed after that, while the arrays are being read.  This pays if what is computed
    next waits for latencies rather than for memory, as the attention of a few tokens does, and `arrays`, such as
    weights of later products, fit in the cache.  On `xla`, nothing is read ahead.

    Args:
      x: any array.
      arrays: arrays of any shape and dtype; not an empty sequence.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      `x`.

    Raises:
      ValueError: `arrays` is empty, or has something that is not an array.
    """
    return run(_bind(x, arrays), implementation)


def _bind(x, arrays) -> Call:
    arrays = tuple(arrays)
    if not arrays:
        raise ValueError("`arrays` is empty: expected one array or more")
    for name, value in {"x": x, **{f"arrays[{i}]": one for i, one in enumerate(arrays)}}.items():
        if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(f"`{name}` is {describe(value)}: expected an array")
    return Call("prefetch", {"x": x, "arrays": arrays}, {})


OPERATIONS = (Operation(prefetch, _bind, lambda: ((array("bfloat16", TOKENS, 64), [array("bfloat16", 64, 64)]), {})),)
