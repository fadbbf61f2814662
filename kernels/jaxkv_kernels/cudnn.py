"""Attention by cuDNN to keys and values per head that are arrays, not entries of a cache.

`jax.nn.dot_product_attention` runs the same kernel, but it rejects values whose size differs from that of the keys, and
rounds the log-sum-exp to the dtype of the queries.  The function that it calls does neither, and is called here.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.runtime.available import WGMMA, unavailable_reasons

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


def attention(q, k, v, q_lens, kv_lens, *, scale: float, causal: bool) -> tuple[jax.Array, jax.Array]:
    """`jaxkv_kernels.xla.expanded.attention` by cuDNN.

    There are two differences.  Inf or NaN in the values of a token may also reach earlier query tokens of its request.
    With `causal`, `kv_lens` must be `q_lens`: the queries that are tokens then see no other keys, and without lengths
    cuDNN is faster (by 16 % for 16 heads and 8,192 tokens on an H200).
    """
    library = _library()
    options: dict[str, Any] = {"mask_type": library.MaskType.CAUSAL}
    if not causal:
        options = {"mask_type": library.MaskType.PADDING, "q_seqlen": q_lens, "kv_seqlen": kv_lens}
    results: Any = library.dot_product_attention(q, k, v, scale=scale, return_residual=True, **options)
    out, lse = results
    # Without keys, cuDNN's results are not specified.
    seen = (jnp.arange(q.shape[1], dtype=jnp.int32) < q_lens[:, None]) & (kv_lens > 0)[:, None]
    out = jnp.where(seen[..., None, None], out, 0)
    return out, jnp.where(seen[..., None], jnp.swapaxes(lse, 1, 2), -jnp.inf)


def _library():
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
