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
`e2m1.py` has another order of keys; its values, in the order above, are transposed by `ldmatrix`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import TILE
from jaxkv_kernels.mosaic_gpu.attention.gather.scaling import scale_to_fit
from jaxkv_kernels.mosaic_gpu.attention.paging.keys import Columns
from jaxkv_kernels.mosaic_gpu.attention.quantised import lanes
from jaxkv_kernels.mosaic_gpu.ptx.convert import E4M3_TO_F16
from jaxkv_kernels.mosaic_gpu.ptx.fragments import array
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, SCALAR, WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled

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
PER_LANE = plgpu.Layout.WG_STRIDED((lanes.LANES,), 1)
PLAIN = plgpu.RefType()
Array = plgpu.ShapeDtypeStruct


def words(per_lane: int) -> Any:
    """The type of int32 arrays in which each lane holds `per_lane` words, in vectors of four."""
    shape = (lanes.LANES * per_lane,)
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
    def dtype(self) -> Any:
        """The dtype of the buffer, as the kernel sees it."""
        return jnp.dtype(jnp.uint8)

    @property
    def _convert(self) -> str:
        """PTX that converts a word of four values to two words of float16 values."""
        return E4M3_TO_F16

    @property
    def _pairs(self) -> lanes.Pairs:
        """The order of keys: of every 8 columns, the pairs that share a register."""
        return lanes.IN_ORDER

    def is_wide(self, key_group: int) -> bool:
        """Whether this group of keys is stored as bf16."""
        del key_group
        return False

    @property
    def query_dtypes(self) -> tuple[Any, ...]:
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
    def _values(self) -> Any:
        """The type of the part of 16 tokens' values that a lane loads."""
        return words(4 * self.value_groups)

    @property
    def _queries(self) -> Any:
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

    def raw_types(self, stages: int) -> tuple[Any, ...]:
        """The types of the shared memory that holds `stages` tiles."""
        raise NotImplementedError

    def copies(self, pages) -> int:
        """The number of copies that fetch a tile."""
        raise NotImplementedError

    def operand(self, buffer, pages) -> Any:
        """The kernel operand that pages are copied from.  It is a view of `buffer`, not a copy."""
        raise NotImplementedError

    def loader(self, ref, table, layer, head) -> Any:
        """The loader of the tiles of a layer and head: it has the methods `look_up` and `fetch` of `Keys`."""
        raise NotImplementedError

    def parts(self, raw, stage, full) -> tuple[Columns, ...]:
        """The parts of a tile's entries that the loader fetches to this stage of the references `raw`."""
        raise NotImplementedError

    def load_keys(self, raw, stage, group: int) -> Any:
        """The 64 columns from 64 * `group` on of a tile of keys, as bytes."""
        raise NotImplementedError

    def load_values(self, raw, stage, step: int) -> Any:
        """The values of tokens 16 * `step` to 16 * `step` + 15 of a tile, as bytes."""
        raise NotImplementedError

    def load_scales(self, raw, stage) -> tuple[list[Any], list[Any]]:
        """The scales of a tile, float32 arrays [64]: of the first sums of scores, and of the groups of values."""
        del raw, stage
        return [], []

    def clear(self, raw, stage, first, end) -> None:
        """Zeroes the values of tokens `first` to `end` of a tile: their weights are 0, but 0 x NaN is NaN."""
        lax.fori_loop(first, end, lambda row, _: self._clear_token(raw, stage, row), None)

    def _clear_token(self, raw, stage, row) -> None:
        raise NotImplementedError

    def convert_keys(self, loaded, group: int) -> Any:
        """Converts what `load_keys` returned to a [64, 64] operand of 16-bit floats."""
        wide = self.is_wide(group)
        dtype = jnp.bfloat16 if wide else jnp.float16

        @plgpu.inline_mgpu(
            arg_types=(words(16 if wide else 8).layout,),
            return_type=Array((TILE, KEY_GROUP), jnp.dtype(dtype), layout=WGMMA),
        )
        def convert(_, loaded):
            return lanes.convert_keys(loaded, WGMMA, self._convert, wide=wide)

        return convert(loaded)

    def convert_values(self, loaded, group: int) -> Any:
        """Converts a group of what `load_values` returned to a float16 operand [128, 16], columns by tokens."""

        @plgpu.inline_mgpu(
            arg_types=(self._values.layout,), return_type=Array((GROUP, N), jnp.dtype(jnp.float16), layout=WGMMA)
        )
        def convert(_, loaded):
            return lanes.convert_values(loaded, WGMMA, group, self._convert, swapped=self._swapped)

        return convert(loaded)

    def over_warps(self, kind: str, x, stats, side) -> Any:
        """The `max` or sum (`add`) of a [64, 16] tile over its rows; rows of `stats` are scratch memory.

        Pallas's own reductions share scratch memory among warpgroups.
        """

        @plgpu.inline_mgpu(
            arg_types=(WGMMA, PLAIN, SCALAR), return_type=Array((N,), jnp.dtype(jnp.float32), layout=COLUMN)
        )
        def reduce(_, x, stats, side):
            return lanes.over_warps(x, stats, SCRATCH, side.registers.item(), kind, COLUMN)

        return reduce(x, stats, jnp.int32(side))

    def store_rows(self, ref, place, parts) -> None:
        """Stores [128, 16] tiles of 16 bits, in the order of values, to `ref` [n, rows, width] in device memory."""
        rows = ref.shape[1]

        @plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, [WGMMA] * self.value_groups))
        def store(_, ref, place, parts):
            lanes.store_rows(ref, place.registers.item(), parts, rows)

        store(ref, place, list(parts))

    def load_queries(self, refs, place) -> Any:
        """Loads the queries of a request from arrays [n, rows, ...], unconverted.  `store_queries` converts them."""
        rows = refs[0].shape[1]

        @plgpu.inline_mgpu(arg_types=([PLAIN] * len(refs), SCALAR), return_type=self._queries)
        def load(_, refs, place):
            return array(lanes.load_queries(refs, place.registers.item(), rows), self._queries.layout)

        return load(list(refs), place)

    def store_queries(self, refs, stats, stage, loaded) -> None:
        """Stores queries in the order of keys, each row scaled to fit float16; `stats` gets the inverse factors.

        `refs`: shared memory [stages, 16, ...].
        """

        @plgpu.inline_mgpu(
            arg_types=(self._queries.layout,),
            return_type=Array((lanes.LANES,), jnp.dtype(jnp.float32), layout=PER_LANE),
        )
        def largest(_, loaded):
            return lanes.largest(loaded, PER_LANE)

        factor, inverse = scale_to_fit(largest(loaded))
        types = [plgpu.RefType(swizzled(1, dtype=ref.dtype).transforms) for ref in refs]

        @plgpu.inline_mgpu(arg_types=(types, PLAIN, SCALAR, self._queries.layout, PER_LANE, PER_LANE))
        def store(_, refs, stats, stage, loaded, factor, inverse):
            stage = stage.registers.item()
            lanes.store_queries(refs, self.query_groups, stats, stage, loaded, factor, inverse, INVERSES, self._pairs)

        store(list(refs), stats, stage, loaded, factor, inverse)


def _in_batches(count: int, size: int) -> list[tuple[range, range]]:
    batches = [range(at, min(at + size, count)) for at in range(0, count, size)]
    return list(zip(batches, [*batches[1:], range(0)], strict=True))
