"""Entries of chosen slots, gathered into the shared memory that wgmma reads.

TMA has no gather on Hopper, so a warpgroup gathers by plain 128-bit loads: each lane loads 16-byte chunks of four rows
of a tile, keeps them in registers while they are on their way, and stores them to swizzled shared memory.  A tile of 64
rows moves in units of one chunk of four rows per lane: 8 KiB that lie in 128 bytes of each entry.

    lane       row 4 warp + lane % 4 of every 16 rows; chunk: by the quarter lane // 8 and by lane // 4 % 2
    bf16, f16  a unit is a column tile of 64 values: latent tiles 0 to 7, rope
    fp8_ds_mla a unit is a scale group of 128 values, the four scales, or rope

Eight lanes, which share a phase of a shared-memory access, have four rows and two chunks that the 128-byte swizzle
spreads over all banks.

Values of `fp8_ds_mla`.  The latent becomes float16, which represents every e4m3 value exactly.  A token's scales are
multiplied into it where that is safe: where all four are from 2**-14 to 2**7, products neither overflow nor lose bits
of a scale.  Otherwise they are first divided by a power of two, the token's `factor`, by which the scores and the
weights of the token are multiplied in float32, and by which its rotary key is divided.  Products with scales that are
powers of two are exact; other scales are rounded to float16.

A masked key (slot below 0 or past the cache, or position past the count) is a row of zeros with factor -1.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.mosaic_gpu.attention.page_table import TILE
from jaxkv_kernels.mosaic_gpu.runtime.build import SCALAR, swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT

HALF = 256
"""Columns of half a latent; a half of a tile in shared memory is [64, 256]."""
THREADS, CHUNK, ROWS_PER_LANE = 128, 16, 4
MASKED_KEY = -1.0
"""Factor of a masked key."""
SMALLEST, LARGEST = 0x38800000, 0x43000000
"""Bits of 2**-14 and 2**7: scales between them are multiplied into values."""
EXPONENT, LEAST_FACTOR, MOST_FACTOR, INVERSE = 0x7F800000, 27 << 23, 253 << 23, 254 << 23
"""Bits of a float32: its exponent, 2**-100, 2**126; the bits of a power of two and of its inverse add up to INVERSE."""


def registers(per_lane: int) -> Any:
    """Layout of int32 arrays [128 * per_lane] of which a lane holds vectors of four."""
    return plgpu.Layout.WG_STRIDED((THREADS * per_lane,), ROWS_PER_LANE)


SLOTS, UNIT, PACKED_SCALES = registers(4), registers(16), registers(8)
"""One slot per row; a chunk per row; two pairs of float16 scales per row."""


@dataclass(frozen=True)
class Unit:
    """What a lane loads of its rows at once."""

    kind: str
    """latent, scales or rope."""
    offset: int
    """Its first byte in an entry."""
    number: int = 0
    """Of a latent's column tile or scale group."""


@dataclass(frozen=True)
class GatheredRows:
    """The rows of a paged cache of `MLAEntry`, with all strides in bytes of a buffer of `itemsize`."""

    pages: Pages
    entry: MLAEntry
    itemsize: int

    @property
    def quantised(self) -> bool:
        """Whether entries are `fp8_ds_mla`."""
        return self.entry.format == "fp8_ds_mla"

    @property
    def latent_dtype(self) -> Any:
        """Of latents in shared memory."""
        return jnp.dtype(jnp.float16) if self.quantised else self.entry.dtype

    @property
    def rope_dtype(self) -> Any:
        """Of rotary keys in shared memory."""
        return jnp.dtype(jnp.bfloat16) if self.quantised else self.entry.dtype

    def half(self, which: int) -> tuple[Unit, ...]:
        """The units of half a latent."""
        width = 128
        count = (LATENT if self.quantised else 2 * LATENT) // width // 2
        return tuple(Unit("latent", n * width, n) for n in range(which * count, (which + 1) * count))

    def order(self, near: int) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
        """The units of a tile in the order in which they are stored: up to the end of half `near`, then the rest."""
        parts = {part.name: part.offset for part in self.entry.parts()}
        scales = (Unit("scales", parts["scales"]),) if self.quantised else ()
        return (*scales, *self.half(near)), (Unit("rope", parts["rope"]), *self.half(1 - near))

    def zeros(self) -> jax.Array:
        """A row that masked keys are loaded from.

        A byte more makes it a literal: zeros XLA would fill in each call.
        """
        row = np.zeros(self.entry.nbytes + CHUNK, np.uint8)
        row[-1] = 1
        return jnp.asarray(row)

    def buffer(self, buffer: jax.Array) -> jax.Array:
        """The operand that rows are loaded from; no copy."""
        return buffer

    def offset(self, slot, layer, constant, wide):
        """The byte at which the entry of a slot begins: `wide` converts int32 to the integers of offsets."""
        pages = self.pages
        first = constant(pages.offset * self.itemsize) + wide(layer) * constant(pages.layer_stride * self.itemsize)
        token = pages.token_stride if pages.block_size > 1 else pages.block_stride
        if pages.num_blocks == 1 or pages.block_stride == pages.block_size * token:
            return first + wide(slot) * constant(token * self.itemsize)
        block, within = slot // pages.block_size, slot % pages.block_size
        return (
            first
            + wide(block) * constant(pages.block_stride * self.itemsize)
            + wide(within) * constant(pages.token_stride * self.itemsize)
        )

    def slots(self, slot_ref, request, tile, length):
        """The slots of a tile of keys; -1 at positions from `length` on."""
        from jaxkv_kernels.mosaic_gpu.attention import gather_lanes as lanes

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((THREADS * 4,), jnp.int32, layout=SLOTS),
        )
        def load(_, ref, request, tile, length):
            found = lanes.load_slots(ref, *(x.registers.item() for x in (request, tile, length)))
            return lanes.array([found], SLOTS)

        return load(slot_ref, request, tile, length)

    def load(self, kv_ref, zero_ref, slots, layer, limit, unit: Unit):
        """A unit of a tile's rows, on its way: valid slots are below `limit`."""
        from jaxkv_kernels.mosaic_gpu.attention import gather_lanes as lanes

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), SLOTS, SCALAR, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((THREADS * 16,), jnp.int32, layout=UNIT),
        )
        def load(_, kv, zero, slots, layer, limit):
            rows = lanes.rows(self, kv, zero, slots, layer, limit)
            return lanes.array(lanes.load_unit(rows, unit, e4m3=self.quantised), UNIT)

        return load(kv_ref, zero_ref, slots, layer, limit)

    def prefetch(self, kv_ref, zero_ref, slots, layer, limit) -> None:
        """Has the rows of a tile brought to the L2 cache."""
        from jaxkv_kernels.mosaic_gpu.attention import gather_lanes as lanes

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SLOTS, SCALAR, SCALAR))
        def prefetch(_, kv, zero, slots, layer, limit):
            lanes.prefetch(lanes.rows(self, kv, zero, slots, layer, limit), self.entry.nbytes)

        prefetch(kv_ref, zero_ref, slots, layer, limit)

    def factors(self, stats_ref, row: int, flag: tuple[int, int], slots, limit, raw=None):
        """Stores the factors of a tile's keys to row `row` of `stats_ref`, and whether any is not 1 to `flag`.

        `flag` is a row and a column: each warp has a value, 1 where a factor of its keys is not 1.  Returns what
        `store` multiplies latents by, made from the unit `raw` of scales.
        """
        from jaxkv_kernels.mosaic_gpu.attention import gather_lanes as lanes

        if raw is None:

            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SLOTS, SCALAR))
            def mark(_, stats, slots, limit):
                lanes.store_factors(stats, row, flag, lanes.valid(slots, limit), None)

            return mark(stats_ref, slots, limit)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SLOTS, SCALAR, UNIT),
            return_type=plgpu.ShapeDtypeStruct((THREADS * 8,), jnp.int32, layout=PACKED_SCALES),
        )
        def scale(_, stats, slots, limit, raw):
            factors, packed = lanes.scales(raw)
            lanes.store_factors(stats, row, flag, lanes.valid(slots, limit), factors)
            return lanes.array(packed, PACKED_SCALES)

        return scale(stats_ref, slots, limit, raw)

    def store(self, unit: Unit, stage: int, k_ref, r_ref, raw, scales, stats_ref, row: int) -> None:
        """Stores a unit of latents to `k_ref` [2, 2, 64, 256], of rotary keys to `r_ref` [2, 64, 64].

        Row `row` of `stats_ref` has the factors of the tile.
        """
        from jaxkv_kernels.mosaic_gpu.attention import gather_lanes as lanes

        rope = unit.kind == "rope"
        into, dtype = (r_ref, self.rope_dtype) if rope else (k_ref, self.latent_dtype)
        ref_type = plgpu.RefType(swizzled(1, dtype=dtype).transforms)
        if rope and self.quantised:

            @plgpu.inline_mgpu(arg_types=(ref_type, UNIT, plgpu.RefType()))
            def divide(_, ref, raw, stats):
                lanes.store_divided(ref, raw, stage, stats, row)

            divide(into, raw, stats_ref)
        elif not self.quantised:

            @plgpu.inline_mgpu(arg_types=(ref_type, UNIT))
            def copy(_, ref, raw):
                lanes.store_words(ref, raw, stage, None if rope else unit.number)

            copy(into, raw)
        else:

            @plgpu.inline_mgpu(arg_types=(ref_type, UNIT, PACKED_SCALES))
            def convert(_, ref, raw, scales):
                lanes.store_e4m3(ref, raw, scales, stage, unit.number)

            convert(into, raw, scales)


class InterpretedRows(GatheredRows):
    """The same for Pallas's interpreter, which runs no inline PTX: a slot or a row per element of an array's axis 0."""

    def buffer(self, buffer):
        """Bytes: a copy, where the dtype is wider."""
        return lax.bitcast_convert_type(buffer, jnp.uint8).reshape(-1)

    def slots(self, slot_ref, request, tile, length):
        """[64]."""
        position = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        found = slot_ref[...][request, jnp.minimum(position, slot_ref.shape[1] - 1)]
        return jnp.where(position < length, found, -1)

    def load(self, kv_ref, zero_ref, slots, layer, limit, unit):
        """[64, bytes]."""
        valid = (slots >= 0) & (slots < limit)
        first = self.offset(jnp.where(valid, slots, 0), layer, jnp.int32, lambda x: x)
        nbytes = 16 if unit.kind == "scales" else 128
        byte = first[:, None] + (unit.offset + jnp.arange(nbytes, dtype=jnp.int32))
        return jnp.where(valid[:, None], kv_ref[...][byte], jnp.uint8(0))

    def prefetch(self, kv_ref, zero_ref, slots, layer, limit):
        """Nothing."""

    def factors(self, stats_ref, row, flag, slots, limit, raw=None):
        """Returns what latents are multiplied by, float16 [64, 4]."""
        factor, scales = jnp.ones(TILE, jnp.float32), None
        if raw is not None:
            scale = lax.bitcast_convert_type(raw.reshape(TILE, 4, 4), jnp.float32)
            bits = lax.bitcast_convert_type(jnp.abs(scale), jnp.int32)
            least, most = bits.min(axis=1), bits.max(axis=1)
            power = jnp.clip(most & EXPONENT, LEAST_FACTOR, MOST_FACTOR)
            factor = jnp.where(
                (least >= SMALLEST) & (most < LARGEST), 1.0, lax.bitcast_convert_type(power, jnp.float32)
            )
            scales = (scale / factor[:, None]).astype(jnp.float16)
        factor = jnp.where((slots >= 0) & (slots < limit), factor, MASKED_KEY)
        stats_ref[row] = factor
        stats_ref[flag[0], pl.ds(flag[1], 4)] = jnp.full(4, (factor != 1).any(), jnp.float32)
        return scales

    def store(self, unit, stage, k_ref, r_ref, raw, scales, stats_ref, row):
        """`raw` [64, bytes]."""
        if unit.kind == "rope":
            values = _elements(raw, self.rope_dtype)
            if self.quantised:
                values = values * (1 / jnp.abs(stats_ref[row])).astype(values.dtype)[:, None]
            r_ref[stage] = values
            return
        if self.quantised:
            values = lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(jnp.float16)
            values = values * scales[:, unit.number, None]
        else:
            values = _elements(raw, self.latent_dtype)
        half, column = divmod(unit.number * values.shape[1], HALF)
        k_ref[stage, half, :, pl.ds(column, values.shape[1])] = values


def _elements(raw, dtype):
    """Bytes [n, 2 m] as values [n, m]."""
    return lax.bitcast_convert_type(raw.reshape(raw.shape[0], -1, 2), dtype)


def gathered_rows(pages: Pages, entry: MLAEntry, itemsize: int, *, interpret: bool) -> GatheredRows:
    """The rows of a cache whose buffer has elements of `itemsize` bytes."""
    return (InterpretedRows if interpret else GatheredRows)(pages, entry, itemsize)


def warpgroup_barrier() -> None:
    """Waits for all lanes of the warpgroup."""
    from jaxkv_kernels.mosaic_gpu.attention import gather_lanes as lanes

    plgpu.inline_mgpu()(lambda _: lanes.warpgroup_barrier())()


def async_fence(*, interpret: bool) -> None:
    """Makes what has been stored to shared memory, and waited for, visible to wgmma."""
    if interpret:
        return
    from jaxkv_kernels.mosaic_gpu.attention import gather_lanes as lanes

    plgpu.inline_mgpu()(lambda _: lanes.ptx("fence.proxy.async.shared::cta;"))()
