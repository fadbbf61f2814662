"""The loaders of `gather_keys.py` and `gather_fp8_v4.py` for Pallas's interpreter, which runs no inline PTX."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.addressing import slots_for
from jaxkv_kernels.formats.fp4 import from_e2m1, from_e8m0
from jaxkv_kernels.formats.latents.nvfp4_ds_mla import COLUMNS
from jaxkv_kernels.mosaic_gpu.gather_fp8_v4 import FP8V4Rows
from jaxkv_kernels.mosaic_gpu.gather_keys import CHUNK, HALVES, LINE, GatheredRows
from jaxkv_kernels.mosaic_gpu.scaling import (
    E8M0_RANGE,
    EXPONENT,
    LARGEST,
    LEAST_FACTOR,
    MASKED_KEY,
    MOST_FACTOR,
    SMALLEST,
)
from jaxkv_kernels.mosaic_gpu.sizes import HALF, LATENT, TILE


class InterpretedRows(GatheredRows):
    """The same operations on arrays whose axis 0 is the rows of a tile."""

    def buffer(self, buffer):
        """The bytes of the buffer; a copy if its dtype is wider."""
        return lax.bitcast_convert_type(buffer, jnp.uint8).reshape(-1)

    def load_slots(self, slots, request, tile, length):
        """The slots of a tile, [64]; -1 at positions from `length` on."""
        return _load_slots(slots, request, tile, length)

    def spread(self, slots):
        """Returns `slots`: every step has those of all rows."""
        return slots

    spread_rope = spread

    def copy(self, kv_ref, slots, layer, limit, stage, half, k_ref, r_ref=None):
        """Copies half of the rows' latents, and rotary keys if `r_ref` is given; the copies are complete on return."""
        latent = self.offset_of("latent") + 2 * HALF * half
        k_ref[stage, half] = _elements(self._bytes(kv_ref, slots, layer, limit, latent, 2 * HALF), self.latent_dtype)
        if r_ref is not None:
            self.fetch_rope(kv_ref, None, slots, layer, limit, stage, r_ref)

    def load(self, kv_ref, zero_ref, slots, layer, limit, unit):
        """A unit of the rows, bytes [64, 128]; zeros past the end of a latent."""
        raw = self._bytes(kv_ref, slots, layer, limit, unit.offset, unit.chunks * CHUNK)
        return jnp.pad(raw, ((0, 0), (0, LINE - raw.shape[1])))

    def load_scales(self, kv_ref, zero_ref, slots, layer, limit):
        """The scales of the rows, bytes [64, n]."""
        if self.scale_dtype is None:
            return None
        return self._bytes(kv_ref, slots, layer, limit, self.offset_of("scales"), self._field("scales").nbytes)

    def fetch_rope(self, kv_ref, zero_ref, slots, layer, limit, stage, r_ref):
        """Copies rotary keys, for which `finish_rope` need not wait, or loads them."""
        rope = next(field for field in self.entry.fields() if field.name == "rope")
        raw = self._bytes(kv_ref, slots, layer, limit, rope.offset, rope.nbytes)
        if self.converts_rope:
            return raw
        r_ref[stage] = _elements(raw, self.rope_dtype)
        return None

    def finish_rope(self, stage, r_ref, scales, loaded, k_full):
        """Converts rotary keys, or divides them by the factors of their rows."""
        if self.converts_rope:
            r_ref[stage] = _from_e4m3(loaded)
        if self.factored:
            _, factor = scales
            r_ref[stage] = r_ref[stage] * (1 / jnp.abs(factor)).astype(self.rope_dtype)[:, None]
        k_full.arrive(HALVES + stage)

    def prefetch(self, kv_ref, zero_ref, slots, layer, limit):
        """Does nothing: the interpreter has no caches."""

    def factors(self, stats_ref, row, flag, slots, limit, raw):
        """Returns what each value of latents is multiplied by, float16 [64, 512], and the factors, float32 [64]."""
        factor, scales = jnp.ones(TILE, jnp.float32), None
        if self.scale_dtype == "float32":
            factor, scales = _fitted(lax.bitcast_convert_type(raw.reshape(TILE, 4, 4), jnp.float32))
        elif self.scale_dtype == "e8m0":
            factor, scales = _fitted_e8m0(raw.astype(jnp.int32))
        elif self.scale_dtype == "e4m3":
            columns = jnp.swapaxes(raw.reshape(TILE, COLUMNS, -1), 1, 2).reshape(TILE, -1)
            scales = _from_e4m3(columns)
        if scales is not None:
            scales = jnp.repeat(scales, self.entry.latent // scales.shape[1], axis=1)
            scales = jnp.pad(scales, ((0, 0), (0, LATENT - self.entry.latent)))
        factor = jnp.where((slots >= 0) & (slots < limit), factor, MASKED_KEY)
        stats_ref[row] = factor
        stats_ref[flag[0], pl.ds(flag[1], 4)] = jnp.full(4, (factor != 1).any(), jnp.float32)
        return None if raw is None else (scales, factor)

    def store(self, unit, stage, k_ref, raw, scales):
        """Stores a unit, `raw` [64, bytes]."""
        values = _from_e4m3(raw) if self.stored == "e4m3" else from_e2m1(raw, jnp.ones((TILE, 1))).astype(jnp.float16)
        first = unit.number * self.line_values
        values = values if scales is None else values * scales[0][:, first : first + self.line_values]
        half, column = divmod(first, HALF)
        k_ref[stage, half, :, pl.ds(column, self.line_values)] = values

    def entries(self, kv_ref, slots, layer, limit, nbytes):
        """Whole entries, bytes [64, nbytes]; zeros of masked ones."""
        return self._bytes(kv_ref, slots, layer, limit, 0, nbytes)

    def _bytes(self, kv_ref, slots, layer, limit, offset, nbytes):
        """Bytes of each slot's entry; zeros of masked ones."""
        valid = (slots >= 0) & (slots < limit)
        first = self.offset(jnp.where(valid, slots, 0), layer, jnp.int32, lambda x: x)
        byte = first[:, None] + (offset + jnp.arange(nbytes, dtype=jnp.int32))
        return jnp.where(valid[:, None], kv_ref[...][byte], jnp.uint8(0))


class InterpretedFP8V4Rows(FP8V4Rows):
    """The operations of `FP8V4Rows` on arrays whose axis 0 is the rows of a tile.

    An address is a slot of one of the two caches; it is negative if the key is masked.
    """

    def buffer(self, buffer):
        """The bytes of the buffer."""
        return lax.bitcast_convert_type(buffer, jnp.uint8).reshape(-1)

    def load_slots(self, slots, extra_ref, count_ref, request, tile, length):
        """Slots [64]; -1 past the end of a list."""
        if extra_ref is None:
            return _load_slots(slots, request, tile, length)
        position = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        first = slots.of.shape[1] if count_ref is None else jnp.minimum(count_ref[request], slots.of.shape[1])
        after = self.first_tiles * TILE
        second = _of_list(extra_ref, request, position - after, length - after)
        return jnp.where(position < after, _of_list(slots.of, request, position, first), second)

    def locate(self, kv_refs, zero_ref, layers, tile, slots):
        """The bytes of entries [64, 576], and their scales [64, 8]; whether keys are not masked."""
        sources = zip(self.sources, kv_refs, layers, strict=True)
        read = [self._read(rows, ref, layer, limit, slots) for rows, ref, (layer, limit) in sources]
        entries, scales, valid = read[0]
        if len(read) > 1:
            entries, scales, valid = (jnp.where(tile < self.first_tiles, a, b) for a, b in zip(*read, strict=True))
        return (entries, valid), scales

    @staticmethod
    def _read(rows, kv_ref, layer, limit, slots):
        valid = (slots >= 0) & (slots < limit)
        regions = []
        for region, fields in enumerate(rows.entry.regions()):
            count = sum(field.nbytes for field in fields)
            first = rows.offset(jnp.where(valid, slots, 0), layer, jnp.int32, lambda x: x, region)
            raw = kv_ref[...][first[:, None] + jnp.arange(count, dtype=jnp.int32)]
            regions.append(jnp.where(valid[:, None], raw, jnp.uint8(0)))
        return *regions, valid

    def load(self, zero_ref, own, unit):
        """A unit of the rows, bytes [64, n]."""
        return own[0][:, unit.offset : unit.offset + {"e4m3": 128, "half": 64, "rope": 128}[unit.kind]]

    def store(self, unit, stage, k_ref, raw, scales):
        """Stores a unit as bf16."""
        if unit.kind == "rope":
            values = _elements(raw, jnp.bfloat16)
        else:
            own = scales[:, unit.scale : unit.scale + raw.shape[1] // 64]
            values = _from_e4m3(raw).astype(jnp.float32) * jnp.repeat(from_e8m0(own), 64, axis=1)
            values = values.astype(jnp.bfloat16)
        k_ref[stage, unit.half, :, pl.ds(64 * unit.column_tile, values.shape[1])] = values

    def mark(self, stats_ref, zero_ref, row, flag, own):
        """Stores factors: 1, or that of masked keys."""
        factor = jnp.where(own[1], 1.0, MASKED_KEY)
        stats_ref[row] = factor
        stats_ref[flag[0], pl.ds(flag[1], 4)] = jnp.full(4, (factor != 1).any(), jnp.float32)

    def prefetch_rows(self, zero_ref, own):
        """Does nothing: the interpreter has no caches."""


def _of_list(ref, request, position, length):
    """The slots at positions of a list; -1 past its end."""
    loaded = ref[...][request, jnp.clip(position, 0, ref.shape[1] - 1)]
    return jnp.where((position >= 0) & (position < length), loaded, -1)


def _load_slots(slots, request, tile, length):
    """The slots of a tile in a list or in block tables, [64]; -1 at positions from `length` on."""
    position = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
    if slots.block_size is None:
        return _of_list(slots.of, request, position, length)
    begin = 0 if slots.begins is None else slots.begins[request]
    table = slots.of[...][request // slots.tokens]
    position = jnp.where(position < length, position + begin, -1)
    return slots_for(table[None], position[None], block_size=slots.block_size)[0]


def _fitted(scale):
    """The factors [64] of rows of float32 scales [64, n], and the scales divided by them, float16."""
    bits = lax.bitcast_convert_type(jnp.abs(scale), jnp.int32)
    least, most = bits.min(axis=1), bits.max(axis=1)
    power = lax.bitcast_convert_type(jnp.clip(most & EXPONENT, LEAST_FACTOR, MOST_FACTOR), jnp.float32)
    factor = jnp.where((least >= SMALLEST) & (most < LARGEST), 1.0, power)
    return factor, (scale / factor[:, None]).astype(jnp.float16)


def _fitted_e8m0(scale):
    """The same for e8m0 scales, int32 [64, n].  Scales that are too small for float16 become 0."""
    base, least_safe, most_safe = E8M0_RANGE
    least, most = scale.min(axis=1), scale.max(axis=1)
    power = jnp.where((least >= least_safe) & (most <= most_safe), 127, jnp.clip(most, 27, 253))
    exponent = jnp.maximum(scale - power[:, None] + base, 0)
    fitted = lax.bitcast_convert_type((exponent << 10).astype(jnp.uint16), jnp.float16) * 2.0 ** (15 - base)
    fitted = jnp.where((most == 255)[:, None], jnp.nan, fitted).astype(jnp.float16)
    return lax.bitcast_convert_type(power << 23, jnp.float32), fitted


def _from_e4m3(raw):
    """Bytes, which are e4m3 values, as float16."""
    return lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(jnp.float16)


def _elements(raw, dtype):
    """Bytes [n, 2 m] as values [n, m]."""
    return lax.bitcast_convert_type(raw.reshape(raw.shape[0], -1, 2), dtype)
