"""How the kernels of this package are built and launched, for the GPU or for Pallas's interpreter."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.ptx.inline import emit


def kernel(
    body, *, interpret: bool, auto_barriers: bool = True, reduction_bytes: int = 0, waits: bool = False, **spec
) -> Any:
    """`plgpu.kernel` with the options that all kernels here share.

    Kernels use programmatic dependent launch: the GPU prepares a launch while the previous kernel is still running,
    which saves a microsecond.  The body therefore first waits for the previous kernel.  With `waits`, the body calls
    `wait_for_previous` itself, and may do work before that.

    Without `auto_barriers`, loads and stores do not wait for the other warps of the warpgroup.  The kernel itself must
    then order reads of a thread after writes of other threads.  `reduction_bytes` of shared memory are used by
    reductions over rows; reductions over columns stay within a quad of lanes and need none.
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


def body_of_ptx(
    code: Callable[[], Iterable[str]], stand_in: Callable[..., None], *, interpret: bool
) -> Callable[..., None]:
    """The body of a kernel that consists of inline PTX, without scalars, and ends with one reference to shared memory.

    Args:
      code: makes the PTX, whose operands are pointers to the kernel's references.
      stand_in: for the interpreter: `stand_in(*refs)` stores the results, without the reference to shared memory.
      interpret: whether the kernel is interpreted.
    """

    def body(*refs):
        if interpret:
            stand_in(*refs[:-1])
            return

        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(refs),))
        def store(_, refs):
            emit(code(), refs)

        store(list(refs))

    return body


def named[T](fields: type[T], scratch: dict[str, Any]) -> T:
    """A NamedTuple of the scratch memory that has the names of its fields; None where a kernel has no such memory."""
    return fields(**{name: scratch.get(name) for name in fields.__annotations__})


def wait_for_previous(*, interpret: bool) -> None:
    """Waits until all previous kernels have finished and their stores are visible."""
    if not interpret:
        plgpu.griddepcontrol_wait()


def pdl_launch_dependents(read_early, *, interpret: bool) -> None:
    """Allows CTAs of the next kernel to start as CTAs of this one finish (programmatic dependent launch).

    The next kernel may read nothing but `read_early`, an array or several, before it calls `wait_for_previous`.  They
    must be operands of this kernel, so that the kernels that produced them have finished.  Only kernels built by
    `kernel` may consume the results of a kernel that calls this.  XLA's own kernels are also launched early, and may
    load operands that they assume to be constant before they wait.
    """
    del read_early
    if not interpret:
        plgpu.griddepcontrol_launch_dependents()


def thaw(buffer) -> Any:
    """A reference to an array, or to each array of a pair, for kernels that update it in place.

    XLA makes one fusion of a custom call and of slices that are its operands, and forgets that the call updates them:
    without the barrier, the result for a slice of another array is memory that nothing was written to (seen on an H100
    with jax 0.11.2).
    """
    return jax.tree.map(lambda array: jax.new_ref(jax.lax.optimization_barrier(array)), buffer)


def freeze(ref) -> Any:
    """The contents of `ref`, or of a pair of references, after a kernel has written to it."""
    # Without the barrier, if a scan stacks such results, rows that the kernel does not write become zeros (seen on an
    # H200 with jax 0.11.2).
    return jax.tree.map(lambda each: jax.lax.optimization_barrier(jax.freeze(each)), ref)
