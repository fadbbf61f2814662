"""Models with random weights.  They run as fast as trained ones."""

from functools import partial

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
    mtp: bool = False,
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

    Raises:
      ValueError: `dtype` is not supported, `entry_format` does not support the model's entries, or the model cannot be
        divided as `parallel` requires, or has not exactly one MTP layer although `mtp` is set.
    """
    build = Build(config, dtype or config.dtype, entry_format, implementation, parallel, mtp)
    leaves, structure = jax.tree.flatten_with_path(parameters(config, mtp=mtp))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = []
    for key, (path, weight) in zip(keys, leaves, strict=True):
        shape, kind = weight.stacked_shape, build.dtype_of(weight)
        if weight.below:
            array = jax.random.randint(key, shape, 0, weight.below, kind)
        else:
            array = jnp.ones(shape, kind) if len(weight.shape) == 1 else _normal(key, shape, weight.shape[-1], kind)
        arrays.append(jax.device_put(array, build.parallel.sharding(path, array.ndim)))
    return build.model(jax.tree.unflatten(structure, arrays))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape: tuple[int, ...], inputs: int, dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(inputs**-0.5, dtype)
