"""Absorbed attention over paged latents: to a request's tokens (`decode_mla`), or selected slots (`decode_mla_sparse`).

The kernel computes softmax(scale * (q_latent . latent + q_pe . rope)) . latent: keys are (latent, rope), values are the
latents, or the same as keys in the formats of DeepSeek V4 and V4.1.  For selected slots, every query token is computed
as a request of its own, whose block table is its list of slots, as blocks of one token.  Two caches are attended to one
after the other, and their float32 results merged.

A program processes a work tile of the plan (a range of a request's tokens) for a tile of query rows (query tokens x
heads).  It loads each latent once and uses it as key and as value.  It runs the loop of `attention.py`, in which a
latent is several tiles of `columns` values.

What bounds it.  With few rows: memory bandwidth, which takes two programs per multiprocessor to saturate.  With 64
rows: registers, half of which hold results, and shared memory, which has room for two tiles of keys.  Softmax and
products then take turns, because the next scores would need a third tile.  `latent_config` has the budgets.

Operands of products have the queries' dtype.  For `fp8` entries, and for `fp8_ds_mla` entries with few rows, they are
float16 instead, which represents every e4m3 value exactly; the GPU converts two values per instruction (`halves` of
`codecs.py`).  Queries are then divided by a power of two per row, so that they are in the range of float16.  The scales
of `fp8_ds_mla` multiply scores and weights, of which there are far fewer than values.  With more rows, they multiply
values, which are converted once for all rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import DecodeMLA, DecodeMLASparse, PlanDecode, max_logits_reasons
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.latents.fp8_ds_mla import TILE
from jaxkv_kernels.generations import AMD
from jaxkv_kernels.scores import merged, too_large, with_sinks
from jaxkv_kernels.triton.arithmetic import rounded
from jaxkv_kernels.triton.attention import (
    Config,
    EntryLoads,
    attend_tiles,
    empty_reasons,
    load_range,
    next_power_of_two,
    padded_rows,
    power_of_two_per_row,
    query_rows,
    store_results,
)
from jaxkv_kernels.triton.codecs import has_e4m3, in_halves
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import capability, element_type, launch
from jaxkv_kernels.triton.splits import (
    Plan,
    batch_invariant_reasons,
    combine,
    last_ends,
    make_plan,
    multiprocessors,
    plan_requests,
)
from jaxkv_kernels.triton.tiled import is_tiled, tiled_entry
from jaxkv_kernels.triton.tiles import in_bytes, load_pieces
from jaxkv_kernels.tuning import configuration


@dataclass(frozen=True, kw_only=True)
class LatentConfig(Config):
    """The configuration of the kernel of `decode_mla` and `decode_mla_sparse`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Config.SEARCH,
        "columns": (64, 128, 256),
        "scores_once": (False, True),
    }

    columns: int
    """Values of a latent per product: a power of two, at least 32.  Several smaller products are independent of each
    other and take fewer registers than one product with all 512 values.
    """
    scores_once: bool = False
    """Whether two warpgroups of Hopper compute the scores of half of the keys each, instead of all keys each, and begin
    the loads of the next tile before the products instead of after them (see `attend_tiles`).
    """

    def __post_init__(self):
        super().__post_init__()
        self._check_power_of_two("columns", least=32)
        if self.scores_once and (self.warps != 8 or self.rows < 32 or self.keys < 32):
            # It is made for two warpgroups.
            raise ValueError(
                f"`scores_once` with {self.warps} `warps`, {self.rows} `rows` and {self.keys} `keys`: "
                "expected 8 warps, and at least 32 rows and keys"
            )


def latent_config(entry, rows: int, dtype) -> LatentConfig:
    """The configuration in use for latents of `entry` and `rows` rows of queries of `dtype` per request."""
    return configuration(_default_latent_config(entry, rows, dtype))


def _default_latent_config(entry, rows: int, dtype) -> LatentConfig:
    """The default for latents of `entry` and `rows` rows of queries of `dtype` per request.

    A program may have 227 KiB of shared memory on sm_90, 163 on sm_80, 99 on sm_86 and sm_89.  The sizes for sm_90 are
    the fastest measured on an H200, within 2 %.  Those for other GPUs are the largest that fit their shared memory and
    registers.

    - float32: products keep all operands of a thread in registers, which limits tiles to 16 x 16.  A tile of keys takes
      36 KiB, so a second stage would not fit on sm_86.
    - Up to 16 rows: memory bandwidth is the limit, so two programs share a multiprocessor, and one loads while the
      other computes.  On sm_90, bf16 takes 91 KiB of shared memory and 168 to 189 registers per thread (Triton 3.6 to
      3.9).  fp8 takes 92 KiB and 192 to 196 registers with tiles of 64 keys, each of half as many bytes.  fp8_ds_mla
      takes 63 KiB and 178 to 203 registers.
    - More rows on sm_90: tiles of 64 rows and 64 keys.  The queries (72 KiB) and two tiles of keys (72 KiB each) take
      216 KiB, with `scores_once` 224 KiB, and the results 128 registers per thread of 8 warps.  fp8 and fp8_ds_mla have
      one tile of raw bytes and one that is converted: fp8 takes 180 KiB with Triton 3.6 and 116 with 3.9, fp8_ds_mla
      193 with both.  With 3.9, a thread has 255 registers and 128 (bf16), 304 (fp8) or 168 (fp8_ds_mla) bytes of stack;
      with 3.6, it has no stack.  64 requests of 4,096 tokens with 128 heads take 0.191 ms on an H200 in bf16, with
      columns in tiles of 64; 0.206 with 128, 0.222 with 256, and 0.322 with 128 before `scores_once`.  They take 0.282
      in fp8 and 0.281 in fp8_ds_mla; before `scores_once`, 0.359 and 0.355.
    - Rotary parts that are summed as well: they are one tile more, of as many columns as the tiles of latents have.
    - AMD GPUs: nobody has measured these sizes.  With 16 or 32 rows, 16 keys and 4 wavefronts, the tiles of every
      format take at most 8 KiB of the 64 KiB of shared memory of gfx942, and 242 to 467 of its 512 registers per lane.
      With 8 wavefronts, a lane has 256 registers, and most kernels spill.
    - More rows on other GPUs: tiles of 32 keys fit.  64 rows fit on sm_80 only, and only for entries that are not
      decoded, because decoded values need more memory.
    """
    summed = entry.codec.rope_in_values
    if jnp.dtype(dtype) == jnp.float32:
        columns = COLUMNS if summed else 128
        return LatentConfig(rows=16, keys=16, columns=columns, warps=4, stages=1, programs_per_sm=1)
    arch = capability()
    if arch in AMD:
        columns = COLUMNS if entry.codec.scaled or summed else 128
        return LatentConfig(
            rows=padded_rows(rows, 16 if entry.codec.scaled else 32),
            keys=16,
            columns=columns,
            warps=4,
            stages=1,
            programs_per_sm=1,
        )
    large_shared_memory = arch in (80, 90)
    if rows <= 16:
        if entry.codec.scaled and arch == 90:
            return LatentConfig(rows=16, keys=64, columns=64, warps=4, stages=3, programs_per_sm=2)
        columns = COLUMNS if entry.codec.scaled or summed else 128
        stages, programs = (3, 2) if large_shared_memory else (2, 1)
        return LatentConfig(rows=16, keys=32, columns=columns, warps=4, stages=stages, programs_per_sm=programs)
    quantized = entry.dtype.itemsize == 1
    columns = 256 if entry.codec.scaled else COLUMNS if summed else 128
    if arch == 90:
        size = padded_rows(rows, 64)
        once = size == 64 and (not quantized or entry.codec.scaled or entry.format == "fp8_ds_mla")
        return LatentConfig(
            rows=size,
            keys=64,
            columns=64 if once and not quantized else columns,
            warps=8,
            stages=3 if quantized and not once else 2,
            programs_per_sm=1,
            scores_once=once,
        )
    most = 64 if large_shared_memory and not quantized else 32
    return LatentConfig(rows=padded_rows(rows, most), keys=32, columns=columns, warps=8, stages=2, programs_per_sm=1)


LATENT, ROPE = 512, 64
"""The largest parts of entries whose tiles fit in shared memory."""
COLUMNS = 64
"""Values of a product with latents whose rotary parts are summed as well: a rotary part is a tile of as many."""


def unsupported_reasons(call: DecodeMLA) -> Iterator[str]:
    """Reasons against a call of `decode_mla`."""
    yield from empty_reasons(q_latent=call.q_latent, block_tables=call.block_tables)
    yield from entry_reasons(call.entry)
    yield from too_large(call.logit_cap)


def sparse_unsupported_reasons(call: DecodeMLASparse) -> Iterator[str]:
    """Reasons against a call of `decode_mla_sparse`."""
    yield from empty_reasons(q_latent=call.q_latent, slots=call.slots)
    yield from entry_reasons(call.entry)
    if call.extra is not None:
        yield from empty_reasons(**{"extra.slots": call.extra.slots})
        yield from entry_reasons(call.extra.entry)
    yield from too_large(call.logit_cap)
    yield from batch_invariant_reasons(call)
    yield from max_logits_reasons(call)


def entry_reasons(entry: MLAEntry) -> Iterator[str]:
    """Reasons against entries of these sizes."""
    latent, rope = entry.sizes
    if latent > LATENT or rope > ROPE:
        yield f"entries of {latent} + {rope} values: supports at most {LATENT} + {ROPE}"
    if entry.codec.rope_in_values and latent % COLUMNS:
        yield f"latents of {latent} values in format {entry.format!r}: supports multiples of {COLUMNS}"


def plan_latents(call: PlanDecode | DecodeMLA) -> Plan:
    """The schedule of `decode_mla`."""
    rows = call.q_len * call.heads
    return plan_requests(call, latent_config(call.entry, rows, call.entry.dtype), rows)


@jax.jit
def decode_mla(call: DecodeMLA) -> tuple[jax.Array, jax.Array]:
    """Attention to the tokens of each request: out [B, Q, Hq, V] and lse [B, Q, Hq]."""
    if call.plan is None:
        call = replace(call, plan=plan_latents(call))
    return _attend(call, call.pages.block_size, None, call.dtype)


@jax.jit
def decode_mla_sparse(call: DecodeMLASparse) -> tuple[jax.Array, jax.Array]:
    """Attention of each query token to its slots, of one cache or of two: out [B, Q, Hq, V] and lse [B, Q, Hq]."""
    extra = call.extra
    if extra is None:
        return _attend_slots(call, call.q_latent.dtype)
    fields = ("buffer", "pages", "entry", "layer", "slots", "counts", "kv_scale")
    first = replace(call, extra=None, sinks=None)
    second = replace(first, **{name: getattr(extra, name) for name in fields})
    out, lse = merged([_attend_slots(one, jnp.float32) for one in (first, second)])
    if call.sinks is not None:
        out = with_sinks(out, lse, call.sinks)
    return out.astype(call.q_latent.dtype), lse


def _attend_slots(call: DecodeMLASparse, result: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Attention to the slots of one cache: out of dtype `result`, and lse."""
    batch, q_len, heads, _ = call.q_latent.shape
    requests, size = batch * q_len, call.slots.shape[-1]
    config = latent_config(call.entry, heads, call.entry.dtype)
    options = dict(
        config=config,
        row_tiles=config.row_tiles(heads),
        q_len=1,
        window=None,
        ahead=0,
        longest=size,
        sms=multiprocessors(),
    )
    if call.counts is None:
        # All lengths are known at trace time, and therefore also the number of work tiles.
        with jax.ensure_compile_time_eval():
            lengths = jnp.full(requests, size, jnp.int32)
            plan = make_plan(lengths, **options)
            plan = replace(plan, work_tiles=plan.work_tiles[: int(plan.tiles_per_request.sum())])
    else:
        lengths = call.counts.reshape(requests)
        plan = make_plan(lengths, **options)
    of_tokens = DecodeMLA(
        buffer=call.buffer,
        pages=call.pages,
        layer=call.layer,
        entry=call.entry,
        block_tables=call.slots.reshape(requests, size),
        seq_lens=lengths,
        scale=call.scale,
        plan=plan,
        trailing=None,
        logit_cap=call.logit_cap,
        window=None,
        ahead=0,
        tree=None,
        mask=None,
        q_latent=call.q_latent.reshape(requests, 1, heads, -1),
        q_pe=call.q_pe.reshape(requests, 1, heads, -1),
        kv_scale=call.kv_scale,
    )
    out, lse = _attend(of_tokens, 1, call.sinks, result)
    return out.reshape(batch, q_len, heads, -1), lse.reshape(batch, q_len, heads)


def _attend(
    call: DecodeMLA, table_block: int, sinks: jax.Array | None, result: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Attention of a call with a plan: out of dtype `result`, and lse.

    Its `block_tables` have the ids of blocks of `table_block` tokens: blocks of the cache, or slots if that is 1.
    """
    plan: Plan = call.plan
    buffer, table, scale, q_latent = call.buffer, call.block_tables, call.scale, call.q_latent
    batch, q_len, heads, _ = q_latent.shape
    dtype, size = q_latent.dtype, call.entry.value_dim
    config = latent_config(call.entry, q_len * heads, dtype)
    row_tiles, work_tiles = config.row_tiles(q_len * heads), plan.work_tiles.shape[0]
    in_memory = in_bytes(call.pages, buffer.dtype.itemsize)
    loads = _loads(call.entry, in_memory, config, dtype)
    one = (1,)
    split_shape = (work_tiles if plan.may_split else 1, q_len * heads)
    out, lse, split_out, split_lse = launch(
        _attend_latents,
        (
            q_latent, call.q_pe, buffer, table, last_ends(call), plan.work_tiles, jnp.reshape(call.layer, one),
            jnp.reshape(scale, one), jnp.reshape(scale if call.kv_scale is None else call.kv_scale, one),
            scale if sinks is None else sinks,
        ),
        (
            jax.ShapeDtypeStruct((batch, q_len, heads, size), result),
            jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
            jax.ShapeDtypeStruct((*split_shape, size), jnp.float32),
            jax.ShapeDtypeStruct(split_shape, jnp.float32),
        ),
        grid=(work_tiles * row_tiles,), warps=config.warps, stages=config.stages,
        PAGES=in_memory if loads.tiled is None else loads.tiled.values, LOADS=loads, TABLE=table.shape[1],
        TABLE_BLOCK=table_block, Q_LEN=q_len, HEADS=heads, ROW_TILES=row_tiles, CAP=call.logit_cap, WINDOW=call.window,
        AHEAD=call.ahead, TRAILING=call.trailing is not None, SINKS=sinks is not None, CONFIG=config,
    )  # fmt: skip
    if plan.may_split:
        out, lse = combine(out, lse, split_out, split_lse, plan, sinks)
    return out, lse


def _loads(entry, in_memory, config: LatentConfig, dtype) -> EntryLoads:
    latent, rope = entry.sizes
    summed = entry.codec.rope_in_values
    tiled = tiled_entry(entry, in_memory, 1) if is_tiled(entry) else None
    columns = config.columns
    # With a scale per load, each load has scores and weights of its own.  Programs with more rows have no registers for
    # them.
    per_load = entry.format == "fp8_ds_mla" and config.rows == 16 and columns == TILE
    multiple = TILE if entry.format == "fp8_ds_mla" else 1 if tiled is None else tiled.parts[0].tile
    if columns % multiple:
        raise ValueError(f"`columns` is {columns}: expected a multiple of {multiple} for {entry.format}")
    if summed and columns != COLUMNS:
        raise ValueError(f"`columns` is {columns}: expected {COLUMNS} for {entry.format}, which sums rotary parts")
    least = 32 if entry.codec.scaled else 16  # columns of the smallest product; twice that if a load gives two tiles
    steps = (in_memory.offset, in_memory.layer_stride, in_memory.block_stride, in_memory.token_stride)
    operands = jnp.float16 if (entry.codec.scaled or per_load) and dtype != jnp.float32 else dtype
    return EntryLoads(
        format=entry.format, value_format=entry.format, latents=True, first=latent, second=rope,
        first_columns=min(columns, max(least, next_power_of_two(latent))),
        second_columns=COLUMNS if summed else max(least, next_power_of_two(rope)),
        stored=(element_type(entry.dtype),) * 2, dtype=element_type(operands),
        rope_dtype=element_type(dtype if per_load else operands), native=has_e4m3(),
        even=not any(n % 2 for n in (*steps, *entry.sizes)), tiled=tiled, rope_in_values=summed,
        per_load=per_load,
    )  # fmt: skip


@triton.jit
def _split_into_pairs(tiles, divisor, DTYPE: tl.constexpr):
    """Divides tiles of queries by `divisor` [n], and splits each into a tile of its even and one of its odd columns."""
    found = ()
    for i in tl.static_range(len(tiles)):
        low, high = in_halves(rounded(tiles[i].to(tl.float32) / divisor[:, None], DTYPE))
        found += (low, high)
    return found


@triton.jit
def _join_pairs(halves, factor):
    """Tiles made from the tiles `halves` of their even and odd columns, multiplied by `factor`."""
    found = ()
    for i in tl.static_range(len(halves) // 2):
        found += (tl.interleave(halves[2 * i], halves[2 * i + 1]) * factor,)
    return found


@triton.jit
def _attend_latents(
    q_latent, q_pe, buffer, table, last_ends, work_tiles, layers, scales, kv_scales, sinks,
    out, lse, split_out, split_lse,
    PAGES: tl.constexpr, LOADS: tl.constexpr, TABLE: tl.constexpr, TABLE_BLOCK: tl.constexpr, Q_LEN: tl.constexpr,
    HEADS: tl.constexpr, ROW_TILES: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr,
    TRAILING: tl.constexpr, SINKS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    LATENT: tl.constexpr = LOADS.first
    ROPE: tl.constexpr = LOADS.second
    COLUMNS: tl.constexpr = LOADS.first_columns
    NUM_LOADS: tl.constexpr = LOADS.loads
    index = tl.program_id(0) // ROW_TILES
    request = tl.load(work_tiles + index * 4)
    if request < 0:
        return
    begin, end, is_split = load_range(work_tiles, index)
    head, token, line, live = query_rows(tl.program_id(0) % ROW_TILES, 1, Q_LEN, HEADS, CONFIG.rows)
    query = request.to(tl.int64) * (Q_LEN * HEADS) + line
    q = ()
    for i in tl.static_range(NUM_LOADS):
        q += (load_pieces(q_latent + query * LATENT + i * COLUMNS, live, LATENT - i * COLUMNS, COLUMNS),)
    q_rope = (load_pieces(q_pe + query * ROPE, live, ROPE, LOADS.second_columns),)
    scale = tl.load(scales)
    if LOADS.ways[0] == 2:
        divisor = power_of_two_per_row(q + q_rope)
        scale *= divisor[:, None]
        q = _split_into_pairs(q, divisor, LOADS.dtype)
        if LOADS.per_load:
            q_rope = (rounded(q_rope[0].to(tl.float32) / divisor[:, None], LOADS.rope_dtype),)
        else:
            q_rope = _split_into_pairs(q_rope, divisor, LOADS.dtype)
            scale *= tl.load(kv_scales)

    # With few rows, enough registers are left for a row sum per column.
    SUM_PER_COLUMN: tl.constexpr = LOADS.ways[0] == 2 and LOADS.native and CONFIG.rows < 64
    acc, row_max, row_sum = attend_tiles(
        q_rope + q, scale, buffer, buffer, layers, table, last_ends, request, begin, end, head, token,
        PAGES, LOADS, TABLE, TABLE_BLOCK, Q_LEN, CAP, WINDOW, AHEAD, TRAILING, CONFIG, SUM_PER_COLUMN,
        CONFIG.scores_once,
    )  # fmt: skip
    if LOADS.ways[0] == 2:
        acc = _join_pairs(acc, 1.0 if LOADS.per_load else tl.load(kv_scales))
    store_results(
        acc, row_max, row_sum, out, lse, split_out, split_lse, sinks, index, request, is_split, line, live,
        line % HEADS, Q_LEN * HEADS, LATENT + ROPE if LOADS.rope_in_values else LATENT, SINKS,
    )  # fmt: skip
