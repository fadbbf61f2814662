"""Selects what moves entries: lanes on the GPU, arrays in the interpreter."""

from typing import Any

from jaxkv_kernels.mosaic_gpu.entries.fields import Field
from jaxkv_kernels.mosaic_gpu.entries.teams import Teams


def mover(teams: Teams) -> Any:
    """`Lanes`, or its counterpart in the interpreter."""
    if teams.interpret:
        from jaxkv_kernels.mosaic_gpu.entries.interpreted import InterpretedLanes

        return InterpretedLanes(teams)
    from jaxkv_kernels.mosaic_gpu.entries.lanes import Lanes

    return Lanes(teams)


def step_of(scale_ref) -> int:
    """The step from one head's scale to the next: 1 in scales [H], 0 in scales [1], which all heads share."""
    return int(scale_ref.shape[0] > 1)


def scale_of(field: Field, scales) -> Any:
    """The caller's scale of a field; None if it has none.  `scales` has one per value, or a single one for all."""
    return scales[min(field.number, len(scales) - 1)] if field.scaled else None
