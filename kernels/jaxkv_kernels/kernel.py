"""Kernels whose modules are imported when they are first called: what they are written in takes time to import."""

import importlib
from collections.abc import Callable
from typing import Any


def operations(package: str, names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """The function of each name, of the module of that name in `package`."""
    return {name: _kernel(package, name) for name in names}


def _kernel(package: str, name: str) -> Callable[..., Any]:
    def run(*args, **kwargs):
        module = importlib.import_module(f"{package}.{name}")
        return getattr(module, name)(*args, **kwargs)

    return run
