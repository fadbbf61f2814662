"""The counterpart of `Lanes` for Pallas's interpreter, which runs no inline PTX: arrays instead of lanes.

The formats' own conversions replace those of the lanes.  The kernels' code computes which entry goes where.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.formats.bits import FP8, corrected_quotient, largest_magnitude, power_of_two_scale, to_fp8, view_as
from jaxkv_kernels.formats.format import SHORT_NAMES
from jaxkv_kernels.formats.fp4 import e4m3_scale, from_e2m1, from_e8m0, to_e2m1, to_e8m0
from jaxkv_kernels.formats.int8 import SMALLEST_SCALE
from jaxkv_kernels.mosaic_gpu.entry_fields import Field, PartAddress
from jaxkv_kernels.rotary import rotated


class InterpretedLanes:
    """Moves entries in the interpreter, by whole fields; the cache is bytes."""

    def buffer(self, buffer):
        """The operand that holds the cache: its bytes, a copy if its dtype is wider."""
        return lax.bitcast_convert_type(buffer, jnp.uint8).reshape(-1)

    def load_values(self, field: Field, ref, i):
        """The values [count] of row i."""
        return ref[i]

    def load_rotated(self, field: Field, ref, angle_ref, i, interleaved):
        """The values [count] of row i, rotated by row i of `angle_ref`."""
        return rotated(ref[i], angle_ref[i], interleaved=interleaved)

    def store_entry(self, field: Field, cache_ref, raw, dtype, keep, index, scale):
        """Encodes and stores values `raw` [count]."""
        del dtype
        own, values = None, raw.astype(jnp.float32)
        if field.scales is not None:
            values = corrected_quotient(values, scale) if field.scaled else values
            stored, own = _quantised(field, values.reshape(-1, field.tile))
        elif field.scaled:
            stored = to_fp8(corrected_quotient(values, scale))
        else:
            stored = to_fp8(values) if field.stored == "e4m3" else raw.astype(field.stored)

        @pl.when(keep)
        def _():
            _write(cache_ref, field.address, index, stored)
            if own is not None:
                _write(cache_ref, field.scales, index, own)
            if field.padding is not None:
                address, count = field.padding
                _write(cache_ref, address, index, jnp.zeros(count, jnp.uint8))

    def load_entry(self, field: Field, cache_ref, live, index):
        """Stored values [count], and their scales."""
        stored = _dtype(field.stored)
        raw = _read(cache_ref, field.address, index, live, stored, field.count // (2 if stored == jnp.uint8 else 1))
        if field.scales is None:
            return raw, None
        rule = field.rule
        own = _read(cache_ref, field.scales, index, live, _dtype(rule.stored), field.num_scales)
        own = own.reshape(rule.columns, -1).T.reshape(-1)
        own = from_e8m0(own) if rule.stored == "e8m0" else own.astype(jnp.float32)
        return raw, own

    def store_values(self, field: Field, ref, found, i, inside, scale):
        """Stores values [count]."""
        raw, own = found
        if field.stored == "e2m1x2":
            values = from_e2m1(raw, own)
        else:
            values = raw if own is None else raw.astype(jnp.float32) * jnp.repeat(own, field.tile)
        values = values if scale is None else values.astype(jnp.float32) * scale

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


def _quantised(field: Field, tiles):
    """Stored values of tiles [n, tile], and their scales as they are stored."""
    rule, amax = field.rule, largest_magnitude(tiles)
    if rule.values == "int8":
        own = jnp.maximum(corrected_quotient(amax, jnp.float32(rule.largest)), SMALLEST_SCALE)
        quotients = corrected_quotient(tiles, own[:, None])
        return jnp.where(jnp.isnan(quotients), 0, jnp.round(quotients)).astype(jnp.int8).reshape(-1), own
    if rule.power_of_two:
        scale, inverse = power_of_two_scale(amax, rule.smallest_exponent, rule.largest)
        own = scale if rule.stored == "float32" else to_e8m0(scale)
        stored = to_e2m1(tiles, scale) if rule.values == "e2m1x2" else to_fp8(tiles * inverse[:, None]).reshape(-1)
    else:
        scale = e4m3_scale(amax, round_up=rule.round_up)
        own, stored = scale.astype(FP8), to_e2m1(tiles, scale)
    return stored, own.reshape(-1, rule.columns).T.reshape(-1)


def _dtype(name: str) -> Any:
    return jnp.dtype(jnp.uint8 if name == "e8m0" else SHORT_NAMES.get(name, name))  # e8m0 has no zero to load


def _first(address: PartAddress, index):
    return jnp.int32(address.first) + sum(i * stride for i, stride in address.terms(index))


def _write(ref, address, index, values):
    found = view_as(values, jnp.dtype(jnp.uint8))
    ref[pl.ds(_first(address, index), found.size)] = found


def _read(ref, address, index, live, dtype, count):
    nbytes = count * dtype.itemsize
    first = jnp.where(live, _first(address, index), 0)
    return jnp.where(live, view_as(ref[pl.ds(first, nbytes)], dtype), jnp.zeros((), dtype))
