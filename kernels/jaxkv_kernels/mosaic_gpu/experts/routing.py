"""The experts of each token, and their weights: a warp per token.

The lanes of a warp have a token's logits in registers: lane l has those of experts l, l + 32, l + 64, ...  Timeline of
a warp:

    load | softmax or sigmoids | keys of the scores, in the order of int32 | keep the best groups | per choice: the
    largest key, the first expert that has it, its score; that expert is out | normalise, store

What bounds it: latency, that of two reductions over the warp per choice.
Barriers.  None.
Budget.  No shared memory.  Registers: three per 32 experts, and one per group.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import SelectExperts
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.xla import experts as xla

WARPS = 4
"""Warps, and tokens, of a CTA."""


def select_experts(logits, bias, **options):
    """The choices [T, K] of tokens with logits [T, E], and their weights."""
    return _select(logits, bias, interpret=bool(interpreting.value), **options)


OPTIONS = "per_token", "scoring", "groups", "groups_per_token", "normalize", "scale"


@partial(jax.jit, static_argnames=(*OPTIONS, "interpret"))
def _select(logits, bias, *, interpret, **options):
    tokens, chosen = len(logits), options["per_token"]
    shapes = [jax.ShapeDtypeStruct((tokens, chosen), dtype) for dtype in (jnp.int32, jnp.float32)]
    if not tokens:
        return tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)

    def body(*refs):
        first = lax.axis_index("cta") * WARPS
        if interpret:
            *operands, ids_ref, weights_ref = refs
            all_logits, all_bias = (*(ref[...] for ref in operands), None)[:2]
            found = xla.select_experts(SelectExperts(logits=all_logits, bias=all_bias, **options))
            for token in range(WARPS):

                @pl.when(first + token < tokens)
                def _(row=first + token):
                    for ref, values in zip((ids_ref, weights_ref), found, strict=True):
                        ref[row] = values[row]

            return

        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(refs), SCALAR))
        def select(_, refs, first):
            from jaxkv_kernels.mosaic_gpu.experts import routing_lanes

            routing_lanes.select(refs, first.registers.item(), tokens, logits.shape[1], **options)

        select(list(refs), first)

    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        kernel_name="experts_selected",
        out_type=shapes,
        grid=(-(-tokens // WARPS),),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
    )(logits, *[bias] * (bias is not None))
