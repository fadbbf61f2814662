"""JSON objects from files of unknown origin, whose values are checked when they are read."""

import json
from collections import Counter
from collections.abc import ItemsView, Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any

REQUIRED: Any = object()
MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 3.4e38
"""The largest number that is accepted, because models compute in float32."""
MOST_DIGITS = 1000
_shown = Repr(maxstring=200, maxother=200).repr
"""Formats a value for a message; long ones are shortened."""


class JsonObject:
    """A JSON object from a file.  Errors are one line that names the file, the key, its value and what is expected.

    A key with a `default` may be absent.  It may be null only if the default is None.
    """

    def __init__(self, values: Any, source: str, parent: str = "", names: Mapping[str, str] | None = None):
        if not isinstance(values, dict):
            raise ValueError(f"{source} holds {_shown(values)}: expected a JSON object")
        self._values = values
        self._source = source
        self._parent = parent
        self._names = names or {}

    @classmethod
    def read(cls, file: Path) -> "JsonObject":
        """Reads `file`, which must hold a single JSON object without duplicate keys; otherwise ValueError."""
        try:
            values = json.loads(file.read_bytes(), object_pairs_hook=_without_duplicates, parse_int=_integer)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a JSON file that can be read: {error}") from None
        return cls(values, str(file))

    def renamed(self, names: Mapping[str, str]) -> "JsonObject":
        """This object under other names: `names` maps a key to the name that the file, and errors, have for it."""
        return JsonObject(self._values, self._source, self._parent, names)

    def __contains__(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self._values.get(self._key(key)) is not None

    def value(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of the key, unchecked, or the default; ValueError if the key is absent and has no default."""
        if self._key(key) not in self._values and default is REQUIRED:
            raise ValueError(f"{self._source} has no {self._name(key)}, which is required")
        return self._values.get(self._key(key), default)

    def error(self, key: str, expected: str) -> ValueError:
        """The error for a key whose value is not as `expected`."""
        held = _shown(self._values.get(self._key(key)))
        return ValueError(f"{self._source}: {self._name(key)} is {held}: expected {expected}")

    def _name(self, key: str) -> str:
        """The key for a message, escaped as by `repr`, because it may hold any characters."""
        return f"`{repr(self._parent + self._key(key))[1:-1]}`"

    def _key(self, key: str) -> str:
        return self._names.get(key, key)

    def integer(self, key: str, *, least: int = 1) -> int:
        """An int of at least `least` that fits in int32."""
        value = self.value(key)
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            raise self.error(key, f"an integer from {least} to {MAX_INTEGER}")
        return value

    def number(self, key: str, *, least: float | None = None, above: float = 0, default: Any = REQUIRED) -> Any:
        """A float within the range of float32: at least `least` if that is given, otherwise larger than `above`."""
        value = self.value(key, default)
        if value is default:
            return value
        low, bound = (f"{above} <", above) if least is None else (f"{least} <=", least)
        inside = type(value) in (int, float) and (value > bound or value == least) and value <= MAX_NUMBER
        if not inside:
            raise self.error(key, f"a number, {low} {self._name(key)} <= {MAX_NUMBER}")
        return float(value)

    def flag(self, key: str, *, default: Any = REQUIRED) -> bool:
        """The bool of the key."""
        return self.choice(key, False, True, default=default)

    def choice(self, key: str, *expected: Any, default: Any = REQUIRED) -> Any:
        """The value of the key, which must be one of `expected`.  Types must agree, too: 0 is not False."""
        value = self.value(key, default)
        if value is not default and not any(type(value) is type(one) and value == one for one in expected):
            raise self.error(key, " or ".join(map(repr, expected)))
        return value

    def per_layer(self, key: str, *expected: Any, count: int) -> list[Any]:
        """The list of the key, which must have one of `expected` for each of `count` layers."""
        values = self.value(key)
        if not isinstance(values, list) or len(values) != count or any(value not in expected for value in values):
            raise self.error(key, f"{' or '.join(map(repr, expected))} for each of {count} layers")
        return values

    def spelling(self, *keys: str) -> str:
        """The name under which the object has a value: the first of `keys` that it contains, or `keys[0]` if none.

        ValueError if two of the keys have different values.
        """
        used = [key for key in keys if key in self]
        for other in used[1:]:
            if self.value(other) != self.value(used[0]):
                raise self.error(other, f"the same as {self._name(used[0])}")
        return (used or keys)[0]

    def child(self, key: str) -> "JsonObject":
        """The JSON object that is the value of the key."""
        values = self.value(key)
        if not isinstance(values, dict):
            raise self.error(key, "an object")
        return JsonObject(values, self._source, f"{self._parent}{self._key(key)}.")

    def items(self) -> ItemsView[str, Any]:
        """All keys with their values, unchecked."""
        return self._values.items()


def _integer(digits: str) -> int | float:
    """An int; infinity if it has thousands of digits, which Python does not convert and no key accepts."""
    return int(digits) if len(digits) <= MOST_DIGITS else float(digits)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} appears more than once")
    return values
