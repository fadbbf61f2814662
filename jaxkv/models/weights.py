"""A model from a Hugging Face checkpoint: each weight goes to the device as it is read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.build import Build
from jaxkv.models.checkpoint import Checkpoint
from jaxkv.models.config import ModelConfig
from jaxkv.models.model import Model
from jaxkv.models.parameters import Weight, parameters


def load(path, *, dtype=None, entry_format=None, implementation=None, device=None, progress=iter) -> Model:
    """Reads a checkpoint; downloads nothing.

    Args:
      path: folder with config.json and model.safetensors, or shards with model.safetensors.index.json.
      dtype: of weights and activations: bfloat16, float16 or float32; default that of the checkpoint.
      entry_format: format of the cached latents: `bf16`, `f16`, `f32`, `fp8` (with scale 1), `fp8_ds_mla`; default the
        plain one of `dtype`.
      implementation: of the operations on the cache: None (the best that takes the call), a name, or a tuple of names.
      device: where the weights go; default the default device.
      progress: wraps the list of what is to be read, to show how far it is.

    Returns:
      The model.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: an architecture or value of config.json is not supported, or `entry_format` cannot hold its latents;
        a weight is missing, has another shape than the configuration tells, or holds NaN.
    """
    config = ModelConfig.read(path)
    build = Build(config, dtype or config.dtype, entry_format, implementation)
    weights, structure = jax.tree.flatten(parameters(config))
    pieces = [(i, layer) for i, weight in enumerate(weights) for layer in weight.layers or [0]]
    with Checkpoint(path) as checkpoint:
        checkpoint.check({name: weights[i].shape for i, layer in pieces for name in weights[i].names(layer)})
        arrays = [jnp.zeros(weight.stacked_shape, build.dtype_of(weight), device=device) for weight in weights]
        for i, layer in progress(pieces):
            arrays[i] = _place(arrays[i], weights[i], layer, checkpoint)
    return build.model(jax.tree.unflatten(structure, arrays))


def _place(array, weight: Weight, layer: int, checkpoint: Checkpoint):
    """`array` with a layer's weights, of all experts, in their place."""
    pieces = [checkpoint.read(name) for name in weight.names(layer)]
    piece = np.stack(pieces, weight.expert_axis) if weight.experts else pieces[0]
    piece = jax.device_put(piece, array.sharding)
    return _set(array, piece, layer - weight.layers.start) if weight.layers else piece.astype(array.dtype)


@partial(jax.jit, donate_argnums=0)
def _set(array, piece, i):
    return array.at[i].set(piece.astype(array.dtype))
