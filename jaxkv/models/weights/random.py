"""Models with random weights.  They run as fast as trained ones."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.config import ModelConfig
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import Parallel
from jaxkv.models.weights import fp8
from jaxkv.models.weights.build import Build
from jaxkv.models.weights.parameters import parameters
from jaxkv.models.weights.placed import indices
from jaxkv.models.weights.weight import Weight
from jaxkv_kernels.tile_scaled import TileScaled


def random_model(
    config: ModelConfig,
    seed: int = 0,
    *,
    dtype=None,
    entry_format=None,
    implementation=None,
    parallel: Parallel | None = None,
    mtp: bool = False,
    fp8_weights: str = "expand",
) -> Model:
    """A model with random weights: normal with variance 1 / (number of inputs), norms 1, tables uniform.

    Under `jax.eval_shape`, the result describes the model without using memory.

    Args:
      config: from `ModelConfig.read` or `ModelConfig.from_json`.
      seed: seed of the random weights.
      dtype: as in `load`.
      entry_format: as in `load`.
      implementation: as in `load`.
      parallel: as in `load`.
      mtp: as in `load`.
      fp8_weights: as in `load` of a checkpoint with float8 weights. By default there are none; with "dequantise" or
        "e4m3", weights that may be in float8 are, with the same scale for all tiles of a weight.

    Raises:
      ValueError: `dtype` or `fp8_weights` is not supported, `dtype` is None and the configuration has none,
        `entry_format` does not support the model's entries, or the model cannot be divided as `parallel` requires, or
        only by cutting tiles of float8 weights, or it has not exactly one MTP layer although `mtp` is set.
    """
    fp8.check_use(fp8_weights)
    build = Build(config, dtype, entry_format, implementation, parallel, mtp)
    leaves, structure = jax.tree.flatten_with_path(parameters(config, mtp=mtp))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays: list[Any] = []
    for key, (path, weight) in zip(keys, leaves, strict=True):
        shape, kind = weight.stacked_shape, build.dtype_of(weight)
        sharding = build.parallel.sharding(path, len(shape))
        if fp8_weights != "expand" and weight.may_stay_fp8:
            arrays.append(_scaled(key, weight, sharding, e4m3_products=fp8_weights == "e4m3"))
            continue
        if weight.below:
            array = jax.random.randint(key, shape, 0, weight.below, kind)
        else:
            array = jnp.ones(shape, kind) if len(weight.shape) == 1 else _normal(key, shape, weight.shape[-1], kind)
        arrays.append(jax.device_put(array, sharding))
    return build.model(jax.tree.unflatten(structure, arrays))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape: tuple[int, ...], inputs: int, dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(inputs**-0.5, dtype)


def _scaled(key, weight: Weight, sharding, *, e4m3_products: bool) -> TileScaled:
    """A weight in float8: numbers of variance 1, and scales that give the weight its variance."""
    fp8.check_parts(weight, indices(weight.stacked_shape, sharding).values())
    values = _normal(key, weight.stacked_shape, 1, jnp.bfloat16).astype(jnp.float8_e4m3fn)
    *stack, rows, columns = weight.stacked_shape
    scales = jnp.full((*stack, *fp8.scale_shape((rows, columns))), weight.shape[-1] ** -0.5, jnp.float32)
    values, scales = (jax.device_put(array, sharding) for array in (values, scales))
    return TileScaled(values, scales, e4m3_products)
