"""Queries of quantised entries: made float16 in shared memory, each row as large as float16 allows."""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import HALF
from jaxkv_kernels.mosaic_gpu.attention.gather.scaling import scale_to_fit
from jaxkv_kernels.mosaic_gpu.runtime.registers import ROW, WGMMA, over_columns


def fit_queries(side: int, q_in, q, rope, stats, row: int, wait_for_both):
    """Consumer `side` scales and converts its half of the queries; returns the rotary part and the inverse scales.

    `q_in` and `q` [2, 64, 256] are the same memory, as queries arrive and as they are multiplied.  The rotary part is
    a float32 tile in registers.  Rows `row` and `row + 1` of `stats` are for largest magnitudes.
    """
    latent = plgpu.load(q_in.at[side], layout=WGMMA).astype(jnp.float32)
    stats[row + side] = jnp.maximum(jnp.abs(latent).max(axis=1), jnp.abs(rope).max(axis=1))
    wait_for_both()
    largest = jnp.maximum(*(plgpu.load(stats.at[row + n], layout=ROW) for n in range(2)))
    factor, inverse = scale_to_fit(largest)
    q[side] = (latent * over_columns(factor, HALF)).astype(q.dtype)
    plgpu.commit_smem()
    wait_for_both()
    return rope * over_columns(factor, rope.shape[1]), inverse
