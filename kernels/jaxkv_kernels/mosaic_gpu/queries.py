"""Converts queries to float16 in shared memory, for quantised entries; each row is scaled to fit."""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, WGMMA, over_columns
from jaxkv_kernels.mosaic_gpu.scaling import scale_to_fit
from jaxkv_kernels.mosaic_gpu.sizes import HALF


def fit_queries(side: int, latent, rope, stats, row: int, wait_for_both):
    """Consumer `side` scales and converts its half of the queries; returns the factors of the scores, one per row.

    `latent` [2, 64, 256] and `rope` [64, 64] are pairs of views of the same memory: in the dtype of queries, and in the
    dtype that is multiplied.  Rows `row` and `row + 1` of `stats` hold largest magnitudes.
    """
    (latent_in, latent_out), (rope_in, rope_out) = latent, rope
    values, rotary = (plgpu.load(ref, layout=WGMMA).astype(jnp.float32) for ref in (latent_in.at[side], rope_in))
    stats[row + side] = jnp.maximum(jnp.abs(values).max(axis=1), jnp.abs(rotary).max(axis=1))
    wait_for_both()
    largest = jnp.maximum(*(plgpu.load(stats.at[row + n], layout=ROW) for n in range(2)))
    factor, inverse = scale_to_fit(largest)
    latent_out[side] = (values * over_columns(factor, HALF)).astype(latent_out.dtype)
    if side == 0:
        rope_out[...] = (rotary * over_columns(factor, rotary.shape[1])).astype(rope_out.dtype)
    plgpu.commit_smem()
    wait_for_both()
    return inverse
