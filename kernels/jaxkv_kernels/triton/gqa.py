"""Grouped-query and multi-head attention over paged keys and values.

It computes softmax(scale * q . k) . v per query head.  Each KV head is shared by (query heads / KV heads) query heads.

A program processes a work tile of the plan (a range of a request's tokens) for a tile of query rows (query tokens x
query heads of one KV head), and runs the loop of `attention.py`.

What bounds it: memory bandwidth.  `kv_config` sizes tiles so that several programs per multiprocessor keep loads in
flight.

Operands of products have the queries' dtype.  If both keys and values are `fp8`, they are float16 instead, as in
`mla.py`: bytes are loaded from shared memory in the order that products need, and converted two per instruction.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import arrays_of, dtype_of
from jaxkv_kernels.calls import DecodeKV, PlanDecode, token_scale_reasons
from jaxkv_kernels.formats.entries import KVEntry
from jaxkv_kernels.generations import AMD
from jaxkv_kernels.scores import too_large
from jaxkv_kernels.triton.arithmetic import rounded
from jaxkv_kernels.triton.attention import (
    Config,
    EntryLoads,
    attend_tiles,
    empty_reasons,
    join_columns,
    load_range,
    next_power_of_two,
    padded_rows,
    power_of_two_per_row,
    query_rows,
    split_columns,
    store_results,
)
from jaxkv_kernels.triton.codecs import has_e4m3
from jaxkv_kernels.triton.entries import second_at, stored_types
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import capability, element_type, launch
from jaxkv_kernels.triton.splits import Plan, combine, last_ends, plan_requests
from jaxkv_kernels.triton.tiles import in_bytes, load_pieces
from jaxkv_kernels.tuning import configuration


@dataclass(frozen=True, kw_only=True)
class KVConfig(Config):
    """The configuration of the kernel of `decode_kv`."""


def kv_config(entry, rows: int, dtype) -> KVConfig:
    """The configuration in use for keys and values of `entry` and `rows` rows of queries of `dtype` per KV head."""
    return configuration(_default_kv_config(entry, rows, dtype))


def _default_kv_config(entry, rows: int, dtype) -> KVConfig:
    """The default for keys and values of `entry` and `rows` rows of queries of `dtype` per KV head.

    Memory bandwidth is the limit, and several small programs per multiprocessor keep more loads in flight than one
    large program.  For 128 + 128 bf16 values, a program with 16 rows, 64 keys and 4 warps takes 38 KiB of shared
    memory and 105 to 111 registers per thread (Triton 3.9 and 3.6), so that four programs fit on sm_90.  Its two stages
    are one tile in shared memory, which is loaded between the products of the tile before it and its own.  Smaller
    entries have a third stage on sm_90, so that a tile loads while another one is computed.  With 128 + 128 fp8 values,
    that also takes 38 KiB, and 122 to 128 registers (Triton 3.9 and 3.6), the most with which four programs fit.  On
    other GPUs there are two stages.  With 64 + 64 values, tiles on sm_90 have 128 keys, and three programs fit, each of
    which takes 70 KiB and 143 to 145 registers in bf16, 38 KiB and 132 to 134 in fp8.  On an H200, 64 requests of 8,192
    tokens with 64 heads and 8 KV heads take 0.264 ms in bf16 and 0.167 in fp8, instead of 0.299 and 0.225.  That was
    measured with splits of multiples of 64 tokens, not of 128.  With heads wider than 128, tiles have half as many
    keys, so that their size in bytes is the same.  float32 products keep all operands in registers, which limits tiles
    to 16 x 16.

    With up to 16 rows, tiles of `int8` and `nvfp4` entries have 128 keys, which are 34 and 18 KiB.  On an H200, 64
    requests of 8,192 tokens with 64 heads and 8 KV heads take 0.382 and 0.410 ms, instead of 0.620 and 0.439 with 64
    keys.  Two stages take 0.360 and 0.408 ms, but spill 8 to 16 bytes per thread on some GPUs; three do on sm_89.  GPUs
    on which three were not tried have one.

    On AMD GPUs, nobody has measured these sizes.  They take at most 64 KiB of shared memory, all that gfx942 has, and
    at most 447 of the 512 registers per lane that a program of 4 wavefronts may have.

    With heads wider than 256, a program with 32 rows and 16 keys takes 96 KiB of shared memory, and its results 64
    registers per thread of 8 warps.
    """
    widest = max(entry.sizes)
    of_floats = jnp.dtype(dtype) == jnp.float32
    if capability() in AMD:
        keys = 16 if of_floats or widest > 256 else 32 if widest > 128 else 64
        rows = 16 if of_floats else padded_rows(rows, 32)
        return KVConfig(rows=rows, keys=keys, warps=4, stages=1, programs_per_sm=1)
    if of_floats:
        return KVConfig(rows=16, keys=16, warps=8 if widest > 256 else 4, stages=1, programs_per_sm=2)
    if widest > 256:
        return KVConfig(rows=padded_rows(rows, 32), keys=16, warps=8, stages=2, programs_per_sm=2)
    if {*entry.format_names} <= {"int8", "nvfp4"} and rows <= 16 and widest <= 128:
        stages = 3 if capability() in (80, 86, 90) else 1
        return KVConfig(rows=16, keys=128, warps=4, stages=stages, programs_per_sm=2, split_multiple=128)
    small = capability() == 90 and rows <= 16 and entry.nbytes <= 256
    if small and widest <= 64:
        return KVConfig(rows=16, keys=128, warps=4, stages=3, programs_per_sm=3)
    keys, warps = 32 if widest > 128 else 64, 8 if rows > 32 else 4
    stages = 3 if small else 2
    return KVConfig(rows=padded_rows(rows, 64), keys=keys, warps=warps, stages=stages, programs_per_sm=4)


HEAD_DIM = 512
"""The largest keys and values whose tiles fit in shared memory."""


def unsupported_reasons(call: DecodeKV) -> Iterator[str]:
    """Reasons against a call."""
    yield from empty_reasons(q=call.q, block_tables=call.block_tables)
    yield from entry_reasons(call.entry, call.q.dtype)
    yield from too_large(call.logit_cap)
    yield from token_scale_reasons(call)


def entry_reasons(entry: KVEntry, dtype) -> Iterator[str]:
    """Reasons against entries of this format and these sizes, with queries of `dtype`."""
    if entry.format_names[-1] == "int8" and dtype == "float16":
        # Weights are multiplied by the scales of values, which may be too small for float16.
        yield "`q` of float16: supports bfloat16 and float32 with entries of format 'int8'"
    if max(entry.sizes) > HEAD_DIM:
        yield f"entries of {' + '.join(map(str, entry.sizes))} values: supports at most {HEAD_DIM} of each"


def plan_kv(call: PlanDecode | DecodeKV) -> Plan:
    """The schedule of `decode_kv`."""
    rows = call.q_len * (call.heads // call.pages.num_heads)
    return plan_requests(call, kv_config(call.entry, rows, call.entry.dtype), rows)


@jax.jit
def decode_kv(call: DecodeKV) -> tuple[jax.Array, jax.Array]:
    """Attention to the tokens of each request: out [B, Q, Hq, Dv] and lse [B, Q, Hq].

    Query head i reads KV head i // (Hq / H).
    """
    q, pages, entry, scale = call.q, call.pages, call.entry, call.scale
    batch, q_len, heads, _ = q.shape
    plan = plan_kv(call) if call.plan is None else call.plan
    rows = q_len * (heads // pages.num_heads)
    config = kv_config(entry, rows, q.dtype)
    row_tiles, work_tiles = pages.num_heads * config.row_tiles(rows), plan.work_tiles.shape[0]
    in_memory = in_bytes(pages, dtype_of(call.buffer).itemsize)
    loads = _loads(entry, in_memory, q.dtype)
    one = (1,)
    scales = [jnp.reshape(scale if x is None else x, (-1,)) for x in (call.k_scale, call.v_scale)]
    split_shape = (work_tiles if plan.may_split else 1, q_len * heads)
    out, lse, split_out, split_lse = launch(
        _attend_kv,
        (
            q, *arrays_of(call.buffer, 2), call.block_tables, last_ends(call), plan.work_tiles,
            jnp.reshape(call.layer, one), jnp.reshape(scale, one), *scales,
        ),
        (
            jax.ShapeDtypeStruct((batch, q_len, heads, entry.value_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
            jax.ShapeDtypeStruct((*split_shape, entry.value_dim), jnp.float32),
            jax.ShapeDtypeStruct(split_shape, jnp.float32),
        ),
        grid=(work_tiles * row_tiles,), warps=config.warps, stages=config.stages,
        PAGES=in_memory, LOADS=loads, SCALED=entry.scaled,
        SCALE_STEPS=tuple(int(x.size > 1) for x in scales), TABLE=call.block_tables.shape[1], Q_LEN=q_len, HEADS=heads,
        ROW_TILES=row_tiles, CAP=call.logit_cap, WINDOW=call.window, AHEAD=call.ahead,
        TRAILING=call.trailing is not None, CONFIG=config,
    )  # fmt: skip
    if plan.may_split:
        out, lse = combine(out, lse, split_out, split_lse, plan)
    return out, lse


def _loads(entry, in_memory, dtype) -> EntryLoads:
    first, second = entry.sizes
    keys, values = entry.format_names[0], entry.format_names[-1]
    # 16, the least of a product, per tile
    least = [{"nvfp4": 64, "int8": 32, "fp8": 32}.get(name, 16) for name in (keys, values)]
    operands = jnp.float16 if {*entry.format_names} == {"fp8"} and dtype != jnp.float32 else dtype
    steps = []
    for part in in_memory.parts:
        steps += [part.offset, part.layer_stride, part.block_stride, part.head_stride, part.token_stride]
    return EntryLoads(
        format=keys, value_format=values, latents=False, first=first, second=second,
        first_columns=max(least[0], next_power_of_two(first)), second_columns=max(least[1], next_power_of_two(second)),
        stored=stored_types(entry), dtype=element_type(operands),
        rope_dtype=element_type(operands), native=has_e4m3(),
        even=not any(n % 2 for n in (*steps, *entry.sizes)),
        second_at=second_at(entry, in_memory, 1), scales_at=_scales_at(entry, apart=in_memory.values is not None),
    )  # fmt: skip


def _scales_at(entry, *, apart: bool) -> tuple[int, int]:
    """Bytes from the start of a key, and from that of a value, to its scales; 0 if it has none."""
    planes = entry.planes if apart else (entry.fields(), entry.fields())
    found = []
    for name, plane in zip(entry.named_sizes, planes, strict=True):
        at = {field.name: field.offset for field in plane}
        found.append(at.get(f"{name} scales", at[name]) - at[name])
    return found[0], found[1]


@triton.jit
def _attend_kv(
    q, buffer, value_buffer, table, last_ends, work_tiles, layers, scales, k_scales, v_scales,
    out, lse, split_out, split_lse,
    PAGES: tl.constexpr, LOADS: tl.constexpr, SCALED: tl.constexpr, SCALE_STEPS: tl.constexpr, TABLE: tl.constexpr,
    Q_LEN: tl.constexpr, HEADS: tl.constexpr, ROW_TILES: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
    AHEAD: tl.constexpr, TRAILING: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = Q_LEN * HEADS
    index = tl.program_id(0) // ROW_TILES
    request = tl.load(work_tiles + index * 4)
    if request < 0:
        return
    begin, end, is_split = load_range(work_tiles, index)
    head, token, line, live = query_rows(tl.program_id(0) % ROW_TILES, PAGES.num_heads, Q_LEN, HEADS, CONFIG.rows)
    query = q + (request.to(tl.int64) * ALL + line) * LOADS.first
    queries = load_pieces(query, live, LOADS.first, LOADS.first_columns)
    scale = tl.load(scales) * LOADS.units[0]
    if LOADS.dtype != queries.dtype:
        divisor = power_of_two_per_row((queries,))[:, None]
        queries = rounded(queries.to(tl.float32) / divisor, LOADS.dtype)
        scale *= divisor
    queries = split_columns(queries, LOADS.ways[0])
    if SCALED[0]:
        scale *= tl.load(k_scales + head * SCALE_STEPS[0])
    # Row sums per column take registers; with these sizes, as many programs fit as without them.
    SUM_PER_COLUMN: tl.constexpr = CONFIG.rows < 64 and (LOADS.ways[1] > 1 or LOADS.second_columns <= 64)
    acc, row_max, row_sum = attend_tiles(
        queries, scale, buffer, value_buffer, layers, table, last_ends, request, begin, end, head, token,
        PAGES, LOADS, TABLE, PAGES.block_size, Q_LEN, CAP, WINDOW, AHEAD, TRAILING, CONFIG,
        SUM_PER_COLUMN, False,
    )  # fmt: skip
    result = join_columns(acc, LOADS.ways[1]) * LOADS.units[1]
    if SCALED[1]:
        result *= tl.load(v_scales + head * SCALE_STEPS[1])
    store_results(
        (result,), row_max, row_sum, out, lse, split_out, split_lse, scales, index, request, is_split, line, live,
        line, ALL, LOADS.second, False,
    )  # fmt: skip
