"""The interface between operations and kernels: a record per call, and the methods that an implementation has.

An operation checks its arguments and makes one record (`Call`) of everything that a kernel receives.  `jaxkv.dispatch`
passes it to the first implementation (`Kernels`) that supports it.  A record is a pytree: arrays are leaves, and sizes,
strides, entries and options are static, so that it can be an argument of a function under `jax.jit`.

Letters in shapes are those of the public operations: B requests, Q query tokens per request, T tokens, Hq query heads,
H heads of the cache, M columns of a block table, R values of a latent, P of a rotary part, D of a key, Dv of a value.
All integer arrays are int32.  Running sums never fall (`jaxkv.checks.running_sum`), but lengths, layers, slots and
block ids may be out of range: kernels clamp lengths and mask the others, as "Blocks outside the cache" in
`jaxkv/ops/README.md` states.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self, dataclass_transform

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Buffer, Pages, slots_for, sums_from_0
from jaxkv_kernels.extra_slots import ExtraSlots
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.hot_rows import HotMap
from jaxkv_kernels.masks import Mask, Tree
from jaxkv_kernels.tile_scaled import TileScaled

STATIC = {"static": True}
"""Metadata of a field that is not an array."""


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(field,))
def record[C](cls: type[C]) -> type[C]:
    """Makes `cls` a frozen dataclass that is a pytree and is created by keyword arguments."""
    return jax.tree_util.register_dataclass(dataclass(frozen=True, eq=False, kw_only=True)(cls))


class Call[Result]:
    """Base class of the records.  `Result` is what kernels return for it."""

    operation: ClassVar[str]
    """The name of the public function, and of the method of `Kernels`."""

    def run_on(self, kernels: "Kernels") -> Result:
        """The result of the implementation's kernel."""
        raise NotImplementedError

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries that the kernel interprets, one per cache."""
        return ()


@record
class BlocksCall[Result](Call[Result]):
    """A call on the buffer of a cache.  Its kernel interprets no entries, unless a subclass says which."""

    buffer: Buffer
    """The whole buffer of the cache.  Only entries of keys and values may have two arrays."""
    pages: Pages = field(metadata=STATIC)


@record
class CacheCall[Result, E: Entry](BlocksCall[Result]):
    """A call on the entries of one layer of a cache."""

    layer: jax.Array
    """A scalar.  If it is outside the cache, nothing is written, and no token is seen."""
    entry: E = field(metadata=STATIC)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)


# New tokens.  Each write returns the buffer.


@record
class WriteMLA(CacheCall[Buffer, MLAEntry]):
    """Stores the latents and rotary keys of new tokens."""

    operation = "write_mla"
    buffer: jax.Array
    kv_c: jax.Array
    """[T, R]."""
    k_pe: jax.Array
    """[T, P]."""
    slot_mapping: jax.Array
    """[T]; slots outside the cache are skipped."""
    kv_scale: jax.Array | None
    """float32 scalar; None if the format has no scale."""
    cos_sin: jax.Array | None
    """float32 [T, P], the cosines, then the sines by which `k_pe` is rotated."""
    interleaved: bool = field(metadata=STATIC)

    def run_on(self, kernels: "Kernels") -> Buffer:
        return kernels.write_mla(self)


@record
class WriteKV(CacheCall[Buffer, KVEntry]):
    """Stores the keys and values of new tokens."""

    operation = "write_kv"
    k: jax.Array
    """[T, H, D]."""
    v: jax.Array
    """[T, H, Dv]."""
    slot_mapping: jax.Array
    """[T]."""
    k_scale: jax.Array | None
    """float32, a scalar, [H] or, by slot, [num_blocks, block_size, H]; None if the format has no scale."""
    v_scale: jax.Array | None

    def run_on(self, kernels: "Kernels") -> Buffer:
        return kernels.write_kv(self)


@record
class WriteIndexerK(CacheCall[Buffer, IndexerEntry]):
    """Stores the indexer keys of new tokens."""

    operation = "write_indexer_k"
    buffer: jax.Array
    k: jax.Array
    """[T, D]."""
    slot_mapping: jax.Array
    """[T]."""

    def run_on(self, kernels: "Kernels") -> Buffer:
        return kernels.write_indexer_k(self)


@record
class WriteEntries(CacheCall[Buffer, Entry]):
    """Stores the bytes of entries."""

    operation = "write_entries"
    rows: jax.Array
    """uint8 [T, nbytes] or [T, H, nbytes]."""
    slot_mapping: jax.Array
    """[T]."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return ()

    def run_on(self, kernels: "Kernels") -> Buffer:
        return kernels.write_entries(self)


@record
class GatherCall[Result, E: Entry](CacheCall[Result, E]):
    """Reads a run of tokens of each request.  The runs follow one another in the result."""

    block_tables: jax.Array
    """[B, M]."""
    cu_seq_lens: jax.Array
    """[B + 1], the running sum of the lengths of the runs."""
    seq_starts: jax.Array | None
    """[B], the position of the first token of each run; None for 0."""
    total: int = field(metadata=STATIC)
    """Rows of the result.  Rows past the last run are 0."""


@record
class GatherMLA(GatherCall[tuple[jax.Array, jax.Array], MLAEntry]):
    """Reads latents [total, R] and rotary keys [total, P]."""

    operation = "gather_mla"
    buffer: jax.Array
    kv_scale: jax.Array | None
    dtype: jnp.dtype = field(metadata=STATIC)

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.gather_mla(self)


@record
class GatherKV(GatherCall[tuple[jax.Array, jax.Array], KVEntry]):
    """Reads keys [total, H, D] and values [total, H, Dv]."""

    operation = "gather_kv"
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    dtype: jnp.dtype = field(metadata=STATIC)

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.gather_kv(self)


@record
class GatherIndexerK(GatherCall[jax.Array, IndexerEntry]):
    """Reads indexer keys [total, D]."""

    operation = "gather_indexer_k"
    buffer: jax.Array
    dtype: jnp.dtype = field(metadata=STATIC)

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.gather_indexer_k(self)


@record
class GatherEntries(GatherCall[jax.Array, Entry]):
    """Reads the bytes of entries, uint8 [total, nbytes] or [total, H, nbytes]."""

    operation = "gather_entries"

    @property
    def entries(self) -> tuple[Entry, ...]:
        return ()

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.gather_entries(self)


@record
class ReadCall[Result, E: Entry](CacheCall[Result, E]):
    """Reads the entries at slots.

    Implementations whose kernels find tokens by block tables run the call that `gather` of a subclass returns.
    """

    slots: jax.Array
    """[T]; entries at slots outside the cache are 0."""
    dtype: jnp.dtype = field(metadata=STATIC)

    @property
    def runs(self) -> dict[str, Any]:
        """The fields of a `GatherCall`: a request per slot, whose table is the block of the slot."""
        block, token = self.slots // self.pages.block_size, self.slots % self.pages.block_size
        count = self.slots.size
        return _runs(self, block[:, None], jnp.arange(count + 1, dtype=jnp.int32), token, count)


@record
class ReadMLA(ReadCall[tuple[jax.Array, jax.Array], MLAEntry]):
    """Reads latents [T, R] and rotary keys [T, P]."""

    operation = "read_mla"
    buffer: jax.Array
    kv_scale: jax.Array | None

    def gather(self) -> GatherMLA:
        """The call that reads the same entries as runs of one token each."""
        return GatherMLA(**self.runs, kv_scale=self.kv_scale, dtype=self.dtype)

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.read_mla(self)


@record
class ReadKV(ReadCall[tuple[jax.Array, jax.Array], KVEntry]):
    """Reads keys [T, H, D] and values [T, H, Dv]."""

    operation = "read_kv"
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    def gather(self) -> GatherKV:
        """As `ReadMLA.gather`."""
        return GatherKV(**self.runs, k_scale=self.k_scale, v_scale=self.v_scale, dtype=self.dtype)

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.read_kv(self)


@record
class ReadIndexerK(ReadCall[jax.Array, IndexerEntry]):
    """Reads indexer keys [T, D]."""

    operation = "read_indexer_k"
    buffer: jax.Array

    def gather(self) -> GatherIndexerK:
        """As `ReadMLA.gather`."""
        return GatherIndexerK(**self.runs, dtype=self.dtype)

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.read_indexer_k(self)


def _runs(
    call: CacheCall[Any, Any], block_tables: jax.Array, cu_seq_lens: jax.Array, seq_starts: jax.Array, total: int
) -> dict[str, Any]:
    """The fields of a `GatherCall` on the cache of `call`."""
    return {
        "buffer": call.buffer,
        "pages": call.pages,
        "entry": call.entry,
        "layer": call.layer,
        "block_tables": block_tables,
        "cu_seq_lens": cu_seq_lens,
        "seq_starts": seq_starts,
        "total": total,
    }


# Attention.


@record
class PlanDecode(BlocksCall[Any]):
    """Schedules `decode_mla` or `decode_kv` calls.  The type of the schedule depends on the implementation."""

    operation = "plan_decode"
    block_tables: jax.Array
    """[B, M]."""
    seq_lens: jax.Array
    """[B]."""
    trailing: jax.Array | None
    """As in `DecodeCall`, and likewise the other fields that define its mask."""
    tree: Tree | None
    entry: MLAEntry | KVEntry = field(metadata=STATIC)
    heads: int = field(metadata=STATIC)
    """Query heads."""
    q_len: int = field(metadata=STATIC)
    window: int | None = field(metadata=STATIC)
    ahead: int | None = field(metadata=STATIC)
    mask: Mask | None = field(metadata=STATIC)
    dtype: jnp.dtype = field(metadata=STATIC)
    """The dtype of the queries."""
    batch_invariant: bool = field(metadata=STATIC)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def run_on(self, kernels: "Kernels") -> Any:
        return kernels.plan_decode(self)


@record
class DecodeCall[E: Entry](CacheCall[tuple[jax.Array, jax.Array], E]):
    """Attention of Q query tokens of each request to the entries in its blocks; returns out and lse.

    They are the last tokens of the request, but for `trailing` ones.  The query token at position p sees the tokens of
    the request from p - window + 1 to p + ahead, of these only those that `tree` and `mask` allow.

    A call has the attributes of `PlanDecode`, so that an implementation can make a plan for the call itself.
    """

    batch_invariant: ClassVar[bool] = False
    """A plan that is made for the call itself is not batch-invariant."""
    block_tables: jax.Array
    """[B, M]."""
    seq_lens: jax.Array
    """[B]."""
    scale: jax.Array
    """float32 scalar, the softmax scale."""
    plan: Any
    """The schedule that the implementation's `plan_decode` returned for these lengths; None to make one."""
    trailing: jax.Array | None
    """[B], how many tokens of each request come after its last query token; None for none.  It is negative if the last
    query tokens lie after the end of the request: their results are not used."""
    tree: Tree | None
    """Which new tokens a query token sees; None for all of these.  Calls that have it have no causal mask."""
    logit_cap: float | None = field(metadata=STATIC)
    window: int | None = field(metadata=STATIC)
    """How many tokens up to its own, this one included, a query token sees; None for all."""
    ahead: int | None = field(metadata=STATIC)
    """How many tokens after its own a query token sees: 0 under a causal mask, None for all."""
    mask: Mask | None = field(metadata=STATIC)
    """Which keys a query token sees, by their positions; None for all of these."""

    @property
    def queries(self) -> tuple[jax.Array, ...]:
        """The arrays of queries, [B, Q, Hq, ...] each."""
        raise NotImplementedError

    def with_queries(self, *queries: jax.Array) -> Self:
        """The same call with other `queries`."""
        raise NotImplementedError

    @property
    def q_len(self) -> int:
        """Query tokens per request, Q."""
        return self.queries[0].shape[1]

    @property
    def heads(self) -> int:
        """Query heads, Hq."""
        return self.queries[0].shape[2]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the queries."""
        return self.queries[0].dtype


@record
class DecodeMLA(DecodeCall[MLAEntry]):
    """Absorbed attention: out [B, Q, Hq, value_dim] and float32 lse [B, Q, Hq]."""

    operation = "decode_mla"
    buffer: jax.Array
    q_latent: jax.Array
    """[B, Q, Hq, R]."""
    q_pe: jax.Array
    """[B, Q, Hq, P]."""
    kv_scale: jax.Array | None

    @property
    def queries(self) -> tuple[jax.Array, jax.Array]:
        return self.q_latent, self.q_pe

    def with_queries(self, *queries: jax.Array) -> Self:
        q_latent, q_pe = queries
        return replace(self, q_latent=q_latent, q_pe=q_pe)

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.decode_mla(self)


@record
class DecodeKV(DecodeCall[KVEntry]):
    """Grouped-query attention: out [B, Q, Hq, Dv] and float32 lse [B, Q, Hq]; head i reads KV head i // (Hq / H)."""

    operation = "decode_kv"
    q: jax.Array
    """[B, Q, Hq, D]."""
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    @property
    def queries(self) -> tuple[jax.Array]:
        return (self.q,)

    def with_queries(self, *queries: jax.Array) -> Self:
        (q,) = queries
        return replace(self, q=q)

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.decode_kv(self)


@record
class DecodeMLASparse(CacheCall[tuple[jax.Array, jax.Array, jax.Array | None], MLAEntry]):
    """Absorbed attention to the given slots of a cache, or of two.

    Returns out [B, Q, Hq, value_dim], float32 lse [B, Q, Hq], and the largest logits, float32 [B, Q, Hq], or None.
    """

    operation = "decode_mla_sparse"
    buffer: jax.Array
    q_latent: jax.Array
    """[B, Q, Hq, R]."""
    q_pe: jax.Array
    """[B, Q, Hq, P]."""
    slots: jax.Array
    """[B, Q, K]; slots outside the cache are masked."""
    counts: jax.Array | None
    """[B, Q], how many slots of each query token are used; None for all."""
    sinks: jax.Array | None
    """float32 [Hq]."""
    scale: jax.Array
    """float32 scalar, the softmax scale."""
    kv_scale: jax.Array | None
    extra: ExtraSlots | None
    """The slots of a second cache."""
    logit_cap: float | None = field(metadata=STATIC)
    batch_invariant: bool = field(metadata=STATIC)
    max_logits: bool = field(metadata=STATIC)
    """Whether the largest logits are returned."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,) if self.extra is None else (self.entry, self.extra.entry)

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array, jax.Array | None]:
        return kernels.decode_mla_sparse(self)


@record
class PrefillCall[E: Entry](CacheCall[tuple[jax.Array, jax.Array], E]):
    """Attention of many query tokens to keys and values that are gathered first; returns out and lse.

    The query tokens are the last tokens of their requests.  The one at position p sees the tokens from p - window + 1
    to p + ahead.  Earlier tokens are gathered in chunks, whose keys and values together have at most `chunk_bytes`
    bytes.
    """

    block_tables: jax.Array
    """[B, M]."""
    seq_lens: jax.Array
    """[B]."""
    cu_q_lens: jax.Array | None
    """[B + 1], the running sum of the query tokens of a ragged batch; None if each request has Q."""
    scale: float = field(metadata=STATIC)
    """The softmax scale."""
    logit_cap: float | None = field(metadata=STATIC)
    window: int | None = field(metadata=STATIC)
    ahead: int | None = field(metadata=STATIC)
    """Both as in `DecodeCall`."""
    chunk_bytes: int = field(metadata=STATIC)


@record
class PrefillMLA(PrefillCall[MLAEntry]):
    """Attention to keys and values that are expanded from latents: out [..., H, V] and float32 lse [..., H]."""

    operation = "prefill_mla"
    buffer: jax.Array
    q_nope: jax.Array
    """[B, Q, H, N], the last Q tokens of each request; with `cu_q_lens`, [T, H, N]."""
    q_pe: jax.Array
    """[B, Q, H, P] or [T, H, P]."""
    w_uk: jax.Array
    """[H, N, R]."""
    w_uv: jax.Array
    """[H, V, R]."""
    kv_scale: jax.Array | None

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.prefill_mla(self)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of queries, keys and values."""
        return self.q_nope.dtype

    def gather(self, first: jax.Array, counts: jax.Array, total: int) -> GatherMLA:
        """The call that reads `counts` [B] entries per request, at most `total` in all, from positions `first` [B]."""
        runs = _runs(self, self.block_tables, sums_from_0(counts), first, total)
        return GatherMLA(**runs, kv_scale=self.kv_scale, dtype=self.dtype)


@record
class PrefillKV(PrefillCall[KVEntry]):
    """Attention to keys and values as they are stored: out [..., Hq, Dv] and float32 lse [..., Hq]."""

    operation = "prefill_kv"
    q: jax.Array
    """[B, Q, Hq, D], the last Q tokens of each request; with `cu_q_lens`, [T, Hq, D]."""
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.prefill_kv(self)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of queries, keys and values."""
        return self.q.dtype

    def gather(self, first: jax.Array, counts: jax.Array, total: int) -> GatherKV:
        """As `PrefillMLA.gather`."""
        runs = _runs(self, self.block_tables, sums_from_0(counts), first, total)
        return GatherKV(**runs, k_scale=self.k_scale, v_scale=self.v_scale, dtype=self.dtype)


@record
class IndexerLogits(CacheCall[jax.Array, IndexerEntry]):
    """The logits of the V3.2 indexer, float32 [B, Q, max_len]; -inf for tokens that a query token does not see."""

    operation = "indexer_logits"
    buffer: jax.Array
    q: jax.Array
    """[B, Q, Hi, D]."""
    weights: jax.Array
    """[B, Q, Hi]."""
    block_tables: jax.Array
    seq_lens: jax.Array
    max_len: int = field(metadata=STATIC)

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.indexer_logits(self)


@record
class SelectTopk(Call[jax.Array]):
    """The positions of the k largest logits of each row, or their slots; int32 [..., k]."""

    operation = "select_topk"
    logits: jax.Array
    """float32 [..., N]; [B, Q, N] with `block_tables`."""
    block_tables: jax.Array | None
    """[B, M], for the slots of positions; None for positions."""
    k: int = field(metadata=STATIC)
    block_size: int | None = field(metadata=STATIC)
    """With `block_tables`: tokens per block."""

    def located(self, positions: jax.Array) -> jax.Array:
        """What the call returns, given the positions."""
        if self.block_tables is None or self.block_size is None:
            return positions
        return slots_for(self.block_tables, positions, block_size=self.block_size)

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.select_topk(self)


@record
class MergeStates(Call[tuple[jax.Array, jax.Array]]):
    """Merges partial results of attention: out [..., D] and lse [...]."""

    operation = "merge_states"
    outs: jax.Array
    """[N, ..., D]."""
    lses: jax.Array
    """float32 [N, ...]."""

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.merge_states(self)


# States and whole blocks.


@record
class WriteState(CacheCall[Buffer, StateEntry]):
    """Stores states; returns the buffer."""

    operation = "write_state"
    buffer: jax.Array
    states: Mapping[str, jax.Array]
    """By name, [T, ...]."""
    slots: jax.Array
    """[T]."""

    def run_on(self, kernels: "Kernels") -> Buffer:
        return kernels.write_state(self)


@record
class ReadState(CacheCall[dict[str, jax.Array], StateEntry]):
    """Reads states, by name [T, ...]."""

    operation = "read_state"
    buffer: jax.Array
    slots: jax.Array
    """[T]."""

    def run_on(self, kernels: "Kernels") -> dict[str, jax.Array]:
        return kernels.read_state(self)


@record
class DecodeDeltaRule(CacheCall[tuple[jax.Array, Buffer], StateEntry]):
    """A decode step of the gated delta rule (`delta_rule.py`) and of the convolution before it.

    Returns out, float32 [T, H, V], which is 0 for tokens without a slot to write, and the buffer.  States are arrays
    "conv" [W - 1, C] and "delta" [H, K, V], where C = 2 G K + H V.
    """

    operation = "decode_delta_rule"
    buffer: jax.Array
    x: jax.Array
    """[T, C], one token per request: queries and keys of G heads, and values of H heads, before the convolution."""
    decay: jax.Array
    """float32 [T, H, 1] or [T, H, K]."""
    rate: jax.Array
    """float32 [T, H]."""
    conv_weight: jax.Array
    """[C, W]."""
    read_slots: jax.Array
    """[T], of the states before the tokens; a state is 0 if its slot is outside the cache."""
    write_slots: jax.Array
    """[T], of the states after the tokens; tokens whose slot is outside the cache are skipped."""

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, Buffer]:
        return kernels.decode_delta_rule(self)


@record
class CopyBlocks(BlocksCall[Buffer]):
    """Copies blocks; returns the buffer."""

    operation = "copy_blocks"
    src: jax.Array
    """[n]."""
    dst: jax.Array
    """[n]; pairs with an id outside the cache are skipped."""

    def run_on(self, kernels: "Kernels") -> Buffer:
        return kernels.copy_blocks(self)


@record
class ReadBlocks(BlocksCall[jax.Array]):
    """Reads the payloads of blocks, [n, block_elements]."""

    operation = "read_blocks"
    blocks: jax.Array
    """[n]."""

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.read_blocks(self)


@record
class WriteBlocks(BlocksCall[Buffer]):
    """Overwrites blocks with payloads; returns the buffer."""

    operation = "write_blocks"
    blocks: jax.Array
    """[n]; ids outside the cache are skipped."""
    data: jax.Array
    """[n, block_elements]."""

    def run_on(self, kernels: "Kernels") -> Buffer:
        return kernels.write_blocks(self)


# Experts and weights in float8.


@record
class SelectExperts(Call[tuple[jax.Array, jax.Array]]):
    """Top-k routing of experts: ids int32 [T, K] and weights float32 [T, K].

    The options are those of `jaxkv.select_experts`; K is `per_token`.
    """

    operation = "select_experts"
    logits: jax.Array
    """float32 [T, E]."""
    bias: jax.Array | None
    """float32 [E]."""
    per_token: int = field(metadata=STATIC)
    scoring: str = field(metadata=STATIC)
    groups: int = field(metadata=STATIC)
    groups_per_token: int = field(metadata=STATIC)
    normalize: bool = field(metadata=STATIC)
    scale: float = field(metadata=STATIC)

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array]:
        return kernels.select_experts(self)


@record
class GroupedSwiglu(Call[jax.Array]):
    """The weighted sum of each token's experts, [T, D].  `limit` and `alpha` are those of `jaxkv.grouped_swiglu`."""

    operation = "grouped_swiglu"
    x: jax.Array
    """[T, D]."""
    experts: jax.Array
    """[T, K]."""
    weights: jax.Array
    """float32 [T, K]."""
    gate: jax.Array | TileScaled
    """[E, I, D]."""
    up: jax.Array | TileScaled
    """[E, I, D]."""
    down: jax.Array | TileScaled
    """[E, D, I]."""
    shared: tuple[jax.Array, jax.Array, jax.Array] | None
    """Gate and up [S, D] and down [D, S] of an expert of all tokens."""
    biases: tuple[jax.Array, jax.Array, jax.Array] | None
    """Those of gate and up [E, I] and down [E, D]."""
    limit: float | None = field(metadata=STATIC)
    alpha: float | None = field(metadata=STATIC)

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.grouped_swiglu(self)


@record
class ScaledLinear(Call[jax.Array]):
    """x [T, D] times the transpose of a weight in float8 [I, D]: [T, I]."""

    operation = "scaled_linear"
    x: jax.Array
    weight: TileScaled

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.scaled_linear(self)


# Hot rows: the most recently used entries of a cache in host memory.


@record
class HotRowsCall[Result](BlocksCall[Result]):
    """A call on two caches: rows on the device, and the whole cache in host memory."""

    buffer: jax.Array
    address: jax.Array
    """The address of the cache in host memory."""
    writes: jax.Array
    """[1], the number of writes to host memory.  Calls that depend on it run after those writes."""
    layer: jax.Array
    """A scalar."""
    host_pages: Pages = field(metadata=STATIC)
    entry: MLAEntry = field(metadata=STATIC)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)


@record
class FetchRows(HotRowsCall[tuple[jax.Array, jax.Array, jax.Array]]):
    """Loads tokens that no row holds yet; returns the buffer, the maps and the slots of the rows."""

    operation = "fetch_rows"
    maps: jax.Array
    """[L, B, hot.width]."""
    positions: jax.Array
    """[B, N]."""
    block_tables: jax.Array
    """[B, M], of the cache in host memory."""
    hot: HotMap = field(metadata=STATIC)
    copied: bool = field(metadata=STATIC)
    """Whether entries are copied to their rows."""

    def run_on(self, kernels: "Kernels") -> tuple[jax.Array, jax.Array, jax.Array]:
        return kernels.fetch_rows(self)


@record
class CopyRows[Result](HotRowsCall[Result]):
    """Copies entries between slots of a layer on the device, and slots of a layer in host memory."""

    host_layer: jax.Array
    """A scalar."""
    slots: jax.Array
    """[N], on the device.  Entries of which one of the two slots is invalid are skipped."""
    host_slots: jax.Array
    """[N], in host memory."""


@record
class LoadRows(CopyRows[jax.Array]):
    """Copies entries from host memory to the device; returns the buffer."""

    operation = "load_rows"

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.load_rows(self)


@record
class StoreRows(CopyRows[jax.Array]):
    """Copies entries from the device to host memory; returns `writes`."""

    operation = "store_rows"

    def run_on(self, kernels: "Kernels") -> jax.Array:
        return kernels.store_rows(self)


# Implementations.


class ExpandedHeads(NamedTuple):
    """The heads of a model with latent attention, whose keys and values `prefill_mla` expands from latents."""

    dtype: Any
    """Of queries, keys and values."""
    latent: int
    """R."""
    rope: int
    """P."""
    nope: int
    """N, the values of a key without its rotary part."""
    value: int
    """V."""


Listed = Mapping[type[Entry], Collection[str]]
"""Names of formats, by kind of entry."""


@dataclass(frozen=True)
class Support:
    """What a kernel supports, as reasons against what it does not: texts for messages.

    All implementations use these three terms:

        unsupported_reasons    against one call, on every machine
        unavailable_reasons    against every call, on this machine
        reasons                both of these: why this machine would not run a call (`Kernels.reasons`)

    Functions such as `entry_reasons` yield the unsupported reasons about one part of a call, for several kernels.
    """

    entries: Listed
    """The supported formats by kind of entry (exact class); empty if the kernel does not interpret entries."""
    unsupported_reasons: Callable[[Call[Any]], list[str]]
    """Returns the reasons against a call; none if the kernel supports it."""
    machines: "Machines"
    """The machines that it is for."""

    def unavailable_reasons(self) -> list[str]:
        """The reasons against this machine; none if the kernel runs on it."""
        return list(self.machines.unavailable_reasons())


@dataclass(frozen=True)
class Machines:
    """The machines that kernels are for."""

    generations: Mapping[str, str] | None = None
    """Names of the generations of GPUs that they are compiled for, by compute capability; None for any device."""
    unavailable_reasons: Callable[[], Iterable[str]] = lambda: ()
    """Yields the reasons why they do not run on this machine."""


ANY_DEVICE = Machines()


def supports[F: Callable[..., Any]](
    entries: Listed | None = None,
    unsupported_reasons: Callable[[Any], Iterable[str]] = lambda call: (),
    machines: Machines = ANY_DEVICE,
    mixed: bool = False,
) -> Callable[[F], F]:
    """Declares what a method of `Kernels` supports.

    Args:
      entries: as in `Support`.  Entries that are not listed are unsupported, because a kernel must not guess their byte
        maps.
      unsupported_reasons: yields the reasons against a call whose entries are listed.
      machines: those that the kernel is for.
      mixed: whether keys and values may have different formats, both of them listed.
    """

    listed = entries or {}

    def reasons_of_call(call: Call[Any]) -> list[str]:
        unlisted = [reason for entry in call.entries if listed for reason in _unlisted(entry, listed, mixed)]
        return unlisted or list(unsupported_reasons(call))

    def declared(method: F) -> F:
        setattr(method, _SUPPORT, Support(listed, reasons_of_call, machines))
        return method

    return declared


def _unlisted(entry: Entry, listed: Listed, mixed: bool) -> Iterator[str]:
    """A reason against an entry that is not listed."""
    formats, names = listed.get(type(entry)), entry.format_names
    if formats is None:
        kinds = ", ".join(kind.__name__ for kind in listed)
        yield f"entries of kind {type(entry).__name__}: supports {kinds}"
    elif unlisted := [name for name in names if name not in formats]:
        yield f"entries of format {unlisted[0]!r}: supports {', '.join(formats)}"
    elif len(names) > 1 and not mixed:
        yield f"keys of format {names[0]!r} with values of format {names[1]!r}: supports the same format for both"


def max_logits_reasons(call: DecodeMLASparse) -> Iterator[str]:
    """A reason against a call that returns the largest logits, for kernels that do not store them."""
    if call.max_logits:
        yield "`return_max_logits`: returns results and log-sum-exps only"


def token_scale_reasons(call: Call[Any]) -> Iterator[str]:
    """Reasons against scales per token, for kernels that support scales per tensor and per head."""
    for name in ("k_scale", "v_scale"):
        scale = getattr(call, name, None)
        if scale is not None and scale.ndim > 1:
            yield f"`{name}` per token: supports a scalar, or one scale per head"


_SUPPORT = "_support"


class Kernels:
    """The kernels of an implementation.

    A subclass overrides the methods of the operations that it has kernels for, and declares with `supports` which calls
    they support.  Each method receives a supported call and returns its result; shapes are those of the call's class.
    """

    transformable = False
    """Whether the kernels are plain JAX, which `jax.grad` and `jax.vmap` transform."""

    @classmethod
    def support(cls, operation: str) -> Support | None:
        """What the kernel of an operation supports; None if there is no kernel."""
        return getattr(getattr(cls, operation, None), _SUPPORT, None)

    def unsupported_reasons(self, call: Call[Any]) -> list[str]:
        """The reasons against `call` on every machine; see `Support`."""
        support = self.support(call.operation)
        if support is None:
            return [f"has no kernel for {call.operation}"]
        return support.unsupported_reasons(call)

    def reasons(self, call: Call[Any]) -> list[str]:
        """The reasons why this machine would not run `call`; see `Support`."""
        support = self.support(call.operation)
        unavailable = support.unavailable_reasons() if support else []
        return [*unavailable, *self.unsupported_reasons(call)]

    def least_prefill(self, heads: ExpandedHeads) -> int | None:
        """New tokens per request from which on `prefill_mla` is faster than `decode_mla`; None if it never is."""
        return None

    def stamp(self, after: jax.Array) -> jax.Array:
        """The device's time in nanoseconds modulo 2**32, int32 [1], once all work that `after` depends on is done."""
        raise NotImplementedError

    def write_mla(self, call: WriteMLA) -> Buffer:
        raise NotImplementedError

    def write_kv(self, call: WriteKV) -> Buffer:
        raise NotImplementedError

    def write_indexer_k(self, call: WriteIndexerK) -> Buffer:
        raise NotImplementedError

    def write_entries(self, call: WriteEntries) -> Buffer:
        raise NotImplementedError

    def gather_mla(self, call: GatherMLA) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def gather_kv(self, call: GatherKV) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def gather_indexer_k(self, call: GatherIndexerK) -> jax.Array:
        raise NotImplementedError

    def gather_entries(self, call: GatherEntries) -> jax.Array:
        raise NotImplementedError

    def read_mla(self, call: ReadMLA) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def read_kv(self, call: ReadKV) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def read_indexer_k(self, call: ReadIndexerK) -> jax.Array:
        raise NotImplementedError

    def plan_decode(self, call: PlanDecode) -> Any:
        raise NotImplementedError

    def decode_mla(self, call: DecodeMLA) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def decode_kv(self, call: DecodeKV) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def decode_mla_sparse(self, call: DecodeMLASparse) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        raise NotImplementedError

    def prefill_mla(self, call: PrefillMLA) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def prefill_kv(self, call: PrefillKV) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def indexer_logits(self, call: IndexerLogits) -> jax.Array:
        raise NotImplementedError

    def select_topk(self, call: SelectTopk) -> jax.Array:
        raise NotImplementedError

    def merge_states(self, call: MergeStates) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def write_state(self, call: WriteState) -> Buffer:
        raise NotImplementedError

    def read_state(self, call: ReadState) -> dict[str, jax.Array]:
        raise NotImplementedError

    def decode_delta_rule(self, call: DecodeDeltaRule) -> tuple[jax.Array, Buffer]:
        raise NotImplementedError

    def copy_blocks(self, call: CopyBlocks) -> Buffer:
        raise NotImplementedError

    def read_blocks(self, call: ReadBlocks) -> jax.Array:
        raise NotImplementedError

    def write_blocks(self, call: WriteBlocks) -> Buffer:
        raise NotImplementedError

    def select_experts(self, call: SelectExperts) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def grouped_swiglu(self, call: GroupedSwiglu) -> jax.Array:
        raise NotImplementedError

    def scaled_linear(self, call: ScaledLinear) -> jax.Array:
        raise NotImplementedError

    def fetch_rows(self, call: FetchRows) -> tuple[jax.Array, jax.Array, jax.Array]:
        raise NotImplementedError

    def load_rows(self, call: LoadRows) -> jax.Array:
        raise NotImplementedError

    def store_rows(self, call: StoreRows) -> jax.Array:
        raise NotImplementedError
