"""`grouped_swiglu`: each token through the experts that it chose, and their weighted sum, on sm_90.

Two products by experts (`products.py`) do the work: gate and up, of which the kernel stores silu(gate) * up, and down.
XLA prepares their rows, and adds up the experts' results:

- If a tile has room for all tokens, each chosen expert multiplies all of them (`chosen_experts`), which takes few
  kernels.  Reading the weights takes longer than the products.
- Otherwise, the tokens' choices are sorted by expert, and the tokens are copied to rows in that order
  (`expert_groups.py`).
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.expert_groups import chosen_experts, expert_groups
from jaxkv_kernels.mosaic_gpu.experts.config import ALIGN, default_config
from jaxkv_kernels.mosaic_gpu.experts.products import products
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.tuning import configuration


def grouped_swiglu(x, experts, weights, gate, up, down):
    """Maps x [T, D], of which each token has chosen K experts, to [T, D]."""
    if not experts.size:
        return jnp.zeros_like(x)
    config = configuration(default_config(x.shape[0], experts.size, gate.shape[0]))
    return _swiglu(x, experts, weights, gate, up, down, config=config, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("config", "interpret"))
def _swiglu(x, experts, weights, gate, up, down, *, config, interpret):
    rows, places, tiles, num_rows = (_of_all if len(x) <= config.rows else _of_groups)(x, experts, len(gate), config)
    options = {"num_rows": num_rows, "config": config, "interpret": interpret}
    inner = products(rows, (gate, up), tiles, (down,), **options)
    results = products(inner, (down,), tiles, **options)
    total = jnp.zeros(x.shape, jnp.float32)
    for rows, shares in zip(places.T, weights.T, strict=True):
        chosen = results.at[rows].get(mode="clip").astype(jnp.float32)
        # Select instead of multiplying by 0: rows that no tile has written may hold anything.
        total += jnp.where((rows < num_rows)[:, None], chosen * shares[:, None], 0)
    return total.astype(x.dtype)


def _of_groups(x, experts, num_experts: int, config):
    """The rows of the products, one per choice; the row of each choice, the tiles, and the number of rows."""
    groups = expert_groups(experts, num_experts, tile=config.rows, align=ALIGN)
    tiles = groups.experts, groups.starts // ALIGN, groups.sizes // ALIGN, groups.count.reshape(1)
    return x[groups.tokens], groups.rows, tiles, len(groups.tokens)


def _of_all(x, experts, num_experts: int, config):
    """The same if a tile has all tokens: the tokens, which all tiles share, and a row per token and expert."""
    chosen, places, count = chosen_experts(experts, num_experts)
    size = -(-len(x) // ALIGN) * ALIGN
    num_rows = (chosen.size if len(x) == 1 else num_experts) * size
    starts = jnp.arange(chosen.size, dtype=jnp.int32) if len(x) == 1 else chosen
    sizes = jnp.full_like(chosen, size // ALIGN)
    places = places * size + jnp.arange(len(x), dtype=jnp.int32)[:, None]
    rows = jnp.pad(x, ((0, config.rows - len(x)), (0, 0)))
    return rows, places, (chosen, starts * (size // ALIGN), sizes, count.reshape(1)), num_rows
