"""What one thread does in the sorting network of `sorting.py`: MLIR and inline PTX."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.indexer.chunk import EMPTY, THREADS
from jaxkv_kernels.mosaic_gpu.indexer.lanes import array, c32, element, i32, ptx, thread, words

PAIR = "{ .reg .pred p, q; .reg .b64 a, b; mov.b64 a, {$5, $4}; mov.b64 b, {$7, $6}; setp.gt.s64 p, b, a; "
EXCHANGE = (
    PAIR + "setp.ne.b32 q, $8, 0; xor.pred p, p, q; selp.b32 $0, $6, $4, p; selp.b32 $1, $7, $5, p; "
    "selp.b32 $2, $4, $6, p; selp.b32 $3, $5, $7, p; }"
)
"""Two elements, the larger first; the smaller first if $8."""
TAKE = (
    "{ .reg .pred p, q; .reg .b64 a, b; mov.b64 a, {$3, $2}; mov.b64 b, {$5, $4}; setp.gt.s64 p, b, a; "
    "setp.ne.b32 q, $6, 0; xor.pred p, p, q; selp.b32 $0, $4, $2, p; selp.b32 $1, $5, $3, p; }"
)
"""The larger of two elements; the smaller if $6."""
SHUFFLE = "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;"


def load(keys_ref, places_ref) -> Any:
    """Any order will do: a warp loads consecutive elements.  Places are complemented."""
    size = keys_ref.type.shape[0]
    found = []
    for ref in (keys_ref, places_ref):
        start = element(ref, (thread(),), size)
        code = "ld.shared.b32 $0, [$1 + {}];"
        found.append([
            ptx(code.format(4 * THREADS * n), start, result_types=i32(), has_side_effects=True)
            for n in range(size // THREADS)
        ])  # fmt: skip
    mgpu.utils.warpgroup_barrier()
    return _arrays(found[0], [arith.xori(x, c32(-1)) for x in found[1]])


def within_thread(keys, places) -> Any:
    """All stages of the network within a thread's elements, the last of them in the thread's direction."""
    pairs = [*zip(words(keys), words(places), strict=True)]
    bits = len(pairs).bit_length() - 1
    for stage in range(1, bits + 1):
        _registers(pairs, stage, bits, _bit(thread(), c32(0)))
    return _arrays(*zip(*pairs, strict=True)) if pairs else None


def between_registers(keys, places, stage) -> Any:
    """The shortest distances of a stage, which is counted from the bits of the thread's index on."""
    pairs = [*zip(words(keys), words(places), strict=True)]
    bits = len(pairs).bit_length() - 1
    _registers(pairs, bits + 1, bits, _bit(thread(), stage))
    return _arrays(*zip(*pairs, strict=True))


def between_lanes(keys, places, stage, distance) -> Any:
    """Exchanges with the lane whose index differs in bit `distance`."""
    smaller = arith.xori(_bit(thread(), stage), _bit(thread(), distance))
    mask = arith.shli(c32(1), distance)
    pairs = []
    for pair in zip(words(keys), words(places), strict=True):
        other = [ptx(SHUFFLE, x, mask, result_types=i32(), has_side_effects=True, convergent=True) for x in pair]
        pairs.append(ptx(TAKE, *pair, *other, smaller, result_types=[i32()] * 2))
    return _arrays(*zip(*pairs, strict=True))


def between_warps(keys, places, keys_ref, places_ref, stage, distance) -> Any:
    """Exchanges with the thread whose index differs in bit `distance`, by way of shared memory."""
    smaller = arith.xori(_bit(thread(), stage), _bit(thread(), distance))
    partner = arith.xori(thread(), arith.shli(c32(1), distance))
    size = keys_ref.type.shape[0]
    held = [words(keys), words(places)]
    for ref, values in zip((keys_ref, places_ref), held, strict=True):
        start = element(ref, (thread(),), size)
        for n, x in enumerate(values):
            ptx(f"st.shared.b32 [$0 + {4 * THREADS * n}], $1;", start, x, has_side_effects=True)
    mgpu.utils.warpgroup_barrier()
    others = []
    for ref in (keys_ref, places_ref):
        start = element(ref, (partner,), size)
        code = "ld.shared.b32 $0, [$1 + {}];"
        others.append([
            ptx(code.format(4 * THREADS * n), start, result_types=i32(), has_side_effects=True)
            for n in range(len(held[0]))
        ])  # fmt: skip
    mgpu.utils.warpgroup_barrier()
    pairs = [ptx(TAKE, *four, smaller, result_types=[i32()] * 2) for four in zip(*held, *others, strict=True)]
    return _arrays(*zip(*pairs, strict=True))


def store(keys, places, ref, row, k: int) -> None:
    """The places of the first k elements."""
    held = [*zip(words(keys), words(places), strict=True)]
    first = arith.muli(thread(), c32(len(held)))
    start = element(ref, (row, first), k)
    for n, (key, place) in enumerate(held):
        empty = arith.cmpi(arith.CmpIPredicate.eq, key, c32(EMPTY))
        place = arith.select(empty, c32(-1), arith.xori(place, c32(-1)))
        inside = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(first, c32(n)), c32(k))
        ptx(f"st.global.b32 [$0 + {4 * n}], $1;", start, place, predicate=inside)


def _registers(pairs: list[Any], stage: int, bits: int, direction) -> None:
    """A stage's distances below 2**bits; from stage `bits` on, smaller elements come first if `direction`."""
    for distance in reversed(range(min(stage, bits))):
        for low in range(len(pairs)):
            high = low | 1 << distance
            if high == low:
                continue
            smaller = direction if stage >= bits else c32(low >> stage & 1)
            four = ptx(EXCHANGE, *pairs[low], *pairs[high], smaller, result_types=[i32()] * 4)
            pairs[low], pairs[high] = four[:2], four[2:]


def _bit(x, n) -> Any:
    return arith.andi(arith.shrui(x, n), c32(1))


def _arrays(keys, places) -> list[Any]:
    of = plgpu.Layout.WG_STRIDED((len(keys) * THREADS,), 1)
    return [array([*keys], of), array([*places], of)]
