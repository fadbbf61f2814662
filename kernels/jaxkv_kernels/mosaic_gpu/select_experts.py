"""The experts of each token, and their weights: a warp per token.

The lanes of a warp have a token's logits in registers: lane l has those of experts l, l + 32, l + 64, ...  Timeline of
a warp:

    load | softmax or sigmoids | keys of the scores, in the order of int32 | keep the best groups | per choice: the
    largest key, the first expert that has it, its score; that expert is out | normalise, store

What bounds it: latency, that of two reductions over the warp per choice.
Barriers.  None.
Budget.  No shared memory.  Registers: three per 32 experts, and one per group.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import SelectExperts
from jaxkv_kernels.mosaic_gpu.interpreter import experts as interpreted
from jaxkv_kernels.mosaic_gpu.ptx.inline import constant, emit
from jaxkv_kernels.mosaic_gpu.ptx.reductions import warp_reduction
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

WARPS, LANES = 4, 32
"""Warps, and tokens, of a CTA; lanes of a warp."""
MOST_EXPERTS = 1024
"""Experts whose scores fit in the registers of a warp."""
SCORINGS = "softmax", "sigmoid"
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


def unsupported_reasons(call: SelectExperts) -> Iterator[str]:
    """Reasons against a call."""
    experts, groups = call.logits.shape[1], call.groups
    if call.scoring not in SCORINGS:
        yield f"`scoring` {call.scoring!r}: supports {' and '.join(map(repr, SCORINGS))}"
    if experts > MOST_EXPERTS:
        yield f"{experts} experts: supports up to {MOST_EXPERTS}"
    if call.per_token > LANES:
        yield f"{call.per_token} experts per token: supports up to {LANES}"
    if groups > call.groups_per_token and experts // groups % LANES:
        yield f"groups of {experts // groups} experts: supports multiples of {LANES}"


@jax.jit
def select_experts(call: SelectExperts) -> tuple[jax.Array, jax.Array]:
    """The choices [T, K] of tokens with logits [T, E], and their weights."""
    logits, bias = call.logits, call.bias
    tokens, interpret = len(logits), bool(interpreting.value)
    shape = tokens, call.per_token
    if not tokens:
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    def body(*refs):
        first = lax.axis_index("cta") * WARPS
        if interpret:
            interpreted.select_experts(call, refs, first, WARPS)
            return

        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(refs), SCALAR))
        def select(_, refs, first):
            _select(call, refs, first.registers.item())

        select(list(refs), first)

    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        kernel_name="experts_selected",
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(-(-tokens // WARPS),),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
    )(logits, *[bias] * (bias is not None))


def _select(call: SelectExperts, refs, first_token) -> None:
    """Stores ids and weights of the token `first_token` plus the number of the warp, if there is such a token.

    `refs` are the logits, perhaps the bias, and both results.
    """
    tokens, count = call.logits.shape
    registers = range(-(-count // LANES))
    code = [START.format(first=len(refs), tokens=tokens, last=tokens - 1, bytes=4 * count)]
    code.append(f".reg .b32 id<{len(registers)}>, k<{len(registers)}>; .reg .f32 s<{len(registers)}>;\n")
    for r in registers:
        code.append(f"add.s32 id{r}, lane, {LANES * r};\n" + LOAD.format(to=f"s{r}", r=r, count=count, array="row"))
    code += _softmax(registers) if call.scoring == "softmax" else _sigmoids(registers)
    for r in registers:
        code.append("mov.f32 x, 0f00000000;\n" if len(refs) == 3 else LOAD.format(to="x", r=r, count=count, array="$1"))
        code.append(f"add.f32 x, x, s{r}; mov.b32 key, x;\n" + ORDERED.format(of="key", to=f"k{r}"))
        code.append(f"setp.lt.u32 q, id{r}, {count}; selp.b32 k{r}, k{r}, {OUT}, q;\n")
    if call.groups > call.groups_per_token:
        code += _best_groups(registers, call.groups, call.groups_per_token, 1 if call.scoring == "softmax" else 2)
    code.append("mov.f32 sum, 0f00000000; mov.f32 own, sum; mov.b32 mine, 0;\n")
    for choice in range(call.per_token):
        code += _largest(registers)
        code.append("mov.f32 x, 0f00000000;\n")
        for r in registers:
            code.append(f"setp.eq.u32 q, id{r}, first; selp.b32 k{r}, {OUT}, k{r}, q; selp.f32 x, s{r}, x, q;\n")
        code.append(f"and.b32 i, first, {LANES - 1}; shfl.sync.idx.b32 x, x, i, 31, -1; add.f32 sum, sum, x;\n")
        code.append(f"setp.eq.u32 q, lane, {choice}; selp.b32 mine, first, mine, q; selp.f32 own, x, own, q;\n")
    if call.normalize:
        code.append(f"add.f32 sum, sum, {constant(1e-20)}; div.rn.f32 own, own, sum;\n")
    code.append(f"mul.f32 own, own, {constant(call.scale)};\n")
    ids = len(refs) - 2
    code.append(STORE.format(chosen=call.per_token, bytes=4 * call.per_token, ids=ids, weights=ids + 1))
    emit(code, refs, first_token)


def _softmax(registers):
    """Replaces the logits by their softmax."""
    yield "mov.f32 x, s0;\n"
    yield from (f"max.f32 x, x, s{r};\n" for r in registers)
    yield from warp_reduction("max.f32", "x", "y")
    yield "mov.f32 sum, 0f00000000;\n"
    for r in registers:
        yield f"sub.f32 s{r}, s{r}, x; mul.f32 s{r}, s{r}, {constant(LOG2E)}; ex2.approx.f32 s{r}, s{r};\n"
        yield f"add.f32 sum, sum, s{r};\n"
    yield from warp_reduction("add.f32", "sum", "y")
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
