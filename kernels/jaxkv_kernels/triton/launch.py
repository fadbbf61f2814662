"""Calling a Triton kernel from JAX: one interface to jax-triton 0.3, jax-triton 0.4 and Triton's interpreter."""

import inspect
import re
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.generations import AMD
from jaxkv_kernels.triton.interpreter import interpret, interpreting
from jaxkv_kernels.triton.language import tl, triton


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
        return interpret(kernel, operands, results, updated, grid, constants)
    return _through_jax_triton(kernel, operands, results, updated, grid, warps, stages, constants)


def capability() -> int | str:
    """The GPU's compute capability times ten (90 for Hopper), or the architecture of an AMD GPU, such as "gfx942".

    In the interpreter, it is that of the oldest supported NVIDIA GPU.
    """
    return 80 if interpreting.value else _capability()


def _capability() -> int | str:
    found = jax.devices()[0].compute_capability
    return found if found in AMD else round(10 * float(found))


_TYPES = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "uint8": tl.uint8,
    "int8": tl.int8,
}


def element_type(dtype) -> tl.dtype:
    """Triton's type for elements of `dtype`, to be passed to kernels as a constant."""
    return _TYPES[str(jnp.dtype(dtype))]


def _through_jax_triton(kernel, operands, results, updated, grid, warps, stages, constants):
    jax_triton = _jax_triton()
    if _capability() in AMD:
        _pass_num_ctas()
    options: dict[str, Any] = {"kernel": kernel, "grid": grid, "num_warps": warps, "num_stages": stages, **constants}
    # Set explicitly, because Triton 3.10 will no longer fuse products and sums by default, and 3.9 warns about it.
    fused = {"enable_fp_fusion": True}
    updated = jax.lax.optimization_barrier(updated)  # may be slices of other arrays; see `thaw` of mosaic_gpu
    if _takes_refs():
        refs = [jax.new_ref(array) for array in updated]
        options["backend_options"] = fused
        found = jax_triton.triton_call(*operands, *refs, out_type=tuple(results), **options)
        return *(_settled(jax.freeze(ref)) for ref in refs), *found
    options |= fused
    if updated:
        # In jax-triton 0.3, an updated array is also a result, and every result has a parameter.
        options["kernel"] = _with_result_parameters(kernel, len(updated))
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
def _pass_num_ctas() -> None:
    """Passes `num_ctas` to Triton's backend for AMD GPUs, as Triton's own compiler does.

    Triton 3.7 to 3.9 read it from the metadata of a kernel, but jax-triton 0.4.1 calls the backend with empty ones.
    """
    from triton.backends.amd.compiler import HIPBackend

    make_llir = HIPBackend.make_llir

    def with_num_ctas(src, metadata, options):
        metadata.setdefault("num_ctas", options.num_ctas)
        return make_llir(src, metadata, options)

    HIPBackend.make_llir = staticmethod(with_num_ctas)


@cache
def _takes_refs() -> bool:
    """Whether jax-triton accepts a `jax.Ref` and updates it, as version 0.4 does."""
    return "out_type" in inspect.signature(_jax_triton().triton_call).parameters


def _settled(updated: jax.Array) -> jax.Array:
    # If a scan stacks such results, XLA must not optimise across the in-place update; see `freeze` of mosaic_gpu.
    return jax.lax.optimization_barrier(updated)


@cache
def _with_result_parameters(kernel: Any, count: int) -> Any:
    """`kernel` with `count` additional, unused parameters between its pointers and its constants.

    jax-triton 0.3 passes operands that are updated in place twice: also as results.
    """
    from triton.runtime.jit import KernelParam

    twin = triton.JITFunction(kernel.fn)
    index, first = next((i, parameter.name) for i, parameter in enumerate(twin.params) if parameter.is_constexpr)
    names = [f"_updated{i}" for i in range(count)]
    source, found = re.subn(rf"\b{first}\s*:", f"{', '.join(names)}, {first}:", twin.src, count=1)
    assert found, f"{kernel} has no parameter {first} with an annotation"
    twin._unsafe_update_src(source)
    # jax-triton and Triton's compiler read the parameters from these two lists.
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    twin.params[index:index] = [KernelParam(index + i, one, False, False) for i, one in enumerate(parameters)]
    twin.arg_names[index:index] = names
    return twin


def incremented(x):
    """x + 1 for int32 [16]: a minimal kernel that, like others, updates an operand in place and has a constant."""
    return launch(_increment, (), updated=(x,), grid=(1,), warps=1, COUNT=16)[0]


@triton.jit
def _increment(x, COUNT: tl.constexpr):
    at = x + tl.arange(0, COUNT)
    tl.store(at, tl.load(at) + 1)
