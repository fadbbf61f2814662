"""How every kernel of this package is built and launched: for the GPU, or for Pallas's interpreter."""

from functools import wraps
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def kernel(
    body, *, interpret: bool, auto_barriers: bool = True, reduction_bytes: int = 0, waits: bool = False, **spec
) -> Any:
    """`plgpu.kernel` with the options that all kernels here share.

    Kernels use programmatic dependent launch: the GPU prepares a launch while the previous kernel is still running,
    which saves a microsecond.  The body therefore first waits for the previous kernel.  With `waits`, the body calls
    `wait_for_previous` itself, and may do work before that.

    Without `auto_barriers`, loads and stores do not wait for the other warps of the warpgroup: the kernel must order a
    thread's reads after other threads' writes itself.  `reduction_bytes` of shared memory are used by reductions over
    rows; reductions over columns stay within a quad of lanes and need none.
    """
    params: Any = plgpu.InterpretGPUParams(detect_races=True) if interpret else None

    @wraps(body)
    def waiting(*refs, **scratch):
        wait_for_previous(interpret=interpret)
        body(*refs, **scratch)

    return plgpu.kernel(
        body if waits else waiting,
        interpret=params,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=reduction_bytes, unsafe_no_auto_barriers=not auto_barriers
        ),
        **spec,
    )


def wait_for_previous(*, interpret: bool) -> None:
    """Waits until all previous kernels have ended and their stores are visible."""
    if not interpret:
        plgpu.griddepcontrol_wait()


def pdl_launch_dependents(read_early, *, interpret: bool) -> None:
    """Lets CTAs of the next kernel start where CTAs of this one have ended (programmatic dependent launch).

    `read_early` is the only array that the next kernel may read before it calls `wait_for_previous`.  It must be an
    operand of this kernel: then whatever produced it has ended.  Only kernels built by `kernel` may consume the results
    of a kernel that calls this: XLA's own kernels are launched early as well, and may load operands that they take for
    constants before they wait.
    """
    del read_early
    if not interpret:
        plgpu.griddepcontrol_launch_dependents()


def freeze(ref) -> jax.Array:
    """The contents of `ref`, an operand that a kernel wrote to."""
    # Without the barrier, where a scan stacks such results, rows that the kernel did not write came back as zeros
    # (H200, jax 0.11.2).
    return jax.lax.optimization_barrier(jax.freeze(ref))
