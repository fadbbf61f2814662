"""The name and shape of a checkpoint's weight."""

from collections.abc import Iterator
from dataclasses import dataclass

EXPERT = "{expert}"


@dataclass(frozen=True)
class Weight:
    """One weight of a checkpoint, or a stack of one per expert of a layer.

    In a stack's `name`, `EXPERT` stands for the number of the expert.
    """

    name: str
    shape: tuple[int, ...]
    """The shape of one weight of the stack."""
    experts: int = 0
    exact: bool = False
    """Whether the weight is kept in float32 whatever the model's dtype, because routing and scoring use float32."""

    expanded: bool = False
    """Whether the weight is expanded to the model's dtype if it is in float8, because it is not only multiplied."""

    @property
    def may_stay_fp8(self) -> bool:
        """Whether the model can use the weight in float8 with a scale per tile."""
        return len(self.shape) == 2 and not self.exact and not self.expanded

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape of the whole stack."""
        return (self.experts, *self.shape) if self.experts else self.shape

    def all_names(self) -> Iterator[str]:
        """The names of all weights of the stack, by expert."""
        if not self.experts:
            yield self.name
        for expert in range(self.experts):
            yield self.name.replace(EXPERT, str(expert))
