"""Weights from the safetensors files of a Hugging Face checkpoint."""

from jaxkv.models.model import Model


def load(path, *, dtype=None, entry_format=None, implementation=None, device=None, progress=iter) -> Model:
    """Reads a checkpoint; downloads nothing.

    Args:
      path: folder with config.json and model.safetensors, or shards with model.safetensors.index.json.
      dtype: of weights and activations: bfloat16, float16 or float32; default that of the checkpoint.
      entry_format: format of the cached latents: `bf16`, `f16`, `f32`, `fp8` (unscaled), `fp8_ds_mla`; default the
        plain one of `dtype`.
      implementation: of the operations on the cache: None (the best that takes the call), a name, or a tuple of names.
      device: a device or sharding for the weights; each goes there as it is read.
      progress: wraps the list of weights to be read: a progress bar.

    Returns:
      The model.

    Raises:
      ValueError: an architecture or value of config.json is not supported; a weight is missing, has another shape than
        the configuration tells, or holds NaN.
    """
    raise NotImplementedError
