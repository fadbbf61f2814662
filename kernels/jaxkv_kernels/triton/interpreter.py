"""Triton's interpreter: whether kernels run in it, and running them there, on NumPy arrays, in a JAX program."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import numpy as np

# The value is part of the keys of jit's caches, so a function is traced once for the GPU and once for the interpreter.
interpreting = jax.make_user_context(default_value=False)
"""`with interpreting(True):` runs the kernels in the interpreter: slow, on any machine, for tests.

Triton decides whether to interpret a kernel when the kernel is defined, so TRITON_INTERPRET=1 must be set before the
kernels are imported.
"""


@cache
def _thread() -> ThreadPoolExecutor:
    """The thread that runs the kernels.  XLA runs callbacks on threads that, unlike GPUs, treat denormal numbers as 0.

    It must first be called while tracing, because a thread that one of XLA's starts inherits this mode.
    """
    thread = ThreadPoolExecutor(max_workers=1)
    thread.submit(int).result()
    return thread


def interpret(kernel, operands, results, updated, grid, constants) -> tuple[jax.Array, ...]:
    """Interprets a kernel; the arguments are those of `launch`.

    Bytes of the results that the kernel does not write are 0xFF, which makes floats NaN.
    """
    thread = _thread()
    shapes = (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated), *results)

    def run(*arrays):
        arrays = [np.array(array) for array in arrays]
        made = [_poison(x) for x in results]
        memory = [_Memory(array) for array in (*arrays, *made)]
        thread.submit(_run_quietly, kernel[grid], memory, constants).result()
        return (*arrays[len(operands) :], *made)

    return tuple(jax.pure_callback(run, shapes, *operands, *updated))


def _run_quietly(program, memory, constants) -> None:
    with np.errstate(all="ignore"):  # GPUs do not warn about inf and NaN
        program(*memory, **constants)


def _poison(x: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.full(x.size * x.dtype.itemsize, 0xFF, np.uint8).view(x.dtype).reshape(x.shape)


class _Memory:
    """A contiguous NumPy array with those methods of a PyTorch tensor that the interpreter calls."""

    def __init__(self, array: np.ndarray):
        self._array = array

    @property
    def dtype(self) -> str:
        return str(self._array.dtype)

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def size(self) -> tuple[int, ...]:
        return self._array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self._array.itemsize for step in self._array.strides)

    def storage_offset(self) -> int:
        return 0

    # The interpreter copies a tensor's storage to the host and back.  This array is on the host, so each step returns
    # it.
    def _itself(self, *args: Any, **kwargs: Any) -> "_Memory":
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = _itself
