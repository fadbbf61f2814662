"""TMA copies from device memory with strides of its own.

Pallas describes an operand to TMA by its shape, as contiguous memory.  A tensor map, though, may have any strides that
are multiples of 16 bytes, even strides with which rows overlap.  `restride` gives an operand of a kernel another shape
and other strides.  Copies then index the operand like an array of that shape, and their tensor maps have those strides.
"""

from dataclasses import replace
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def restride(ref, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Makes all `copy_gmem_to_smem` of this kernel address `ref`, a whole operand, by `shape` and `strides` (elements).

    `ref` must have as many axes as `shape`.  Copies from it are recognized by its type (shape and dtype), which no
    other operand that is copied may have: lowering such a kernel raises ValueError.  Loads and bulk copies are not
    affected: they address the operand as it is.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda context, ref: _restride(context, ref, shape, strides))(ref)


def _restride(context, ref, shape, strides) -> None:
    # A context belongs to one kernel, and the kernel's copies are lowered after this.
    copy, kind, transform = context.async_copy, ref.type, _transform(shape, strides)
    operand = None  # `ref` stands for it here; copies have the operand itself

    def async_copy(*, src_ref, gmem_transform: Any = (), **keywords):
        nonlocal operand
        others = gmem_transform if isinstance(gmem_transform, tuple) else (gmem_transform,)
        if src_ref.type == kind:
            operand = src_ref if operand is None else operand
            if src_ref != operand:
                raise ValueError(
                    f"copies from two operands of type {kind}, one of which has strides {strides} of its own: give the "
                    "other one another shape or dtype, because the operand of a copy is recognized by its type"
                )
            others = (transform, *map(_rounding_down, others))
        copy(src_ref=src_ref, gmem_transform=others, **keywords)

    context.async_copy = async_copy


def _rounding_down(transform):
    """A transform that ignores columns past the last whole tile, which no copy in such tiles includes."""
    from jax.experimental.mosaic.gpu import launch_context

    if isinstance(transform, launch_context.TileTransform):
        return replace(transform, rounding=launch_context.Rounding.DOWN)
    return transform


def _transform(new_shape, new_strides):
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import memref

    class Restride(mgpu.MemRefTransform):
        """The operand in another shape, with other strides; indices and slices are given in that shape already."""

        def apply(self, ref):
            kind = ir.MemRefType(ref.type)
            layout = ir.StridedLayoutAttr.get(0, new_strides)
            result = ir.MemRefType.get(new_shape, kind.element_type, layout, kind.memory_space)
            return memref.reinterpret_cast(
                result, ref, [], [], [], static_offsets=[0], static_sizes=new_shape, static_strides=new_strides
            )

        def transform_index(self, idx):
            return tuple(idx)

        def transform_shape(self, shape):
            return tuple(shape)

        def transform_gmem_shape(self, shape):
            del shape
            return new_shape

        def transform_strides(self, strides):
            del strides
            return new_strides

        def batch(self, leading_rank):
            del leading_rank  # the axes of `shape` include those that are indexed, which come first
            return self

    return Restride()
