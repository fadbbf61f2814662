"""The name and shape of a checkpoint's weight."""

from collections.abc import Iterator
from dataclasses import dataclass

LAYER, EXPERT = "{layer}", "{expert}"
NO_LAYERS = range(0)


@dataclass(frozen=True)
class Weight:
    """One weight of a checkpoint, or a stack of one per layer (and per expert).

    In a stack's `name`, `LAYER` and `EXPERT` stand for the numbers.
    """

    name: str
    shape: tuple[int, ...]
    """The shape of one weight of the stack."""
    layers: range = NO_LAYERS
    experts: int = 0
    exact: bool = False
    """Whether the weight is kept in float32 whatever the model's dtype, because routing and scoring use float32."""

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape of the whole stack."""
        return tuple(n for n in (len(self.layers), self.experts) if n) + self.shape

    def places(self) -> Iterator[tuple[str, dict[int, int]]]:
        """The names of all weights of the stack, each with its indices on the axes of the stack, by axis."""
        for layer in self.layers or [None]:
            for expert in range(self.experts) if self.experts else [None]:
                name, start = self.name, {}
                if layer is not None:
                    name, start[0] = name.replace(LAYER, str(layer)), layer - self.layers.start
                if expert is not None:
                    axis = int(layer is not None)
                    name, start[axis] = name.replace(EXPERT, str(expert)), expert
                yield name, start

    def all_names(self) -> Iterator[str]:
        """The names of all weights of the stack."""
        return (name for name, _ in self.places())
