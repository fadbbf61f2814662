"""The name and shape of a checkpoint's weight."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxkv.models.weights.safetensors_file import Index

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
    lossless: bool = False
    """Whether the weight is kept as the checkpoint has it, because `float32_linear` multiplies it: in the model's dtype
    if it is stored in that, and otherwise in float32."""
    optional: bool = False
    """Whether a checkpoint may lack the weight; the tree then has None in its place."""
    expanded: bool = False
    """Whether the weight is expanded to the model's dtype if it is in float8, because it is not only multiplied."""

    below: int = 0
    """For a table of integers from 0 to `below` - 1, which is kept in int32; 0 for floats."""
    centred: bool = False
    """Whether the checkpoint stores the weight minus 1, as for some norms.  The sum is kept in float32, because bf16
    has few digits for what is added to 1."""

    packed: tuple[int, int] | None = None
    """(first, total) if the checkpoint has one tensor [experts, total, ...] for the whole stack, of which this weight
    is the rows from `first` on; None if it has a tensor per expert.
    """
    step: int = 1
    """Of these rows, every `step`-th one is the weight's."""
    swapped: bool = False
    """Whether the tensor of the whole stack is [experts, columns, rows], unless it is in MXFP4."""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor of the checkpoint; one in MXFP4 has this shape as if it were not `swapped`."""
        if self.packed is None:
            return self.shape
        shape = self.packed[1], *self.shape[1:]
        return (self.experts, *(shape[::-1] if self.swapped else shape))

    @property
    def may_stay_fp8(self) -> bool:
        """Whether the model can use the weight in float8 with a scale per tile."""
        return len(self.tensor_shape) == 2 and not (self.exact or self.lossless or self.expanded or self.below)

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape of the whole stack."""
        return (self.experts, *self.shape) if self.experts else self.shape

    def all_names(self) -> Iterator[str]:
        """The names of the checkpoint's tensors, by expert; only one if experts are packed."""
        if not self.experts or self.packed is not None:
            yield self.name
            return
        for expert in range(self.experts):
            yield self.name.replace(EXPERT, str(expert))

    def pieces(self) -> Iterator[tuple[int, str]]:
        """Each expert, and the name of the tensor that has its weight; expert 0 if the weight is not a stack."""
        if self.packed is None:
            return enumerate(self.all_names())
        return ((expert, self.name) for expert in range(self.experts))

    def place(self, expert: int, index: Index) -> Index:
        """Where a part of the weight of an expert lies in the tensor that has it."""
        if self.packed is None:
            return index
        (rows, *others), (first, _) = index, self.packed
        rows = slice(first + self.step * rows.start, first + self.step * (rows.stop - 1) + 1)
        return slice(expert, expert + 1), rows, *others
