"""The loop over tiles of keys that all attention kernels share, and the steps before and after it.

A program is given one work tile of the plan (a range of the tokens of a request) and one tile of query rows:

    load_range, query_rows       which tokens, which rows; the kernel then loads the queries
    attend_tiles                 the loop (see its docstring)
    store_results                a whole request is final; a split goes to memory for `splits.combine`

The first part of this file loads tiles of keys and values from entries of any format (`EntryLoads`), for use as
operands of products.  The second is the online softmax over tiles of scores.  It works in base 2, because `exp2` is one
instruction: scores are multiplied by log2(e) once, and the running maximum and the log-sum-exps of splits are in base 2
as well.  Triton inlines all of these functions, so calling them costs nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax
import numpy as np

from jaxkv_kernels.formats.latents.fp8_ds_mla import TILE
from jaxkv_kernels.triton.arithmetic import dot, rounded
from jaxkv_kernels.triton.codecs import (
    computed_once,
    e2m1_unit,
    from_quarters,
    halves,
    in_halves,
    in_quarters,
    int8_halves,
    load_e2m1,
    load_pairs,
    power_of_two_scale,
    widened,
)
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.tiled import TiledEntry, load_part
from jaxkv_kernels.triton.tiles import load_pieces, second_part, slots_of, token_address


@dataclass(frozen=True, kw_only=True)
class Config:
    """The tile sizes and resources of a program, and when requests are split.

    Raises:
      ValueError: Triton cannot compile a kernel with one of the numbers.
    """

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "rows": (16, 32, 64),
        "keys": (16, 32, 64, 128),
        "warps": (4, 8),
        "stages": (1, 2, 3, 4),
        "programs_per_sm": (1, 2, 3, 4),
    }

    rows: int
    """Rows of queries (query tokens x query heads of a KV head) per program: a power of two, at least 16."""
    keys: int
    """Tokens of the cache per tile of the loop: a power of two, at least 16."""
    warps: int
    """Warps per program: a power of two, at most 16."""
    stages: int
    """Stages of Triton's software pipeline over the tiles of keys; 1 is no pipeline."""
    programs_per_sm: int
    """Programs that run on a multiprocessor at the same time, as plans assume."""
    split_multiple: int = 64
    """The length of a split is a multiple of this many tokens.  64 is the usual tile of keys and the usual block
    size, so no tile is loaded for only a few of its keys.
    """
    split_cost: int = 64
    """The fixed cost of a split, in units of the time to process one token.  On an H200, a program that starts, loads
    its queries and stores its split takes about as long as one tile of keys.
    """
    max_waves: int = 4
    """Plans try split sizes for one wave of programs, two waves, and so on up to this many.  With more than 4 waves,
    the fixed costs of the splits exceed the gain from better balance.
    """

    def __post_init__(self):
        for name in ("rows", "keys"):
            self._check_power_of_two(name, least=16)
        self._check_power_of_two("warps", most=16)
        for field in fields(Config):  # kernels check those that they add
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{field.name}` is {value!r}: expected a positive integer")

    def _check_power_of_two(self, name: str, least: int = 1, most: int = 1024):
        value = getattr(self, name)
        if not isinstance(value, int) or not least <= value <= most or value & (value - 1):
            raise ValueError(f"`{name}` is {value!r}: expected a power of two from {least} to {most}")

    def row_tiles(self, rows: int) -> int:
        """The number of programs that share `rows` rows of queries."""
        return -(-rows // self.rows)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def padded_rows(rows: int, most: int) -> int:
    """Rows of a tile: a power of two, at least 16 as tensor cores need, at most `most`."""
    return min(max(16, next_power_of_two(rows)), most)


SCALE_TILE = tl.constexpr(TILE)
"""Values of an `fp8_ds_mla` entry that share a scale."""


def empty_reasons(**arrays: jax.Array) -> Iterator[str]:
    """Reasons against arrays without values."""
    for name, array in arrays.items():
        if not array.size:
            yield f"`{name}` of no values: a kernel would have nothing to do"


@dataclass(frozen=True)
class EntryLoads:
    """How a kernel loads entries; a compile-time constant of the kernel.

    With `latents`, an entry is a latent and a rotary key: keys are both parts, and values are the latents or, with
    `rope_in_values`, both parts.  Otherwise, an entry is a key and a value.

    `_attend_kv` of `gqa.py` supports all values of `ways`, `units` and `per_token`.  `_attend_latents` of `mla.py`
    supports only `ways` of 1, or of 2 for bytes of e4m3, and neither `units` other than 1 nor `per_token`.
    """

    format: str
    """That of keys, or of latents."""
    value_format: str
    """That of values; the same for latents."""
    latents: bool
    first: int
    """The number of values of the latent, or of the key."""
    second: int
    """The number of values of the rotary key, or of the value."""
    first_columns: int
    """Columns of one load of these values, a power of two.  A latent may take several loads."""
    second_columns: int
    stored: tuple[tl.dtype, tl.dtype]
    """The element types of keys and of values in memory; "uint8" for quantised ones."""
    dtype: tl.dtype
    """The type of the operands of products."""
    rope_dtype: tl.dtype
    """The same for products with rotary keys, if entries are latents."""
    native: bool
    """Whether the GPU has instructions that convert e4m3."""
    even: bool
    """Whether all sizes and strides are even numbers of bytes."""
    tiled: TiledEntry | None = None
    """The byte map, of formats whose values have scales by tile; None for `fp8_ds_mla`, `int8` and `nvfp4`."""
    rope_in_values: bool = False
    """Whether values are whole entries: the latents, then the rotary keys."""
    second_at: int | None = 0
    """Bytes from the start of a key to its value; None if values have strides, or an array, of their own."""
    per_load: bool = False
    """Whether each load of an `fp8_ds_mla` latent has a scale per token, by which its scores, and its weights, are
    multiplied; otherwise its values are.  A tile whose scale is at most 2**-39 of the largest of its entry counts as
    0: its weights are float16 (HALF_HEADROOM)."""
    scales_at: tuple[int, int] = (0, 0)
    """Bytes from the start of a key, and from that of a value, to its scales."""

    @property
    def loads(self) -> int:
        """The number of loads for the first part."""
        return -(-self.first // self.first_columns)

    @property
    def formats(self) -> tuple[str, str]:
        """Those of keys and of values."""
        return self.format, self.value_format

    @property
    def ways(self) -> tuple[int, int]:
        """How many tiles each load of keys, and of values, gives: column c is in tile c % ways (see `codecs.py`)."""
        known = {"nvfp4": 4, "int8": 2, "fp8": 2, "fp8_ds_mla": 2 if self.per_load else 1}
        return known.get(self.format, 1), known.get(self.value_format, 1)

    @property
    def units(self) -> tuple[float, float]:
        """How many times too small the tiles of keys, and of values, are."""
        first, second = (e2m1_unit(self.dtype) if name == "nvfp4" else 1.0 for name in self.formats)
        return first, second

    @property
    def per_token(self) -> tuple[bool, bool]:
        """Whether keys, and values, have a scale per token, by which scores, and weights, are multiplied."""
        return self.format == "int8", self.value_format == "int8"

    @property
    def value_tiles(self) -> int:
        """The number of tiles that hold the values."""
        return self.ways[1] * (self.loads if self.latents else 1) + self.rope_in_values

    @property
    def split(self) -> bool:
        """Whether the scales of entries lie apart from their values, in split pages."""
        return self.tiled is not None and self.tiled.scales != self.tiled.values

    @property
    def value_columns(self) -> int:
        """Columns of each tile of values."""
        return (self.first_columns if self.latents else self.second_columns) // self.ways[1]


SMALLEST_EXPONENT = tl.constexpr(-100)
"""The smallest exponent of the powers of two that queries are divided by.  Rows of zeros get this one."""


@triton.jit
def power_of_two_per_row(tiles):
    """Powers of two [n] that bring rows of tiles [n, m] within the range of float16.

    A NaN stays in the row, whatever its divisor.
    """
    largest = tl.zeros((tiles[0].shape[0],), tl.float32)
    for i in tl.static_range(len(tiles)):
        largest = tl.maximum(largest, tl.max(tl.abs(tiles[i].to(tl.float32)), axis=1))
    return power_of_two_scale(largest[:, None], SMALLEST_EXPONENT)[0]


@triton.jit
def split_columns(x, WAYS: tl.constexpr):
    """Divides a tile of queries as loads of entries are divided (`ways`)."""
    if WAYS == 4:
        tiles = in_quarters(x)
    elif WAYS == 2:
        tiles = in_halves(x)
    else:
        tiles = (x,)
    return tiles


@triton.jit
def join_columns(x, WAYS: tl.constexpr):
    """The tile that `split_columns` divides into `x`."""
    if WAYS == 4:
        tile = from_quarters(x)
    elif WAYS == 2:
        tile = tl.interleave(x[0], x[1])
    else:
        tile = x[0]
    return tile


@triton.jit
def load_keys_and_values(buffer, value_buffer, layer, slot, head, known, PAGES: tl.constexpr, LOADS: tl.constexpr):
    """Tiles [n, columns] of the keys and of the values of the entries at `slot` [n] of a head; 0 if not `known`.

    Values of `fp8` are returned as stored, and so are those with scales that are `per_token` or `per_load`.  Others are
    multiplied by their scales.  The third result has the scales [n] of keys that were not multiplied, and the fourth
    those of values.
    """
    key_factors = ()
    value_factors = ()
    entry = token_address(buffer, layer, slot, head, PAGES)
    if LOADS.latents:
        SCALES: tl.constexpr = LOADS.tiled.scales if LOADS.split else PAGES
        scales = token_address(buffer, layer, slot, head, SCALES) if LOADS.split else entry
        NUM_LOADS: tl.constexpr = LOADS.loads
        values = ()
        for i in tl.static_range(NUM_LOADS):
            values += _latent_tile(entry, scales, known, i * LOADS.first_columns, LOADS)
        # The rotary keys come first: their product is the first term of the scores.
        rope = _rope_tile(entry, scales, known, LOADS)
        keys = rope + values
        if LOADS.rope_in_values:
            values += rope
        if LOADS.per_load:
            place = (entry + LOADS.first).to(tl.pointer_type(tl.float32))
            for i in tl.static_range(NUM_LOADS):
                key_factors += (tl.load(place + i, mask=known, other=0.0),)
            value_factors = key_factors
    else:
        keys = _part_tiles(entry, known, 0, LOADS.first, LOADS.first_columns, LOADS)
        value = second_part(entry, value_buffer, layer, slot, head, PAGES, LOADS.second_at)
        values = _part_tiles(value, known, 1, LOADS.second, LOADS.second_columns, LOADS)
        key_scale = (entry + LOADS.scales_at[0]).to(tl.pointer_type(tl.float32))
        value_scale = (value + LOADS.scales_at[1]).to(tl.pointer_type(tl.float32))
        if LOADS.per_token[0]:
            key_factors += (tl.load(key_scale, mask=known, other=0.0),)
        if LOADS.per_token[1]:
            value_factors += (tl.load(value_scale, mask=known, other=0.0),)
    return keys, values, key_factors, value_factors


@triton.jit
def _part_tiles(
    place, known, NUMBER: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, LOADS: tl.constexpr
):  # fmt: skip
    """The tiles of the keys (NUMBER 0) or the values (1), SIZE of them, that begin at `place` [n]."""
    FORMAT: tl.constexpr = LOADS.formats[NUMBER]
    if FORMAT == "nvfp4":
        tiles = load_e2m1(
            place, place + LOADS.scales_at[NUMBER], known,
            SIZE, COLUMNS, LOADS.units[NUMBER], LOADS.dtype, LOADS.native, LOADS.even,
        )  # fmt: skip
    elif FORMAT == "int8":
        tiles = int8_halves(load_pairs(place, known, SIZE, COLUMNS, LOADS.even), LOADS.dtype)
    elif FORMAT == "fp8":
        tiles = halves(load_pairs(place, known, SIZE, COLUMNS, LOADS.even), LOADS.dtype, LOADS.native)
    else:
        tiles = (_plain_tile(place, known, 0, SIZE, COLUMNS, NUMBER, LOADS),)
    return tiles


@triton.jit
def _latent_tile(entry, scales, known, FIRST: tl.constexpr, LOADS: tl.constexpr):
    """The values of latents from FIRST on: one tile, or two if `LOADS.ways` is 2."""
    left: tl.constexpr = LOADS.first - FIRST
    COLUMNS: tl.constexpr = LOADS.first_columns
    if LOADS.format == "fp8_ds_mla" and not LOADS.per_load:
        scales = (entry + LOADS.first).to(tl.pointer_type(tl.float32)) + FIRST // SCALE_TILE
        scale = load_pieces(scales, known, left // SCALE_TILE, COLUMNS // SCALE_TILE)
        scale = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], SCALE_TILE))
        scale = tl.reshape(scale, (scale.shape[0], COLUMNS))
        found = (widened(load_pieces(entry + FIRST, known, left, COLUMNS), scale, LOADS.dtype, LOADS.native),)
    elif LOADS.tiled is not None:
        found = (_tiled_tile(entry, scales, known, 0, FIRST, COLUMNS, LOADS),)
    elif LOADS.ways[0] == 2:
        found = halves(load_pairs(entry + FIRST, known, left, COLUMNS, LOADS.even), LOADS.dtype, LOADS.native)
    else:
        found = (_plain_tile(entry, known, FIRST, left, COLUMNS, 0, LOADS),)
    return found


@triton.jit
def _rope_tile(entry, scales, known, LOADS: tl.constexpr):
    """The rotary keys: one tile, or two of bytes of e4m3."""
    COLUMNS: tl.constexpr = LOADS.second_columns
    if LOADS.format == "fp8_ds_mla":
        ropes = (entry + LOADS.first + 4 * (LOADS.first // SCALE_TILE)).to(tl.pointer_type(tl.bfloat16))
        found = (rounded(load_pieces(ropes, known, LOADS.second, COLUMNS), LOADS.rope_dtype),)
    elif LOADS.tiled is not None:
        found = (_tiled_tile(entry, scales, known, 1, 0, COLUMNS, LOADS),)
    elif LOADS.ways[0] == 2:
        pairs = load_pairs(entry + LOADS.first, known, LOADS.second, COLUMNS, LOADS.even)
        found = halves(pairs, LOADS.dtype, LOADS.native)
    else:
        found = (_plain_tile(entry, known, LOADS.first, LOADS.second, COLUMNS, 0, LOADS),)
    return found


@triton.jit
def _tiled_tile(
    entry, scales, known, NUMBER: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr, LOADS: tl.constexpr
):
    """The values from FIRST on of part NUMBER of entries whose byte map is `LOADS.tiled`."""
    PART: tl.constexpr = LOADS.tiled.parts[NUMBER]
    values = rounded(load_part(entry, scales, known, FIRST, COLUMNS, PART, LOADS.native), LOADS.dtype)
    return values if PART.stored == "float" else computed_once(values)


@triton.jit
def _plain_tile(
    entry, known, FIRST: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, NUMBER: tl.constexpr,
    LOADS: tl.constexpr,
):  # fmt: skip
    """SIZE values, from FIRST on, of entries whose elements have type `stored`[NUMBER]."""
    STORED: tl.constexpr = LOADS.stored[NUMBER]
    values = load_pieces(entry.to(tl.pointer_type(STORED)) + FIRST, known, SIZE, COLUMNS)
    return rounded(values, LOADS.dtype)


LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(float("-inf"))
"""The score of a masked key.  Its weight is 0 for every running maximum, because that is finite."""
NO_KEYS = tl.constexpr(float(np.finfo(np.float32).min))
"""The running maximum of a row before its first key.  It is finite, so that a tile of masked keys gives weights of 0
instead of NaN, and no finite score is below it."""
HALF_HEADROOM = tl.constexpr(14.0)
"""float16 weights are at most 2**14 instead of 1.  Half of the smallest float16, 2**-25, is rounded to 0, so without
this headroom, a weight of 2**-25 times the largest would become 0; with it, the limit is 2**-39.
"""
LEAST_FACTOR = tl.constexpr(2.0**-90)
"""Scales of smaller magnitude count as this in the running maximum, so that weights, before they are multiplied, and
their sums are finite float32 numbers."""
POLYNOMIAL_LIMIT = tl.constexpr(0.55)
"""Below this, `1 - exp2(...)` loses bits to cancellation, and tanh is a polynomial (relative error below 2**-23)."""


@triton.jit
def cap_scores(score, CAP: tl.constexpr, DTYPE: tl.constexpr):
    """CAP * tanh(score / CAP), multiplied by log2(e).  If CAP is None, `score` is only multiplied.

    DTYPE is the dtype of the weights.  For 16-bit weights, a shorter formula is precise enough near 0.
    """
    if CAP is None:
        result = score * LOG2E
    else:
        decay = tl.exp2(tl.abs(score) * (-2 * LOG2E / CAP))
        size = CAP * LOG2E * (1 - decay) / (1 + decay)
        result = tl.where(score < 0, -size, size)
        if tl.float32 == DTYPE:
            x = score * (1 / CAP)
            u = x * x
            series = u * (-0.33332957 + u * (0.13320941 + u * (-0.05268408 + u * 0.01645864)))
            result = tl.where(tl.abs(x) < POLYNOMIAL_LIMIT, (score + score * series) * LOG2E, result)
    return result


@triton.jit
def update_max(score, row_max, size, DTYPE: tl.constexpr):
    """Adds a tile of scores [rows, keys] to the running maximum `row_max` [rows].

    Returns the weights exp2(score - new maximum) of the tile, the factor [rows] by which earlier sums are rescaled, and
    the new maximum.  Where weights will be float16 (DTYPE), the maximum is lowered by HALF_HEADROOM.

    If weights will be multiplied by scales of the keys, `size` [keys] is log2 of the largest magnitude of each key, and
    the maximum is that of the products; otherwise it is None.
    """
    new_max = tl.max(score if size is None else score + size[None, :], axis=1)
    if tl.float16 == DTYPE:
        new_max -= HALF_HEADROOM
    new_max = tl.maximum(row_max, new_max)
    return tl.exp2(score - new_max[:, None]), tl.exp2(row_max - new_max), new_max


@triton.jit
def update_sum(row_sum, rescale, weight):
    """Adds a tile of weights [rows, keys] to the running sums.

    If `row_sum` is [rows], weights are reduced across threads for every tile.  Otherwise, there are several sums per
    row, which are reduced once at the end.  This takes more registers, but no exchange between threads in the loop.
    With [rows, keys], there is a sum per column of the tile.  With [rows, keys / 32, 4], there are four for each 32
    columns: of 0 and 1, 8 and 9, 16 and 17, 24 and 25, then of 2 and 3, and so on.  Where warpgroups of Hopper share
    the columns, these are all that a thread has of a row.
    """
    if len(row_sum.shape) == 1:
        result = row_sum * rescale + tl.sum(weight, axis=1)
    elif len(row_sum.shape) == 2:
        result = row_sum * rescale[:, None] + weight
    else:
        weight = tl.reshape(weight, (row_sum.shape[0], row_sum.shape[1], 4, row_sum.shape[2], 2))
        result = row_sum * rescale[:, None, None] + tl.sum(tl.sum(weight, axis=4), axis=2)
    return result


@triton.jit
def normalizer(row_sum):
    """The divisor of results: the row sum, or 1 for rows without keys."""
    return tl.where(row_sum == 0, 1.0, row_sum)


@triton.jit
def normalizer_with_sink(row_max, row_sum, sink):
    """Like `normalizer`, with one more key whose score is `sink` (natural, not base 2) and whose value is 0."""
    return normalizer(row_sum) + tl.exp2(sink * LOG2E - tl.where(row_sum == 0, 0.0, row_max))


@triton.jit
def log2_sum(row_max, row_sum):
    """log2 of the sum of exponentials: -inf for rows without keys."""
    return tl.where(row_sum == 0, float("-inf"), row_max + tl.log2(normalizer(row_sum)))


@triton.jit
def load_range(work_tiles, index):
    """Loads the columns of a work tile except its request: first token, end, and whether it is a split."""
    tile = work_tiles + index * 4
    return tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def query_rows(group, KV_HEADS: tl.constexpr, Q_LEN: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The KV head and the query rows of program `group` of a work tile.

    For each of ROWS rows, it returns the query token, the index among the Q_LEN * HEADS rows of the request, and
    whether that row exists.
    """
    SHARING: tl.constexpr = HEADS // KV_HEADS
    head = group % KV_HEADS
    row = group // KV_HEADS * ROWS + tl.arange(0, ROWS)
    token = row // SHARING
    line = row
    if KV_HEADS > 1:
        line = token * HEADS + head * SHARING + row % SHARING
    return head, token, line, token < Q_LEN


@triton.jit
def _visible(
    known, position, kv_end, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """A mask of the visible keys, [1 or rows, keys].

    A key is visible if it is `known` (its position is in the work tile and its block in the cache), and if its
    `position` [keys] is at most AHEAD (None for no limit) tokens after the row's query token and at most WINDOW - 1
    before it.  `kv_end` [rows] are the positions after the query tokens.
    """
    visible = known[None, :]
    # A single query token sees up to the end of its work tiles.
    if Q_LEN > 1 and AHEAD is not None:
        visible = visible & (position[None, :] - AHEAD < kv_end[:, None])
    if WINDOW is not None:
        visible = visible & (position[None, :] >= kv_end[:, None] - WINDOW)
    return visible


@triton.jit
def _scores(q, k, score, start, end, ONCE: tl.constexpr):
    """`score` [rows, keys] plus the products of tiles `q` [rows, n] with the corresponding tiles `k` [keys, n].

    If another product uses the result of a product, Triton divides only its rows among the warps, which take 16 each.
    With 64 rows and 8 warps on Hopper, both warpgroups then compute all scores.  Where the other product is not in the
    same branch, Triton does not see it, and divides the keys as well.  With ONCE, each product is therefore in a branch
    that is always taken, because `start` < `end`.  The other branch has a product, too, or Triton would move
    conversions of the scores, and with them the softmax, into the branches.

    Otherwise, with few rows, tiles take turns to be added to two sums, because products that add to the same sum wait
    for each other.  With 64 rows, no registers are left for a second sum.
    """
    TWO_SUMS: tl.constexpr = not ONCE and score.shape[0] < 64
    other = tl.zeros(score.shape, tl.float32)
    for i in tl.static_range(len(k)):
        if ONCE:
            # Conditions differ from each other and from that of the loop, or Triton would merge the branches.
            score = dot(q[i], tl.trans(k[i]), score) if start <= end + i else dot(q[i], tl.trans(k[i]), -score)
        elif TWO_SUMS and i % 2 == 1:
            other = dot(q[i], tl.trans(k[i]), other)
        else:
            score = dot(q[i], tl.trans(k[i]), score)
    return score + other if TWO_SUMS else score


@triton.jit
def _attend_tile(
    q, k, v, k_factors, v_factors, scale, visible, acc, row_max, row_sum, start, end,
    LOADS: tl.constexpr, CAP: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Adds a tile of keys and values to `acc`, the running maximum and the row sums; returns all three."""
    score = tl.zeros((q[0].shape[0], k[0].shape[0]), tl.float32)
    size = None
    if LOADS.per_load:
        largest = tl.abs(k_factors[0])
        for i in tl.static_range(len(k_factors)):
            # The tiles of the load, after that of the rotary keys.
            queries, keys = (q[1 + 2 * i], q[2 + 2 * i]), (k[1 + 2 * i], k[2 + 2 * i])
            part = _scores(queries, keys, tl.zeros(score.shape, tl.float32), start, end, ONCE)
            score += part * k_factors[i][None, :]
            largest = tl.maximum(largest, tl.abs(k_factors[i]))
        score = _scores((q[0],), (k[0],), score, start, end, ONCE)
        size = tl.log2(tl.maximum(largest, LEAST_FACTOR))
    else:
        score = _scores(q, k, score, start, end, ONCE)
    if LOADS.per_token[0]:
        score *= k_factors[0][None, :]
    score = tl.where(visible, cap_scores(score * scale, CAP, LOADS.dtype), MASKED)
    weight, rescale, row_max = update_max(score, row_max, size, LOADS.dtype)
    row_sum = update_sum(row_sum, rescale, weight)
    weights = ()
    for i in tl.static_range(len(v_factors)):
        weights += (rounded(weight * v_factors[i][None, :], LOADS.dtype),)
    if len(weights) == 0:
        weights = (rounded(weight, LOADS.dtype),)
    sums = ()
    for i in tl.static_range(len(v)):
        sums += (dot(weights[i * len(weights) // len(v)], v[i], acc[i] * rescale[:, None]),)
    return sums, row_max, row_sum


@triton.jit
def attend_tiles(
    q, scale, buffer, value_buffer, layers, table, last_ends, request, begin, end, head, token,
    PAGES: tl.constexpr, LOADS: tl.constexpr, TABLE: tl.constexpr, TABLE_BLOCK: tl.constexpr, Q_LEN: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr, TRAILING: tl.constexpr, CONFIG: tl.constexpr,
    SUM_PER_COLUMN: tl.constexpr, SCORES_ONCE: tl.constexpr,
):  # fmt: skip
    """Attends with the query tiles `q` to the tokens from `begin` to `end` of a request.

    One iteration per tile of keys, as a timeline (loads are asynchronous copies, up to CONFIG.stages tiles ahead):

        blocks of tile i + 1   loaded (addresses depend on them, so they are one tile ahead of the keys)
        keys of tile i + 1     load ......................................... arrive
        tile i                 scores = q k^T | mask | max, weights | acc = acc * rescale + weights v

    Values are in `value_buffer`: their own array, or `buffer` again.
    `table` [B, TABLE] holds ids of blocks of TABLE_BLOCK tokens: blocks of the cache, or slots if TABLE_BLOCK is 1.
    `last_ends` [B] are the positions after the last query tokens: unclamped lengths or, with TRAILING, clamped lengths
    minus `trailing`.
    SUM_PER_COLUMN: whether the loop has a row sum per column (`update_sum`).
    SCORES_ONCE is that of `LatentConfig`.

    Returns the unnormalized sums (a tuple of float32 [rows, columns], one per tile of values), the running maximum
    [rows], and the row sums [rows].
    """
    ROWS: tl.constexpr = CONFIG.rows
    KEYS: tl.constexpr = CONFIG.keys
    VALUE_TILES: tl.constexpr = LOADS.value_tiles
    VALUE_COLUMNS: tl.constexpr = LOADS.value_columns
    acc = ()
    for _ in tl.static_range(VALUE_TILES):
        acc += (tl.zeros((ROWS, VALUE_COLUMNS), tl.float32),)
    layer = tl.load(layers)
    blocks = slots_of(layer, PAGES) // TABLE_BLOCK
    table += request.to(tl.int64) * TABLE
    key = tl.arange(0, KEYS)
    block = tl.load(table + (begin + key) // TABLE_BLOCK, mask=begin + key < end, other=-1)
    last_end = tl.load(last_ends + request)
    if not TRAILING:
        last_end = tl.minimum(last_end, TABLE * TABLE_BLOCK)
    kv_end = last_end - (Q_LEN - 1) + token
    row_max = tl.full((ROWS,), NO_KEYS, tl.float32)
    SUMS: tl.constexpr = (ROWS, KEYS // 32, 4) if SCORES_ONCE else (ROWS, KEYS) if SUM_PER_COLUMN else (ROWS,)
    row_sum = tl.zeros(SUMS, tl.float32)
    # Triton pipelines loops without products outside branches only if their stages are stated.
    for start in tl.range(begin, end, KEYS, num_stages=CONFIG.stages if SCORES_ONCE else None):
        position = start + key
        known = (block >= 0) & (block < blocks)
        # Unsigned quotients by powers of two are one instruction, signed ones four.
        slot = tl.where(known, block, 0) * TABLE_BLOCK + (position.to(tl.uint32) % TABLE_BLOCK).to(tl.int32)
        ahead = position + KEYS
        block = tl.load(table + ahead.to(tl.uint32) // TABLE_BLOCK, mask=ahead < end, other=-1)
        k, v, k_factors, v_factors = load_keys_and_values(buffer, value_buffer, layer, slot, head, known, PAGES, LOADS)
        visible = _visible(known, position, kv_end, Q_LEN, WINDOW, AHEAD)
        if not SCORES_ONCE:
            acc, row_max, row_sum = _attend_tile(
                q, k, v, k_factors, v_factors, scale, visible, acc, row_max, row_sum, start, end, LOADS, CAP, False
            )
        # A branch that is always taken.  Triton moves it behind the loads of the next tile, which it otherwise begins
        # only after the products.
        elif start < end:
            acc, row_max, row_sum = _attend_tile(
                q, k, v, k_factors, v_factors, scale, visible, acc, row_max, row_sum, start, end, LOADS, CAP, True
            )
    for _ in tl.static_range(len(SUMS) - 1):
        row_sum = tl.sum(row_sum, axis=1)
    return acc, row_max, row_sum


@triton.jit
def store_results(
    acc, row_max, row_sum, out, lse, split_out, split_lse, sinks, index, request, is_split, line, live, head_of_row,
    ALL: tl.constexpr, SIZE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Stores rows of whole requests to `out` [B, ALL, SIZE] and `lse` [B, ALL], those of splits to `split_*`.

    Both are normalized.  The LSE of a whole request is natural, that of a split in base 2.  Sinks must count once per
    request, so `combine` adds them to split requests.
    """
    divisor = normalizer(row_sum)
    if SINKS:
        sink = tl.load(sinks + head_of_row, mask=live)
        divisor = tl.where(is_split == 0, normalizer_with_sink(row_max, row_sum, sink), divisor)
    rows = ()
    for i in tl.static_range(len(acc)):
        rows += (acc[i] / divisor[:, None],)
    log2 = log2_sum(row_max, row_sum)
    if is_split == 0:
        row = request.to(tl.int64) * ALL + line
        _store_rows(out, row, live, rows, SIZE)
        tl.store(lse + row, log2 / LOG2E, mask=live)
    else:
        row = index.to(tl.int64) * ALL + line
        _store_rows(split_out, row, live, rows, SIZE)
        tl.store(split_lse + row, log2, mask=live)


@triton.jit
def _store_rows(array, row, live, tiles, SIZE: tl.constexpr):
    """Stores tiles of adjacent columns to rows `row` [n] of `array` [..., SIZE]."""
    for i in tl.static_range(len(tiles)):
        column = i * tiles[i].shape[1] + tl.arange(0, tiles[i].shape[1])
        target = array + row[:, None] * SIZE + column[None, :]
        result = rounded(tiles[i], array.dtype.element_ty)
        tl.store(target, result, mask=live[:, None] & (column < SIZE)[None, :])
