"""Tiles of 64 quantised entries as they are stored in the cache, and how products read them.

Entries are copied to shared memory as they are.  They are converted as they are loaded from there to the registers that
are the first operand of wgmma, so that no converted copy is stored: K for S' = K Q', and V transposed for O' += V' P'.
e4m3 becomes float16, which represents every e4m3 value exactly.

A lane reads 16 bytes of a row, or 4 bytes of each of four tokens.  These are not the values that the register layout of
wgmma assigns to it, so the columns of K and of V are permuted in the products:

    keys     of every 64 columns, product s of 16 has those with index 16 quad + 4 s + {0..3}: queries are stored in
             this order
    values   of every 128 columns, row 64 a + 16 warp + 8 b + row of V' is column 32 warp + 4 row + 2 a + b: results are
             stored from this order

For values, the bytes of two tokens are interleaved before they are converted: a register of wgmma holds a pair of keys.
e2m1 keys have another order (`E2M1_PAIRS`); e2m1 values, in the order above, are transposed by `ldmatrix`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Buffer, Pages, arrays_of, one_array, row_view
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry
from jaxkv_kernels.mosaic_gpu.paged_tma import Columns, PagedKeys, PageTable, copies_per_tile, token_rows
from jaxkv_kernels.mosaic_gpu.ptx import conversions, loads, reductions, stores
from jaxkv_kernels.mosaic_gpu.ptx.conversions import E4M3_TO_F16, INT8_TO_F16
from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES, array
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, ROW, SCALAR, WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS, swizzled
from jaxkv_kernels.mosaic_gpu.scaling import scale_to_fit
from jaxkv_kernels.mosaic_gpu.sizes import LATENT, ROPE, TILE
from jaxkv_kernels.mosaic_gpu.token_rows import ALIGNMENT, TokenRows

N = 16
"""Rows of queries in a tile."""
KEY_GROUP = 64
"""Columns of an operand of keys."""
GROUP = 128
"""Columns of an operand of values, and latents that share a scale."""
STEPS = TILE // N
"""Products of 16 keys in a tile."""
INVERSES, SCRATCH, STATS = 6, 8, 24
"""Rows of `stats`, float32 [24, 16]: six that the schedule uses; the inverse factors of two stages of queries; scratch
memory of `over_warps`, four rows for each of up to four consumers.  The last is the number of rows."""
PER_LANE = plgpu.Layout.WG_STRIDED((LANES,), 1)
PLAIN = plgpu.RefType()
Array = plgpu.ShapeDtypeStruct


def words(per_lane: int) -> plgpu.ShapeDtypeStruct:
    """The type of int32 arrays in which each lane holds `per_lane` words, in vectors of four."""
    shape = (LANES * per_lane,)
    return Array(shape, jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_STRIDED(shape, 4))


class Tiles:
    """How products read tiles of quantised entries; the base class of each kind of entry.

    `raw` is a tuple of references to shared memory, whose first axis is the stage.
    """

    @property
    def scaled(self) -> bool:
        """Whether tokens have scales of their own, which `load_scales` loads."""
        return False

    @property
    def weight_groups(self) -> int:
        """How many groups of values have a scale of their own; their weights differ then."""
        return 1

    @property
    def score_groups(self) -> int:
        """The sums that make up the scores: those that have scales of their own, then those that have none."""
        return 1

    def score_group(self, key_group: int) -> int:
        """The sum of which the products with a group of keys are part."""
        del key_group
        return 0

    @property
    def unit(self) -> float:
        """How many times too small converted keys and values are."""
        return 1.0

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the buffer, as the kernel sees it."""
        return jnp.dtype(jnp.uint8)

    @property
    def _convert(self) -> str:
        """PTX that converts a word of four values to two words of float16 values."""
        return E4M3_TO_F16

    @property
    def _pairs(self) -> conversions.Pairs:
        """The order of keys: of every 8 columns, the pairs that share a register."""
        return conversions.IN_ORDER

    def is_wide(self, key_group: int) -> bool:
        """Whether this group of keys is stored as bf16."""
        del key_group
        return False

    @property
    def query_dtypes(self) -> tuple[np.dtype, ...]:
        """The dtypes of the arrays in shared memory that hold the queries."""
        raise NotImplementedError

    @property
    def query_groups(self) -> tuple[int, ...]:
        """The width of each of these arrays, in groups of 64 columns.  Keys have as many groups in total."""
        raise NotImplementedError

    @property
    def value_groups(self) -> int:
        """The number of groups of 128 columns in the values of a token."""
        raise NotImplementedError

    @property
    def key_groups(self) -> int:
        """The number of groups of 64 columns in the key of a token."""
        return sum(self.query_groups)

    def key_batches(self, size: int) -> list[tuple[range, range]]:
        """The groups of keys, up to `size` at once, each time with those that follow."""
        return _in_batches(self.key_groups, size)

    def value_batches(self, size: int) -> list[tuple[range, range]]:
        """The steps of 16 tokens' values, up to `size` at once, each time with those that follow."""
        return _in_batches(STEPS, size)

    @property
    def _values(self) -> plgpu.ShapeDtypeStruct:
        """The type of the part of 16 tokens' values that a lane loads."""
        return words(4 * self.value_groups)

    @property
    def _queries(self) -> plgpu.ShapeDtypeStruct:
        """The type of the part of a request's queries that a lane loads."""
        return words(4 * self.key_groups)

    @property
    def _swapped(self) -> bool:
        """Whether odd quads load the second token of a pair first."""
        return False

    def stages(self, most: int, consumers: int) -> int:
        """How many tiles fit in shared memory, up to `most`: a multiple of `consumers`."""
        del consumers
        return most

    def raw_types(self, stages: int) -> tuple[pl.MemoryRef, ...]:
        """The types of the shared memory that holds `stages` tiles."""
        raise NotImplementedError

    def copies(self, pages) -> int:
        """The number of copies that fetch a tile."""
        raise NotImplementedError

    def operands(self, buffer: Buffer, pages: Pages) -> list[jax.Array]:
        """The kernel operands that parts of pages are copied from, one for each part: views of `buffer`, no copies."""
        raise NotImplementedError

    def loader(self, refs, table: PageTable, layer, head) -> "PagedKeys | PagedPlanes | EntryPages":
        """The loader of the tiles of a layer and head: it has the methods `look_up` and `fetch` of `Keys`."""
        raise NotImplementedError

    def parts(self, raw, stage, full) -> tuple[Columns, ...]:
        """The parts of a tile's entries that the loader fetches to this stage of the references `raw`."""
        raise NotImplementedError

    def load_keys(self, raw, stage, group: int) -> jax.Array:
        """The 64 columns from 64 * `group` on of a tile of keys, as bytes."""
        raise NotImplementedError

    def load_values(self, raw, stage, step: int) -> jax.Array:
        """The values of tokens 16 * `step` to 16 * `step` + 15 of a tile, as bytes."""
        raise NotImplementedError

    def load_scales(self, raw, stage) -> tuple[list[jax.Array], list[jax.Array]]:
        """The scales of a tile, float32 arrays [64]: of the first sums of scores, and of the groups of values."""
        del raw, stage
        return [], []

    def clear(self, raw, stage, first, end) -> None:
        """Zeroes the values of tokens `first` to `end` of a tile: their weights are 0, but 0 x NaN is NaN."""
        lax.fori_loop(first, end, lambda row, _: self._clear_token(raw, stage, row), None)

    def _clear_token(self, raw, stage, row) -> None:
        raise NotImplementedError

    def convert_keys(self, loaded, group: int) -> jax.Array:
        """Converts what `load_keys` returned to a [64, 64] operand of 16-bit floats."""
        wide = self.is_wide(group)
        dtype = jnp.bfloat16 if wide else jnp.float16

        @plgpu.inline_mgpu(
            arg_types=(words(16 if wide else 8).layout,),
            return_type=Array((TILE, KEY_GROUP), jnp.dtype(dtype), layout=WGMMA),
        )
        def convert(_, loaded):
            return conversions.convert_keys(loaded, WGMMA, self._convert, wide=wide)

        return convert(loaded)

    def convert_values(self, loaded, group: int) -> jax.Array:
        """Converts a group of what `load_values` returned to a float16 operand [128, 16], columns by tokens."""

        @plgpu.inline_mgpu(
            arg_types=(self._values.layout,), return_type=Array((GROUP, N), jnp.dtype(jnp.float16), layout=WGMMA)
        )
        def convert(_, loaded):
            return conversions.convert_values(loaded, WGMMA, group, self._convert, swapped=self._swapped)

        return convert(loaded)

    def over_warps(self, kind: str, x, stats, side) -> jax.Array:
        """The `max` or sum (`add`) of a [64, 16] tile over its rows; rows of `stats` are scratch memory.

        Pallas's own reductions share scratch memory among warpgroups.
        """

        @plgpu.inline_mgpu(
            arg_types=(WGMMA, PLAIN, SCALAR), return_type=Array((N,), jnp.dtype(jnp.float32), layout=COLUMN)
        )
        def reduce(_, x, stats, side):
            return reductions.over_warps(x, stats, SCRATCH, side.registers.item(), kind, COLUMN)

        return reduce(x, stats, jnp.int32(side))

    def store_rows(self, ref, place, parts) -> None:
        """Stores [128, 16] tiles of 16 bits, in the order of values, to `ref` [n, rows, width] in device memory."""
        rows = ref.shape[1]

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, [WGMMA] * self.value_groups))
        def store(_, ref, place, parts):
            stores.store_rows(ref, place.registers.item(), parts, rows)

        store(ref, place, list(parts))

    def load_queries(self, refs, place) -> jax.Array | list[jax.Array]:
        """Loads the queries of a request from arrays [n, rows, ...], unconverted.  `store_queries` converts them."""
        rows = refs[0].shape[1]

        @plgpu.inline_mgpu(arg_types=([PLAIN] * len(refs), SCALAR), return_type=self._queries)
        def load(_, refs, place):
            return array(loads.load_queries(refs, place.registers.item(), rows), self._queries.layout)

        return load(list(refs), place)

    def store_queries(self, refs, stats, stage, loaded) -> None:
        """Stores queries in the order of keys, each row scaled to fit float16; `stats` gets the inverse factors.

        `refs`: shared memory [stages, 16, ...].
        """

        @plgpu.inline_mgpu(
            arg_types=(self._queries.layout,),
            return_type=Array((LANES,), jnp.dtype(jnp.float32), layout=PER_LANE),
        )
        def largest(_, loaded):
            return reductions.largest(loaded, PER_LANE)

        factor, inverse = scale_to_fit(largest(loaded))
        types = [plgpu.RefType(swizzled(1, dtype=ref.dtype).transforms) for ref in refs]

        @plgpu.inline_mgpu(arg_types=(types, PLAIN, SCALAR, self._queries.layout, PER_LANE, PER_LANE))
        def store(_, refs, stats, stage, loaded, factor, inverse):
            stage = stage.registers.item()
            stores.store_queries(refs, self.query_groups, stats, stage, loaded, factor, inverse, INVERSES, self._pairs)

        store(list(refs), stats, stage, loaded, factor, inverse)


def _in_batches(count: int, size: int) -> list[tuple[range, range]]:
    batches = [range(at, min(at + size, count)) for at in range(0, count, size)]
    return list(zip(batches, [*batches[1:], range(0)], strict=True))


@dataclass(frozen=True)
class LatentTiles(Tiles):
    """Tiles of `fp8` or `fp8_ds_mla` entries: one reference, uint8 [stages, bytes of a tile]."""

    entry: MLAEntry

    @property
    def query_groups(self):
        """The groups of 64 columns of the latent queries, and of the rotary queries."""
        return LATENT // KEY_GROUP, ROPE // KEY_GROUP

    @property
    def value_groups(self):
        """The groups of 128 columns of a latent."""
        return LATENT // GROUP

    @property
    def scaled(self):
        """Whether tokens have scales of their own, as in `fp8_ds_mla`: a group of 128 latents has one.

        Rotary keys are bf16 in that case.
        """
        return self.entry.format == "fp8_ds_mla"

    @property
    def weight_groups(self):
        """The groups of 128 latents, if they have scales."""
        return self.value_groups if self.scaled else 1

    @property
    def score_groups(self):
        """The groups of 128 latents, if they have scales, and the rotary part."""
        return self.value_groups + 1 if self.scaled else 1

    def score_group(self, key_group):
        """Two groups of 64 columns share a scale."""
        return key_group * KEY_GROUP // GROUP if self.scaled else 0

    def is_wide(self, key_group):
        """The rotary part of `fp8_ds_mla` is bf16."""
        return self.scaled and key_group == self.key_groups - 1

    @property
    def query_dtypes(self):
        """Latent queries are float16.  Rotary queries have the dtype of rotary keys."""
        return jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16 if self.scaled else jnp.float16)

    @property
    def scales_at(self) -> int:
        """The byte of an entry at which its scales begin."""
        return next(part.offset for part in self.entry.fields() if part.name == "scales")

    @property
    def _swapped(self):
        return self.entry.nbytes % 128 == 64

    def raw_types(self, stages: int):
        """The type of the shared memory for entries."""
        return (plgpu.SMEM((stages, TILE * self.entry.nbytes), jnp.uint8),)

    def copies(self, pages) -> int:
        """The number of copies that fetch a tile: one per block that it lies in."""
        return copies_per_tile(pages)

    def operands(self, buffer: Buffer, pages) -> list[jax.Array]:
        """The kernel operand that pages are copied from.  It is a view of `buffer`, not a copy."""
        return [one_array(buffer).reshape(row_view(pages).shape)]

    def loader(self, refs, table: PageTable, layer, head):
        """The loader of the tiles of a layer."""
        del head
        return EntryPages(refs[0], table, layer)

    def parts(self, raw, stage, full):
        """Returns the only part: whole entries."""
        return (Columns(0, self.entry.nbytes, raw[0].at[stage], full),)

    def load_keys(self, raw, stage, group):
        """Loads 64 columns of keys.  The last group is the rotary part."""
        wide = self.is_wide(group)
        held = words(16 if wide else 8)

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=held)
        def load(_, ref, stage):
            found = loads.load_entry_keys(ref, stage.registers.item(), self.entry.nbytes, group, wide=wide)
            return array(found, held.layout)

        return load(raw[0], stage)

    def load_values(self, raw, stage, step):
        """Loads the latents of 16 tokens, from the same bytes as keys."""

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=self._values)
        def load(_, ref, stage):
            nbytes, swapped = self.entry.nbytes, self._swapped
            found = loads.load_of_tokens(
                ref, stage.registers.item(), nbytes, step, groups=self.value_groups, swapped=swapped
            )
            return array(found, self._values.layout)

        return load(raw[0], stage)

    def load_scales(self, raw, stage):
        """Loads the scales of a tile, one per token and 128 latents."""
        if not self.scaled:
            return [], []
        types = [Array((TILE,), jnp.dtype(jnp.float32), layout=ROW)] * self.value_groups

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=types)
        def load(_, ref, stage):
            return loads.load_scales(
                ref, stage.registers.item(), self.entry.nbytes, self.scales_at, ROW, self.value_groups
            )

        scales = load(raw[0], stage)
        return scales, scales

    def _clear_token(self, raw, stage, row):
        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, SCALAR))
        def clear(_, ref, stage, row):
            stores.clear_entry(ref, stage.registers.item(), self.entry.nbytes, row.registers.item())

        clear(raw[0], stage, row)


class EntryPages:
    """Copies tiles of entries from pages with contiguous tokens, by one bulk copy per block that a tile lies in."""

    def __init__(self, kv_ref, table: PageTable, layer):
        self._kv_ref, self._table, self._layer = kv_ref, table, layer
        self._view = row_view(table.pages)

    def look_up(self, request, first_token):
        """The blocks that a tile lies in.  Call it one tile ahead, so that nothing waits for these loads."""
        return self._table.blocks(request, first_token)

    def fetch(self, found, first_token, entries: Columns) -> None:
        """Starts the copies of a tile."""
        width = self._table.pages.width
        size = self._table.copy_rows * width
        for first_row, block, token in self._table.copies(found, first_token):
            *row, column = self._view.index(layer=self._layer, block=block, token=token)
            source = self._kv_ref.at[*row, pl.ds(column, size)]
            into = entries.into.at[pl.ds(first_row * width, size)]
            plgpu.copy_gmem_to_smem(source, into, entries.full, oob_mode=IN_BOUNDS)


class PagedPlanes:
    """Copies tiles of keys and of values that lie apart: the first part of a tile from the keys, the second from the
    values."""

    def __init__(self, refs, views, table: PageTable, layer, head):
        self._planes = [PagedKeys(ref, view, table, layer, head) for ref, view in zip(refs, views, strict=True)]

    def look_up(self, request, first_token):
        """The blocks of a tile."""
        return self._planes[0].look_up(request, first_token)

    def fetch(self, found, first_token, *parts: Columns) -> None:
        """Starts one TMA copy per part and block that the tile lies in."""
        for plane, part in zip(self._planes, parts, strict=True):
            plane.fetch(found, first_token, part)


ROOM = 160 * 1024
"""Bytes of shared memory for tiles."""
SWIZZLED = plgpu.RefType(swizzled(1, dtype=jnp.uint8).transforms)


@dataclass(frozen=True)
class KVTiles(Tiles):
    """What tiles of keys and values have in common, whatever the format of their entries."""

    entry: KVEntry
    apart: bool = False
    """Whether keys and values lie apart.  There are two references then, to keys and to values."""

    @property
    def _widths(self) -> tuple[int, ...]:
        """Bytes from a token to the next, in each of the references."""
        raise NotImplementedError

    @property
    def query_dtypes(self):
        """The queries are one float16 array."""
        return (jnp.dtype(jnp.float16),)

    @property
    def query_groups(self):
        """The groups of 64 columns of a head's queries."""
        return (self.entry.head_dim // KEY_GROUP,)

    @property
    def value_groups(self):
        """The groups of 128 columns of a head's values.  Narrow values fill half of one."""
        return -(-self.entry.value_dim // GROUP)

    @property
    def narrow(self) -> bool:
        """Whether keys and values have 64 columns each.  An operand of values then has every column twice."""
        return self.entry.value_dim < GROUP

    def stages(self, most, consumers):
        """How many tiles fit in shared memory."""
        return min(most, ROOM // (consumers * TILE * sum(self._widths)) * consumers)

    def copies(self, pages) -> int:
        """The number of copies that fetch a tile: one per reference and block that it lies in."""
        return len(self._widths) * copies_per_tile(pages)

    def _views(self, pages: Pages) -> list[TokenRows]:
        """The views of the buffer that entries are copied from, or keys and values."""
        return [token_rows(part, second=bool(i)) for i, part in enumerate(pages.parts)]

    def operands(self, buffer: Buffer, pages) -> list[jax.Array]:
        """The kernel operands that parts of pages are copied from, one for each part: views of `buffer`, no copies."""
        views = self._views(pages)
        return [view.of(array) for view, array in zip(views, arrays_of(buffer, len(views)), strict=True)]

    def loader(self, refs, table: PageTable, layer, head):
        """The loader of the tiles of a layer and head."""
        views = self._views(table.pages)
        if self.apart:
            return PagedPlanes(refs, views, table, layer, head)
        return PagedKeys(refs[0], views[0], table, layer, head)


class HeadTiles(KVTiles):
    """Tiles of `fp8` entries: two references, keys uint8 [stages, 64, D] and values [stages, 64, Dv].

    Of narrow entries, there is one reference, uint8 [stages, 64, 128], to keys and values side by side.  Narrow keys
    and values that lie apart are `RowTiles`.
    """

    @property
    def _widths(self):
        return (self.entry.nbytes,) if self.narrow else self.entry.sizes

    def raw_types(self, stages: int):
        """The types of the shared memory for keys and values."""
        return tuple(swizzled(stages, TILE, width, dtype=jnp.uint8) for width in self._widths)

    def parts(self, raw, stage, full):
        """The keys and the values of an entry: two ranges of its columns, which are copied separately, or one."""
        firsts = (0, 0 if self.apart else self.entry.head_dim)[: len(raw)]
        return tuple(
            Columns(first, width, ref.at[stage], full)
            for ref, first, width in zip(raw, firsts, self._widths, strict=True)
        )

    def load_keys(self, raw, stage, group):
        """Loads 64 columns of keys, from the first reference of `raw`."""
        held = words(8)

        @plgpu.inline_mgpu(arg_types=(SWIZZLED, SCALAR), return_type=held)
        def load(_, ref, stage):
            found = loads.load_head_keys(ref, stage.registers.item(), self._widths[0], group)
            return array(found, held.layout)

        return load(raw[0], stage)

    def load_values(self, raw, stage, step):
        """Loads the values of 16 tokens, from the last reference of `raw`."""

        @plgpu.inline_mgpu(arg_types=(SWIZZLED, SCALAR), return_type=self._values)
        def load(_, ref, stage):
            found = loads.load_head_values(ref, stage.registers.item(), self._widths[-1], step, narrow=self.narrow)
            return array(found, self._values.layout)

        return load(raw[-1], stage)

    def _clear_token(self, raw, stage, row):
        @plgpu.inline_mgpu(arg_types=(SWIZZLED, SCALAR, SCALAR))
        def clear(_, ref, stage, row):
            stores.clear_head_values(ref, stage.registers.item(), self._widths[-1], row.registers.item())

        clear(raw[-1], stage, row)


class Region(NamedTuple):
    """Where the keys or the values of a tile lie in shared memory."""

    reference: int
    """The index of the reference."""
    nbytes: int
    """From a token to the next, in bytes."""
    first: int
    """The byte of a token at which they begin."""
    scales: int
    """The byte of a token at which their scales begin; 0 if they have none."""


class RowTiles(KVTiles):
    """Tiles of rows as they are stored: uint32 [stages, 64, words], of whole entries, or of keys and of values.

    Keys and values that lie apart are in two such references.  Their rows are padded to an odd number of 16 bytes, so
    that loads are aligned, and words of eight neighbouring rows are in different banks.  The methods here are those of
    `fp8` entries.
    """

    @property
    def dtype(self):
        """Words: TMA copies at most 256 elements of a row."""
        return jnp.dtype(jnp.uint32)

    @property
    def _widths(self):
        if not self.apart:
            return (self.entry.nbytes,)
        sizes = (sum(field.nbytes for field in plane) for plane in self.entry.planes)
        return tuple((-(-size // ALIGNMENT) | 1) * ALIGNMENT for size in sizes)

    @property
    def regions(self) -> tuple[Region, Region]:
        """Where keys and values lie."""
        found = []
        for n, name in enumerate(self.entry.named_sizes):
            reference, fields = (n, self.entry.planes[n]) if self.apart else (0, self.entry.fields())
            first = {field.name: field.offset for field in fields}
            found.append(Region(reference, self._widths[reference], first[name], first.get(f"{name} scales", 0)))
        keys, values = found
        return keys, values

    def raw_types(self, stages: int):
        """The types of the shared memory for rows."""
        return tuple(plgpu.SMEM((stages, TILE, width // self.dtype.itemsize), self.dtype) for width in self._widths)

    def parts(self, raw, stage, full):
        """Whole rows of each reference."""
        return tuple(Columns(0, ref.shape[-1], ref.at[stage], full) for ref in raw)

    def _loaded_keys(self, ref, stage, region: Region, group) -> Any:
        """The registers of 64 columns of keys, with which rows begin."""
        return loads.load_entry_keys(ref, stage, region.nbytes, group, wide=False)

    def _loaded_values(self, ref, stage, region: Region, step) -> Any:
        """The registers of the values of 16 tokens."""
        return loads.load_of_tokens(
            ref, stage, region.nbytes, step,
            offset=region.first, groups=self.value_groups, swapped=False, narrow=self.narrow,
        )  # fmt: skip

    def load_keys(self, raw, stage, group):
        """Loads 64 columns of keys, with their scales if they are converted together."""
        held, (keys, _) = words(8), self.regions

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=held)
        def load(_, ref, stage):
            return array(self._loaded_keys(ref, stage.registers.item(), keys, group), held.layout)

        return load(raw[keys.reference], stage)

    def load_values(self, raw, stage, step):
        """Loads the values of 16 tokens, with their scales likewise."""
        _, values = self.regions

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=self._values)
        def load(_, ref, stage):
            return array(self._loaded_values(ref, stage.registers.item(), values, step), self._values.layout)

        return load(raw[values.reference], stage)

    def _clear_token(self, raw, stage, row):
        _, values = self.regions

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, SCALAR))
        def clear(_, ref, stage, row):
            stores.clear_entry(ref, stage.registers.item(), values.nbytes, row.registers.item())

        clear(raw[values.reference], stage, row)


class Int8Tiles(RowTiles):
    """Tiles of `int8` entries, whose tokens have a scale of keys and one of values."""

    @property
    def scaled(self):
        """Scores are multiplied by the scales of keys, and weights by those of values."""
        return True

    @property
    def _convert(self):
        return INT8_TO_F16

    def load_scales(self, raw, stage):
        """Loads the scales of a tile: of keys, and of values."""
        if self.apart:
            keys, values = (self._load_scales(raw, stage, region, 1)[0] for region in self.regions)
        else:
            keys, values = self._load_scales(raw, stage, self.regions[0], 2)
        return [keys], [values]

    def _load_scales(self, raw, stage, region: Region, count: int):
        types = [Array((TILE,), jnp.dtype(jnp.float32), layout=ROW)] * count

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR), return_type=types)
        def load(_, ref, stage):
            return loads.load_scales(ref, stage.registers.item(), region.nbytes, region.scales, ROW, count)

        return load(raw[region.reference], stage)


class Nvfp4Tiles(RowTiles):
    """Tiles of `nvfp4` entries, whose scales are multiplied into keys and values as these are converted."""

    @property
    def unit(self):
        """What conversion by way of e4m3 leaves to do."""
        return conversions.E2M1_UNIT

    @property
    def _pairs(self):
        return conversions.E2M1_PAIRS

    def _loaded_keys(self, ref, stage, region, group):
        """With the scales."""
        return loads.load_e2m1_keys(ref, stage, region.nbytes, region.scales, group)

    def _loaded_values(self, ref, stage, region, step):
        """With the scales."""
        return loads.load_e2m1_of_tokens(
            ref, stage, region.nbytes, region.first, region.scales, step, self.value_groups
        )

    def convert_keys(self, loaded, group):
        """Converts what `load_keys` returned to a float16 operand [64, 64]."""

        @plgpu.inline_mgpu(
            arg_types=(words(8).layout,), return_type=Array((TILE, KEY_GROUP), jnp.dtype(jnp.float16), layout=WGMMA)
        )
        def convert(_, loaded):
            return conversions.convert_e2m1_keys(loaded, WGMMA)

        return convert(loaded)

    def convert_values(self, loaded, group):
        """Converts a group of what `load_values` returned to a float16 operand [128, 16], columns by tokens."""

        @plgpu.inline_mgpu(
            arg_types=(self._values.layout,), return_type=Array((GROUP, N), jnp.dtype(jnp.float16), layout=WGMMA)
        )
        def convert(_, loaded):
            return conversions.convert_e2m1_values(loaded, WGMMA, group)

        return convert(loaded)
