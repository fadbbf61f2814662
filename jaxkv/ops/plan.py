"""Plans of attention: schedules that are computed once per step and shared by the calls of all layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache, float_dtype, int32, positive_int, static_bool
from jaxkv.dispatch import BACKENDS, Implementations, choose, run_kernel
from jaxkv.ops.masking import mask_fields
from jaxkv.ops.operation import Operation
from jaxkv.ops.ragged_queries import Arrangement, Groups, arrange
from jaxkv.ops.samples import HEADS, PAGED
from jaxkv.ops.shared_prefix import SharedPrefixes, shared_prefixes
from jaxkv_kernels import calls
from jaxkv_kernels.formats.entries import Entry, KVEntry, MLAEntry
from jaxkv_kernels.masks import Mask


@dataclass(frozen=True)
class Shape:
    """The sizes and query dtype that a plan is made for.  A call that uses the plan must have the same ones."""

    requests: int
    columns: int
    """Columns of the block tables (M)."""
    block_size: int
    num_blocks: int
    num_heads: int
    """Query heads."""
    kv_heads: int
    """Heads of the cache."""
    q_len: int
    """Query tokens per request."""
    window: int | None
    ahead: int | None
    """Both as in `jaxkv_kernels.calls.DecodeCall`."""
    tree: int | None
    """How many new tokens a `tree_mask` has columns for; None without one."""
    mask: Mask | None
    entry: Entry
    dtype: str
    """The dtype of the queries."""

    @classmethod
    def of(cls, call: calls.PlanDecode | calls.DecodeCall[Any]) -> "Shape":
        """The shape of a call that is arranged for kernels."""
        requests, columns = call.block_tables.shape
        return cls(
            requests=requests,
            columns=columns,
            block_size=call.pages.block_size,
            num_blocks=call.pages.num_blocks,
            num_heads=call.heads,
            kv_heads=call.pages.num_heads,
            q_len=call.q_len,
            window=call.window,
            ahead=call.ahead,
            tree=None if call.tree is None else call.tree.seen.shape[-1],
            mask=call.mask,
            entry=call.entry,
            dtype=str(call.dtype),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The result of `plan_decode`: a pytree that can be passed through `jit` and `scan`."""

    schedule: Any
    """A pytree whose type depends on the implementation; None if the implementation has nothing to plan."""
    seq_lens: jax.Array
    """int32 [B], the lengths that the plan was made for.  Only calls under `checked` read them."""
    groups: Groups | None
    """The division of ragged query tokens; None if the calls have as many query tokens for each request."""
    prefix: "DecodePlan | None"
    """The plan of attention to prefixes that requests share; None if there are none."""
    shape: Shape = field(metadata={"static": True})
    implementation: str = field(metadata={"static": True})
    batch_invariant: bool = field(metadata={"static": True})


def plan_decode(
    cache: KVCache[MLAEntry | KVEntry],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    num_heads: int,
    q_len: int = 1,
    window: int | tuple[int, int] | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    tree_mask: ArrayLike | None = None,
    cu_q_lens: ArrayLike | None = None,
    total: int | None = None,
    prefix_tables: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    prefix_of: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    batch_invariant: bool = False,
    implementation: Implementations | None = None,
) -> DecodePlan:
    """Divides the work of a step among the processors of the device, for `decode_mla` and `decode_kv`.

    The schedule depends on lengths and tables, not on the layer: compute it once per step, and pass it to the call of
    every layer as `plan`.  Each call without a plan makes its own.

    Args:
      cache: a cache of `MLAEntry` or `KVEntry`.
      block_tables: int32 [B, M], as passed to the calls.
      seq_lens: int32 [B], as passed to the calls; clamped in the same way.  If a call has other lengths, its result is
        wrong, and only `checked` reports the mismatch.
      num_heads: query heads of the calls.
      q_len: query tokens per request of the calls.
      window: the `window` of the calls.
      causal: the `causal` of the calls.
      mask: the `mask` of the calls.
      tree_mask: the `tree_mask` of the calls, of which only the shape matters.
      cu_q_lens: the `cu_q_lens` of the calls, int32 [B + 1], as in `decode_mla`; `q_len` must then be 1, its default.
      total: static int, the query tokens T of calls with `cu_q_lens`.
      prefix_tables: the `prefix_tables` of the calls, and so are `prefix_lens` and `prefix_of`, as in `decode_mla`.
      prefix_lens: as passed to the calls.
      prefix_of: as passed to the calls.
      dtype: dtype of the queries of the calls: bfloat16, float16 or float32.  By default that of the entries, or
        bfloat16 if the entries are quantised, to which e4m3 queries are converted.  Not every implementation supports
        every dtype.
      batch_invariant: whether the result of a request must have the same bits whatever the rest of the batch is.  Each
        request is then split by its own length alone, into at most 8 splits, which is slower if requests are few or
        differ in length.
      implementation: None (the best that supports the cache and the queries), a name, or a sequence of names.

    Returns:
      The plan.  A call that runs on a different implementation ignores the plan.  With `batch_invariant`, calls run on
      the implementation that made the plan, or raise ValueError or NotImplementedError.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: none of the requested implementations supports the cache and the queries, or, with
        `batch_invariant`, can be batch-invariant on them.
    """
    check_cache(cache, MLAEntry, KVEntry)
    entry = cache.layout.entry
    if (cu_q_lens is None) != (total is None):
        raise ValueError(f"`total` is {total!r}: expected the number of query tokens with `cu_q_lens`, otherwise None")
    num_heads, pages = positive_int("num_heads", num_heads), cache.layout.pages
    known = {"Hq": (num_heads, "`num_heads`")}
    if total is not None:
        known["T"] = (positive_int("total", total), "`total`")
    dims = Dims(**known)
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    if num_heads % pages.num_heads:
        raise ValueError(f"`num_heads` is {num_heads}: expected a multiple of the cache's {pages.num_heads} heads")
    q_len = positive_int("q_len", q_len)
    if cu_q_lens is not None and q_len != 1:
        raise ValueError(f"`q_len` is {q_len}: expected 1, because `cu_q_lens` has the numbers of query tokens")
    tokens = q_len if cu_q_lens is None else None
    requests: dict[str, Any] = {"pages": pages, "block_tables": int32(block_tables), "seq_lens": int32(seq_lens)}
    masks: dict[str, Any] = {"window": window, "causal": causal, "mask": mask, "tree_mask": tree_mask}
    call = calls.PlanDecode(
        buffer=cache.buffer,
        **requests,
        **mask_fields(dims, requests, tokens, cu_q_lens=cu_q_lens, **masks),
        trailing=None,
        entry=entry,
        heads=num_heads,
        q_len=q_len,
        dtype=float_dtype("dtype", entry.input_dtype if dtype is None else dtype),
        batch_invariant=static_bool("batch_invariant", batch_invariant),
    )
    prefixes = shared_prefixes(dims, prefix_tables, prefix_lens, prefix_of, window, mask)
    plan = _planned(call, arrange(call, dims, q_len=q_len, cu_q_lens=cu_q_lens), implementation)
    if prefixes is None:
        return plan
    total = dims["B"] * q_len if total is None else total
    call, arrangement, _ = prefixes.arranged(call, heads=num_heads, q_len=q_len, cu_q_lens=cu_q_lens, total=total)
    return replace(plan, prefix=_planned(call, arrangement, implementation))


def _planned(call: calls.PlanDecode, arrangement: Arrangement, implementation) -> DecodePlan:
    """The plan of a call that is to be arranged in this way."""
    lengths = call.seq_lens
    call = arrangement.applied(call)
    try:
        backend = choose(call, implementation)
    except NotImplementedError as error:
        if not call.batch_invariant:
            raise
        raise NotImplementedError(f"{error}; {_instead(call)}") from None
    return DecodePlan(
        schedule=run_kernel(backend, call),
        seq_lens=lengths,
        groups=arrangement.groups,
        prefix=None,
        shape=Shape.of(call),
        implementation=backend.name,
        batch_invariant=call.batch_invariant,
    )


def prefix_plan(plan: DecodePlan | None, prefixes: SharedPrefixes | None) -> DecodePlan | None:
    """The part of `plan` for prefixes; ValueError if only one of the call and the plan has them."""
    if not isinstance(plan, DecodePlan):
        return None
    if (plan.prefix is None) != (prefixes is None):
        made, expected = ("without", "with") if plan.prefix is None else ("with", "without")
        raise ValueError(f"`plan` was made {made} `prefix_tables`: expected one {expected} them, like this call")
    return plan.prefix


def groups_of(plan: DecodePlan | None, total: int | None) -> Groups | None:
    """The groups of query tokens of `plan`, for a call with `total` ragged query tokens, or (None) with others.

    ValueError if the plan is for calls of the other kind, or for another number of query tokens.
    """
    if not isinstance(plan, DecodePlan):
        return None
    planned = None if plan.groups is None else plan.groups.places.shape[0]
    if planned != total:
        raise ValueError(
            f"`plan` was made with `total` {planned}: expected {total}, the number of query tokens of this call"
            + (", which has no `cu_q_lens`" if total is None else "; pass `cu_q_lens` and `total` to plan_decode")
        )
    return plan.groups


def check_plan(plan: DecodePlan | None, shape: Shape, seq_lens) -> None:
    """ValueError unless `plan` is None or was made for calls of `shape` and, under `checked`, for these lengths."""
    if plan is None:
        return
    if not isinstance(plan, DecodePlan):
        raise ValueError(
            f"`plan` is a {type(plan).__name__}: expected a DecodePlan, which plan_decode returns, or None"
        )
    if plan.shape != shape and replace(plan.shape, dtype=shape.dtype) == shape:
        raise ValueError(
            f"`plan` was made for queries of {plan.shape.dtype}, but those of this call are of {shape.dtype}: pass "
            f"`dtype={shape.dtype!r}` to plan_decode, or convert the queries"
        )
    if plan.shape != shape:
        raise ValueError(f"`plan` was made for {plan.shape}: expected one for {shape}")
    if data_checks.checking():
        same, problem = plan.seq_lens == seq_lens, "`plan` was made for {planned}: make one for the lengths of the call"
        data_checks.require(same, "seq_lens", seq_lens, problem, planned=plan.seq_lens)


def _instead(call: calls.PlanDecode) -> str:
    """Advice for the error message if no batch-invariant plan can be made."""
    able = [
        f"{backend.name} ({backend.devices})" for backend in BACKENDS if not backend.kernels().unsupported_reasons(call)
    ]
    if able:
        only = f"only {' and '.join(able)} can be batch-invariant on this cache"
        return f"{only}: on other devices, call plan_decode without `batch_invariant`"
    return (
        f"no implementation can be batch-invariant on this cache of {call.entry} on any device: plan "
        f"without it, or use a cache that one of them supports"
    )


def run_planned[E: Entry](
    call: calls.DecodeCall[E],
    arrangement: Arrangement,
    plan: DecodePlan | None,
    implementation: str | Sequence[str] | None,
) -> tuple[jax.Array, jax.Array]:
    """The results (out, lse) of an attention call, whose queries are in the caller's order.

    The implementation that runs the call gets the schedule of `plan` if it made the plan.  Otherwise, it makes its own.

    Raises:
      ValueError: `plan` was made for calls of another shape, or it is batch-invariant and the call would run on another
        implementation.
    """
    arranged = arrangement.applied(call)
    check_plan(plan, Shape.of(arranged), call.seq_lens)
    if plan is not None and plan.batch_invariant and implementation is None:
        implementation = plan.implementation
    backend = choose(arranged, implementation)
    if plan is not None and plan.implementation == backend.name:
        arranged = replace(arranged, plan=plan.schedule)
    elif plan is not None and plan.batch_invariant:
        raise ValueError(
            f"`plan` is batch-invariant on {plan.implementation} only: `implementation={backend.name!r}` cannot use it"
        )
    return arrangement.results(*run_kernel(backend, arranged))


def _sample(cache):
    return (cache, *PAGED), {"num_heads": HEADS}


OPERATIONS = (Operation(plan_decode, _sample, entries=(MLAEntry, KVEntry)),)
