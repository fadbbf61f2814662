"""Which configuration a kernel runs with: its default, or one that is being tried.

A kernel that can be tuned has a frozen dataclass of its tunable numbers, whose fields' defaults are the best that was
found on the devices that it was measured on.  `jaxkv bench --tune` tries others:

    with using(KVConfig(stages=2)):
        jaxkv.decode_kv(...)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

# Part of the key of jit's caches, so that a function is traced again for another configuration.
_overrides = jax.make_user_context(default_value=())


def configuration[Config](kind: type[Config]) -> Config:
    """The configuration of type `kind` that is in use: the innermost of `using`, or else the default."""
    return next((config for config in _overrides.value if type(config) is kind), kind())


@contextmanager
def using(*configs: Any) -> Iterator[None]:
    """Within it, kernels that are traced use `configs` in place of their defaults."""
    with _overrides((*configs, *_overrides.value)):
        yield


def require(ok: bool, config: Any, field: str, expected: str) -> None:
    """ValueError with the field's value and what is `expected` of it, unless `ok`."""
    if not ok:
        name = type(config).__name__
        raise ValueError(f"`{field}` of {name} is {getattr(config, field)!r}: expected {expected}")
