"""Loads the entries of ragged runs of tokens into arrays of their parts: with bulk copies only, for any row width.

Work.  A CTA of one warpgroup has up to four consecutive rows of the result; each of its warps has a share of them
(`warp_share`).

Timeline of a warp:

    find the places of its tokens; start the copies of their entries, one per run of adjacent heads (two if keys and
      values lie apart)
    together with the other warps: write zeros to shared memory
    find the places again, which is cheaper than keeping them
    per token -> full: start the copies of the entry's parts, or of zeros, to their rows of the result
    wait until shared memory has been read

Rows without a token, and rows beyond the last, fetch some entry and discard it, so that every barrier completes after
the same number of copies.

Barriers.  full, one per token of a warp: the warp's heads of that token have landed.  Shared memory is filled once and
never reused.
Budget.  Shared memory: 32 KiB, or four entries (one token) where that is more, and the zeros.  Registers: scalars only.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import row_view
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.mosaic_gpu.bulk.ragged_places import places_of
from jaxkv_kernels.mosaic_gpu.bulk.warp_share import WARPS, token_ways, warp_share
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS

WARPGROUP_BYTES = 128 * 8
"""What the lanes of a warpgroup store at once.  Mosaic GPU stores a constant to a multiple of this many bytes."""


@partial(jax.jit, static_argnames=("pages", "entry", "total", "interpret"))
def load_entries(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, interpret):
    """The entry's parts [total, (H,) n_i] of the tokens of ragged runs; 0 in rows without a token."""
    view, dtype, heads, width, runs = row_view(pages), buffer.dtype, pages.num_heads, pages.width, pages.num_parts
    sizes = [size * entry.dtype.itemsize // dtype.itemsize for size in entry.sizes]
    token_bytes = runs * heads * width * dtype.itemsize
    share = warp_share(total, heads, token_bytes, interpret=interpret, least=token_ways(heads))
    together = share.heads if pages.head_stride == width else 1
    zeros_unit = WARPGROUP_BYTES // dtype.itemsize
    starts = [] if seq_starts is None else [seq_starts]

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
                    for run in range(runs):
                        *row, column = view.index(**entry_at, part=run)
                        plgpu.copy_gmem_to_smem(
                            cache_ref.at[*row, pl.ds(column, together * width)],
                            stage.at[token, pl.ds((run * heads + head) * width, together * width)],
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
                    column = head * width
                    for ref, size in zip(out_refs, sizes, strict=True):
                        source = stage.at[token, pl.ds(column, size)] if live else zeros.at[pl.ds(0, size)]
                        plgpu.copy_smem_to_gmem(source, ref.at[first + token, head])
                        column = column + (size if runs == 1 else heads * width)
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
            plgpu.SMEM((share.tokens, runs * heads * width), dtype),
            plgpu.SMEM((-(-max(sizes) // zeros_unit) * zeros_unit,), dtype),
            plgpu.Barrier(num_arrivals=runs * share.heads // together, num_barriers=WARPS * share.rounds),
        ),
    )(buffer.reshape(view.shape), block_tables, cu_seq_lens, jnp.reshape(layer, (1,)), *starts)
    rows = (total,) if entry.one_head else (total, heads)
    return tuple(view_as(part, entry.dtype).reshape(*rows, -1) for part in parts)
