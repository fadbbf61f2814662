"""The positions of the k largest logits.

`_keep_best`: a program holds up to CHUNK logits of a row in registers.  It finds the k-th largest bit by bit, with one
count over the chunk per bit.  It keeps the k largest in the order of their positions, and of those equal to the k-th
logit the earliest.  The launch is repeated on the kept logits of a row until they come from a single chunk.  `_sorted`:
a program sorts the kept logits of a row.

    for each of 32 bits:   count the logits at or above the threshold with this bit | keep or drop the bit
    then                   prefix sums give each kept logit its place | store

What bounds it: the latency of the 32 counts.  `_keep_best` has CHUNK_SHARE logits per thread and about 120 registers;
`_sorted` takes 8 bytes of shared memory per logit.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import SelectTopk
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import launch

LEAST, CHUNK = 16, 8192
"""The least and the most logits per program."""
CHUNK_SHARE, SORTED_SHARE = 16, 4
"""Logits per thread of the two kernels."""

MOST_BEST = 4096
"""The largest k."""

MINUS_INFINITY = tl.constexpr(-0x7F800001)
"""The `_key` of -inf."""


def unsupported_reasons(call: SelectTopk) -> Iterator[str]:
    """Reasons against a call."""
    if call.k > MOST_BEST:
        yield f"`k` of {call.k}: supports at most {MOST_BEST}"


@jax.jit
def select_topk(call: SelectTopk) -> jax.Array:
    """The positions of the largest logits, or their slots, in decreasing order; -1 in place of -inf.

    Among equal logits, the earlier position comes first.
    """
    logits, k = call.logits, call.k
    *leading, length = logits.shape
    if not logits.size:
        return jnp.full((*leading, k), -1, jnp.int32)
    kept = min(k, length)
    values = logits.reshape(-1, length)
    rows = values.shape[0]
    places, first = values, True  # the first launch does not read `places`; it uses the positions
    while first or values.shape[1] > kept:
        length = values.shape[1]
        chunk = min(CHUNK, max(LEAST, triton.next_power_of_2(length)))
        chunks = triton.cdiv(length, chunk)
        shapes = [jax.ShapeDtypeStruct((rows, chunks * kept), dtype) for dtype in (jnp.float32, jnp.int32)]
        values, places = launch(
            _keep_best, (values, places), shapes,
            grid=(rows, chunks), warps=_warps(chunk, CHUNK_SHARE), FIRST=first, LENGTH=length, CHUNK=chunk, KEPT=kept,
        )  # fmt: skip
        first = False
    best = jax.ShapeDtypeStruct((rows, k), jnp.int32)
    block = max(LEAST, triton.next_power_of_2(k))
    constants = {"KEPT": kept, "K": k, "BLOCK": block}
    found = launch(_sorted, (values, places), (best,), grid=(rows,), warps=_warps(block, SORTED_SHARE), **constants)
    return call.located(found[0].reshape(*leading, k))


def _warps(count, share):
    return max(count // (32 * share), 1)


@triton.jit
def _keep_best(
    values, places, best_values, best_places,
    FIRST: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(values + row * LENGTH + here, mask=here < LENGTH, other=float("-inf"))
    key = (_key(value) ^ -0x80000000).to(tl.uint32, bitcast=True)
    least = tl.full([], 0, tl.uint32)  # grows to the KEPT-th largest key, or to a threshold below it
    bit = tl.full([], 31, tl.int32)
    while bit >= 0:
        more = least | (tl.full([], 1, tl.uint32) << bit.to(tl.uint32))
        reached = tl.sum((key >= more).to(tl.int32))
        least = tl.where(reached >= KEPT, more, least)
        bit = tl.where(reached == KEPT, -1, bit - 1)
    above, equal = (key > least).to(tl.int32), (key == least).to(tl.int32)
    wanted = KEPT - tl.sum(above)  # how many logits equal to the threshold to keep
    # Both running sums in one cumsum: neither exceeds 2**15.
    both = above + (equal << 16)
    before = tl.cumsum(both, 0) - both
    equal_before = before >> 16
    keep = (above > 0) | ((equal > 0) & (equal_before < wanted))
    place = (row * tl.num_programs(1) + chunk) * KEPT + (before & 0xFFFF) + tl.minimum(equal_before, wanted)
    if not FIRST:
        here = tl.load(places + row * LENGTH + here, mask=keep & (here < LENGTH), other=0)
    tl.store(best_values + place, value, mask=keep)
    tl.store(best_places + place, here, mask=keep)


@triton.jit
def _sorted(values, places, best, KEPT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(values + row * KEPT + i, mask=i < KEPT, other=float("-inf"))
    place = tl.load(places + row * KEPT + i, mask=i < KEPT, other=0)
    pair = _key(value).to(tl.int64) << 32 | (0x7FFFFFFF - place).to(tl.int64)
    pair = tl.sort(pair, descending=True)
    place = tl.where(pair >> 32 == MINUS_INFINITY, -1, 0x7FFFFFFF - (pair & 0x7FFFFFFF))
    tl.store(best + row * K + i, place.to(tl.int32), mask=i < K)


@triton.jit
def _key(value):
    """int32 keys in the order of float32 values: -0 equals 0, and every NaN is above all numbers."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
