"""Loads a model from a Hugging Face checkpoint; each weight is moved to its devices as soon as it is read."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.config import ModelConfig
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import Parallel
from jaxkv.models.weights import entry_scales, fp8
from jaxkv.models.weights.build import Build
from jaxkv.models.weights.checkpoint import Checkpoint
from jaxkv.models.weights.parameters import copied, parameters, required_names, spellings, unused
from jaxkv.models.weights.parts import expanded_part, mxfp4_part, scaled_part, table_part
from jaxkv.models.weights.placed import Placed
from jaxkv.models.weights.safetensors_file import NUMPY, Index
from jaxkv.models.weights.weight import Weight
from jaxkv_kernels.tile_scaled import TileScaled

ROWS = 4096
"""Rows of two weights that are compared at a time."""


def load(
    path,
    *,
    dtype=None,
    entry_format=None,
    implementation=None,
    parallel: Parallel | None = None,
    mtp: bool = False,
    fp8_weights: str = "dequantise",
    progress=iter,
) -> Model:
    """Loads a model from a checkpoint on disk; downloads nothing.

    Each weight is read from the file that the index names for it, and each device receives only the part that it keeps.
    Weights in float8 with a scale per tile of 128 x 128 (DeepSeek V3, R1, V3.1, V3.2, V4 as published) stay in float8,
    except for those that are not only multiplied, such as `kv_b_proj`, of which absorbed attention uses the parts.
    Experts in MXFP4 are expanded (GPT-OSS as published), or become float8 with exactly the same values (V4).  Weights
    of published checkpoints that the model does not use are skipped: layers of multi-token prediction (unless `mtp`),
    saved rotary frequencies, and a head that is tied to the embedding.

    Args:
      path: folder with config.json and model.safetensors, or shards with model.safetensors.index.json.
      dtype: dtype of weights and activations: bfloat16, float16 or float32; by default the one that config.json states.
      entry_format: format of the cached entries: any of `MLAEntry.formats` or `KVEntry.formats` that can store the
        model's entries.  By default, the unquantised format of `dtype`.  `fp8` uses the scales of the checkpoint, or 1
        in layers of which it has none; `calibrate` finds them by running prompts.  With other formats, scales are
        skipped, with a warning.
      implementation: the implementation of the operations on the cache: None (the best that supports the call), a name,
        or a tuple of names in order of preference.
      parallel: how the model is divided over devices: `TensorParallel`, `ExpertParallel`, `ContextParallel`,
        `DataParallel`, `DataExpertParallel`, or `OneDevice`; by default one device, JAX's default.
      mtp: whether to load the layer of multi-token prediction as well, which drafts tokens (`draft`).  Its copies of
        the embedding and the output matrix are not kept, but must equal the model's own.
      fp8_weights: what becomes of weights in float8.  With "dequantise" and "e4m3" they stay in float8, and products
        multiply them by their scales.  With "e4m3", products also round activations to e4m3, with a scale per 128
        values of a token, as the reference implementation does; this is less accurate.  "expand" multiplies weights by
        their scales in float32 and rounds them to `dtype` while loading.  The same holds for FP4 experts of V4.
      progress: a function that wraps the list of weights to read, for example to show a progress bar.  The host holds
        one of them, or a device's part of one, at a time.

    Returns:
      The model.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: a file of the checkpoint is missing, damaged, or outside the folder; a value of config.json or
        generation_config.json is missing or not supported; a weight is missing, is unknown, has a different shape from
        the one the configuration requires, or is not finite, as stored or in the dtype in which the model keeps it;
        `dtype` or `fp8_weights` is not supported, or `dtype` is None and config.json states none; `entry_format` does
        not support the model's entries; the model cannot be divided as `parallel` requires, or only by cutting tiles of
        float8 weights; or it has not exactly one MTP layer although `mtp` is set.
        For errors in files, the message is one line that names the file and the key or weight.
    """
    config = ModelConfig.read(path)
    build = Build(config, dtype, entry_format, implementation, parallel, mtp)
    fp8.check_use(fp8_weights)
    with Checkpoint(path) as checkpoint:
        checkpoint.rename(spellings(config, checkpoint.names))
        checkpoint.check_names(required_names(config, mtp=mtp))
        leaves, structure = jax.tree.flatten_with_path(parameters(config, mtp=mtp, names=checkpoint.names))
        paths, weights = zip(*leaves, strict=True)
        _check(checkpoint, config, weights, mtp=mtp)
        arrays: list[_Plain | _Scaled] = []
        for path, weight in zip(paths, weights, strict=True):
            stays = fp8_weights != "expand" and weight.may_stay_fp8 and checkpoint.are_fp8_or_fp4(weight.all_names())
            kind = partial(_Scaled, e4m3_products=fp8_weights == "e4m3") if stays else _Plain
            arrays.append(kind(checkpoint, build, path, weight))
        pieces = [(i, *piece) for i, weight in enumerate(weights) for piece in weight.pieces()]
        for i, expert, name in progress(pieces):
            arrays[i].add(expert, name)
        tree = jax.tree.unflatten(structure, [array.result() for array in arrays])
        del arrays  # so that weights which the model rearranges are freed
        scales = None
        if build.scales_entries:
            scales = entry_scales.read(checkpoint, config, mtp=mtp)
        else:
            entry_scales.warn_unused(checkpoint, config, build.entry_format)
    return build.model(tree, scales)


def _check(checkpoint: Checkpoint, config: ModelConfig, weights: Sequence[Weight], *, mtp: bool) -> None:
    """ValueError unless the checkpoint has all weights, and no others except those that are known to be unused."""
    copies = {name: own for name, own in copied(config, mtp=mtp).items() if name in checkpoint.names}
    shape = config.vocab_size, config.hidden_size
    checkpoint.check([*weights, *(Weight(name, shape) for name in copies)], unused(config, checkpoint.names))
    for name, own in copies.items():
        for row in range(0, config.vocab_size, ROWS):
            index = slice(row, min(row + ROWS, config.vocab_size)), slice(0, config.hidden_size)
            left, right = (expanded_part(checkpoint, weight, jnp.float32, index, None) for weight in (name, own))
            if not np.array_equal(left, right):
                raise checkpoint.error(name, f"differs from {own!r}: config.json ties them")


class _Plain:
    """A weight or a stack of experts' weights, of which float8 ones are expanded, on its devices."""

    def __init__(self, checkpoint: Checkpoint, build: Build, path, weight: Weight):
        self._checkpoint, self._weight = checkpoint, weight
        stored = NUMPY[checkpoint.dtype(weight.name)] if weight.lossless else None
        self._dtype, shape = build.dtype_of(weight, stored), weight.stacked_shape
        sharding = build.parallel.sharding(path, len(shape))
        self._placed = Placed(shape, self._dtype, sharding, stacked=bool(weight.experts))

    def add(self, expert: int, name: str) -> None:
        """Reads the weight `name`, or that of the expert in it."""

        def read(index: Index, device) -> jax.Array:
            place = self._weight.place(expert, index)
            if self._weight.below:
                return table_part(self._checkpoint, name, self._weight.below, place, device)
            if self._checkpoint.is_mxfp4(name):
                found = mxfp4_part(self._checkpoint, name, self._dtype, place, device)
            elif self._weight.swapped:
                stack, rows, columns = place
                found = expanded_part(self._checkpoint, name, self._dtype, (stack, columns, rows), device)
                found = found.swapaxes(1, 2)
            else:
                found = expanded_part(self._checkpoint, name, self._dtype, place, device)
            if self._weight.packed is not None:
                found = found[0][:: self._weight.step]
            return found.reshape([of.stop - of.start for of in index])

        self._placed.add(expert, read)

    def result(self) -> jax.Array:
        """The array."""
        array = self._placed.array()
        return array + 1 if self._weight.centred else array


class _Scaled:
    """The same for weights that stay in float8."""

    def __init__(self, checkpoint: Checkpoint, build: Build, path, weight: Weight, *, e4m3_products: bool):
        self._checkpoint, self._e4m3_products = checkpoint, e4m3_products
        self._dtype, shape = build.dtype_of(weight), weight.stacked_shape
        stacked, sharding = bool(weight.experts), build.parallel.sharding(path, len(shape))
        self._values = Placed(shape, jnp.float8_e4m3fn, sharding, stacked=stacked)
        fp8.check_parts(weight, self._values.indices.values())
        shape = (*shape[:-2], *fp8.scale_shape(weight.shape))
        self._scales = Placed(shape, jnp.float32, sharding, stacked=stacked)

    def add(self, expert: int, name: str) -> None:
        """Reads the weight `name` and its scales."""
        read: dict[Any, TileScaled] = {}

        def values(index: Index, device) -> jax.Array:
            read[device] = scaled_part(self._checkpoint, name, self._dtype, index, device)
            return read[device].values

        self._values.add(expert, values)
        # Parts consist of whole tiles, so that those of the scales are read for the same devices.
        self._scales.add(expert, lambda index, device: read[device].scales)

    def result(self) -> TileScaled:
        """The weight."""
        return TileScaled(self._values.array(), self._scales.array(), self._e4m3_products)
