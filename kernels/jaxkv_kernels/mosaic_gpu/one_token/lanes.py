"""What one lane does to multiply rows of weights by a single token: parts of inline PTX.

A warp multiplies a row: lane l has the vectors l, l + 32, l + 64, ... of 8 values, of the row and of the token.
"""

from jaxkv_kernels.mosaic_gpu.ptx.warp import over_warp

LANES, VECTOR, WARPS = 32, 8, 16
"""Lanes of a warp, values of a vector, warps of a CTA."""
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


def vectors_of(size: int) -> range:
    """Numbers of the vectors of 8 values that a lane has of a row of that size; not all lanes have the last one."""
    return range(-(-size // (LANES * VECTOR)))


def declared(sets, count: int, sums) -> str:
    """Declares sets of registers for `count` vectors, and the two parts of sums."""
    words = ", ".join(f"{name}{v}_{i}" for name in sets for v in range(count) for i in range(4))
    return f".reg .b32 {words}; .reg .f32 " + ", ".join(f"{name}_even, {name}_odd" for name in sums) + ";\n"


def cleared(*sums):
    """Clears sums."""
    return (f"mov.f32 {name}_even, 0f00000000; mov.f32 {name}_odd, 0f00000000;\n" for name in sums)


def loaded(load: str, register: str, at: str, vector: int, size: int, offset: int = 0):
    """Loads a lane's vector of a row; zeros if the row has no such vector."""
    rest = size // VECTOR - vector * LANES
    text = load.format(r=register, at=at, offset=offset + vector * LANES * 16)
    if rest >= LANES:
        return [text]
    clear = "".join(f"mov.b32 {register}{i}, 0; " for i in range(4))
    return [f"{clear} setp.lt.u32 half, lane, {rest}; @half {text}"]


def multiplied(dtype: str, token: str, *rows):
    """Adds the products of a vector of the token with one of each of the rows: (registers, sum)."""
    for i in range(4):
        for half, name in enumerate(("even", "odd")):
            unpack = UNPACK[dtype][half]
            yield unpack.format(to="a", word=f"{token}{i}")
            for row, total in rows:
                yield unpack.format(to="b", word=f"{row}{i}") + f"fma.rn.f32 {total}_{name}, a, b, {total}_{name};\n"


def summed(of: str, to: str):
    """The sum of all lanes, in all lanes."""
    return [f"add.f32 {to}, {of}_even, {of}_odd;\n", *over_warp("add.f32", to, "other")]


def stored(dtype: str, value: str, to: str):
    """The first lane stores a value to element `n`."""
    yield f"{ROUND[dtype]} short, {value}; mul.wide.u32 first, n, 2; add.s64 first, first, {to};\n"
    yield "setp.eq.u32 q, lane, 0; @q st.global.b16 [first], short;\n"
