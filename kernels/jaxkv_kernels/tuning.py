"""Which configuration a kernel runs with: its default, or one that is being tried.

The tunable numbers of a kernel are the fields of a frozen dataclass, its configuration.  A default configuration is the
best that was found on the devices that it names.  Another one is used within `using`:

    with using(KVConfig(stages=2)):
        jaxkv.decode_kv(...)

`jaxkv bench --tune` searches the values that a configuration's `SEARCH` lists, per field.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import jax

# Part of the key of jit's caches, so that a function is traced again for another configuration.
_overrides = jax.make_user_context(default_value=())
_recorded: ContextVar[list[Any] | None] = ContextVar("recorded", default=None)


class Configuration(Protocol):
    """A frozen dataclass that validates its fields: ValueError for one that no kernel can be built with."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]]
    """Values that are worth trying, by the field's name."""


def configuration[Config](default: Config) -> Config:
    """The configuration in use: the innermost one of `using` that has the type of `default`, or else `default`."""
    config = next((config for config in _overrides.value if type(config) is type(default)), default)
    if (recorded := _recorded.get()) is not None and config not in recorded:
        recorded.append(config)
    return config


@contextmanager
def using(*configs: Any) -> Iterator[None]:
    """Within it, kernels that are traced use `configs` in place of their defaults."""
    with _overrides((*configs, *_overrides.value)):
        yield


@contextmanager
def recording() -> Iterator[list[Any]]:
    """Gives a list to which the configurations of all kernels that are traced within it are appended."""
    found: list[Any] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def require(ok: bool, config: Any, field: str, expected: str) -> None:
    """ValueError with the field's value and what is `expected` of it, unless `ok`."""
    if not ok:
        name = type(config).__name__
        raise ValueError(f"`{field}` of {name} is {getattr(config, field)!r}: expected {expected}")
