"""The choices of many tokens, grouped by expert: `expert_groups` of `jaxkv_kernels/experts.py` in one kernel.

XLA computes the same in about ten kernels, which depend on each other, and take longer to launch than to run.

Work.  One CTA of four warpgroups.  Timeline:

    all          clear the counts and the tokens of rows | each choice: add 1 to the count of its expert, whose former
                 value is its rank
    first warp   sums of the counts, rounded up to whole groups of 8 rows and to whole tiles, of the experts before each
    all          each tile: find its expert by bisection | each choice: its row, and the row's token

Ranks depend on the order in which the counts are added.  So does the order of a group's rows, but no result: each row
is multiplied by itself.

What bounds it: latency.
Barriers.  That of the CTA (`bar.sync 0`), between the parts above.
Budget.  Shared memory: three words per expert.  Registers: two per choice of a thread, at most `MOST_CHOICES` / 512.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.experts import expert_groups, groups_shape
from jaxkv_kernels.mosaic_gpu.chosen_experts import LANES, MOST_EXPERTS
from jaxkv_kernels.mosaic_gpu.expert_products import ALIGN
from jaxkv_kernels.mosaic_gpu.interpreter import experts as interpreted
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import body_of_ptx, kernel

WARPGROUPS = 4
THREADS = 128 * WARPGROUPS
MOST_CHOICES = 16 * THREADS
"""More are grouped by XLA, whose kernels then have enough to do."""

START = """
.reg .pred p, q, first; .reg .b32 thread, lane, i, j, n, rows, tiles, total, own_rows, own_tiles; .reg .b64 a;
.reg .b32 id<{each}>, rank<{each}>;
mov.u32 thread, %tid.x; mov.u32 lane, %laneid; setp.lt.u32 first, thread, 32;
"""
CLEAR_COUNTS = """
add.s32 i, thread, {start}; setp.lt.u32 p, i, {count}; shl.b32 i, i, 2; add.s32 i, i, $7; @p st.shared.b32 [i], 0;
"""
CLEAR_TOKENS = """
add.s32 i, thread, {start}; setp.lt.u32 p, i, {rows}; mul.wide.u32 a, i, 4; add.s64 a, a, $2; @p st.global.b32 [a], 0;
"""
BARRIER = "bar.sync 0;\n"
COUNT = """
add.s32 i, thread, {start}; setp.lt.u32 p, i, {choices}; mul.wide.u32 a, i, 4; add.s64 a, a, $0; mov.b32 id{n}, -1;
@p ld.global.b32 id{n}, [a]; setp.lt.u32 q, id{n}, {count}; shl.b32 i, id{n}, 2; add.s32 i, i, $7;
@q atom.shared.add.u32 rank{n}, [i], 1;
"""
SUMMED = """
mul.lo.u32 i, lane, {each}; add.s32 i, i, {place}; setp.lt.and.u32 p, i, {count}, first; shl.b32 i, i, 2;
add.s32 i, i, $7; mov.b32 n, 0; @p ld.shared.b32 n, [i];
add.s32 j, n, {group_end}; and.b32 j, j, -{align}; add.s32 rows, rows, j;
add.s32 j, n, {tile_end}; div.u32 j, j, {tile}; add.s32 tiles, tiles, j;
"""
ADD_LANES = """
shfl.sync.up.b32 i|p, rows, {lanes}, 0, -1; @p add.s32 rows, rows, i;
shfl.sync.up.b32 i|p, tiles, {lanes}, 0, -1; @p add.s32 tiles, tiles, i;
"""
BISECT = """
add.s32 j, n, {step}; setp.le.u32 p, j, {count}; shl.b32 own_rows, j, 2; add.s32 own_rows, own_rows, $7;
mov.b32 own_tiles, -1; @p ld.shared.b32 own_tiles, [own_rows + {ends_before}]; setp.le.and.u32 p, own_tiles, i, p;
@p mov.b32 n, j;
"""
TILE = """
setp.lt.u32 p, i, {tiles}; setp.lt.and.u32 p, n, {count}, p; shl.b32 j, n, 2; add.s32 j, j, $7;
mov.b32 tiles, 0; setp.gt.and.u32 q, n, 0, p; @q ld.shared.b32 tiles, [j + {ends_before}];
sub.s32 tiles, i, tiles; mul.lo.u32 tiles, tiles, {tile};
mov.b32 rows, 0; @p ld.shared.b32 rows, [j + {starts}]; add.s32 rows, rows, tiles; shr.u32 rows, rows, {shift};
mov.b32 total, 0; @p ld.shared.b32 total, [j]; add.s32 total, total, {group_end}; and.b32 total, total, -{align};
sub.s32 total, total, tiles; min.u32 total, total, {tile}; shr.u32 total, total, {shift};
mul.wide.u32 a, i, 4; add.s64 a, a, $3; @p st.global.b32 [a], n;
mul.wide.u32 a, i, 4; add.s64 a, a, $4; @p st.global.b32 [a], rows;
mul.wide.u32 a, i, 4; add.s64 a, a, $5; @p st.global.b32 [a], total;
"""
PLACE = """
add.s32 i, thread, {start}; setp.lt.u32 p, i, {choices}; setp.lt.u32 q, id{n}, {count};
shl.b32 j, id{n}, 2; add.s32 j, j, $7; mov.b32 rows, {rows}; @q ld.shared.b32 rows, [j + {starts}];
@q add.s32 rows, rows, rank{n}; mul.wide.u32 a, i, 4; add.s64 a, a, $1; @p st.global.b32 [a], rows;
div.u32 i, i, {per_token}; mul.wide.u32 a, rows, 4; add.s64 a, a, $2; @q st.global.b32 [a], i;
"""


def fits(choices: int, count: int) -> bool:
    """Whether so many choices, and so many experts, are grouped by the kernel."""
    return choices <= MOST_CHOICES and count <= MOST_EXPERTS


@partial(jax.jit, static_argnames=("count", "tile"))
def group_choices(experts, *, count: int, tile: int) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """The rows of choices, grouped by expert in groups that begin at multiples of 8 rows, and the tiles of the groups.

    The kernel groups them, or XLA if there are too many (`fits`).

    Args:
      experts: int32 [T, K], ids of experts.  Ids outside [0, `count`) have no row.
      count: the number of experts.
      tile: the most rows of a tile, a multiple of 8.

    Returns:
      The row of each choice, int32 [T, K], P if it has none; the token of each row, int32 [P], 0 if it has none; and
      the tiles as `products` expects them: experts, first rows and sizes, int32 [M], in units of 8 rows, of which the
      first n are defined, and n, int32 [1].
    """
    if not fits(experts.size, count):
        groups = expert_groups(experts, count, tile=tile, align=ALIGN)
        return groups.rows, groups.tokens, groups.tiles(ALIGN)
    num_rows, num_tiles = groups_shape(experts.size, count, tile=tile, align=ALIGN)
    interpret = bool(interpreting.value)

    def stand_in(experts_ref, *refs):
        interpreted.group_choices(experts_ref, refs, experts.shape[1], count, tile, ALIGN)

    sizes = experts.size, num_rows, num_tiles, num_tiles, num_tiles, 1
    out_type: Any = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]
    ptx = partial(code, experts.shape, num_rows, num_tiles, count, tile)
    rows, tokens, *tiles = kernel(
        body_of_ptx(ptx, stand_in, interpret=interpret),
        interpret=interpret,
        auto_barriers=False,
        kernel_name="experts_grouped",
        out_type=out_type,
        grid=(1,),
        grid_names=("cta",),
        num_threads=1 if interpret else WARPGROUPS,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((3 * count,), jnp.int32)],
    )(experts.reshape(-1))
    return rows.reshape(experts.shape), tokens, tuple(tiles)


def code(shape: tuple[int, int], num_rows: int, num_tiles: int, count: int, tile: int) -> Iterator[str]:
    """The PTX of the kernel for choices [T, K].

    Its operands: the choices ($0), the results in their order ($1 to $6), and shared memory ($7), which has for each
    expert its count, its first row, and the number of tiles up to its last one.
    """
    choices, per_token = math.prod(shape), shape[1]
    starts, ends = 4 * count, 8 * count
    ends_before = ends - 4
    aligned = {"align": ALIGN, "group_end": ALIGN - 1, "shift": ALIGN.bit_length() - 1}
    rounds = list(enumerate(range(0, choices, THREADS)))
    each = -(-count // LANES)
    yield START.format(each=len(rounds))
    yield from (CLEAR_COUNTS.format(start=start, count=count) for start in range(0, count, THREADS))
    yield from (CLEAR_TOKENS.format(start=start, rows=num_rows) for start in range(0, num_rows, THREADS))
    yield BARRIER
    yield from (COUNT.format(n=n, start=start, choices=choices, count=count) for n, start in rounds)
    yield BARRIER
    yield "mov.b32 rows, 0; mov.b32 tiles, 0;\n"
    sums = {"each": each, "count": count, "tile": tile, "tile_end": tile - 1, **aligned}
    summed = [SUMMED.format(place=place, **sums) for place in range(each)]
    yield from summed
    yield "mov.b32 own_rows, rows; mov.b32 own_tiles, tiles;\n"
    yield from (ADD_LANES.format(lanes=lanes) for lanes in (1, 2, 4, 8, 16))
    yield "setp.eq.u32 q, thread, 31; @q st.global.b32 [$6], tiles;\n"
    yield "sub.s32 rows, rows, own_rows; sub.s32 tiles, tiles, own_tiles;\n"
    for add in summed:
        yield "mov.b32 own_rows, rows;\n"
        yield add
        yield f"@p st.shared.b32 [i + {starts}], own_rows; @p st.shared.b32 [i + {ends}], tiles;\n"
    yield BARRIER
    for start in range(0, num_tiles, THREADS):
        yield f"add.s32 i, thread, {start}; mov.b32 n, 0;\n"
        for step in (1 << bit for bit in reversed(range(count.bit_length()))):
            yield BISECT.format(step=step, count=count, ends_before=ends_before)
        yield TILE.format(tiles=num_tiles, count=count, tile=tile, starts=starts, ends_before=ends_before, **aligned)
    for n, start in rounds:
        yield PLACE.format(
            n=n, start=start, choices=choices, count=count, rows=num_rows, starts=starts, per_token=per_token
        )
