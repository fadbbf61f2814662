"""What one lane does to choose experts (`routing.py`), and to list those that are chosen (`listing.py`): inline PTX."""

from jaxkv_kernels.mosaic_gpu.ptx.inline import constant, emit
from jaxkv_kernels.mosaic_gpu.ptx.warp import over_warp
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E

LANES, WARPGROUP = 32, 128
OUT = "0x80000000"
"""The key of an expert that cannot be chosen: the lowest int32."""
START = """
.reg .pred q, inside; .reg .b32 lane, token, key, best, first, i, mine; .reg .b64 row, a; .reg .f32 x, y, sum, own;
mov.u32 lane, %laneid; mov.u32 token, %tid.x; shr.u32 token, token, 5; add.s32 token, token, ${first};
setp.lt.s32 inside, token, {tokens}; min.s32 token, token, {last};
mul.wide.u32 row, token, {bytes}; add.s64 row, row, $0;
"""
LOAD = "mov.f32 {to}, 0fFF800000; setp.lt.u32 q, id{r}, {count}; mul.wide.u32 a, id{r}, 4; add.s64 a, a, {array}; "
LOAD += "@q ld.global.f32 {to}, [a];\n"
SIGMOID = "mul.f32 x, s{r}, {minus_log2e}; ex2.approx.f32 x, x; add.f32 x, x, 0f3F800000; rcp.rn.f32 s{r}, x;\n"
ORDERED = "shr.s32 i, {of}, 31; and.b32 i, i, 0x7FFFFFFF; xor.b32 {to}, {of}, i;\n"
"""float32 bits in the order of the values, as int32; and back."""
STORE = """
setp.lt.and.u32 q, lane, {chosen}, inside; mul.wide.u32 row, token, {bytes}; mul.wide.u32 a, lane, 4;
add.s64 row, row, a; add.s64 a, row, ${ids}; @q st.global.b32 [a], mine;
add.s64 a, row, ${weights}; @q st.global.f32 [a], own;
"""

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


def select(refs, first_token, tokens, count, *, per_token, scoring, groups, groups_per_token, normalize, scale) -> None:
    """Stores ids and weights of the token `first_token` plus the number of the warp, if it is less than `tokens`.

    `refs` are logits [T, `count`], perhaps the bias, and both results; the other arguments are those of the operation.
    """
    registers = range(-(-count // LANES))
    code = [START.format(first=len(refs), tokens=tokens, last=tokens - 1, bytes=4 * count)]
    code.append(f".reg .b32 id<{len(registers)}>, k<{len(registers)}>; .reg .f32 s<{len(registers)}>;\n")
    for r in registers:
        code.append(f"add.s32 id{r}, lane, {LANES * r};\n" + LOAD.format(to=f"s{r}", r=r, count=count, array="row"))
    code += _softmax(registers) if scoring == "softmax" else _sigmoids(registers)
    for r in registers:
        code.append("mov.f32 x, 0f00000000;\n" if len(refs) == 3 else LOAD.format(to="x", r=r, count=count, array="$1"))
        code.append(f"add.f32 x, x, s{r}; mov.b32 key, x;\n" + ORDERED.format(of="key", to=f"k{r}"))
        code.append(f"setp.lt.u32 q, id{r}, {count}; selp.b32 k{r}, k{r}, {OUT}, q;\n")
    if groups > groups_per_token:
        code += _best_groups(registers, groups, groups_per_token, 1 if scoring == "softmax" else 2)
    code.append("mov.f32 sum, 0f00000000; mov.f32 own, sum; mov.b32 mine, 0;\n")
    for choice in range(per_token):
        code += _largest(registers)
        code.append("mov.f32 x, 0f00000000;\n")
        for r in registers:
            code.append(f"setp.eq.u32 q, id{r}, first; selp.b32 k{r}, {OUT}, k{r}, q; selp.f32 x, s{r}, x, q;\n")
        code.append(f"and.b32 i, first, {LANES - 1}; shfl.sync.idx.b32 x, x, i, 31, -1; add.f32 sum, sum, x;\n")
        code.append(f"setp.eq.u32 q, lane, {choice}; selp.b32 mine, first, mine, q; selp.f32 own, x, own, q;\n")
    if normalize:
        code.append(f"add.f32 sum, sum, {constant(1e-20)}; div.rn.f32 own, own, sum;\n")
    code.append(f"mul.f32 own, own, {constant(scale)};\n")
    ids = len(refs) - 2
    code.append(STORE.format(chosen=per_token, bytes=4 * per_token, ids=ids, weights=ids + 1))
    emit(code, refs, first_token)


def _softmax(registers):
    """Replaces the logits by their softmax."""
    yield "mov.f32 x, s0;\n"
    yield from (f"max.f32 x, x, s{r};\n" for r in registers)
    yield from over_warp("max.f32", "x", "y")
    yield "mov.f32 sum, 0f00000000;\n"
    for r in registers:
        yield f"sub.f32 s{r}, s{r}, x; mul.f32 s{r}, s{r}, {constant(LOG2E)}; ex2.approx.f32 s{r}, s{r};\n"
        yield f"add.f32 sum, sum, s{r};\n"
    yield from over_warp("add.f32", "sum", "y")
    yield from (f"div.rn.f32 s{r}, s{r}, sum;\n" for r in registers)


def _sigmoids(registers):
    """Replaces the logits by their sigmoids."""
    return (SIGMOID.format(r=r, minus_log2e=constant(-LOG2E)) for r in registers)


def _largest(registers):
    """`key`: the largest key of the experts in these registers of all lanes; `first`: the first of them that has it."""
    yield f"mov.b32 best, {OUT};\n"
    yield from (f"max.s32 best, best, k{r};\n" for r in registers)
    yield "redux.sync.max.s32 key, best, -1; mov.b32 first, -1;\n"
    yield from (f"setp.eq.s32 q, k{r}, key; selp.b32 first, id{r}, first, q;\n" for r in reversed(registers))
    yield "redux.sync.min.u32 first, first, -1;\n"


def _best_groups(registers, groups: int, kept: int, leaders: int):
    """Experts of all but the best groups cannot be chosen.  The score of a group is the sum of its `leaders` best."""
    yield f".reg .f32 g<{groups}>;\n"
    each = len(registers) // groups
    members = [registers[group * each : (group + 1) * each] for group in range(groups)]
    for group, own in enumerate(members):
        yield from _largest(own)
        yield ORDERED.format(of="key", to="key") + f"mov.b32 g{group}, key;\n"
        if leaders == 2:
            yield f"mov.b32 best, {OUT};\n"
            for r in own:
                yield f"setp.eq.u32 q, id{r}, first; selp.b32 i, {OUT}, k{r}, q; max.s32 best, best, i;\n"
            yield "redux.sync.max.s32 key, best, -1;\n" + ORDERED.format(of="key", to="key")
            yield f"mov.b32 x, key; add.f32 g{group}, g{group}, x;\n"
    for group, own in enumerate(members):
        yield "mov.b32 best, 0;\n"  # how many groups precede this one
        for other in range(groups):
            if other != group:
                yield f"setp.{'ge' if other < group else 'gt'}.f32 q, g{other}, g{group}; @q add.s32 best, best, 1;\n"
        yield f"setp.ge.s32 q, best, {kept};\n"
        yield from (f"selp.b32 k{r}, {OUT}, k{r}, q;\n" for r in own)


def list_chosen(refs, choices: int, count: int, more: int, size: int) -> None:
    """Stores the tiles of the chosen experts; `refs` are the choices, the four results and words in shared memory."""
    always = ((1 << more) - 1) << count
    words = range(-(-(count + more) // LANES))
    code = [CLEAR.format(bits=0)]
    for word in words:  # the first warp's words; a lane stores one
        if bits := always >> (LANES * word) & 0xFFFFFFFF:
            code.append(f"setp.eq.u32 q, thread, {word}; mov.b32 bits, {bits:#x}; @q st.shared.b32 [i], bits;\n")
    if always:
        code.append("bar.sync 1, 128;\n")
    code += (SET.format(start=start, choices=choices, count=count) for start in range(0, choices, WARPGROUP))
    code.append(COUNT)
    for lanes in (1, 2, 4, 8, 16):
        code.append(f"shfl.sync.up.b32 i|p, before, {lanes}, 0, -1; @p add.s32 before, before, i;\n")
    code.append("shfl.sync.idx.b32 id, before, 31, 31, -1; sub.s32 before, before, total;\n")
    code.append("setp.eq.u32 q, thread, 0; @q st.global.b32 [$4], id;\n")
    code += (PLACE.format(word=word, start=LANES * word, size=size) for word in words)
    emit(code, refs)
