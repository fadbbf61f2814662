"""The loader of quantised pages: e4m3 keys become float16, which represents every e4m3 value exactly.

A warpgroup loads half a tile of keys, 16 KiB, to registers by plain loads, and later converts and stores it to the
swizzled shared memory that wgmma reads.  In between it holds the keys of the tile to come, so that they need no shared
memory.  The 16 rows of a warp lie in one block, and its loads have constant strides.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.runtime.integers import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import LATENT, ROPE

DTYPE = jnp.dtype(jnp.float16)
"""Of converted values."""
THREADS = 128


def _registers(per_lane: int) -> Any:
    """Layout of int32 arrays [128 * per_lane] of which a lane holds vectors of up to four."""
    return plgpu.Layout.WG_STRIDED((THREADS * per_lane,), min(per_lane, 4))


BLOCK, CHUNKS, ROPE_CHUNKS = _registers(1), _registers(32), _registers(8)


@dataclass(frozen=True)
class E4M3Pages:
    """Pages of `fp8` entries in a buffer of elements of `itemsize` bytes."""

    pages: Pages
    itemsize: int

    @property
    def token_bytes(self) -> int:
        """Bytes from a token to the next."""
        return self.pages.token_stride * self.itemsize

    def buffer(self, buffer):
        """The operand that keys are loaded from; no copy."""
        return buffer

    def look_up(self, table_ref, request, tile):
        """Loads the block of each row of a tile."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SCALAR, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=BLOCK),
        )
        def load(_, table, request, tile):
            lanes, _ = _lanes()
            return lanes.one_per_lane(lanes.load_block(self, table, lanes.value(request), lanes.value(tile)), BLOCK)

        return load(table_ref, request, tile)

    def load_half(self, kv_ref, block, tile, layer, half: int):
        """Starts the loads of half a tile whose block was looked up."""

        def load(lanes, first):
            return lanes.load_half(self, first, half)

        return self._load(kv_ref, block, tile, layer, CHUNKS, 32, load)

    def load_rope(self, kv_ref, block, tile, layer):
        """Starts the loads of a tile's rotary keys."""

        def load(lanes, first):
            return lanes.load_rope(self, first)

        return self._load(kv_ref, block, tile, layer, ROPE_CHUNKS, 8, load)

    def store_half(self, chunks, tile: int, half: int, k_ref) -> None:
        """Converts half a tile and stores it to `k_ref` [2, 2, 64, 256]."""
        offset = (2 * tile + half) * TILE * HALF * DTYPE.itemsize
        self._store(k_ref, chunks, CHUNKS, lambda lanes, *args: lanes.store_half(*args), offset)

    def store_rope(self, chunks, tile: int, r_ref) -> None:
        """The same for rotary keys, to `r_ref` [2, 64, 64]."""
        offset = tile * TILE * ROPE * DTYPE.itemsize
        self._store(r_ref, chunks, ROPE_CHUNKS, lambda lanes, *args: lanes.store_rope(*args), offset)

    def _load(self, kv_ref, block, tile, layer, layout, per_lane: int, of):
        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), BLOCK, SCALAR, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((THREADS * per_lane,), jnp.int32, layout=layout),
        )
        def load(_, kv, *where):
            lanes, gather = _lanes()
            first = lanes.first_row(self, kv, *(lanes.value(x) for x in where))
            return gather.array(of(lanes, first), layout)

        return load(kv_ref, block, tile, layer)

    def _store(self, into, chunks, layout, store, offset: int):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(1, dtype=DTYPE).transforms), layout))
        def convert(_, ref, chunks):
            lanes, gather = _lanes()
            store(lanes, ref, offset, [gather.words(register) for register in chunks.registers.flat])

        convert(into, chunks)


class InterpretedPages(E4M3Pages):
    """The same for Pallas's interpreter, which runs no inline PTX: axis 0 has the rows of a tile."""

    def buffer(self, buffer):
        """Bytes: a copy, where the dtype is wider."""
        return lax.bitcast_convert_type(buffer, jnp.uint8).reshape(-1)

    def look_up(self, table_ref, request, tile):
        """[64]."""
        token = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        column = jnp.minimum(floordiv(token, self.pages.block_size), table_ref.shape[1] - 1)
        return table_ref[...][request, column]

    def load_half(self, kv_ref, block, tile, layer, half):
        """[64, 256]."""
        return self._read(kv_ref, block, tile, layer, half * HALF, HALF)

    def load_rope(self, kv_ref, block, tile, layer):
        """[64, 64]."""
        return self._read(kv_ref, block, tile, layer, LATENT, ROPE)

    def _read(self, kv_ref, block, tile, layer, first, count):
        pages = self.pages
        known = (block >= 0) & (block < pages.num_blocks)
        token = lax.rem(tile * TILE + jnp.arange(TILE, dtype=jnp.int32), jnp.int32(pages.block_size))
        row = pages.offset + layer * pages.layer_stride + jnp.where(known, block, 0) * pages.block_stride
        row = (row + token * pages.token_stride) * self.itemsize
        return kv_ref[...][row[:, None] + (first + jnp.arange(count, dtype=jnp.int32))]

    def store_half(self, chunks, tile, half, k_ref):
        """As above."""
        k_ref[tile, half] = _converted(chunks)

    def store_rope(self, chunks, tile, r_ref):
        """As above."""
        r_ref[tile] = _converted(chunks)


def _converted(raw):
    return lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(DTYPE)


def _lanes():
    """Imported when a kernel is built: the interpreter needs neither."""
    from jaxkv_kernels.mosaic_gpu.attention.convert import lanes
    from jaxkv_kernels.mosaic_gpu.attention.gather import lanes as gather

    return lanes, gather
