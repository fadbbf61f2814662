"""`grouped_swiglu` of a single token: a warp per row of weights, without tensor cores.

Reading weights bounds it: 138 MB per layer of DeepSeek-V2-Lite.  Rows are divided evenly among all warps, which work
tiles of 64 rows (`products.py`) are not, and one kernel adds up what the experts return.  Timeline of a warp:

    gate and up    wait for the previous kernel; per row: load both rows | multiply by the token, sum over lanes, store
    down           load the rows of two experts while CTAs of the previous kernel are still running; wait for it; per
                   expert: load the row of the next but one, multiply; sum over lanes, store

The shared expert's rows come first.  The token, and the results of the first kernel, are read from the L1 cache.

What bounds it: bytes in flight.  16 warps with 16 vectors of 16 bytes per lane have 128 KiB in flight.
Barriers.  None.
Budget.  No shared memory.  Registers: 128 per lane, of which 64 or 72 hold weights.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.experts.unsupported import inner_parts
from jaxkv_kernels.mosaic_gpu.runtime.hopper import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents, wait_for_previous
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.xla.experts import gated

WARPGROUPS = 4


def swiglu_of_one(x, gate, up, down, *, limit: float | None = None) -> jax.Array:
    """The feed-forward of a token x [1, D] that is not a mixture: gate and up [I, D], down [D, I]; returns [1, D].

    It is computed as an expert of all tokens, in parts of up to 2,048 of its values.
    """
    parts = inner_parts(len(gate))
    experts = jnp.zeros((1, 0), jnp.int32)
    first = [matrix.reshape(parts, -1, x.shape[1]) for matrix in (gate, up)]
    # No expert is chosen, so that their matrices, which must not be empty, are not read.
    matrices = *first, down.reshape(parts, x.shape[1], -1)
    options = {"limit": limit, "interpret": bool(interpreting.value)}
    return one_token(x, experts, experts, *matrices, (gate, up, down), **options)


@partial(jax.jit, static_argnames=("limit", "interpret"))
def one_token(x, experts, shares, gate, up, down, shared, *, limit: float | None, interpret: bool) -> jax.Array:
    """The sum of the experts of a token.

    Args:
      x: [1, D], bfloat16 or float16.
      experts: int32 [1, K]; ids outside [0, E) are skipped.
      shares: float32 [1, K].
      gate: [E, I, D], the dtype of `x`, like all weights.
      up: [E, I, D].
      down: [E, D, I].
      shared: gate and up [n * I, D] and down [D, n * I] of an expert of all tokens, or None.
      limit: as in `grouped_swiglu`.
      interpret: whether the kernels are interpreted.

    Returns:
      [1, D].
    """
    (count, inner, width), choices = gate.shape, experts.size
    more = len(shared[0]) // inner if shared else 0
    first, second = (shared[:2], shared[2:]) if shared else ((), ())
    sizes = {"choices": choices, "experts": count, "more": more, "inner": inner, "width": width}
    options = {"interpret": interpret, "dtype": x.dtype, "sizes": sizes}
    if not choices:  # kernels have no empty operands
        experts, shares = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.float32)
    hidden = _run(
        "gate_up", _gate_up, x, experts, gate, up, *first, results=(choices + more) * inner, limit=limit,
        following=(shares, down, *second), **options,
    )  # fmt: skip
    return _run("down", _down, hidden, experts, shares, down, *second, results=width, **options).reshape(1, width)


def _run(name, interpreted, *operands, results, following=(), dtype, sizes, interpret, **limit) -> jax.Array:
    """Runs a kernel, whose results are a vector; `following` are operands of the next one, which reads them early."""

    def body(*refs):
        refs, more, out_ref = refs[: len(operands)], refs[len(operands) : -1], refs[-1]
        if interpret:
            out_ref[...] = interpreted(*(ref[...] for ref in refs), **sizes, **limit).astype(dtype)
            return
        if following:
            wait_for_previous(interpret=interpret)
            pdl_launch_dependents((*refs[1:], *more), interpret=interpret)

        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * (len(refs) + 1), SCALAR))
        def multiply(_, refs, cta):
            from jaxkv_kernels.mosaic_gpu.one_token import experts_lanes

            lanes = getattr(experts_lanes, name)
            lanes(refs, cta.registers.item(), dtype=str(dtype), **sizes, **limit)

        multiply([*refs, out_ref], lax.axis_index("cta"))

    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        waits=True,
        kernel_name=f"experts_of_one_{name}",
        out_type=jax.ShapeDtypeStruct((results,), dtype),
        grid=(1 if interpret else MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=1 if interpret else WARPGROUPS,
        thread_name="wg",
    )(*operands, *following)


def _gate_up(x, chosen, gate, up, *shared, choices, experts, more, inner, width, limit):
    """What the first kernel stores, for the interpreter."""
    del width
    ids = jnp.clip(chosen[0, :choices], 0, experts - 1)

    def product(matrix, other):
        rows = jnp.concatenate([*other, matrix[ids].reshape(-1, x.shape[1])])
        return jnp.einsum("d,id->i", x[0], rows, preferred_element_type=jnp.float32)

    return gated(product(gate, shared[:1]), product(up, shared[1:]), limit, None)


def _down(hidden, chosen, shares, down, *shared, choices, experts, more, inner, width):
    """What the second kernel stores, for the interpreter."""
    del width
    chosen, shares = chosen[0, :choices], shares[0, :choices]
    known, ids = (chosen >= 0) & (chosen < experts), jnp.clip(chosen, 0, experts - 1)
    parts = hidden.reshape(-1, inner)
    results = jnp.einsum("ki,kdi->kd", parts[more:], down[ids], preferred_element_type=jnp.float32)
    total = jnp.where(known[:, None], results * shares[:, None], 0).sum(axis=0)
    for matrix in shared:
        total += jnp.einsum("i,di->d", hidden[: more * inner], matrix, preferred_element_type=jnp.float32)
    return total
