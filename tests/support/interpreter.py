"""Pallas's GPU interpreter, and the word of its race detector on every kernel that ran in it."""

from contextlib import contextmanager
from unittest import mock

from jaxkv_kernels.mosaic_gpu import interpreting
from support import quick_jax


@contextmanager
def without_races():
    """Kernels run in the interpreter; AssertionError, or jax 0.12's own error, where one of them races.

    jax 0.11 sets a flag instead of raising, and clears it when the next kernel starts.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    states, kind = [], gpu_callbacks.GPURaceDetectionState

    def remembered(*args, **keywords):
        states.append(kind(*args, **keywords))
        return states[-1]

    gpu_callbacks.reset_gpu_interpret_mode_state()  # a kernel that failed leaves its memory behind
    remembering = mock.patch.object(gpu_callbacks, "GPURaceDetectionState", remembered)
    with remembering, quick_jax.interpreting(), interpreting(True):
        yield
    assert not any(state.races_found for state in states), "a kernel races: what was printed has RACE DETECTED"
