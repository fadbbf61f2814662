"""The operations on experts: the experts of each token, their feed-forwards, and products with float8 weights."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.calls import GroupedSwiglu, ScaledLinear, SelectExperts
from jaxkv_kernels.experts import SCORES, expert_groups, gated, usual_rows, weights_of
from jaxkv_kernels.tile_scaled import TileScaled
from jaxkv_kernels.xla.paged import walk


@jax.jit
def select_experts(call: SelectExperts) -> tuple[jax.Array, jax.Array]:
    """Top-k routing: the choices [T, K] of tokens, and their weights."""
    scores, leaders = SCORES[call.scoring](call.logits), 1 if call.scoring == "softmax" else 2
    choice = scores if call.bias is None else scores + call.bias
    if call.groups > 1:
        grouped = choice.reshape(len(choice), call.groups, choice.shape[1] // call.groups)
        kept = _best(lax.top_k(grouped, leaders)[0].sum(axis=-1), call.groups_per_token)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, experts = lax.top_k(choice, call.per_token)
    return experts, weights_of(scores, experts, normalize=call.normalize, scale=call.scale)


def _best(scores, k: int):
    """A mask, bool [T, n], of the k largest of `scores` [T, n]."""
    _, best = lax.top_k(scores, k)
    return (best[..., None] == jnp.arange(scores.shape[-1])).any(axis=-2)


MOST_ROWS = 256
"""The most rows of a tile on CPUs."""
MOST_RESULTS = 2**27
"""On other devices, the most results of all experts for some tokens that are in memory at once."""


@jax.jit
def grouped_swiglu(call: GroupedSwiglu) -> jax.Array:
    """The sum of each token's experts, by their weights, and of the expert of all tokens: [T, D]."""
    if call.shared is not None:
        routed = grouped_swiglu(replace(call, shared=None))
        return routed + shared_swiglu(call.x, *call.shared, call.limit, call.alpha)
    if not call.experts.size:
        return jnp.zeros_like(call.x)
    # XLA does not execute branches in parallel on GPUs: there, products of all experts take less time.
    return lax.platform_dependent(call, cpu=by_tiles, default=all_experts)


def shared_swiglu(x, gate, up, down, limit=None, alpha=None):
    """The result [T, D] of the expert through which all tokens x [T, D] pass."""
    return _swiglu("td,id->ti", "ti,di->td", x, gate, up, down, None, limit, alpha).astype(x.dtype)


def by_tiles(call: GroupedSwiglu) -> jax.Array:
    """Tile by tile of tokens that chose the same expert: computes only what was chosen."""
    x, gate, up, down, biases = call.x, call.gate, call.up, call.down, call.biases
    count = gate.shape[0]
    tile = usual_rows(call.experts.size, count, min(len(x), MOST_ROWS))
    groups = expert_groups(call.experts, count, tile=tile)
    num_rows = groups.tokens.size
    # A tile may extend past its group and past all rows.  Later tiles overwrite what it stores there, or it is unused.
    rows = x[jnp.pad(groups.tokens, (0, tile))]

    def one(i, results):
        expert, start = groups.experts[i], groups.starts[i]
        tokens = lax.dynamic_slice_in_dim(rows, start, tile)
        own = None if biases is None else [bias[expert][None] for bias in biases]
        matrices = gate[expert], up[expert], down[expert]
        result = _swiglu("td,id->ti", "ti,di->td", tokens, *matrices, own, call.limit, call.alpha)
        return lax.dynamic_update_slice_in_dim(results, result, start, axis=0)

    results = walk(0, groups.count, one, jnp.zeros(rows.shape, jnp.float32))
    known = groups.rows < num_rows
    return jnp.where(known[..., None], results[groups.rows] * call.weights[..., None], 0).sum(axis=1).astype(x.dtype)


def all_experts(call: GroupedSwiglu) -> jax.Array:
    """Every token through every expert, for some tokens at a time: reads the weights as few times as possible."""
    x, gate, up, down, biases = call.x, call.gate, call.up, call.down, call.biases
    count, width = gate.shape[0], x.shape[1]
    chosen = call.experts[..., None] == jnp.arange(count, dtype=jnp.int32)
    share = jnp.where(chosen, call.weights[..., None], 0).sum(axis=1)
    chosen = chosen.any(axis=1)

    def some(tokens):
        x, share, chosen = tokens
        own = None if biases is None else [bias[:, None] for bias in biases]
        results = _swiglu("td,eid->eti", "eti,edi->etd", x, gate, up, down, own, call.limit, call.alpha)
        # Select instead of multiplying by 0: an expert that is not chosen for a token may overflow to inf.
        return jnp.where(chosen.T[..., None], results * share.T[..., None], 0).sum(axis=0).astype(x.dtype)

    most = max(MOST_RESULTS // (count * width), 1)
    tokens = x, share, chosen
    if len(x) <= most:
        return some(tokens)
    padding = -len(x) % most
    parts = (jnp.pad(a, ((0, padding), (0, 0))).reshape(-1, most, a.shape[1]) for a in tokens)
    return lax.map(some, tuple(parts)).reshape(-1, width)[: len(x)]


def _swiglu(inner: str, outer: str, x, gate, up, down, biases, limit, alpha):
    """The SwiGLU feed-forward by the products `inner` and `outer`, in float32; operands keep their dtype.

    `biases` are added to the results of `gate`, `up` and `down`, and have their ranks; None if there are none.
    """

    def product(equation, a, b):
        if isinstance(b, TileScaled):
            a, b = b.operands(a)
        precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    gate_bias, up_bias, down_bias = (0.0, 0.0, 0.0) if biases is None else [b.astype(jnp.float32) for b in biases]
    gates, ups = product(inner, x, gate) + gate_bias, product(inner, x, up) + up_bias
    return product(outer, gated(gates, ups, limit, alpha).astype(x.dtype), down) + down_bias


@jax.jit
def scaled_linear(call: ScaledLinear) -> jax.Array:
    """x [T, D] times the transpose of `weight` [I, D], with sums in float32."""
    x, expanded = call.weight.operands(call.x)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("td,id->ti", x, expanded, precision=precision)
