"""Rotary position embedding: its keys in config.json, frequencies and their scalings, the rotation, and the scaling of
queries by position.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.config import Linear, Llama3, QueryScale, Rope, Yarn
from jaxkv.models.json_object import REQUIRED, JsonObject
from jaxkv.models.layers.linear import with_rank
from jaxkv_kernels.rotary import rotated

Scalings = Mapping[str, Callable[[JsonObject], Yarn | Llama3]]
BESIDE_SCALINGS = {"rope_theta", "partial_rotary_factor"}
"""Keys of `rope_parameters` that belong to no scaling."""
OF_VLLM = ("attn_factor", "extrapolation_factor", "apply_yarn_scaling")
"""Keys of YaRN that vLLM reads and transformers ignores, so that what a model computes depends on the library.
DeepSeek-R1-0528-Qwen3-8B has the first: the factor of cos and sin is 1 in vLLM and 1.14 in transformers.
"""


def read(
    fields: JsonObject, scalings: Scalings, *, interleaved: bool, theta: Any = REQUIRED, partial: float = 1.0
) -> Rope:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (earlier versions).

    Args:
      fields: the object of `config.json`.
      scalings: functions that read the keys of a scaling, by the supported values of `rope_type` besides "default" and
        "linear".
      interleaved: as in `Rope`.
      theta: the value if `rope_theta` is absent; by default, the key is required.
      partial: the only supported value of `partial_rotary_factor`, which is optional.
    """
    factors = (1, 1.0) if partial == 1 else (partial,)
    fields.choice("partial_rotary_factor", *factors, default=partial)
    spelling = fields.spelling("rope_parameters", "rope_scaling")
    if spelling not in fields:
        return Rope(fields.number("rope_theta", above=1, default=theta), interleaved, None)
    values = fields.child(spelling)
    theta = (values if "rope_theta" in values else fields).number("rope_theta", above=1, default=theta)
    for held in (values, fields):
        if held.number("rope_theta", above=1, default=theta) != theta:
            raise held.error("rope_theta", f"{theta}, as in `{spelling}`")
    values.choice("partial_rotary_factor", *factors, default=partial)
    return read_values(values, scalings, theta, interleaved=interleaved)


def read_values(values: JsonObject, scalings: Scalings, theta: float, *, interleaved: bool) -> Rope:
    """Reads the scaling of an object like `rope_parameters`; `scalings` as in `read`.

    An object without keys of a scaling needs no type.
    """
    known = {"default": lambda values: None, "linear": _read_linear, **scalings}
    key = values.spelling("rope_type", "type")
    if key not in values and BESIDE_SCALINGS.issuperset(name for name, value in values.items() if value is not None):
        return Rope(theta, interleaved, None)
    if values.value(key) == "dynamic":
        expected = f"{' or '.join(map(repr, known))}; with dynamic scaling, frequencies depend on the length of a"
        raise values.error(key, f"{expected} request, and those of cached keys would be wrong as it grows")
    return Rope(theta, interleaved, known[values.choice(key, *known)](values))


def _read_linear(values: JsonObject) -> Linear:
    """Reads the parameter of linear scaling; those of YaRN, of which implementations use some, must be absent."""
    for key in ("mscale", "mscale_all_dim", "attention_factor"):
        values.choice(key, None, default=None)
    return Linear(values.number("factor", least=1))


def read_with_yarn(fields: JsonObject) -> Rope:
    """Reads the rotary embedding of MLA models: interleaved unless `rope_interleave` is false; YaRN is supported."""
    return read(fields, {"yarn": read_yarn}, interleaved=fields.flag("rope_interleave", default=True))


def read_yarn(values: JsonObject) -> Yarn:
    """Reads the parameters of YaRN; those of `OF_VLLM` must be absent."""
    for key in OF_VLLM:
        if key in values:
            raise values.error(key, "null: vLLM depends on it, transformers on `attention_factor` instead")
    beta_fast = values.number("beta_fast", default=None) or 32.0
    beta_slow = values.number("beta_slow", default=None) or 1.0
    if beta_fast < beta_slow:
        raise values.error("beta_fast", f"at least `beta_slow`, which is {beta_slow}")
    return Yarn(
        factor=values.number("factor", least=1),
        original_length=values.integer("original_max_position_embeddings"),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=values.number("mscale", least=0, default=None),
        mscale_all_dim=values.number("mscale_all_dim", least=0, default=None),
        attention_factor=values.number("attention_factor", default=None),
        truncate=values.flag("truncate", default=True),
    )


def read_llama3(values: JsonObject) -> Llama3:
    """Reads the parameters of Llama 3.1's scaling."""
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    if high <= low:
        raise values.error("high_freq_factor", f"more than `low_freq_factor`, which is {low}")
    return Llama3(
        factor=values.number("factor", least=1),
        original_length=values.integer("original_max_position_embeddings"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def angles(rope: Rope, rotary_dim: int, positions) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of `positions` [...]: float32 [..., rotary_dim / 2], multiplied by YaRN's attention factor."""
    per_token = with_rank(frequencies(rope, rotary_dim), positions.ndim + 1)
    phase = positions[..., None].astype(jnp.float32) * per_token
    factor = _attention_factor(rope.scaling)
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def query_scales(config: QueryScale, positions) -> jax.Array:
    """The factors of queries at `positions`, float32 of the same shape; padding, at negative positions, has 1."""
    turns = jnp.maximum(positions, 0) // config.original_length
    return 1 + config.beta * jnp.log1p(turns.astype(jnp.float32))


def rotate(x, cos, sin, *, interleaved: bool) -> jax.Array:
    """Rotates the pairs of x [..., n] by the angles of `cos` and `sin` [..., n / 2].

    The result has the first values of all pairs, then the second values, even if the pairs of x are `interleaved`.
    Scores do not change, because queries and keys are stored in the same order.
    """
    wide = x.astype(jnp.float32)
    half = x.shape[-1] // 2
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotate_last(x, cos, sin) -> jax.Array:
    """Rotates the last pairs (x[2i], x[2i + 1]) of x [..., n] by the angles of `cos` and `sin` [..., p], p <= n / 2.

    The values keep their order, so that `rotate_last(y, cos, -sin)` rotates back.
    """
    plain, rotary = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    rotary = rotated(rotary, jnp.concatenate([cos, sin], axis=-1), interleaved=True)
    return jnp.concatenate([plain, rotary], axis=-1)


def rotate_first(x, cos, sin, *, interleaved: bool) -> jax.Array:
    """Rotates the first values of x [..., n], twice as many as there are angles, and leaves the others as they are."""
    rotary = 2 * cos.shape[-1]
    if rotary in (0, x.shape[-1]):
        return rotate(x, cos, sin, interleaved=interleaved) if rotary else x
    return jnp.concatenate([rotate(x[..., :rotary], cos, sin, interleaved=interleaved), x[..., rotary:]], axis=-1)


def frequencies(rope: Rope, size: int) -> np.ndarray:
    """The angle per position of each pair, in radians: float32 [size / 2]."""
    pairs = np.arange(0, size, 2, dtype=np.float32)
    plain = np.float32(1) / np.float32(rope.theta) ** (pairs / np.float32(size))
    match rope.scaling:
        case Yarn():
            return _yarn_frequencies(plain, rope.scaling, rope.theta)
        case Llama3():
            return _llama3_frequencies(plain, rope.scaling)
        case Linear(factor):
            return plain / np.float32(factor)
    return plain


def _yarn_frequencies(plain: np.ndarray, yarn: Yarn, theta: float) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2).

    Frequencies with fewer than `beta_slow` turns within the original length are divided by `factor`.  Those with more
    than `beta_fast` turns are kept.  Between these, the two are blended linearly in the index of the pair.
    """
    size = 2 * len(plain)
    low, high = (_pair_of(turns, yarn, theta, size) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = max(high - low, 0.001)
    stretched = np.clip((np.arange(len(plain), dtype=np.float32) - low) / np.float32(width), 0, 1)
    return plain / np.float32(yarn.factor) * stretched + plain * (1 - stretched)


def _llama3_frequencies(plain: np.ndarray, llama3: Llama3) -> np.ndarray:
    """The scaling that `Llama3` describes.  The blend is linear in the number of turns within the original length."""
    turns = np.float32(llama3.original_length) * plain / np.float32(2 * math.pi)
    low, high = np.float32(llama3.low_freq_factor), np.float32(llama3.high_freq_factor)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain / np.float32(llama3.factor) * (1 - kept) + plain * kept


def _pair_of(turns: float, yarn: Yarn, theta: float, size: int) -> float:
    """The fractional index of the pair that makes `turns` turns within the original length."""
    return size * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _attention_factor(yarn: Yarn | Llama3 | Linear | None) -> float:
    """The factor by which cos and sin are multiplied: 1 unless the scaling is YaRN."""
    if not isinstance(yarn, Yarn):
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    return mscale(yarn.factor, 1.0)


def mscale(factor: float, mscale: float) -> float:
    """YaRN's attention scaling for a context `factor` times as long as in training."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
