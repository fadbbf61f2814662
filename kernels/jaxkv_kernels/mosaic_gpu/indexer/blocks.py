"""Device-side: the blocks of a request, 32 at a time, one per lane.

A window of the block table is loaded while the one before it is used, so that no tile waits for these loads.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.ptx.fragments import array, elements, splat
from jaxkv_kernels.mosaic_gpu.ptx.inline import i32, ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

WINDOW = 32
_LANES: Any = plgpu.Layout.WG_STRIDED((128,), 1)


@dataclass(frozen=True)
class BlockWindows:
    """A block table [B, M] in device memory."""

    ref: Any
    interpret: bool

    def load(self, request, window):
        """Starts to load window number `window` of a request's blocks; they are -1 past the end of the table."""
        if self.interpret:
            return request, window
        width = self.ref.shape[1]

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SCALAR, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((128,), jnp.dtype(jnp.int32), layout=_LANES),
        )
        def load(_, ref, request, window):
            found = ptx(
                "{ .reg .pred p; .reg .b64 a, b; .reg .b32 i; mov.u32 i, %laneid; "
                f"mad.lo.s32 i, $3, {WINDOW}, i; setp.lt.u32 p, i, {width}; mul.wide.u32 a, $2, {4 * width}; "
                "mul.wide.u32 b, i, 4; add.s64 a, a, b; add.s64 a, a, $1; mov.b32 $0, -1; @p ld.global.b32 $0, [a]; }",
                mgpu.utils.memref_ptr(ref),
                request.registers.item(),
                window.registers.item(),
                result_types=i32(),
                has_side_effects=True,
            )
            return array([[found]], _LANES)

        return load(self.ref, request, window)

    def block(self, loaded, i):
        """Block number `i` of the window that `load` returned."""
        if self.interpret:
            request, window = loaded
            column = window * WINDOW + i
            inside = column < self.ref.shape[1]
            return jnp.where(inside, self.ref[request, jnp.where(inside, column, 0)], -1)

        @plgpu.inline_mgpu(
            arg_types=(_LANES, SCALAR), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)
        )
        def pick(_, blocks, i):
            code, (held,) = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", elements(blocks)
            found = ptx(code, held, i.registers.item(), result_types=i32(), has_side_effects=True, convergent=True)
            return splat(found)

        return pick(loaded, i)
