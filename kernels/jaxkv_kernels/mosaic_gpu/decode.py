"""Decode calls: their plans, the choice of the kernel by device, format and rows, and the call of the kernel.

`decode_mla` and `decode_kv` make a plan if the call has none, run the kernel of `schedule_of`, and merge the results of
split requests by `combine`.  A few formats of latents are decoded by the kernel of sparse attention instead
(`gathers`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import DecodeCall, DecodeKV, DecodeMLA, PlanDecode, token_scale_reasons
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry
from jaxkv_kernels.mosaic_gpu import (
    gqa,
    gqa_blackwell,
    mla_dense,
    mla_dense_blackwell,
    mla_dense_swap_ab,
    mla_sparse,
    quantised_swap_ab,
)
from jaxkv_kernels.mosaic_gpu.attention_reasons import query_dtype
from jaxkv_kernels.mosaic_gpu.combine import combine
from jaxkv_kernels.mosaic_gpu.epilogue import KernelResults
from jaxkv_kernels.mosaic_gpu.gqa import GQAConfig
from jaxkv_kernels.mosaic_gpu.gqa_blackwell import BlackwellGQAConfig
from jaxkv_kernels.mosaic_gpu.layout_reasons import table_sizes
from jaxkv_kernels.mosaic_gpu.mla_dense import MLADenseConfig, QuantisedMLADenseConfig
from jaxkv_kernels.mosaic_gpu.mla_dense_blackwell import BlackwellMLAConfig
from jaxkv_kernels.mosaic_gpu.mla_dense_swap_ab import MLASwapABConfig
from jaxkv_kernels.mosaic_gpu.quantised_swap_ab import QuantisedSwapABConfig
from jaxkv_kernels.mosaic_gpu.runtime.device import TCGEN05, capability, interpreting
from jaxkv_kernels.mosaic_gpu.sizes import PAIR, TILE
from jaxkv_kernels.mosaic_gpu.tcgen05_attention import ROWS
from jaxkv_kernels.mosaic_gpu.tile_scheduler import CTAS, Plan, make_plan, most_partitions, shares_keys
from jaxkv_kernels.scores import too_large
from jaxkv_kernels.tuning import configuration

SWAP_AB_ROWS = 16
"""Rows (query tokens x heads of a request) up to which `decode_mla` runs a kernel with swapped operands.

At 16 rows it is memory-bound.  32 rows would fit, with half of the query stages, but took 6 % longer than the kernel
whose tiles have 64 rows.
"""
GATHERED = ("fp8_v4", "nvfp4_ds_mla", "mxfp4_ds_mla")
"""Formats of latents that only the kernel of sparse attention decodes."""


def rows_of(call: DecodeCall | PlanDecode) -> int:
    """Rows of a request in the scores of a KV head: its query tokens x the query heads that share the KV head."""
    return call.q_len * call.heads // call.pages.num_heads


def is_blackwell() -> bool:
    """Whether kernels are built for a GPU with tcgen05, on which there is one schedule per kind of entry."""
    return capability() in TCGEN05


def gathers(entry: MLAEntry | KVEntry, rows: int) -> bool:
    """Whether dense calls with `rows` rows per request run as sparse attention to all slots of the request."""
    if is_blackwell():
        return False
    return entry.format in GATHERED or (entry.format == "fp8_ds_mla" and rows > SWAP_AB_ROWS)


Config = (
    MLADenseConfig
    | QuantisedMLADenseConfig
    | MLASwapABConfig
    | QuantisedSwapABConfig
    | GQAConfig
    | BlackwellMLAConfig
    | BlackwellGQAConfig
)


class Schedule:
    """A kernel of dense attention, and how its calls are planned.  `rows` are those of `rows_of`."""

    step: ClassVar[int]
    """Requests are split at multiples of this many tokens."""
    tile_rows: ClassVar[int] = TILE
    """Rows of a tile."""
    shares_keys: ClassVar[bool] = False
    """Whether two CTAs of a cluster can share the keys of a request."""

    def ctas(self, heads: int, rows: int) -> int:
        """CTAs that walk each partition of a plan: one per KV head and tile of rows."""
        return heads * -(-rows // self.tile_rows)

    def padded(self, rows: int) -> int:
        """How many rows the queries of a KV head have as the kernel takes them: TMA copies tiles of 8 rows."""
        return rows + -rows % (8 if rows <= self.tile_rows else self.tile_rows)

    def default_config(self, entry: Any, rows: int) -> Config:
        """The default configuration."""
        raise NotImplementedError

    def unsupported_reasons(self, call: Any, rows: int) -> Iterator[str]:
        """Reasons against a call or its plan."""
        raise NotImplementedError

    def attend(self, call: Any, queries: Any, config: Any, *, interpret: bool) -> KernelResults:
        """The results of whole requests and splits, given a call with its plan, queries and a configuration."""
        raise NotImplementedError


class MLADense(Schedule):
    """Latents, in tiles of 64 rows."""

    step, shares_keys = PAIR, True

    def default_config(self, entry: MLAEntry, rows: int) -> Config:
        return mla_dense.default_config(rows)

    def unsupported_reasons(self, call: DecodeMLA | PlanDecode, rows: int) -> Iterator[str]:
        return mla_dense.unsupported_reasons(call)

    def attend(self, call: DecodeMLA, queries, config, *, interpret: bool) -> KernelResults:
        return mla_dense.attend(call, queries, config, interpret=interpret)


class QuantisedMLADense(MLADense):
    """The same for quantised latents."""

    shares_keys = False

    def default_config(self, entry: MLAEntry, rows: int) -> Config:
        return QuantisedMLADenseConfig()


class MLASwapAB(Schedule):
    """Latents, for few rows."""

    step, shares_keys = TILE, True

    def default_config(self, entry: MLAEntry, rows: int) -> Config:
        return MLASwapABConfig()

    def unsupported_reasons(self, call: DecodeMLA | PlanDecode, rows: int) -> Iterator[str]:
        return mla_dense_swap_ab.unsupported_reasons(call)

    def attend(self, call: DecodeMLA, queries, config, *, interpret: bool) -> KernelResults:
        return mla_dense_swap_ab.attend(call, queries, config, interpret=interpret)


class QuantisedMLASwapAB(Schedule):
    """Quantised latents, for few rows."""

    step = TILE

    def default_config(self, entry: MLAEntry, rows: int) -> Config:
        return QuantisedSwapABConfig()

    def unsupported_reasons(self, call: DecodeMLA | PlanDecode, rows: int) -> Iterator[str]:
        return quantised_swap_ab.mla_reasons(call)

    def attend(self, call: DecodeMLA, queries, config, *, interpret: bool) -> KernelResults:
        return quantised_swap_ab.attend(call, call.plan, queries, config, interpret=interpret)


class GQA(Schedule):
    """Keys and values."""

    step = PAIR

    def padded(self, rows: int) -> int:
        return rows if rows <= 8 else super().padded(rows)  # TMA clips its tile of 8 rows to an axis that is shorter

    def default_config(self, entry: KVEntry, rows: int) -> Config:
        return GQAConfig()

    def unsupported_reasons(self, call: DecodeKV | PlanDecode, rows: int) -> Iterator[str]:
        return gqa.unsupported_reasons(call)

    def attend(self, call: DecodeKV, queries, config, *, interpret: bool) -> KernelResults:
        return gqa.attend(call, queries, config, interpret=interpret)


class QuantisedGQA(Schedule):
    """Quantised keys and values, for few rows."""

    step = TILE

    def default_config(self, entry: KVEntry, rows: int) -> Config:
        return quantised_swap_ab.gqa_config(entry)

    def unsupported_reasons(self, call: DecodeKV | PlanDecode, rows: int) -> Iterator[str]:
        return quantised_swap_ab.gqa_reasons(call, rows, SWAP_AB_ROWS)

    def attend(self, call: DecodeKV, queries, config, *, interpret: bool) -> KernelResults:
        return quantised_swap_ab.attend(call, call.plan, queries, config, interpret=interpret)


class MLADenseBlackwell(Schedule):
    """Latents on Blackwell, in tiles of 128 rows and halves of their columns."""

    step, tile_rows = TILE, ROWS

    def ctas(self, heads: int, rows: int) -> int:
        return mla_dense_blackwell.HALVES * super().ctas(heads, rows)

    def default_config(self, entry: Any, rows: int) -> Config:
        return BlackwellMLAConfig()

    def unsupported_reasons(self, call: DecodeCall | PlanDecode, rows: int) -> Iterator[str]:
        return mla_dense_blackwell.unsupported_reasons(call)

    def attend(self, call: DecodeMLA, queries, config, *, interpret: bool) -> KernelResults:
        return mla_dense_blackwell.attend(call, queries, config, interpret=interpret)


class GQABlackwell(Schedule):
    """Keys and values on Blackwell, in tiles of 128 rows."""

    step, tile_rows = TILE, ROWS

    def default_config(self, entry: KVEntry, rows: int) -> Config:
        return BlackwellGQAConfig()

    def unsupported_reasons(self, call: DecodeKV | PlanDecode, rows: int) -> Iterator[str]:
        return gqa_blackwell.unsupported_reasons(call)

    def attend(self, call: DecodeKV, queries, config, *, interpret: bool) -> KernelResults:
        return gqa_blackwell.attend(call, queries, config, interpret=interpret)


def schedule_of(entry: MLAEntry | KVEntry, rows: int) -> Schedule:
    """The schedule of a `decode_mla` or `decode_kv` call, unless it runs `gathers`."""
    if is_blackwell():
        return GQABlackwell() if isinstance(entry, KVEntry) else MLADenseBlackwell()
    if isinstance(entry, KVEntry):
        return QuantisedGQA() if entry.quantised else GQA()
    if rows > SWAP_AB_ROWS:
        return QuantisedMLADense() if entry.quantised else MLADense()
    return QuantisedMLASwapAB() if entry.quantised else MLASwapAB()


def mla_unsupported_reasons(call: DecodeMLA) -> Iterator[str]:
    """Reasons against a `decode_mla` call."""
    yield from _kernel_reasons(call)
    yield from query_dtype(call.entry, call.dtype, "`q_latent`")
    yield from too_large(call.logit_cap)


def kv_unsupported_reasons(call: DecodeKV) -> Iterator[str]:
    """Reasons against a `decode_kv` call."""
    yield from _kernel_reasons(call)
    yield from query_dtype(call.entry, call.dtype, "`q`")
    yield from too_large(call.logit_cap)
    yield from token_scale_reasons(call)


def plan_unsupported_reasons(call: PlanDecode) -> Iterator[str]:
    """Reasons against planning `decode_mla` or `decode_kv` calls."""
    yield from _kernel_reasons(call)
    yield from query_dtype(call.entry, call.dtype, "queries")


def _kernel_reasons(call: DecodeCall | PlanDecode) -> Iterator[str]:
    """The reasons of the kernel of a call, and those against its tables."""
    rows = rows_of(call)
    if isinstance(call.entry, MLAEntry) and gathers(call.entry, rows):
        yield from mla_sparse.gathered_reasons(call.entry, call.pages, call.buffer)
    else:
        yield from schedule_of(call.entry, rows).unsupported_reasons(call, rows)
    yield from table_sizes(call.block_tables, call.pages.block_size)


def plan_decode(call: PlanDecode | DecodeCall) -> Plan:
    """The schedule of a decode call, in partitions that fill the GPU."""
    rows = rows_of(call)
    if gathers(call.entry, rows):
        return mla_sparse.plan_from_pages(call)
    schedule = schedule_of(call.entry, rows)
    config = configuration(schedule.default_config(call.entry, rows))
    ctas = schedule.ctas(call.pages.num_heads, rows)
    partitions = most_partitions(ctas)
    costs, shared = config.split_costs, False
    # A batch-invariant plan must not depend on how many requests there are.
    if schedule.shares_keys and ctas == 1 and not call.batch_invariant:
        shared = shares_keys(call.seq_lens.size, partitions)
    if shared:
        partitions, costs = partitions // CTAS, costs.of_shared_steps()
    plan = make_plan(
        call.seq_lens,
        call.block_tables,
        call.trailing,
        partitions=partitions,
        tokens=call.q_len,
        block_size=call.pages.block_size,
        num_blocks=call.pages.num_blocks,
        window=call.window,
        ahead=call.ahead,
        batch_invariant=call.batch_invariant,
        step=schedule.step,
        costs=costs,
        by_kernel=not interpreting.value,
    )
    return replace(plan, shared=shared)


def _planned[C: (DecodeMLA, DecodeKV)](call: C) -> C:
    """`call` with its plan, or else with the default plan for its queries."""
    return call if call.plan is not None else replace(call, plan=plan_decode(call))


def decode_mla(call: DecodeMLA) -> tuple[jax.Array, jax.Array]:
    """The result of a `decode_mla` call: out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    call, rows = _planned(call), rows_of(call)
    if gathers(call.entry, rows):
        return mla_sparse.decode_from_pages(call)
    config = configuration(schedule_of(call.entry, rows).default_config(call.entry, rows))
    return _decode_mla(call, config=config, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("config", "interpret"))
def _decode_mla(call: DecodeMLA, *, config: Config, interpret: bool) -> tuple[jax.Array, jax.Array]:
    batch, tokens, heads, latent = call.q_latent.shape
    rows = tokens * heads
    # TMA copies tiles of 8 rows.  It fills tiles past the last row with zeros, and does not store them.
    pad = ((0, 0), (0, -rows % 8), (0, 0))
    queries = [jnp.pad(q.reshape(batch, rows, q.shape[-1]), pad) for q in (call.q_latent, call.q_pe) if q.shape[-1]]
    results = schedule_of(call.entry, rows).attend(call, queries, config, interpret=interpret)
    out, lse = combine(results, call.plan, rows=rows, interpret=interpret)
    return out[:, :rows].reshape(batch, tokens, heads, latent), lse[:, :rows].reshape(batch, tokens, heads)


def decode_kv(call: DecodeKV) -> tuple[jax.Array, jax.Array]:
    """The result of a `decode_kv` call: out [B, Q, Hq, Dv] and float32 lse [B, Q, Hq]."""
    rows = rows_of(call)
    config = configuration(schedule_of(call.entry, rows).default_config(call.entry, rows))
    return _decode_kv(_planned(call), config=config, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("config", "interpret"))
def _decode_kv(call: DecodeKV, *, config: Config, interpret: bool) -> tuple[jax.Array, jax.Array]:
    batch, tokens, query_heads, _ = call.q.shape
    heads, group = call.pages.num_heads, query_heads // call.pages.num_heads
    rows, quantised = tokens * group, call.entry.quantised
    schedule = schedule_of(call.entry, rows)
    padded = schedule.padded(rows)
    q = call.q.reshape(batch, tokens, heads, group, -1).swapaxes(1, 2).reshape(batch, heads, rows, -1)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    queries = [q.reshape(batch * heads, padded, -1)] if quantised else q
    results = schedule.attend(call, queries, config, interpret=interpret)
    out, lse = combine(results.with_rows(heads * padded), call.plan, rows=heads * padded, interpret=interpret)

    def by_token(x):
        x = x.reshape(batch, heads, padded, -1)[:, :, :rows].reshape(batch, heads, tokens, group, -1)
        return x.swapaxes(1, 2).reshape(batch, tokens, query_heads, -1)

    return by_token(out)[..., : call.entry.value_dim], by_token(lse)[..., 0]
