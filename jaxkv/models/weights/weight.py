"""The name and shape of a checkpoint's weight."""

from collections.abc import Iterator
from dataclasses import dataclass

LAYER, EXPERT = "{layer}", "{expert}"
NO_LAYERS = range(0)


@dataclass(frozen=True)
class Weight:
    """A weight of the checkpoint, or a stack of one per layer (and per expert); `name` has placeholders for numbers."""

    name: str
    shape: tuple[int, ...]
    """Of one of them."""
    layers: range = NO_LAYERS
    experts: int = 0
    expert_axis: int = 0
    """Where a layer's array has the axis of experts."""
    exact: bool = False
    """Kept in float32 whatever the model's dtype: routing and scoring are done in float32."""

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Of all of them."""
        shape = list(self.shape)
        if self.experts:
            shape.insert(self.expert_axis, self.experts)
        return (len(self.layers), *shape) if self.layers else tuple(shape)

    def names(self, layer: int) -> Iterator[str]:
        """The names of a layer's pieces: one, or one an expert."""
        name = self.name.replace(LAYER, str(layer))
        return (name.replace(EXPERT, str(expert)) for expert in range(self.experts)) if self.experts else iter([name])

    def all_names(self) -> Iterator[str]:
        """The names of the pieces of all layers."""
        return (name for layer in self.layers or [0] for name in self.names(layer))
