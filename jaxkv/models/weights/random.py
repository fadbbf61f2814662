"""A model of random weights: its speed is that of a trained one."""

import jax
import jax.numpy as jnp

from jaxkv.models.config import ModelConfig
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import Parallel
from jaxkv.models.weights.build import Build
from jaxkv.models.weights.parameters import parameters


def random_model(
    config: ModelConfig,
    seed: int = 0,
    *,
    dtype=None,
    entry_format=None,
    implementation=None,
    parallel: Parallel | None = None,
) -> Model:
    """A model with normal weights of variance 1 / inputs, and norms of 1.

    Under `jax.eval_shape` it is a description of the model that takes no memory.

    Args:
      config: from `ModelConfig.read` or `ModelConfig.from_json`.
      seed: of the weights.
      dtype: as in `load`.
      entry_format: as in `load`.
      implementation: as in `load`.
      parallel: as in `load`.

    Raises:
      ValueError: `dtype` is none of those, `entry_format` cannot hold the model's entries, or the model cannot be
        divided as `parallel` would.
    """
    build = Build(config, dtype or config.dtype, entry_format, implementation, parallel)
    leaves, structure = jax.tree.flatten_with_path(parameters(config))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = []
    for key, (path, weight) in zip(keys, leaves, strict=True):
        shape, kind = weight.stacked_shape, build.dtype_of(weight)
        if len(weight.shape) == 1:
            array = jnp.ones(shape, kind)
        else:
            array = jax.random.normal(key, shape, kind) * jnp.asarray(weight.shape[-1] ** -0.5, kind)
        arrays.append(jax.device_put(array, build.parallel.sharding(path, array.ndim)))
    return build.model(jax.tree.unflatten(structure, arrays))
