"""`StateEntry`: arrays of fixed shapes, such as the state of a recurrent layer after a token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import Field, Format, Spec, together
from jaxkv_kernels.integers import as_int

STATE_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of the arrays of a state."""

ALIGNMENT = 16
"""Each array begins at a multiple of this many bytes, which GPUs move at once."""

Arrays = tuple[tuple[str, tuple[int, ...], str], ...]
"""The name, shape and dtype of each array of a state."""


class States(Format):
    """The arrays of a state one after the other, in row-major order, each padded to a multiple of 16 bytes.

    They are stored as they are, without conversion.  The format belongs to `StateEntry`, and is not registered: other
    entries cannot have it, and its byte map depends on the arrays.
    """

    name = "state"
    kinds = ()
    dtype = "uint32"

    def __init__(self, arrays: Arrays):
        self._arrays = arrays

    def fields(self, sizes: Mapping[str, int], block_size: int) -> tuple[Field, ...]:
        """The byte map of a state; pages are not split."""
        specs: list[Spec] = []
        for name, shape, dtype in self._arrays:
            spec = name, dtype, math.prod(shape)
            specs.append(spec)
            if padding := -Field(*spec, 0).nbytes % ALIGNMENT:
                specs.append(("padding", "uint8", padding))
        return together(*specs)

    def encode(self, values: Sequence[jax.Array], scales: Sequence[jax.Array | None]) -> jax.Array:
        """The bytes of values [..., n_i], converted to the dtypes of the arrays, as uint32."""
        rows = []
        for x, (_, _, dtype) in zip(values, self._arrays, strict=True):
            bits = view_as(x.astype(dtype), f"uint{8 * jnp.dtype(dtype).itemsize}")
            padding = -x.shape[-1] % (ALIGNMENT // bits.dtype.itemsize)
            rows.append(view_as(jnp.pad(bits, [(0, 0)] * (x.ndim - 1) + [(0, padding)]), self.dtype))
        return jnp.concatenate(rows, axis=-1)

    def decode(self, row: jax.Array, sizes: Mapping[str, int], scales, dtype=None) -> list[jax.Array]:
        """Values [..., n_i] of `dtype`, or each of its own dtype if that is None."""
        stored = {field.name: field for field in self.fields(sizes, 1)}
        values = []
        for field in (stored[name] for name in sizes):
            whole = field.nbytes % row.dtype.itemsize == 0
            values.append(field.read(row if whole else view_as(row, jnp.uint8)))
        return values if dtype is None else [x.astype(dtype) for x in values]


@dataclass(frozen=True, init=False, repr=False)
class StateEntry(Entry):
    """A state: named arrays of fixed shapes, such as the convolution and SSM states of a Mamba layer.

        StateEntry({"conv": ((4, 128), "float32"), "ssm": ((8, 64, 64), "float32")})

    Layers that keep one state per request instead of an entry per token are a group whose rate is the block size of its
    table (see `jaxkv.Group`).

    Args:
      arrays: the shape and the dtype (float32, bfloat16 or float16) of each array, by name.

    Raises:
      ValueError: there are no arrays, or a name, shape or dtype is invalid.
    """

    arrays: Arrays

    formats = (States.name,)  # type: ignore[bad-override]

    def __init__(self, arrays: Mapping[str, tuple[Sequence[int], Any]]):
        object.__setattr__(self, "format", States.name)
        object.__setattr__(self, "arrays", _checked(arrays))

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `__init__`."""
        return {"arrays": {name: (shape, dtype) for name, shape, dtype in self.arrays}}

    def __repr__(self):
        return f"StateEntry({ {name: (shape, dtype) for name, shape, dtype in self.arrays} })"

    @classmethod
    def typical(cls, format: str) -> "StateEntry":
        """The states of a small layer with the gated delta rule: 4 heads of queries and keys, and 8 of values."""
        return cls({"conv": ((3, 256), "float32"), "delta": ((8, 16, 16), "float32")})

    @property
    def named_sizes(self) -> dict[str, int]:
        """The number of values of each array, by name."""
        return {name: math.prod(shape) for name, shape, _ in self.arrays}

    @property
    def description(self) -> list[Any]:
        """The arrays, for fingerprints."""
        return [type(self).__name__, self.format, *map(list, self.arrays)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array, by name."""
        return {name: shape for name, shape, _ in self.arrays}

    def named(self, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Arrays [T, ...] of the values of T states, in order, as arrays [T, *shape] by name."""
        pairs = zip(self.shapes.items(), arrays, strict=True)
        return {name: x.reshape(x.shape[0], *shape) for (name, shape), x in pairs}

    @cached_property
    def codec(self) -> Format:
        """The format of these arrays."""
        return States(self.arrays)


def _checked(arrays) -> Arrays:
    """The arrays as names, tuples of Python ints, and names of dtypes; ValueError if they are invalid."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise ValueError(f"`arrays` is {arrays!r}: expected one or more names with the shape and dtype of each array")
    found = []
    for name, about in arrays.items():
        if not isinstance(name, str) or not name or name == "padding":
            raise ValueError(f"`arrays` has the name {name!r}: expected a string that is not empty, nor 'padding'")
        if not isinstance(about, Sequence) or len(about) != 2 or not isinstance(about[0], Sequence):
            raise ValueError(f"`arrays[{name!r}]` is {about!r}: expected a shape and a dtype")
        shape = tuple(as_int(n) or 0 for n in about[0])
        if min(shape, default=1) < 1:
            raise ValueError(f"`arrays[{name!r}]` has shape {about[0]!r}: expected positive ints")
        try:
            dtype = str(jnp.dtype(about[1]))
        except TypeError:
            dtype = repr(about[1])
        if dtype not in STATE_DTYPES:
            raise ValueError(f"`arrays[{name!r}]` has dtype {dtype}: expected one of {', '.join(STATE_DTYPES)}")
        found.append((name, shape, dtype))
    return tuple(found)
