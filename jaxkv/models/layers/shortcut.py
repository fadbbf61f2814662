"""The layer of LongCat-Flash (arXiv 2509.01322, section 2.2): two attentions, and experts beside what follows one.

    x = x + attention_0(norm x)
    y = norm x;  x = x + dense_0(y)
    x = x + attention_1(norm x)
    x = x + dense_1(norm x) + experts(y)

experts(y) depends on nothing after y, so that it may run beside the rest.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.models.batch import Batch
from jaxkv.models.config import Experts
from jaxkv.models.layers.feed_forward import dense, routed
from jaxkv.models.layers.linear import rms_norm
from jaxkv.models.layers.mla import attention
from jaxkv.models.layers.routing import route
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import Parallel


def block(model: Model, weights, x, cache: KVCache, batch: Batch, layer) -> tuple[KVCache, None, jax.Array]:
    """The layer, whose attentions have the layers 2 * `layer` and 2 * `layer` + 1 of the cache."""
    config, total = model.config, model.parallel.total
    options: Any = config.attention
    experts: Any = config.experts

    def half(i: int, x, cache: KVCache):
        part = weights["halves"][i]
        normed = rms_norm(x, part["attention_norm"], config.rms_norm_eps)
        place = 2 * layer + jnp.int32(i)
        cache, _, out = attention(model, options, part["attention"], normed, cache, batch, place)
        x = x + total(out)
        normed = rms_norm(x, part["feed_forward_norm"], config.rms_norm_eps)
        return cache, x, normed, dense(part["dense"], normed)

    cache, x, normed, out = half(0, x, cache)
    divided, whole = _experts(experts, weights["mixture"], normed, model.parallel)
    cache, x, _, last = half(1, x + total(out), cache)
    return cache, None, x + total(last + divided) + whole


def _experts(config: Experts, weights, x, parallel: Parallel) -> tuple[jax.Array, jax.Array]:
    """The weighted sums of each token's experts with weights, and of those without, whose output is the token itself.

    If devices divide the weights, the former is this device's term of a sum over devices, but the latter is whole.
    """
    chosen, shares = route(config, weights, x.reshape(-1, x.shape[-1]))
    has_weights = chosen < config.count
    divided = routed(config, weights["experts"], x, jnp.where(has_weights, chosen, -1), shares, parallel)
    unchanged = jnp.where(has_weights, 0.0, shares).sum(axis=-1).reshape(*x.shape[:-1], 1)
    return divided, (unchanged * x.astype(jnp.float32)).astype(x.dtype)
