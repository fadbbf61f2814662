"""The counterpart of `lanes.py` for Pallas's interpreter, which runs no inline PTX: arrays instead of lanes.

The formats' own conversions replace those of the lanes.  The kernels' code computes which entry goes where.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.formats.bits import corrected_quotient, power_of_two_scale, to_fp8, view_as
from jaxkv_kernels.mosaic_gpu.entries.fields import Field, PartAddress
from jaxkv_kernels.mosaic_gpu.entries.teams import Teams


@dataclass(frozen=True)
class InterpretedLanes:
    """Moves entries in the interpreter, by whole fields; the cache is bytes."""

    teams: Teams

    def buffer(self, buffer):
        """The operand that holds the cache: its bytes, a copy if its dtype is wider."""
        return lax.bitcast_convert_type(buffer, jnp.uint8).reshape(-1)

    def load_values(self, field: Field, ref, i):
        """The values [count] of row i."""
        return ref[i]

    def store_entry(self, field: Field, cache_ref, raw, dtype, keep, index, scale):
        """Encodes and stores values `raw` [count]."""
        del dtype
        own = None
        if field.scales is not None:
            tiles = raw.astype(jnp.float32).reshape(-1, field.tile)
            own, inverse = power_of_two_scale(jnp.abs(tiles).max(axis=1), field.smallest_exponent)
            stored = to_fp8(tiles * inverse[:, None]).reshape(-1)
        elif field.scaled:
            stored = to_fp8(corrected_quotient(raw.astype(jnp.float32), scale))
        else:
            stored = raw.astype(field.stored)

        @pl.when(keep)
        def _():
            _write(cache_ref, field.address, index, stored)
            if own is not None:
                _write(cache_ref, field.scales, index, own)

    def load_entry(self, field: Field, cache_ref, live, index):
        """Stored values [count], and their scales."""
        stored = _dtype(field.stored)
        raw = _read(cache_ref, field.address, index, live, stored, field.count)
        if field.scales is None:
            return raw, None
        own = _read(cache_ref, field.scales, index, live, jnp.dtype(jnp.float32), field.count // field.tile)
        return raw, jnp.repeat(own, field.tile)

    def store_values(self, field: Field, ref, found, i, inside, scale):
        """Stores values [count]."""
        raw, own = found
        factor = own if own is not None else scale
        values = raw if factor is None else raw.astype(jnp.float32) * factor

        @pl.when(inside)
        def _():
            ref[i] = values.astype(ref.dtype)

    def add_weighted(self, field: Field, sums, raw, dtype, weight):
        """`sums` plus values times a weight, [count]; values without weight may be anything."""
        return sums + jnp.where(weight > 0, raw.astype(jnp.float32), 0) * weight

    def zeros(self, field: Field):
        """Zeros [count]."""
        return jnp.zeros(field.count, jnp.float32)

    def store_scaled(self, field: Field, ref, values, factor, i, inside):
        """Stores values [count]."""

        @pl.when(inside)
        def _():
            ref[i] = (values * factor).astype(ref.dtype)

    def store_scalar(self, ref, x, i, inside):
        """Stores a number."""

        @pl.when(inside)
        def _():
            ref[i] = x


def _dtype(name: str) -> Any:
    return jnp.dtype(jnp.float8_e4m3fn if name == "e4m3" else name)


def _first(address: PartAddress, index):
    return jnp.int32(address.first) + sum(i * stride for i, stride in address.terms(index))


def _write(ref, address, index, values):
    found = view_as(values, jnp.dtype(jnp.uint8))
    ref[pl.ds(_first(address, index), found.size)] = found


def _read(ref, address, index, live, dtype, count):
    nbytes = count * dtype.itemsize
    first = jnp.where(live, _first(address, index), 0)
    return jnp.where(live, view_as(ref[pl.ds(first, nbytes)], dtype), jnp.zeros((), dtype))
