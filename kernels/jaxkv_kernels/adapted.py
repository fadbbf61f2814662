"""Adapters from records of calls to functions with an argument per field."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from jaxkv_kernels.calls import Call


def arguments(call: Call[Any]) -> dict[str, Any]:
    """The fields of a call by name."""
    found = {field.name: getattr(call, field.name) for field in fields(call)}  # type: ignore[arg-type]
    if "q_len" in found:
        found["tokens"] = found.pop("q_len")
    return found


def run(function: Callable[..., Any], call: Call[Any]) -> Any:
    """`function`, called with the fields of a call."""
    return function(**arguments(call))


def reasons(function: Callable[..., Iterable[str]]) -> Callable[[Call[Any]], Iterable[str]]:
    """Reasons against a call, of a function of two mappings."""
    return lambda call: function(arguments(call), arguments(call))
