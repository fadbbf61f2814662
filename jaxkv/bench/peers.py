"""`Peer`: an object in a process of its own, which has one of this machine's devices."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from threading import Thread
from typing import Any, Self

VISIBLE, PREALLOCATE = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE"


class Peer:
    """An object in a process of its own.  Calls run one after the other, in the order in which they are begun.

    Use it in a `with` statement, which ends the process.  The process also ends if this one does.

    Args:
      device: the number of its GPU among those that this process may use; None for all of them.  Processes on CPUs
        share them.
      make: makes the object there: a class or a function of a module.
      args: arguments of `make`.
    """

    def __init__(self, device: int | None, make: Callable[..., Any], *args: Any):
        context = multiprocessing.get_context("spawn")  # JAX has threads, which do not survive a fork
        self._process = ProcessPoolExecutor(1, context, _use, (device,))
        self._made = self._process.submit(_make, make, args)

    def begin(self, method: str, *args: Any) -> Future[Any]:
        """Begins a call of a method; its result, or its exception, is that of the future."""
        self._made.result()
        return self._process.submit(_call, method, args)

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method, and returns its result or raises its exception."""
        return self.begin(method, *args).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown(cancel_futures=True)


def share_memory() -> None:
    """Has JAX take memory of GPUs as it needs it, for several processes.  Call it before any device is used."""
    os.environ.setdefault(PREALLOCATE, "false")


_made: list[Any] = []
"""The object of this process."""


def _use(device: int | None) -> None:
    """Called first in the process."""
    if device is not None:
        visible = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = visible.split(",")[device] if visible else str(device)
    share_memory()
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _made.append(make(*args))


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_made[0], method)(*args)
