"""A schedule for attention, computed once a step and shared by all layers."""

from dataclasses import dataclass, field
from typing import Any

import jax

from jaxkv import checks
from jaxkv.arguments import Dims, check_cache, int32, positive_int, window_within
from jaxkv.cache import KVCache
from jaxkv.dispatch import LADDER, Call, chosen, run
from jaxkv_kernels.entries import Entry, KVEntry, MLAEntry
from jaxkv_kernels.pages import Pages


@dataclass(frozen=True)
class Shape:
    """What a plan was made for; a call that brings the plan must be of the same."""

    requests: int
    columns: int
    """Of the block tables."""
    block_size: int
    num_blocks: int
    num_heads: int
    """Query heads."""
    kv_heads: int
    """Heads of the cache."""
    tokens: int
    """Query tokens a request."""
    window: int | None
    entry: Entry

    @classmethod
    def of(cls, block_tables, pages: Pages, entry: Entry, num_heads: int, tokens: int, window: int | None) -> "Shape":
        """Of a call on the cache of `pages` and `entry`."""
        requests, columns = block_tables.shape
        counts = (requests, columns, pages.block_size, pages.num_blocks, num_heads, pages.num_heads)
        return cls(*counts, tokens, window, entry)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """What `plan_decode` returns; goes through `jit` and `scan` like any pytree."""

    schedule: Any
    """The implementation's own; None where it plans nothing."""
    seq_lens: jax.Array
    """int32 [B], the lengths that it was made for; only checked calls read them."""
    shape: Shape = field(metadata={"static": True})
    implementation: str = field(metadata={"static": True})
    batch_invariant: bool = field(metadata={"static": True})


def plan_decode(
    cache: KVCache,
    block_tables,
    seq_lens,
    *,
    num_heads: int,
    tokens: int = 1,
    window: int | None = None,
    batch_invariant: bool = False,
    implementation=None,
) -> DecodePlan:
    """Divides the requests of a step among the processors of the device, for `decode_mla` and `decode_kv`.

    The schedule depends on lengths and tables, not on the layer: compute it once a step, and give it to the call of
    every layer as `plan`.  Without one, each call plans for itself.

    Args:
      cache: a cache of `MLAEntry` or `KVEntry`.
      block_tables: int32 [B, M], as the calls will get them.
      seq_lens: int32 [B], as the calls will get them, clamped as there; a plan for other lengths gives wrong results,
        which `checked` calls report.
      num_heads: query heads of the calls.
      tokens: query tokens a request of the calls.
      window: that of the calls (`decode_kv` only).
      batch_invariant: a request gets the same bits whatever else is in the batch: it is cut by its own length alone
        (into at most 8 pieces), which takes longer where requests are few or of unlike lengths.
      implementation: None (the best that takes the cache), a name, or a sequence of names.

    Returns:
      The plan.  An implementation that did not make it ignores it; with `batch_invariant` the calls run on the one that
      made it, or raise.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: no implementation can be batch-invariant on this cache.
    """
    check_cache(cache, MLAEntry, KVEntry)
    dims = Dims()
    dims.check_ints("block_tables", block_tables, "B M")
    dims.check_ints("seq_lens", seq_lens, "B")
    num_heads, pages = positive_int("num_heads", num_heads), cache.layout.pages
    if num_heads % pages.num_heads:
        raise ValueError(f"`num_heads` is {num_heads}: expected a multiple of the cache's {pages.num_heads} heads")
    if window is not None and isinstance(cache.layout.entry, MLAEntry):
        raise ValueError(f"`window` is {window}: decode_mla has none")
    options = {
        "pages": pages,
        "entry": cache.layout.entry,
        "heads": num_heads,
        "tokens": positive_int("tokens", tokens),
        "window": window_within(window, dims["M"] * pages.block_size),
        "batch_invariant": bool(batch_invariant),
    }
    arrays = {"buffer": cache.buffer, "block_tables": int32(block_tables), "seq_lens": int32(seq_lens)}
    call = Call("plan_decode", arrays, options)
    try:
        name = chosen(call, implementation)
    except NotImplementedError as error:
        if not batch_invariant:
            raise
        raise NotImplementedError(f"{error}; {_instead(call)}") from None
    shape = Shape.of(block_tables, pages, cache.layout.entry, num_heads, options["tokens"], options["window"])
    return DecodePlan(run(call, name), arrays["seq_lens"], shape, name, options["batch_invariant"])


def check_plan(plan: DecodePlan | None, shape: Shape, seq_lens) -> None:
    """ValueError unless the plan was made for calls of that shape; a checked call reports other lengths."""
    if plan is None:
        return
    if not isinstance(plan, DecodePlan):
        raise ValueError(f"`plan` is a {type(plan).__name__}: expected what plan_decode returns, or None")
    if plan.shape != shape:
        raise ValueError(f"`plan` was made for {plan.shape}: expected one for {shape}")
    if checks.checking():
        same, problem = plan.seq_lens == seq_lens, "`plan` was made for {planned}, make one for the lengths of the call"
        checks.require(same, "seq_lens", seq_lens, problem, planned=plan.seq_lens)


def _instead(call: Call) -> str:
    """What to do where no batch-invariant plan can be made."""
    able = [f"{candidate.name} ({candidate.devices})" for candidate in LADDER if not candidate.refuses(call)]
    if able:
        return f"only {' and '.join(able)} can be batch-invariant on this cache: elsewhere, plan without it"
    return (
        f"no implementation can be batch-invariant on this cache of {call.options['entry']} on any device: plan "
        f"without it, or use a cache that one of them supports"
    )
