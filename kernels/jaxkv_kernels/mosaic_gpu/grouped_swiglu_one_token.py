"""`grouped_swiglu` of a single token: a warp per row of weights, without tensor cores.

Reading weights bounds it: 138 MB per layer of DeepSeek-V2-Lite.  Rows are divided evenly among all warps, which work
tiles of 64 rows (`expert_products.py`) are not, and one kernel adds up what the experts return.  Timeline of a warp:

    gate and up    wait for the previous kernel; per row: load both rows | multiply by the token, sum over lanes, store
    down           load the rows of two experts while CTAs of the previous kernel are still running; wait for it; per
                   expert: load the row of the next but one, multiply; sum over lanes, store

The shared expert's rows come first.  The token, and the results of the first kernel, are read from the L1 cache.

What bounds it: bytes in flight.  16 warps with 16 vectors of 16 bytes per lane have 128 KiB in flight.
Barriers.  None.
Budget.  No shared memory.  Registers: 128 per lane, of which 64 or 72 hold weights.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import GroupedSwiglu
from jaxkv_kernels.mosaic_gpu.interpreter import experts as interpreted
from jaxkv_kernels.mosaic_gpu.ptx.inline import constant, emit
from jaxkv_kernels.mosaic_gpu.ptx.reductions import warp_reduction
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents, wait_for_previous
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.tile_scaled import TileScaled

MOST_PARTS, MOST_INNER = 16, 2048
"""The most experts of a single token, shared ones included; and the most values of an expert."""
WARPGROUPS = 4
LANES, VECTOR, WARPS = 32, 8, 4 * WARPGROUPS
"""Lanes of a warp, values that a lane loads at once, warps of a CTA."""
GROUP = 8
"""Vectors of a row whose loads are in flight at once."""
START = """
.reg .pred p, q, half; .reg .b32 lane, n, slot, row, id, a, b, c; .reg .b64 at, own, first, second;
.reg .f32 x, y, sum, other; .reg .b16 short;
mov.u32 lane, %laneid; mov.u32 n, %tid.x; shr.u32 n, n, 5; mad.lo.u32 n, ${cta}, {warps}, n;
mul.wide.u32 own, lane, 16;
"""
WAIT = "griddepcontrol.wait;\n"
LOAD_WEIGHT = "ld.global.nc.L1::no_allocate.v4.b32 {{{r}0, {r}1, {r}2, {r}3}}, [{at} + {offset}];\n"
LOAD_TOKEN = "ld.global.v4.b32 {{{r}0, {r}1, {r}2, {r}3}}, [{at} + {offset}];\n"
UNPACK = {
    "bfloat16": ("shl.b32 {to}, {word}, 16;\n", "and.b32 {to}, {word}, 0xFFFF0000;\n"),
    "float16": (
        "{{ .reg .b16 h, i; mov.b32 {{h, i}}, {word}; cvt.f32.f16 {to}, h; }}\n",
        "{{ .reg .b16 h, i; mov.b32 {{h, i}}, {word}; cvt.f32.f16 {to}, i; }}\n",
    ),
}
"""The first and the second value of a word, as float32."""
ROUND = {"bfloat16": "cvt.rn.bf16.f32", "float16": "cvt.rn.f16.f32"}


Expert = tuple[jax.Array, jax.Array, jax.Array]


def only_expert(call: GroupedSwiglu) -> Expert | None:
    """The expert of all tokens, if it is all that a single token passes through: a feed-forward that is no mixture."""
    plain = call.biases is None and call.alpha is None and not isinstance(call.gate, TileScaled)
    return call.shared if call.x.shape[0] == 1 and not call.experts.shape[1] and plain else None


def expert_reasons(gate) -> Iterator[str]:
    """Reasons against an `only_expert` whose gate is [inner, width]."""
    inner, width = gate.shape
    if width % VECTOR:
        yield f"tokens of {width} values: supports multiples of {VECTOR}"
    if not inner_parts(inner):
        yield f"an inner size of {inner} values: supports up to {MOST_PARTS} equal parts of up to {MOST_INNER}"


def fits_one_token(call: GroupedSwiglu) -> bool:
    """Whether `one_token` supports a call with chosen experts."""
    if len(call.x) > 1 or isinstance(call.gate, TileScaled) or call.biases is not None or call.alpha is not None:
        return False
    inner = call.gate.shape[1]
    parts = call.experts.size + (0 if call.shared is None else len(call.shared[0]) // inner)
    return parts <= MOST_PARTS and inner <= MOST_INNER


def one_expert(call: GroupedSwiglu, expert: Expert) -> jax.Array:
    """The result [1, D] of the `only_expert` of a call, in parts of up to 2,048 of its values."""
    gate, up, down = expert
    parts, width = inner_parts(len(gate)), call.x.shape[1]
    first = [matrix.reshape(parts, -1, width) for matrix in (gate, up)]
    # No expert is chosen, so that their matrices, which must not be empty, are not read.
    return one_token(replace(call, gate=first[0], up=first[1], down=down.reshape(parts, width, -1)))


@jax.jit
def one_token(call: GroupedSwiglu) -> jax.Array:
    """The sum [1, D] of the experts of a token, shared ones included; weights have the dtype of `x`."""
    x, experts, shares, shared = call.x, call.experts, call.weights, call.shared
    gate, up, down = call.gate, call.up, call.down
    (count, inner, width), choices = gate.shape, experts.size
    more = 0 if shared is None else len(shared[0]) // inner
    first, second = ((), ()) if shared is None else (shared[:2], shared[2:])
    sizes = {"choices": choices, "experts": count, "more": more, "inner": inner, "width": width}
    options = {"dtype": x.dtype, "sizes": sizes}
    if not choices:  # kernels have no empty operands
        experts, shares = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.float32)
    values, following = (choices + more) * inner, {"following": (shares, down, *second)}
    hidden = _run(_gate_up, x, experts, gate, up, *first, results=values, limit=call.limit, **following, **options)
    return _run(_down, hidden, experts, shares, down, *second, results=width, **options).reshape(1, width)


def _run(lanes, *operands, results, following=(), dtype, sizes, **limit) -> jax.Array:
    """Runs a kernel, whose results are a vector; `following` are operands of the next one, which reads them early."""
    name, interpret = lanes.__name__.removeprefix("_"), bool(interpreting.value)
    ctas = 1 if interpret else multiprocessors()

    def body(*refs):
        refs, more, out_ref = refs[: len(operands)], refs[len(operands) : -1], refs[-1]
        if interpret:
            stand_in = getattr(interpreted, name)
            out_ref[...] = stand_in(*(ref[...] for ref in refs), **sizes, **limit).astype(dtype)
            return
        if following:
            wait_for_previous(interpret=interpret)
            pdl_launch_dependents((*refs[1:], *more), interpret=interpret)

        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * (len(refs) + 1), SCALAR))
        def multiply(_, refs, cta):
            lanes(refs, cta.registers.item(), ctas=ctas, dtype=str(dtype), **sizes, **limit)

        multiply([*refs, out_ref], lax.axis_index("cta"))

    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        waits=True,
        kernel_name=f"experts_of_one_{name}",
        out_type=jax.ShapeDtypeStruct((results,), dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=1 if interpret else WARPGROUPS,
        thread_name="wg",
    )(*operands, *following)


def inner_parts(inner: int) -> int:
    """The fewest equal parts of `inner` values of up to `MOST_INNER`, in multiples of 8; 0 if there are none."""
    counts = range(-(-inner // MOST_INNER), MOST_PARTS + 1)
    return next((parts for parts in counts if inner % (VECTOR * parts) == 0), 0)


def _gate_up(refs, cta, *, ctas, dtype, choices, experts, more, inner, width, limit) -> None:
    """Stores silu(gate row) * (up row), at most `limit`, of all rows of the shared and of the chosen experts.

    `refs` are the token, the choices, gate, up, perhaps gate and up of the shared expert, and the result.
    """
    token, chosen, gate, up, *shared, out = (f"${i}" for i in range(len(refs)))
    code = [START.format(cta=len(refs), warps=WARPS), _declared(("g", "u", "t"), GROUP, ("g", "u"))]
    code.append(f"add.s64 at, own, {token};\n")
    code.append(f"NEXT: setp.ge.u32 p, n, {(choices + more) * inner}; @p bra.uni DONE;\n")
    code.append(f"div.u32 slot, n, {inner}; mul.lo.u32 a, slot, {inner}; sub.u32 row, n, a;\n")
    code.append(_expert(chosen, choices, experts, more))
    code.append(f"mad.lo.u32 row, id, {inner}, row;\n")
    if shared:
        code.append("selp.b32 row, n, row, q;\n")
    code.append(f"mul.wide.u32 first, row, {2 * width}; add.s64 first, first, own; mov.b64 second, first;\n")
    for pointer, chosen_from, other in (("first", gate, shared[:1]), ("second", up, shared[1:])):
        code.append(f".reg .b64 base_{pointer}; mov.b64 base_{pointer}, {chosen_from};\n")
        code += (f"selp.b64 base_{pointer}, {matrix}, base_{pointer}, q;\n" for matrix in other)
        code.append(f"add.s64 {pointer}, {pointer}, base_{pointer};\n")
    code += _cleared("g", "u")
    vectors = _vectors_of(width)
    for start in range(0, len(vectors), GROUP):
        group = vectors[start : start + GROUP]
        for v in group:
            code += _loaded(LOAD_WEIGHT, f"g{v - start}_", "first", v, width)
            code += _loaded(LOAD_WEIGHT, f"u{v - start}_", "second", v, width)
        for v in group:
            code += _loaded(LOAD_TOKEN, f"t{v - start}_", "at", v, width)
            code += _multiplied(dtype, f"t{v - start}_", (f"g{v - start}_", "g"), (f"u{v - start}_", "u"))
    code += [*_summed("g", "x"), *_summed("u", "y")]
    if limit is not None:
        high, low = constant(limit), constant(-limit)
        code.append(f"min.f32 x, x, {high}; min.f32 y, y, {high}; max.f32 y, y, {low};\n")
    code.append(f"mul.f32 sum, x, {constant(-LOG2E)}; ex2.approx.f32 sum, sum; add.f32 sum, sum, 0f3F800000;\n")
    code.append("div.rn.f32 x, x, sum; mul.f32 x, x, y;\n")
    code += _stored(dtype, "x", out)
    code.append(f"add.u32 n, n, {ctas * WARPS}; bra.uni NEXT; DONE:\n")
    emit(code, refs, cta)


def _down(refs, cta, *, ctas, dtype, choices, experts, more, inner, width) -> None:
    """Stores the sum over experts of their share times the product of a row of down with their part of `gate_up`.

    `refs` are the results of `gate_up`, the choices, their shares, down, perhaps down of the shared expert, and the
    result.
    """
    hidden, chosen, shares, matrix, *shared, out = (f"${i}" for i in range(len(refs)))
    slots, vectors = choices + more, _vectors_of(inner)
    ahead = 2 if len(vectors) <= 6 else 1  # as registers suffice
    sets = [f"w{i}" for i in range(ahead + 1)]
    code = [START.format(cta=len(refs), warps=WARPS), _declared((*sets, "t"), len(vectors), ("w",))]
    code.append(".reg .f32 share;\n")

    def load(slot: int):
        """Loads of a row of the expert of a slot."""
        if slot < more:
            place = f"mad.lo.u32 row, n, {more}, {slot};"
            yield f"{place} mul.wide.u32 first, row, {2 * inner}; add.s64 first, first, {shared[0]};\n"
        else:
            yield f"mov.u32 slot, {slot};\n" + _expert(chosen, choices, experts, more)
            yield f"mad.lo.u32 row, id, {width}, n; mul.wide.u32 first, row, {2 * inner};\n"
            yield f"add.s64 first, first, {matrix};\n"
        yield "add.s64 first, first, own;\n"
        for v in vectors:
            yield from _loaded(LOAD_WEIGHT, f"{sets[slot % len(sets)]}{v}_", "first", v, inner)

    def share(slot: int):
        """The share of a slot."""
        if slot < more:
            yield "mov.f32 share, 0f3F800000;\n"
        else:
            yield f"mov.f32 share, 0f00000000; ld.global.b32 a, [{chosen} + {4 * (slot - more)}];\n"
            yield f"setp.lt.u32 q, a, {experts}; @q ld.global.f32 share, [{shares} + {4 * (slot - more)}];\n"

    def add(slot: int):
        """Adds the product with the row of a slot."""
        yield from _cleared("w")
        yield from share(slot)
        for v in vectors:
            yield from _loaded(LOAD_TOKEN, f"t{v}_", "at", v, inner, slot * inner * 2)
        for v in vectors:
            yield from _multiplied(dtype, f"t{v}_", (f"{sets[slot % len(sets)]}{v}_", "w"))
        # Select instead of multiplying by 0: the expert of a choice that does not exist is another one.
        yield "add.f32 x, w_even, w_odd; mul.f32 x, x, share; setp.eq.f32 q, share, 0f00000000;\n"
        yield "selp.f32 x, 0f00000000, x, q; add.f32 sum, sum, x;\n"

    code.append(f"NEXT: setp.ge.u32 p, n, {width}; @p bra.uni DONE; mov.f32 sum, 0f00000000;\n")
    for slot in range(min(ahead, slots)):
        code += load(slot)
    # Choices and weights are older than `gate_up`, on whose results this waits.
    code.append(WAIT + f"add.s64 at, own, {hidden};\n")
    for slot in range(slots):
        if slot + ahead < slots:
            code += load(slot + ahead)
        code += add(slot)
    code += warp_reduction("add.f32", "sum", "other")
    code += _stored(dtype, "sum", out)
    code.append(f"add.u32 n, n, {ctas * WARPS}; bra.uni NEXT; DONE:\n")
    emit(code, refs, cta)


def _expert(chosen: str, choices: int, experts: int, more: int) -> str:
    """`q`: whether `slot` is one of the shared expert's; otherwise `id`: an expert, that of the choice if it exists."""
    code = f"setp.lt.u32 q, slot, {more}; sub.s32 a, slot, {more}; max.s32 a, a, 0; mul.wide.u32 first, a, 4;\n"
    return code + f"add.s64 first, first, {chosen}; ld.global.b32 id, [first]; min.u32 id, id, {experts - 1};\n"


# Parts of inline PTX.  A warp multiplies a row: lane l has the vectors l, l + 32, l + 64, ... of 8 values, of the row
# and of the token.


def _vectors_of(size: int) -> range:
    """Numbers of the vectors of 8 values that a lane has of a row of that size; not all lanes have the last one."""
    return range(-(-size // (LANES * VECTOR)))


def _declared(sets, count: int, sums) -> str:
    """Declares sets of registers for `count` vectors, and the two parts of sums."""
    words = ", ".join(f"{name}{v}_{i}" for name in sets for v in range(count) for i in range(4))
    return f".reg .b32 {words}; .reg .f32 " + ", ".join(f"{name}_even, {name}_odd" for name in sums) + ";\n"


def _cleared(*sums):
    """Clears sums."""
    return (f"mov.f32 {name}_even, 0f00000000; mov.f32 {name}_odd, 0f00000000;\n" for name in sums)


def _loaded(load: str, register: str, at: str, vector: int, size: int, offset: int = 0):
    """Loads a lane's vector of a row; zeros if the row has no such vector."""
    rest = size // VECTOR - vector * LANES
    text = load.format(r=register, at=at, offset=offset + vector * LANES * 16)
    if rest >= LANES:
        return [text]
    clear = "".join(f"mov.b32 {register}{i}, 0; " for i in range(4))
    return [f"{clear} setp.lt.u32 half, lane, {rest}; @half {text}"]


def _multiplied(dtype: str, token: str, *rows):
    """Adds the products of a vector of the token with one of each of the rows: (registers, sum)."""
    for i in range(4):
        for half, name in enumerate(("even", "odd")):
            unpack = UNPACK[dtype][half]
            yield unpack.format(to="a", word=f"{token}{i}")
            for row, total in rows:
                yield unpack.format(to="b", word=f"{row}{i}") + f"fma.rn.f32 {total}_{name}, a, b, {total}_{name};\n"


def _summed(of: str, to: str):
    """The sum of all lanes, in all lanes."""
    return [f"add.f32 {to}, {of}_even, {of}_odd;\n", *warp_reduction("add.f32", to, "other")]


def _stored(dtype: str, value: str, to: str):
    """The first lane stores a value to element `n`."""
    yield f"{ROUND[dtype]} short, {value}; mul.wide.u32 first, n, 2; add.s64 first, first, {to};\n"
    yield "setp.eq.u32 q, lane, 0; @q st.global.b16 [first], short;\n"
