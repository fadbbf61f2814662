"""Pallas's GPU interpreter: runs it faster, with its race detector on every kernel.

Without changes, interpreted kernels would take a fifth of the time of all tests.  `_quick` replaces private functions
of JAX 0.11 and 0.12 by faster ones with the same results.  Tests fail with a later JAX whose private functions differ.
"""

import functools
import threading
from contextlib import ExitStack, contextmanager
from unittest import mock

import jax
import numpy as np

from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting


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
    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", remembered), _quick(), interpreting(True):
        yield
    assert not any(state.races_found for state in states), "a kernel races: what was printed has RACE DETECTED"


@contextmanager
def _quick():
    """Runs the interpreter without copies to devices, and compiles each program once.

    The interpreter calls Python in every operation, with arrays that JAX would otherwise copy to a device.  It also
    runs each thread of each CTA as a program of its own, which JAX would otherwise compile again each time.
    """
    from jax._src import callback
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    to_int, lock = shared_memory._to_int, threading.Lock()

    def call(*args, callback, **_):
        return jax.tree.map(np.asarray, callback(*map(np.array, args)))

    def integer(x):
        return x.item() if isinstance(x, np.ndarray | np.generic) else to_int(x)

    @functools.cache
    def compiled(jaxpr, treedef, avals):
        consts, args = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*aval) for aval in avals])
        return jax.jit(thread_map._run, static_argnums=(0,)).trace(jaxpr, consts, *args).lower().compile()

    def run(jaxpr, consts, *args):
        leaves, treedef = jax.tree.flatten((consts, args))
        with lock:
            program = compiled(jaxpr, treedef, tuple((np.shape(x), x.dtype) for x in leaves))
        program(consts, *args)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(callback, "io_callback_impl", call))
        patches.enter_context(mock.patch.object(shared_memory, "_to_int", integer))
        patches.enter_context(mock.patch.object(thread_map, "_run_jaxpr", run))
        yield
