"""Entries whose values stay as they are, by bulk copies only, for any row width.

`store_entries` stores entries at slots of a layer, in place, from arrays of their parts.  `load_entries` loads the
entries of ragged runs of tokens into such arrays.

Work.  A CTA of one warpgroup has up to four consecutive tokens, or rows of the result; each of its warps has a share of
them (`warp_share`).

Timeline of a warp that stores:

    together with the other warps: start the copies of the tokens' parts, one per part
    load the slots of its tokens
    -> full: per entry, start the copies of its parts to the cache
    wait until shared memory has been read

Timeline of a warp that loads:

    find the places of its tokens; start the copies of their entries, one per run of adjacent heads (two if keys and
      values lie apart)
    together with the other warps: write zeros to shared memory
    find the places again, which is cheaper than keeping them
    per token -> full: start the copies of the entry's parts, or of zeros, to their rows of the result
    wait until shared memory has been read

Rows without a token, and rows beyond the last, fetch some entry and discard it, so that every barrier completes after
the same number of copies.

Barriers.  full: all parts have landed; of loads, one per token of a warp: the warp's heads of that token have landed.
Shared memory is filled once and never reused.
Budget.  Shared memory: 32 KiB, or one token (for loads at least four entries) where that is more, and the zeros of
loads.  Registers: scalars only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Buffer, Pages, arrays_of, dtype_of, in_views, row_views
from jaxkv_kernels.calls import (
    GatherEntries,
    GatherIndexerK,
    GatherKV,
    GatherMLA,
    WriteEntries,
    WriteIndexerK,
    WriteKV,
    WriteMLA,
)
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.mosaic_gpu.layout_reasons import steps, unaligned
from jaxkv_kernels.mosaic_gpu.ragged_places import places_of
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze, kernel, thaw
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS


@dataclass(frozen=True)
class EntryBytes:
    """What such kernels need to know of an entry whose bytes are copied: its parts are the runs that it consists of."""

    sizes: tuple[int, ...]
    """The bytes of each run."""
    one_head: bool

    dtype = jnp.dtype(jnp.uint8)

    @staticmethod
    def of(call: GatherEntries | WriteEntries) -> "EntryBytes":
        """The bytes of the entries of a call, whose pages are not split."""
        itemsize = dtype_of(call.buffer).itemsize
        return EntryBytes(tuple(part.width * itemsize for part in call.pages.parts), call.entry.one_head)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return sum(self.sizes)


WARPS = 4
"""Warps per CTA: one warpgroup."""
CTAS = 4
"""Target number of CTAs per multiprocessor; tokens per CTA grow only beyond it."""
MOST_TOKENS, SOFT_BYTES = 4, 32 * 1024
"""The most tokens per CTA, and the bytes that they should not exceed, so that several CTAs share a multiprocessor.

Gathers of 8,192 latents took 7.3, 7.4 and 7.5 us with 4, 8 and 16 tokens (H200).  Writes took the same time with each.
"""
MOST_BYTES = 160 * 1024
"""Bytes of shared memory that the tokens of a CTA may take.  A gather takes up to a quarter more, for zeros."""


@dataclass(frozen=True)
class WarpShare:
    """A warp's share: `rounds` consecutive tokens, and of each of them `heads` consecutive heads."""

    tokens: int
    """Tokens per CTA: a power of two."""
    heads: int
    head_ways: int
    """Warps that share a token."""

    @property
    def token_ways(self) -> int:
        """Tokens that the warps of a CTA process at the same time."""
        return WARPS // self.head_ways

    @property
    def rounds(self) -> int:
        """Tokens per warp."""
        return -(-self.tokens // self.token_ways)

    def token(self, warp, i: int):
        """The i-th token of a warp, as an index within the CTA; `tokens` or more if there are fewer tokens than
        warps."""
        return lax.div(warp, jnp.int32(self.head_ways)) * self.rounds + i

    def first_head(self, warp):
        """The first of the warp's heads."""
        return lax.rem(warp, jnp.int32(self.head_ways)) * self.heads


def token_ways(heads: int) -> int:
    """Tokens that the warps of a CTA process at the same time."""
    return WARPS // gcd(heads, WARPS)


def warp_share(count: int, heads: int, nbytes: int, *, interpret: bool, least: int = 1) -> WarpShare:
    """Shares of `count` tokens of `heads` heads and `nbytes` bytes each, at least `least` tokens per CTA."""
    tokens, ctas = least, 4 if interpret else CTAS * multiprocessors()
    while 2 * tokens <= min(MOST_TOKENS, SOFT_BYTES // nbytes) and tokens * ctas < count:
        tokens *= 2
    ways = gcd(heads, WARPS)
    return WarpShare(tokens, heads // ways, ways)


def copy_reasons(entry: Entry | EntryBytes, pages: Pages, itemsize: int) -> Iterator[str]:
    """Reasons against moving entries by bulk copies, in a buffer whose elements have `itemsize` bytes."""
    for size in entry.sizes:
        if not size:
            yield "part of 0 values: supports positive numbers of values"
    yield from unaligned({f"part of {size} values": size for size in entry.sizes}, entry.dtype.itemsize)
    yield from unaligned(steps(pages, ("layer", "token", "head")), itemsize)
    token = pages.num_heads * entry.nbytes
    if token * token_ways(pages.num_heads) > MOST_BYTES:
        most = MOST_BYTES // token_ways(pages.num_heads)
        yield f"a token of {token} bytes in all heads: supports at most {most}, which shared memory holds"
    try:
        row_views(pages)
    except ValueError as error:
        yield str(error)


@jax.jit
def store_entries(call: WriteMLA | WriteKV | WriteIndexerK | WriteEntries, parts) -> Buffer:
    """The buffer with parts [T, (H,) n_i] at slots [T] of a layer; slots outside the cache are skipped.

    The parts of an entry are side by side, or in runs of their own if keys and values lie apart.
    """
    buffer, pages, slots = call.buffer, call.pages, call.slot_mapping
    count, interpret = slots.shape[0], bool(interpreting.value)
    if not count:
        return buffer
    views, dtype = row_views(pages), dtype_of(buffer)
    parts = [view_as(part, dtype).reshape(count, pages.num_heads, -1) for part in parts]
    sizes, apart = [part.shape[-1] for part in parts], pages.values is not None
    share = warp_share(count, pages.num_heads, pages.num_heads * sum(sizes) * dtype.itemsize, interpret=interpret)

    def store(*refs):
        *part_refs, slot_ref, layer_ref, cache_ref, staged, full = refs
        wanted = lax.axis_index("cta") * share.tokens
        first = jnp.minimum(wanted, count - share.tokens)  # the last CTA also loads tokens of its neighbour
        for ref, stage in zip(part_refs, staged, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[pl.ds(first, share.tokens)], stage, full, oob_mode=IN_BOUNDS)

        @plgpu.warp_map
        def _(warp):
            layer = layer_ref[0]
            in_cache = (layer >= 0) & (layer < pages.num_layers)
            found = []
            for i in range(share.rounds):
                token = share.token(warp, i)
                mine = (token < share.tokens) & (first + token >= wanted)
                slot = slot_ref[first + jnp.minimum(token, share.tokens - 1)]
                found.append((token, slot, mine & in_cache & (slot >= 0) & (slot < pages.num_slots)))
            plgpu.barrier_wait(full)

            def send(i, _, token, slot):
                head, block = share.first_head(warp) + i, floordiv(slot, pages.block_size)
                in_block = slot - block * pages.block_size
                before = 0
                into = arrays_of(cache_ref, len(parts))
                for part, (stage, size) in enumerate(zip(staged, sizes, strict=True)):
                    view = views[part] if apart else views[0]
                    *row, column = view.index(layer=layer, block=block, head=head, token=in_block)
                    plgpu.copy_smem_to_gmem(stage.at[token, head], into[part].at[*row, pl.ds(column + before, size)])
                    before += 0 if apart else size
                return ()

            for token, slot, keep in found:

                @pl.when(keep)
                def _(token=token, slot=slot):
                    lax.fori_loop(0, share.heads, lambda i, _: send(i, _, token, slot), ())

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    ref = thaw(in_views(buffer, views))
    kernel(
        store,
        interpret=interpret,
        grid=(-(-count // share.tokens),),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(
            [plgpu.SMEM((share.tokens, pages.num_heads, size), dtype) for size in sizes],
            plgpu.Barrier(num_arrivals=len(parts)),
        ),
    )(*parts, slots, jnp.reshape(call.layer, (1,)), ref)
    return jax.tree.map(jnp.ravel, freeze(ref))


WARPGROUP_BYTES = 128 * 8
"""What the lanes of a warpgroup store at once.  Mosaic GPU stores a constant to a multiple of this many bytes."""


@partial(jax.jit, static_argnames="entry")
def load_entries(call: GatherMLA | GatherKV | GatherIndexerK | GatherEntries, entry: Entry | EntryBytes):
    """The entry's parts [total, (H,) n_i] of the tokens of ragged runs; 0 in rows without a token."""
    buffer, pages, total, interpret = call.buffer, call.pages, call.total, bool(interpreting.value)
    views, dtype, heads, runs = row_views(pages), dtype_of(buffer), pages.num_heads, pages.parts
    sizes = [size * entry.dtype.itemsize // dtype.itemsize for size in entry.sizes]
    width = sum(run.width for run in runs)
    share = warp_share(total, heads, heads * width * dtype.itemsize, interpret=interpret, least=token_ways(heads))
    together = share.heads if all(run.head_stride == run.width for run in runs) else 1
    begins = [heads * sum(run.width for run in runs[:i]) for i in range(len(runs))]  # in shared memory, per token
    zeros_unit = WARPGROUP_BYTES // dtype.itemsize
    starts = [] if call.seq_starts is None else [call.seq_starts]

    def load(cache_ref, table_ref, cu_ref, layer_ref, *refs):
        start_ref = refs[0] if starts else None
        *out_refs, stage, zeros, full = refs[len(starts) :]
        first = lax.axis_index("cta") * share.tokens
        layer = layer_ref[0]
        in_cache = (layer >= 0) & (layer < pages.num_layers)

        def tokens_of(warp):
            """The warp's tokens (as indices within the CTA), their places, and the barriers of their entries."""
            token = share.token(warp, 0)
            places = places_of(first + token, share.rounds, table_ref, cu_ref, start_ref, pages=pages)
            return [(token + i, place, full.at[warp * share.rounds + i]) for i, place in enumerate(places)]

        @plgpu.warp_map
        def _(warp):
            for token, place, landed in tokens_of(warp):

                def fetch(i, _, token=token, place=place, landed=landed):
                    head = share.first_head(warp) + i * together
                    entry_at = dict(
                        layer=jnp.where(in_cache, layer, 0), block=place.block, head=head, token=place.token
                    )
                    sources = arrays_of(cache_ref, len(runs))
                    for source, run, view, begin in zip(sources, runs, views, begins, strict=True):
                        *row, column = view.index(**entry_at)
                        plgpu.copy_gmem_to_smem(
                            source.at[*row, pl.ds(column, together * run.width)],
                            stage.at[token, pl.ds(begin + head * run.width, together * run.width)],
                            landed,
                            oob_mode=IN_BOUNDS,
                        )
                    return ()

                lax.fori_loop(0, share.heads // together, fetch, ())

        zeros[...] = jnp.zeros(zeros.shape, dtype)
        plgpu.commit_smem()

        @plgpu.warp_map
        def _(warp):
            def send(live, token):
                def one(i, _):
                    head = share.first_head(warp) + i
                    column = head * runs[0].width
                    for part, (ref, size) in enumerate(zip(out_refs, sizes, strict=True)):
                        if part and len(runs) > 1:
                            column = begins[part] + head * runs[part].width
                        source = stage.at[token, pl.ds(column, size)] if live else zeros.at[pl.ds(0, size)]
                        plgpu.copy_smem_to_gmem(source, ref.at[first + token, head])
                        column = column + size  # where the next part is, in an entry of one run
                    return ()

                lax.fori_loop(0, share.heads, one, ())

            for token, place, landed in tokens_of(warp):
                plgpu.barrier_wait(landed)

                @pl.when(first + token < total)
                def _(token=token, place=place):
                    lax.cond(place.live & in_cache, lambda: send(True, token), lambda: send(False, token))

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    parts = kernel(
        load,
        interpret=interpret,
        out_type=[jax.ShapeDtypeStruct((total, heads, size), dtype) for size in sizes],
        grid=(-(-total // share.tokens),),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((share.tokens, heads * width), dtype),
            plgpu.SMEM((-(-max(sizes) // zeros_unit) * zeros_unit,), dtype),
            plgpu.Barrier(num_arrivals=len(runs) * share.heads // together, num_barriers=WARPS * share.rounds),
        ),
    )(in_views(buffer, views), call.block_tables, call.cu_seq_lens, jnp.reshape(call.layer, (1,)), *starts)
    rows = (total,) if entry.one_head else (total, heads)
    return tuple(view_as(part, entry.dtype).reshape(*rows, -1) for part in parts)
