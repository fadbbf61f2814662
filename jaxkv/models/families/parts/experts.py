"""Mixtures of experts, and dense layers before them."""

from collections.abc import Callable
from typing import Any

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.families.parts.feed_forward import feed_forward
from jaxkv.models.json_object import JsonObject
from jaxkv.models.weights.weight import EXPERT


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


def read(fields: JsonObject) -> Experts:
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


def weights(config: ModelConfig, experts: Experts, weight) -> dict[str, Any]:
    """The weights of the router, the experts and the shared expert; `weight` as in `decoder.weights`."""
    hidden, size = config.hidden_size, experts.intermediate_size
    tree = {
        "router": weight("mlp.gate.weight", experts.count, hidden, exact=True),
        "experts": feed_forward(weight, f"mlp.experts.{EXPERT}", hidden, size, experts=experts.count),
        "shared": feed_forward(weight, "mlp.shared_experts", hidden, experts.shared_intermediate_size),
    }
    if experts.scoring == "sigmoid":
        tree["router_bias"] = weight("mlp.gate.e_score_correction_bias", experts.count, exact=True)
    return tree
