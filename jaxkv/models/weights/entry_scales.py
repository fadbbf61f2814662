"""The scales of cached entries in a checkpoint, for entry formats that have one per layer or head, such as `fp8`.

Quantisers store scales per layer, below `model.layers.N.self_attn.`: `k_scale` and `v_scale`, or `kv_scale` for both.
vLLM's names have `attn.` before these, NVIDIA's Model Optimizer writes `k_proj.k_scale` and `v_proj.v_scale`,
llm-compressor `qkv_proj.k_scale` for fused projections, Hunyuan `k_cache.scale`, and older versions of
compressed-tensors and Quark `k_proj.output_scale`.  All of them mean value = stored * scale, as in jaxkv.  For latents
(MLA), the scale of keys applies, as in vLLM and SGLang; that of values is unused.

Source of the names: `maybe_remap_kv_scale_name` in `model_executor/model_loader/weight_utils.py` of
https://github.com/vllm-project/vllm, and the methods `get_cache_scale_mapper` of its quantisations.
"""

import re
import warnings
from collections.abc import Iterable

import jax
import numpy as np

from jaxkv.models.config import GQA, ModelConfig
from jaxkv.models.families import FAMILIES
from jaxkv.models.parallel.base import Parallel
from jaxkv.models.weights.checkpoint import DTYPES, Checkpoint

NAME = re.compile(
    r"(?P<prefix>.*?)model\.layers\.(?P<layer>[0-9]{1,9})\.self_attn\.(?:(?P<attention>[0-9])\.)?"
    r"(?:(?:attn\.|attn_mqa\.|mla_attn\.mla_attn\.)?(?P<plain>k|v|kv|q|prob)_scale"
    r"|(?:[qkv]|qkv|qkqkv)_proj\.(?P<projected>[qkv])_scale"
    r"|(?P<output>[qkv])_proj\.output_scale"
    r"|(?P<cache>[kv])_cache\.scale"
    r"|(?P<unused>q\.scale|prob_output_scale))"
)
"""The names of scales of keys, values, both (`kv`), and of queries and softmax probabilities (`q`, `prob`).

The last two are unused: operations do not quantise queries or probabilities."""


def names_of(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Those of `names` that are names of scales, used or not."""
    return set(_matches(config, names))


def _matches(config: ModelConfig, names: Iterable[str]) -> dict[str, re.Match[str]]:
    """The matches of those of `names` that are names of scales, in the order of the alphabet.

    The attentions of a layer are numbered only if it has several.
    """
    prefix, numbers = FAMILIES[config.architecture].prefix, [str(i) for i in range(config.attentions_per_layer)]
    numbers = numbers if len(numbers) > 1 else [None]
    matches = {name: match for name in sorted(names) if (match := NAME.fullmatch(name))}
    recurrent = () if config.recurrent is None else config.recurrent.layers
    return {
        name: match
        for name, match in matches.items()
        if match["prefix"] == prefix and match["attention"] in numbers and int(match["layer"]) not in recurrent
    }


def _kind(match: re.Match[str]) -> str:
    """What a scale belongs to: "k", "v" or "kv"; empty for one that is unused."""
    kind = match["plain"] or match["projected"] or match["output"] or match["cache"]
    return kind if kind in ("k", "v", "kv") else ""


def warn_unused(checkpoint: Checkpoint, config: ModelConfig, entry_format: str) -> None:
    """Warns in one line if the checkpoint has scales of keys or values, which entries of that format do not have."""
    names = [name for name, match in _matches(config, checkpoint.names).items() if _kind(match)]
    if names:
        warnings.warn(
            f"{checkpoint.file_of(names[0])}: {len(names)} scales of cached entries, such as {names[0]!r}, are not "
            f"used, because entries in {entry_format!r} have none",
            stacklevel=3,
        )


def shapes(config: ModelConfig, *, mtp: bool) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a model's scales, one per layer of the cache and, for keys and values, per head.

    The names are arguments of the operations.  With `mtp`, the layer of multi-token prediction is the last.
    """
    layers = config.num_attentions + mtp
    if isinstance(config.attention, GQA):
        return dict.fromkeys(("k_scale", "v_scale"), (layers, config.attention.num_kv_heads))
    return {"kv_scale": (layers,)}


def read(checkpoint: Checkpoint, config: ModelConfig, *, mtp: bool) -> dict[str, np.ndarray]:
    """The scales of the model as `shapes` describes them, in float32; 1 for layers whose scales are not in the files.

    A scale of keys or values may be a single number, or one per head.

    ValueError if a scale has another shape, is not finite and positive, is stored twice, or is missing although the
    checkpoint has the other one of the layer.
    """
    scales = {name: np.ones(shape, np.float32) for name, shape in shapes(config, mtp=mtp).items()}
    stored: dict[tuple[int, str], str] = {}
    layers = len(next(iter(scales.values())))
    for name, match in _matches(config, checkpoint.names).items():
        layer = config.first_attention(int(match["layer"])) + int(match["attention"] or 0)
        if layer >= layers:
            continue
        for of in _kind(match):  # `kv` is the scale of both
            if (layer, of) in stored:
                raise checkpoint.error(name, f"is the same scale as {stored[layer, of]!r}: expected one of them")
            stored[layer, of] = name
    for (layer, kind), name in stored.items():
        other = "v" if kind == "k" else "k"
        if (layer, other) not in stored and (kind == "v" or "kv_scale" not in scales):
            raise checkpoint.error(name, f"is the only scale of its layer: expected a {other}_scale as well")
        target = "kv_scale" if "kv_scale" in scales else f"{kind}_scale"
        if kind == "k" or target == "v_scale":
            scales[target][layer] = _read_one(checkpoint, name, scales[target][layer].shape)
    return scales


def placed(scales: dict[str, np.ndarray], parallel: Parallel) -> dict[str, jax.Array]:
    """The scales on the model's devices."""
    return {
        name: jax.device_put(array, parallel.sharding((jax.tree_util.DictKey(name),), array.ndim))
        for name, array in scales.items()
    }


def _read_one(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The scale `name`, of that shape: () or [heads]."""
    if not checkpoint.holds(name):
        raise checkpoint.error(name, "is not where the index expects it")
    if checkpoint.dtype(name) not in DTYPES:
        raise checkpoint.error(name, f"has dtype {checkpoint.dtype(name)}: expected one of {', '.join(DTYPES)}")
    scale = checkpoint.read(name, tuple(slice(0, size) for size in checkpoint.shape(name))).astype(np.float32)
    if scale.size not in (1, *shape):
        expected = "1 value" if shape == () else f"1 value, or one per head, {shape[0]}"
        raise checkpoint.error(name, f"has shape {scale.shape}: expected {expected}")
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise checkpoint.error(name, f"holds {scale.min()} to {scale.max()}: expected positive, finite scales")
    return np.broadcast_to(scale.reshape(-1) if shape else scale.reshape(()), shape)
