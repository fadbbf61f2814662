"""Who moves entries: lanes on the GPU, arrays in the interpreter."""

from typing import Any

from jaxkv_kernels.mosaic_gpu.entries.fields import Field
from jaxkv_kernels.mosaic_gpu.entries.teams import Teams


def mover(teams: Teams) -> Any:
    """`Lanes`, or in the interpreter its counterpart."""
    if teams.interpret:
        from jaxkv_kernels.mosaic_gpu.entries.interpreted import InterpretedLanes

        return InterpretedLanes(teams)
    from jaxkv_kernels.mosaic_gpu.entries.lanes import Lanes

    return Lanes(teams)


def step_of(scale_ref) -> int:
    """What the head is multiplied by to index scales [H], or [1] for all heads."""
    return int(scale_ref.shape[0] > 1)


def scale_of(field: Field, scales) -> Any:
    """The caller's scale of a field, from those of all values, or one for all; None if it has none."""
    return scales[min(field.number, len(scales) - 1)] if field.scaled else None
