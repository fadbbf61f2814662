"""Which experts any of a few tokens have chosen: tiles of rows for kernels in which each of them multiplies all tokens.

Work.  One CTA of one warpgroup.  Timeline:

    clear the bits of all experts | each thread: load choices, set the bits of their experts | count the bits before
    each word; each lane of the first warp: store the expert of its bit of each word

What bounds it: latency.
Barriers.  Named barriers of the warpgroup, before and after bits are set.
Budget.  Shared memory: a word per 32 experts.  Registers: scalars only.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.interpreter import experts as interpreted
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import body_of_ptx, kernel

WORDS = 32
"""Words of bits: one per lane of a warp."""
MOST_EXPERTS = 32 * WORDS
LANES, WARPGROUP = 32, 128

CLEAR = """
.reg .pred p, q, first; .reg .b32 lane, thread, i, id, word, bits, own, before, total, place; .reg .b64 a, b;
mov.u32 thread, %tid.x; mov.u32 lane, %laneid; setp.lt.u32 first, thread, 32;
shl.b32 i, thread, 2; add.s32 i, i, $5; mov.b32 bits, {bits}; @first st.shared.b32 [i], bits;
bar.sync 1, 128;
"""
SET = """
add.s32 i, thread, {start}; setp.lt.u32 p, i, {choices}; mul.wide.u32 a, i, 4; add.s64 a, a, $0; mov.b32 id, -1;
@p ld.global.b32 id, [a]; setp.lt.u32 q, id, {count}; shr.u32 word, id, 5; and.b32 i, id, 31; mov.b32 bits, 1;
shl.b32 bits, bits, i; shl.b32 word, word, 2; add.s32 word, word, $5; @q red.shared.or.b32 [word], bits;
"""
COUNT = """
bar.sync 1, 128;
shl.b32 i, lane, 2; add.s32 i, i, $5; ld.shared.b32 own, [i]; popc.b32 total, own; mov.b32 before, total;
"""
PLACE = """
shfl.sync.idx.b32 bits, own, {word}, 31, -1; shfl.sync.idx.b32 place, before, {word}, 31, -1;
mov.b32 i, 1; shl.b32 i, i, lane; and.b32 id, bits, i; setp.ne.and.b32 q, id, 0, first;
sub.s32 i, i, 1; and.b32 bits, bits, i; popc.b32 bits, bits; add.s32 place, place, bits; mul.wide.u32 a, place, 4;
add.s32 id, lane, {start}; add.s64 b, a, $1; @q st.global.b32 [b], id;
mul.lo.s32 id, id, {size}; add.s64 b, a, $2; @q st.global.b32 [b], id;
mov.b32 id, {size}; add.s64 b, a, $3; @q st.global.b32 [b], id;
"""


@partial(jax.jit, static_argnames=("count", "more", "size"))
def list_chosen(experts, *, count: int, more: int, size: int) -> tuple[jax.Array, ...]:
    """The tiles of rows of the chosen experts, in order of their ids, as `products` expects them.

    Args:
      experts: int32 [T, K], ids of experts.  Ids outside [0, `count`) are not chosen.
      count: the experts that tokens choose from.
      more: the experts after these, which are always chosen.
      size: the rows of an expert, in units of 8 rows; those of expert e begin at e * `size`.

    Returns:
      Ids, first rows and sizes, int32 [min(E, T * K) + more], of which the first n are defined; and n, int32 [1].
    """
    most, interpret = min(count, experts.size) + more, bool(interpreting.value)

    def stand_in(experts_ref, *refs):
        interpreted.list_chosen(experts_ref, refs, count, more, size)

    shape = jax.ShapeDtypeStruct((most,), jnp.int32)
    out_type: Any = [shape, shape, shape, jax.ShapeDtypeStruct((1,), jnp.int32)]
    return tuple(
        kernel(
            body_of_ptx(partial(_code, experts.size, count, more, size), stand_in, interpret=interpret),
            interpret=interpret,
            auto_barriers=False,
            kernel_name="experts_listed",
            out_type=out_type,
            grid=(1,),
            grid_names=("cta",),
            num_threads=1,
            thread_name="wg",
            scratch_types=[plgpu.SMEM((WORDS,), jnp.int32)],
        )(experts.reshape(-1))
    )


def _code(choices: int, count: int, more: int, size: int) -> Iterator[str]:
    """The PTX.  Its operands: the choices ($0), the four results ($1 to $4), and words in shared memory ($5)."""
    always = ((1 << more) - 1) << count
    words = range(-(-(count + more) // LANES))
    yield CLEAR.format(bits=0)
    for word in words:  # the first warp's words; a lane stores one
        if bits := always >> (LANES * word) & 0xFFFFFFFF:
            yield f"setp.eq.u32 q, thread, {word}; mov.b32 bits, {bits:#x}; @q st.shared.b32 [i], bits;\n"
    if always:
        yield "bar.sync 1, 128;\n"
    yield from (SET.format(start=start, choices=choices, count=count) for start in range(0, choices, WARPGROUP))
    yield COUNT
    for lanes in (1, 2, 4, 8, 16):
        yield f"shfl.sync.up.b32 i|p, before, {lanes}, 0, -1; @p add.s32 before, before, i;\n"
    yield "shfl.sync.idx.b32 id, before, 31, 31, -1; sub.s32 before, before, total;\n"
    yield "setp.eq.u32 q, thread, 0; @q st.global.b32 [$4], id;\n"
    yield from (PLACE.format(word=word, start=LANES * word, size=size) for word in words)
