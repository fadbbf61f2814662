"""`Tiles` for Pallas's interpreter, which cannot run inline PTX.

Columns are permuted in products as in `quantised_tiles.py`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.quantised_tiles import (
    GROUP,
    INVERSES,
    KEY_GROUP,
    HeadTiles,
    Int8Tiles,
    LatentTiles,
    N,
    Nvfp4Tiles,
    RowTiles,
    Tiles,
)
from jaxkv_kernels.mosaic_gpu.scaling import scale_to_fit
from jaxkv_kernels.mosaic_gpu.sizes import TILE


class Interpreted(Tiles):
    """The part of the interpreted tiles that does not depend on the kind of entry."""

    _stored: Any = jnp.float8_e4m3fn
    """The dtype of values in memory."""

    def _keys(self, raw, stage):
        """The bytes of a stage that begin with its keys, [64, bytes]."""
        raise NotImplementedError

    def _value_bytes(self, raw, stage):
        """The values of a stage, [64, columns]."""
        raise NotImplementedError

    def load_keys(self, raw, stage, group):
        """Returns bytes [64, 64]."""
        return self._keys(raw, stage)[:, KEY_GROUP * group : KEY_GROUP * (group + 1)]

    def load_values(self, raw, stage, step):
        """Returns bytes [16, columns]."""
        return self._value_bytes(raw, stage)[N * step : N * (step + 1)]

    def convert_keys(self, loaded, group):
        """Returns [64, 64]."""
        return self._ordered(lax.bitcast_convert_type(loaded, self._stored).astype(jnp.float16))

    def convert_values(self, loaded, group):
        """Returns [128, 16]."""
        values = lax.bitcast_convert_type(loaded[:, GROUP * group : GROUP * (group + 1)], self._stored)
        return self._by_column(values.astype(jnp.float16))

    def _by_column(self, values):
        """Values [16, 128] of tokens as an operand [128, 16]."""
        values = values.reshape(N, 4, 8, 2, 2).transpose(3, 1, 4, 2, 0)
        return values.reshape(GROUP, N)

    def _ordered(self, x):
        """`x` with every 64 columns permuted to the order of keys."""
        rows, columns = x.shape
        return x.reshape(rows, columns // 64, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(rows, columns)

    def over_warps(self, kind, x, stats, side):
        """Returns [16]."""
        return {"max": jnp.max, "add": jnp.sum}[kind](x, axis=0)

    def store_rows(self, ref, place, parts):
        """Stores tiles [128, 16], in the order of values, as rows whose columns are in their original order."""
        rows = ref.shape[1]
        parts = [part.reshape(2, 4, 2, 8, N).transpose(4, 1, 3, 0, 2).reshape(N, GROUP)[:rows] for part in parts]
        ref[place] = jnp.concatenate(parts, axis=1)

    def load_queries(self, refs, place):
        """Returns an array [16, ...] for each reference."""
        return [jnp.pad(ref[place].astype(jnp.float32), ((0, N - ref.shape[1]), (0, 0))) for ref in refs]

    def store_queries(self, refs, stats, stage, loaded):
        """Stores queries with their columns in the order of keys (`quantised_tiles.py`)."""
        factor, inverse = scale_to_fit(jnp.abs(jnp.concatenate(loaded, axis=1)).max(axis=1))
        for ref, x in zip(refs, loaded, strict=True):
            ref[stage] = self._ordered((x * factor[:, None]).astype(ref.dtype))
        stats[INVERSES + stage] = inverse


class InterpretedLatents(Interpreted, LatentTiles):
    """`LatentTiles` for the interpreter."""

    def _keys(self, raw, stage):
        return raw[0][stage].reshape(TILE, self.entry.nbytes)

    def _value_bytes(self, raw, stage):
        return self._keys(raw, stage)[:, : GROUP * self.value_groups]

    def load_keys(self, raw, stage, group):
        """Returns bytes [64, 64], or [64, 128] of bf16 rotary keys."""
        if self.is_wide(group):
            return self._keys(raw, stage)[:, -2 * KEY_GROUP :]
        return super().load_keys(raw, stage, group)

    def convert_keys(self, loaded, group):
        """Returns [64, 64]."""
        if self.is_wide(group):
            return self._ordered(lax.bitcast_convert_type(loaded.reshape(TILE, KEY_GROUP, 2), jnp.bfloat16))
        return super().convert_keys(loaded, group)

    def load_scales(self, raw, stage):
        """Returns an array [64] for each group of values."""
        if not self.scaled:
            return [], []
        found = self._keys(raw, stage)[:, self.scales_at : self.scales_at + 4 * self.value_groups]
        scales = lax.bitcast_convert_type(found.reshape(TILE, self.value_groups, 4), jnp.float32)
        scales = [scales[:, group] for group in range(self.value_groups)]
        return scales, scales

    def _clear_token(self, raw, stage, row):
        width = self.entry.nbytes
        raw[0][stage, pl.ds(row * width, width)] = jnp.zeros(width, jnp.uint8)


class InterpretedHeads(Interpreted, HeadTiles):
    """`HeadTiles` for the interpreter."""

    def _keys(self, raw, stage):
        return raw[0][stage]

    def _value_bytes(self, raw, stage):
        return _filled(raw[-1][stage][:, -self.entry.value_dim :])

    def _clear_token(self, raw, stage, row):
        raw[-1][stage, row] = jnp.zeros(self._widths[-1], jnp.uint8)


def _filled(values):
    """Values [64, columns], twice if they are narrow."""
    return jnp.tile(values, (1, 2)) if values.shape[1] < GROUP else values


class InterpretedRowTiles(Interpreted, RowTiles):
    """`RowTiles` for the interpreter."""

    def operands(self, buffer, pages):
        """The pages, with zeros at the end of rows, past which whole rows of shared memory are copied."""
        found = super().operands(buffer, pages)
        return [jnp.pad(rows, ((0, 0), (0, 0), (0, self._widths[-1] // 4))) for rows in found] if self.apart else found

    def _keys(self, raw, stage):
        """Whole entries, also if keys and values lie apart."""
        rows = [lax.bitcast_convert_type(ref[stage], jnp.uint8).reshape(TILE, -1) for ref in raw]
        return self.entry.from_planes(rows) if self.apart else rows[0]

    def _value_bytes(self, raw, stage):
        _, values, *_ = self.entry.fields()
        return _filled(self._keys(raw, stage)[:, values.offset : values.offset + values.nbytes])

    def _clear_token(self, raw, stage, row):
        values = raw[-1]
        values[stage, row] = jnp.zeros(values.shape[-1], values.dtype)


class InterpretedInt8(InterpretedRowTiles, Int8Tiles):
    """`Int8Tiles` for the interpreter."""

    _stored = jnp.int8

    def load_scales(self, raw, stage):
        """Returns an array [64] for keys, and one for values."""
        stored = self.entry.unpack(self._keys(raw, stage))
        return [stored["K scales"][:, 0]], [stored["V scales"][:, 0]]


class InterpretedNvfp4(InterpretedRowTiles, Nvfp4Tiles):
    """`Nvfp4Tiles` for the interpreter."""

    def load_keys(self, raw, stage, group):
        """Returns float16 [64, 64]."""
        return self._floats(raw, stage, 0)[:, KEY_GROUP * group : KEY_GROUP * (group + 1)]

    def load_values(self, raw, stage, step):
        """Returns float16 [16, columns]."""
        return self._floats(raw, stage, 1)[N * step : N * (step + 1)]

    def convert_keys(self, loaded, group):
        """Returns [64, 64]."""
        return self._ordered(loaded)

    def convert_values(self, loaded, group):
        """Returns [128, 16]."""
        return self._by_column(loaded[:, GROUP * group : GROUP * (group + 1)])

    def _floats(self, raw, stage, part):
        """The keys or the values of a stage, times their scales."""
        bytes_ = self._keys(raw, stage)
        values = self.entry.decode(bytes_, jnp.float32)[part]
        return (values / self.unit).astype(jnp.float16)

    def _ordered(self, x):
        rows, columns = x.shape
        x = x.reshape(rows, columns // 64, 4, 2, 2, 2, 2)  # quads, words, and the bits of a value's place in a word
        return x.transpose(0, 1, 3, 5, 6, 2, 4).reshape(rows, columns)
