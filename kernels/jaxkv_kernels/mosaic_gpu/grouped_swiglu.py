"""`grouped_swiglu`: each token through the experts that it chose, and their weighted sum, on sm_90.

Two products by experts (`expert_products.py`) do the work: gate and up, of which the kernel stores silu(gate) * up, and
down.  XLA prepares their rows, and adds up the experts' results:

- A single token has kernels of its own (`grouped_swiglu_one_token.py`), unless weights are in float8 or there are
  biases.
- If a tile has room for all tokens, and weights are not in float8, each chosen expert multiplies all of them
  (`chosen_experts.py`), which takes one kernel.  Reading the weights takes longer than the products.
- Otherwise, the tokens' choices are grouped by expert, and the tokens are copied to rows in that order
  (`grouped_choices.py`, or XLA for very many tokens).

The expert of all tokens is computed by the same kernels, as further experts that every token has chosen, or by XLA
(`_joins`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import GroupedSwiglu
from jaxkv_kernels.mosaic_gpu.chosen_experts import MOST_EXPERTS, list_chosen
from jaxkv_kernels.mosaic_gpu.e4m3_weights import from_positions, in_positions
from jaxkv_kernels.mosaic_gpu.expert_products import (
    ALIGN,
    MOST_ROWS,
    STEP,
    ExpertsConfig,
    default_config,
    default_config_of_fp8,
    products,
    token_reasons,
)
from jaxkv_kernels.mosaic_gpu.grouped_choices import group_choices
from jaxkv_kernels.mosaic_gpu.grouped_swiglu_one_token import (
    expert_reasons,
    fits_one_token,
    one_expert,
    one_token,
    only_expert,
)
from jaxkv_kernels.tile_scaled import TILE, TileScaled, rounded_to_e4m3
from jaxkv_kernels.tuning import configuration
from jaxkv_kernels.xla.experts import shared_swiglu


def unsupported_reasons(call: GroupedSwiglu) -> Iterator[str]:
    """Reasons against a call."""
    scaled = isinstance(call.gate, TileScaled)
    if call.biases is not None and scaled:
        yield "`biases`: supports weights in float8 without biases"
    yield from token_reasons(call.x)
    if (expert := only_expert(call)) is not None:
        yield from expert_reasons(expert[0])
        return
    step, kind = (TILE, " with weights in float8") if scaled else (STEP, "")
    for name, size in (("tokens", call.x.shape[1]), ("inner sizes", call.gate.shape[1])):
        if size % step:
            yield f"{name} of {size} values: supports multiples of {step}{kind}"


def grouped_swiglu(call: GroupedSwiglu) -> jax.Array:
    """Maps x [T, D], of which each token has chosen K experts, to [T, D]; `shared` is the expert of all tokens."""
    x, experts, gate, shared = call.x, call.experts, call.gate, call.shared
    if not len(x):
        return jnp.zeros_like(x)
    if (expert := only_expert(call)) is not None:
        return one_expert(call, expert)
    if not experts.size:
        return jnp.zeros_like(x) if shared is None else shared_swiglu(x, *shared, call.limit, call.alpha)
    sizes = x.shape[0], experts.size, gate.shape[0]
    scaled = isinstance(gate, TileScaled)
    config = configuration(default_config_of_fp8(*sizes, gate.shape[1]) if scaled else default_config(*sizes))
    if shared is not None and not (call.biases is None and _joins(gate, shared, len(x), config)):
        return grouped_swiglu(replace(call, shared=None)) + shared_swiglu(x, *shared, call.limit, call.alpha)
    return one_token(call) if fits_one_token(call) else _swiglu(call, config=config)


def _joins(gate, shared, tokens: int, config) -> bool:
    """Whether the kernels compute the expert of all tokens, too: as experts like those of `gate`.

    Its weights are read once per tile.  Unless tiles are as large as they can be, and arithmetic takes longer than
    reading, this pays only if one tile has all tokens.  On an H200, with tiles of 48 rows for 256 tokens, a step of
    DeepSeek-V2-Lite took 19.8 ms instead of 19.1, and with tiles of 64 rows for 512 tokens the experts of a layer took
    0.38 ms instead of 0.32.
    """
    divisible = not isinstance(gate, TileScaled) and len(shared[0]) % gate.shape[1] == 0
    return divisible and (tokens <= config.rows or config.rows == MOST_ROWS)


@partial(jax.jit, static_argnames="config")
def _swiglu(call: GroupedSwiglu, config: ExpertsConfig) -> jax.Array:
    x, experts, shared = call.x, call.experts, call.shared
    matrices: Any = call.gate, call.up, call.down
    gate, up, down = matrices
    count, more, more_first, more_second = gate.shape[0], 0, (), ()
    if shared is not None:
        more = len(shared[0]) // gate.shape[1]
        more_first = tuple(matrix.reshape(more, -1, x.shape[1]) for matrix in shared[:2])
        more_second = (shared[2].reshape(x.shape[1], more, -1),)
    scaled = isinstance(gate, TileScaled)
    together = len(x) <= config.rows and not scaled and count + more <= MOST_EXPERTS
    prepare = _of_all if together else _of_groups
    rows, places, tiles, num_rows = prepare(x, experts, count, more, config)
    first, second, scales = (gate, up), (down,), ((), ())
    rounds = scaled and gate.e4m3_products
    if scaled:
        rows = in_positions(rounded_to_e4m3(rows) if rounds else rows)
        scales = (gate.scales, up.scales), (down.scales,)
        first, second = (gate.values, up.values), (down.values,)
    options = {"num_rows": num_rows, "config": config}
    following = () if rounds else (*second, *more_second, *scales[1])
    kind = {"biases": () if call.biases is None else call.biases[:2], "limit": call.limit, "alpha": call.alpha}
    inner = products(rows, first, scales[0], tiles, following, shared=more_first, **kind, **options)
    if rounds:
        inner = rounded_to_e4m3(inner)  # each 128 values have another order, but are the same
    results = products(inner, second, scales[1], tiles, early=not rounds, shared=more_second, **options)
    total = jnp.zeros(x.shape, jnp.float32)
    ones = jnp.ones(len(x), jnp.float32)
    for number, (rows, shares) in enumerate(zip(places, [*call.weights.T, *[ones] * more], strict=True)):
        chosen = results.at[rows].get(mode="clip").astype(jnp.float32)
        if call.biases is not None:
            chosen += call.biases[2].at[experts[:, number]].get(mode="clip").astype(jnp.float32)
        # Select instead of multiplying by 0: rows that no tile has written may hold anything.
        total += jnp.where((rows < num_rows)[:, None], chosen * shares[:, None], 0)
    return (from_positions(total) if scaled else total).astype(x.dtype)


def _of_groups(x, experts, count: int, more: int, config):
    """The rows of the products, one per choice; the rows [T] of all tokens' first choice, of the second ...; the tiles,
    and the number of rows.  All tokens have also chosen the `more` experts after the first `count`."""
    added = jnp.broadcast_to(jnp.arange(count, count + more, dtype=jnp.int32), (len(x), more))
    experts = jnp.concatenate([jnp.where((experts >= 0) & (experts < count), experts, -1), added], axis=1)
    rows, tokens, tiles = group_choices(experts, count=count + more, tile=config.rows)
    return x[tokens], rows.T, tiles, len(tokens)


def _of_all(x, experts, count: int, more: int, config):
    """The same if a tile has all tokens: the tokens, which all tiles share, and a row per token and expert."""
    size = -(-len(x) // ALIGN)
    tiles = list_chosen(experts, count=count, more=more, size=size)
    num_rows = (count + more) * size * ALIGN
    known, token = (experts >= 0) & (experts < count), jnp.arange(len(x), dtype=jnp.int32)
    places = [*jnp.where(known, experts, count + more).T, *range(count, count + more)]
    rows = jnp.pad(x, ((0, config.rows - len(x)), (0, 0)))
    return rows, [place * (size * ALIGN) + token for place in places], tiles, num_rows
