"""The reasons against calls of `select_experts`, `grouped_swiglu`, `scaled_linear` and `swiglu_of_one`."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.expert_products import FEATURES, STEP
from jaxkv_kernels.mosaic_gpu.grouped_swiglu_one_token import MOST_INNER, MOST_PARTS, VECTOR, inner_parts
from jaxkv_kernels.mosaic_gpu.runtime.device import WGMMA, unavailable_reasons
from jaxkv_kernels.tile_scaled import TILE, TileScaled

MOST_EXPERTS, LANES = 1024, 32
"""Experts whose scores fit in the registers of a warp; lanes of a warp."""
SCORINGS = "softmax", "sigmoid"
"""How `select_experts` may score experts."""


def select_experts(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `select_experts` call."""
    experts, groups = arrays["logits"].shape[1], options["groups"]
    if options["scoring"] not in SCORINGS:
        yield f"`scoring` {options['scoring']!r}: supports {' and '.join(map(repr, SCORINGS))}"
    if experts > MOST_EXPERTS:
        yield f"{experts} experts: supports up to {MOST_EXPERTS}"
    if options["per_token"] > LANES:
        yield f"{options['per_token']} experts per token: supports up to {LANES}"
    if groups > options["groups_per_token"] and experts // groups % LANES:
        yield f"groups of {experts // groups} experts: supports multiples of {LANES}"


def grouped_swiglu(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `grouped_swiglu` call."""
    del options
    x, gate = arrays["x"], arrays["gate"]
    if arrays["biases"] is not None and isinstance(gate, TileScaled):
        yield "`biases`: supports weights in float8 without biases"
    yield from _tokens(x)
    step, kind = (TILE, " with weights in float8") if isinstance(gate, TileScaled) else (STEP, "")
    for name, size in (("tokens", x.shape[1]), ("inner sizes", gate.shape[1])):
        if size % step:
            yield f"{name} of {size} values: supports multiples of {step}{kind}"


def scaled_linear(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `scaled_linear` call."""
    del options
    x, weight = arrays["x"], arrays["weight"]
    yield from _tokens(x)
    if x.shape[1] % TILE:
        yield f"tokens of {x.shape[1]} values: supports multiples of {TILE}"
    if weight.shape[0] % FEATURES:
        yield f"results of {weight.shape[0]} values: supports multiples of {FEATURES}"


def swiglu_of_one(tokens: int, x, gate, up, down) -> Iterator[str]:
    """Reasons against `swiglu_of_one`, which models use for arrays x [..., D]; also those of this machine."""
    yield from _one_token(tokens, x, gate, up, down)
    if x.shape[-1] % VECTOR:
        yield f"tokens of {x.shape[-1]} values: supports multiples of {VECTOR}"
    if not inner_parts(gate.shape[0]):
        yield f"an inner size of {gate.shape[0]} values: supports up to {MOST_PARTS} equal parts of up to {MOST_INNER}"


def _one_token(tokens: int, x, *weights) -> Iterator[str]:
    yield from unavailable_reasons(WGMMA)
    if tokens != 1:
        yield f"{tokens} tokens: supports 1"
    if any(isinstance(weight, TileScaled) for weight in weights):
        yield "weights in float8"
    elif {weight.dtype for weight in weights} != {x.dtype} or x.dtype not in (jnp.bfloat16, jnp.float16):
        yield f"weights of other dtypes than `x` of {x.dtype}, or not bfloat16 or float16"


def _tokens(x) -> Iterator[str]:
    """A reason against tokens of such a dtype."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        yield f"`x` of {x.dtype}: supports bfloat16 and float16"
