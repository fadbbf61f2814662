"""What lanes do for `indexer_logits`: find a CTA's share, load block tables, sum scores over heads, store logits.

A quad of lanes holds rows r and r + 8 of a WGMMA tile: lane l of the quad has columns 2 l and 2 l + 1 of every eight.
`interpreter/indexer.py` has the counterparts for the interpreter.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.indexer_work import TILE, Share, Tiles
from jaxkv_kernels.mosaic_gpu.ptx.fragments import array, elements, splat
from jaxkv_kernels.mosaic_gpu.ptx.inline import f32, i32, ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, LANE_COLUMNS, ROW, SCALAR, WGMMA

LANES, THREADS = 32, 128
WINDOW = 32
"""Blocks of a block table that are loaded at once, one per lane."""
MOST_UNROLLED = 8
"""The most requests per lane whose lengths stay in registers."""
MINUS_INFINITY = "0fFF800000"
ADDRESS = "mul.wide.u32 a, $1, {bytes}; mul.wide.u32 b, i, 4; add.s64 a, a, b; add.s64 a, a, $0;"
"""Computes the address `a` of element `i` of row $1 of the array at $0."""
WEIGH = "{ .reg .f32 x; max.NaN.f32 x, $1, 0f00000000; fma.rn.f32 $0, x, $2, $3; }"
OWN = 4
"""Values of a partial sum that a lane holds: of two rows and two columns."""
_PER_LANE: Any = plgpu.Layout.WG_STRIDED((THREADS,), 1)
_NUMBER: Any = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)


def find_share(lengths_ref, cta, ctas: int, tiles: Tiles, in_cache, *, filled: bool) -> Share:
    """The share of a CTA of all tiles that are computed, or with `filled` of those that are filled.

    Every warp finds it by itself: it sums the tiles of all requests, a request per lane, and then finds the requests in
    which the share begins and ends.  If `in_cache` is False (the layer is outside the cache), all tiles are filled.
    """
    requests = lengths_ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=[_NUMBER] * 4)
    def find(_, ref, cta, in_cache):
        found = ptx(
            _search(requests, ctas, tiles, filled),
            mgpu.utils.memref_ptr(ref),
            cta.registers.item(),
            in_cache.registers.item(),
            result_types=[i32()] * 4,
            has_side_effects=True,
            convergent=True,
        )
        return [splat(x) for x in found]

    return Share(*find(lengths_ref, cta, in_cache.astype(jnp.int32)))


def _search(requests: int, ctas: int, tiles: Tiles, filled: bool) -> str:
    """PTX: $0 to $3 are a `Share`; $4 lengths, $5 the CTA, $6 whether the layer is in the cache.

    Requests are processed in groups of 32, one per lane.  Register nI has the tiles of the lane's request in group I.
    Up to MOST_UNROLLED groups are all loaded before the first is used.  More are loaded one at a time, by two loops.
    """
    unrolled = requests <= LANES * MOST_UNROLLED
    chunks = range(-(-requests // LANES) if unrolled else 1)

    def load(n: str) -> str:
        return (
            f"add.s32 i, base, lane; setp.lt.s32 p, i, {requests}; mov.b32 {n}, 0; mul.wide.s32 a, i, 4; "
            f"add.s64 a, a, $4; @p ld.global.s32 {n}, [a]; "
        )

    def count(n: str) -> str:
        found = (
            f"max.s32 {n}, {n}, 0; min.s32 {n}, {n}, {tiles.most}; mul.lo.s32 {n}, {n}, $6; "
            f"add.s32 {n}, {n}, {TILE - 1}; shr.u32 {n}, {n}, {TILE.bit_length() - 1}; "
        )
        if filled:
            found += f"add.s32 i, base, lane; setp.lt.s32 p, i, {requests}; sub.s32 {n}, {tiles.per_request}, {n}; "
            found += f"@!p mov.b32 {n}, 0; "
        return found

    def each(*steps, label: str) -> str:
        """The steps for every 32 requests."""
        following = f"add.s32 base, base, {LANES}; "
        if unrolled:
            return "mov.b32 base, 0; " + "".join("".join(step(f"n{i}") for step in steps) + following for i in chunks)
        body = "".join(step("n0") for step in steps)
        return f"mov.b32 base, 0; {label}: {body} {following} setp.lt.s32 p, base, {requests}; @p bra {label}; "

    def add(n: str) -> str:
        return f"add.s32 sum, sum, {n}; "

    def find(n: str) -> str:
        """Finds the requests of the share's first and last tiles, and the numbers of these tiles."""
        scan = f"mov.b32 i, {n}; "
        for step in (1, 2, 4, 8, 16):
            scan += f"shfl.sync.up.b32 up|q, i, {step}, 0, -1; @q add.s32 i, i, up; "
        scan += f"add.s32 i, i, sum; sub.s32 lo, i, {n}; "  # the lane's tiles are those from lo to i
        for wanted, request, tile, place in (("first", "$0", "$1", "first"), ("final", "$2", "$3", "last")):
            scan += (
                f"setp.le.s32 p, lo, {wanted}; setp.gt.and.s32 p, i, {wanted}, p; vote.sync.ballot.b32 up, p, -1; "
                "setp.ne.b32 p, up, 0; bfind.u32 up, up; and.b32 up, up, 31; shfl.sync.idx.b32 begin, lo, up, 31, -1; "
                f"@p add.s32 {request}, base, up; @p sub.s32 {tile}, {place}, begin; "
            )
        return scan + "shfl.sync.idx.b32 sum, i, 31, 31, -1; "

    total = "mov.b32 sum, 0; "
    if unrolled:
        total += each(load, label="") + each(count, add, label="")
    else:
        total += each(load, count, add, label="COUNT")
    total += "redux.sync.add.s32 sum, sum, -1; "
    divide = (
        f"div.u32 each, sum, {ctas}; rem.u32 rest, sum, {ctas}; mul.lo.s32 first, each, $5; min.s32 i, $5, rest; "
        "add.s32 first, first, i; add.s32 last, first, each; setp.lt.s32 p, $5, rest; @p add.s32 last, last, 1; "
        "sub.s32 final, last, 1; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, -1; mov.b32 $3, 0; "
        "setp.ge.s32 none, first, last; mov.b32 sum, 0; "
    )
    search = each(find, label="") if unrolled else each(load, count, find, label="FIND")
    registers = ".reg .b32 lane, i, base, sum, each, rest, first, last, final, up, lo, begin; "
    registers += "".join(f".reg .b32 n{i}; " for i in chunks)
    return (
        f"{{ .reg .pred p, q, none; .reg .b64 a; {registers} mov.u32 lane, %laneid; {total} {divide} {search} "
        "@none mov.b32 $2, -1; @none mov.b32 $0, 0; }"
    )


def load_window(table_ref, request, window) -> Any:
    """Starts to load window number `window` of a request's blocks; they are -1 past the end of the table [B, M].

    A window is loaded while the one before it is used, so that no tile waits for these loads.
    """
    width = table_ref.shape[1]
    loaded = plgpu.ShapeDtypeStruct((THREADS,), jnp.dtype(jnp.int32), layout=_PER_LANE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=loaded)
    def load(_, ref, request, window):
        found = ptx(
            "{ .reg .pred p; .reg .b64 a, b; .reg .b32 i; mov.u32 i, %laneid; "
            f"mad.lo.s32 i, $3, {WINDOW}, i; setp.lt.u32 p, i, {width}; mul.wide.u32 a, $2, {4 * width}; "
            "mul.wide.u32 b, i, 4; add.s64 a, a, b; add.s64 a, a, $1; mov.b32 $0, -1; @p ld.global.b32 $0, [a]; }",
            mgpu.utils.memref_ptr(ref),
            request.registers.item(),
            window.registers.item(),
            result_types=i32(),
            has_side_effects=True,
        )
        return array([[found]], _PER_LANE)

    return load(table_ref, request, window)


def block_of(table_ref, window, i) -> Any:
    """Block number `i` of the window that `load_window` returned."""
    del table_ref

    @plgpu.inline_mgpu(arg_types=(_PER_LANE, SCALAR), return_type=_NUMBER)
    def pick(_, blocks, i):
        code, (held,) = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", elements(blocks)
        found = ptx(code, held, i.registers.item(), result_types=i32(), has_side_effects=True, convergent=True)
        return splat(found)

    return pick(window, i)


def weigh(partial, scores, weights) -> Any:
    """The sum over heads of relu(score) * weight, of which each lane of a quad holds a part: a WGMMA tile [64, 8].

    `scores` [64, heads] is a WGMMA tile, `weights` [heads] a COLUMN array.  `partial` is a sum over other heads to add
    to, or None.  Multiply-adds are explicit, because no compiler fuses them here.
    """
    partials = [] if partial is None else [partial]

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, COLUMN, [WGMMA] * len(partials)),
        return_type=plgpu.ShapeDtypeStruct((TILE, LANE_COLUMNS), jnp.dtype(jnp.float32), layout=WGMMA),
    )
    def weigh(_, scores, weights, partial):
        sums = [mgpu.c(0.0, f32())] * OWN if not partial else elements(*partial)
        weight = elements(weights)
        for n, score in enumerate(elements(scores)):  # by eight columns, then by row, then by column
            column = n // OWN * 2 + n % 2
            sums[n % OWN] = ptx(WEIGH, score, weight[column], sums[n % OWN], result_types=f32())
        pair = ir.VectorType.get((2,), f32())
        held = np.empty((2,), dtype=object)
        held[:] = [vector.from_elements(pair, sums[:2]), vector.from_elements(pair, sums[2:])]
        layout = WGMMA.to_mgpu()
        registers = held.reshape(layout.registers_shape((64, 8)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return weigh(scores, weights, partials)


def store_logits(out_ref, row, first, end, known, part: int, partial, scale, *, skipped=None) -> None:
    """Stores a tile of logits of one or two query tokens to `out_ref[row:, first:]`, up to the ends of the rows.

    It stores -inf from position `end` on (`end + 1` for the second token), and for tokens of unknown blocks: bit i of
    `known` is 1 if group i of `part` tokens of the tile is in the cache.

    `partial` has one result of `weigh` per query token; `scale` is a ROW array or None.  The first `skipped` (an int32
    scalar or None) of the query tokens are not stored.

    A quad of lanes holds partial sums of four logits: two rows of two query tokens.  Each lane first exchanges its sums
    of one query token for those of the other, then the sum of one row for that of the other, so that it has a single
    logit, which it stores.  With one query token, only two lanes of a quad store.
    """
    length: Any = out_ref.shape[1]
    scales = [] if scale is None else [scale]
    skips = [] if skipped is None else [skipped]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), [SCALAR] * 4, [SCALAR] * len(skips), [WGMMA] * len(partial), [ROW] * len(scales))
    )
    def store(_, ref, place, skips, partial, scales):
        scalars = [x.registers.item() for x in (*place, *skips)]
        operands = [mgpu.utils.memref_ptr(ref), *scalars]
        skipped = f"${len(operands) - 1}" if len(scalars) > 4 else None
        names = []
        for sums in partial:
            first, second, third, fourth = elements(sums)
            names.append([f"${len(operands) + n}" for n in range(2)])
            operands += [arith.addf(first, second), arith.addf(third, fourth)]
        code = (
            "{ .reg .pred p, q, r; .reg .b32 i, n, lane; .reg .b64 a, b; .reg .f32 x, y, low, high; "
            "mov.u32 lane, %laneid; "
            "and.b32 n, lane, 2; setp.ne.b32 q, n, 0; and.b32 n, lane, 1; setp.ne.b32 r, n, 0; "  # q: token, r: row
        )
        if len(partial) == 2:
            for half, one, two in zip(("low", "high"), *names, strict=True):
                code += f"selp.f32 x, {one}, {two}, q; selp.f32 y, {two}, {one}, q; "
                code += f"shfl.sync.bfly.b32 x, x, 2, 31, -1; add.rn.f32 {half}, x, y; "
        else:
            for half, own in zip(("low", "high"), names[0], strict=True):
                code += f"shfl.sync.bfly.b32 x, {own}, 2, 31, -1; add.rn.f32 {half}, x, {own}; "
        code += "selp.f32 x, low, high, r; selp.f32 y, high, low, r; shfl.sync.bfly.b32 x, x, 1, 31, -1; "
        code += "add.rn.f32 x, x, y; "
        for scale in scales:
            low, high = (f"${len(operands) + n}" for n in range(2))
            operands += elements(scale)
            code += f"selp.f32 y, {high}, {low}, r; mul.rn.f32 x, x, y; "
        code += (
            "shl.b32 n, n, 3; shr.u32 i, lane, 2; add.s32 n, n, i; mov.u32 i, %tid.x; shr.u32 i, i, 1; "
            "and.b32 i, i, 48; "
            "add.s32 n, n, i; add.s32 i, n, $2; "  # n: the key within the tile, i: its position
            f"shr.u32 n, n, {part.bit_length() - 1}; shr.u32 n, $4, n; and.b32 n, n, 1; setp.eq.b32 p, n, 0; "
            "selp.b32 n, 1, 0, q; add.s32 lane, $3, n; "
            f"setp.ge.or.s32 p, i, lane, p; selp.f32 x, {MINUS_INFINITY}, x, p; setp.lt.s32 p, i, {length}; "
        )
        if skipped:
            code += f"setp.ge.and.s32 p, n, {skipped}, p; "
        if len(partial) == 1:
            code += "setp.eq.and.b32 p, n, 0, p; "
        code += (
            f"add.s32 n, n, $1; {ADDRESS.format(bytes=4 * length).replace('$1', 'n')} "
            # Logits stay in the L2 cache while keys pass through it: the selection reads them next.
            "createpolicy.fractional.L2::evict_last.b64 b, 0f3F800000; @p st.global.L2::cache_hint.f32 [a], x, b; }"
        )
        ptx(code, *operands, result_types=None, has_side_effects=True, convergent=True)

    store(out_ref, [row, first, end, known], skips, list(partial), scales)


def fill(out_ref, row, first, last) -> None:
    """Stores -inf to `out_ref[row, first:last]`."""
    length: Any = out_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def store(_, ref, row, first, last):
        ptx(
            "{ .reg .pred p; .reg .b32 i; .reg .b64 a, b; mov.u32 i, %tid.x; and.b32 i, i, 127; add.s32 i, i, $2; "
            f"{ADDRESS.format(bytes=4 * length)} setp.lt.s32 p, i, $3; @!p bra DONE; "
            f"MORE: st.global.f32 [a], {MINUS_INFINITY}; add.s32 i, i, {THREADS}; add.s64 a, a, {4 * THREADS}; "
            "setp.lt.s32 p, i, $3; @p bra MORE; DONE: }",
            mgpu.utils.memref_ptr(ref),
            *(x.registers.item() for x in (row, first, last)),
            result_types=None,
            has_side_effects=True,
        )

    store(out_ref, row, first, last)
