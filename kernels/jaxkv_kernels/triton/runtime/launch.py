"""Calling a Triton kernel from JAX: one interface to jax-triton 0.3, jax-triton 0.4 and Triton's interpreter."""

import inspect
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import jax

from jaxkv_kernels.triton.runtime.interpreting import interpreting


def launch(
    kernel: Any,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    updated: Sequence[jax.Array] = (),
    grid: tuple[int, ...],
    warps: int = 4,
    stages: int = 3,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs `kernel(*operands, *updated, *results, **constants)` on a grid of programs.

    Args:
      kernel: a function decorated with `triton.jit`.  Its parameters are pointers to the arrays in the order shown
        above, then constants.
      operands: arrays that the kernel reads.  Traced scalars must be passed as arrays of one element.
      results: shapes and dtypes of the arrays that the kernel writes.  It must write all of their elements.
      updated: arrays of which the kernel writes any part.  They are updated in place, unless they are used afterwards.
      grid: numbers of programs along up to three axes, at least 1 each.
      warps: warps per program.
      stages: stages of the loops that Triton pipelines.
      **constants: values of the kernel's `tl.constexpr` parameters, by name; they must be hashable.

    Returns:
      `updated` after the kernel's writes, then the results.
    """
    if interpreting.value:
        from jaxkv_kernels.triton.runtime.interpreter import interpret

        return interpret(kernel, operands, results, updated, grid, constants)
    return _through_jax_triton(kernel, operands, results, updated, grid, warps, stages, constants)


def capability() -> int:
    """The GPU's compute capability times ten (90 for Hopper); in the interpreter, that of the oldest supported GPU."""
    return 80 if interpreting.value else _capability()


def _capability() -> int:
    return round(10 * float(jax.devices()[0].compute_capability))


def _through_jax_triton(kernel, operands, results, updated, grid, warps, stages, constants):
    jax_triton = _jax_triton()
    options: dict[str, Any] = {"kernel": kernel, "grid": grid, "num_warps": warps, "num_stages": stages, **constants}
    # Set explicitly, because Triton 3.10 will no longer fuse products and sums by default, and 3.9 warns about it.
    fused = {"enable_fp_fusion": True}
    if _takes_refs():
        refs = [jax.new_ref(array) for array in updated]
        options["backend_options"] = fused
        found = jax_triton.triton_call(*operands, *refs, out_type=tuple(results), **options)
        return *(_settled(jax.freeze(ref)) for ref in refs), *found
    options |= fused
    if updated:
        from jaxkv_kernels.triton.runtime.result_parameters import with_result_parameters

        # In jax-triton 0.3, an updated array is also a result, and every result has a parameter.
        options["kernel"] = with_result_parameters(kernel, len(updated))
        options["input_output_aliases"] = {len(operands) + i: len(results) + i for i in range(len(updated))}
    shapes = *results, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in updated)
    found = jax_triton.triton_call(*operands, *updated, out_shape=shapes, **options)
    return *(_settled(array) for array in found[len(results) :]), *found[: len(results)]


@cache
def _jax_triton() -> ModuleType:
    """The package jax-triton, which works with jax 0.12 after this call.

    JAX calls a primitive's rule for the elimination of dead code with the outputs that are used and the equation.
    Since 0.12, it passes the inputs that are live between these two, but the rule of jax-triton 0.4.1 has no parameter
    for them.  That rule keeps every call, so it needs none.  A rule with three parameters is left alone.
    """
    import jax_triton
    from jax._src.interpreters import partial_eval

    primitive = jax_triton.triton_lib.triton_kernel_call_p
    rule: Any = partial_eval.dce_rules.get(primitive)
    if jax.__version_info__ >= (0, 12) and rule and len(inspect.signature(rule).parameters) == 2:
        partial_eval.dce_rules[primitive] = lambda used_outs, live_ins, eqn: rule(used_outs, eqn)
    return jax_triton


@cache
def _takes_refs() -> bool:
    """Whether jax-triton accepts a `jax.Ref` and updates it, as version 0.4 does."""
    return "out_type" in inspect.signature(_jax_triton().triton_call).parameters


def _settled(updated: jax.Array) -> jax.Array:
    # If a scan stacks such results, XLA must not optimise across the in-place update; see `freeze` of mosaic_gpu.
    return jax.lax.optimization_barrier(updated)
