"""`scaled_linear`: tokens times a weight in float8, on sm_90.

The kernel of `expert_products.py` with one matrix.  XLA would first write the weight in bf16 to memory, and read it
again: on an H200, [7168, 16384] takes 0.209 to 0.306 ms with up to 128 tokens, and 0.059 to 0.081 if it is in bf16.  A
weight has too few rows to give every multiprocessor work, so the summed dimension is divided into parts, whose sums XLA
adds up.
For many tokens, XLA expands the weight and multiplies: then the time of a product is that of its arithmetic, and
expanding takes little in comparison.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import ScaledLinear
from jaxkv_kernels.mosaic_gpu.e4m3_weights import from_positions, in_positions
from jaxkv_kernels.mosaic_gpu.expert_products import ALIGN, FEATURES, ExpertsConfig, products, token_reasons
from jaxkv_kernels.mosaic_gpu.runtime.device import multiprocessors
from jaxkv_kernels.tile_scaled import TILE, num_tiles, rounded_to_e4m3
from jaxkv_kernels.tuning import configuration
from jaxkv_kernels.xla.kernels import XLA

MOST_TOKENS = 256
"""The most tokens that are multiplied by the kernel; not tuned."""
MOST_ROWS = 64
"""The most rows of a tile."""
START = 4
"""The steps that would take as long as starting a work tile and adding up its sums; an estimate, not tuned."""


def unsupported_reasons(call: ScaledLinear) -> Iterator[str]:
    """Reasons against a call."""
    yield from token_reasons(call.x)
    if call.x.shape[1] % TILE:
        yield f"tokens of {call.x.shape[1]} values: supports multiples of {TILE}"
    if call.weight.shape[0] % FEATURES:
        yield f"results of {call.weight.shape[0]} values: supports multiples of {FEATURES}"


def scaled_linear(call: ScaledLinear) -> jax.Array:
    """x [T, D] times the transpose of `weight` [I, D]."""
    x = call.x
    if not 0 < len(x) <= MOST_TOKENS:
        return XLA().scaled_linear(call)
    rows = min(-(-len(x) // ALIGN) * ALIGN, MOST_ROWS)
    config = configuration(ExpertsConfig(rows=rows, consumers=1))
    return _linear(call, config=config)


def parts_of(shape: tuple[int, ...], tiles: int, consumers: int) -> int:
    """The parts into which the summed dimension of a weight [I, D] is divided, for that many tiles of rows."""
    steps, features = num_tiles(shape[1]), -(-shape[0] // (consumers * TILE))
    at_once = multiprocessors()

    def time(parts: int) -> int:
        return -(-features * tiles * parts // at_once) * (steps // parts + START)

    return min((parts for parts in range(1, steps + 1) if steps % parts == 0), key=time)


@partial(jax.jit, static_argnames="config")
def _linear(call: ScaledLinear, config: ExpertsConfig) -> jax.Array:
    x, weight = call.x, call.weight
    if weight.e4m3_products:
        x = rounded_to_e4m3(x)
    count = -(-len(x) // config.rows)
    parts = parts_of(weight.shape, count, config.consumers)
    rows = in_positions(jnp.pad(x, ((0, count * config.rows - len(x)), (0, 0))))
    number = jnp.arange(parts * count, dtype=jnp.int32)
    size = config.rows // ALIGN
    tiles = number // count, number % count * size, jnp.full_like(number, size), jnp.full(1, parts * count, jnp.int32)
    options = {"parts": parts, "config": config}
    sums = products(rows, (weight.values[None],), (weight.scales[None],), tiles, **options).sum(axis=0)
    return from_positions(sums[:, : len(x)].T).astype(x.dtype)
