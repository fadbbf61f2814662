"""Calling a Triton kernel from JAX: one function over jax-triton 0.3, jax-triton 0.4 and Triton's interpreter."""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax

from jaxkv_kernels.triton.runtime.interpreting import interpreting


def launch(
    kernel: Any,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    updated: jax.Array | None = None,
    grid: tuple[int, ...],
    warps: int = 4,
    stages: int = 3,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs `kernel(*operands, updated, *results, **constants)` on a grid of programs.

    Args:
      kernel: made by `triton.jit`.  Its parameters are pointers in that order (none for `updated` where there is none),
        then constants.
      operands: arrays that the kernel reads.  What may be traced comes as an array of one element.
      results: shapes and dtypes of the arrays that it writes, all of each.
      updated: an array that it may also write to, any part of it, in place where the array is not used afterwards.
      grid: numbers of programs, at least 1 each, along up to three axes.
      warps: a program.
      stages: of loops that Triton pipelines.
      constants: of the kernel, by name: hashable.

    Returns:
      `updated` with what the kernel wrote to it (if there is one), then the results.
    """
    if interpreting.value:
        from jaxkv_kernels.triton.runtime.interpreter import interpret

        return interpret(kernel, operands, results, updated, grid, constants)
    return _through_jax_triton(kernel, operands, results, updated, grid, warps, stages, constants)


def capability() -> int:
    """The GPU's compute capability times ten (90: Hopper); the interpreter passes for the oldest that is taken."""
    return 80 if interpreting.value else _capability()


def _capability() -> int:
    return round(10 * float(jax.devices()[0].compute_capability))


def _through_jax_triton(kernel, operands, results, updated, grid, warps, stages, constants):
    import jax_triton

    options: dict[str, Any] = {"kernel": kernel, "grid": grid, "num_warps": warps, "num_stages": stages, **constants}
    # Asked for, as Triton 3.10 will no longer fuse products and sums by itself, and 3.9 warns of that.
    fused = {"enable_fp_fusion": True}
    if _takes_refs():
        options["backend_options"] = fused
        if updated is None:
            return tuple(jax_triton.triton_call(*operands, out_type=tuple(results), **options))
        ref = jax.new_ref(updated)
        found = jax_triton.triton_call(*operands, ref, out_type=tuple(results), **options)
        return _settled(jax.freeze(ref)), *found
    options |= fused
    if updated is None:
        return tuple(jax_triton.triton_call(*operands, out_shape=tuple(results), **options))
    from jaxkv_kernels.triton.runtime.result_parameter import with_result_parameter

    # The updated array counts as a result, too, and every result has a parameter.
    options["kernel"] = with_result_parameter(kernel)
    *found, after = jax_triton.triton_call(
        *operands, updated,
        out_shape=(*results, jax.ShapeDtypeStruct(updated.shape, updated.dtype)),
        input_output_aliases={len(operands): len(results)},
        **options,
    )  # fmt: skip
    return _settled(after), *found


@cache
def _takes_refs() -> bool:
    """Whether jax-triton is of the kind that updates `jax.Ref`s: 0.4."""
    import jax_triton

    return "out_type" in inspect.signature(jax_triton.triton_call).parameters


def _settled(updated: jax.Array) -> jax.Array:
    # As for other kernels that update operands: where a scan stacks such results, XLA must not look through them.
    return jax.lax.optimization_barrier(updated)
