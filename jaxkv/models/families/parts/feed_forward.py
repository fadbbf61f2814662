"""The weights of a SwiGLU feed-forward, which an expert is, too."""

from jaxkv.models.weights.weight import Weight


def feed_forward(weight, prefix: str, hidden: int, size: int, experts: int = 0) -> dict[str, Weight]:
    """Of `hidden` values, `size` inner ones; of that many experts, stacked."""
    return {
        "gate": weight(f"{prefix}.gate_proj.weight", size, hidden, experts=experts),
        "up": weight(f"{prefix}.up_proj.weight", size, hidden, experts=experts),
        # [hidden, experts, size]: the inner values of all experts are one row.
        "down": weight(f"{prefix}.down_proj.weight", hidden, size, experts=experts, expert_axis=1),
    }
