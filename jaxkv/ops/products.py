"""Grouped SwiGLU, and linear with fp8 blocks."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv.checks import Dims, describe, int32, positive_number
from jaxkv.data_checks import checking, require
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import TOKENS, array
from jaxkv_kernels import calls
from jaxkv_kernels.tile_scaled import TileScaled, num_tiles


def grouped_swiglu(
    x: ArrayLike,
    experts: ArrayLike,
    weights: ArrayLike,
    gate: jax.Array | TileScaled,
    up: jax.Array | TileScaled,
    down: jax.Array | TileScaled,
    *,
    shared: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    implementation: Implementations | None = None,
) -> jax.Array:
    """The weighted sum of each token's experts: sum over k of weights[t, k] * expert(experts[t, k], x[t]).

    Expert e maps a token x to down[e] (silu(gate[e] x) * (up[e] x)), the SwiGLU feed-forward (arXiv 2002.05202).  Only
    the chosen experts affect a result: weights of others may hold anything, including inf and NaN.  Products are
    accumulated in float32, and the values before `down` are rounded to the dtype of `x`.

    Args:
      x: tokens [T, D].
      experts: int [T, K], the ids of each token's experts; K may be 0 if there is a `shared` expert.  Ids outside
        [0, E) are skipped; a token whose ids are all skipped gets 0.
      weights: float32 [T, K], the weight of each chosen expert.
      gate: [E, I, D], of the dtype of `x`, as checkpoints store the weight of each expert; or a `TileScaled` of that
        shape, for weights in float8.
      up: [E, I, D], of the same kind.
      down: [E, D, I], of the same kind.
      shared: gate [S, D], up [S, D] and down [D, S] of an expert through which every token passes with weight 1, of the
        dtype of `x`.
      limit: static float; of every expert, gate[e] x becomes at most `limit` before silu, and up[e] x lies between
        -limit and limit (DeepSeek-V4's `swiglu_limit`).
      alpha: static float; every expert uses GPT-OSS's activation, g * sigmoid(alpha g) * (u + 1) of g = gate[e] x and
        u = up[e] x, instead of silu(g) * u.
      biases: [E, I], [E, I] and [E, D], of the dtype of `x`; added to the results of gate, up and down of the chosen
        experts, before the limit.  On `mosaic_gpu`, weights in float8 are supported without biases.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      [T, D], of the dtype of `x`.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    dims = Dims(*(() if shared is None else ("K",)))
    x = dims.check("x", x, "T D")
    dims.check_ints("experts", experts, "T K")
    weights = dims.check("weights", weights, "T K", ("float32",))
    matrices = {"gate": (gate, "E I D"), "up": (up, "E I D"), "down": (down, "E D I")}
    scaled = {name for name, (matrix, _) in matrices.items() if isinstance(matrix, TileScaled)}
    for name, (matrix, axes) in matrices.items():
        if not scaled:
            dims.check(name, matrix, axes, (str(x.dtype),))
        elif isinstance(matrix, TileScaled):
            _check_scaled(dims, name, matrix, axes)
        else:
            raise ValueError(f"`{name}` is {describe(matrix)}: expected a TileScaled, as `{min(scaled)}` is one")
    _check_three(dims, "shared", shared, ("S D", "S D", "D S"), str(x.dtype))
    _check_three(dims, "biases", biases, ("E I", "E I", "E D"), str(x.dtype))
    experts = int32(experts)
    if checking():
        require(experts < dims["E"], "experts", experts, f"there are {dims['E']} experts")
    call = calls.GroupedSwiglu(
        x=x,
        experts=experts,
        weights=weights,
        gate=gate,
        up=up,
        down=down,
        shared=shared,
        biases=biases,
        limit=positive_number("limit", limit),
        alpha=positive_number("alpha", alpha),
    )
    return run(call, implementation)


def scaled_linear(x: ArrayLike, weight: TileScaled, *, implementation: Implementations | None = None) -> jax.Array:
    """x times the transpose of a weight in float8: [t, i] is the sum over d of x[t, d] * weight[i, d].

    Sums are accumulated in float32.

    Args:
      x: tokens [T, D].
      weight: `TileScaled` [I, D], as checkpoints store it.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      [T, I], of the dtype of `x`.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    dims = Dims()
    x = dims.check("x", x, "T D")
    if not isinstance(weight, TileScaled):
        raise ValueError(f"`weight` is {describe(weight)}: expected a TileScaled [I, D]")
    _check_scaled(dims, "weight", weight, "I D")
    return run(calls.ScaledLinear(x=x, weight=weight), implementation)


def _check_three(dims: Dims, name: str, arrays, axes: tuple[str, str, str], dtype: str) -> None:
    """ValueError unless `arrays` is None, or has an array for each of `axes`."""
    if arrays is None:
        return
    if not isinstance(arrays, tuple | list) or len(arrays) != len(axes):
        found = f"{len(arrays)} elements" if isinstance(arrays, tuple | list) else describe(arrays)
        raise ValueError(f"`{name}` is {found}: expected arrays for gate, up and down")
    for number, (matrix, names) in enumerate(zip(arrays, axes, strict=True)):
        dims.check(f"{name}[{number}]", matrix, names, (dtype,))


def _check_scaled(dims: Dims, name: str, matrix: TileScaled, axes: str) -> None:
    """ValueError unless `matrix` has the axes `axes` and a scale per tile."""
    dims.check(f"{name}.values", matrix.values, axes, ("float8_e4m3fn",))
    *stack, rows, columns = (dims[axis] for axis in axes.split())
    shape, scales = (*stack, num_tiles(rows), num_tiles(columns)), matrix.scales
    if getattr(scales, "shape", None) != shape or scales.dtype != jnp.float32:
        raise ValueError(
            f"`{name}.scales` is {describe(scales)}: expected float32{list(shape)}, one per 128 x 128 values"
        )


def _sample():
    count, chosen, width, inner = 16, 4, 512, 256
    tokens = (
        array("bfloat16", TOKENS, width),
        array("int32", TOKENS, chosen),
        array("float32", TOKENS, chosen),
    )
    matrices = (array("bfloat16", count, *shape) for shape in ((inner, width), (inner, width), (width, inner)))
    return (*tokens, *matrices), {}


def _sample_linear():
    weight = TileScaled(array("float8_e4m3fn", 256, 512), array("float32", 2, 4))
    return (array("bfloat16", TOKENS, 512), weight), {}


OPERATIONS = (
    Operation(grouped_swiglu, _sample),
    Operation(scaled_linear, _sample_linear),
)
