"""What one lane does with a tile of quantised entries (`tiles.py` has the mapping of lanes): MLIR and inline PTX."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.fragments import (
    LANES,
    WARP_ROWS,
    Lane,
    as_pair,
    elements,
    fragmented,
    permuted,
    registers_of,
    words,
)
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, c64, i32, i64, ptx
from jaxkv_kernels.mosaic_gpu.ptx.memory import LOAD_SHARED

Pairs = tuple[tuple[int, int], ...]
"""The columns, of 8, in each of four words."""
IN_ORDER: Pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
COLUMN_TILE = 1024
"""Bytes of 8 rows by 64 columns of 16 bits, which the swizzle permutes."""


def load_entry_keys(ref, stage, nbytes: int, group: int, *, wide: bool) -> list[Any]:
    """Loads keys: of the lane's two rows, 16 bytes from column 64 * `group` on, or (`wide`) 32 of bf16 rotary keys."""
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.row)
    per_lane = 32 if wide else 16
    first = arith.addi(arith.muli(row, c32(nbytes)), arith.muli(lane.quad, c32(per_lane)))
    start = in_stage(ref, stage, nbytes, first)
    offsets = [8 * half * nbytes + (nbytes - 128 if wide else 64 * group) for half in range(2)]
    return [
        ptx(LOAD_SHARED.format(offset=offset + chunk), start, result_types=[i32()] * 4, has_side_effects=True)
        for offset in offsets
        for chunk in range(0, per_lane, 16)
    ]


def convert_keys(raw, layout, convert: str, *, wide: bool) -> Any:
    """Converts loaded words to a [64, 64] tile of keys, for four products of 16 columns each.

    `convert` is PTX that converts a word to two.

    Word s of a row has columns of product s; if `wide`, words 2 s and 2 s + 1 do.  `tiles.py` has their order.
    """
    vectors = [words(register) for register in raw.registers.flat]
    registers = registers_of(layout, (64, 64))
    for half in range(2):
        for step in range(4):
            if wide:
                row = vectors[2 * half] + vectors[2 * half + 1]
                pairs = row[2 * step : 2 * step + 2]
            else:
                pairs = ptx(convert, vectors[half][step], result_types=[i32()] * 2)
            for high, pair in enumerate(pairs):
                kind = ir.BF16Type if wide else ir.F16Type
                registers[0, 2 * step + high, 0, 0, half, 0, 0, 0, 0] = as_pair(pair, kind.get())
    return fragmented(registers, layout)


def load_scales(ref, stage, nbytes: int, offset: int, layout, count: int) -> list[Any]:
    """`count` float32 arrays [64], up to four: the scales at `offset`, a multiple of 16, of each entry."""
    lane = Lane()
    row = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS)), lane.row)
    start = in_stage(ref, stage, nbytes, arith.muli(row, c32(nbytes)))
    f32 = ir.F32Type.get()
    found = [
        ptx(LOAD_SHARED.format(offset=offset + 8 * half * nbytes), start, result_types=[f32] * 4, has_side_effects=True)
        for half in range(2)
    ]
    arrays = []
    for group in range(count):
        registers = registers_of(layout, (64,))
        for half in range(2):
            registers[0, 0, half, 0, 0] = vector.from_elements(ir.VectorType.get((1,), f32), [found[half][group]])
        arrays.append(fragmented(registers, layout))
    return arrays


def load_of_tokens(
    ref, stage, nbytes: int, step: int, *, offset: int = 0, groups: int, swapped: bool
) -> list[list[Any]]:
    """Loads values: per 128 columns, a word (four values) of each of tokens 16 `step` + 2 `quad` + {0, 1, 8, 9}.

    They begin at byte `offset` of an entry.  `swapped`: odd quads load the second token of a pair first, which halves
    the bank conflicts of 576-byte entries.
    """
    lane = Lane()
    token = arith.addi(arith.shli(lane.quad, c32(1)), c32(16 * step))
    column = arith.addi(arith.shli(lane.warp, c32(5)), arith.shli(lane.row, c32(2)))
    first = arith.addi(arith.muli(token, c32(nbytes)), column)
    odd = arith.muli(arith.andi(lane.quad, c32(1)), c32(nbytes if swapped else 0))
    starts = [in_stage(ref, stage, nbytes, arith.addi(first, odd))]
    starts.append(in_stage(ref, stage, nbytes, arith.subi(arith.addi(first, c32(nbytes)), odd)))
    return [
        [_load_word(start, offset + 128 * group + 8 * pair * nbytes) for pair in range(2) for start in starts]
        for group in range(groups)
    ]


def convert_values(raw, layout, group: int, convert: str, *, swapped: bool) -> Any:
    """A float16 [128, 16] tile, values by tokens, from loaded words."""
    tokens = words(raw.registers.flat[group])
    low, high = c32(0x5140), c32(0x7362)
    if swapped:
        odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(Lane().quad, c32(1)), c32(0))
        low, high = arith.select(odd, c32(0x1504), low), arith.select(odd, c32(0x3726), high)
    registers = registers_of(layout, (128, 16))
    for pair in range(2):
        for tile, selector in enumerate((low, high)):
            together = permuted(tokens[2 * pair], tokens[2 * pair + 1], selector)
            for half, values in enumerate(ptx(convert, together, result_types=[i32()] * 2)):
                registers[tile, pair, 0, 0, half, 0, 0, 0, 0] = as_pair(values, ir.F16Type.get())
    return fragmented(registers, layout)


def load_head_keys(ref, stage, width: int, group: int) -> list[Any]:
    """Loads 16 bytes of each of the lane's two rows, from column 64 * `group` on, of swizzled [stages, 64, `width`]."""
    lane = Lane()
    first = arith.addi(arith.muli(lane.warp, c32(WARP_ROWS * width)), arith.shli(lane.row, c32(7)))
    chunk = arith.xori(arith.xori(lane.quad, lane.row), c32(4 * (group % 2)))
    start = in_stage(ref, stage, width, arith.addi(first, arith.shli(chunk, c32(4))))
    offsets = [group // 2 * COLUMN_TILE + 8 * half * width for half in range(2)]
    return [
        ptx(LOAD_SHARED.format(offset=offset), start, result_types=[i32()] * 4, has_side_effects=True)
        for offset in offsets
    ]


def load_head_values(ref, stage, width: int, step: int) -> list[list[Any]]:
    """Loads swizzled values: per 128 columns, one word (four values) from each of four tokens.

    They are the tokens that `load_of_tokens` loads, for the same `step`.
    """
    lane = Lane()
    chunk = arith.addi(arith.shli(lane.warp, c32(1)), arith.shrui(lane.row, c32(2)))
    byte = arith.shli(arith.andi(lane.row, c32(3)), c32(2))
    starts = []
    for odd in range(2):
        token = arith.addi(arith.shli(lane.quad, c32(1)), c32(odd))
        swizzled = arith.shli(arith.xori(chunk, token), c32(4))
        first = arith.addi(arith.addi(arith.shli(token, c32(7)), swizzled), byte)
        starts.append(in_stage(ref, stage, width, arith.addi(first, c32(16 * step * width))))
    return [
        [_load_word(start, group * COLUMN_TILE + 8 * pair * width) for pair in range(2) for start in starts]
        for group in range(width // 128)
    ]


def clear_head_values(ref, stage, width: int, row) -> None:
    """Zeroes one token's swizzled values."""
    lane = Lane()
    line = arith.addi(arith.muli(arith.shrui(row, c32(3)), c32(8 * width)), arith.shli(arith.andi(row, c32(7)), c32(7)))
    column = arith.muli(arith.shrui(lane.thread, c32(3)), c32(COLUMN_TILE))
    first = arith.addi(arith.addi(line, column), arith.shli(arith.andi(lane.thread, c32(7)), c32(4)))
    _clear(in_stage(ref, stage, width, first), lane.thread, width // 16)


def clear_entry(ref, stage, nbytes: int, row) -> None:
    """Zeroes one token's entry."""
    lane = Lane()
    first = arith.addi(arith.muli(row, c32(nbytes)), arith.shli(lane.thread, c32(4)))
    _clear(in_stage(ref, stage, nbytes, first), lane.thread, nbytes // 16)


def over_warps(x, ref, scratch: int, side, kind: str, layout) -> Any:
    """The maximum or sum over the rows of a float32 [64, 16] tile, in all lanes.

    Four rows of `ref`, from row `scratch` + 4 * `side` on, are scratch memory.
    """
    f32, lane = ir.F32Type.get(), Lane()

    def combine(a, b):
        return ptx(f"{kind}.f32 $0, $1, $2;", a, b, result_types=f32)

    mgpu.utils.warpgroup_barrier()  # scratch memory may still be read
    base = at(mgpu.utils.memref_ptr(ref), arith.addi(arith.shli(lane.quad, c32(3)), arith.shli(side, c32(8))))
    own = at(base, arith.shli(lane.warp, c32(6)))
    first = arith.cmpi(arith.CmpIPredicate.eq, lane.row, c32(0))
    for tile in range(2):
        halves = [words(x.registers[0, tile, 0, 0, half].flat[0]) for half in range(2)]
        columns = []
        for column in range(2):
            value = combine(halves[0][column], halves[1][column])
            for distance in (4, 8, 16):
                shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
                other = ptx(shuffle, value, result_types=f32, has_side_effects=True, convergent=True)
                value = combine(value, other)
            columns.append(value)
        store = f"st.shared.v2.f32 [$0 + {64 * scratch + 32 * tile}], {{$1, $2}};"
        ptx(store, own, *columns, predicate=first)
    mgpu.utils.warpgroup_barrier()
    registers = registers_of(layout, (16,))
    for tile in range(2):
        total: Any = None
        for warp in range(4):
            load = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {64 * (scratch + warp) + 32 * tile}];"
            found = ptx(load, base, result_types=[f32] * 2, has_side_effects=True)
            total = found if total is None else [combine(a, b) for a, b in zip(total, found, strict=True)]
        registers[tile, 0, 0] = vector.from_elements(ir.VectorType.get((2,), f32), list(total))
    return fragmented(registers, layout)


def store_rows(ref, place, parts, rows: int) -> None:
    """Stores [128, 16] tiles of 16-bit values, transposed, to `ref`[place], where `ref` is [n, rows, 128 * tiles]."""
    lane = Lane()
    width = 128 * len(parts)
    row = arith.shli(lane.quad, c32(1))
    column = arith.addi(arith.shli(lane.warp, c32(5)), arith.shli(lane.row, c32(2)))
    first = arith.shli(arith.addi(arith.muli(row, c32(width)), column), c32(1))
    first = arith.addi(arith.muli(arith.extui(i64(), place), c64(2 * rows * width)), arith.extui(i64(), first))
    start = at(mgpu.utils.memref_ptr(ref), first)
    for group, part in enumerate(parts):
        for tile in range(rows // 8):
            pairs = [_word(part.registers[half, tile, 0, 0, low].flat[0]) for half in range(2) for low in range(2)]
            for odd in range(2):
                selector = c32(0x7632 if odd else 0x5410)
                both = [permuted(pairs[n], pairs[n + 1], selector) for n in (0, 2)]
                offset = 2 * ((8 * tile + odd) * width + 128 * group)
                ptx(f"st.global.v2.b32 [$0 + {offset}], {{$1, $2}};", start, *both)


def load_queries(refs, place, rows: int) -> Any:
    """Loads eight of every 64 columns of row `thread` // 8 of entry `place` of arrays [n, rows, width]."""
    row, chunk = _row_and_chunk()
    inside = arith.cmpi(arith.CmpIPredicate.ult, row, c32(rows))
    place = arith.extui(i64(), place)
    found = []
    for ref in refs:
        groups = ir.MemRefType(ref.type).shape[-1] // 64
        width = 128 * groups
        first = arith.addi(arith.muli(row, c32(width)), arith.shli(chunk, c32(4)))
        first = arith.addi(arith.muli(place, c64(rows * width)), arith.extui(i64(), first))
        start = at(mgpu.utils.memref_ptr(ref), first)
        for group in range(groups):
            load = (
                "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
                f"@p ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {128 * group}]; }}"
            )
            flag = arith.extui(i32(), inside)
            found.append(ptx(load, start, flag, result_types=[i32()] * 4, has_side_effects=True))
    return found


def largest(raw, layout) -> Any:
    """Per lane, the largest magnitude of its row of bf16 queries, as float32."""
    most: Any = c32(0)
    for word in elements(raw):
        most = ptx("max.u16x2 $0, $1, $2;", most, arith.andi(word, c32(0x7FFF7FFF)), result_types=i32())
    most = arith.maxui(arith.shrui(most, c32(16)), arith.andi(most, c32(0xFFFF)))
    for distance in (1, 2, 4):
        shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
        most = arith.maxui(most, ptx(shuffle, most, result_types=i32(), has_side_effects=True, convergent=True))
    f32 = ir.F32Type.get()
    registers = registers_of(layout, (LANES,))
    value = arith.bitcast(f32, arith.shli(most, c32(16)))
    registers.flat[0] = vector.from_elements(ir.VectorType.get((1,), f32), [value])
    return fragmented(registers, layout)


def store_queries(refs, groups, stats, stage, raw, factor, inverse, first_row: int, pairs: Pairs) -> None:
    """Stores queries times their row's factor to arrays [stages, 16, 64 * `groups`] of 16-bit floats.

    Columns are in the same order as those of converted keys: `pairs` of every 8 columns.  `inverse` is stored to row
    `first_row` + `stage` of `stats`.
    """
    row, chunk = _row_and_chunk()
    in_tile = arith.andi(row, c32(7))
    odd, quad = arith.andi(chunk, c32(1)), arith.shrui(chunk, c32(1))
    factor, inverse = (elements(x)[0] for x in (factor, inverse))
    vectors = [words(register) for register in raw.registers.flat]
    for ref, count in zip(refs, groups, strict=True):
        some, vectors = vectors[:count], vectors[count:]
        kind = str(ir.MemRefType(ref.type).element_type)
        row_tile = arith.muli(arith.shrui(row, c32(3)), c32(count * COLUMN_TILE))
        first = arith.addi(arith.muli(stage, c32(2 * count * COLUMN_TILE)), row_tile)
        first = arith.addi(first, arith.addi(arith.shli(in_tile, c32(7)), arith.shli(quad, c32(2))))
        base = mgpu.utils.memref_ptr(ref)
        for n in range(4):
            swizzled = arith.shli(arith.xori(arith.addi(arith.shli(odd, c32(2)), c32(n)), in_tile), c32(4))
            start = at(base, arith.addi(first, swizzled))
            for group in range(count):
                scaled = []
                for column in pairs[n]:
                    word = some[group][column // 2]
                    bits = arith.andi(word, c32(0xFFFF0000)) if column % 2 else arith.shli(word, c32(16))
                    scaled.append(arith.mulf(arith.bitcast(ir.F32Type.get(), bits), factor))
                pair = ptx(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", *scaled, result_types=i32())
                ptx(f"st.shared.b32 [$0 + {group * COLUMN_TILE}], $1;", start, pair)
    place = arith.addi(arith.shli(arith.addi(stage, c32(first_row)), c32(4)), row)
    start = at(mgpu.utils.memref_ptr(stats), arith.shli(place, c32(2)))
    ptx("st.shared.f32 [$0], $1;", start, inverse, predicate=arith.cmpi(arith.CmpIPredicate.eq, chunk, c32(0)))


def _clear(start, thread, lanes: int) -> None:
    """Zeroes 16 bytes at the address `start` of each of the first `lanes` lanes."""
    inside = arith.cmpi(arith.CmpIPredicate.ult, thread, c32(lanes))
    ptx("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", start, c32(0), predicate=inside)


def _load_word(start, offset: int) -> Any:
    return ptx(f"ld.shared.b32 $0, [$1 + {offset}];", start, result_types=i32(), has_side_effects=True)


def _row_and_chunk() -> tuple[Any, Any]:
    """The row of queries and the chunk of that row that the lane loads; eight lanes share a row."""
    thread = Lane().thread
    return arith.shrui(thread, c32(3)), arith.andi(thread, c32(7))


def in_stage(ref, stage, nbytes: int, offset) -> Any:
    """The address `offset` bytes after the beginning of a stage of 64 entries of `nbytes` bytes each."""
    return at(mgpu.utils.memref_ptr(ref), arith.addi(arith.muli(stage, c32(64 * nbytes)), offset))


def _word(pair) -> Any:
    """Two 16-bit values as int32."""
    one = vector.bitcast(ir.VectorType.get((1,), i32()), pair)
    return vector.extract(one, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
