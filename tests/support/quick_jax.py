"""Lowering and interpreting Mosaic GPU kernels, with the same results in less time.

Both would take a third of the time of all tests.  Each function replaces private functions of JAX 0.11 and 0.12; tests
would fail, not pass wrongly, if a later JAX had others.
"""

import functools
import threading
from contextlib import ExitStack, contextmanager
from unittest import mock

import jax
import numpy as np


def _name_of_value(self) -> str:
    """The same string as `ValueSite.__str__`, which verifies the operation and prints everything inside it."""
    from jax.experimental.mosaic.gpu import layout_inference

    text = self.operation.get_asm(skip_regions=True, assume_verified=True)
    kind = layout_inference.VariableType
    letter = {kind.OPERAND: "o", kind.RESULT: "r"}.get(self.type, "a")
    return f"{layout_inference._op_name_regex.match(text).group(0)}:{letter}-{self.index}"


@contextmanager
def lowering():
    """Names variables quickly: the inference of layouts sorts them by name."""
    from jax.experimental.mosaic.gpu import layout_inference

    with mock.patch.object(layout_inference.ValueSite, "__str__", _name_of_value):
        yield


def _call_on_numpy(*args, callback, **_):
    """`io_callback`'s implementation without copies of the arguments to a device."""
    return jax.tree.map(np.asarray, callback(*args))


@contextmanager
def interpreting():
    """Calls back without copies to a device, and compiles one program for all threads that run the same code.

    The interpreter calls back in every operation, and compiles a program for each thread of each CTA.
    """
    from jax._src import callback
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    to_int = shared_memory._to_int

    def integer(x):
        return x.item() if isinstance(x, np.ndarray | np.generic) else to_int(x)

    lock = threading.Lock()

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
        patches.enter_context(mock.patch.object(callback, "io_callback_impl", _call_on_numpy))
        patches.enter_context(mock.patch.object(shared_memory, "_to_int", integer))
        patches.enter_context(mock.patch.object(thread_map, "_run_jaxpr", run))
        yield
