"""How the kernels are built, and the words that they share."""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one value a row of a WGMMA tile."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""Layout of one value a column."""
SCALAR = plgpu.Layout.WG_SPLAT
"""Layout of what all lanes of a warp agree on."""
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
"""What a load must promise to become one bulk copy of contiguous memory."""

LOG2E = math.log2(math.e)
MASKED, EMPTY = -math.inf, float(jnp.finfo(jnp.float32).min)
"""Score of a masked key, and maximum of a row without keys: it is finite, but no finite score is below it."""

MULTIPROCESSORS, SHARED_MEMORY = 132, 232_448
"""Of an H100 or H200; bytes per CTA."""


def kernel(
    body, *, interpret: bool, auto_barriers: bool = True, reduction_bytes: int = 0, waits: bool = False, **spec
) -> Any:
    """`plgpu.kernel` with what all kernels here share.

    A GPU prepares its launch while the kernel in front of it still runs (programmatic dependent launch), which saves a
    microsecond.  So it waits for that kernel first of all, or, where its body `waits` itself, at `wait_for_previous`.

    Without `auto_barriers`, loads and stores do not wait for the other warps of the warpgroup: the kernel itself orders
    what a thread reads after what another wrote.  `reduction_bytes` of shared memory serve reductions of columns; those
    of rows stay inside a quad of lanes.
    """
    params: Any = plgpu.InterpretGPUParams(detect_races=True) if interpret else None

    @wraps(body)
    def waiting(*refs, **scratch):
        wait_for_previous(interpret=interpret)
        body(*refs, **scratch)

    return plgpu.kernel(
        body if waits else waiting,
        interpret=params,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=reduction_bytes, unsafe_no_auto_barriers=not auto_barriers
        ),
        **spec,
    )


def wait_for_previous(*, interpret: bool) -> None:
    """Waits until the kernel in front of this one has ended, as have all before it, and its stores are seen."""
    if not interpret:
        plgpu.griddepcontrol_wait()


def launch_next(ahead, *, interpret: bool) -> None:
    """Lets the CTAs of the next kernel take the places of those of this one as they end.

    `ahead`, an operand of this kernel, which has waited, is all that the next one may read before it waits: whatever
    makes it has ended.  The results of a kernel that says this may go to kernels built here alone: XLA's own are
    launched early as well, and may load what they take for constant before they wait.
    """
    del ahead  # that it is an operand is enough
    if not interpret:
        plgpu.griddepcontrol_launch_dependents()


def frozen(ref) -> jax.Array:
    """What a kernel left in `ref`, its operand that it wrote to."""
    # Without the barrier, where a scan stacks such results, rows that the kernel left alone came back as zeros (H200,
    # jax 0.11.2).
    return jax.lax.optimization_barrier(jax.freeze(ref))


def swizzled(*shape: int, dtype) -> Any:
    """Shared memory that TMA fills and wgmma reads."""
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def filled(layout, value: float, *shape: int) -> jax.Array:
    """A float32 array in registers, `value` everywhere."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def zeros(*shape: int) -> jax.Array:
    """A float32 tile of zeros in registers."""
    return filled(WGMMA, 0, *shape)


def row_of(rows: int, value: float) -> jax.Array:
    """One value a row, in registers."""
    return filled(ROW, value, rows)


def across(row: jax.Array, columns: int) -> jax.Array:
    """A row vector broadcast over the columns of a tile."""
    return jax.lax.broadcast_in_dim(row, (row.shape[0], columns), [0])


def down(column: jax.Array, rows: int) -> jax.Array:
    """A vector of one value a column broadcast over the rows of a tile."""
    return jax.lax.broadcast_in_dim(column, (rows, column.shape[0]), [1])


def multiply_add(onto: jax.Array, a, b, meanwhile: Callable[[], Any] | None = None, *, scratch=None) -> Any:
    """`onto + a @ b` in registers, drained on return, and the result of `meanwhile`, which runs beside the product.

    `a` is a register tile or shared memory, `b` shared memory.  The interpreter knows neither accumulators that start
    from registers nor a register operand: with a `scratch` tile in shared memory it computes the same in other steps.
    """
    shape = onto.shape[0], onto.shape[1]
    if scratch is None:

        def product(acc):
            acc[...] = onto
            plgpu.wgmma(acc, a, b)
            beside = meanwhile() if meanwhile else None
            return acc[...], beside

        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    if isinstance(a, jax.Array):
        scratch[...] = a
        plgpu.commit_smem()
        a = scratch

    def added(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return onto + pl.run_scoped(added, plgpu.ACC(shape, jnp.float32)), meanwhile() if meanwhile else None


def store(to, x: jax.Array) -> None:
    """Stores registers to device memory, `to`, however little or much a lane has: 4 to 16 bytes is what is fastest."""
    if hasattr(plgpu, "store"):
        plgpu.store(to, x, optimized=False)
    else:  # jax 0.11
        to[...] = x


def capped(scores: jax.Array, cap: float) -> jax.Array:
    """`cap * tanh(scores / cap)` of scores, and in scores, whose weights are powers of 2."""
    # By way of exp2: the hardware's own tanh is good to 11 bits only.
    return (1 - 2 / (1 + jnp.exp2(scores * (2 / cap)))) * (cap * LOG2E)


FOLDED = 8
"""Columns that are left of a folded tile: a lane of a WGMMA tile has two of each eight."""


def folded(op: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """The columns of a WGMMA tile brought together by `op`, 8 left: what a lane can do without asking another."""
    while x.shape[1] > FOLDED:
        half = x.shape[1] // 2
        x = op(x[:, :half], x[:, half:])
    return x


def any_positive(x: jax.Array, *, interpret: bool, warpgroup: bool = False) -> jax.Array:
    """Whether any value of a register tile is, among those that the calling warp holds: warps may get different values.

    With `warpgroup`, among all: its warps wait for each other.
    """
    if interpret:
        return (x > 0).any()
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import vector

    layout = WGMMA if x.ndim == 2 else ROW

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def asked(_, x):
        values: list[Any] = [
            vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
            for register in x.registers.flat
            for i in range(ir.VectorType(register.type).shape[0])
        ]
        others = "".join(f"setp.gt.or.f32 p, ${n}, 0f00000000, p; " for n in range(2, len(values) + 1))
        ask = "vote.sync.any.pred p, p, -1;"
        if warpgroup:
            ask = f"bar.red.or.pred p, ${len(values) + 1}, {mgpu.utils.WARPGROUP_SIZE}, p;"
            values.append(mgpu.utils.warpgroup_barrier_idx(sync=False))
        vote = f"setp.gt.f32 p, $1, 0f00000000; {others}{ask} selp.b32 $0, 1, 0, p;"
        i32 = ir.IntegerType.get_signless(32)
        found = mgpu.utils.inline_ptx(
            f"{{.reg .pred p; {vote}}}", *values, result_types=i32, has_side_effects=True, convergent=True
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return asked(x) != 0


def prefetch(run, *, interpret: bool) -> None:
    """Has contiguous device memory, `run` in whole, brought to the L2 cache by one instruction of one thread."""
    if interpret:
        return
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def ask(_, ref):
        kind = ir.MemRefType(ref.type)
        nbytes = math.prod(kind.shape) * mgpu.utils.bytewidth(kind.element_type)
        one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        instruction = f"cp.async.bulk.prefetch.L2.global [$0], {nbytes};"
        mgpu.utils.inline_ptx(instruction, mgpu.utils.memref_ptr(ref), predicate=one, has_side_effects=True)

    ask(run)
