"""`grouped_swiglu`: each token through the experts that it chose, and their weighted sum, on sm_90.

XLA sorts the tokens' choices by expert (`expert_groups.py`), copies the tokens to rows in that order, and adds up the
experts' results.  In between are two products by experts (`products.py`): gate and up, of which the kernel stores
silu(gate) * up, and down.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.expert_groups import expert_groups
from jaxkv_kernels.mosaic_gpu.experts.config import ALIGN, default_config, default_config_of_fp8
from jaxkv_kernels.mosaic_gpu.experts.e4m3 import from_positions, in_positions
from jaxkv_kernels.mosaic_gpu.experts.products import products
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.tile_scaled import TileScaled, rounded_to_e4m3
from jaxkv_kernels.tuning import configuration


def grouped_swiglu(x, experts, weights, gate, up, down):
    """Maps x [T, D], of which each token has chosen K experts, to [T, D]."""
    if not experts.size:
        return jnp.zeros_like(x)
    sizes = x.shape[0], experts.size, gate.shape[0]
    fp8 = isinstance(gate, TileScaled)
    config = configuration(default_config_of_fp8(*sizes, gate.shape[1]) if fp8 else default_config(*sizes))
    return _swiglu(x, experts, weights, gate, up, down, config=config, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("config", "interpret"))
def _swiglu(x, experts, weights, gate, up, down, *, config, interpret):
    groups = expert_groups(experts, gate.shape[0], tile=config.rows, align=ALIGN)
    tiles = groups.experts, groups.starts // ALIGN, groups.sizes // ALIGN, groups.count.reshape(1)
    rows, first, second, scales = x[groups.tokens], (gate, up), (down,), ((), ())
    scaled = isinstance(gate, TileScaled)
    rounds = scaled and gate.e4m3_products
    if scaled:
        rows = in_positions(rounded_to_e4m3(rows) if rounds else rows)
        scales = (gate.scales, up.scales), (down.scales,)
        first, second = (gate.values, up.values), (down.values,)
    options = {"config": config, "interpret": interpret}
    following = () if rounds else (*second, *scales[1])
    inner = products(rows, first, scales[0], tiles, following, **options)
    if rounds:
        inner = rounded_to_e4m3(inner)  # each 128 values have another order, but are the same
    results = products(inner, second, scales[1], tiles, early=not rounds, **options)
    total = jnp.zeros(x.shape, jnp.float32)
    for rows, shares in zip(groups.rows.T, weights.T, strict=True):
        chosen = results.at[rows].get(mode="clip").astype(jnp.float32)
        # Select instead of multiplying by 0: rows that no tile has written may hold anything.
        total += jnp.where((rows < len(results))[:, None], chosen * shares[:, None], 0)
    return (from_positions(total) if scaled else total).astype(x.dtype)
