"""What a lane does to move its chunks of an entry (`teams.py` has the mapping of lanes): loads, conversions, stores.

Each of the lanes of a team moves chunk `lane + round * lanes` of a field.  All loads of an entry are started before the
first is waited for.  Widths are those that the alignment of the addresses allows.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.entries import words
from jaxkv_kernels.mosaic_gpu.entries.fields import CHUNK, WIDEST, Field, PartAddress
from jaxkv_kernels.mosaic_gpu.entries.teams import WARPGROUP, Teams
from jaxkv_kernels.mosaic_gpu.entries.words import c32, f32, i32, ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

AXES = ("layer", "block", "head", "token")
ITEMSIZES = {"e4m3": 1, "bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Lanes:
    """Moves entries on the GPU; `interpreted.py` has the counterpart for the interpreter."""

    teams: Teams

    def buffer(self, buffer):
        """The operand that holds the cache; no copy."""
        return buffer

    def load_values(self, field: Field, ref, i):
        """The chunks of value `field.number` of the i-th entry, from an array [entries, count] of any float dtype."""
        dtype = str(ref.dtype)
        chunk = CHUNK * ITEMSIZES[dtype]
        row = field.count * ITEMSIZES[dtype]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=self._registers(field, chunk))
        def load(_, ref, i):
            lane = self._lane()
            first = _at(mgpu.utils.memref_ptr(ref), arith.addi(_times(_scalar(i), row), _times(lane, chunk)))
            return _array(
                [
                    _load(
                        first,
                        n * self.teams.lanes * chunk,
                        chunk,
                        gcd(WIDEST, row, chunk),
                        self._active(field, lane, n),
                    )
                    for n in range(self.teams.rounds(field))
                ]
            )

        return load(ref, i)

    def store_entry(self, field: Field, cache_ref, raw, dtype, keep, index, scale):
        """Encodes chunks of `dtype` and stores them in the cache where `keep` holds."""
        scales = () if scale is None else (scale,)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), self._layout(field, dtype), SCALAR, (SCALAR,) * 4, (SCALAR,) * len(scales))
        )
        def store(_, ref, raw, keep, index, scales):
            lane, base = self._lane(), mgpu.utils.memref_ptr(ref)
            keep = _true(keep)
            index = dict(zip(AXES, map(_scalar, index), strict=True))
            chunks = _chunks(raw, CHUNK * ITEMSIZES[dtype] // 4)
            if field.scales is not None:
                chunks = self._quantised(field, chunks, dtype, base, keep, index, lane)
            elif field.stored != dtype:
                values = [words.widen(chunk, dtype) for chunk in chunks]
                if scales:
                    divisor = words.Divisor(_scalar(scales[0]))
                    values = [divisor.quotients(each) for each in values]
                chunks = [words.narrow(each, field.stored) for each in values]
            nbytes = CHUNK * ITEMSIZES[field.stored]
            first = _at(base, arith.addi(_offset(field.address, index), _times(lane, nbytes)))
            for n, chunk in enumerate(chunks):
                active = _both(keep, self._active(field, lane, n))
                _store(first, n * self.teams.lanes * nbytes, chunk, min(field.address.alignment, nbytes), active)

        store(cache_ref, raw, keep.astype(jnp.int32), tuple(index[axis] for axis in AXES), scales)

    def _quantised(self, field, chunks, dtype, base, keep, index, lane):
        """Chunks of e4m3, whose scales this stores."""
        values = [words.widen(chunk, dtype) for chunk in chunks]
        sizes = [words.largest(each) for each in values]
        for n in range(len(sizes)):
            active = self._active(field, lane, n)
            if active is not None:
                sizes[n] = arith.select(active, sizes[n], c32(0))
        if field.tile == field.count:
            size = sizes[0]
            for other in sizes[1:]:
                size = arith.maxui(size, other)
            sizes, lanes = [size], self.teams.lanes
        else:
            lanes = field.tile // CHUNK
        first = _at(base, _offset(field.scales, index))
        leads = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, c32(lanes - 1)), c32(0))
        inverses = []
        for n, size in enumerate(sizes):
            scale, inverse = words.power_of_two_scale(words.largest_of_lanes(size, lanes), field.smallest_exponent)
            tile = arith.shrui(lane, c32(lanes.bit_length() - 1))
            into = _at(first, _times(tile, 4))
            active = _both(arith.andi(keep, leads), self._active(field, lane, n))
            _store(into, n * (self.teams.lanes // lanes) * 4, [scale], 4, active)
            inverses.append(inverse)
        inverses *= len(values) // len(inverses)
        return [words.narrow(words.scaled(each, by), "e4m3") for each, by in zip(values, inverses, strict=True)]

    def load_entry(self, field: Field, cache_ref, live, index):
        """The stored chunks of a field, and the scales of the chunks; zeros where `live` does not hold."""
        chunk = CHUNK * ITEMSIZES[field.stored]
        rounds = self.teams.rounds(field)
        kinds = [self._registers(field, chunk)]
        if field.scales is not None:
            kinds.append(plgpu.ShapeDtypeStruct((WARPGROUP * rounds,), jnp.int32, layout=_strided(rounds, 1)))

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, (SCALAR,) * 4), return_type=tuple(kinds))
        def load(_, ref, live, index):
            lane, base = self._lane(), mgpu.utils.memref_ptr(ref)
            live = _true(live)
            index = dict(zip(AXES, map(_scalar, index), strict=True))
            first = _at(base, arith.addi(_offset(field.address, index), _times(lane, chunk)))
            alignment = min(field.address.alignment, chunk)
            active = [_both(live, self._active(field, lane, n)) for n in range(rounds)]
            found = [
                _array([_load(first, n * self.teams.lanes * chunk, chunk, alignment, active[n]) for n in range(rounds)])
            ]
            if field.scales is not None:
                whole = field.tile == field.count
                tile = c32(0) if whole else arith.shrui(lane, c32((field.tile // CHUNK).bit_length() - 1))
                first = _at(base, arith.addi(_offset(field.scales, index), _times(tile, 4)))
                step = 0 if whole else self.teams.lanes * CHUNK // field.tile * 4
                scales = [_load(first, n * step, 4, 4, active[n]) for n in range(rounds)]
                found.append(_array(scales))
            return tuple(found)

        found = load(cache_ref, live.astype(jnp.int32), tuple(index[axis] for axis in AXES))
        return found if len(found) > 1 else (*found, None)

    def store_values(self, field: Field, ref, found, i, inside, scale):
        """Decodes chunks and stores them as value `field.number` of the i-th row of an array [entries, count]."""
        raw, own = found
        dtype = str(ref.dtype)
        chunk, row = CHUNK * ITEMSIZES[dtype], field.count * ITEMSIZES[dtype]
        more = () if own is None else (own,)
        scales = () if scale is None else (scale,)
        types = (_strided(self.teams.rounds(field), 1),) * len(more), (SCALAR,) * len(scales)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self._layout(field, field.stored), *types, SCALAR, SCALAR))
        def store(_, ref, raw, own, scales, i, inside):
            lane = self._lane()
            inside = _true(inside)
            chunks = _chunks(raw, CHUNK * ITEMSIZES[field.stored] // 4)
            if field.stored != dtype:
                factors = [_scalar(scales[0])] * len(chunks) if scales else None
                if own:
                    factors = [arith.bitcast(f32(), word) for chunk in _chunks(own[0], 1) for word in chunk]
                values = [words.widen(each, field.stored) for each in chunks]
                if factors is not None:
                    values = [words.scaled(each, by) for each, by in zip(values, factors, strict=True)]
                chunks = [words.narrow(each, dtype) for each in values]
            first = _at(mgpu.utils.memref_ptr(ref), arith.addi(_times(_scalar(i), row), _times(lane, chunk)))
            for n, each in enumerate(chunks):
                active = _both(inside, self._active(field, lane, n))
                _store(first, n * self.teams.lanes * chunk, each, gcd(WIDEST, row, chunk), active)

        store(ref, raw, more, scales, i, inside.astype(jnp.int32))

    def add_weighted(self, field: Field, sums, raw, dtype, weight):
        """`sums`, a float32 array, plus chunks of `dtype` times a weight; chunks without weight may hold anything."""
        kind = self._floats(field)

        @plgpu.inline_mgpu(arg_types=(kind.layout, self._layout(field, dtype), SCALAR), return_type=kind)
        def add(_, sums, raw, weight):
            weight = _scalar(weight)
            counts = arith.cmpf(arith.CmpFPredicate.OGT, weight, mgpu.c(0.0, f32()))
            chunks = [
                [arith.select(counts, word, c32(0)) for word in chunk]
                for chunk in _chunks(raw, CHUNK * ITEMSIZES[dtype] // 4)
            ]
            return _array([
                words.multiplied_and_added(words.widen(chunk, dtype), weight, before)
                for chunk, before in zip(chunks, _chunks(sums, CHUNK), strict=True)
            ], f32())  # fmt: skip

        return add(sums, raw, weight)

    def zeros(self, field: Field):
        """A float32 array of zeros."""

        @plgpu.inline_mgpu(arg_types=(), return_type=self._floats(field))
        def zeros(_):
            return _array([[mgpu.c(0.0, f32())] * CHUNK] * self.teams.rounds(field), f32())

        return zeros()

    def store_scaled(self, field: Field, ref, values, factor, i, inside) -> None:
        """Stores a float32 array times a factor, rounded, as row i of an array [entries, count]."""
        dtype = str(ref.dtype)
        chunk, row = CHUNK * ITEMSIZES[dtype], field.count * ITEMSIZES[dtype]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self._floats(field).layout, SCALAR, SCALAR, SCALAR))
        def store(_, ref, values, factor, i, inside):
            lane, inside = self._lane(), _true(inside)
            first = _at(mgpu.utils.memref_ptr(ref), arith.addi(_times(_scalar(i), row), _times(lane, chunk)))
            for n, each in enumerate(_chunks(values, CHUNK)):
                active = _both(inside, self._active(field, lane, n))
                narrow = words.narrow(words.scaled(each, _scalar(factor)), dtype)
                _store(first, n * self.teams.lanes * chunk, narrow, gcd(WIDEST, row, chunk), active)

        store(ref, values, factor, i, inside.astype(jnp.int32))

    def store_scalar(self, ref, x, i, inside) -> None:
        """Stores a float32 number as element i of an array."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR))
        def store(_, ref, x, i, inside):
            first = arith.cmpi(arith.CmpIPredicate.eq, self._lane(), c32(0))
            place = _at(mgpu.utils.memref_ptr(ref), _times(_scalar(i), 4))
            _store(place, 0, [arith.bitcast(i32(), _scalar(x))], 4, arith.andi(first, _true(inside)))

        store(ref, x, i, inside.astype(jnp.int32))

    def _lane(self) -> Any:
        """The index of the calling lane in its team."""
        return arith.andi(mgpu.utils.thread_idx(), c32(self.teams.lanes - 1))

    def _active(self, field: Field, lane, n: int) -> Any:
        """Whether the lane has a chunk in round n; None where all have."""
        left = field.chunks - n * self.teams.lanes
        return None if left >= self.teams.lanes else arith.cmpi(arith.CmpIPredicate.ult, lane, c32(left))

    def _layout(self, field: Field, dtype: str) -> Any:
        count = CHUNK * ITEMSIZES[dtype] // 4
        return _strided(self.teams.rounds(field) * count, min(count, 4))

    def _floats(self, field: Field) -> Any:
        """Float32 values of chunks."""
        per_lane = self.teams.rounds(field) * CHUNK
        return plgpu.ShapeDtypeStruct((WARPGROUP * per_lane,), jnp.float32, layout=_strided(per_lane, 4))

    def _registers(self, field: Field, chunk: int) -> Any:
        """Words of chunks of so many bytes."""
        per_lane = self.teams.rounds(field) * chunk // 4
        layout = _strided(per_lane, min(chunk // 4, 4))
        return plgpu.ShapeDtypeStruct((WARPGROUP * per_lane,), jnp.int32, layout=layout)


def _strided(per_lane: int, together: int) -> Any:
    """Layout of int32 arrays [128 * per_lane] of which a lane holds vectors of `together`."""
    return plgpu.Layout.WG_STRIDED((WARPGROUP * per_lane,), together)


def _array(chunks, kind=None) -> Any:
    """Chunks, lists of words (or of values of another type), as an array in the layout of `_strided`."""
    together = min(len(chunks[0]), 4)
    flat = [word for chunk in chunks for word in chunk]
    vectors = ir.VectorType.get((together,), kind or i32())
    held = np.empty((len(flat) // together,), dtype=object)
    for n in range(len(held)):
        held[n] = vector.from_elements(vectors, flat[n * together : (n + 1) * together])
    layout = _strided(len(flat), together).to_mgpu()
    return mgpu.FragmentedArray(_registers=held, _layout=layout, _is_signed=True if kind is None else None)


def _chunks(raw, count: int) -> list[list[Any]]:
    """The chunks of `count` words of an array."""
    flat = [
        vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for register in raw.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]
    return [flat[n : n + count] for n in range(0, len(flat), count)]


def _scalar(x) -> Any:
    return x.registers.item()


def _true(x) -> Any:
    """Whether an int32 scalar is not 0."""
    return arith.cmpi(arith.CmpIPredicate.ne, _scalar(x), c32(0))


def _both(first, second) -> Any:
    return first if second is None else second if first is None else arith.andi(first, second)


def _times(x, factor: int) -> Any:
    """A non-negative 32-bit integer times a constant, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.muli(arith.extui(i64, x), mgpu.c(factor, i64))


def _offset(address: PartAddress, index) -> Any:
    """The byte at which a part of an entry lies."""
    found = mgpu.c(address.first, ir.IntegerType.get_signless(64))
    for i, stride in address.terms(index):
        found = arith.addi(found, _times(i, stride))
    return found


def _at(pointer, offset) -> Any:
    """So many bytes, a register, from a pointer."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def _kind(width: int) -> str:
    return "b32" if width == 1 else f"v{width}.b32"


def _load(pointer, offset: int, nbytes: int, alignment: int, active) -> list[Any]:
    """Words of `nbytes` bytes; 0 where `active` does not hold."""
    width = min(alignment, nbytes) // 4
    found: list[Any] = []
    for first in range(0, nbytes, 4 * width):
        names = ", ".join(f"${n}" for n in range(width))
        load = f"ld.global.{_kind(width)} {names if width == 1 else '{' + names + '}'}, [${width} + {offset + first}];"
        operands = [pointer]
        if active is not None:
            zeros = " ".join(f"mov.b32 ${n}, 0;" for n in range(width))
            load = f"{{ .reg .pred p; setp.ne.b32 p, ${width + 1}, 0; {zeros} @p {load} }}"
            operands.append(arith.extui(i32(), active))
        found += ptx(load, *operands, result_types=[i32()] * width, has_side_effects=True)
    return found


def _store(pointer, offset: int, values, alignment: int, active) -> None:
    """Stores words where `active` holds."""
    width = min(alignment // 4, len(values))
    for first in range(0, len(values), width):
        names = ", ".join(f"${n + 1}" for n in range(width))
        store = f"st.global.{_kind(width)} [$0 + {offset + 4 * first}], {names if width == 1 else '{' + names + '}'};"
        ptx(store, pointer, *values[first : first + width], predicate=active)
