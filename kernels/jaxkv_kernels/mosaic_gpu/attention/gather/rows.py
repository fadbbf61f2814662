"""The loader of entries at chosen slots: how they reach the shared memory that wgmma reads.

TMA has no gather on Hopper, so a warpgroup gathers by plain 128-bit loads: each lane loads 16-byte chunks of four rows
of a tile, keeps them in registers while they are on their way, and stores them to swizzled shared memory.  A tile of 64
rows moves in units of one chunk of four rows per lane: 8 KiB that lie in 128 bytes of each entry.

    lane       row 4 warp + lane % 4 of every 16 rows; chunk: by the quarter lane // 8 and by lane // 4 % 2
    bf16, f16  a unit is a column tile of 64 values: latent tiles 0 to 7, rope
    fp8_ds_mla a unit is a scale group of 128 values, the four scales, or rope

Eight lanes, which share a phase of a shared-memory access, have four rows and two chunks that the 128-byte swizzle
spreads over all banks.

The latents of `fp8_ds_mla` entries are converted to float16 in between (`scaling.py`).  A masked key (slot below 0 or
past the cache, or position past the count) is a row of zeros with factor -1.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.mosaic_gpu.attention.gather import lanes
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT


def _registers(per_lane: int) -> Any:
    """Layout of int32 arrays [128 * per_lane] of which a lane holds vectors of four."""
    return plgpu.Layout.WG_STRIDED((lanes.THREADS * per_lane,), lanes.ROWS_PER_LANE)


SLOTS, UNIT, PACKED_SCALES = _registers(4), _registers(16), _registers(8)
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

        One byte at its end is not zero, so that it becomes a literal: XLA would fill zeros in each call.
        """
        row = np.zeros(self.entry.nbytes + 16, np.uint8)
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

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((lanes.THREADS * 4,), jnp.int32, layout=SLOTS),
        )
        def load(_, ref, request, tile, length):
            found = lanes.load_slots(ref, *(x.registers.item() for x in (request, tile, length)))
            return lanes.array([found], SLOTS)

        return load(slot_ref, request, tile, length)

    def load(self, kv_ref, zero_ref, slots, layer, limit, unit: Unit):
        """A unit of a tile's rows, on its way: valid slots are below `limit`."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), SLOTS, SCALAR, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((lanes.THREADS * 16,), jnp.int32, layout=UNIT),
        )
        def load(_, kv, zero, slots, layer, limit):
            rows = lanes.rows(self, kv, zero, slots, layer, limit)
            return lanes.array(lanes.load_unit(rows, unit, e4m3=self.quantised), UNIT)

        return load(kv_ref, zero_ref, slots, layer, limit)

    def prefetch(self, kv_ref, zero_ref, slots, layer, limit) -> None:
        """Has the rows of a tile brought to the L2 cache."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SLOTS, SCALAR, SCALAR))
        def prefetch(_, kv, zero, slots, layer, limit):
            lanes.prefetch(lanes.rows(self, kv, zero, slots, layer, limit), self.entry.nbytes)

        prefetch(kv_ref, zero_ref, slots, layer, limit)

    def factors(self, stats_ref, row: int, flag: tuple[int, int], slots, limit, raw=None):
        """Stores the factors of a tile's keys to row `row` of `stats_ref`, and whether any is not 1 to `flag`.

        `flag` is a row and a column: each warp has a value, 1 where a factor of its keys is not 1.  Returns what
        `store` multiplies latents by, made from the unit `raw` of scales.
        """
        if raw is None:

            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SLOTS, SCALAR))
            def mark(_, stats, slots, limit):
                lanes.store_factors(stats, row, flag, lanes.valid(slots, limit), None)

            return mark(stats_ref, slots, limit)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SLOTS, SCALAR, UNIT),
            return_type=plgpu.ShapeDtypeStruct((lanes.THREADS * 8,), jnp.int32, layout=PACKED_SCALES),
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


def warpgroup_barrier() -> None:
    """Waits for all lanes of the warpgroup."""
    plgpu.inline_mgpu()(lambda _: lanes.warpgroup_barrier())()


def async_fence(*, interpret: bool) -> None:
    """Makes what has been stored to shared memory, and waited for, visible to wgmma."""
    if interpret:
        return
    plgpu.inline_mgpu()(lambda _: lanes.ptx("fence.proxy.async.shared::cta;"))()
