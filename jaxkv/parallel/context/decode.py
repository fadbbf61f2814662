"""Attention of new tokens to a context that is divided over several devices."""

from typing import Any

from jaxkv.cache import KVCache
from jaxkv.dispatch.validate import Dims, positive_int
from jaxkv.ops import attention as decode
from jaxkv.ops import plan
from jaxkv.parallel.context.merge import merge_states
from jaxkv.parallel.context.share import requests_of_tokens
from jaxkv_kernels.xla.softmax import with_sinks


def decode_mla(
    q_latent, q_pe, cache: KVCache, block_tables, seq_lens, *, axis, interleave: int = 1, sinks=None, return_lse=False,
    **options,
) -> Any:  # fmt: skip
    """`jaxkv.decode_mla` over the tokens of all devices along a mesh axis.  Call it inside `shard_map`.

    Query token t of Q sees the first `seq_len - Q + 1 + t` tokens of the request.  Within a shard, this causal mask is
    not aligned to the end.  Each query token is therefore computed as a request of its own, which re-reads the shard.
    On every implementation, its result is independent of the contents of tokens that it does not see.

    Args:
      q_latent: float [B, Hq, R] or [B, Q, Hq, R], the same on all devices along `axis`.
      q_pe: [B, Hq, P] or [B, Q, Hq, P], the same on all devices along `axis`.
      cache: the cache of this device.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to the range
        from 0 to the capacity of the tables of all devices.
      axis: mesh axis (or several) of the `shard_map` around this call.
      interleave: static int, consecutive tokens that one shard owns.
      sinks: float32 [Hq], attention sinks, as in `jaxkv.decode_mla`.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `kv_scale`, `logit_cap` and `implementation`, as in `jaxkv.decode_mla`, and `plan`,
        from `context.plan_decode`.

    Returns:
      The result of `jaxkv.decode_mla`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, there is no such axis, or an argument is given that
        `context.decode_mla` does not have, such as `window`.
    """
    queries = {"q_latent": (q_latent, "R"), "q_pe": (q_pe, "P")}
    return _decode(
        decode.decode_mla, queries, cache, block_tables, seq_lens, axis, interleave, sinks, return_lse, options
    )  # fmt: skip


def decode_kv(
    q, cache: KVCache, block_tables, seq_lens, *, axis, interleave: int = 1, sinks=None, return_lse=False, **options
) -> Any:
    """`jaxkv.decode_kv` over the tokens of all devices along a mesh axis.  Call it inside `shard_map`.

    Args:
      q: float [B, Hq, D] or [B, Q, Hq, D], the same on all devices along `axis`.
      cache: the cache of this device.
      block_tables: int32 [B, M], the blocks of each request's share, in the device's own cache.
      seq_lens: int32 [B], tokens of each request on all devices together, the new ones included; clamped to the range
        from 0 to the capacity of the tables of all devices.
      axis: mesh axis (or several) of the `shard_map` around this call.
      interleave: static int, consecutive tokens that one shard owns.
      sinks: float32 [Hq], attention sinks, as in `jaxkv.decode_mla`.
      return_lse: also return the log-sum-exp of the scores.
      **options: `layer`, `scale`, `k_scale`, `v_scale`, `logit_cap` and `implementation`, as in `jaxkv.decode_kv`, and
        `plan`, from `context.plan_decode`.

    Returns:
      The result of `jaxkv.decode_kv`, the same on all devices along `axis`.

    Raises:
      ValueError: a shape, dtype, static layer or scale is wrong, there is no such axis, or an argument is given that
        `context.decode_kv` does not have, such as `window`.
    """
    return _decode(
        decode.decode_kv, {"q": (q, "D")}, cache, block_tables, seq_lens, axis, interleave, sinks, return_lse, options
    )


def plan_decode(
    cache: KVCache, block_tables, seq_lens, *, axis, interleave: int = 1, q_len: int = 1, **options
) -> plan.DecodePlan:
    """`jaxkv.plan_decode` for `context.decode_mla` and `context.decode_kv`.  Call it inside `shard_map`.

    Each device makes the plan for its own share.

    Args:
      cache: the cache of this device.
      block_tables: int32 [B, M], as passed to the calls.
      seq_lens: int32 [B], as passed to the calls.
      axis: as passed to the calls.
      interleave: as passed to the calls.
      q_len: query tokens per request of the calls.
      **options: `num_heads`, `dtype`, `batch_invariant` and `implementation`, as in `jaxkv.plan_decode`.

    Returns:
      This device's plan.

    Raises:
      ValueError: a shape or dtype is wrong, there is no such axis, or an argument is given that
        `context.plan_decode` does not have, such as `window`.
    """
    _check_options(options, ("num_heads", "dtype", "batch_invariant", "implementation"))
    q_len = positive_int("q_len", q_len)
    return plan.plan_decode(
        cache, *requests_of_tokens(cache, block_tables, seq_lens, Dims(), q_len, axis, interleave), **options
    )


def _decode(operation, queries, cache, block_tables, seq_lens, axis, interleave, sinks, return_lse, options):
    scales = ("kv_scale",) if "q_latent" in queries else ("k_scale", "v_scale")
    _check_options(options, ("layer", "scale", *scales, "logit_cap", "plan", "implementation"))
    dims, name = Dims(), next(iter(queries))
    first = queries[name][0]
    axes = decode.query_axes(name, first)
    for name, (q, content) in queries.items():
        dims.check(name, q, f"{axes} {content}")
    tokens = dims["Q"] if "Q" in axes.split() else 1
    rows = [q.reshape(-1, *q.shape[-2:]) for q, _ in queries.values()]
    requests = requests_of_tokens(cache, block_tables, seq_lens, dims, tokens, axis, interleave)
    out, lse = operation(*rows, cache, *requests, return_lse=True, **options)
    out, lse = merge_states(out, lse, axis=axis)
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", ("float32",))
        out = with_sinks(out, lse, sinks)
    out, lse = out.reshape(*first.shape[:-1], out.shape[-1]), lse.reshape(first.shape[:-1])
    return (out, lse) if return_lse else out


def _check_options(options, known):
    """ValueError if an option is not among the `known` ones."""
    why = {"window": "the number of a request's last tokens that a shard owns depends on the length"}
    for name, value in options.items():
        if name not in known and value is not None:
            reason = why.get(name, "each query token is computed as a request of its own")
            raise ValueError(f"`{name}` is {value}: expected None, because {reason}")
