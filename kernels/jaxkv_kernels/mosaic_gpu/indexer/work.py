"""Device-side: which tiles of logits a CTA computes, and which it only fills with -inf.

The tiles of all requests, one request after another, are divided evenly among the CTAs.  Every warp finds its CTA's
share by itself: it sums the tiles of all requests, a request per lane, and then finds the requests in which the share
begins and ends.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.indexer.config import TILE
from jaxkv_kernels.mosaic_gpu.ptx.fragments import splat
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

LANES = 32
MOST_UNROLLED = 8
"""The most requests per lane whose lengths stay in registers."""


class Share(NamedTuple):
    """Consecutive tiles; tiles of a request count from its first."""

    first_request: Any
    first_tile: Any
    last_request: Any
    """Below `first_request` if the share is empty."""
    last_end: Any
    """The tile after the last of `last_request`."""

    def tiles(self, request, begin, end):
        """The tiles of a request within the share, of all its tiles from `begin` to `end`."""
        begin = jnp.where(request == self.first_request, self.first_tile, begin)
        return begin, jnp.where(request == self.last_request, self.last_end, end)


@dataclass(frozen=True)
class Tiles:
    """The tiles of each request, given its length."""

    capacity: int
    """Tokens that a request's block table has room for."""
    max_len: int
    """Positions of the result."""

    @property
    def most(self) -> int:
        """Tokens of a request that can have logits."""
        return min(self.capacity, self.max_len)

    @property
    def per_request(self) -> int:
        """Tiles of a request's logits, computed or filled."""
        return -(-self.max_len // TILE)

    def computed(self, length):
        """Tiles of a request that are computed; the others are filled."""
        return floordiv(jnp.clip(length, 0, self.most) + (TILE - 1), TILE)


def find_share(lengths_ref, cta, ctas: int, tiles: Tiles, in_cache, *, filled: bool, interpret: bool) -> Share:
    """The share of a CTA of all tiles that are computed, or with `filled` of those that are filled.

    If `in_cache` is False (the layer is outside the cache), all tiles are filled.
    """
    if interpret:
        return _interpreted(lengths_ref, cta, ctas, tiles, in_cache, filled)
    requests = lengths_ref.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=[plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)] * 4,
    )
    def find(_, ref, cta, in_cache):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.extend.mlir import ir

        i32 = ir.IntegerType.get_signless(32)
        found = mgpu.utils.inline_ptx(
            _search(requests, ctas, tiles, filled),
            mgpu.utils.memref_ptr(ref),
            cta.registers.item(),
            in_cache.registers.item(),
            result_types=[i32] * 4,
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


def _interpreted(lengths_ref, cta, ctas, tiles, in_cache, filled) -> Share:
    """The same by plain loops over requests."""

    def count(request):
        computed = tiles.computed(jnp.where(in_cache, lengths_ref[request], 0))
        return tiles.per_request - computed if filled else computed

    requests = lengths_ref.shape[0]
    total = lax.fori_loop(0, requests, lambda request, sum: sum + count(request), jnp.int32(0))
    each, rest = floordiv(total, ctas), lax.rem(total, jnp.int32(ctas))
    first = cta * each + jnp.minimum(cta, rest)
    last = first + each + (cta < rest)

    def find(tile, request, carry):
        begin, found, at = carry
        end = begin + count(request)
        here = (begin <= tile) & (tile < end)
        return end, jnp.where(here, request, found), jnp.where(here, tile - begin, at)

    empty = jnp.int32(0), jnp.int32(-1), jnp.int32(0)
    _, first_request, first_tile = lax.fori_loop(0, requests, partial(find, first), empty)
    _, last_request, last_tile = lax.fori_loop(0, requests, partial(find, last - 1), empty)
    some = first < last
    return Share(
        jnp.where(some, first_request, 0), jnp.where(some, first_tile, 0),
        jnp.where(some, last_request, -1), jnp.where(some, last_tile + 1, 0),
    )  # fmt: skip
