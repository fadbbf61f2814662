"""Attention by cuDNN to keys and values per head that are arrays, not entries of a cache.

`jax.nn.dot_product_attention` runs the same kernel, but it rejects values whose size differs from that of the keys, and
rounds the log-sum-exp to the dtype of the queries.  The function that it calls does neither, and is called here.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.runtime.device import WGMMA, unavailable_reasons
from jaxkv_kernels.xla.expanded import owners

LEAST_VERSION = 91000
"""cuDNN 9.10, the first whose keys and values may differ in size."""


def unsupported_reasons(dtype, key_dim: int, value_dim: int) -> Iterator[str]:
    """Yields the reasons against heads of these sizes and `dtype` on this machine; none if cuDNN supports them.

    Only Hopper is supported, because nothing else was tested.
    """
    if missing := unavailable_reasons(WGMMA):
        yield from missing
        return
    if dtype not in (jnp.bfloat16, jnp.float16):
        yield f"queries of {jnp.dtype(dtype).name}: expected bfloat16 or float16"
    for size in (key_dim, value_dim):
        if size % 8 or size > 256:
            yield f"heads of {size} values: expected a multiple of 8 up to 256"
    version = _library().check_cudnn_version()
    if version < LEAST_VERSION:
        yield f"cuDNN {version}: expected {LEAST_VERSION} or later"


def attention(
    q, k, v, q_lens, kv_lens, *, scale: float, ahead: int | None, window: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """`jaxkv_kernels.xla.expanded.attention` by cuDNN, of queries that see no later keys (`ahead` is 0), or all (None).

    There are three differences.  A `window` needs an `ahead` of 0.  Inf or NaN in the values of a token may also reach
    earlier query tokens of its request.  If `ahead` is 0, `kv_lens` must be `q_lens`: the queries that are tokens then
    see no other keys, and without lengths cuDNN is faster (by 16 % for 16 heads and 8,192 tokens on an H200).
    """
    library = _library()
    options: dict[str, Any] = {"mask_type": library.MaskType.CAUSAL, "sliding_window_length": window}
    if ahead is None:
        options = {"mask_type": library.MaskType.PADDING, "q_seqlen": q_lens, "kv_seqlen": kv_lens}
    results: Any = library.dot_product_attention(q, k, v, scale=scale, return_residual=True, **options)
    out, lse = results
    # Without keys, cuDNN's results are not specified.
    seen = (jnp.arange(q.shape[1], dtype=jnp.int32) < q_lens[:, None]) & (kv_lens > 0)[:, None]
    out = jnp.where(seen[..., None, None], out, 0)
    return out, jnp.where(seen[..., None], jnp.swapaxes(lse, 1, 2), -jnp.inf)


def ragged_attention(
    q, k, v, q_starts, q_lens, kv_starts, kv_lens, *, scale: float, ahead: int | None
) -> tuple[jax.Array, jax.Array]:
    """`jaxkv_kernels.xla.expanded.ragged_attention` by cuDNN, which skips pairs of different requests.

    `ahead` is 0 or None.  Inf or NaN in the values of a token may also reach earlier query tokens of its request.
    """
    library = _library()
    rows, value_dim = len(q), v.shape[-1]
    # JAX computes the offsets of requests in all arrays from the size of the queries' heads.
    size = max(q.shape[-1], value_dim)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[-1])))[None] for x in (q, k, v))

    def segments(starts, lens, rows):
        """Lengths and offsets with an empty segment at the end, because JAX requires two or more."""
        end = jnp.full(1, rows, jnp.int32)
        return jnp.concatenate([lens, jnp.zeros(1, jnp.int32)])[None], jnp.concatenate([starts, end, end])[None]

    (q_seqlen, q_offsets), (kv_seqlen, kv_offsets) = (
        segments(q_starts, q_lens, rows), segments(kv_starts, kv_lens, k.shape[1]),
    )  # fmt: skip
    mask = library.MaskType.PADDING if ahead is None else library.MaskType.PADDING_CAUSAL
    results: Any = library.dot_product_attention(
        q, k, v, q_seqlen=q_seqlen, kv_seqlen=kv_seqlen, q_offsets=q_offsets, kv_offsets=kv_offsets, scale=scale,
        mask_type=mask, return_residual=True,
    )  # fmt: skip
    out, lse = results
    request, token = owners(q_starts, q_lens, rows)
    # Without keys, cuDNN's results are not specified.
    seen = ((token >= 0) & (kv_lens[request] > 0))[:, None]
    out = jnp.where(seen[..., None], out[0, :, :, :value_dim], 0)
    return out, jnp.where(seen, lse[request, :, token], -jnp.inf)  # lse [segments, H, rows]


def _library():
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
