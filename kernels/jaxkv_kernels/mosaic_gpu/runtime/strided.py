"""TMA copies from device memory with strides of its own.

Pallas describes an operand to TMA by its shape, as contiguous memory.  A tensor map, though, may have any strides that
are multiples of 16 bytes, even such that rows overlap.  `restride` gives the operand of a kernel a shape and strides of
which its copies, which index it like an array of that shape, build their tensor maps.
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def restride(ref, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Has all `copy_gmem_to_smem` of this kernel address `ref`, a whole operand, by `shape` and `strides` (elements).

    `ref` has as many axes as `shape`, and a type that no other operand has.  Only TMA copies see the strides: loads and
    bulk copies still see the operand.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda context, ref: _restride(context, ref, shape, strides))(ref)


def _restride(context, ref, shape, strides) -> None:
    # An instance of the context serves one kernel.  The copies themselves are lowered after this.
    copy, kind, transform = context.async_copy, ref.type, _transform(shape, strides)

    def async_copy(*, src_ref, gmem_transform: Any = (), **keywords):
        others = gmem_transform if isinstance(gmem_transform, tuple) else (gmem_transform,)
        before = (transform,) if src_ref.type == kind else ()
        copy(src_ref=src_ref, gmem_transform=(*before, *others), **keywords)

    context.async_copy = async_copy


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
            del leading_rank  # indexed axes come first, in the order that they have
            return self

    return Restride()
