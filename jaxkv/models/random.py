"""A model of random weights: its speed is that of a trained one."""

import jax
import jax.numpy as jnp

from jaxkv.models.build import Build
from jaxkv.models.config import ModelConfig
from jaxkv.models.model import Model
from jaxkv.models.parameters import parameters


def random_model(config: ModelConfig, seed: int = 0, *, dtype=None, entry_format=None, implementation=None) -> Model:
    """A model with normal weights of variance 1 / inputs, and norms of 1.

    Under `jax.eval_shape` it is a description of the model that takes no memory.

    Args:
      config: from `ModelConfig.read` or `ModelConfig.from_json`.
      seed: of the weights.
      dtype: as in `load`.
      entry_format: as in `load`.
      implementation: as in `load`.

    Raises:
      ValueError: `dtype` is none of those, or `entry_format` cannot hold the model's latents.
    """
    build = Build(config, dtype or config.dtype, entry_format, implementation)
    weights, structure = jax.tree.flatten(parameters(config))
    keys = jax.random.split(jax.random.key(seed), len(weights))
    arrays = []
    for key, weight in zip(keys, weights, strict=True):
        shape, kind = weight.stacked_shape, build.dtype_of(weight)
        if len(weight.shape) == 1:
            arrays.append(jnp.ones(shape, kind))
        else:
            arrays.append(jax.random.normal(key, shape, kind) * jnp.asarray(weight.shape[-1] ** -0.5, kind))
    return build.model(jax.tree.unflatten(structure, arrays))
