"""Kernel configurations: a kernel runs with its default or, within `using`, with another one.

The tunable numbers of a kernel are the fields of a frozen dataclass, its configuration.  A default configuration is the
best one found on the devices that its definition names.  Another one is used within `using`:

    with using(KVConfig(stages=2)):
        jaxkv.decode_kv(...)

`jaxkv bench ops --tune` tries the values that a configuration's `SEARCH` lists for each field.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import jax

# The value is part of the key of jit's caches, so that a function is traced again for another configuration.
_overrides = jax.make_user_context(default_value=())
_recorded: ContextVar[list[Any] | None] = ContextVar("recorded", default=None)


class Configuration(Protocol):
    """A frozen dataclass of tunable numbers; ValueError if no kernel can be built with them."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]]
    """Values that are worth trying, by field name."""


def configuration[Config](default: Config) -> Config:
    """The configuration in use: that of the innermost `using` with the type of `default`, otherwise `default`."""
    config = next((config for config in _overrides.value if type(config) is type(default)), default)
    if (recorded := _recorded.get()) is not None and config not in recorded:
        recorded.append(config)
    return config


@contextmanager
def using(*configs: Any) -> Iterator[None]:
    """A context in which kernels are traced with `configs` instead of the default configurations of the same types."""
    with _overrides((*configs, *_overrides.value)):
        yield


@contextmanager
def recording() -> Iterator[list[Any]]:
    """A context that provides a list, to which the configurations of all kernels traced within it are appended."""
    found: list[Any] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def require(ok: bool, config: Any, field: str, expected: str) -> None:
    """Raises ValueError unless `ok`; the message has the field's value and what is `expected`."""
    if not ok:
        name = type(config).__name__
        raise ValueError(f"`{field}` of {name} is {getattr(config, field)!r}: expected {expected}")
