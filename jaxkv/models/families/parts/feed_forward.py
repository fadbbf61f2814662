"""The weights of a SwiGLU feed-forward, dense or of experts."""

from jaxkv.models.weights.weight import Weight


def feed_forward(weight, prefix: str, hidden: int, size: int, experts: int = 0) -> dict[str, Weight]:
    """The weights of a feed-forward with `size` inner values; with `experts`, a stack of that many."""
    return {
        "gate": weight(f"{prefix}.gate_proj.weight", size, hidden, experts=experts),
        "up": weight(f"{prefix}.up_proj.weight", size, hidden, experts=experts),
        "down": weight(f"{prefix}.down_proj.weight", hidden, size, experts=experts),
    }
