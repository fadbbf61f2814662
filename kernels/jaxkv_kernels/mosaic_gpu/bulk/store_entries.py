"""Stores entries at slots of a layer, in place, from arrays of their parts: with bulk copies only, for any row width.

Work.  A CTA of one warpgroup has up to four consecutive tokens; each of its warps has a share of them (`warp_share`).

Timeline of a warp:

    together with the other warps: start the copies of the tokens' parts, one per part
    load the slots of its tokens
    -> full: per entry, start the copies of its parts to the cache
    wait until shared memory has been read

Barriers.  full: all parts have landed.  Shared memory is filled once and never reused.
Budget.  Shared memory: 32 KiB, or one token where that is more.  Registers: scalars only.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import row_view
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.mosaic_gpu.bulk.warp_share import warp_share
from jaxkv_kernels.mosaic_gpu.runtime.integers import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze, kernel
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS


@partial(jax.jit, static_argnames=("pages", "interpret"))
def store_entries(buffer, parts, slots, layer, *, pages, interpret):
    """The buffer with parts [T, (H,) n_i] at slots [T] of a layer; slots outside the cache are skipped.

    The parts of an entry are side by side, or in runs of their own if keys and values lie apart.
    """
    count = slots.shape[0]
    if not count:
        return buffer
    view, dtype = row_view(pages), buffer.dtype
    parts = [view_as(part, dtype).reshape(count, pages.num_heads, -1) for part in parts]
    sizes = [part.shape[-1] for part in parts]
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
                for part, (stage, size) in enumerate(zip(staged, sizes, strict=True)):
                    *row, column = view.index(layer=layer, block=block, head=head, token=in_block, part=part)
                    plgpu.copy_smem_to_gmem(stage.at[token, head], cache_ref.at[*row, pl.ds(column + before, size)])
                    before += size if pages.num_parts == 1 else 0
                return ()

            for token, slot, keep in found:

                @pl.when(keep)
                def _(token=token, slot=slot):
                    lax.fori_loop(0, share.heads, lambda i, _: send(i, _, token, slot), ())

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    ref = jax.new_ref(buffer.reshape(view.shape))
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
    )(*parts, slots, jnp.reshape(layer, (1,)), ref)
    return freeze(ref).reshape(buffer.shape)
