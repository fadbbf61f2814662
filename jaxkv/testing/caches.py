"""Caches full of NaN, and comparison of caches: which layer, block, head, token and field differs."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.testing.buffers import stored_fields, to_bytes, to_cache
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import SHORT_NAMES

# Not a type parameter of the functions: pdoc resolves the names in quoted annotations in this module.
Kind = TypeVar("Kind", bound=Entry)

SHOWN = 4
"""Entries that a message lists; the others are only counted."""
CHUNK = 2**26
"""Bytes of large buffers that are compared at once."""


def poisoned(layout: "jaxkv.CacheLayout[Kind]") -> "jaxkv.KVCache[Kind]":
    """A cache all of whose bytes are 0xff: the values and the scales of every format are NaN, and integers are -1.

    Write entries into it, and run an operation that reads them: what the operation reads besides becomes NaN.

    Args:
      layout: the layout of the cache.

    Raises:
      ValueError: `layout` is not a CacheLayout.
    """
    if not isinstance(layout, jaxkv.CacheLayout):
        raise ValueError(f"`layout` is a {type(layout).__name__}: expected a CacheLayout, such as `cache.layout`")
    return to_cache(layout, np.full(layout.nbytes, 0xFF, np.uint8))


def assert_caches_equal(actual: jaxkv.KVCache, expected: jaxkv.KVCache, *, padding: bool = False) -> None:
    """Asserts that two caches hold the same entries, bit for bit, in every layer, block, head and token.

    Their layouts may differ, also in the dtype of the buffer: an entry is compared field by field, wherever it lies.

    Args:
      actual: the cache to check.
      expected: a cache of the same entry, layers, blocks, block size and heads.
      padding: whether all other bytes must be equal, too: those within entries that no field uses, and those between
        entries, such as padding and the other groups of a packed block.  The layouts must then be equal.

    Raises:
      AssertionError: entries differ.  The message has their number, and for the first of them the layer, block, head,
        token and field, and both values with their bits.
      ValueError: an argument is not a cache, or the caches cannot be compared.
    """
    for name, cache in {"actual": actual, "expected": expected}.items():
        if not isinstance(cache, jaxkv.KVCache):
            raise ValueError(f"`{name}` is a {type(cache).__name__}: expected a KVCache")
    names = "entry", "num_layers", "num_blocks", "block_size", "num_heads"
    for name in names:
        ours, theirs = (getattr(cache.layout, name) for cache in (actual, expected))
        if ours != theirs:
            raise ValueError(f"`{name}` of the layouts is {ours} and {theirs}: caches of equal sizes can be compared")
    if padding and actual.layout != expected.layout:
        raise ValueError(
            f"`padding` is True, and the layouts differ (strides {actual.layout.strides} and "
            f"{expected.layout.strides}): only bytes of entries can be compared"
        )
    found = differences(actual.layout, to_bytes(actual), to_bytes(expected), expected.layout, padding=padding)
    if found:
        raise AssertionError(f"the caches differ: {found}")


def differences(
    layout: jaxkv.CacheLayout,
    actual: np.ndarray,
    expected: np.ndarray,
    expected_layout: jaxkv.CacheLayout | None = None,
    *,
    padding: bool,
    note: Callable[[int, int, int], str] = lambda layer, block, token: "",
) -> str:
    """How the bytes of a cache, uint8 [nbytes], differ from those of another; empty if they do not.

    `expected_layout` is by default the same layout.  `note` returns what to add to a line, given the layer, block and
    token of an entry that differs.
    """
    ours = stored_fields(layout, actual)
    theirs = {field.name: view for field, view in stored_fields(expected_layout or layout, expected)}
    pairs = [(field, view, theirs[field.name]) for field, view in ours if field.name != "padding"]
    wrong = np.logical_or.reduce([(a != b).any(axis=-1) for _, a, b in pairs])
    lines, places = [], np.argwhere(wrong).tolist()
    for place in places[:SHOWN]:
        layer, block, _, token = place
        parts = []
        for field, a, b in pairs:
            a, b = (np.ascontiguousarray(view[tuple(place)]) for view in (a, b))
            if not np.array_equal(a, b):
                parts.append(f"{field.name}{_values(field.dtype, a, b)}")
        lines.append(f"{name_of(*place)}{note(layer, block, token)}: {', '.join(parts)}")
    found = []
    if places:
        more = [f"and {len(places) - SHOWN:,} more"] if len(places) > SHOWN else []
        found.append("\n    ".join([f"{len(places):,} of {wrong.size:,} entries differ", *lines, *more]))
    if padding and (stray := _stray(layout, actual, expected)).size:
        found.append(
            f"bytes that belong to no entry (padding, or other groups of a packed block) differ: {stray.size:,}, first "
            f"{byte_name(layout, int(stray[0]))}: {actual[stray[0]]:#04x}, expected {expected[stray[0]]:#04x}"
        )
    return "\n  ".join(found)


def name_of(layer: int, block: int, head: int, token: int) -> str:
    """An entry in words."""
    return f"layer {layer}, block {block}, head {head}, token {token}"


def byte_name(layout: jaxkv.CacheLayout, byte: int) -> str:
    """What a byte of a cache belongs to, in words."""
    mark = np.zeros(layout.nbytes, bool)
    mark[byte] = True
    for field, view in stored_fields(layout, mark):
        for *place, index in np.argwhere(view).tolist():
            value = "" if field.name == "padding" else f"[{index * field.count // field.nbytes}]"
            return f"{field.name}{value} of {name_of(*place)}"
    return f"byte {byte:,} of the buffer, which is between entries"


def _stray(layout: jaxkv.CacheLayout, actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The bytes that differ and belong to no field of an entry but its padding."""
    differ = np.zeros(layout.nbytes, bool)
    for places in _differing(actual, expected):
        differ[places] = True
    for field, view in stored_fields(layout, differ):
        if field.name != "padding":
            view[...] = False
    return np.flatnonzero(differ)


def _differing(actual: np.ndarray, expected: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, actual.size, CHUNK):
        yield begin + np.flatnonzero(actual[begin : begin + CHUNK] != expected[begin : begin + CHUNK])


def _values(dtype: str, actual: np.ndarray, expected: np.ndarray) -> str:
    """The first value of a field that differs, given the bytes of the field: its index, both values, how many more."""
    number = np.dtype(jnp.dtype(SHORT_NAMES.get(dtype, dtype)))
    a, b = (x.view(f"u{number.itemsize}") for x in (actual, expected))
    wrong = np.flatnonzero(a != b)
    first, digits = wrong[0], 2 * number.itemsize + 2
    shown = [
        f"{float(x.view(number)[first]):.6g} ({bits[first]:#0{digits}x})" for x, bits in ((actual, a), (expected, b))
    ]
    return f"[{first}] is {shown[0]}, expected {shown[1]} ({wrong.size} of {a.size} differ)"
