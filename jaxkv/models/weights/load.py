"""Loads a model from a Hugging Face checkpoint; each weight is moved to its devices as soon as it is read."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.models.config import ModelConfig
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import Parallel
from jaxkv.models.weights.build import Build
from jaxkv.models.weights.checkpoint import Checkpoint
from jaxkv.models.weights.parameters import all_names, copied, parameters, unused
from jaxkv.models.weights.weight import Weight


def load(
    path,
    *,
    dtype=None,
    entry_format=None,
    implementation=None,
    parallel: Parallel | None = None,
    mtp: bool = False,
    progress=iter,
) -> Model:
    """Loads a model from a checkpoint on disk; downloads nothing.

    Each weight is read from the file that the index names for it.  Weights in float8 with a scale per tile of 128 x 128
    (DeepSeek V3, R1, V3.1, V3.2 as published) are multiplied by their scales in float32 and rounded to `dtype`.
    Weights of published checkpoints that the model does not use are skipped: layers of multi-token prediction (unless
    `mtp`), saved rotary frequencies, and a head that is tied to the embedding.

    Args:
      path: folder with config.json and model.safetensors, or shards with model.safetensors.index.json.
      dtype: dtype of weights and activations: bfloat16, float16 or float32; by default that of the checkpoint.
      entry_format: format of the cached entries: any of `MLAEntry.formats` or `KVEntry.formats` that can store the
        model's entries; a scale that the caller keeps is 1.  By default, the unquantised format of `dtype`.
      implementation: the implementation of the operations on the cache: None (the best that supports the call), a name,
        or a tuple of names in order of preference.
      parallel: how the model is divided over devices: `TensorParallel`, `ExpertParallel`, `ContextParallel`,
        `DataParallel`, or `OneDevice`; by default one device, JAX's default.  Each device receives only the weights
        that it keeps; under `ExpertParallel`, every expert passes through all devices.
      mtp: whether to load the layer of multi-token prediction as well, which drafts tokens (`draft`).  Its copies of
        the embedding and the output matrix are not kept, but must equal the model's own.
      progress: a function that wraps the list of weights to read, for example to show a progress bar.  The host holds
        one of them at a time.

    Returns:
      The model.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: a file of the checkpoint is missing, damaged, or outside the folder; a value of config.json is missing
        or not supported; a weight is missing, is unknown, has a different shape from the one the configuration
        requires, or holds NaN; `dtype` is not supported; `entry_format` does not support the model's entries; the
        model cannot be divided as `parallel` requires; or it has not exactly one MTP layer although `mtp` is set.
        For errors in files, the message is one line that names the file and the key or weight.
    """
    config = ModelConfig.read(path)
    build = Build(config, dtype or config.dtype, entry_format, implementation, parallel, mtp)
    with Checkpoint(path) as checkpoint:
        checkpoint.check_names(all_names(config, mtp=mtp))
        leaves, structure = jax.tree.flatten_with_path(parameters(config, mtp=mtp))
        paths, weights = zip(*leaves, strict=True)
        _check(checkpoint, config, weights, mtp=mtp)
        pieces = [(i, *piece) for i, weight in enumerate(weights) for piece in enumerate(weight.all_names())]
        arrays = []
        for i, expert, name in progress(pieces):
            weight, dtype = weights[i], build.dtype_of(weights[i])
            piece = checkpoint.read(name, dtype)
            piece = jax.device_put(piece, build.parallel.sharding(paths[i], piece.ndim)).astype(dtype)
            if not weight.experts:
                arrays.append(piece)
                continue
            if expert == 0:
                shape = weight.stacked_shape
                arrays.append(jnp.zeros(shape, dtype, device=build.parallel.sharding(paths[i], len(shape))))
            arrays[i] = _set(arrays[i], piece, expert)
    return build.model(jax.tree.unflatten(structure, arrays))


def _check(checkpoint: Checkpoint, config: ModelConfig, weights: Sequence[Weight], *, mtp: bool) -> None:
    """ValueError unless the checkpoint has all weights, and no others except those that are known to be unused."""
    copies = {name: own for name, own in copied(config, mtp=mtp).items() if name in checkpoint.names}
    shape = config.vocab_size, config.hidden_size
    checkpoint.check([*weights, *(Weight(name, shape) for name in copies)], unused(config, checkpoint.names))
    for name, own in copies.items():
        checkpoint.check_equal(name, own)


@partial(jax.jit, donate_argnums=0)
def _set(stack, piece, expert: int):
    """`stack` with `piece` at index `expert` of its first axis."""
    return lax.dynamic_update_index_in_dim(stack, piece, expert, axis=0)
