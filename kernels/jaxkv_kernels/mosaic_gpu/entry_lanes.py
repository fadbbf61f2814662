"""What lanes do to move entries between the cache, or arrays of values, and registers.

Teams.  A team is a warp, or half a warp if no field of an entry has more than 16 chunks.  All lanes of a team compute
the same indices.  Mosaic computes scalars in every lane, so a kernel's scalars may differ from team to team.  A branch
on such a scalar must not contain instructions in which all lanes of a warp take part.

Lanes.  Each of the lanes of a team moves chunk `lane + round * lanes` of a field.  All loads of an entry are issued
before the first is waited for.  Loads and stores are as wide as the alignment of the addresses allows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import batched
from math import gcd
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.formats.int8 import SMALLEST_SCALE
from jaxkv_kernels.mosaic_gpu.entry_fields import CHUNK, WIDEST, Field, PartAddress
from jaxkv_kernels.mosaic_gpu.interpreter.entries import InterpretedLanes
from jaxkv_kernels.mosaic_gpu.ptx import float32, fragments
from jaxkv_kernels.mosaic_gpu.ptx.device_memory import load_byte, load_words, store_byte, store_words
from jaxkv_kernels.mosaic_gpu.ptx.fragments import splat
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, f32, i32, i64
from jaxkv_kernels.mosaic_gpu.ptx.reductions import largest_of_lanes
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

WARP, WARPGROUP = 32, 128
MOST_VALUES = 2048
"""Values of an entry that a team keeps in registers."""
WARPGROUPS = 2
"""Warpgroups per CTA.  One takes the same time; four take up to 20 % more (H200)."""
TOGETHER, MANY, SHORT = 2, 1024, 4
"""A team moves `TOGETHER` entries if one each would take more than `MANY` lanes per multiprocessor, and an entry has
at most `SHORT` chunks per lane.  Otherwise it moves one.

Times for 8,192 latents in microseconds (H200, data not in the L2 cache).  With 1 and 2 entries per team, `fp8` was
written in 6.2 and 5.3, and read in 6.0 and 5.8.  With 1, 2 and 4, `fp8_ds_mla` was written in 5.5, 5.5 and 5.8, and
read in 6.2, 6.1 and 6.1.
"""


@dataclass(frozen=True)
class Teams:
    """Teams of `lanes` lanes that move `entries` entries."""

    lanes: int
    entries: int
    interpret: bool
    together: int
    """Entries per team."""

    @property
    def in_cta(self) -> int:
        """The number of entries of a CTA."""
        return self._warpgroups * WARPGROUP // self.lanes * self.together

    @property
    def _warpgroups(self) -> int:
        return 1 if self.interpret else WARPGROUPS

    def rounds(self, field: Field) -> int:
        """The number of chunks of a field that a lane moves."""
        return -(-field.chunks // self.lanes)

    def run(
        self, name: str, load: Callable[..., Any], store: Callable[..., None], *operands, out_type: Any = ()
    ) -> Any:
        """Runs a kernel in which `store(load(i, inside, *refs), *refs)` moves entry i.

        A team with several entries loads all of them before it stores the first.  Teams past the last entry load that
        one again, with `inside` False, in which case `store` must store nothing.
        """

        def body(*refs):
            first = lax.axis_index("cta") * self.in_cta

            def move(i):
                entries = [i + n for n in range(self.together)]
                loaded = [load(jnp.minimum(i, self.entries - 1), i < self.entries, *refs) for i in entries]
                for one in loaded:
                    store(one, *refs)

            if self.interpret:
                lax.fori_loop(0, self.in_cta, lambda team, _: move(first + team), None)
            else:
                move(first + lax.div(_thread(), jnp.int32(self.lanes)) * self.together)

        body.__name__ = name
        return kernel(
            body,
            interpret=self.interpret,
            auto_barriers=False,
            out_type=out_type,
            grid=(-(-self.entries // self.in_cta),),
            grid_names=("cta",),
            num_threads=self._warpgroups,
            thread_name="wg",
        )(*operands)


def teams(fields: tuple[Field, ...], entries: int, *, most: int = TOGETHER) -> Teams:
    """Teams for entries of these fields, with at most `most` entries each."""
    interpret = bool(interpreting.value)
    lanes = WARP // 2 if max(field.chunks for field in fields) <= WARP // 2 else WARP
    short = sum(-(-field.chunks // lanes) for field in fields) <= SHORT
    together = most if entries * lanes > MANY * multiprocessors() and short and not interpret else 1
    return Teams(lanes, entries, interpret, together)


def _thread():
    """The index of the calling thread in its CTA."""

    @plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR))
    def thread(_):
        return splat(mgpu.utils.thread_idx())

    return thread()


def strided(per_lane: int, together: int) -> Any:
    """The layout of int32 arrays [128 * per_lane] in which a lane holds vectors of `together` words."""
    return plgpu.Layout.WG_STRIDED((WARPGROUP * per_lane,), together)


def array(chunks, kind=None) -> Any:
    """An array in the layout `strided`, made of a lane's chunks: lists of words, or of values of another type."""
    together = min(len(chunks[0]), 4)
    flat = [word for chunk in chunks for word in chunk]
    return fragments.array([*batched(flat, together)], strided(len(flat), together), kind)


def chunks_of(raw, count: int) -> list[list[Any]]:
    """The chunks of `count` words of an array."""
    return [[*chunk] for chunk in batched(fragments.elements(raw), count)]


def scalar(x) -> Any:
    """The register of a scalar."""
    return x.registers.item()


def true(x) -> Any:
    """Whether an int32 scalar is not 0."""
    return arith.cmpi(arith.CmpIPredicate.ne, scalar(x), c32(0))


def both(first, second) -> Any:
    """Whether both conditions hold.  None is a condition that always holds."""
    return first if second is None else second if first is None else arith.andi(first, second)


def times(x, factor: int) -> Any:
    """A non-negative 32-bit integer times a constant, in 64 bits."""
    return arith.muli(arith.extui(i64(), x), c64(factor))


def offset_of(address: PartAddress, index) -> Any:
    """The byte at which a part of an entry lies."""
    found = c64(address.first)
    for i, stride in address.terms(index):
        found = arith.addi(found, times(i, stride))
    return found


AXES = ("layer", "block", "head", "token")
BITS = {"e2m1x2": 4, "e4m3": 8, "int8": 8, "bfloat16": 16, "float16": 16, "float32": 32}
"""Of a value, and so the bytes of a chunk of 8 values."""


@dataclass(frozen=True)
class Lanes:
    """Moves entries on the GPU; `interpreter/entries.py` has the counterpart for the interpreter."""

    teams: Teams

    def buffer(self, buffer):
        """The operand that holds the cache; no copy."""
        return buffer

    def load_values(self, field: Field, ref, i):
        """The chunks of value `field.number` of the i-th entry, from an array [entries, count] of any float dtype."""
        dtype = str(ref.dtype)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=self._words(field, dtype))
        def load(_, ref, i):
            return array(self._load(field, self._in_row(field, ref, i, dtype), dtype, _row_alignment(field, dtype)))

        return load(ref, i)

    def load_rotated(self, field: Field, ref, angle_ref, i, interleaved: bool):
        """`load_values`, rotated by the cosines and sines in the i-th row of float32 `angle_ref` [entries, count].

        The values of a pair are in the same chunk if `interleaved`.  Otherwise, they are in the same places of two
        chunks, of which the lane loads both.
        """
        dtype = str(ref.dtype)
        alignment, angle_alignment = (_row_alignment(field, name) for name in (dtype, "float32"))
        half = field.chunks // 2
        angles = CHUNK // 2 if interleaved else CHUNK

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=self._words(field, dtype))
        def load(_, ref, angle_ref, i):
            row = at(mgpu.utils.memref_ptr(ref), times(scalar(i), field.count * BITS[dtype] // 8))
            angle_row = at(mgpu.utils.memref_ptr(angle_ref), times(scalar(i), field.count * 4))
            loaded = []
            for n, own in enumerate(self._load(field, self._in_row(field, ref, i, dtype), dtype, alignment)):
                active, chunk = self._active(field, n), arith.addi(self._lane(), c32(n * self.teams.lanes))
                second = arith.cmpi(arith.CmpIPredicate.uge, chunk, c32(half))
                pair, other = chunk, None
                if not interleaved:
                    pair = arith.select(second, arith.subi(chunk, c32(half)), chunk)
                    partner = arith.select(second, pair, arith.addi(chunk, c32(half)))
                    place = at(row, times(partner, BITS[dtype]))
                    other = load_words(place, 0, BITS[dtype], min(alignment, BITS[dtype]), active)
                place = at(angle_row, times(pair, 4 * angles))
                cos, sin = (
                    load_words(place, 2 * field.count * part, 4 * angles, angle_alignment, active) for part in range(2)
                )
                loaded.append((own, other, cos, sin, second))
            return array([_rotated(*each, dtype) for each in loaded])

        return load(ref, angle_ref, i)

    def store_entry(self, field: Field, cache_ref, raw, dtype, keep, index, scale):
        """Encodes chunks of `dtype` and stores them in the cache where `keep` holds."""
        scales = () if scale is None else (scale,)

        layout = self._words(field, dtype).layout

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, SCALAR, (SCALAR,) * 4, (SCALAR,) * len(scales)))
        def store(_, ref, raw, keep, index, scales):
            keep, index = true(keep), _by_axis(index)
            chunks = chunks_of(raw, _words_of(dtype))
            first = self._in_entry(field, ref, index)

            if field.scales is not None:
                chunks = self._quantised(field, chunks, dtype, ref, keep, index, *map(scalar, scales))
            elif scales:
                divisor = float32.Divisor(scalar(scales[0]))
                chunks = [
                    float32.narrow(divisor.quotients(float32.widen(chunk, dtype)), field.stored) for chunk in chunks
                ]
            elif field.stored != dtype:
                chunks = [float32.narrow(float32.widen(chunk, dtype), field.stored) for chunk in chunks]
            self._store(field, first, chunks, field.address.alignment, keep)

        store(cache_ref, raw, keep.astype(jnp.int32), tuple(index[axis] for axis in AXES), scales)

    def _quantised(self, field, chunks, dtype, ref, keep, index, *whole):
        """Converts chunks to values with scales, and stores the scales.  `whole` may have the caller's scale."""
        values, rule = [float32.widen(chunk, dtype) for chunk in chunks], field.rule
        if whole:
            divisor = float32.Divisor(*whole, wide=True)
            values = [divisor.quotients(each) for each in values]
        sizes = [float32.largest(each) for each in values]
        for n in range(len(sizes)):
            active = self._active(field, n)
            if active is not None:
                sizes[n] = arith.select(active, sizes[n], c32(0))
        lanes = self.teams.lanes
        if field.tile == field.count:
            size = sizes[0]
            for other in sizes[1:]:
                size = arith.maxui(size, other)
            sizes = [size]
        else:
            lanes = field.tile // CHUNK
        leads = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(self._lane(), c32(lanes - 1)), c32(0))
        first, step = self._scale_place(field, ref, index)
        results = []
        for n, size in enumerate(sizes):
            stored, apply = self._scale(rule, largest_of_lanes(size, lanes))
            active = both(arith.andi(keep, leads), self._active(field, n))
            if rule.itemsize == 1:
                store_byte(first, n * step, stored, active)
            else:
                store_words(first, n * step, [stored], 4, active)
            results.append(apply)
        self._store_zeros(field, ref, keep, index)
        results *= len(values) // len(results)
        return [self._narrowed(rule, apply(each), each) for each, apply in zip(values, results, strict=True)]

    def _scale(self, rule, amax):
        """The scale for a largest magnitude as it is stored, in a word, and the function that divides values by it."""
        if rule.power_of_two:
            bits, inverse = float32.power_of_two_scale(amax, rule.smallest_exponent, rule.largest)
            stored = bits if rule.stored == "float32" else arith.shrui(bits, c32(23))
            return stored, lambda values: float32.scaled(values, inverse)
        if rule.stored == "e4m3":
            stored, scale = float32.e4m3_scale(amax, round_up=rule.round_up)
        else:
            scale = float32.quotient_scale(amax, rule.largest, SMALLEST_SCALE)
            stored = arith.bitcast(i32(), scale)
        return stored, float32.Divisor(scale).quotients

    def _narrowed(self, rule, quotients, values):
        """A chunk of quotients as it is stored."""
        if rule.values == "e2m1x2":
            return float32.narrow_e2m1(quotients, values)
        return float32.narrow(quotients, rule.values)

    def _store_zeros(self, field, ref, keep, index) -> None:
        """Stores the padding of scales, a byte per lane."""
        if field.padding is None:
            return
        address, count = field.padding
        active = arith.andi(keep, arith.cmpi(arith.CmpIPredicate.ult, self._lane(), c32(count)))
        store_byte(at(_place(ref, address, index), times(self._lane(), 1)), 0, c32(0), active)

    def _scale_place(self, field, ref, index):
        """The address of the scale of the lane's first chunk, and the bytes from there to that of the next round."""
        place, rule = _place(ref, field.scales, index), field.rule
        if field.tile == field.count:
            return place, 0
        per_tile = field.tile // CHUNK
        tile, step = arith.shrui(self._lane(), c32(per_tile.bit_length() - 1)), self.teams.lanes // per_tile
        if rule.columns == 1:
            return at(place, times(tile, rule.itemsize)), step * rule.itemsize
        row = arith.shrui(tile, c32(rule.columns.bit_length() - 1))
        column = arith.muli(arith.andi(tile, c32(rule.columns - 1)), c32(field.num_scales // rule.columns))
        return at(place, times(arith.addi(row, column), 1)), step // rule.columns

    def load_entry(self, field: Field, cache_ref, live, index):
        """The stored chunks of a field, and the scales of the chunks; zeros where `live` does not hold."""
        kinds = [self._words(field, field.stored)]
        if field.scales is not None:
            kinds.append(self._scales(field))

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, (SCALAR,) * 4), return_type=tuple(kinds))
        def load(_, ref, live, index):
            live, index = true(live), _by_axis(index)
            first = self._in_entry(field, ref, index)
            found = [array(self._load(field, first, field.stored, field.address.alignment, live))]
            if field.scales is not None:
                first, step = self._scale_place(field, ref, index)
                rounds = range(self.teams.rounds(field))
                found.append(
                    array(
                        [self._load_scale(field, first, n * step, both(live, self._active(field, n))) for n in rounds]
                    )
                )
            return tuple(found)

        found = load(cache_ref, live.astype(jnp.int32), tuple(index[axis] for axis in AXES))
        return found if len(found) > 1 else (*found, None)

    def _load_scale(self, field: Field, first, offset: int, active) -> list[Any]:
        """The bits of a float32 scale."""
        if field.rule.itemsize == 4:
            return load_words(first, offset, 4, 4, active)
        return [float32.scale_of_byte(load_byte(first, offset, active), field.rule.stored)]

    def store_values(self, field: Field, ref, found, i, inside, scale):
        """Decodes chunks and stores them as value `field.number` of the i-th row of an array [entries, count]."""
        raw, own = found
        dtype = str(ref.dtype)
        own, scales = (() if x is None else (x,) for x in (own, scale))
        types = (self._scales(field).layout,) * len(own), (SCALAR,) * len(scales)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self._words(field, field.stored).layout, *types, SCALAR, SCALAR))
        def store(_, ref, raw, own, scales, i, inside):
            chunks = chunks_of(raw, _words_of(field.stored))
            if field.stored != dtype:
                values = [float32.widen(each, field.stored) for each in chunks]
                factors = (
                    [[arith.bitcast(f32(), word)] for (word,) in chunks_of(own[0], 1)] if own else [[]] * len(values)
                )
                for n, each in enumerate(factors):
                    for factor in (*each, *map(scalar, scales)):
                        values[n] = float32.scaled(values[n], factor)
                chunks = [float32.narrow(each, dtype) for each in values]
            first = self._in_row(field, ref, i, dtype)
            self._store(field, first, chunks, _row_alignment(field, dtype), true(inside))

        store(ref, raw, own, scales, i, inside.astype(jnp.int32))

    def zeros(self, field: Field):
        """A float32 array of zeros, in which `add_weighted` sums chunks."""

        @plgpu.inline_mgpu(arg_types=(), return_type=self._floats(field))
        def zeros(_):
            return array([[mgpu.c(0.0, f32())] * CHUNK] * self.teams.rounds(field), f32())

        return zeros()

    def add_weighted(self, field: Field, sums, raw, dtype, weight):
        """`sums`, a float32 array, plus chunks of `dtype` times a weight; chunks without weight may hold anything."""
        kind = self._floats(field)

        @plgpu.inline_mgpu(arg_types=(kind.layout, self._words(field, dtype).layout, SCALAR), return_type=kind)
        def add(_, sums, raw, weight):
            weight = scalar(weight)
            counts = arith.cmpf(arith.CmpFPredicate.OGT, weight, mgpu.c(0.0, f32()))
            found = []
            for chunk, before in zip(chunks_of(raw, _words_of(dtype)), chunks_of(sums, CHUNK), strict=True):
                values = float32.widen([arith.select(counts, word, c32(0)) for word in chunk], dtype)
                found.append(float32.multiplied_and_added(values, weight, before))
            return array(found, f32())

        return add(sums, raw, weight)

    def store_scaled(self, field: Field, ref, values, factor, i, inside) -> None:
        """Stores a float32 array times a factor, rounded, as row i of an array [entries, count]."""
        dtype = str(ref.dtype)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self._floats(field).layout, SCALAR, SCALAR, SCALAR))
        def store(_, ref, values, factor, i, inside):
            chunks = [float32.narrow(float32.scaled(each, scalar(factor)), dtype) for each in chunks_of(values, CHUNK)]
            first = self._in_row(field, ref, i, dtype)
            self._store(field, first, chunks, _row_alignment(field, dtype), true(inside))

        store(ref, values, factor, i, inside.astype(jnp.int32))

    def store_scalar(self, ref, x, i, inside) -> None:
        """Stores a float32 number as element i of an array."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR))
        def store(_, ref, x, i, inside):
            first = arith.cmpi(arith.CmpIPredicate.eq, self._lane(), c32(0))
            place = at(mgpu.utils.memref_ptr(ref), times(scalar(i), 4))
            store_words(place, 0, [arith.bitcast(i32(), scalar(x))], 4, arith.andi(first, true(inside)))

        store(ref, x, i, inside.astype(jnp.int32))

    def _load(self, field: Field, first, dtype: str, alignment: int, condition=None) -> list[list[Any]]:
        """The lane's chunks, the first of which lies at `first`."""
        nbytes, found = BITS[dtype], []
        for n in range(self.teams.rounds(field)):
            offset, active = n * self.teams.lanes * nbytes, both(condition, self._active(field, n))
            found.append(load_words(first, offset, nbytes, min(alignment, nbytes), active))
        return found

    def _store(self, field: Field, first, chunks, alignment: int, condition) -> None:
        """Stores the lane's chunks, the first of them at `first`."""
        nbytes = 4 * len(chunks[0])
        for n, chunk in enumerate(chunks):
            active = both(condition, self._active(field, n))
            store_words(first, n * self.teams.lanes * nbytes, chunk, min(alignment, nbytes), active)

    def _in_row(self, field: Field, ref, i, dtype: str) -> Any:
        """The address of the lane's first chunk in row i of an array [entries, count]."""
        row = times(scalar(i), field.count * BITS[dtype] // 8)
        return at(mgpu.utils.memref_ptr(ref), arith.addi(row, times(self._lane(), BITS[dtype])))

    def _in_entry(self, field: Field, ref, index) -> Any:
        """The address of the lane's first chunk in the cache."""
        return at(_place(ref, field.address, index), times(self._lane(), BITS[field.stored]))

    def _lane(self) -> Any:
        """The index of the calling lane in its team."""
        return arith.andi(mgpu.utils.thread_idx(), c32(self.teams.lanes - 1))

    def _active(self, field: Field, n: int) -> Any:
        """Whether the lane has a chunk in round n; None if all have."""
        left = field.chunks - n * self.teams.lanes
        return None if left >= self.teams.lanes else arith.cmpi(arith.CmpIPredicate.ult, self._lane(), c32(left))

    def _words(self, field: Field, dtype: str) -> Any:
        """The type of int32 arrays of chunks of `dtype`."""
        return self._array_type(field, _words_of(dtype), jnp.int32)

    def _scales(self, field: Field) -> Any:
        """The type of int32 arrays with a scale per chunk."""
        return self._array_type(field, 1, jnp.int32)

    def _floats(self, field: Field) -> Any:
        """The type of float32 arrays of chunks."""
        return self._array_type(field, CHUNK, jnp.float32)

    def _array_type(self, field: Field, per_chunk: int, dtype) -> Any:
        per_lane = self.teams.rounds(field) * per_chunk
        return plgpu.ShapeDtypeStruct((WARPGROUP * per_lane,), dtype, layout=strided(per_lane, min(per_chunk, 4)))


def _rotated(own, other, cos, sin, second, dtype: str) -> list[Any]:
    """A rotated chunk of `dtype`.  `other` has the other value of each pair, or is None if `own` has both.

    `second` is whether `own` has the second values.
    """
    values, (cos, sin) = float32.widen(own, dtype), (float32.widen(each, "float32") for each in (cos, sin))
    minus = [float32.negated(x) for x in sin]
    if other is None:
        others = [value for pair in zip(values[1::2], values[::2], strict=True) for value in pair]
        cos = [x for x in cos for _ in range(2)]
        sin = [x for pair in zip(minus, sin, strict=True) for x in pair]
    else:
        others = float32.widen(other, dtype)
        sin = [arith.select(second, *pair) for pair in zip(sin, minus, strict=True)]
    return float32.narrow(float32.sums_of_products(values, cos, others, sin), dtype)


def _words_of(dtype: str) -> int:
    """The number of words of a chunk."""
    return BITS[dtype] // 4


def _row_alignment(field: Field, dtype: str) -> int:
    """The alignment in bytes of the rows of an array [entries, count], at most `WIDEST`."""
    return gcd(WIDEST, field.count * BITS[dtype] // 8)


def _by_axis(index) -> dict[str, Any]:
    return dict(zip(AXES, map(scalar, index), strict=True))


def _place(ref, address: PartAddress, index) -> Any:
    """The address at which a part of an entry begins."""
    return at(mgpu.utils.memref_ptr(ref), offset_of(address, index))


def mover(teams: Teams) -> Any:
    """`Lanes`, or its counterpart in the interpreter."""
    if teams.interpret:
        return InterpretedLanes()
    return Lanes(teams)


def step_of(scale_ref) -> int:
    """The step from one head's scale to the next: 1 in scales [H], 0 in scales [1], which all heads share."""
    return int(scale_ref.shape[0] > 1)


def scale_of(field: Field, scales) -> Any:
    """The caller's scale of a field; None if it has none.  `scales` has one per value, or a single one for all."""
    return scales[min(field.number, len(scales) - 1)] if field.scaled else None
