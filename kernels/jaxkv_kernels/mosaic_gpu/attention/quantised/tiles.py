"""Tiles of 64 quantised entries as they lie in the cache, and how products read them.

Whole entries are copied to shared memory, one after the other.  They are converted on their way from there to the
registers that are the first operand of wgmma, so that no converted copy is stored: K for S' = K Q', and V transposed
for O' += V' P'.  e4m3 becomes float16, which represents every e4m3 value exactly.

A lane reads 16 bytes of a row, or 4 bytes of each of four tokens, and wgmma would have it hold other values.  So the
products see columns of K, and latents of V, in an order of their own:

    keys     of every 64 columns, product s of 16 has those with index 16 quad + 4 s + {0..3}: queries are stored in
             this order (`ordered`)
    values   of every 128 latents, row 64 a + 16 warp + 8 b + row of V' is latent 32 warp + 4 row + 2 a + b: results are
             stored from this order

For values, two tokens are brought together byte by byte before they are converted: wgmma wants pairs of keys.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.attention.gather.scaling import scale_to_fit
from jaxkv_kernels.mosaic_gpu.attention.quantised import lanes
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, ROW, SCALAR, WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT

N = 16
"""Rows of queries in a tile."""
GROUP = 128
"""Latents that share a scale, and that a register operand of values has."""
GROUPS, STEPS = LATENT // GROUP, TILE // N
"""Groups of a latent; products of 16 keys in a tile."""
INVERSES, SCRATCH, STATS = 2, 4, 12
"""Rows of `stats`, float32 [12, 16]: two of the schedule's own; the inverse factors of two stages of queries; scratch
memory of `over_warps`, four rows for each consumer.  The number of all rows."""


PER_LANE = plgpu.Layout.WG_STRIDED((lanes.LANES,), 1)
PLAIN = plgpu.RefType()
Array = plgpu.ShapeDtypeStruct


def _words(per_lane: int) -> Any:
    """int32 arrays of which a lane holds vectors of four."""
    shape = (lanes.LANES * per_lane,)
    return Array(shape, jnp.int32, layout=plgpu.Layout.WG_STRIDED(shape, 4))


VALUES, QUERIES = _words(4 * GROUPS), _words(4 * (LATENT // 64 + 1))
"""What a lane loads of 16 tokens, and of a request's queries."""


@dataclass(frozen=True)
class QuantisedTiles:
    """Tiles of `fp8` or `fp8_ds_mla` entries in shared memory [stages, elements], of the buffer's dtype."""

    entry: MLAEntry

    @property
    def nbytes(self) -> int:
        """Of an entry."""
        return self.entry.nbytes

    @property
    def scaled(self) -> bool:
        """Whether tokens have scales of their own: then rotary keys are bf16."""
        return self.entry.format == "fp8_ds_mla"

    @property
    def rope_dtype(self) -> Any:
        """Of rotary keys and queries in products."""
        return jnp.dtype(jnp.bfloat16 if self.scaled else jnp.float16)

    @property
    def _swapped(self) -> bool:
        return self.nbytes % 128 == 64

    def load_keys(self, ref, stage, group: int):
        """Columns 64 * `group` of a tile, as bytes; group 8 is the rotary part."""
        wide = self.scaled and group == LATENT // 64
        held = _words(16 if wide else 8)

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=held)
        def load(_, ref, stage):
            return lanes.as_array(
                lanes.load_keys(ref, stage.registers.item(), self.nbytes, group, wide=wide), held.layout
            )

        return load(ref, stage)

    def convert_keys(self, raw, group: int):
        """They as a [64, 64] operand."""
        wide = self.scaled and group == LATENT // 64
        dtype = self.rope_dtype if wide else jnp.float16

        @plgpu.inline_mgpu(
            arg_types=(_words(16 if wide else 8).layout,), return_type=Array((TILE, 64), dtype, layout=WGMMA)
        )
        def convert(_, raw):
            return lanes.convert_keys(raw, WGMMA, wide=wide)

        return convert(raw)

    def load_scales(self, ref, stage):
        """The scales of a tile: float32 [64] per group."""
        offset = next(part.offset for part in self.entry.parts() if part.name == "scales")

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=[Array((TILE,), jnp.float32, layout=ROW)] * GROUPS)
        def load(_, ref, stage):
            return lanes.load_scales(ref, stage.registers.item(), self.nbytes, offset, ROW)

        return load(ref, stage)

    def load_values(self, ref, stage, step: int):
        """The latents of 16 tokens of a tile, as bytes."""

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=VALUES)
        def load(_, ref, stage):
            found = lanes.load_values(ref, stage.registers.item(), self.nbytes, step, swapped=self._swapped)
            return lanes.as_array(found, VALUES.layout)

        return load(ref, stage)

    def convert_values(self, raw, group: int):
        """128 of them as a [128, 16] operand."""

        @plgpu.inline_mgpu(arg_types=(VALUES.layout,), return_type=Array((GROUP, N), jnp.float16, layout=WGMMA))
        def convert(_, raw):
            return lanes.convert_values(raw, WGMMA, group, swapped=self._swapped)

        return convert(raw)

    def clear(self, ref, stage, first, end) -> None:
        """Zeroes tokens of a tile: their weights are 0, but 0 x NaN is NaN."""

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, SCALAR))
        def clear(_, ref, stage, row):
            lanes.clear(ref, stage.registers.item(), self.nbytes, row.registers.item())

        lax.fori_loop(first, end, lambda row, _: clear(ref, stage, row), None)

    def over_warps(self, kind: str, x, stats, side: int):
        """The `max` or sum (`add`) of a [64, 16] tile over its rows; rows of `stats` are scratch memory.

        Pallas's own reductions share scratch memory among warpgroups.
        """

        @plgpu.inline_mgpu(arg_types=(WGMMA, PLAIN), return_type=Array((N,), jnp.float32, layout=COLUMN))
        def reduce(_, x, stats):
            return lanes.over_warps(x, stats, SCRATCH + 4 * side, kind, COLUMN)

        return reduce(x, stats)

    def store_rows(self, ref, place, parts) -> None:
        """Stores [128, 16] tiles of 16 bits, in the order of values, to `ref` [n, rows, 512] in device memory."""
        rows = ref.shape[1]

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, [WGMMA] * GROUPS))
        def store(_, ref, place, parts):
            lanes.store_rows(ref, place.registers.item(), parts, rows)

        store(ref, place, parts)

    def load_queries(self, latent_ref, rope_ref, request):
        """The queries of a request, as they are: `store_queries` has the rest."""
        rows = latent_ref.shape[1]

        @plgpu.inline_mgpu(arg_types=(PLAIN, PLAIN, SCALAR), return_type=QUERIES)
        def load(_, latent, rope, request):
            return lanes.as_array(lanes.load_queries(latent, rope, request.registers.item(), rows), QUERIES.layout)

        return load(latent_ref, rope_ref, request)

    def store_queries(self, q, qr, stats, stage, raw) -> None:
        """Stores queries in the order of keys, each row scaled to fit float16; `stats` gets the inverse factors.

        `q` float16 [stages, 16, 512], `qr` [stages, 16, 64].
        """

        @plgpu.inline_mgpu(
            arg_types=(QUERIES.layout,),
            return_type=Array((lanes.LANES,), jnp.float32, layout=PER_LANE),
        )
        def largest(_, raw):
            return lanes.largest(raw, PER_LANE)

        factor, inverse = scale_to_fit(largest(raw))
        latent_type, rope_type = (plgpu.RefType(swizzled(1, dtype=d).transforms) for d in (q.dtype, qr.dtype))
        kind = "bf16" if self.scaled else "f16"

        @plgpu.inline_mgpu(arg_types=(latent_type, rope_type, PLAIN, SCALAR, QUERIES.layout, PER_LANE, PER_LANE))
        def store(_, q, qr, stats, stage, raw, factor, inverse):
            stage = stage.registers.item()
            lanes.store_queries(q, qr, stats, stage, raw, factor, inverse, INVERSES, rope_type=kind)

        store(q, qr, stats, stage, raw, factor, inverse)


class InterpretedTiles(QuantisedTiles):
    """The same for Pallas's interpreter, which runs no inline PTX."""

    def _bytes(self, ref, stage):
        return lax.bitcast_convert_type(ref[stage], jnp.uint8).reshape(TILE, self.nbytes)

    def load_keys(self, ref, stage, group):
        """[64, bytes]."""
        raw = self._bytes(ref, stage)
        if self.scaled and group == LATENT // 64:
            return raw[:, self.nbytes - 128 :]
        return raw[:, 64 * group : 64 * (group + 1)]

    def convert_keys(self, raw, group):
        """[64, 64]."""
        if self.scaled and group == LATENT // 64:
            values = lax.bitcast_convert_type(raw.reshape(TILE, 64, 2), jnp.bfloat16)
        else:
            values = lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(jnp.float16)
        return _ordered(values)

    def load_scales(self, ref, stage):
        """[64] each."""
        offset = next(part.offset for part in self.entry.parts() if part.name == "scales")
        raw = self._bytes(ref, stage)[:, offset : offset + 4 * GROUPS]
        scales = lax.bitcast_convert_type(raw.reshape(TILE, GROUPS, 4), jnp.float32)
        return [scales[:, group] for group in range(GROUPS)]

    def load_values(self, ref, stage, step):
        """[16, 512]."""
        return self._bytes(ref, stage)[N * step : N * (step + 1), :LATENT]

    def convert_values(self, raw, group):
        """[128, 16]."""
        values = lax.bitcast_convert_type(raw[:, GROUP * group : GROUP * (group + 1)], jnp.float8_e4m3fn)
        values = values.astype(jnp.float16).reshape(N, 4, 8, 2, 2).transpose(3, 1, 4, 2, 0)
        return values.reshape(GROUP, N)

    def clear(self, ref, stage, first, end):
        """Row by row."""
        width = ref.shape[1] // TILE

        def row(row, _):
            ref[stage, pl.ds(row * width, width)] = jnp.zeros(width, ref.dtype)

        lax.fori_loop(first, end, row, None)

    def over_warps(self, kind, x, stats, side):
        """[16]."""
        return {"max": jnp.max, "add": jnp.sum}[kind](x, axis=0)

    def store_rows(self, ref, place, parts):
        """In the order of latents."""
        rows = ref.shape[1]
        parts = [part.reshape(2, 4, 2, 8, N).transpose(4, 1, 3, 0, 2).reshape(N, GROUP)[:rows] for part in parts]
        ref[place] = jnp.concatenate(parts, axis=1)

    def load_queries(self, latent_ref, rope_ref, request):
        """[16, 512], [16, 64]."""
        return [
            jnp.pad(ref[request].astype(jnp.float32), ((0, N - ref.shape[1]), (0, 0))) for ref in (latent_ref, rope_ref)
        ]

    def store_queries(self, q, qr, stats, stage, raw):
        """In the order of keys."""
        factor, inverse = scale_to_fit(jnp.abs(jnp.concatenate(raw, axis=1)).max(axis=1))
        for ref, x in zip((q, qr), raw, strict=True):
            ref[stage] = _ordered((x * factor[:, None]).astype(ref.dtype))
        stats[INVERSES + stage] = inverse


def _ordered(x):
    """Columns, 64 by 64, in the order of keys."""
    rows, columns = x.shape
    return x.reshape(rows, columns // 64, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(rows, columns)
