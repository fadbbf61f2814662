"""Experts: feed-forwards of which each token passes through a few."""

import jax

from jaxkv.dispatch.backends import Call, run
from jaxkv.dispatch.checked import checking, require
from jaxkv.dispatch.validate import Dims, int32
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import TOKENS, array


def grouped_swiglu(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    implementation=None,
) -> jax.Array:
    """The weighted sum of each token's experts: sum over k of weights[t, k] * expert(experts[t, k], x[t]).

    Expert e maps a token x to down[e] (silu(gate[e] x) * (up[e] x)), the SwiGLU feed-forward (arXiv 2002.05202).  Only
    the chosen experts affect a result: weights of others may hold anything, including inf and NaN.  Products are
    accumulated in float32, and the values before `down` are rounded to the dtype of `x`.

    Args:
      x: tokens [T, D].
      experts: int [T, K], the ids of each token's experts.  Ids outside [0, E) are skipped; a token whose ids are all
        skipped gets 0.
      weights: float32 [T, K], the weight of each chosen expert.
      gate: [E, I, D], of the dtype of `x`, as checkpoints store the weight of each expert.
      up: [E, I, D].
      down: [E, D, I].
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      [T, D], of the dtype of `x`.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    return run(_bind(x, experts, weights, gate, up, down), implementation)


def _bind(x, experts, weights, gate, up, down) -> Call:
    dims = Dims()
    dims.check("x", x, "T D")
    dims.check_ints("experts", experts, "T K")
    dims.check("weights", weights, "T K", ("float32",))
    dtype = (str(x.dtype),)
    dims.check("gate", gate, "E I D", dtype)
    dims.check("up", up, "E I D", dtype)
    dims.check("down", down, "E D I", dtype)
    experts = int32(experts)
    if checking():
        require(experts < dims["E"], "experts", experts, f"there are {dims['E']} experts")
    arrays = {"x": x, "experts": experts, "weights": weights, "gate": gate, "up": up, "down": down}
    return Call("grouped_swiglu", arrays, {})


def _sample():
    count, chosen, width, inner = 16, 4, 512, 256
    tokens = (
        array("bfloat16", TOKENS, width),
        array("int32", TOKENS, chosen),
        array("float32", TOKENS, chosen),
    )
    matrices = (array("bfloat16", count, *shape) for shape in ((inner, width), (inner, width), (width, inner)))
    return (*tokens, *matrices), {}


OPERATIONS = (Operation(grouped_swiglu, _bind, _sample),)
