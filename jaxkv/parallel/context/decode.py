"""Attention of new tokens to a context that is divided over several devices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.checks import FLOATS, Dims, positive_int
from jaxkv.ops import attention as decode
from jaxkv.ops import plan
from jaxkv.parallel.context.merge import merge_states
from jaxkv.parallel.context.share import requests_of_tokens
from jaxkv_kernels.xla.softmax import with_sinks


def decode_mla(
    q_latent, q_pe, cache: KVCache, block_tables, seq_lens, *, axis, sinks=None, return_lse=False, **options
) -> Any:
    """`jaxkv.decode_mla` over the tokens of all devices along a mesh axis.  Call it inside `shard_map`.

    Query token t of Q sees the first `seq_len - Q + 1 + t` tokens of the request.  Within a shard, this causal mask is
    not aligned to the end.  Each query token is therefore computed as a request of its own, which re-reads the shard.
    On every implementation, its result is independent of the contents of tokens that it does not see.

    With a `window` that is not a multiple of `num_shards` * `interleave`, a device owns one of several numbers of the
    tokens in it.  Attention is then computed once for each such number, at most `interleave` + 1 times.

    Args:
      q_latent: float [B, Hq, R] or [B, Q, Hq, R], the same on all devices along `axis`.
      q_pe: [B, Hq, P] or [B, Q, Hq, P], the same on all devices along `axis`.
      cache: the cache of this device, whose `layout.shards` says which tokens it has.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to the range
        from 0 to the capacity of the tables of all devices.
      axis: mesh axis (or several) of the `shard_map` around this call.
      sinks: float32 [Hq], attention sinks, as in `jaxkv.decode_mla`.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `kv_scale`, `logit_cap`, `window` and `implementation`, as in `jaxkv.decode_mla`, and
        `plan`, from `context.plan_decode`.

    Returns:
      The result of `jaxkv.decode_mla`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, `axis` does not have a device per shard, or an
        argument is given that `context.decode_mla` does not have, such as `causal`.
    """
    queries = {"q_latent": (q_latent, "R"), "q_pe": (q_pe, "P")}
    return _decode(decode.decode_mla, queries, cache, block_tables, seq_lens, axis, sinks, return_lse, options)


def decode_kv(q, cache: KVCache, block_tables, seq_lens, *, axis, sinks=None, return_lse=False, **options) -> Any:
    """`jaxkv.decode_kv` over the tokens of all devices along a mesh axis.  Call it inside `shard_map`.

    Args:
      q: float [B, Hq, D] or [B, Q, Hq, D], the same on all devices along `axis`.
      cache: the cache of this device, whose `layout.shards` says which tokens it has.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to the range
        from 0 to the capacity of the tables of all devices.
      axis: mesh axis (or several) of the `shard_map` around this call.
      sinks: float32 [Hq], attention sinks, as in `jaxkv.decode_mla`.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `k_scale`, `v_scale`, `logit_cap`, `window` and `implementation`, as in
        `jaxkv.decode_kv`, and `plan`, from `context.plan_decode`.

    Returns:
      The result of `jaxkv.decode_kv`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, `axis` does not have a device per shard, or an
        argument is given that `context.decode_kv` does not have, such as `causal`.
    """
    return _decode(decode.decode_kv, {"q": (q, "D")}, cache, block_tables, seq_lens, axis, sinks, return_lse, options)


def plan_decode(
    cache: KVCache, block_tables, seq_lens, *, axis, q_len: int = 1, window: int | None = None, **options
) -> plan.DecodePlan | tuple[plan.DecodePlan, ...]:
    """`jaxkv.plan_decode` for `context.decode_mla` and `context.decode_kv`.  Call it inside `shard_map`.

    Each device makes the plan for its own share.

    Args:
      cache: the cache of this device, whose `layout.shards` says which tokens it has.
      block_tables: int32 [B, M], as passed to the calls.
      seq_lens: int32 [B], as passed to the calls.
      axis: as passed to the calls.
      q_len: query tokens per request of the calls.
      window: the `window` of the calls.
      **options: `num_heads`, `dtype`, `batch_invariant` and `implementation`, as in `jaxkv.plan_decode`.

    Returns:
      This device's plan; with a window, one for each number of tokens in it that a device may own.

    Raises:
      ValueError: a shape or dtype is wrong, `axis` does not have a device per shard, or an argument is given that
        `context.plan_decode` does not have, such as `causal`.
    """
    _check_options(options, ("num_heads", "dtype", "batch_invariant", "implementation"))
    q_len = positive_int("q_len", q_len)
    tables, lengths, windows, _ = requests_of_tokens(cache, block_tables, seq_lens, Dims(), q_len, axis, window)
    if not windows:
        return plan.plan_decode(cache, tables, lengths, **options)
    return tuple(plan.plan_decode(cache, tables, lengths, window=count, **options) for count in windows if count)


def _decode(operation, queries, cache, block_tables, seq_lens, axis, sinks, return_lse, options):
    scales = ("kv_scale",) if "q_latent" in queries else ("k_scale", "v_scale")
    window, plans = options.pop("window", None), options.pop("plan", None)
    _check_options(options, ("layer", "scale", *scales, "logit_cap", "implementation"))
    dims, name = Dims(), next(iter(queries))
    first = queries[name][0]
    axes = decode.query_axes(name, first)
    for name, (q, content) in queries.items():
        dims.check(name, q, f"{axes} {content}", decode.KV_QUERIES if name == "q" else FLOATS)
    tokens = dims["Q"] if "Q" in axes.split() else 1
    rows = [q.reshape(-1, *q.shape[-2:]) for q, _ in queries.values()]
    tables, lengths, windows, own = requests_of_tokens(cache, block_tables, seq_lens, dims, tokens, axis, window)
    call = partial(operation, *rows, cache, tables, lengths, return_lse=True, **options)
    out, lse = _windowed(call, windows, own, plans) if windows else call(plan=plans)
    out, lse = merge_states(out, lse, axis=axis)
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", ("float32",))
        out = with_sinks(out, lse, sinks)
    out, lse = out.reshape(*first.shape[:-1], out.shape[-1]), lse.reshape(first.shape[:-1])
    return (out, lse) if return_lse else out


def _windowed(call, windows, own, plans) -> tuple[jax.Array, jax.Array]:
    """The results of `call`, in which each request has a window of its own, `own` [N], which is one of `windows`."""
    used = [count for count in windows if count]
    if plans is None:
        plans = (None,) * len(used)
    if not isinstance(plans, tuple) or len(plans) != len(used):
        raise ValueError(f"`plan` is a {type(plans).__name__}: expected what plan_decode returned for this `window`")
    results = [call(window=count, plan=one) for count, one in zip(used, plans, strict=True)]
    out, lse = results[0]
    out, lse = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for count, (found, found_lse) in zip(used, results, strict=True):
        mine = own == count
        out, lse = jnp.where(mine[:, None, None], found, out), jnp.where(mine[:, None], found_lse, lse)
    return out, lse


def _check_options(options, known):
    """ValueError if an option is not among the `known` ones."""
    for name, value in options.items():
        if name not in known and value is not None:
            reason = "each query token is computed as a request of its own"
            raise ValueError(f"`{name}` is {value}: expected None, because {reason}")
