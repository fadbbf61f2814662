"""Feed-forward layers: dense (SwiGLU), and mixtures of experts with their routing and shared expert."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.dispatch import has_kernel, run
from jaxkv.models.batch import Batch
from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.json_object import JsonObject
from jaxkv.models.layers.linear import float32_linear, linear, with_rank
from jaxkv.models.parallel.base import Parallel
from jaxkv.models.weights.weight import EXPERT, Weight
from jaxkv.ops.products import grouped_swiglu
from jaxkv.ops.routing import select_experts
from jaxkv_kernels.calls import GroupedSwiglu
from jaxkv_kernels.experts import SCORES, gated, weights_of
from jaxkv_kernels.tile_scaled import TileScaled


def read_layers(fields: JsonObject, read: Callable[[JsonObject], Experts]) -> tuple[int, Experts | None]:
    """The number of leading dense layers, and what `read` returns for the others (None if all layers are dense)."""
    num_layers = fields.integer("num_hidden_layers")
    dense = _num_dense_layers(fields, num_layers)
    return dense, read(fields) if dense < num_layers else None


def _num_dense_layers(fields: JsonObject, num_layers: int) -> int:
    if "mlp_layer_types" not in fields:
        fields.choice("moe_layer_freq", 1, default=1)
        return min(fields.integer("first_k_dense_replace", least=0), num_layers)
    types = fields.value("mlp_layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        dense = types.count("dense")
        if types == ["dense"] * dense + ["sparse"] * (num_layers - dense):
            return dense
    raise fields.error("mlp_layer_types", f"the types of {num_layers} layers, dense ones first, then sparse ones")


def read_experts(fields: JsonObject) -> Experts:
    """Experts with the routing of DeepSeek V3."""
    fields.choice("topk_method", "noaux_tc", default="noaux_tc")
    return read_routing(fields, "sigmoid", grouped=True, normalize=fields.flag("norm_topk_prob"))


def read_routing(fields: JsonObject, scoring: str, *, grouped: bool, normalize: bool) -> Experts:
    """Experts with the given `scoring`; if `grouped`, only those of the best groups are chosen.  See `Experts`."""
    count, size = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    fields.choice("scoring_func", scoring, default=scoring)
    groups = fields.integer("n_group") if grouped else 1
    if count % groups:
        raise fields.error("n_group", f"a divisor of the {count} `n_routed_experts`")
    in_group = count // groups
    if groups > 1 and in_group == 1 and scoring == "sigmoid":
        raise fields.error("n_group", f"groups of 2 or more of the {count} `n_routed_experts`, to sum their best two")
    kept = fields.integer("topk_group") if grouped else 1
    if kept > groups:
        raise fields.error("topk_group", f"at most `n_group`, which is {groups}")
    per_token = fields.integer("num_experts_per_tok")
    if per_token > kept * in_group:
        raise fields.error("num_experts_per_tok", f"at most the {kept * in_group} experts of {kept} groups")
    return Experts(
        count=count,
        per_token=per_token,
        groups=groups,
        groups_per_token=kept,
        scoring=scoring,
        normalize=normalize,
        scale=fields.number("routed_scaling_factor"),
        intermediate_size=size,
        shared_intermediate_size=size * fields.integer("n_shared_experts"),
    )


def mixture_weights(config: ModelConfig, experts: Experts, weight) -> dict[str, Any]:
    """The weights of the router, the experts and the shared expert, if any; `weight` as in `layer_weights`."""
    hidden, size = config.hidden_size, experts.intermediate_size
    tree = {
        "router": weight("mlp.gate.weight", experts.count, hidden, lossless=True),
        "experts": swiglu_weights(weight, f"mlp.experts.{EXPERT}", hidden, size, experts=experts.count),
    }
    if experts.shared_intermediate_size:
        tree["shared"] = swiglu_weights(weight, "mlp.shared_experts", hidden, experts.shared_intermediate_size)
    if experts.scoring == "sigmoid":
        tree["router_bias"] = weight("mlp.gate.e_score_correction_bias", experts.count, exact=True)
    return tree


def swiglu_weights(weight, prefix: str, hidden: int, size: int, experts: int = 0) -> dict[str, Weight]:
    """The weights of a feed-forward with `size` inner values; with `experts`, a stack of that many."""
    return {
        "gate": weight(f"{prefix}.gate_proj.weight", size, hidden, experts=experts),
        "up": weight(f"{prefix}.up_proj.weight", size, hidden, experts=experts),
        "down": weight(f"{prefix}.down_proj.weight", hidden, size, experts=experts),
    }


def feed_forward(experts: Experts | None, weights, x, parallel: Parallel, batch: Batch) -> jax.Array:
    """The feed-forward of a layer: dense or a mixture, depending on its weights; x are the new tokens of the batch.

    If devices divide the weights, the result is this device's term of a sum over devices.
    """
    if experts is None or "dense" in weights:
        return dense(weights["dense"], x)
    return mixture(experts, weights["mixture"], x, parallel, batch)


def dense(weights, x, limit: float | None = None, alpha: float | None = None) -> jax.Array:
    """The SwiGLU feed-forward; x and the result are [..., hidden], `limit` and `alpha` as in `grouped_swiglu`."""
    gate, up, down = (weights[name] for name in ("gate", "up", "down"))
    if x.size == x.shape[-1] and alpha is None and all(getattr(w, "dtype", None) == x.dtype for w in (gate, up, down)):
        # A kernel for a single token reads the weights faster than XLA does.
        call = _of_one_token(x.reshape(1, -1), gate, up, down, limit)
        if has_kernel(call):
            return run(call, None).reshape(x.shape)
    return linear(gated(linear(x, gate), linear(x, up), limit, alpha), down)


def _of_one_token(x, gate, up, down, limit: float | None) -> GroupedSwiglu:
    """The feed-forward of a token x [1, hidden] as that of a mixture of which it has chosen no expert."""
    ids = jnp.zeros((1, 0), jnp.int32)
    return GroupedSwiglu(
        x=x,
        experts=ids,
        weights=ids.astype(jnp.float32),
        gate=gate[None],
        up=up[None],
        down=down[None],
        shared=(gate, up, down),
        biases=None,
        limit=limit,
        alpha=None,
    )


def mixture(config: Experts, weights, x, parallel: Parallel, batch: Batch) -> jax.Array:
    """The weighted sum of each token's experts, plus the shared expert; x and the result are [..., hidden].

    With a weight "shared_gate" [1, hidden], the shared expert is multiplied by the sigmoid of x's product with it.
    """
    chosen, shares = route(config, weights, x.reshape(-1, x.shape[-1]), batch)
    if not config.shared_intermediate_size:
        return routed(config, weights["experts"], x, chosen, shares, parallel)
    shared = tuple(weights["shared"][part] for part in ("gate", "up", "down"))
    # One kernel may compute the shared expert with the others, unless these also compute tokens of other devices.
    fused = not parallel.exchanges_tokens and not any(isinstance(weight, TileScaled) for weight in shared)
    fused = fused and "shared_gate" not in weights
    out = routed(config, weights["experts"], x, chosen, shares, parallel, shared=shared if fused else None)
    if fused:
        return out
    whole = dense(weights["shared"], x, config.limit, config.alpha)
    return out + (jax.nn.sigmoid(linear(x, weights["shared_gate"])) * whole if "shared_gate" in weights else whole)


def routed(config: Experts, weights, x, chosen, shares, parallel: Parallel, shared=None) -> jax.Array:
    """The weighted sum of each token's experts, of which those with id -1 are skipped, plus the shared expert, if any.

    x and the result are [..., hidden]; `chosen` and `shares` are from `route`; `shared` as in `grouped_swiglu`.
    """
    stacks = tuple(weights[name] for name in ("gate", "up", "down"))
    biases = tuple(weights[f"{name}_bias"] for name in ("gate", "up", "down")) if "gate_bias" in weights else None
    options = {"shared": shared, "limit": config.limit, "alpha": config.alpha, "biases": biases}

    def experts(tokens, chosen, shares):
        return grouped_swiglu(tokens, chosen, shares, *stacks, **options)

    return parallel.routed(experts, x.reshape(-1, x.shape[-1]), chosen, shares, config.count).reshape(x.shape)


def route(config: Experts, weights, x, batch: Batch | None = None) -> tuple[jax.Array, jax.Array]:
    """The chosen experts of tokens x [T, hidden], int32 [T, per_token], and their weights, float32 of that shape.

    Padding of the batch chooses no experts, -1: all of it would choose the same ones, whose weights would be read again
    for every tile of it.  In the first layers of V4, a table has the experts of each token id.
    """
    chosen, shares = _route(config, weights, x, batch)
    return (chosen if batch is None else jnp.where(batch.is_padding.reshape(-1, 1), -1, chosen)), shares


def _route(config: Experts, weights, x, batch: Batch | None) -> tuple[jax.Array, jax.Array]:
    logits = float32_linear(x, weights["router"])
    if "logit_bias" in weights:  # GPT-OSS
        logits = logits + with_rank(weights["logit_bias"], logits.ndim)
    if "experts_of_ids" in weights:
        ids = batch.ids.reshape(-1)  # type: ignore[union-attr]  # such a model has them
        experts, scores = weights["experts_of_ids"][ids], SCORES[config.scoring](logits)
        return experts, weights_of(scores, experts, normalize=config.normalize, scale=config.scale)
    return select_experts(
        logits,
        config.per_token,
        bias=weights.get("router_bias"),
        scoring=config.scoring,  # type: ignore[arg-type]
        groups=config.groups,
        groups_per_token=config.groups_per_token,
        normalize=config.normalize,
        scale=config.scale,
    )
